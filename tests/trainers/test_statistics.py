"""What a run says that it has come to, against its rows."""

import dataclasses
import json
import math

import pytest

from rl8x.algorithms import PPOConfig
from rl8x.envs import CartPole
from rl8x.tracking import MemoryTracker, MLflowTracker
from rl8x.trainers import Trainer
from rl8x.trainers.rows import MAX_POINTS, Course, Results

OPTIONS = {"num_envs": 4, "horizon": 8, "device": "cpu", "seed": 0, "model_config": {"hidden_sizes": [8]}}
NAMES = ("final", "best", "best_step")


def trained(**options):
    trainer = Trainer(PPOConfig(**OPTIONS).build(CartPole), tracker=MLflowTracker(), num_eval_envs=2)
    trainer.run(**{"max_steps": 4, "steps_per_eval": 1, "progress": "none"} | options)
    return trainer


def history(client, trainer, name):
    return [(point.step, point.value) for point in client.get_metric_history(trainer.tracker.run_id, name)]


def ends(client, trainer, name):
    return [history(client, trainer, f"{kind}/{name}") for kind in NAMES]


def test_the_last_and_the_best_are_logged_once_at_the_end(mlflow_client):
    trainer = trained()
    end = trainer.state["env/steps"]
    for name in ("eval/returns/mean", "episodes/returns/mean"):
        steps, values = zip(*history(mlflow_client, trainer, name), strict=True)
        assert len(values) > 1
        best = values.index(max(values))
        assert ends(mlflow_client, trainer, name) == [[(end, values[-1])], [(end, values[best])], [(end, steps[best])]]


def test_a_run_that_fails_has_a_result_but_no_metrics_of_its_end_and_one_that_never_stepped_has_none(mlflow_client):
    def fail(trainer, stats):
        if trainer.state["algorithm/steps"] == 2:
            raise RuntimeError("no more")

    trainer = Trainer(PPOConfig(**OPTIONS).build(CartPole), tracker=MLflowTracker(), callbacks=[fail])
    with pytest.raises(RuntimeError):
        trainer.run(progress="none", max_steps=9)
    last = history(mlflow_client, trainer, "episodes/returns/mean")[-1][1]
    data = mlflow_client.get_run(trainer.tracker.run_id).data
    assert data.tags["rl8x.result"].startswith(f"{last:.4g}, best ")
    assert data.tags["rl8x.result"].endswith(" (episodes/returns)")
    assert not [name for name in data.metrics if name.startswith("final/")]
    empty = MemoryTracker()
    Trainer(PPOConfig(**OPTIONS).build(CartPole), tracker=empty).close()
    assert (empty.rows, empty.tags) == ([], {})


def test_a_resumed_run_has_the_results_of_all_of_it(mlflow_client, tmp_path):
    whole = trained()
    first = Trainer(
        PPOConfig(**OPTIONS).build(CartPole), tracker=MLflowTracker(), num_eval_envs=2, checkpoints=tmp_path / "kept"
    )
    first.run(max_steps=2, steps_per_eval=1, progress="none")
    second = Trainer.resume(tmp_path / "kept")
    second.run(max_steps=4, progress="none")
    assert second.tracker.run_id == first.tracker.run_id
    for name in ("eval/returns/mean", "episodes/returns/mean"):
        resumed = [course[-1] for course in ends(mlflow_client, second, name)]
        assert resumed == [course[-1] for course in ends(mlflow_client, whole, name)]
    tags = [mlflow_client.get_run(each.tracker.run_id).data.tags["rl8x.result"] for each in (second, whole)]
    assert tags[0] == tags[1]


@pytest.mark.parametrize("count", [1, 2, MAX_POINTS, MAX_POINTS + 1, 5000])
def test_a_course_is_thinned_evenly_and_goes_on_from_its_state(count):
    values = [math.sin(step) for step in range(count)]
    whole = saved = Course()
    for step, value in enumerate(values):
        whole.add(10 * step, value)
        if step == count // 2:
            saved = Course(**json.loads(json.dumps(dataclasses.asdict(whole))))
    for step, value in list(enumerate(values))[count // 2 + 1 :]:
        saved.add(10 * step, value)
    assert saved == whole
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
    assert str(results) == "3, best 3 (returns)"
