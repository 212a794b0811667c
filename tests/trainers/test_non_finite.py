import functools
import itertools
import json
import math

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from tests import probes
from tests.probes import traced_only
from tests.trainers.helpers import at_step, make, run, weights

from rl8x import DQNConfig, MemoryTracker, PPOConfig, PQNConfig, SACConfig, TD3Config, keys
from rl8x.checkpoint import Checkpoints, listed, read
from rl8x.envs import CartPole, GymnasiumEnv, Spread
from rl8x.rollouts.statistics import Stats
from rl8x.trainers import NonFiniteError, Trainer
from rl8x.trainers.train_step import MAX_IN_A_ROW

QUANTITIES = ["observations", "actions", "rewards", "losses", "gradients", "parameters"]


def inject(trainer, quantity, value):
    """Have the next step meet a bad number in copy 5 of the environment, or in the update."""
    algorithm, env, policy = trainer.algorithm, trainer.algorithm.env, trainer.algorithm.policy
    if quantity in ("observations", "rewards"):
        spoil_steps(env, 3, "obs" if quantity == "observations" else "rewards", 5, value)
    elif quantity == "actions":
        sample = policy.distribution.sample

        def bad_sample(*args):
            actions, logp = sample(*args)
            return actions, logp.index_fill(0, torch.tensor([5]), value)

        policy.distribution.sample = bad_sample
    elif quantity == "losses":
        logp = policy.distribution.logp
        policy.distribution.logp = lambda *args: logp(*args) * value
    elif quantity == "gradients":
        next(policy.parameters()).register_hook(lambda gradient: gradient * value)
    else:
        step_weights = algorithm.updater.step

        def bad_step(*args):
            step_weights(*args)
            next(policy.parameters()).data.view(-1)[0] = value

        algorithm.updater.step = bad_step


def spoil_steps(env, number, name, row, value):
    """Have a part of the environment's n-th next step be bad in a row."""
    advance, calls = env.advance, iter(range(10_000))

    def bad_advance(*args):
        carry, step = advance(*args)
        changed = getattr(step, name).clone()
        if next(calls) == number:
            changed[row] = value
        return carry, step._replace(**{name: changed})

    env.advance = bad_advance


def at(step, quantity, value=float("nan")):
    """Put a number that is not finite into the step after this one."""
    return at_step(step, lambda trainer: inject(trainer, quantity, value))


def make_one(env=CartPole, *, trainer=None, **options):
    options = {"num_sgd_iters": 1, "num_envs": 6} | options
    return make(env, trainer={"num_eval_envs": 2, **(trainer or {})}, **options)


LEARNED = ("losses", "gradients", "parameters")


@pytest.mark.parametrize(
    ("quantity", "value"),
    [*((each, math.nan) for each in QUANTITIES), ("rewards", -math.inf), *((each, math.inf) for each in LEARNED)],
)
def test_each_quantity_is_named_in_its_step(quantity, value, tmp_path):
    trainer = make_one(trainer={"checkpoints": tmp_path, "callbacks": [at(2, quantity, value)]})
    with pytest.raises(NonFiniteError, match=f"^{quantity} not finite at step 3, in ") as error:
        run(trainer, max_steps=5)
    found = error.value.diagnosis
    assert (found["quantity"], found["step"]) == (quantity, 3)
    if quantity in ("observations", "actions", "rewards"):
        assert found["environments"] == [5]
        assert "in environments 5, slot" in str(error.value)
    if quantity in ("observations", "rewards"):
        assert found["slot"] == 4 if quantity == "observations" else 3
    if quantity == "parameters":
        assert found["parameters"] == [next(trainer.algorithm.policy.named_parameters())[0]]
    tracker = trainer.tracker
    assert tracker.status == "FAILED"
    assert "Failed after 3 steps, 144 transitions: " in tracker.description
    assert json.loads(tracker.texts["diagnosis.json"])["quantity"] == quantity
    assert tracker.texts["diagnosis.txt"].startswith(f"{quantity} not finite")
    assert tracker.tags["rl8x.non_finite"].startswith(quantity)
    assert json.loads((tmp_path / "diagnosis-step-3.json").read_text())["step"] == 3
    assert read(listed(tmp_path)[-1]).metadata["counters"][keys.STEPS] == 0  # good, and from before


def test_of_several_agents_the_copy_is_named():
    trainer = make_one(functools.partial(Spread, num_agents=2), num_envs=3)
    spoil_steps(trainer.algorithm.env, 0, "rewards", 3 + 1, math.nan)  # of the second agent in the second copy
    with pytest.raises(NonFiniteError, match=r"^rewards not finite at step 1, in environments 1, slot 0") as error:
        trainer.step()
    found = error.value.diagnosis
    assert (found["environments"], found["num_environments"], found["num_envs"]) == ([1], 1, 3)


