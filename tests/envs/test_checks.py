"""What simulators are given, and what they return: nobody else's memory, and of the right form."""

from __future__ import annotations

import copy
import functools
import random

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv, VectorEnv
from gymnasium.vector.utils import batch_space
from gymnasium.wrappers import TimeLimit
from tests.probes import Steps

from rl8x import DQNConfig, NullTracker, PPOConfig, PQNConfig, Trainer, keys
from rl8x.envs import GymnasiumEnv, NumpyEnv, validate
from rl8x.envs.simulator import SimulatorEnv
from rl8x.replay.recording import record
from rl8x.trees import flatten_tree

BOX = spaces.Box(-np.inf, np.inf, (2,), np.float32)
SMALL = {"num_envs": 2, "seed": 0, "device": "cpu", "model_config": {"hidden_sizes": [4]}}


def spoil(part):
    """Write into an action, as environments do that scale or shift it in place."""
    if isinstance(part, dict):
        part = tuple(part.values())
    if isinstance(part, tuple):
        for each in part:
            spoil(each)
    elif getattr(part, "ndim", 0):
        part *= 0
        part += 7


class Reusing(gymnasium.Env):
    """Overwrites and returns the same arrays, writes into its actions, and counts the steps of its episodes of 3."""

    def __init__(self, action_space=BOX, *, nested=False, ends="terminated"):
        self.action_space, self.ends = action_space, ends
        self.observation_space = spaces.Dict(a=BOX, pair=spaces.Tuple([BOX, BOX])) if nested else BOX
        self.x, self.reward, self.flag = np.zeros(2, np.float32), np.zeros(()), np.zeros((), bool)
        self.obs = {"a": self.x, "pair": (self.x, self.x)} if nested else self.x
        self.info, self.taken = {"count": np.zeros(()), "nested": {"count": self.reward}}, []

    def reset(self, *, seed=None, options=None):
        for array in (self.x, self.reward, self.flag, self.info["count"]):
            array[...] = 0
        return self.obs, self.info

    def step(self, action):
        self.taken.append(copy.deepcopy(action))
        spoil(action)
        for array in (self.x, self.reward, self.info["count"]):
            array += 1
        self.flag[...] = self.x[0] == 3
        flags = (self.flag, False) if self.ends == "terminated" else (False, self.flag)
        return self.obs, self.reward, *flags, self.info


class Batch(VectorEnv):
    """A vector environment in arrays or tensors that writes into its actions; its results may be given."""

    metadata = {"autoreset_mode": AutoresetMode.SAME_STEP}  # noqa: RUF012

    def __init__(self, action_space=BOX, *, tensors=False, num_envs=2, **results):
        self.num_envs, self.tensors, self.results = num_envs, tensors, results
        self.single_observation_space, self.single_action_space = BOX, action_space
        self.observation_space, self.action_space = batch_space(BOX, num_envs), batch_space(action_space, num_envs)
        self.taken = []

    def form(self, array):
        return torch.as_tensor(array) if self.tensors else array

    def reset(self, *, seed=None, options=None):
        return self.results.get("reset", (self.form(np.zeros((self.num_envs, 2), np.float32)), {}))

    def step(self, actions):
        self.taken.append(copy.deepcopy(actions))
        spoil(actions)
        nothing = np.zeros(self.num_envs)
        given = {"obs": self.reset()[0], "rewards": self.form(nothing)}
        given |= {name: self.form(nothing.astype(bool)) for name in ("terminated", "truncated")}
        return tuple((given | {"info": {}} | self.results).values())


SPACES = {
    "unbounded": BOX,
    "bounded": spaces.Box(-1.0, 1.0, (2,), np.float32),
    "float64": spaces.Box(-1.0, 1.0, (2,), np.float64),
    "discrete": spaces.Discrete(3),
    "offset": spaces.MultiDiscrete([3, 4], start=[1, 2]),
    "choices": spaces.MultiDiscrete([3, 4]),
    "bits": spaces.MultiBinary(3),
    "dict": spaces.Dict(x=BOX, m=spaces.MultiDiscrete([3, 4])),
    "tuple": spaces.Tuple([spaces.MultiBinary(2), spaces.Box(-1.0, 1.0, (1,), np.float32)]),
}


