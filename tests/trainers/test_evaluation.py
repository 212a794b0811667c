import functools
import warnings

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import wrappers
from tests.probes import Probe, Steps

from rl8x import keys
from rl8x.algorithms import PPOConfig
from rl8x.conditions import Confirmed, HitsUpperBound
from rl8x.envs import CartPole, DiscreteDummy, Env, GymnasiumEnv
from rl8x.execution.compiler import CompiledProgram
from rl8x.randomization import Uniform
from rl8x.tracking import MemoryTracker
from rl8x.trainers import Trainer
from rl8x.trainers.evaluation import config_name


def build(env=CartPole, **options):
    small = {"num_envs": 4, "horizon": 8, "seed": 5, "device": "cpu", "model_config": {"hidden_sizes": [8]}}
    return PPOConfig(**(small | {"num_sgd_iters": 1} | options)).build(env)


def make(env=CartPole, *, trainer=None, **options):
    return Trainer(build(env, **options), **({"tracker": MemoryTracker()} | (trainer or {})))


def run(trainer, **options):
    return trainer.run(progress="none", **options)


class Countdown(Steps):
    """Episodes of five steps, each of reward 1, or `reward`."""

    length = 5

    def __init__(self, reward=1.0):
        self.reward = reward

    def step(self, action):
        obs, _, *ends, _ = super().step(action)
        return obs, self.reward, *ends, {"success": True}


# -- an environment of its own, from an instance


def test_an_instance_of_a_gymnasium_environment_is_evaluated_on_whole_episodes():
    env = GymnasiumEnv(Countdown, 4, reward=2.0, time_limit=3, metrics={"success": "last"})
    trainer = make(env)
    assert trainer.evaluator.env is not env
    stats = trainer.eval()
    # A horizon of 8 steps would sum to 16.
    assert (stats["eval/returns/mean"], stats["eval/episodes/lengths/mean"]) == (6.0, 3.0)
    assert stats["eval/episodes/info/success/mean"] == 1.0
    assert trainer.evaluator.env.time_limit == 3


def test_an_instance_of_an_id_is_made_again_with_as_many_copies_as_asked_for():
    env = GymnasiumEnv("CartPole-v1", 4, time_limit=20)
    trainer = make(env, trainer={"num_eval_envs": 7})
    assert (trainer.evaluator.env.num_envs, trainer.evaluator.env.time_limit) == (7, 20)
    assert type(trainer.evaluator.env.vector_env) is type(env.vector_env)
    assert trainer.eval()["eval/episodes/ended"] == 7
    assert make(GymnasiumEnv(Countdown, 200), num_envs=200).evaluator.env.num_envs == 128


class Walk(Env):
    """A walk from the starting point, for `steps` steps; counts the starts in Python."""

    single_observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (1,), np.float32)
    single_action_space = gymnasium.spaces.Discrete(2)
    reset_noise = 1
    capturable = False

    def __init__(self, num_envs, steps=6, **options):
        super().__init__(num_envs, time_limit=steps, **options)
        self.scale = 1.0
        self.num_starts = 0

    def initial_state(self, parameters, noise):
        self.num_starts += 1
        return {"position": noise}

    def transition(self, state, actions, parameters, noise):
        ended = torch.zeros(self.num_envs, dtype=torch.bool)
        return {"position": state["position"] + 1}, torch.full((self.num_envs,), self.scale), ended

    def observe(self, state, parameters):
        return state["position"]


def test_an_instance_of_an_own_class_is_copied_as_it_is_and_training_does_not_notice():
    env, twin = Walk(4, seed=1), Walk(4, seed=1)
    env.scale = twin.scale = 3.0
    env.reset()
    twin.reset()
    trainer, without = make(env), make(twin, trainer={"eval_env": False})
    assert trainer.evaluator.env.carry is None
    starts = env.num_starts
    assert trainer.eval()["eval/returns/mean"] == 18.0
    assert env.num_starts == starts
    run(trainer, steps_per_eval=1, max_steps=3)
    run(without, max_steps=3)
    for name in ("returns/mean", "losses/vf"):
        assert trainer.tracker.history(name) == without.tracker.history(name)
    first, second = (make(Walk(4, seed=1), seed=seed).evaluator.env for seed in (1, 2))
    assert not torch.equal(first.reset()[0], second.reset()[0])