class EndsAtInfinity(probes.Probe):
    """Counts its steps; what the third copy ends with is infinite, which nothing but its time limit sees."""

    default_time_limit = 6
    bad = 0.0  # while it is validated

    def transition(self, state, actions, parameters, noise):
        none = torch.zeros(self.num_envs)
        return {"x": state["x"] + 1}, none, none.bool()

    def observe(self, state, parameters):
        third = (torch.arange(self.num_envs) == 2).unsqueeze(1)
        return torch.where(third & (state["x"] == 6), self.bad, state["x"])


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("how", ["eager", "an accelerator's way", "compiled horizon", "compiled steps", "simulator"])
def test_what_a_cut_episode_ends_with_is_named_before_a_normaliser_clips_it(how, bad, monkeypatch):
    traced_only(monkeypatch)
    monkeypatch.setattr(EndsAtInfinity, "capturable", how != "simulator")
    if how == "compiled steps":
        monkeypatch.setattr("rl8x.execution.execution._SHARED_WORK", 0)
    execution = "compile" if how.startswith("compiled") else "eager"
    trainer = make_one(EndsAtInfinity, normalize_observations=True, execution=execution, horizon=8)
    monkeypatch.setattr(EndsAtInfinity, "bad", bad)
    trainer.algorithm.execution.host_looks = how != "an accelerator's way"
    text = "observations not finite at step 1, in environments 2, slot 5 of the horizon, in the final observation of"
    with pytest.raises(NonFiniteError, match=text) as error:
        trainer.step()
    assert bool(trainer.algorithm.rollout[keys.OBS].isfinite().all())
    assert error.value.diagnosis["final"] is True
    assert error.value.diagnosis["rollout"]["observations"]["num_environments_in_rollout"] == 1


class EndsInNaN(gymnasium.Env):
    """Counts three steps; the observation of the end is NaN, as of a simulator that has exploded."""

    def __init__(self, action_space, is_cut, *, nested=False):
        box = spaces.Box(-9.0, 9.0, (1,))
        self.action_space, self.is_cut, self.nested = action_space, is_cut, nested
        self.observation_space = spaces.Dict(x=box, n=spaces.Discrete(4)) if nested else box

    def observation(self, number):
        x = np.array([number], np.float32)
        return {"x": x, "n": self.time} if self.nested else x

    def reset(self, *, seed=None, options=None):
        self.time = 0
        return self.observation(0), {}

    def step(self, action):
        self.time += 1
        ended = self.time == 3
        return (
            self.observation(math.nan if ended else self.time),
            1.0,
            ended and not self.is_cut,
            ended and self.is_cut,
            {},
        )


TWO, INTERVAL = spaces.Discrete(2), spaces.Box(-1.0, 1.0, (1,))
NARROW = {"model_config": {"hidden_sizes": [4]}}
REPLAYED = {"horizon": 8, "warmup_steps": 8, "batch_size": 8, **NARROW}
LEARNERS = {
    "ppo": (PPOConfig, TWO, {"horizon": 8, "normalize_observations": True, **NARROW}),
    "ppo-lstm": (PPOConfig, INTERVAL, {"horizon": 8, "model": "lstm", "model_config": {"hidden_size": 4}}),
    "pqn": (PQNConfig, TWO, {"horizon": 8, "sgd_minibatch_size": 8, **NARROW}),
    "dqn": (DQNConfig, TWO, REPLAYED),
    "dqn of 3 steps": (DQNConfig, TWO, REPLAYED | {"n_step": 3}),
    "sac": (SACConfig, INTERVAL, REPLAYED | {"normalize_observations": True}),
    "td3": (TD3Config, INTERVAL, REPLAYED),
}


@pytest.mark.parametrize(
    ("name", "mode"),
    [
        *((name, AutoresetMode.SAME_STEP) for name in LEARNERS),
        *itertools.product(("ppo", "dqn of 3 steps"), (AutoresetMode.NEXT_STEP, AutoresetMode.DISABLED)),
    ],
)
def test_nan_that_an_episode_terminated_with_is_ignored_and_nan_that_is_bootstrapped_from_is_not(name, mode):
    config, action_space, options = LEARNERS[name]
    nested = name in ("ppo", "td3")
    for is_cut in (False, True):
        copies = [functools.partial(EndsInNaN, action_space, is_cut, nested=nested)] * 2
        env = GymnasiumEnv(SyncVectorEnv(copies, autoreset_mode=mode))
        trainer = Trainer(
            config(num_envs=2, seed=0, device="cpu", execution="eager", **options).build(env), tracker=MemoryTracker()
        )
        if is_cut:
            with pytest.raises(NonFiniteError, match=r"observations .* in the final observation of an episode that"):
                trainer.step()
            continue
        rows = [trainer.step() for _ in range(4)]
        assert not [stat for stat in rows[-1] if stat.startswith("finite/")]
        assert rows[-1]["episodes/returns/mean"] == 3.0
        assert weights(trainer).isfinite().all()
        assert all(map(math.isfinite, trainer.eval().values()))
        # The simulator's own word is not touched where it is asked.
        env.reset()
        finals = [env.step(torch.as_tensor(env.action_space.sample()))[4]["final_obs"] for _ in range(3)]
        last = finals[-1]["x"] if nested else finals[-1]
        assert last.isnan().all()


