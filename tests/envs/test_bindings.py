"""Parameters of Gymnasium's environments by name: what is set, when, and what is recorded."""

from __future__ import annotations

import itertools

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv, VectorEnv
from tests.checkpoint.legal import described

from rl8x import PPOConfig
from rl8x.checkpoint.load import problems_of
from rl8x.envs import Attribute, Function, GymnasiumEnv, ModelField, Scale
from rl8x.envs.bindings import binding_of
from rl8x.randomization import Choice, Grid, Normal, Scheduled, Uniform

KINDS = (Attribute, ModelField, Scale, Function)


def derived(name):
    """Set an attribute of CartPole with what is derived from it."""

    def set_value(env, value):
        setattr(env, name, value)
        env.total_mass = env.masspole + env.masscart
        env.polemass_length = env.masspole * env.length

    return set_value


CARTPOLE = {name: derived(name) for name in ("length", "masspole", "masscart")} | {"gravity": "gravity"}


def by_hand(seed, values):
    """Make a single CartPole whose attributes are set by hand."""
    env = gymnasium.make("CartPole-v1")
    for name, value in values.items():
        setattr(env.unwrapped, name, float(np.float32(value)))
    env.unwrapped.total_mass = env.unwrapped.masspole + env.unwrapped.masscart
    env.unwrapped.polemass_length = env.unwrapped.masspole * env.unwrapped.length
    return env, env.reset(seed=seed)[0]


class Echo(gymnasium.Env):
    """Shows its parameter from the reset on; every episode has its own length."""

    observation_space = spaces.Box(-np.inf, np.inf, (2,), np.float64)
    action_space = spaces.Discrete(2)

    def __init__(self):
        self.wind, self.count, self.gusts = 1.0, 2, np.array([1.0, 2.0])

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.left = int(self.np_random.integers(1, 5))
        return np.array([self.wind, self.left]), {}

    def step(self, action):
        self.left -= 1
        return np.array([self.wind, self.left]), self.wind, self.left == 0, False, {}


class Many(VectorEnv):
    """A simulator of many copies with an attribute for each, as those on GPUs are."""

    num_envs = 3
    single_observation_space = spaces.Box(-np.inf, np.inf, (2,), np.float32)
    single_action_space = spaces.Discrete(2)

    def __init__(self, mode):
        self.metadata = {"autoreset_mode": mode}
        self.mass, self.drag, self.mode = torch.ones(3), torch.zeros(3), mode

    def reset(self, *, seed=None, options=None):
        mask = torch.ones(3, dtype=torch.bool) if not options else torch.as_tensor(options["reset_mask"])
        self.time = torch.where(mask, 0, getattr(self, "time", torch.zeros(3)))
        self.done = torch.zeros(3, dtype=torch.bool)
        return self.observation(), {}

    def observation(self):
        return torch.stack((self.mass + self.drag, self.time), -1)

    def step(self, actions):
        self.time = torch.where(self.done, 0, self.time + 1)
        reset = self.done
        self.done = (self.time >= torch.tensor([2, 3, 4])) & ~reset
        return self.observation(), self.mass.clone(), self.done.clone(), torch.zeros(3, dtype=torch.bool), {}


@pytest.mark.parametrize(
    ("kind", "mode"),
    [
        *itertools.product(["sync", "async"], AutoresetMode),
        *itertools.product(["many"], [AutoresetMode.NEXT_STEP, AutoresetMode.DISABLED]),
    ],
)
def test_an_episode_is_of_its_own_parameters_from_its_reset_to_its_end(kind, mode):
    if kind == "many":
        env = GymnasiumEnv(Many(mode), parameters={"wind": Scale(Attribute("mass", per_copy=True))})
    else:
        options = {"vectorization": kind, "vector_kwargs": {"autoreset_mode": mode}}
        env = GymnasiumEnv(Echo, 3, seed=0, parameters={"wind": "wind"}, **options)
    obs, _ = env.reset(config={"wind": Uniform(2.0, 3.0)})
    first = obs[:, 0].tolist()
    assert first == env.carry["parameters"]["wind"].tolist()
    drawn = []
    for _ in range(40):
        before = env.carry["parameters"]["wind"]
        carry, step = env.advance(env.carry, torch.zeros(3, dtype=torch.int64), env.noise(1)[0])
        env.carry = carry
        # What is recorded is what the simulator shows, before and after a reset.
        assert torch.equal(step.obs[:, 0], carry["parameters"]["wind"])
        valid = torch.ones(3, dtype=torch.bool) if step.valid is None else step.valid
        assert torch.equal(step.final_obs[valid, 0], before[valid])
        assert torch.equal(step.rewards[valid], before[valid])
        begun = ~valid if mode == AutoresetMode.NEXT_STEP else step.terminated
        assert torch.equal(before != carry["parameters"]["wind"], begun)
        drawn += carry["parameters"]["wind"][begun].tolist()
    assert len({*drawn, *first}) == len(drawn) + 3 > 20
    assert all(2.0 <= value <= 3.0 for value in drawn)
    env.close()