def parts_of(element):
    """Return an action's innermost parts, by their keys."""
    if isinstance(element, dict):
        return [leaf for key in sorted(element) for leaf in parts_of(element[key])]
    if isinstance(element, tuple):
        return [leaf for part in element for leaf in parts_of(part)]
    return [np.asarray(element, np.float64)]


@pytest.mark.parametrize("kind", ["copies", "arrays", "tensors"])
@pytest.mark.parametrize("name", SPACES)
def test_the_actions_that_are_stored_are_those_that_the_simulator_got(name, kind):
    space, made = SPACES[name], []

    def make_one():
        made.append(Reusing(space))
        return made[-1]

    batch = Batch(space, tensors=kind == "tensors")
    env = GymnasiumEnv(make_one, 2) if kind == "copies" else GymnasiumEnv(batch)
    algorithm = PPOConfig(**SMALL, horizon=4).build(env)
    algorithm.collect()
    got = [np.stack(part) for part in zip(*map(parts_of, batch.taken), strict=True)]  # [step, copy, ...] each
    if kind == "copies":
        of_copies = [zip(*map(parts_of, one.taken), strict=True) for one in made[:2]]
        got = [np.stack([np.stack(each) for each in part], 1) for part in zip(*of_copies, strict=True)]
    stored = parts_of(algorithm.policy.env_actions(algorithm.rollout.tree(keys.ACTIONS)))
    for expected, part in zip(got, stored, strict=True):
        np.testing.assert_allclose(part[:4], expected)
        assert not (expected == 7).all()


class Own(SimulatorEnv):
    """An adapter of somebody's own that writes into its actions, and returns the same tensors in every step."""

    single_observation_space, single_action_space = spaces.Box(-9.0, 9.0, (1,)), BOX
    default_time_limit = None
    given: dict[str, torch.Tensor] = {}  # noqa: RUF012 - shapes that a test asks for

    def restart(self, noise):
        self.x, self.ones, self.no, self.taken = torch.zeros(2, 1), torch.ones(2), torch.zeros(2).bool(), []
        return self.first_carry({}, {}), self.x

    def advance(self, carry, actions, noise):
        self.taken.append(actions.clone())
        spoil(actions)
        self.x += 1
        self.ones.copy_(self.x[:, 0])
        carry, step = self.finish(carry, {}, {}, self.no, self.x, self.ones, self.no, self.no, self.x)
        return carry, step._replace(**self.given)


def test_an_adapter_of_ones_own_may_write_into_what_it_gets_and_gave():
    algorithm = PPOConfig(**SMALL, horizon=4).build(Own(2))
    algorithm.collect()
    env, rollout = algorithm.env, algorithm.rollout
    torch.testing.assert_close(rollout[keys.ACTIONS][:4], torch.stack(env.taken))
    assert rollout[keys.OBS][:, 0, 0].tolist() == [0.0, 1.0, 2.0, 3.0, 4.0]
    rows = record(None, env, 6).dataset.transitions
    assert rows[keys.OBS][:, 0].tolist() == [0.0, 1.0, 2.0] * 2
    assert (rows[keys.NEXT_OBS][:, 0].tolist(), rows[keys.REWARDS].tolist()) == ([1.0, 2.0, 3.0] * 2,) * 2
    torch.testing.assert_close(rows[keys.ACTIONS].view(2, 3, 2), torch.stack(env.taken, 1))
    arrays = NumpyEnv(env)
    seen = [arrays.reset()[0], *(arrays.step(np.zeros((2, 2), np.float32))[0] for _ in range(2))]
    assert [float(obs[0, 0]) for obs in seen] == [0.0, 1.0, 2.0]


@pytest.mark.parametrize("field", ["rewards", "terminated", "truncated"])
def test_an_adapter_of_ones_own_gives_one_number_for_each_copy(field, monkeypatch):
    env = Own(2)
    env.reset()
    monkeypatch.setattr(Own, "given", {field: torch.zeros(2, 1)})
    with pytest.raises(ValueError, match=rf"^Own.advance: `{field}` must be shaped \[2\], .* got Tensor \[2, 1\] of"):
        env.step(torch.zeros(2, 2))


@pytest.mark.parametrize("obs", [torch.zeros(2), torch.zeros(2, 1, dtype=torch.complex64), torch.zeros(1, 1)])
def test_an_adapter_of_ones_own_observes_elements_of_its_space(obs, monkeypatch):
    env = Own(2)
    env.reset()
    monkeypatch.setattr(Own, "given", {"obs": obs})
    with pytest.raises(ValueError, match=r"^Own.advance: the observation must be 2 elements of Box\(\[1\], float32\)"):
        env.step(torch.zeros(2, 2))


