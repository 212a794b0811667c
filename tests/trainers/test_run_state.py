"""How a run stops: at once, at the right place, with its checkpoint; and what it refuses to wait for."""

import os
import signal
import threading
from pathlib import Path

import pytest
from tests.trainers import helpers
from tests.trainers.helpers import at_step, run, saved_steps

from rl8x import MemoryTracker, MLflowTracker, Trainer, keys
from rl8x.checkpoint import Checkpoints, listed, read
from rl8x.conditions import Confirmed, HitsUpperBound, Plateau, StopsIncreasing, from_spec
from rl8x.envs import CartPole
from rl8x.randomization import Scheduled

EVALS = "eval/returns/mean"
SOLVED = HitsUpperBound(EVALS, 1)
LONG = {"length": 9.0}


def make(**options):
    algorithm = {"horizons_per_env_reset": options.pop("resets", None)}
    return helpers.make(trainer={"num_eval_envs": 2} | options, **algorithm)


def ever_compared():
    """Return a condition that is met by the second evaluation that it sees, whatever that is."""
    return Plateau(EVALS, patience=1, rtol=1e9)


# -- what was measured before


def test_an_evaluation_before_a_step_is_fresh_in_its_row_and_of_an_earlier_policy(tmp_path):
    trainer = make()
    trainer.eval()
    assert [EVALS in trainer.step().fresh for _ in range(2)] == [True, False]
    trainer = make(checkpoints=Checkpoints(tmp_path, best=EVALS))
    trainer.eval()
    trainer.save()
    for each in (trainer, Trainer.resume(tmp_path, tracker=MemoryTracker())):
        run(each, steps_per_eval=3, stop_conditions=[ever_compared()], max_steps=5)
        assert each.state[keys.STEPS] == 3  # that before the run, and that after its third step
        assert each.checkpoints.best["steps"] == 3  # no checkpoint has the policy that was evaluated first


class Worth(CartPole):
    """Nothing."""

    def transition(self, state, actions, parameters, noise):
        state, rewards, ends = super().transition(state, actions, parameters, noise)
        return state, 0.0 * rewards, ends


EACH = {"length": [0.5, 0.6, 0.7, 0.8]}


def test_a_run_under_the_defaults_again_does_not_wait_for_what_moved_the_physics_before():
    trainer = make(resets=1)
    moving = {"length": Scheduled([(0, 0.55), (1, 0.6)], by=EVALS)}
    run(trainer, env_config=moving, steps_per_eval=1, max_steps=1)
    assert run(trainer, env_config={}, max_steps=1)[keys.STEPS] == 2


@pytest.mark.parametrize(
    ("first", "second", "evaluates_alike", "trains_alike"),
    [
        ({}, {"env_config": LONG}, False, False),
        ({"env_config": LONG}, {"env_config": {}}, False, False),
        ({"eval_env_config": LONG}, {}, False, True),
        ({"env_config": LONG}, {}, True, True),  # None changes nothing
        ({"env_config": LONG}, {"eval_env_config": LONG}, True, True),
        ({"eval_env_config": LONG}, {"eval_env_config": LONG, "env_config": LONG}, True, False),
        ({"env_config": EACH}, {"env_config": EACH}, True, True),
    ],
)
def test_what_was_measured_under_other_physics_ends_no_run_and_is_not_compared(
    first, second, evaluates_alike, trains_alike, tmp_path
):
    trainer = make(resets=1, checkpoints=Checkpoints(tmp_path, best=EVALS))
    run(trainer, **first, steps_per_eval=2, max_steps=2)
    courses = trainer.record.results._courses
    trainer.checkpoints.best["value"] = courses[EVALS].best = courses["returns/mean"].best = 1e9
    stats = run(trainer, **second, steps_per_eval=3, stop_conditions=[SOLVED])
    assert stats[keys.STEPS] == (3 if evaluates_alike else 5)
    assert (trainer.checkpoints.best["value"] == 1e9) == (courses[EVALS].best == 1e9) == evaluates_alike
    assert (courses["returns/mean"].best == 1e9) == trains_alike
    assert len(courses["returns/mean"].points) == stats[keys.STEPS]  # the curve is whole
    moving = {"length": Scheduled([(0, 0.55), (1, 0.6)], by=EVALS)}
    with pytest.raises(ValueError, match="'eval/returns/mean', but this run makes no evaluations"):
        run(trainer, env_config=moving, max_steps=1)


def mark_best(trainer):
    """Have what was measured so far be surpassed by nothing."""
    for course in trainer.record.results._courses.values():
        course.best = 1e9
    if trainer.checkpoints.best is not None:
        trainer.checkpoints.best["value"] = 1e9