def test_defaults_are_read_and_come_back_exactly():
    plain = GymnasiumEnv("CartPole-v1", 2, seed=3)
    env = GymnasiumEnv("CartPole-v1", 2, seed=3, parameters=CARTPOLE | {"pull": Scale("gravity", high=3.0)})
    assert (env.parameters["masspole"].default, env.parameters["pull"].default) == (0.1, 1.0)
    assert [env.parameters[name].bounds for name in ("length", "pull")] == ["[0, inf]", "[0, 3]"]
    env.reset(config={"masspole": 0.7, "pull": 2.0, "length": Normal(0.5, 0.1)})
    assert env.vector_env.get_attr("gravity") == (19.6, 19.6)
    for _ in range(20):
        env.step(torch.tensor([0, 1]))
    # A float32 of 0.1 is another number: what nobody names must be the simulator's own.
    assert torch.equal(env.reset(seed=3, config={})[0], plain.reset(seed=3)[0])
    assert env.vector_env.get_attr("masspole") == (0.1, 0.1)
    for _ in range(30):
        assert torch.equal(env.step(torch.tensor([0, 1]))[0], plain.step(torch.tensor([0, 1]))[0])


def test_the_simulator_depends_on_the_last_values_alone():
    factors = {"pull": Scale("gravity", high=3.0), "push": Scale("gravity", high=3.0)}  # gravity has three names
    env = GymnasiumEnv("CartPole-v1", 1, seed=0, parameters=CARTPOLE | factors)
    names = ("length", "masspole", "masscart", "gravity", "total_mass", "polemass_length")
    several = [{"length": 2.0, "masspole": 0.5}, {"masspole": 3.0, "gravity": 1.0}, {}, {"masscart": 0.25}]
    for config in [*several, *({name: 2.0} for name in ("push", "pull", "gravity", "pull", "push"))]:
        env.reset(config=config)
        pulls = any(name in factors for name in config)
        fresh, _ = by_hand(0, {} if pulls else config)
        fresh.unwrapped.gravity *= 2.0 if pulls else 1.0
        for name in names:
            assert env.vector_env.get_attr(name)[0] == getattr(fresh.unwrapped, name)


def test_paths_lead_to_elements_and_whole_arrays():
    class Nested(Echo):
        def __init__(self):
            super().__init__()
            self.limits, self.inner, self.wide = {"x": 4.0}, Echo(), torch.tensor([1.0, 1.0])
            self.counts, self.numbers = np.array([2, 2]), torch.tensor([2, 2])

    parameters = {
        "first": "gusts[0]",
        "limit": "limits['x']",
        "deep": "inner.gusts[1]",
        "wide": "wide",
        "count": "count",
        "counts": "counts",
        "numbers": "numbers",
        "all": Scale(["inner.wind", Attribute("limits[x]")]),
    }
    env = GymnasiumEnv(Nested, 1, parameters=parameters)
    assert [env.parameters[name].default for name in parameters] == [1.0, 4.0, 2.0, 1.0, 2.0, 2.0, 2.0, 1.0]
    env.reset(config={"first": 7, "deep": 5, "wide": 3, "count": 4, "counts": 5, "numbers": 6, "all": 3})
    inside = env.vector_env.envs[0].unwrapped
    arrays = inside.gusts, inside.inner.gusts, inside.wide, inside.counts, inside.numbers
    assert [each.tolist() for each in arrays] == [[7.0, 2.0], [1.0, 5.0], [3.0, 3.0], [5, 5], [6, 6]]
    assert (inside.count, type(inside.count), inside.inner.wind, inside.limits) == (4, int, 3.0, {"x": 12.0})
    for name in ("count", "counts", "numbers"):
        with pytest.raises(ValueError, match=rf"'{name}' is a whole number; got 2\.5\. Draw whole ones with Choice"):
            env.reset(config={name: 2.5})


def test_a_reset_that_sets_the_attribute_itself_is_told():
    class Stubborn(Echo):
        def reset(self, **kwargs):
            self.wind = 1.0
            return super().reset(**kwargs)

    env = GymnasiumEnv(Stubborn, 1, parameters={"wind": "wind"})
    env.reset()
    with pytest.raises(RuntimeError, match=r"reset\(\) of Stubborn sets Attribute\('wind'\) itself"):
        env.reset(config={"wind": 2.0})


@pytest.mark.long
def test_processes_share_values_also_where_they_are_not_forked():
    options = {"vectorization": "async", "vector_kwargs": {"context": "spawn"}}
    env = GymnasiumEnv("CartPole-v1", 1, parameters={"length": "length"}, **options)
    for length in (0.25, 2.0):
        env.reset(config={"length": length})
        assert env.vector_env.get_attr("length") == (length,)
    env.close()


