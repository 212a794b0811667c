import copy
import functools
import math
import pickle
import warnings

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from tests.trainers.helpers import make, run

from rl8x import Checkpoints, Condition, Confirmed, HitsUpperBound, MemoryTracker, Plateau, PPOConfig, Trainer, keys
from rl8x.envs import CartPole, CartPoleInfinite, DiscreteDummy, Env, Pendulum
from rl8x.randomization import Adaptive, Grid, Scheduled, Uniform

# -- warnings of an algorithm


def test_a_silenced_critic_is_told_once():
    trainer = make(Pendulum, normalize_rewards=False, vf_clip_param=2.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run(trainer, max_steps=9)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run(trainer, max_steps=25)
    shares = [row.metrics["monitors/vf_clip_frac"] for row in trainer.tracker.rows]
    assert min(shares) > 0.5
    (message,) = [str(warning.message) for warning in caught]
    assert message.startswith(f"The critic learns nothing from {shares[9]:.0%} of its samples, and from less than half")
    assert message.endswith("Use vf_clip_param=None or normalize_values=True or normalize_rewards=True.")


# -- rl8's semantics: see also the state machine at the end


@pytest.mark.parametrize(("env_config", "gravity"), [(None, 9.8), ({}, 9.8), ({"gravity": 12.0}, 12.0)])
def test_an_evaluations_config_is_not_the_trainings(env_config, gravity):
    trainer = make(CartPoleInfinite)
    seen, evaluated = watch_gravity(trainer)
    options = {"env_config": env_config, "eval_env_config": {"gravity": 50.0}, "steps_per_eval": 1}
    run(trainer, **options, max_steps=3)
    trainer.eval(env_config={"gravity": 70.0})
    trainer.eval(env_config={"gravity": 60.0})
    trainer.step()
    assert seen == pytest.approx([gravity] * 4)
    assert evaluated == pytest.approx([50.0] * 3 + [70.0, 60.0])
    assert trainer.tracker.params["env_config.gravity"] == gravity
    assert trainer.tracker.params["eval_env_config.gravity"] == 50.0


def watch_gravity(trainer):
    """List the gravity that each collect and each evaluation of a trainer ran under."""
    algorithm, collects, evaluations = trainer.algorithm, [], []

    def watched(method, seen, **options):
        stats = method(**options)
        seen.append(float(algorithm.env.carry["parameters"]["gravity"][0]))
        return stats

    algorithm.collect = functools.partial(watched, algorithm.collect, collects)
    algorithm.evaluate = functools.partial(watched, algorithm.evaluate, evaluations)
    return collects, evaluations


# -- what no run takes: told by `check_run`, and by `run` before it begins

GRID = Grid([0.25 + 0.01 * i for i in range(12)])
EVALS = "eval/returns/mean"
HIGH = HitsUpperBound(EVALS, 475)
NO_EVALUATIONS = r"reads 'eval/returns/mean', but .* give `steps_per_eval`"
MOVES = Adaptive((0.4, 0.6), thresholds=(8, 12), step=0.05, episodes=2)


def lengths(value, **options):
    return {"env_config": {"length": value}, **options}


def follows(metric):
    return lengths(Scheduled([(0, 0.5), (100, 1.0)], by=metric))


def evaluated(value):
    return {"eval_env_config": {"length": value}}


def stops(condition, **options):
    return {"stop_conditions": [condition], **options}


class Unparametrized(CartPole):
    parameters = {}  # noqa: RUF012

    def observe(self, state, parameters):
        return state["physics"]

    def transition(self, state, actions, parameters, noise):
        return state, torch.ones(self.num_envs), torch.ones(self.num_envs, dtype=torch.bool)


class Undrawn(CartPole):
    draw = Env.draw


EPISODIC = [  # options of a run, and what is said
    ({"max_steps": 1.5}, "`max_steps` must be"),
    ({"steps_per_eval": -1}, "`steps_per_eval` must be"),
    ({"steps_per_eval": 1, "evals_per_film": 0}, "`evals_per_film` must be at least 1; got 0"),
    ({"evals_per_film": 1}, "`evals_per_film` counts the evaluations of the run: give `steps_per_eval`"),
    (lengths(GRID), r"Grid of 12 values, but there are 4 copies.*num_envs=12 or more"),
    (evaluated(torch.ones(4)), r"eval_env_config\['length'\] has 4 values for 6 copies \(`num_eval_envs`\)"),
    ({"eval_env_config": {"lenght": 1.0}}, "eval_env_config has no parameter 'lenght'. Did you mean 'length'"),
    (evaluated(MOVES), r"`eval_env_config\['length'\]` moves with training"),
    ({"env_config": lambda known: {"lenght": 1}}, "has no parameter 'lenght'"),
    ({"env_config": lambda known: {"length": 99}}, "must be in"),
    ({"env_config": lambda known: {"length": MOVES}}, "a function gives distributions that stand still"),
    (follows("env/stepz"), r"`env_config\['length'\]` goes by the metric 'env/stepz', .* Nearest: env/steps, "),
    (follows(EVALS), r"goes by 'eval/returns/mean', but this run makes no evaluations: give `steps_per_eval`"),
    (stops(HitsUpperBound("nothing", 1)), "Unknown metric 'nothing'"),
    (stops(HitsUpperBound("env/steps", 64) & ~Plateau(EVALS)), NO_EVALUATIONS),
    (stops(Confirmed(HIGH, by=HitsUpperBound("eval/returns/min", 1))), NO_EVALUATIONS),
    (stops(Confirmed(HitsUpperBound("returns/mean", 1))), "measures what returns/mean is"),
    (stops(HitsUpperBound("eval/episodes/returns/mean", 1), steps_per_eval=1), "Nearest: .*eval/returns/mean"),
]
EPISODES = Confirmed(HitsUpperBound("episodes/returns/mean", 1))
NEVER_ENDS = {"horizons_per_env_reset": -1}
REFUSED = [  # with the environment, and options of the trainer and the algorithm
    *[(CartPole, {"num_eval_envs": 6}, {}, options, message) for options, message in EPISODIC],
    (DiscreteDummy, {}, {"horizons_per_env_reset": 3}, {"steps_per_eval": 4}, "`steps_per_eval` must be a multiple"),
    (DiscreteDummy, {}, NEVER_ENDS, {"eval_env_config": {"bounds": 10.0}}, "never apply"),
    (CartPoleInfinite, {}, NEVER_ENDS, lengths(MOVES), r"none ever ends: .* Use horizons_per_env_reset=1"),
    (DiscreteDummy, {}, {}, stops(EPISODES), r"what episodes/returns/mean is .*Watch returns/mean, or give"),
    (
        CartPole,
        {"eval_env": Unparametrized(3)},
        {},
        lengths(0.4),
        r"None: as in training\) has 'length'.*no parameters",
    ),
    (Undrawn, {}, {}, {"steps_per_eval": 1, "evals_per_film": 1}, "Undrawn cannot be rendered: give it a `draw`"),
]


@pytest.mark.parametrize(("env", "made", "config", "options", "message"), REFUSED)
def test_what_no_run_takes_is_told_before_it_begins(env, made, config, options, message, tmp_path):
    trainer = make(env, trainer={"checkpoints": tmp_path / "run", **made}, **config)
    for call in (trainer.check_run, functools.partial(run, trainer)):
        with pytest.raises((TypeError, ValueError), match=message) as told:
            call(**{"max_steps": 1, **options})
        assert "\n" not in str(told.value)
    assert (trainer.state[keys.COLLECTS], trainer.tracker.status) == (0, None)
    assert list(tmp_path.iterdir()) == []


def test_names_of_options_and_progress_are_checked_before_anything_is_made_and_what_is_legal_runs(tmp_path):
    trainer = make(DiscreteDummy, trainer={"eval_env": False, "checkpoints": tmp_path / "run"})
    with pytest.raises(ValueError, match="`progress` must be one of"):
        trainer.run(max_steps=1, progress="loud")
    with pytest.raises(ValueError, match="Did you mean 'max_steps'"):
        trainer.check_run(max_step=3)
    trainer.check_run(max_steps=3, steps_per_eval=3)
    assert list(tmp_path.iterdir()) == []
    inherits_nothing = make(CartPole, trainer={"eval_env": Unparametrized(3)})
    run(inherits_nothing, **lengths(0.4), eval_env_config={}, steps_per_eval=1, max_steps=1)
    assert run(make(CartPole), stop_conditions=[HIGH], max_steps=1, steps_per_eval=1)[keys.STEPS] == 1


def test_a_config_that_comes_too_late_for_the_one_reset_is_refused():
    trainer = make(CartPole, trainer={"eval_env": False})
    with pytest.raises(ValueError, match="An `env_config` for this evaluation would never apply"):
        trainer.eval(env_config={"length": 1.0})  # before the one reset, training would go on under it
    run(trainer, max_steps=1)
    assert trainer.algorithm.env.config == {}
    assert trainer.state[keys.COLLECTS] == 1
    for call in (trainer.check_run, functools.partial(run, trainer, max_steps=1)):
        with pytest.raises(ValueError, match="This `env_config` would never apply: the environment was reset once"):
            call(env_config={"length": 1.0})
    assert (trainer.tracker.status, trainer.state[keys.COLLECTS]) == ("FINISHED", 1)
    assert run(trainer, max_steps=1, env_config={})[keys.COLLECTS] == 2  # as it is already


# -- env_config: its record


@pytest.mark.parametrize("values", [list, np.array, torch.tensor, tuple])
def test_values_for_each_copy_of_an_evaluation(values):
    trainer = make(CartPole, trainer={"num_eval_envs": 3})
    lengths = values([0.25, 0.5, 1.0])
    run(trainer, eval_env_config={"length": lengths}, steps_per_eval=1, max_steps=1)
    assert trainer.evaluations.env.carry["parameters"]["length"].tolist() == [0.25, 0.5, 1.0]
    trainer.eval(env_config={"length": values([0.75, 0.5, 1.0])})
    assert trainer.evaluations.env.carry["parameters"]["length"].tolist() == [0.75, 0.5, 1.0]


FOUR = [1.0, 2.0, 3.0, 4.0]


@pytest.mark.parametrize("value", [Grid(FOUR), FOUR])
@pytest.mark.parametrize(("copies", "taken"), [(1, [3.0]), (2, [2.0, 4.0]), (4, FOUR), (8, FOUR * 2)])
def test_evaluations_take_evenly_spaced_ones_of_the_trainings_values(value, copies, taken):
    trainer = make(CartPole, trainer={"num_eval_envs": copies})
    run(trainer, env_config={"length": value}, steps_per_eval=1, max_steps=1)
    lengths = trainer.evaluations.env.carry["parameters"]["length"].tolist()
    assert sorted(lengths) == sorted(taken)
    told = copies < 4 or (copies > 4 and isinstance(value, list))  # else it is as in training
    assert trainer.tracker.params.get("eval_env_config.length") == (str(lengths) if told else None)


def test_params_tell_what_is_trained_and_evaluated_under():
    trainer = make(CartPole, trainer={"num_eval_envs": 2})
    training = {"length": Uniform(0.25, 1), "masspole": [0.1, 0.2, 0.3, 0.4], "gravity": 9.0}
    seen = []
    trainer.callbacks = (lambda trainer, stats: seen.append(dict(trainer.tracker.params)),)
    run(trainer, env_config=training, eval_env_config={"gravity": 50, "tau": 0.02}, max_steps=1)
    params = trainer.tracker.params
    assert {name: value for name, value in params.items() if "env_config." in name} == {
        "env_config.gravity": 9.0,
        "env_config.masscart": 1.0,
        "env_config.masspole": "[0.1, 0.2, 0.3, 0.4]",
        "env_config.length": "Uniform(0.25, 1.0)",
        "env_config.force_mag": 10.0,
        "env_config.tau": 0.02,
        "eval_env_config.gravity": 50.0,
        "eval_env_config.length": 0.5,
        "eval_env_config.masspole": 0.1,
        "eval_env_config.tau": 0.02,
    }
    assert seen == [params]
    assert not [name for name in params if name.startswith(("env.parameters", "run.env_config", "run.eval_env"))]


def test_params_tell_that_evaluations_are_under_the_trainings_again(tmp_path):
    trainer = make(CartPole, trainer={"num_eval_envs": 2, "checkpoints": tmp_path})
    run(trainer, eval_env_config={"gravity": 50}, env_config={"length": Uniform(0.25, 1)}, max_steps=2)
    told = ["eval_env_config.gravity", "eval_env_config.length"]
    assert [trainer.tracker.params[name] for name in told] == [50, 0.5]
    resumed = Trainer.resume(tmp_path, tracker=trainer.tracker)
    run(resumed, eval_env_config=None, max_steps=3)
    assert [trainer.tracker.params[name] for name in told] == [9.8, "Uniform(0.25, 1.0)"]
    again = make(CartPole, trainer={"num_eval_envs": 2})
    run(again, eval_env_config={"gravity": 50}, max_steps=1)
    run(again, max_steps=1)
    assert again.tracker.params["eval_env_config.gravity"] == 9.8
    assert "eval_env_config.length" not in again.tracker.params


def test_params_of_a_loop_over_steps_and_of_a_run_after_an_evaluation():
    trainer = make(CartPoleInfinite)
    trainer.eval()
    assert not [name for name in trainer.tracker.params if "env_config." in name]
    trainer.step(env_config={"gravity": 12.0})
    assert trainer.tracker.params["env_config.gravity"] == 12.0
    trainer.eval(env_config={"gravity": 50.0})
    trainer.step()
    assert trainer.tracker.params["env_config.gravity"] == 12.0
    run(trainer, env_config={"gravity": Uniform(5, 15)}, max_steps=1)
    assert trainer.tracker.params["env_config.gravity"] == "Uniform(5.0, 15.0)"
    run(trainer, max_steps=1)
    assert trainer.tracker.params["env_config.gravity"] == "Uniform(5.0, 15.0)"


# -- rows, rules, conditions


def test_a_row_has_exactly_the_declared_metrics():
    trainer = make(CartPole, trainer={"num_eval_envs": 3})
    stats = run(trainer, steps_per_eval=1, max_steps=6)
    assert set(stats) <= trainer.metric_names
    drawn = {*keys.parameter_metrics(CartPole.parameters)}
    assert trainer.metric_names - set(stats) <= drawn | {"memory/device_mb", "monitors/refused_updates"} | {
        name for name in trainer.metric_names if "episodes/" in name
    }


def test_every_condition_sees_every_row_with_the_evaluation_in_it():
    class Witness(Condition):
        def __init__(self):
            self.rows = []

        def judge(self, stats):
            self.rows.append((stats[keys.STEPS], stats.get("eval/returns/mean"), "eval/returns/mean" in stats.fresh))
            return False

        def arguments(self):
            return {}

    witness = Witness()
    run(make(DiscreteDummy), steps_per_eval=2, stop_conditions=[lambda stats: stats[keys.STEPS] >= 4, witness])
    steps, values, fresh = zip(*witness.rows, strict=True)
    assert steps == (1, 2, 3, 4)
    assert fresh == (False, True, False, True)
    assert values[0] is None
    assert values[1] == values[2] != None  # noqa: E711


def test_a_second_run_starts_conditions_afresh_and_goes_on_in_the_same_tracked_run():
    trainer = make(DiscreteDummy)
    plateau = Plateau("algorithm/steps", patience=1, rtol=10.0)
    assert run(trainer, stop_conditions=[plateau])[keys.STEPS] == 2
    first = trainer.tracker.run_id
    assert run(trainer, stop_conditions=[plateau])[keys.STEPS] == 4
    assert trainer.tracker.run_id == first
    assert [step for step, _ in trainer.tracker.history("algorithm/steps")] == [32 * n for n in range(1, 5)]


@pytest.mark.parametrize("gives", [True, False])
def test_a_lost_final_observation_is_tagged(gives):
    trainer = make(CartPole, trainer={"eval_env": False})
    # As a simulator's adapter does at the first episode that ends.
    trainer.callbacks = (lambda trainer, stats: setattr(trainer.algorithm.env, "gives_final_obs", gives),)
    run(trainer, max_steps=1)
    assert ("rl8x.final_obs" in trainer.tracker.tags) == (not gives)


# -- evaluation


TRAINED_IN = CartPole(4, device="cpu", seed=0)
WHOLE = "`num_eval_envs` must be a whole number, at least 1"


@pytest.mark.parametrize(
    ("env", "option", "value", "message"),
    [
        (DiscreteDummy, "eval_env", True, "never ends"),
        (DiscreteDummy, "eval_env", CartPole(4), "must have the training environment's spaces"),
        (TRAINED_IN, "eval_env", TRAINED_IN, "`eval_env` is the CartPole that is trained in, and evaluations would"),
        (CartPole, "eval_env", lambda num_envs, **options: object(), "must make an rl8x Env; it made object"),
        *[(CartPole, "num_eval_envs", copies, WHOLE) for copies in (0, -3, 2.5, True, "4")],
        (CartPole, "tracker", "mlruns", r"`tracker` must keep runs, .* got 'mlruns'"),
        (CartPole, "tracker", object(), r"got <object object at .*>, without location, .*finish\.$"),
        (CartPole, "checkpoints", 3, "`checkpoints` must be"),
        (CartPole, "checkpoints", Checkpoints("x", best="eval/mean_reward"), "It is 'eval/returns/mean' here"),
        (CartPole, "on_non_finite", "ignore", "must be one of 'stop', 'skip', 'rollback'; got 'ignore'"),
    ],
)
def test_what_no_trainer_takes_is_told(env, option, value, message):
    with pytest.raises((TypeError, ValueError), match=message):
        make(env, trainer={option: value})


# -- the state machine against a model


class TrainerMachine(RuleBasedStateMachine):
    """Random sequences of calls against a model of three counters."""

    @initialize(every=st.sampled_from([-1, 1, 2, 3]))
    def begin(self, every):
        self.every = every
        self.trainer = make(DiscreteDummy, horizons_per_env_reset=every, num_envs=2, horizon=2)
        self.collects = self.steps = 0

    @rule()
    def step(self):
        stats = self.trainer.step()
        self.collects += 1
        self.steps += 1
        assert stats[keys.STEPS] == self.steps
        assert self.trainer.algorithm.env.config == {}

    @rule()
    def evaluate(self):
        if self.every > 0 and self.collects % self.every:
            turn = f"multiple of `horizons_per_env_reset` = {self.every}; it is {self.collects}"
            with pytest.raises(RuntimeError, match=turn):
                self.trainer.eval()
        else:
            assert math.isfinite(self.trainer.eval()["eval/returns/mean"])
            self.collects += max(1, self.every)

    @rule()
    def evaluate_elsewhere(self):
        if self.every < 0:
            with pytest.raises(ValueError, match="never apply"):
                self.trainer.eval(env_config={"bounds": 5.0})
        elif self.collects % self.every == 0:
            assert self.trainer.eval(env_config={"bounds": 5.0})["eval/rewards/min"] >= -5.0 - self.every * 2
            self.collects += self.every

    @rule(steps=st.integers(1, 4), per_eval=st.integers(1, 3))
    def run(self, steps, per_eval):
        if self.every > 0 and (per_eval % self.every or self.collects % self.every):
            error = ValueError if per_eval % self.every else RuntimeError
            with pytest.raises(error, match=r"must be a multiple of|would not come at resets of"):
                run(self.trainer, steps_per_eval=per_eval, max_steps=steps)
            return
        run(self.trainer, steps_per_eval=per_eval, max_steps=steps)
        self.steps += steps
        self.collects += steps + steps // per_eval * max(1, self.every)

    @rule()
    @precondition(lambda self: self.steps > 0)
    def step_without_collect(self):
        with pytest.raises(RuntimeError, match="collect"):
            self.trainer.algorithm.step()

    def teardown(self):
        if hasattr(self, "trainer"):
            state = self.trainer.state
            assert (state[keys.COLLECTS], state[keys.STEPS]) == (self.collects, self.steps)
            assert state[keys.ENV_STEPS] == self.steps * 4


TestTrainerMachine = TrainerMachine.TestCase
TestTrainerMachine.settings = settings(max_examples=25, stateful_step_count=12, deadline=None)


@pytest.mark.parametrize("algorithm", [PPOConfig(), CartPole, "PPO", None])
def test_what_is_no_algorithm_is_told(algorithm):
    with pytest.raises(TypeError, match=r"a trainer needs an algorithm like PPOConfig\(\)\.build\(CartPole\); got"):
        Trainer(algorithm)


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_copy_of_a_trainer_is_refused_in_a_line(copied):
    says = r"can be neither copied nor pickled: copy\.deepcopy\(.*Trainer\.resume"
    with pytest.raises(TypeError, match=says) as told:
        copied(Trainer(PPOConfig(num_envs=4).build(CartPole), tracker=MemoryTracker()))
    assert "\n" not in str(told.value)
