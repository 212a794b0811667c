from __future__ import annotations

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box
from tests.probes import ActionMatches

from rl8x import Confirmed, HitsUpperBound, MemoryTracker, MLflowTracker, PPOConfig, Trainer
from rl8x.checkpoint import Checkpoints, listed, read
from rl8x.models import Model
from rl8x.trainers.artifacts import model_metrics

CONFIG = {"num_envs": 8, "horizon": 8, "device": "cpu", "seed": 0, "execution": "eager", "lr": 0.05}
METRIC = "eval/returns/mean"


def patient():
    """A tracker that waits for all to arrive, on a busy machine too."""
    return MLflowTracker(finish_timeout_s=300)


def trained(tracker, **options):
    config = PPOConfig(**CONFIG, model_config={"hidden_sizes": [8]}, normalize_observations=True)
    trainer = Trainer(config.build(ActionMatches), tracker=tracker, num_eval_envs=16, **options)
    trainer.run(max_steps=4, steps_per_eval=1, progress="none")
    return trainer


def logged_policies(client):
    """Return the policies that MLflow has, with their metrics and steps, by the models' names."""
    from rl8x.tracking.artifacts import _load_pyfunc

    experiment = client.get_experiment_by_name("rl8x").experiment_id
    found = {}
    for model in client.search_logged_models([experiment]):
        folder = model.artifact_location.removeprefix("file://")
        policy = _load_pyfunc(f"{folder}/data/policy.safetensors").policy
        found[model.name] = policy, {each.key: each.value for each in model.metrics}, {e.step for e in model.metrics}
    return found


def test_a_run_ends_with_its_last_and_best_policy_as_models(mlflow_client):
    checkpoints = Checkpoints(best=METRIC, mode="min", keep=1)  # untrained is worst, so that the best is an early one
    trainer = trained(patient(), log_models=True, checkpoints=checkpoints)
    found = logged_policies(mlflow_client)
    assert set(found) == {"last", "best"}
    run_id = trainer.tracker.run_id
    history = {point.step: point.value for point in mlflow_client.get_metric_history(run_id, METRIC)}
    assert len(history) == len(mlflow_client.get_metric_history(run_id, METRIC)) == 4
    obs = np.linspace(-1, 1, 33, dtype=np.float32)[:, None]
    best_step = min(history, key=lambda step: (history[step], step))
    for name, step in (("last", 4 * 64), ("best", best_step)):
        _, metrics, steps = found[name]
        assert (metrics[METRIC], steps) == (history[step], {step})
        assert {"episodes/returns/mean", "returns/mean"} <= set(metrics)
    last = trainer.algorithm.policy
    assert np.array_equal(found["last"][0].decide(obs).actions, last.decide(obs).actions)
    states = {path.name: read(path).state["trainer"]["algorithm"]["policy"] for path in listed(checkpoints_of(trainer))}
    weights = found["best"][0].state_dict()
    assert any(all(torch.equal(state[name], weights[name]) for name in weights) for state in states.values())
    if best_step != 4 * 64:
        assert not torch.equal(weights["model.actor.0.weight"], found["last"][0].state_dict()["model.actor.0.weight"])


def test_the_best_model_has_the_evaluation_of_a_condition_that_made_it_the_best(tmp_path):
    config = PPOConfig(**CONFIG, model_config={"hidden_sizes": [8]})
    tracker, checkpoints = MemoryTracker(), Checkpoints(tmp_path, best=METRIC)
    trainer = Trainer(config.build(ActionMatches), tracker=tracker, checkpoints=checkpoints, log_models=True)
    asked = Confirmed(HitsUpperBound("episodes/returns/mean", -1.0), by=HitsUpperBound(METRIC, 2.0))
    trainer.run(max_steps=4, stop_conditions=[asked], progress="none")
    history = dict(tracker.history(METRIC))
    best = max(history, key=lambda step: (history[step], -step))
    about = tracker.models["best"]
    assert (about["step"], about["metrics"][METRIC]) == (best, history[best])


def checkpoints_of(trainer):
    return trainer.checkpoints.directory


def test_a_model_is_logged_when_it_is_asked_for(mlflow_client):
    trainer = trained(patient(), checkpoints=False)
    trainer.log_model("champion of today", register="match", alias="champion")
    trainer.close()
    version = mlflow_client.get_model_version_by_alias("match", "champion")
    assert version.run_id == trainer.tracker.run_id
    assert mlflow_client.get_run(version.run_id).info.status == "FINISHED"
    assert set(logged_policies(mlflow_client)) == {"champion of today"}


class Sums(Model):
    """A model that is given as an instance."""

    def __init__(self):
        super().__init__(Box(-1.0, 1.0, (1,), np.float32), 2)
        self.weight = torch.nn.Parameter(torch.ones(2))

    def forward(self, obs, state, starts):
        return obs * self.weight, obs.sum(-1), state


def test_what_cannot_be_logged_is_said_before_training():
    algorithm = PPOConfig(**CONFIG, model=Sums()).build(ActionMatches)
    with pytest.raises(TypeError, match="`model` of this policy cannot be saved to a file"):
        Trainer(algorithm, tracker=MemoryTracker(), log_models=True)

    class Deaf(MemoryTracker):
        log_model = property()

    with pytest.raises(TypeError, match="Deaf keeps no models"):
        Trainer(PPOConfig(**CONFIG).build(ActionMatches), tracker=Deaf(), log_models=True)


def test_a_killed_run_has_models_too_and_a_failed_one_has_none():
    def interrupt(trainer, row):
        raise error

    for error, names in ((KeyboardInterrupt(), ["last"]), (RuntimeError("mine"), [])):
        tracker = MemoryTracker()
        with pytest.raises(type(error)):
            trained(tracker, log_models=True, callbacks=[interrupt], checkpoints=False)
        assert list(tracker.models) == names


def test_metrics_that_say_how_good_a_policy_is():
    row = {
        METRIC: 1.0,
        "eval/windy/returns/mean": 2.0,
        "returns/max": 3.0,
        "returns/mean": float("nan"),
        "losses/vf": 4,
    }
    assert model_metrics(row) == {METRIC: 1.0, "eval/windy/returns/mean": 2.0}
    assert model_metrics(row, "losses/vf") == {METRIC: 1.0, "eval/windy/returns/mean": 2.0, "losses/vf": 4}