def test_given_vector_environments():
    sync = GymnasiumEnv(SyncVectorEnv([Echo] * 2), parameters={"wind": "wind"})
    assert torch.equal(sync.reset(config={"wind": [2.0, 3.0]})[0][:, 0], torch.tensor([2.0, 3.0]))
    running = AsyncVectorEnv([Echo])
    with pytest.raises(ValueError, match="processes of an AsyncVectorEnv run already"):
        GymnasiumEnv(running, parameters={"wind": "wind"})
    assert running.closed


def test_a_vectorised_form_has_one_value_for_all_copies():
    env = GymnasiumEnv("CartPole-v1", 3, vectorization="vector", seed=0, parameters={"gravity": "gravity"})
    first, _ = env.reset(config={"gravity": 3.0})
    assert env.vector_env.gravity == 3.0
    single, _ = by_hand(0, {"gravity": 3.0})
    single.unwrapped.state = first[1].double().numpy()
    np.testing.assert_allclose(env.step(torch.ones(3, dtype=torch.int64))[0][1], single.step(1)[0], rtol=1e-6)
    env.reset(config={"gravity": Grid([4.0])})
    assert env.vector_env.gravity == 4.0
    for value in ([1.0, 2.0, 3.0], Uniform(1.0, 2.0), Grid([1.0, 2.0])):
        with pytest.raises(ValueError, match=r"env_config\['gravity'\] must be a number for all copies: Attribute"):
            env.reset(config={"gravity": value})


def set_drag(env, values):
    assert values.shape == (3,)
    env.drag = 10.0 * values


PER_COPY = {"mass": Scale(Attribute("mass", per_copy=True)), "drag": Function(set_drag, default=0.0, low=0.0)}


def test_one_that_resets_its_copies_itself_keeps_its_values_until_all_are_reset():
    env = GymnasiumEnv(Many(AutoresetMode.SAME_STEP), parameters=PER_COPY)
    assert env.reset(config={"mass": 2.0, "drag": Grid([1.0, 2.0])})[0][:, 0].tolist() == [12.0, 22.0, 12.0]
    assert env.reset(config={})[0][:, 0].tolist() == [1.0] * 3
    with pytest.raises(ValueError, match="the simulator starts episodes within its step"):
        env.reset(config={"drag": Uniform(0.0, 1.0)})


def test_a_schedule_moves_in_a_simulator_too():
    env = GymnasiumEnv(Echo, 2, parameters={"wind": "wind"})
    assert env.reset(config={"wind": Scheduled([(0, 2.0), (10, 4.0)])})[0][:, 0].tolist() == [2.0, 2.0]
    env.parameter_state.update_from_metrics({"env/steps": 5})
    assert env.reset()[0][:, 0].tolist() == [3.0, 3.0]


FORMS = [
    ("length", Attribute("length")),
    ({"attribute": "length", "low": 0.1, "unit": "m"}, Attribute("length", low=0.1, unit="m")),
    ({"model_field": "body_mass", "of": "torso", "index": 0}, ModelField("body_mass", "torso", 0)),
    ({"scale": "gravity", "high": 3.0}, Scale(Attribute("gravity"), high=3.0)),
    (
        {"scale": [{"model_field": "body_mass"}, {"attribute": "opt.x"}]},
        Scale((ModelField("body_mass"), Attribute("opt.x"))),
    ),
]


@pytest.mark.parametrize(("form", "binding"), FORMS)
def test_plain_forms(form, binding):
    assert binding_of(form, KINDS) == binding
    assert binding_of(binding.to_dict(), KINDS) == binding
    assert binding_of(binding, KINDS) == binding


def test_training_records_parameters_and_is_built_again_from_them():
    parameters = {"length": Attribute("length", low=0.1, high=2.0), "pull": Scale("gravity")}
    config = PPOConfig(num_envs=2, horizon=8, seed=0, device="cpu", model_config={"hidden_sizes": [4]})
    algorithm = config.build("CartPole-v1", parameters=parameters)
    algorithm.collect(env_config={"length": Choice([0.25, 1.0])})
    assert set(algorithm.env.carry["parameters"]["length"].tolist()) <= {0.25, 1.0}
    assert algorithm.params["env.parameters.length"] == "Attribute('length')"
    spec, resolved = described(algorithm)
    assert problems_of(spec, resolved) == []
    plain = spec.env.env_kwargs["parameters"]
    assert plain["length"] == {"attribute": "length", "low": 0.1, "high": 2.0}
    again = GymnasiumEnv("CartPole-v1", 2, parameters=plain)
    assert again.parameters == algorithm.env.parameters
    twin = algorithm.env.another(3)
    assert twin.parameters == algorithm.env.parameters
    assert twin.reset(config={"length": Grid([0.2, 0.4, 0.6])})[0].shape == (3, 4)
    assert algorithm.env.vector_env.get_attr("length")[0] in (0.25, 1.0)