@pytest.mark.parametrize(
    ("evaluates", "second"),
    [("auto", {"steps_per_eval": 1}), ("auto", {"steps_per_eval": 1, "eval_env_config": LONG}), (False, {})],
)
def test_the_best_is_of_the_physics_from_the_reset_that_puts_them_in_force(evaluates, second, tmp_path):
    """A run goes on under those of before until that reset, and had its best of them for good."""
    saves = Checkpoints(tmp_path, best="returns/mean")
    trainer = make(resets=2, checkpoints=saves, eval_env=evaluates, callbacks=[at_step(4, mark_best)])
    run(trainer, env_config=LONG, max_steps=3)
    run(trainer, env_config={}, max_steps=2, **second)
    trained, evaluated = (trainer.record.results._courses.get(name) for name in ("returns/mean", EVALS))
    assert (trained.best, trainer.checkpoints.best["steps"]) == (trained.last, 5)
    assert evaluated is None or (evaluated.best == 1e9) == ("eval_env_config" in second)


def test_a_loop_of_steps_has_the_best_of_its_present_physics():
    trainer = make(resets=1, callbacks=[at_step(1, mark_best)])
    for config in (LONG, {}):
        trainer.step(env_config=config)
    trained = trainer.record.results._courses["returns/mean"]
    assert trained.best == trained.last


@pytest.mark.parametrize(
    ("first", "second", "anew"),
    [("auto", Worth, True), ("auto", True, False), (Worth, Worth, False), ("auto", ..., False), ("auto", False, True)],
)
def test_a_resumed_run_does_not_compare_what_other_environments_gave(first, second, anew, tmp_path):
    seen, tracker = [], MemoryTracker()
    saves = Checkpoints(tmp_path, best=None if second is False else EVALS)
    run(make(resets=1, eval_env=first, tracker=tracker, checkpoints=saves), steps_per_eval=1, max_steps=2)
    log = [lambda trainer, row: seen.append(row.get(EVALS))]
    again = Trainer.resume(tmp_path, eval_env=second, tracker=tracker, callbacks=log)
    run(again, steps_per_eval=2, max_steps=4)
    assert (seen[0] is None) == anew
    if second is Worth and anew:
        assert again.checkpoints.best["value"] == again.record.results.row[f"best/{EVALS}"] == 0.0


def test_a_resumed_run_whose_physics_are_not_in_force_yet_has_the_rows_of_the_whole_one(tmp_path):
    seen = []
    options = {"tracker": MemoryTracker(), "callbacks": [lambda trainer, row: seen.append(row.get(EVALS))]}
    trainer = make(resets=6, checkpoints=Checkpoints(tmp_path, every_steps=1, keep=9, best=EVALS), **options)
    run(trainer, max_steps=2)
    run(trainer, env_config=LONG, steps_per_eval=2, max_steps=3)
    best = trainer.checkpoints.best
    again = Trainer.resume(next(path for path in listed(tmp_path) if path.name.endswith("step-4")), **options)
    run(again)
    assert None is not seen[4] == seen[5]  # what was evaluated in step 4
    assert again.checkpoints.best == best


@pytest.mark.parametrize(("config", "seen"), [({}, True), (LONG, False)])
def test_what_was_measured_before_a_run_is_in_its_rows_where_the_run_measures_the_same(config, seen):
    trainer = make()
    trainer.eval()
    row = run(trainer, env_config=config, max_steps=1)
    assert (EVALS in row, EVALS in row.fresh) == (seen, seen)


# -- what is measured beside steps


@pytest.mark.parametrize("joined", [False, True])
@pytest.mark.parametrize("counting_first", [False, True])
def test_what_confirmations_measure_counts_for_the_other_conditions(joined, counting_first):
    never = Confirmed(HitsUpperBound(keys.STEPS, 2), by=HitsUpperBound(EVALS, 1e9))
    conditions = [ever_compared(), never] if counting_first else [never, ever_compared()]
    trainer = make()
    stats = run(trainer, stop_conditions=[conditions[0] | conditions[1]] if joined else conditions, max_steps=9)
    # Of two evaluations, after steps 2 and 3, one compares with the one before.
    assert stats[keys.STEPS] == 3
    assert [value for _, value in trainer.tracker.history(EVALS)][1:] == [stats[EVALS]]