class Typed(Own):
    """Its numbers are of other types than it declares: rewards 1, 2, 3, and an end at the third step."""

    single_observation_space = spaces.Dict(a=spaces.Tuple([spaces.Discrete(5)]), b=spaces.Box(-9.0, 9.0, (1,)))
    obs_type, reward_type, flag_type = torch.float64, torch.float64, torch.uint8

    def seen(self):
        return {"more": self.x, "b": self.x.to(self.obs_type), "a": {"0": self.x[:, 0].to(torch.int8)}}

    def restart(self, noise):
        carry, _ = super().restart(noise)
        return carry, self.seen()

    def advance(self, carry, actions, noise):
        rewards = self.x[:, 0] + 1
        done = rewards == 3
        final = self.x + 1
        self.x = final.masked_fill(done.unsqueeze(1), 0)
        ends, final = done.to(self.flag_type), self.seen() | {"b": final.to(self.obs_type)}
        results = (self.seen(), rewards.to(self.reward_type), ends, ends * 0, final)
        return self.finish(carry, {}, {}, done, *results)


@pytest.mark.parametrize("types", [(torch.float64, torch.float64, torch.uint8), (torch.int32, torch.int64, torch.int8)])
@pytest.mark.parametrize("config", [PPOConfig, PQNConfig, DQNConfig])
def test_what_an_adapter_of_ones_own_returns_is_in_the_types_that_it_declares(config, types):
    def trained(*types):
        kind = type("Typed", (Typed,), dict(zip(("obs_type", "reward_type", "flag_type"), types, strict=True)))
        options = {"warmup_steps": 4, "batch_size": 4, "n_step": 2} if config is DQNConfig else {}
        kind.single_action_space = spaces.Discrete(2)
        trainer = Trainer(config(**SMALL, horizon=6, **options).build(kind(2)), tracker=NullTracker())
        rows = [trainer.step() for _ in range(2)]
        return trainer.algorithm, rows[-1]

    (usual, row), (other, same) = trained(torch.float32, torch.float32, torch.bool), trained(*types)
    assert (row["episodes/returns/mean"], row["episodes/lengths/mean"]) == (6.0, 3.0)
    measured = [name for name in row if not name.startswith(("profiling/", "memory/"))]
    assert {name: row[name] for name in measured} == {name: same[name] for name in measured}
    for name, tensor in usual.rollout.tensors.items():
        assert tensor.equal(other.rollout[name]), name
        assert tensor.dtype == other.rollout[name].dtype, name
    for one, another in zip(usual.policy.state_dict().values(), other.policy.state_dict().values(), strict=True):
        assert one.equal(another)


@pytest.mark.parametrize("tensors", [False, True])
@pytest.mark.parametrize("kind", [np.int64, np.uint8, np.bool_, np.float64])
def test_observations_of_a_vector_environment_are_normalised_whatever_their_type(kind, tensors):
    def moments(kind):
        batch = Batch(spaces.Discrete(2), tensors=tensors)
        batch.results = {"obs": batch.form(np.ones((2, 2), kind))}
        batch.reset = lambda **_: (batch.results["obs"], {})
        algorithm = PPOConfig(**SMALL, horizon=4, normalize_observations=True).build(batch)
        algorithm.collect()
        algorithm.step()
        assert algorithm.rollout[keys.OBS].dtype == torch.float32
        return algorithm.policy.state_dict()

    for one, other in zip(moments(kind).values(), moments(np.float32).values(), strict=True):
        assert one.equal(other)


