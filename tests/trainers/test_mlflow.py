"""A whole run, read back with MLflow's own client and compared with what the trainer said."""

import pytest

from rl8x.algorithms import PPOConfig
from rl8x.conditions import HitsUpperBound
from rl8x.envs import CartPole
from rl8x.tracking import MemoryTracker, MLflowTracker
from rl8x.trainers import Trainer

OPTIONS = {
    "num_envs": 4,
    "horizon": 8,
    "seed": 1,
    "device": "cpu",
    "model_config": {"hidden_sizes": [8]},
    "lr_schedule": [[0, 1e-3], [64, 1e-4]],
}


def trained(tracker, **options):
    trainer = Trainer(PPOConfig(**OPTIONS).build(CartPole), tracker=tracker, num_eval_envs=2, **options)
    conditions = [HitsUpperBound("env/steps", 128)]
    trainer.run(steps_per_eval=2, stop_conditions=conditions, env_config={"length": 0.7}, progress="none")
    return trainer


def fixed(name):
    return not name.startswith(("profiling/", "memory/"))


def test_every_row_param_tag_and_the_status_are_in_mlflow(mlruns, mlflow_client):
    trainer = trained(MLflowTracker(experiment_name="here", run_name="one"))
    twin = trained(MemoryTracker())
    client = mlflow_client
    (run,) = client.search_runs([client.get_experiment_by_name("here").experiment_id])
    assert run.info.run_id == trainer.tracker.run_id
    assert (run.info.status, run.info.run_name) == ("FINISHED", "one")
    names = {name for _, row in twin.tracker.rows for name in row}
    assert names == set(run.data.metrics)
    for name in names:
        history = [(point.step, point.value) for point in client.get_metric_history(run.info.run_id, name)]
        expected = twin.tracker.history(name)
        assert [step for step, _ in history] == [step for step, _ in expected], name
        if fixed(name):
            assert history == expected, name
    assert run.data.params == {name: str(value) for name, value in twin.tracker.params.items()}
    assert run.data.tags["rl8x.stop_reason"] == trainer.stop_reason
    for name in ("lr_schedule", "seed", "model.class", "device", "versions.torch", "run.stop_conditions", "optimizer"):
        assert name in run.data.params
    assert "mlflow.source.name" in run.data.tags


def test_a_failed_run_is_failed_in_mlflow_with_its_traceback(mlruns, mlflow_client):
    def fail(trainer, stats):
        raise RuntimeError("out of luck")

    with pytest.raises(RuntimeError, match="out of luck"):
        trained(MLflowTracker(experiment_name="here"), callbacks=[fail])
    (run,) = mlflow_client.search_runs([mlflow_client.get_experiment_by_name("here").experiment_id])
    assert run.info.status == "FAILED"
    assert "traceback.txt" in [file.path for file in mlflow_client.list_artifacts(run.info.run_id)]