def test_an_instance_that_can_only_be_copied_has_its_own_number_of_copies():
    assert make(CartPole(4)).evaluator.env.num_envs == 4
    with pytest.raises(ValueError, match=r"`num_eval_envs` is 2, but .* an instance of CartPole with 4 copies"):
        make(CartPole(4), trainer={"num_eval_envs": 2})


class Uncopyable(Walk):
    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.handle = (number for number in range(3))


@pytest.mark.parametrize(
    "env",
    [
        lambda: Uncopyable(4),
        lambda: GymnasiumEnv(gymnasium.make_vec("CartPole-v1", 4)),
        lambda: GymnasiumEnv(functools.partial(lambda env: env, Countdown()), 1),
    ],
    ids=["cannot be copied", "live vector environment", "a function that gives one environment"],
)
def test_what_can_neither_be_copied_nor_made_again_has_sums_over_horizons_under_their_own_name(env):
    env = env()
    trainer = make(env, num_envs=env.num_envs)
    assert trainer.evaluator is None
    with pytest.warns(UserWarning, match="can neither be copied nor made again") as caught:
        stats = run(trainer, steps_per_eval=1, max_steps=2)
    assert len([each for each in caught if "copied" in str(each.message)]) == 1
    assert "eval/horizon_returns/mean" in stats
    assert not any(name.startswith("eval/returns/") for name in stats)
    with pytest.raises(ValueError, match=r"Unknown metric 'eval/returns/mean' .*eval/horizon_returns/mean"):
        run(trainer, steps_per_eval=1, stop_conditions=[HitsUpperBound("eval/returns/mean", 475)])
    with pytest.raises(ValueError, match="neither be copied nor made again"):
        make(env, num_envs=env.num_envs, trainer={"eval_env": True})


def test_who_asks_for_the_training_environment_is_not_warned():
    trainer = make(trainer={"eval_env": False})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert trainer.eval()["eval/horizon_returns/mean"] > 0


# -- names


def names_of(trainer):
    return {name for name in trainer.metric_names if name.startswith(keys.EVAL_PREFIX)}


@pytest.mark.parametrize("options", [{}, {"eval_env": False}], ids=["whole episodes", "horizons"])
def test_metric_names_are_exactly_what_evaluations_of_episodes_measure(options):
    trainer = make(GymnasiumEnv(Countdown, 4, metrics=["success"]), trainer=options)
    trainer.step()
    assert set(trainer.eval()) == names_of(trainer) | {"profiling/eval_ms"}
    assert ("eval/episodes/returns/mean" in names_of(trainer)) == (options != {})


def test_metric_names_are_exactly_what_evaluations_of_horizons_measure():
    trainer = make(DiscreteDummy)
    figures = ("min", "max", "mean", "std")
    assert names_of(trainer) == {f"eval/{group}/{figure}" for group in ("returns", "rewards") for figure in figures}
    assert set(trainer.eval()) == names_of(trainer) | {"profiling/eval_ms"}
    assert set(run(trainer, max_steps=1)) <= trainer.metric_names
    with pytest.raises(ValueError, match=r"what episodes/returns/mean is .*Watch returns/mean, or give"):
        run(trainer, stop_conditions=[Confirmed(HitsUpperBound("episodes/returns/mean", 1))])


@pytest.mark.parametrize(
    "condition",
    [HitsUpperBound("eval/episodes/returns/mean", 1), lambda row: row["eval/episodes/returns/mean"] > 1],
    ids=["named", "plain callable"],
)
def test_the_name_of_before_is_told_the_one_of_now(condition):
    with pytest.raises(ValueError, match=r"Unknown metric 'eval/episodes/returns/mean' .*Nearest: .*eval/returns/mean"):
        run(make(), steps_per_eval=1, stop_conditions=[condition])


# -- what confirms what


def test_a_horizons_sum_is_not_confirmed_by_whole_episodes():
    trainer = make()
    with pytest.raises(ValueError, match="measures what returns/mean is"):
        run(trainer, stop_conditions=[Confirmed(HitsUpperBound("returns/mean", 1))])
    assert trainer.state[keys.COLLECTS] == 0
    confirmed = Confirmed(HitsUpperBound("episodes/returns/mean", 1) & ~HitsUpperBound("episodes/lengths/max", 1e6))
    stats = run(trainer, stop_conditions=[confirmed])
    test = "And(HitsUpperBound('eval/returns/mean', 1), Not(HitsUpperBound('eval/episodes/lengths/max', 1000000.0)))"
    assert repr(confirmed.test) == test
    assert "eval/returns/mean = " in stats.stop_reason


