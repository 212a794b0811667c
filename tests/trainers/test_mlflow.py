"""A whole run, read back with MLflow's own client and compared with what the trainer said."""

import pytest
from tests.trainers.helpers import SMALL, make, run

from rl8x import HitsUpperBound, MLflowTracker, PPOConfig, Trainer
from rl8x.config import RunSpec
from rl8x.envs import CartPole

OPTIONS = SMALL | {"lr_schedule": [[0, 1e-3], [64, 1e-4]]}


def trained(tracker, **options):
    trainer = Trainer(PPOConfig(**OPTIONS).build(CartPole), tracker=tracker, num_eval_envs=2, **options)
    stops = HitsUpperBound("env/steps", 128)
    run(trainer, steps_per_eval=2, stop_conditions=[stops], env_config={"length": 0.7})
    return trainer


def test_a_run_has_a_description_of_the_users_if_any_and_its_run_file(mlruns, mlflow_client, tmp_path):
    runs = [trained(MLflowTracker(tags=tags)).tracker.run_id for tags in ({"mlflow.note.content": "my own words"}, {})]
    own, made = (mlflow_client.get_run(run_id) for run_id in runs)
    assert own.data.tags["mlflow.note.content"] == "my own words"
    text = made.data.tags["mlflow.note.content"]
    assert text.startswith("Best `eval/returns/mean`: ")
    assert f"`rl8x resume {made.info.run_name} --stop CONDITION`" in text
    spec = RunSpec.from_file(mlflow_client.download_artifacts(runs[0], "run.yaml", str(tmp_path)))
    assert spec.run.env_config == {"length": 0.7}
    assert spec.algorithm.algorithm_config == OPTIONS | {"sgd_minibatch_size": 32}  # which fits 4 * 8


@pytest.mark.parametrize(
    ("changed", "checkpoints"), [("variable", True), ("process", False), ("folder", True), ("folder", False)]
)
def test_a_trainer_that_runs_again_goes_on_in_the_store_of_its_run(
    mlruns, mlflow_client, tmp_path, monkeypatch, changed, checkpoints
):
    """Whatever store the user has chosen for other runs since, and wherever the script is by then."""
    import mlflow

    trainer = make(trainer={"tracker": MLflowTracker(interval_s=0.05), "checkpoints": checkpoints, "eval_env": False})
    run(trainer, max_steps=1)
    other = f"sqlite:///{tmp_path}/other.db"
    (tmp_path / "sub").mkdir()
    if changed == "folder":
        monkeypatch.chdir(tmp_path / "sub")
    else:
        monkeypatch.setenv("MLFLOW_TRACKING_URI", other if changed == "variable" else "")  # which is restored
    mlflow.set_tracking_uri(other if changed == "process" else None)
    try:
        run(trainer, max_steps=1)
    finally:
        mlflow.set_tracking_uri(None)
    steps = mlflow_client.get_metric_history(trainer.tracker.run_id, "algorithm/steps")
    assert [point.value for point in steps] == [1, 2]
    assert mlflow_client.get_run(trainer.tracker.run_id).info.status == "FINISHED"
    assert not (tmp_path / "other.db").exists()
    assert not (tmp_path / "sub" / "mlruns").exists() or not checkpoints


def test_names_that_mlflow_takes_for_one_stay_apart_also_in_a_run_that_goes_on(mlruns, mlflow_client, tmp_path):
    """As the table of names does, in test_protocol.py."""
    tracker = MLflowTracker(params={"x<0": 1, "x>0": 2}, tags={"part[": "a", "part(": "b"})
    trained(tracker, checkpoints=tmp_path / "saved")
    again = MLflowTracker(params={"x>0": 2, "x<0": 1, "x=0": 5}, tags={"part(": "b", "part[": "a", "part{": "c"})
    run(Trainer.resume(tmp_path / "saved", tracker=again), stop_conditions=[], max_steps=5)
    assert again.run_id == tracker.run_id
    data = mlflow_client.get_run(tracker.run_id).data
    found = {name: value for name, value in (data.params | data.tags).items() if name.startswith(("x_", "part"))}
    assert found == {"x_0": "1", "x_0-2": "2", "x_0-3": "5", "part_": "b", "part_-2": "a", "part_-3": "c"}