def test_an_evaluation_in_a_loop_of_ones_own_is_counted_once_in_the_row_of_its_step():
    trainer = make()
    counted, sometimes = ever_compared(), StopsIncreasing(EVALS, 99)
    seen = []
    for stats in trainer:
        assert EVALS not in stats.fresh
        before = len(trainer.tracker.history(EVALS))
        if len(seen) % 2 == 1:
            assert trainer.eval()[EVALS] == stats[EVALS]
            assert EVALS in stats.fresh
            assert len(trainer.tracker.history(EVALS)) == before + 1  # tracked once
        seen.append(stats)
        sometimes(stats)
        if counted(stats):
            break
    # Two evaluations: one compares with the one before.
    expected = [(1, False, False), (2, True, True), (3, True, False), (4, True, True)]
    assert [(stats[keys.STEPS], EVALS in stats, EVALS in stats.fresh) for stats in seen] == expected
    assert sometimes.reference == max(stats[EVALS] for stats in seen[1:])


def test_what_confirms_the_end_is_tracked_at_the_present_step_and_saved_as_the_best(tmp_path):
    trainer = make(checkpoints=Checkpoints(tmp_path, every_steps=100, best=EVALS))
    stats = run(trainer, stop_conditions=[Confirmed(HitsUpperBound(keys.STEPS, 3), by=SOLVED)], max_steps=9)
    ((clock, value),) = trainer.tracker.history(EVALS)
    assert clock == stats[keys.ENV_STEPS] == 3 * 32
    assert stats[EVALS] == value
    last = read(listed(tmp_path)[-1])
    assert last.metadata["counters"][keys.STEPS] == 3
    assert last.state["best"] == {"metric": EVALS, "mode": "max", "value": value, "steps": 3}


# -- stops that are asked for


def stops_at(step, why):
    return at_step(step, lambda trainer: trainer.stop(why))


def test_a_callback_ends_a_run_which_is_finished_saved_and_over(tmp_path):
    trainer = make(
        checkpoints=Checkpoints(tmp_path, every_steps=100), callbacks=[stops_at(3, "the budget\n is spent ")]
    )
    stats = run(trainer, max_steps=9)
    assert stats[keys.STEPS] == trainer.state[keys.STEPS] == 3
    assert stats.stop_reason == trainer.stop_reason == "the budget is spent"
    assert len(trainer.tracker.history("losses/total")) == 3  # the row of the last step too
    assert (trainer.tracker.status, trainer.tracker.tags["rl8x.stop_reason"]) == ("FINISHED", "the budget is spent")
    assert (read(listed(tmp_path)[-1]).metadata["status"], saved_steps(tmp_path)[-1]) == ("FINISHED", 3)
    resumed = {"tracker": trainer.tracker, "callbacks": [lambda trainer, stats: None]}
    over = run(Trainer.resume(tmp_path, **resumed))
    assert (over[keys.STEPS], over.stop_reason) == (3, "the budget is spent")
    assert run(Trainer.resume(tmp_path, **resumed), max_steps=5)[keys.STEPS] == 5


def test_the_first_reason_counts_beside_those_of_conditions():
    trainer = make(callbacks=[stops_at(2, "first"), stops_at(2, "second")])
    stats = run(trainer, stop_conditions=[HitsUpperBound(keys.STEPS, 2)], max_steps=2)
    assert stats.stop_reason == "HitsUpperBound('algorithm/steps', 2): algorithm/steps = 2; first; max_steps=2"
    assert run(trainer, max_steps=1).stop_reason == "max_steps=1"  # another run knows nothing of it


def by_a_signal(trainer):
    os.kill(os.getpid(), signal.SIGUSR2)


def by_a_thread(trainer):
    thread = threading.Thread(target=trainer.stop, args=["asked"])
    thread.start()
    thread.join()


@pytest.mark.parametrize("do", [by_a_signal, by_a_thread])
def test_signal_handlers_and_other_threads_end_a_run(do, default_signals):
    trainer = make(callbacks=[at_step(1, do)])
    before = signal.signal(signal.SIGUSR2, lambda number, frame: trainer.stop("asked"))
    try:
        stats = run(trainer, max_steps=9)
    finally:
        signal.signal(signal.SIGUSR2, before)
    assert (stats[keys.STEPS], stats.stop_reason, trainer.tracker.status) == (1, "asked", "FINISHED")


def test_a_callback_ends_a_loop_over_the_trainer_too():
    trainer = make(callbacks=[stops_at(3, "enough")])
    assert [(stats[keys.STEPS], stats.stop_reason) for stats in trainer] == [(1, None), (2, None), (3, "enough")]
    trainer.close()
    assert (trainer.tracker.status, trainer.tracker.tags["rl8x.stop_reason"]) == ("FINISHED", "enough")
    assert trainer.step().stop_reason is None