class Uneven(Probe):
    """Episodes of 1 step in the first copy and of 3 in the second, with a reward of 1 in each."""

    terminates = True
    metric_names = ("copy",)

    def transition(self, state, actions, parameters, noise):
        x = state["x"] + 1
        return {"x": x}, torch.ones(2), x.squeeze(1) == torch.tensor([1.0, 3.0])

    def measure(self, state, parameters):
        return {"copy": torch.arange(2.0)}


def test_episodes_of_several_horizons_count_alike_in_the_training_environment():
    trainer = make(Uneven, trainer={"eval_env": False}, num_envs=2, horizon=2, horizons_per_env_reset=2)
    found = trainer.eval()
    # Returns are 1 and 1 in the first horizon, and 1, 1, 3, and 1 of the episode that the reset ends, in the second.
    assert found["eval/episodes/ended"] == 6
    assert found["eval/episodes/returns/mean"] == pytest.approx(8 / 6)
    assert found["eval/episodes/returns/std"] == pytest.approx((5 / 9) ** 0.5)
    assert found["eval/episodes/lengths/mean"] == pytest.approx(8 / 6)
    assert found["eval/episodes/info/copy/mean"] == pytest.approx(2 / 6)
    rows = [trainer.step(), trainer.step()]
    assert sum(row["episodes/ended"] for row in rows) == 6
    assert sum(row["episodes/ended"] * row["episodes/returns/mean"] for row in rows) == pytest.approx(8)
    assert [found[f"eval/horizon_returns/{name}"] for name in ("min", "max", "mean", "std")] == [2, 2, 2, 0]


def test_an_evaluation_runs_as_training_does(monkeypatch):
    compiled = []
    traced = CompiledProgram._interpret
    monkeypatch.setattr(CompiledProgram, "_compile", lambda self, given: compiled.append(1) or traced(self, given))
    rows = [make(execution=mode).eval() for mode in ("eager", "compile")]
    assert len(compiled) == 1
    for name in ("eval/returns/mean", "eval/rewards/mean", "eval/episodes/lengths/max"):
        assert rows[0][name] == pytest.approx(rows[1][name])


# -- names of evaluations


def test_an_evaluation_with_a_name_is_tracked_under_it_and_is_not_the_runs_own():
    trainer = make()
    own = run(trainer, steps_per_eval=2, max_steps=2)["eval/returns/mean"]
    stats = trainer.eval(env_config={"length": 2.0}, name="long pole")
    assert set(stats) - {"profiling/eval_ms"} == {
        name.replace("eval/", "eval/long pole/") for name in names_of(trainer) if name in trainer.train_step.eval_row
    }
    (point,) = trainer.tracker.history("eval/long pole/returns/mean")
    assert point == (64, stats["eval/long pole/returns/mean"])
    assert trainer.tracker.history("eval/returns/mean") == [(64, own)]
    assert trainer.step()["eval/returns/mean"] == own
    assert trainer.eval(name="again")["eval/again/returns/mean"] > 0
    assert trainer.step()["eval/returns/mean"] == own


def test_an_evaluation_under_another_config_is_tracked_under_a_name_made_of_it():
    trainer = make()
    run(trainer, steps_per_eval=2, max_steps=2, eval_env_config={"length": 0.7})
    own = trainer.tracker.history("eval/returns/mean")
    stats = trainer.eval(env_config={"gravity": 50.0})
    assert trainer.tracker.history("eval/gravity 50/returns/mean") == [(64, stats["eval/returns/mean"])]
    trainer.eval(env_config={"length": Uniform(0.25, 1.0), "gravity": 9.0})
    assert trainer.tracker.history("eval/gravity 9 length uniform 0.25 1/returns/mean")
    trainer.eval(env_config={})
    assert trainer.tracker.history("eval/defaults/returns/mean")
    assert trainer.tracker.history("eval/returns/mean") == own
    sampled = trainer.eval(deterministic=False)["eval/returns/mean"]
    assert trainer.tracker.history("eval/sampled/returns/mean") == [(64, sampled)]
    trainer.eval(env_config={"gravity": 50.0}, deterministic=False)
    assert trainer.tracker.history("eval/gravity 50 sampled/returns/mean")
    assert trainer.known["eval/returns/mean"] == trainer.step()["eval/returns/mean"] == own[0][1]
    trainer.eval(env_config={"length": 0.7})
    trainer.eval()
    assert len(trainer.tracker.history("eval/returns/mean")) == 3
    trainer.close()
    assert trainer.tracker.status == "FINISHED"