@pytest.mark.parametrize("ends", ["terminated", "truncated"])
@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("mode", AutoresetMode)
@pytest.mark.parametrize("kind", ["sync", "async", "given", "wrapped"])
def test_an_environment_that_overwrites_what_it_returned_loses_nothing(kind, mode, nested, ends):
    def make_one():
        return Reusing(spaces.Discrete(2), nested=nested, ends=ends)

    if kind in ("given", "wrapped"):
        vector_env = SyncVectorEnv([make_one] * 2, autoreset_mode=mode)
        if kind == "wrapped":
            vector_env = gymnasium.wrappers.vector.TransformReward(vector_env, lambda rewards: rewards)
        env = GymnasiumEnv(vector_env, metrics={"count": "last"})
    else:
        options = {"vector_kwargs": {"autoreset_mode": mode}, "metrics": {"count": "last", "nested/count": "last"}}
        env = GymnasiumEnv(make_one, 2, vectorization=kind, **options)
    env.reset()
    for t in range(12):
        obs, rewards, terminated, truncated, info = env.step(torch.zeros(2, dtype=torch.int64))
        period = 4 if mode == AutoresetMode.NEXT_STEP else 3
        count = t % period + 1
        if count == 4:  # the row of a reset
            continue
        for part in flatten_tree("obs", info["final_obs"]).values():
            assert (part == count).all()
        for part in flatten_tree("obs", obs).values():
            assert (part == (0 if count == 3 and mode != AutoresetMode.NEXT_STEP else count)).all()
        assert rewards.tolist() == info["count"].tolist() == [count, count]
        assert (terminated if ends == "terminated" else truncated).tolist() == [count == 3] * 2
        assert not (truncated if ends == "terminated" else terminated).any()
    env.close()


def test_workers_that_run_already_and_would_lose_the_last_observation_are_refused():
    env = GymnasiumEnv(AsyncVectorEnv([Reusing] * 2, autoreset_mode=AutoresetMode.SAME_STEP))
    with pytest.raises(ValueError, match=r"^Reusing overwrites and returns one array, .*vectorization='async'"):
        PPOConfig(**SMALL, horizon=4).build(env)
    env.close()
    for mode in AutoresetMode:
        made = Fine if mode == AutoresetMode.SAME_STEP else Reusing
        env = GymnasiumEnv(AsyncVectorEnv([made] * 2, autoreset_mode=mode))
        validate(env)
        env.close()


# -- forms


class Fine(Steps):
    """What the following are variants of."""

    observation_space = spaces.Box(0.0, 9.0, (2,), np.float32)

    def observation(self):
        return np.full(2, self.time, np.float32)


X = np.zeros(2, np.float32)
PAIR = spaces.Tuple([BOX, spaces.Discrete(3)])


class OldWrapper(gymnasium.Wrapper):
    def step(self, action):
        obs, reward, terminated, truncated, info = self.env.step(action)
        return obs, reward, terminated or truncated, info


def returning(value):
    return lambda self, *_, **__: value


def variant(**attributes):
    """Return a class whose functions return what is given."""
    return type(
        "Old", (Fine,), {name: returning(v) if name in ("reset", "step") else v for name, v in attributes.items()}
    )


def reset_without_arguments(self):
    return X, {}


def reset_with_a_seed(self, seed=None):
    return X, {}


FORMS = {
    "reset alone": (variant(reset=X), r"Old.reset must return \(observation, info\), .* returned ndarray \[2\]"),
    "reset of three": (variant(reset=(X, 0, {})), r"Old.reset must return .* it returned a tuple of 3 values\."),
    "no arguments": (
        type("Old", (Fine,), {"reset": reset_without_arguments}),
        "Old.reset must take .*unexpected keyword argument 'seed'",
    ),
    "no options": (
        type("Old", (Fine,), {"reset": reset_with_a_seed}),
        "Old.reset must take .*keyword argument 'options'",
    ),
    "step of four": (variant(step=(X, 1.0, False, {})), "Old.step must return .*truncated, info.* a tuple of 4 values"),
    "info of a reset": (variant(reset=(X, None)), "Old.reset must return .*a dict as `info`; got None"),
    "info of a step": (variant(step=(X, 1.0, False, False, [])), "Old.step must .* a dict as `info`; got a list of 0"),
    "shape": (variant(reset=(X[:1], {})), r"Old.reset: the observation must be elements of Box\(\[2\], .* \[1\]"),
    "later shape": (variant(step=(X[None], 1.0, False, False, {})), r"Old.step: the observation must .* \[1, 2\]"),
    "type": (variant(observation_space=spaces.Box(0, 9, (2,), np.uint8)), "Old.reset: .* got ndarray .* float32"),
    "number": (variant(observation_space=spaces.Discrete(3), reset=(1.5, {})), r"elements of Discrete\(3\).* got 1.5"),
    "no parts": (variant(observation_space=spaces.Dict(a=BOX)), r"the parts of Dict\(a: .* got ndarray \[2\]"),
    "inner": (
        variant(observation_space=PAIR, reset=((X[:1], 0), {})),
        r"the observation\['0'\] must be elements of Box",
    ),
    "reward": (
        variant(step=(X, X[:1], False, False, {})),
        r"Old.step: `reward` must be one number.* got ndarray \[1\]",
    ),
    "terminated": (variant(step=(X, 1.0, X == 1, False, {})), r"Old.step: `terminated` must .* \[2\] of bool"),
    "truncated": (variant(step=(X, 1.0, False, {}, {})), "Old.step: `truncated` must be one number.* got a dict"),
    "wrapper": (lambda: OldWrapper(Fine()), "OldWrapper.step must return .* a tuple of 4 values"),
    "inside of one": (lambda: TimeLimit(OldWrapper(Fine()), 5), "OldWrapper.step must return .* a tuple of 4 values"),
    "no space": (variant(observation_space=None), "Old: declare `observation_space`.* got None"),
    "no environment": (lambda: object(), "`env` must make a gymnasium.Env, one copy; it made object"),
}