def test_a_stop_of_nothing_or_for_nothing_is_refused():
    trainer = make()
    for _ in range(2):
        with pytest.raises(RuntimeError, match="ends a run\\(\\) in progress, and there is none"):
            trainer.stop("why")
        run(trainer, max_steps=1)
    for why in (None, " "):
        with pytest.raises((TypeError, ValueError), match=r"`why` must .*trainer\.stop\('the budget is spent'\); got"):
            run(make(callbacks=[stops_at(1, why)]), max_steps=2)


@pytest.mark.parametrize("drive", [lambda trainer: run(trainer, max_steps=2), Trainer.step], ids=["run", "step"])
def test_what_failed_leaves_no_stop_behind(drive):
    trainer = make(callbacks=[stops_at(1, "enough"), at_step(1, lambda trainer: 1 // 0)])
    with pytest.raises(ZeroDivisionError):
        drive(trainer)
    assert drive(trainer).stop_reason in (None, "max_steps=2")


# -- waits for evaluations


def test_a_best_by_evaluations_that_nobody_makes_is_warned_of(tmp_path, recwarn):
    def best(name, callbacks=(), **options):
        trainer = make(checkpoints=Checkpoints(tmp_path / name, best=EVALS), callbacks=callbacks)
        run(trainer, max_steps=1, **options)
        return trainer.checkpoints.best

    assert best("now and then", steps_per_eval=1) is not None
    assert best("to confirm", stop_conditions=[Confirmed(HitsUpperBound(keys.STEPS, 1), by=SOLVED)]) is not None
    assert best("in a callback", callbacks=[lambda trainer, stats: trainer.eval() and None]) is not None
    assert not [each for each in recwarn if "best of" in str(each.message)]
    with pytest.warns(RuntimeWarning, match="best of 'eval/returns/mean': this run makes no evaluations"):
        assert best("never") is None


def test_a_condition_on_what_a_callback_measures_asks_for_its_declaration():
    def measure(trainer, row):
        trainer.eval()

    trainer = make(callbacks=[measure])
    with pytest.raises(ValueError, match=r"declare that: CALLBACK.metric_names = \['eval/returns/mean'\]\.$"):
        run(trainer, stop_conditions=[SOLVED])
    measure.metric_names = [EVALS]
    assert run(trainer, stop_conditions=[SOLVED])[keys.STEPS] == 1


def test_a_plain_callable_that_waits_for_them_is_refused_at_the_first_row():
    trainer = make()
    with pytest.raises(ValueError, match=r"reads 'eval/returns/mean', but .* give `steps_per_eval`"):
        run(trainer, stop_conditions=[lambda row: row[EVALS] > 475], max_steps=2)
    assert trainer.state[keys.STEPS] == 1
    with pytest.raises(ValueError, match=r"Unknown metric 'eval/episodes/returns/mean' .*Nearest: .*eval/returns/mean"):
        run(make(), steps_per_eval=1, stop_conditions=[lambda row: row["eval/episodes/returns/mean"] > 1])
    waits = lambda row: row[EVALS] > 0 or row[keys.STEPS] > 9  # noqa: E731
    assert run(trainer, stop_conditions=[waits], steps_per_eval=2)[keys.STEPS] == 3


@pytest.mark.parametrize(("text", "steps"), [("env/steps >= 96", 3), ("env/steps > 96", 4), ("not env/steps <= 96", 4)])
def test_a_run_until_more_than_a_bound_is_as_long_as_one_that_reaches_the_next(text, steps):
    trainer = make()
    assert run(trainer, stop_conditions=[from_spec(text)])["algorithm/steps"] == steps
    assert trainer.record.run.most_steps == pytest.approx(3)


# -- errors


class Silent(RuntimeError):
    def __str__(self):
        raise KeyError("no words")


def fails(trainer, row):
    raise Silent("lost")


def test_an_exception_that_cannot_say_what_it_is_ends_the_run_as_failed(mlruns, mlflow_client, capsys):
    trainer = make(tracker=MLflowTracker(), callbacks=[fails])
    with pytest.raises(Silent):
        trainer.run(max_steps=3, progress="lines")
    found = mlflow_client.get_run(trainer.tracker.run_id)
    assert found.info.status == "FAILED"
    assert (trainer.stop_reason, found.data.tags["rl8x.stop_reason"]) == ("Silent", "Silent")
    assert "failed after 1 step: Silent" in capsys.readouterr().err
    assert trainer.ending[-1].startswith("to continue from step ")
    logged = Path(mlflow_client.download_artifacts(found.info.run_id, "traceback.txt")).read_text()
    assert "in fails" in logged
    assert "Silent" in logged