def test_names_made_of_configs_are_short_and_legal():
    assert config_name({"a": 1e-05, "b": -2.0, "c": 10.05}) == "a 1e-05 b -2 c 10.05"
    many = config_name({"a": [float(n) for n in range(200)]})
    assert many.startswith("a 200 values ")
    assert many != config_name({"a": [float(n) for n in range(1, 201)]})
    assert len(config_name({f"parameter{n}": 0.5 for n in range(50)})) < 170


ILLEGAL, TAKEN = "must be letters, digits, spaces .*got", "are metrics of those without a name"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        *[(name, ILLEGAL) for name in ("", "/a", "a/", "a//b", "ünï(code)", "..", "x" * 300)],
        *[(name, TAKEN) for name in ("returns", "episodes/lengths", "horizon_returns", "rewards/x")],
    ],
)
def test_names_that_cannot_be_are_refused(name, message):
    with pytest.raises(ValueError, match=message):
        make().eval(name=name)


def test_training_on_after_an_evaluation_has_the_runs_status_follow():
    trainer = make(trainer={"checkpoints": False})

    def fail(trainer, stats):
        raise RuntimeError("out of luck")

    trainer.callbacks = (fail,)
    with pytest.raises(RuntimeError, match="luck"):
        run(trainer, max_steps=2)
    trainer.eval()
    trainer.close()
    tags, why = trainer.tracker.tags, "RuntimeError: out of luck"
    assert (trainer.tracker.status, tags["rl8x.stop_reason"]) == ("FAILED", why)
    trainer.callbacks = ()
    trainer.eval()
    trainer.step()
    assert (trainer.tracker.status, tags["rl8x.stop_reason"]) == ("RUNNING", "")
    trainer.close()
    assert (trainer.tracker.status, tags["rl8x.stop_reason"], trainer.stop_reason) == ("FINISHED", "", None)
    assert why not in trainer.tracker.description
    assert "Stopped after 2 steps, 1 of them by the last run(), " in trainer.tracker.description


# -- statistics of the environment's own


def one():
    return gymnasium.make("CartPole-v1")


def frozen():
    env = wrappers.NormalizeObservation(one())
    env.update_running_mean = False
    return env


def in_vectors(num_envs, **options):
    vector = gymnasium.vector.SyncVectorEnv([one] * num_envs)
    return GymnasiumEnv(wrappers.vector.NormalizeReward(wrappers.vector.NormalizeObservation(vector)), **options)


OBS, REWARDS = "use `normalize_observations`,", "use `normalize_rewards`,"
WRAPPED = {
    "none": (functools.partial(GymnasiumEnv, one), None),
    "observations": (functools.partial(GymnasiumEnv, lambda: wrappers.NormalizeObservation(one())), OBS),
    "rewards": (functools.partial(GymnasiumEnv, lambda: wrappers.NormalizeReward(one())), REWARDS),
    "of an id": (functools.partial(GymnasiumEnv, "CartPole-v1", wrappers=[wrappers.NormalizeObservation]), OBS),
    "in processes": (
        functools.partial(GymnasiumEnv, lambda: wrappers.NormalizeReward(frozen()), vectorization="async"),
        "use `normalize_observations` and `normalize_rewards`,",
    ),
    "of all copies": (in_vectors, "use `normalize_observations` and `normalize_rewards`,"),
    "that stay": (functools.partial(GymnasiumEnv, frozen), None),
}


@pytest.mark.parametrize("name", WRAPPED)
def test_statistics_of_an_environments_own_are_warned_of_once(name):
    env, expected = WRAPPED[name]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer = make(env, num_envs=2)
        run(trainer, max_steps=2, steps_per_eval=1)
    texts = [str(warning.message) for warning in caught if "statistics of its own" in str(warning.message)]
    assert len(texts) == (expected is not None)
    assert all(expected in text for text in texts)
    for each in (trainer.algorithm.env, trainer.evaluator.env):
        each.close()