@pytest.mark.parametrize("quantity", ["observations", "actions", "rewards", "losses", "gradients"])
def test_skip_takes_the_update_back_and_goes_on(quantity):
    before, seen = [], []

    def watch(trainer, stats):
        before.append(weights(trainer))
        seen.append(stats)

    trainer = make_one(trainer={"on_non_finite": "skip", "callbacks": [watch, at(2, quantity)]})
    with pytest.warns(RuntimeWarning, match=f"{quantity} not finite at step 3, .*as they were before the step"):
        trainer.step(), trainer.step(), trainer.step()
    assert torch.equal(before[2], before[1])
    assert trainer.state[keys.STEPS] == 3
    if quantity in ("losses", "gradients", "actions"):
        return  # these stay broken in this test
    later = trainer.step()
    assert math.isfinite(later["losses/total"])
    assert not torch.equal(before[3], before[2])
    assert bool(weights(trainer).isfinite().all())


def test_a_step_that_is_taken_back_leaves_no_priorities_and_keeps_those_of_the_steps_before(monkeypatch):
    """Also where the replay gets nothing in it, as of a horizon that is not finite."""
    small = {"num_envs": 2, "horizon": 4, "batch_size": 8, "warmup_steps": 8, "buffer_size": 64, "device": "cpu"}
    config = DQNConfig(**small, seed=1, prioritized=True, updates_per_sample=1, execution="eager")
    trainer = Trainer(config.build(CartPole), tracker=MemoryTracker(), on_non_finite="skip")
    for _ in range(3):
        trainer.step()
    replay, step = trainer.algorithm.source.rows, trainer.algorithm.step
    update, before = replay.update, {name: replay.state_dict()[name].clone() for name in ("powers", "sums", "max")}
    monkeypatch.setattr(replay, "append", lambda *rows, **options: None)
    monkeypatch.setattr(replay, "update", lambda index, errors: update(index, errors + 1e20))
    monkeypatch.setattr(trainer.algorithm, "step", lambda: Stats.merge(step(), Stats({"finite/parameters": 1})))
    with pytest.warns(RuntimeWarning, match="parameters not finite"):
        trainer.step()
    assert trainer.state[keys.UPDATES] == 24
    assert all(torch.equal(replay.state_dict()[name], value) for name, value in before.items())


@pytest.mark.filterwarnings("ignore:losses not finite")
def test_skipping_for_ever_stops_and_a_resumed_run_counts_the_skipped_steps_before_it(tmp_path):
    options = {"on_non_finite": "skip", "checkpoints": Checkpoints(tmp_path, every_steps=1)}
    first = make_one(trainer={**options, "callbacks": [at(1, "losses")]})
    run(first, max_steps=5)
    second = Trainer.resume(tmp_path, tracker=first.tracker)
    inject(second, "losses", float("nan"))
    with pytest.raises(NonFiniteError):
        run(second, max_steps=100)
    assert second.state[keys.STEPS] == 1 + MAX_IN_A_ROW + 1


def test_rollback_goes_back_to_the_last_checkpoint(tmp_path):
    seen = []
    callbacks = [lambda trainer, stats: seen.append(weights(trainer)), at(4, "observations")]
    options = {"checkpoints": Checkpoints(tmp_path, every_steps=3), "on_non_finite": "rollback"}
    trainer = make_one(trainer={**options, "callbacks": callbacks})
    with pytest.warns(RuntimeWarning, match="as they were in 000002-step-3"):
        stats = run(trainer, max_steps=6)
    assert torch.equal(seen[4], seen[2])
    assert not torch.equal(seen[5], seen[2])
    assert stats[keys.STEPS] == 6
    assert [step for step, _ in trainer.tracker.history("returns/mean")] == [48 * n for n in range(1, 7)]
    assert trainer.tracker.status == "FINISHED"


def test_rollback_takes_no_weights_of_a_course_that_was_left(tmp_path):
    options = {"checkpoints": Checkpoints(tmp_path, every_steps=1, keep=9), "on_non_finite": "rollback"}
    run(make_one(trainer=options), max_steps=4)
    later, seen = listed(tmp_path)[2:], []
    assert [path.name.split("-", 1)[1] for path in later] == ["step-2", "step-3", "step-4"]
    trainer = Trainer.resume(later[0], tracker=MemoryTracker(), callbacks=[lambda *_: seen.append(weights(trainer))])
    before = weights(trainer)
    inject(trainer, "observations", float("nan"))
    with pytest.warns(RuntimeWarning, match=f"as they were in {later[0].name}"):
        trainer.step()
    assert torch.equal(seen[0], before)


def test_rollback_never_takes_the_weights_of_another_run(tmp_path):
    run(make_one(trainer={"checkpoints": tmp_path}, seed=1), max_steps=1)
    trainer = make_one(trainer={"checkpoints": tmp_path, "on_non_finite": "rollback"}, seed=2)
    spoil = at(1, "observations")
    stats = trainer.step()
    before = weights(trainer)
    spoil(trainer, stats)
    with pytest.warns(RuntimeWarning, match="as they were before the step"):
        trainer.step()
    assert torch.equal(weights(trainer), before)