@pytest.mark.parametrize("vectorization", ["sync", "async"])
@pytest.mark.parametrize("case", FORMS)
def test_what_has_not_the_form_of_gymnasiums_api_is_told_at_build(case, vectorization):
    make_one, message = FORMS[case]
    with pytest.raises((TypeError, ValueError), match=message) as caught:
        PPOConfig(**SMALL, horizon=4).build(functools.partial(GymnasiumEnv, make_one, vectorization=vectorization))
    assert "\n" not in str(caught.value)


IN_PARTS = {"observation_space": spaces.Dict(a=BOX), "observation": lambda self: {"a": X}}
OBS = r"Old.step: the (final )?observation"
OF_RESULTS = ("reset alone", "step of four", "info of a reset", "info of a step")
LATER = {name: FORMS[name] for name in (*OF_RESULTS, "reward")}
LATER |= {
    "no info": (variant(step=(X, 1.0, True, False, None)), "`info`; got None"),
    "text as reward": (variant(step=(X, "x", True, False, {})), "Old.step: `reward` must be one number.*; got 'x'"),
    "shape": (variant(step=(X[:1], 1.0, False, False, {})), rf"{OBS} must be elements of Box.*; got ndarray \[1\]"),
    "last shape": (variant(step=(X[:1], 1.0, False, True, {})), rf"{OBS} must be elements of Box.*; got ndarray \[1\]"),
    "kind": (variant(step=(X * 1j, 1.0, True, False, {})), f"{OBS} must be .*; got .* of complex64"),
    "text": (variant(step=("x", 1.0, False, False, {})), f"{OBS} must be elements of Box.*; got 'x'"),
    "no part": (
        variant(**IN_PARTS, step=({"b": X}, 1.0, False, True, {})),
        f"{OBS} must have the parts of Dict.*; got b",
    ),
    "part": (variant(**IN_PARTS, step=({"a": X[:1]}, 1.0, True, False, {})), rf"{OBS}\['a'\] must be elements of"),
}


WAYS = [("sync", ["energy"]), ("async", ()), ("async", ["energy"])]


@pytest.mark.parametrize(
    ("case", "vectorization", "metrics", "mode"),
    [
        *((case, "sync", (), mode) for case in LATER for mode in AutoresetMode),
        *((case, *way, AutoresetMode.SAME_STEP) for case in (*OF_RESULTS, "no info") for way in WAYS),
    ],
)
def test_what_has_no_form_from_some_step_on_is_told_there(case, vectorization, metrics, mode):
    kind, message = LATER[case]

    class Old(kind):
        """Ends its episodes after a step, and is as it was only in the first of them."""

        episodes = 0

        def reset(self, *, seed=None, options=None):
            self.episodes += 1
            return Fine.reset(self, seed=seed) if self.episodes < 2 else super().reset(seed=seed, options=options)

        def step(self, action):
            good = self.observation(), 1.0, True, False, {"energy": 1.0}
            return good if self.episodes < 2 else super().step(action)

    options = {"vectorization": vectorization, "vector_kwargs": {"autoreset_mode": mode}}
    env = GymnasiumEnv(Old, 2, metrics=metrics, **options)
    env.reset()
    with pytest.raises((TypeError, ValueError), match=message) as caught:  # noqa: PT012 - in the first reset or after it
        for _ in range(3):
            env.step(torch.zeros(2, dtype=torch.int64))
    assert "\n" not in str(caught.value)
    env.close()


