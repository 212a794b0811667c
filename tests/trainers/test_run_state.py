"""How a run stops: at once, at the right place, with its checkpoint; and what it refuses to wait for."""

import os
import signal
import threading
from pathlib import Path

import pytest
from tests.trainers.test_evaluation import build, run

from rl8x import keys
from rl8x.checkpoint import Checkpoints, listed, read
from rl8x.conditions import Confirmed, HitsUpperBound, Plateau, StopsIncreasing, from_spec
from rl8x.envs import CartPole
from rl8x.randomization import Scheduled
from rl8x.tracking import MemoryTracker, MLflowTracker
from rl8x.trainers import Trainer

SOLVED = HitsUpperBound("eval/returns/mean", 1)


def make(**options):
    return Trainer(build(), tracker=MemoryTracker(), num_eval_envs=2, **options)


def test_an_evaluation_before_a_step_is_fresh_in_its_row_and_of_an_earlier_policy(tmp_path):
    def started(**options):
        trainer = make(**options)
        trainer.eval()
        return trainer

    trainer = started()
    rows = [trainer.step() for _ in range(2)]
    assert ["eval/returns/mean" in row.fresh for row in rows] == [True, False]
    trainer = started(checkpoints=Checkpoints(tmp_path, best="eval/returns/mean"))
    trainer.save()
    for each in (trainer, Trainer.resume(tmp_path, tracker=MemoryTracker())):
        plateau = Plateau("eval/returns/mean", patience=1, rtol=1e9)
        each.run(steps_per_eval=3, stop_conditions=[plateau], max_steps=5, progress="none")
        assert each.state[keys.STEPS] == 3  # that before the run, and that after its third step
        assert each.checkpoints.best["steps"] == 3  # no checkpoint has the policy that was evaluated first


LONG = {"length": 9.0}


class Worth(CartPole):
    """Nothing."""

    def transition(self, state, actions, parameters, noise):
        state, rewards, ends = super().transition(state, actions, parameters, noise)
        return state, 0.0 * rewards, ends


EACH = {"length": [0.5, 0.6, 0.7, 0.8]}


