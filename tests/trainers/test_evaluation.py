import functools
import warnings

import gymnasium
import pytest
import torch
from gymnasium import wrappers
from tests.probes import Probe, Steps, everything
from tests.trainers.helpers import make, run

from rl8x import Confirmed, HitsUpperBound, keys
from rl8x.envs import CartPole, DiscreteDummy, GymnasiumEnv
from rl8x.randomization import Uniform
from rl8x.trainers.evaluation import config_name


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
    assert trainer.evaluations.env is not env
    stats = trainer.eval()
    # A horizon of 8 steps would sum to 16.
    assert (stats["eval/returns/mean"], stats["eval/episodes/lengths/mean"]) == (6.0, 3.0)
    assert stats["eval/episodes/info/success/mean"] == 1.0
    assert trainer.evaluations.env.time_limit == 3


def test_an_instance_of_an_id_is_made_again_with_as_many_copies_as_asked_for():
    env = GymnasiumEnv("CartPole-v1", 4, time_limit=20)
    trainer = make(env, trainer={"num_eval_envs": 7})
    assert (trainer.evaluations.env.num_envs, trainer.evaluations.env.time_limit) == (7, 20)
    assert type(trainer.evaluations.env.vector_env) is type(env.vector_env)
    assert trainer.eval()["eval/episodes/ended"] == 7
    assert make(GymnasiumEnv(Countdown, 200), num_envs=200).evaluations.env.num_envs == 128


class Walk(Probe):
    """A walk from the starting point, for six steps; counts the starts in Python."""

    capturable = False
    default_time_limit = 6
    scale, num_starts = 1.0, 0

    def initial_state(self, parameters, noise):
        self.num_starts += 1
        return {"x": noise}

    def transition(self, state, actions, parameters, noise):
        ended = torch.zeros(self.num_envs, dtype=torch.bool)
        return {"x": state["x"] + 1}, torch.full((self.num_envs,), self.scale), ended


def test_an_instance_of_an_own_class_is_copied_as_it_is_and_training_does_not_notice():
    env, twin = Walk(4, seed=1), Walk(4, seed=1)
    env.scale = twin.scale = 3.0
    env.reset()
    twin.reset()
    trainer, without = make(env), make(twin, trainer={"eval_env": False})
    assert trainer.evaluations.env.carry is None
    starts = env.num_starts
    assert trainer.eval()["eval/returns/mean"] == 18.0
    assert env.num_starts == starts
    run(trainer, steps_per_eval=1, max_steps=3)
    run(without, max_steps=3)
    for name in ("returns/mean", "losses/vf"):
        assert trainer.tracker.history(name) == without.tracker.history(name)
    first, second = (make(Walk(4, seed=1), seed=seed).evaluations.env for seed in (1, 2))
    assert not torch.equal(first.reset()[0], second.reset()[0])


def test_an_instance_that_can_only_be_copied_has_its_own_number_of_copies():
    assert make(CartPole(4)).evaluations.env.num_envs == 4
    with pytest.raises(ValueError, match=r"an instance of CartPole with 4 copies, which .*; got num_eval_envs=2"):
        make(CartPole(4), trainer={"num_eval_envs": 2})


class Uncopyable(Walk):
    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.handle = (number for number in range(3))


NEITHER = {
    "cannot be copied": lambda: Uncopyable(4),
    "live vector environment": lambda: GymnasiumEnv(gymnasium.make_vec("CartPole-v1", 4)),
    "a function that gives one": lambda: GymnasiumEnv(functools.partial(lambda env: env, Countdown()), 1),
}