class Watched(Fine):
    """Draws from global generators, has legal actions, and keeps what was done with its copies."""

    made: list[Watched] = []  # noqa: RUF012
    observation_space = spaces.Dict(x=BOX, action_mask=spaces.MultiBinary(2))

    def __init__(self):
        self.made.append(self)
        self.calls = []

    def observation(self):
        return {"x": np.random.rand(2).astype(np.float32), "action_mask": np.array([0, 1], np.int8)}

    def reset(self, *, seed=None, options=None):
        self.calls.append("reset")
        np.random.seed(seed)
        random.seed(seed)
        torch.manual_seed(seed or 0)
        return self.observation(), {}

    def step(self, action):
        self.calls.append(action)
        if action != 1:
            raise ValueError("illegal")
        return self.observation(), 1.0, False, False, {}

    def close(self):
        self.calls.append("close")


def test_trying_takes_a_legal_action_of_a_copy_of_its_own_and_leaves_all_else_as_it_was():
    Watched.made.clear()
    env = GymnasiumEnv(Watched, 2)
    before = np.random.get_state()[1].copy(), random.getstate(), torch.get_rng_state()
    with pytest.warns(RuntimeWarning, match=r"^Watched uses the global generator of random and of numpy.random and of"):
        validate(env)
    assert (np.random.get_state()[1] == before[0]).all()
    assert random.getstate() == before[1]
    assert torch.equal(torch.get_rng_state(), before[2])
    assert [one.calls for one in Watched.made] == [[], [], ["reset", 1, "close"]]
    env.close()


def test_a_simulator_of_which_there_is_one_only_is_not_tried():
    the_one = Watched()
    for make_one in (lambda: the_one, iter([the_one]).__next__):
        the_one.calls.clear()
        env = GymnasiumEnv(make_one, 1)
        validate(env)
        assert the_one.calls == []


def failing(self, action):
    raise KeyError("mine")


def test_errors_of_an_environments_own_are_left_to_the_training():
    fails = type("Fails", (Fine,), {"step": failing})
    algorithm = PPOConfig(**SMALL, horizon=4).build(functools.partial(GymnasiumEnv, fails))
    with pytest.raises(KeyError, match="mine"):
        algorithm.collect()


BATCHES = {
    "rewards": ({"rewards": np.ones((4, 1))}, r"Batch.step: `rewards` must be shaped \[4\], .* got ndarray \[4, 1\]"),
    "tensors": ({"rewards": torch.ones(4, 1)}, r"`rewards` must be shaped \[4\], .* got Tensor \[4, 1\] of float32"),
    "terminated": ({"terminated": np.zeros(3, bool)}, r"`terminated` must be shaped \[4\], .* got ndarray \[3\]"),
    "truncated": ({"truncated": False}, r"`truncated` must be shaped \[4\], one number for each copy; got False"),
    "observation": ({"obs": np.zeros((4, 1, 2))}, r"Batch.step: the observation must be 4 elements of Box\(\[2\]"),
    "final observation": (
        {"terminated": np.ones(4, bool), "info": {"final_obs": np.zeros((4, 1))}},
        r"Batch.step: the final observation must be 4 elements of Box\(\[2\].*; got ndarray \[4, 1\]",
    ),
    "one observation": ({"reset": (X, {})}, r"Batch.reset: the observation must be 4 elements of .* got ndarray \[2\]"),
    "reset alone": ({"reset": np.zeros((4, 2))}, r"Batch.reset must return \(observation, info\)"),
}


@pytest.mark.parametrize("case", BATCHES)
def test_shapes_of_a_vector_environment_are_told_in_the_first_step(case):
    results, message = BATCHES[case]
    algorithm = PPOConfig(**SMALL | {"num_envs": 4}, horizon=4).build(GymnasiumEnv(Batch(num_envs=4, **results)))
    with pytest.raises((TypeError, ValueError), match=message) as caught:
        algorithm.collect()
    assert "\n" not in str(caught.value)


@pytest.mark.filterwarnings("ignore:.*does not give the observation before it")
def test_lists_and_whole_numbers_are_numbers():
    env = GymnasiumEnv(Batch(num_envs=3, rewards=[1, 2, 3], terminated=[0, 0, 1]))
    env.reset()
    _, rewards, terminated, *_ = env.step(torch.zeros(3, 2))
    assert (rewards.tolist(), terminated.tolist()) == ([1.0, 2.0, 3.0], [False, False, True])
