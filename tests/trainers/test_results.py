"""What a run says that it has come to, against its rows."""

import json
import math

import pytest

from rl8x.algorithms import PPOConfig
from rl8x.envs import CartPole
from rl8x.tracking import MemoryTracker
from rl8x.trainers import Trainer
from rl8x.trainers.results import MAX_POINTS, Course, Results

OPTIONS = {"num_envs": 4, "horizon": 8, "device": "cpu", "seed": 0, "model_config": {"hidden_sizes": [8]}}
NAMES = ("final", "best", "best_step")


def trained(env=CartPole, tracker=None, **options):
    trainer = Trainer(PPOConfig(**OPTIONS).build(env), tracker=tracker or MemoryTracker(), num_eval_envs=2)
    trainer.run(**{"max_steps": 4, "steps_per_eval": 1, "progress": "none"} | options)
    return trainer


def ends(tracker, name):
    return [tracker.history(f"{kind}/{name}") for kind in NAMES]


@pytest.mark.parametrize("name", ["eval/returns/mean", "episodes/returns/mean"])
def test_the_last_and_the_best_are_logged_once_at_the_end(name):
    tracker = trained().tracker
    history = tracker.history(name)
    steps, values = zip(*history, strict=True)
    best = values.index(max(values))
    end = tracker.history("env/steps")[-1][1]
    assert ends(tracker, name) == [[(end, values[-1])], [(end, values[best])], [(end, steps[best])]]
    assert len(history) > 1
    assert {row.step for row in tracker.rows if "final/eval/returns/mean" in row.metrics} == {end}


def test_a_run_that_fails_has_a_result_but_no_metrics_of_its_end_and_one_that_never_stepped_has_none():
    def fail(trainer, stats):
        if trainer.state["algorithm/steps"] == 2:
            raise RuntimeError("no more")

    trainer = Trainer(PPOConfig(**OPTIONS).build(CartPole), tracker=MemoryTracker(), callbacks=[fail])
    with pytest.raises(RuntimeError):
        trainer.run(progress="none", max_steps=9)
    last = trainer.tracker.history("episodes/returns/mean")[-1][1]
    assert trainer.tracker.tags["rl8x.result"].startswith(f"episodes/returns {last:.4g}, best ")
    assert not [name for row in trainer.tracker.rows for name in row.metrics if name.startswith("final/")]
    empty = MemoryTracker()
    Trainer(PPOConfig(**OPTIONS).build(CartPole), tracker=empty).close()
    assert empty.rows == []


def test_a_resumed_run_has_the_results_of_all_of_it(tmp_path):
    whole = trained().tracker
    best_step = ends(whole, "eval/returns/mean")[2][0][1]
    first = Trainer(
        PPOConfig(**OPTIONS).build(CartPole), tracker=MemoryTracker(), num_eval_envs=2, checkpoints=tmp_path
    )
    first.run(max_steps=2, steps_per_eval=1, progress="none")
    second = Trainer.resume(tmp_path, tracker=first.tracker)
    second.run(max_steps=4, progress="none")
    assert [course[-1] for course in ends(second.tracker, "eval/returns/mean")] == [
        course[-1] for course in ends(whole, "eval/returns/mean")
    ]
    assert second.tracker.tags["rl8x.result"] == whole.tags["rl8x.result"]
    assert best_step > 0


def test_an_evaluation_after_the_end_changes_no_result():
    trainer = trained()
    before = list(ends(trainer.tracker, "eval/returns/mean"))
    trainer.eval()
    trainer.close()
    assert ends(trainer.tracker, "eval/returns/mean") == before


@pytest.mark.parametrize("count", [1, 2, MAX_POINTS, MAX_POINTS + 1, 5000])
def test_a_course_is_thinned_evenly_and_goes_on_from_its_state(count):
    values = [math.sin(step) for step in range(count)]
    whole, saved = Course(), Course()
    for step, value in enumerate(values):
        whole.add(10 * step, value)
        if step == count // 2:
            saved.load_state_dict(json.loads(json.dumps(whole.state_dict())))
    for step, value in list(enumerate(values))[count // 2 + 1 :]:
        saved.add(10 * step, value)
    assert saved.state_dict() == whole.state_dict()
    assert (whole.last, whole.best, whole.best_step) == (values[-1], max(values), 10 * values.index(max(values)))
    every = 1
    while -(-count // every) > MAX_POINTS:
        every *= 2
    expected = [[10 * step, values[step]] for step in range(0, count, every)]
    last = [10 * (count - 1), values[-1]]
    assert whole.points == (expected if expected[-1] == last else [*expected, last])


def test_what_is_not_finite_is_no_result():
    results = Results()
    results.take({"returns/mean": math.nan, "losses/total": 1.0}, 1)
    assert (results.headline, results.row, str(results)) == (None, {}, "")
    results.take({"returns/mean": 3.0}, 2)
    results.take({"returns/mean": math.inf}, 3)
    assert results.row == {"final/returns/mean": 3.0, "best/returns/mean": 3.0, "best_step/returns/mean": 2}
    assert str(results) == "returns 3, best 3"
