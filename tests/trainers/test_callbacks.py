import warnings

import numpy as np
import pytest
from tests.trainers import helpers
from tests.trainers.helpers import run

from rl8x import And, HitsUpperBound, Plateau, keys


def make(*callbacks, **options):
    return helpers.make(trainer={"callbacks": callbacks, "num_eval_envs": 2} | options)


class Score:
    """Tells a metric that does not change any more after the third step."""

    metric_names = ("score/mine",)

    def __call__(self, trainer, stats):
        return {"score/mine": min(3, int(stats[keys.STEPS]))}


def test_a_condition_on_a_callbacks_metric_stops_the_run_in_the_row_that_has_it():
    trainer = make(Score())
    stats = run(trainer, stop_conditions=[Plateau("score/mine", patience=2)])
    assert stats[keys.STEPS] == 5
    assert stats["score/mine"] == 3.0
    assert "score/mine" in stats.fresh
    assert trainer.tracker.history("score/mine") == [(32, 1), (64, 2), (96, 3), (128, 3), (160, 3)]
    assert "score/mine" in trainer.metric_names


@pytest.mark.parametrize("returns", [True, False])
def test_a_callback_that_evaluates_makes_evaluations_to_wait_for(returns):
    def evaluates(trainer, stats):
        evaluation = trainer.eval() if stats[keys.STEPS] == 2 else None
        return evaluation if returns else None

    evaluates.metric_names = ("eval/returns/mean",)
    trainer = make(evaluates)
    stats = run(trainer, stop_conditions=[HitsUpperBound("eval/returns/mean", 0)])
    assert stats[keys.STEPS] == 2
    assert "eval/returns/mean" in stats.fresh
    assert [len(trainer.tracker.history(name)) for name in ("eval/returns/mean", "profiling/eval_ms")] == [1, 1]


def test_what_a_callback_declares_of_its_evaluations_joins_the_row():
    metrics = ["eval/long/returns/mean", "eval/length 1/returns/mean", "grid/lengths/worst_cell"]

    def evaluates(trainer, stats):
        trainer.eval(name="long", env_config={"length": 1.0})
        trainer.eval(env_config={"length": 1.0})
        trainer.evaluate_grid({"length": [0.5, 1.0]}, episodes=2, name="lengths")

    evaluates.metric_names = metrics
    trainer = make(evaluates)
    stats = run(trainer, stop_conditions=[And(*(HitsUpperBound(metric, 0) for metric in metrics))], max_steps=2)
    assert stats[keys.STEPS] == 1
    assert set(metrics) <= stats.fresh
    for metric in metrics:
        assert trainer.tracker.history(metric) == [(stats[keys.ENV_STEPS], stats[metric])]


def declaring(names, returned=None):
    def callback(trainer, stats):
        return returned

    callback.metric_names = names
    return callback


LIST = "must be a list of names; got"


@pytest.mark.parametrize(
    ("callbacks", "message"),
    [
        ([declaring(["returns/mean"])], "declares 'returns/mean', which is a metric of the trainer"),
        ([Score(), declaring(["score/mine"])], "declares 'score/mine', which is a metric of the callback Score"),
        *[([declaring([name])], "not a legal name of a metric") for name in ("", "a%", 3)],
        ([declaring("score")], f"{LIST} 'score'"),
        ([declaring(name for name in ["score"])], f"{LIST} <generator"),  # which a look uses up
        (["score"], "A callback is called with"),
        (Score(), r"`callbacks` must be a list of functions, \[\.\.\.\]; got <.*Score"),
    ],
)
def test_names_that_are_taken_or_no_names_are_refused(callbacks, message):
    with pytest.raises((TypeError, ValueError), match=message):
        make(callbacks=callbacks)


def test_callbacks_of_an_iterator_are_all_called():
    rows = []
    make(callbacks=filter(None, [lambda trainer, stats: rows.append(dict(stats)), None])).step()
    assert len(rows) == 1


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        ({"scor": 1.0}, "returned 'scor', which its `metric_names` do not have. Did you mean 'score'"),
        ({"returns/mean": 1.0}, "returned 'returns/mean'"),
        (3.0, "must return its metrics by name"),
        ({"score": "high"}, "'score' must be one number"),
    ],
)
def test_what_a_callback_returns_is_checked(returned, message):
    with pytest.raises((TypeError, ValueError), match=message):
        make(declaring(["score"], returned)).step()


@pytest.mark.parametrize("false", [False, np.False_])
def test_returning_false_does_not_end_the_run_and_a_line_says_what_does(false):
    def callback(trainer, stats):
        return false

    trainer = make(callback)
    says = r"callback returned False, which does not end .*trainer\.stop\('why'\)"
    with pytest.warns(RuntimeWarning, match=says) as told:
        assert run(trainer, max_steps=2)[keys.STEPS] == 2
    assert len({(warning.filename, warning.lineno) for warning in told}) == 1  # shown once
    with pytest.raises(TypeError, match=r"got (np\.)?False_?\. To end the run call trainer\.stop\('why'\)"):
        make(declaring(["score"], false)).step()
    with warnings.catch_warnings(action="error"):
        make(lambda trainer, stats: True).step()


def test_a_metric_that_is_not_declared_is_told_of():
    def lost(trainer, stats):
        return {"score": 1.0, **trainer.eval(env_config={"length": 1.0})}

    trainer = make(lost)
    with pytest.warns(RuntimeWarning, match=r"lost returned 'score', which is not tracked.*metric_names = \['score'\]"):
        assert "score" not in trainer.step()
    with warnings.catch_warnings(action="error"):
        make(lambda trainer, stats: {**stats, **trainer.eval(env_config={"length": 1.0})}).step()


def test_a_callback_cannot_make_another_step():
    calls = []

    def steps(trainer, stats):
        calls.append(stats)
        trainer.step()

    def runs(trainer, stats):
        trainer.run(max_steps=1)

    closes = make(lambda trainer, stats: trainer.close())
    with pytest.raises(RuntimeError, match="ends no run"):
        run(closes, max_steps=2)
    assert closes.tracker.status == "FAILED"
    for drive in (lambda trainer: run(trainer, max_steps=2), lambda trainer: trainer.step()):
        with pytest.raises(RuntimeError, match="a callback cannot make another one"):
            drive(make(steps))
        with pytest.raises(RuntimeError, match="not from its callbacks"):
            drive(make(runs))
    assert len(calls) == 2


@pytest.mark.parametrize(
    "change",
    [
        lambda stats: stats.clear(),
        lambda stats: stats.pop(keys.STEPS),
        lambda stats: stats.update({keys.STEPS: 0.0}),
        lambda stats: stats.__setitem__(keys.STEPS, 0.0),
        lambda stats: stats.__delitem__(keys.STEPS),
        lambda stats: stats.__ior__({keys.STEPS: 0.0}),
    ],
)
def test_no_callback_takes_a_metric_from_those_who_read_the_row_after_it(change):
    trainer = make(lambda trainer, stats: change(stats))
    with pytest.raises(TypeError, match=r"is read-only: change a copy, dict\(row\)"):
        run(trainer, stop_conditions=[HitsUpperBound(keys.STEPS, 2)], max_steps=4)


def test_the_counters_that_a_callback_keeps_or_changes_are_its_own():
    kept = []

    def keeps(trainer, stats):
        kept.append(trainer.state)
        trainer.state[keys.STEPS] = 0

    trainer = make(keeps)
    run(trainer, max_steps=3)
    assert [each[keys.STEPS] for each in (*kept, trainer.state)] == [1, 2, 3, 3]