@pytest.mark.parametrize(
    ("first", "second", "evaluates_alike", "trains_alike"),
    [
        ({}, {"env_config": LONG}, False, False),
        ({"env_config": LONG}, {"env_config": {}}, False, False),
        ({}, {"eval_env_config": LONG}, False, True),
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
    saved, evaluated = Checkpoints(tmp_path, best="eval/returns/mean"), "eval/returns/mean"
    trainer = Trainer(build(horizons_per_env_reset=1), tracker=MemoryTracker(), num_eval_envs=2, checkpoints=saved)
    trainer.run(**first, steps_per_eval=2, max_steps=2, progress="none")
    courses = trainer.record.results._courses
    trainer.checkpoints.best["value"] = courses[evaluated].best = courses["returns/mean"].best = 1e9
    stats = trainer.run(**second, steps_per_eval=3, stop_conditions=[SOLVED], progress="none")
    assert stats[keys.STEPS] == (3 if evaluates_alike else 5)
    assert (trainer.checkpoints.best["value"] == 1e9) == (courses[evaluated].best == 1e9) == evaluates_alike
    assert (courses["returns/mean"].best == 1e9) == trains_alike
    assert len(courses["returns/mean"].points) == stats[keys.STEPS]  # the curve is whole
    moving = {"length": Scheduled([(0, 0.55), (1, 0.6)], by=evaluated)}
    with pytest.raises(ValueError, match="'eval/returns/mean', but this run makes no evaluations"):
        trainer.run(env_config=moving, max_steps=1, progress="none")


@pytest.mark.parametrize(
    ("first", "second", "anew"),
    [("auto", Worth, True), ("auto", True, False), (Worth, Worth, False), ("auto", ..., False), ("auto", False, True)],
)
def test_a_resumed_run_does_not_compare_what_other_environments_gave(first, second, anew, tmp_path):
    rows, name, tracker = [], "eval/returns/mean", MemoryTracker()
    log = [lambda trainer, row: rows.append(row.get(name))]
    saved = Checkpoints(tmp_path, best=None if second is False else name)
    algorithm = build(horizons_per_env_reset=1)
    Trainer(algorithm, eval_env=first, num_eval_envs=2, tracker=tracker, checkpoints=saved).run(
        steps_per_eval=1, max_steps=2, progress="none"
    )
    again = Trainer.resume(tmp_path, eval_env=second, tracker=tracker, callbacks=log)
    again.run(steps_per_eval=2, max_steps=4, progress="none")
    assert (rows[0] is None) == anew
    if second is Worth and anew:
        assert again.checkpoints.best["value"] == again.record.results.row[f"best/{name}"] == 0.0


def test_a_resumed_run_whose_physics_are_not_in_force_yet_has_the_rows_of_the_whole_one(tmp_path):
    rows, saved = [], Checkpoints(tmp_path, every_steps=1, keep=9, best="eval/returns/mean")
    options = {
        "tracker": MemoryTracker(),
        "callbacks": [lambda trainer, row: rows.append(row.get("eval/returns/mean"))],
    }
    trainer = Trainer(build(horizons_per_env_reset=6), num_eval_envs=2, checkpoints=saved, **options)
    trainer.run(max_steps=2, progress="none")
    trainer.run(env_config=LONG, steps_per_eval=2, max_steps=3, progress="none")
    best = trainer.checkpoints.best
    again = Trainer.resume(next(path for path in listed(tmp_path) if path.name.endswith("step-4")), **options)
    again.run(progress="none")
    assert None is not rows[4] == rows[5]  # what was evaluated in step 4
    assert again.checkpoints.best == best


def test_what_was_measured_before_a_run_is_in_its_rows_where_the_run_measures_the_same():
    for config, seen in (({}, True), (LONG, False)):
        trainer = make()
        trainer.eval()
        row = trainer.run(env_config=config, max_steps=1, progress="none")
        assert ("eval/returns/mean" in row, "eval/returns/mean" in row.fresh) == (seen, seen)


@pytest.mark.parametrize("joined", [False, True])
@pytest.mark.parametrize("counting_first", [False, True])
def test_what_confirmations_measure_counts_for_the_other_conditions(joined, counting_first):
    never = Confirmed(HitsUpperBound(keys.STEPS, 2), by=HitsUpperBound("eval/returns/mean", 1e9))
    conditions = [never, Plateau("eval/returns/mean", patience=1, rtol=1e9)]
    if counting_first:
        conditions.reverse()
    trainer = make()
    conditions = [conditions[0] | conditions[1]] if joined else conditions
    stats = trainer.run(stop_conditions=conditions, max_steps=9, progress="none")
    # Of two evaluations, after steps 2 and 3, one compares with the one before.
    assert stats[keys.STEPS] == 3
    assert [value for _, value in trainer.tracker.history("eval/returns/mean")][1:] == [stats["eval/returns/mean"]]


def test_an_evaluation_in_a_loop_of_ones_own_is_counted_once_in_the_row_of_its_step():
    trainer = make()
    counted, sometimes = Plateau("eval/returns/mean", patience=1, rtol=1e9), StopsIncreasing("eval/returns/mean", 99)
    rows = []
    for stats in trainer:
        assert "eval/returns/mean" not in stats.fresh
        before = len(trainer.tracker.history("eval/returns/mean"))
        if len(rows) % 2 == 1:
            measured = trainer.eval()
            assert stats["eval/returns/mean"] == measured["eval/returns/mean"]
            assert "eval/returns/mean" in stats.fresh
            assert len(trainer.tracker.history("eval/returns/mean")) == before + 1  # tracked once
        rows.append(stats)
        sometimes(stats)
        if counted(stats):
            break
    trainer.close()
    assert [stats[keys.STEPS] for stats in rows] == [1, 2, 3, 4]  # two evaluations: one compares with the one before
    expected = [(False, False), (True, True), (True, False), (True, True)]
    assert [("eval/returns/mean" in stats, "eval/returns/mean" in stats.fresh) for stats in rows] == expected
    assert sometimes.reference == max(stats["eval/returns/mean"] for stats in rows[1:])


def test_what_confirms_the_end_is_tracked_at_the_present_step_and_saved_as_the_best(tmp_path):
    trainer = make(checkpoints=Checkpoints(tmp_path, every_steps=100, best="eval/returns/mean"))
    confirmed = Confirmed(HitsUpperBound(keys.STEPS, 3), by=SOLVED)
    stats = trainer.run(stop_conditions=[confirmed], max_steps=9, progress="none")
    ((clock, value),) = trainer.tracker.history("eval/returns/mean")
    assert clock == stats[keys.ENV_STEPS] == 3 * 32
    assert stats["eval/returns/mean"] == value
    last = read(listed(tmp_path)[-1])
    assert last.metadata["counters"][keys.STEPS] == 3
    assert last.state["best"] == {"metric": "eval/returns/mean", "mode": "max", "value": value, "steps": 3}


def stops_at(step, why, then=None):
    def callback(trainer, stats):
        if stats[keys.STEPS] == step:
            trainer.stop(why)
        elif then is not None:
            then(trainer)

    return callback


def test_a_callback_ends_a_run_which_is_finished_saved_and_over(tmp_path):
    trainer = make(
        checkpoints=Checkpoints(tmp_path, every_steps=100), callbacks=[stops_at(3, "the budget\n is spent ")]
    )
    stats = trainer.run(max_steps=9, progress="none")
    assert stats[keys.STEPS] == trainer.state[keys.STEPS] == 3
    assert stats.stop_reason == trainer.stop_reason == "the budget is spent"
    assert len(trainer.tracker.history("losses/total")) == 3  # the row of the last step too
    assert trainer.tracker.status == "FINISHED"
    assert trainer.tracker.tags["rl8x.stop_reason"] == "the budget is spent"
    saved = read(listed(tmp_path)[-1])
    assert (saved.metadata["status"], saved.metadata["counters"][keys.STEPS]) == ("FINISHED", 3)
    resumed = {"tracker": trainer.tracker, "callbacks": [lambda trainer, stats: None]}
    over = Trainer.resume(tmp_path, **resumed).run(progress="none")
    assert (over[keys.STEPS], over.stop_reason) == (3, "the budget is spent")
    assert Trainer.resume(tmp_path, **resumed).run(max_steps=5, progress="none")[keys.STEPS] == 5


def test_the_first_reason_counts_beside_those_of_conditions():
    callbacks = [stops_at(2, "first"), stops_at(2, "second")]
    trainer = make(callbacks=callbacks)
    stats = trainer.run(stop_conditions=[HitsUpperBound(keys.STEPS, 2)], max_steps=2, progress="none")
    assert stats.stop_reason == "HitsUpperBound('algorithm/steps', 2): algorithm/steps = 2; first; max_steps=2"
    assert trainer.run(max_steps=1, progress="none").stop_reason == "max_steps=1"  # another run knows nothing of it


def test_signal_handlers_and_other_threads_end_a_run(default_signals):
    trainer = make(callbacks=[lambda trainer, stats: os.kill(os.getpid(), signal.SIGUSR2)])
    before = signal.signal(signal.SIGUSR2, lambda number, frame: trainer.stop("a signal"))
    try:
        assert trainer.run(max_steps=9, progress="none").stop_reason == "a signal"
    finally:
        signal.signal(signal.SIGUSR2, before)

    def of_a_thread(trainer, stats):
        thread = threading.Thread(target=trainer.stop, args=["a thread"])
        thread.start()
        thread.join()

    trainer = make(callbacks=[of_a_thread])
    stats = trainer.run(max_steps=9, progress="none")
    assert (stats[keys.STEPS], stats.stop_reason, trainer.tracker.status) == (1, "a thread", "FINISHED")


def test_a_callback_ends_a_loop_over_the_trainer_too():
    trainer = make(callbacks=[stops_at(3, "enough")])
    rows = [(stats[keys.STEPS], stats.stop_reason) for stats in trainer]
    assert rows == [(1, None), (2, None), (3, "enough")]
    trainer.close()
    assert (trainer.tracker.status, trainer.tracker.tags["rl8x.stop_reason"]) == ("FINISHED", "enough")
    assert trainer.step().stop_reason is None


def test_a_stop_of_nothing_or_for_nothing_is_refused():
    trainer = make()
    for _ in range(2):
        with pytest.raises(RuntimeError, match="ends a run\\(\\) in progress, and there is none"):
            trainer.stop("why")
        trainer.run(max_steps=1, progress="none")
    for why, error in ((None, TypeError), (3, TypeError), (" ", ValueError)):
        with pytest.raises(error, match=r"`why` must .*trainer\.stop\('the budget is spent'\); got"):
            make(callbacks=[stops_at(1, why)]).run(max_steps=2, progress="none")


@pytest.mark.parametrize("in_run", [True, False])
def test_what_failed_leaves_no_stop_behind(in_run):
    def fail(trainer, stats):
        if stats[keys.STEPS] == 1:
            raise ZeroDivisionError

    trainer = make(callbacks=[stops_at(1, "enough"), fail])
    with pytest.raises(ZeroDivisionError):
        trainer.run(max_steps=2, progress="none") if in_run else trainer.step()
    assert trainer.step().stop_reason is None
    assert trainer.run(max_steps=2, progress="none").stop_reason == "max_steps=2"


def test_a_best_by_evaluations_that_nobody_makes_is_warned_of(tmp_path, recwarn):
    def run(name, callbacks=(), **options):
        trainer = make(checkpoints=Checkpoints(tmp_path / name, best="eval/returns/mean"), callbacks=callbacks)
        trainer.run(max_steps=1, progress="none", **options)
        return trainer.checkpoints.best

    assert run("now and then", steps_per_eval=1) is not None
    assert run("to confirm", stop_conditions=[Confirmed(HitsUpperBound(keys.STEPS, 1), by=SOLVED)]) is not None
    assert run("in a callback", callbacks=[lambda trainer, stats: trainer.eval() and None]) is not None
    assert not [each for each in recwarn if "best of" in str(each.message)]
    with pytest.warns(RuntimeWarning, match="best of 'eval/returns/mean': this run makes no evaluations"):
        assert run("never") is None


class Silent(RuntimeError):
    def __str__(self):
        raise KeyError("no words")


def fails(trainer, row):
    raise Silent("lost")


def test_an_exception_that_cannot_say_what_it_is_ends_the_run_as_failed(mlruns, mlflow_client, capsys):
    trainer = Trainer(build(), tracker=MLflowTracker(), num_eval_envs=2, callbacks=[fails])
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


HIGH = HitsUpperBound("eval/returns/mean", 475)


@pytest.mark.parametrize(
    "condition",
    [
        HIGH,
        HitsUpperBound("env/steps", 64) & ~Plateau("eval/returns/mean"),
        Confirmed(HIGH, by=HitsUpperBound("eval/returns/min", 1)),
    ],
    ids=["bound", "composed", "confirmed only after an evaluation"],
)
def test_waiting_for_evaluations_that_nobody_makes_is_refused_before_the_first_step(condition):
    trainer = make()
    with pytest.raises(ValueError, match=r"reads 'eval/returns/mean', but .* give `steps_per_eval`") as caught:
        run(trainer, stop_conditions=[condition], max_steps=2)
    assert "\n" not in str(caught.value)
    assert trainer.state[keys.COLLECTS] == 0
    assert run(trainer, stop_conditions=[condition], max_steps=1, steps_per_eval=1)[keys.STEPS] == 1


def test_a_condition_on_what_a_callback_measures_asks_for_its_declaration():
    def measure(trainer, row):
        trainer.eval()

    trainer = make(callbacks=[measure])
    with pytest.raises(ValueError, match=r"declare that: CALLBACK.metric_names = \['eval/returns/mean'\]\.$"):
        run(trainer, stop_conditions=[SOLVED])
    measure.metric_names = ["eval/returns/mean"]
    assert run(trainer, stop_conditions=[SOLVED])[keys.STEPS] == 1


def test_a_plain_callable_that_waits_for_them_is_refused_at_the_first_row():
    trainer = make()
    with pytest.raises(ValueError, match=r"reads 'eval/returns/mean', but .* give `steps_per_eval`"):
        run(trainer, stop_conditions=[lambda row: row["eval/returns/mean"] > 475])
    assert trainer.state[keys.STEPS] == 1
    waits = lambda row: row["eval/returns/mean"] > 0 or row[keys.STEPS] > 9  # noqa: E731
    assert run(trainer, stop_conditions=[waits], steps_per_eval=2)[keys.STEPS] == 3


@pytest.mark.parametrize(("text", "steps"), [("env/steps >= 96", 3), ("env/steps > 96", 4), ("not env/steps <= 96", 4)])
def test_a_run_until_more_than_a_bound_is_as_long_as_one_that_reaches_the_next(text, steps):
    trainer = make()
    stats = run(trainer, stop_conditions=[from_spec(text)])
    assert stats["algorithm/steps"] == steps
    assert trainer.record.run.most_steps == pytest.approx(3)


def test_a_warning_of_a_resumed_run_names_the_line_that_runs_it(tmp_path):
    make(checkpoints=tmp_path, callbacks=[lambda trainer, stats: None]).run(max_steps=1, progress="none")
    trainer = Trainer.resume(tmp_path, tracker=MemoryTracker())
    with pytest.warns(RuntimeWarning, match="the run had callbacks") as told:
        trainer.run(max_steps=2, progress="none")
    assert [warning.filename for warning in told] == [__file__]