@pytest.mark.parametrize("what", NEITHER)
def test_what_can_neither_be_copied_nor_made_again_has_sums_over_horizons_under_their_own_name(what):
    env = NEITHER[what]()
    trainer = make(env, num_envs=env.num_envs)
    assert trainer.evaluations.env is None
    with pytest.warns(UserWarning, match="can neither be copied nor made again") as caught:
        stats = run(trainer, steps_per_eval=1, max_steps=2)
    assert len([each for each in caught if "copied" in str(each.message)]) == 1
    assert "eval/horizon_returns/mean" in stats
    assert not any(name.startswith("eval/returns/") for name in stats)
    with pytest.raises(ValueError, match=r"Unknown metric 'eval/returns/mean' .*eval/horizon_returns/mean"):
        run(trainer, steps_per_eval=1, stop_conditions=[HitsUpperBound("eval/returns/mean", 475)])
    with pytest.raises(ValueError, match=r"an instance of .*, which cannot be made again"):
        make(env, num_envs=env.num_envs, trainer={"eval_env": True})


def test_a_vector_environment_evaluates_in_all_of_its_copies():
    env = gymnasium.make_vec("CartPole-v1", 3, vectorization_mode="sync")
    with pytest.raises(ValueError, match="`num_eval_envs` is 5, but the `eval_env` has 3 copies"):
        make("CartPole-v1", num_envs=2, trainer={"eval_env": env, "num_eval_envs": 5})
    trainer = make("CartPole-v1", num_envs=2, trainer={"eval_env": env})
    assert trainer.eval()["eval/episodes/ended"] == 3


# -- names


TASKS = {
    "whole episodes": (functools.partial(GymnasiumEnv, Countdown, metrics=["success"]), {}, "eval/returns/mean"),
    "horizons of episodes": (
        *(functools.partial(GymnasiumEnv, Countdown, metrics=["success"]), {"eval_env": False}),
        "eval/horizon_returns/mean",
    ),
    "horizons without end": (DiscreteDummy, {}, "eval/returns/mean"),
}


def names_of(trainer):
    return {name for name in trainer.metric_names if name.startswith(keys.EVAL_PREFIX)}


@pytest.mark.parametrize("task", TASKS)
def test_metric_names_are_exactly_what_evaluations_measure_and_nothing_is_warned_of(task):
    env, options, returns = TASKS[task]
    trainer = make(env, trainer=options)
    trainer.step()
    with warnings.catch_warnings(action="error"):
        assert set(trainer.eval()) == names_of(trainer) | {"profiling/eval_ms"}
    assert returns in names_of(trainer)
    assert any("/episodes/" in name for name in names_of(trainer)) == (env is not DiscreteDummy)
    assert set(run(trainer, max_steps=1)) <= trainer.metric_names


# -- what confirms what


def test_what_whole_episodes_measure_is_confirmed_by_their_returns():
    confirmed = Confirmed(HitsUpperBound("episodes/returns/mean", 1) & ~HitsUpperBound("episodes/lengths/max", 1e6))
    stats = run(make(), stop_conditions=[confirmed])
    assert all(
        f"{name} = {stats[name]:g}" in stats.stop_reason for name in ("eval/returns/mean", "episodes/returns/mean")
    )
    assert "eval/episodes/lengths/max = " in stats.stop_reason


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


def test_the_last_row_and_an_evaluation_that_is_in_no_row_yet_are_restored():
    first = make()
    first.eval()
    for before_step in (True, False):
        second = make()
        second.load_state_dict(first.state_dict())
        assert everything(second) == everything(first)
        assert second.train_step.known == first.train_step.known
        for trainer in (first, second):
            assert ("eval/returns/mean" in trainer.step().before_step) == before_step


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


def wrapped(env, **options):
    return functools.partial(GymnasiumEnv, env, **options)


BOTH = "use `normalize_observations` and `normalize_rewards`,"
WRAPPED = {
    "observations": (wrapped(lambda: wrappers.NormalizeObservation(one())), "use `normalize_observations`,"),
    "in processes": (wrapped(lambda: wrappers.NormalizeReward(frozen()), vectorization="async"), BOTH),
    "of all copies": (in_vectors, BOTH),
    "that stay": (wrapped(frozen), None),
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
    for each in (trainer.algorithm.env, trainer.evaluations.env):
        each.close()
