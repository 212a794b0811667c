"""`rl8x export`: files, checkpoints, models in MLflow, and its mistakes."""

from __future__ import annotations

import numpy as np
import pytest
from tests.probes import ActionMatches

from rl8x import MLflowTracker, NullTracker, PPOConfig, Trainer
from rl8x.checkpoint import Checkpoints, listed
from rl8x.policy import Policy

METRIC = "eval/returns/mean"
OBS = np.linspace(-1, 1, 33, dtype=np.float32)[:, None]


def train(**options):
    config = PPOConfig(num_envs=8, horizon=8, device="cpu", seed=0, execution="eager", lr=0.05)
    trainer = Trainer(config.build(ActionMatches), num_eval_envs=16, **options)
    trainer.run(max_steps=3, steps_per_eval=1, progress="none")
    return trainer


@pytest.fixture
def trainer(mlruns):
    """A run whose best checkpoint, the first, is not its last."""
    checkpoints = Checkpoints(best=METRIC, mode="min", every_steps=1, keep=9)
    return train(tracker=MLflowTracker(finish_timeout_s=300), checkpoints=checkpoints)


def test_last_and_best_are_written_and_logged(trainer, mlflow_client, call):
    run = trainer.tracker.run_id
    assert "policy.safetensors\nobs float32 [batch, 1] -> actions int64 [batch]" in call("export", run)
    last = Policy.load("policy.safetensors")
    assert np.array_equal(last.decide(OBS).actions, trainer.algorithm.policy.decide(OBS).actions)
    words = ["--checkpoint", "best", "--output", "new/best.safetensors", "--register", "match", "--alias", "champion"]
    out = call("export", run, *words)
    version = mlflow_client.get_model_version_by_alias("match", "champion")
    experiment = mlflow_client.get_run(run).info.experiment_id
    (model,) = mlflow_client.search_logged_models([experiment])
    assert f"logged as models:/{model.model_id} and models:/match@champion" in out
    assert version.source == model.artifact_location
    history = mlflow_client.get_metric_history(run, METRIC)
    best = min(history, key=lambda point: (point.value, point.step))
    assert (model.name, model.source_run_id) == ("best", run)
    assert (METRIC, best.value, best.step) in [(each.key, each.value, each.step) for each in model.metrics]
    assert len(history) == len(mlflow_client.get_metric_history(run, METRIC)) == 3
    assert mlflow_client.get_run(run).info.status == "FINISHED"


def test_the_best_of_a_run_that_went_back_is_not_of_what_it_left_behind(tmp_path, call):
    def scored(scores):
        def score(trainer, row):
            return {"score": scores[trainer.state["algorithm/steps"]]}

        score.metric_names = ["score"]
        return score

    config = PPOConfig(num_envs=8, horizon=8, device="cpu", seed=0, execution="eager")
    checkpoints = Checkpoints(tmp_path / "run", best="score", every_steps=1, keep=9)
    trainer = Trainer(
        config.build(ActionMatches), tracker=NullTracker(), checkpoints=checkpoints, callbacks=[scored([0, 1, 3, 5, 9])]
    )
    trainer.run(max_steps=4, progress="none")
    start, *_, left = listed(tmp_path / "run")
    second = listed(tmp_path / "run")[2]
    again = Trainer.resume(second, callbacks=[scored([0, 0, 0, 2, 1])])
    again.run(max_steps=4, progress="none")
    assert again.checkpoints.best_path == second
    # Of steps 0 to 4, then of step 2 again, where it went back, and of 3 and 4.
    assert len({path.name for path in (start, second, left, *listed(tmp_path / "run"))}) == 8
    for run in (tmp_path / "run", left):
        words = ["--checkpoint", "best", "--output", tmp_path / "best.safetensors"]
        assert call("export", run, *words).startswith(f"{second.name} -> ")
