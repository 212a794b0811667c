"""Policies as MLflow's models, read by MLflow's own client, loader and scoring server, with pickle switched off."""

from __future__ import annotations

import re
import shutil
import threading
import time

import numpy as np
import pytest
import requests
import torch
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete
from mlflow import MlflowClient
from mlflow.pyfunc import load_model

from rl8x.policy import Policy
from rl8x.tracking.artifacts import describe_model, model_about
from rl8x.tracking.location import Location
from rl8x.tracking.store import MLflowStore, NewRun, Point

OBS = Box(-1.0, 1.0, (4,), np.float32)
NAME = "eval/returns/mean"


def plain_policy():
    return Policy(OBS, Discrete(5, start=2), model_config={"hidden_sizes": [8], "policy_gain": 1.0})


def masked_policy_with_memory():
    actions = Dict({"gear": Discrete(3), "steer": Box(-2.0, 2.0, (2,), np.float32)})
    mask = Dict({"gear": MultiBinary(3)})
    space = Dict({"x": OBS, "action_mask": mask})
    return Policy(space, actions, model="gru", model_config={"hidden_size": 8, "policy_gain": 1.0})


class Logged:
    """A store with a run of two rows, and the models of two policies in it."""

    def __init__(self, folder, template):
        database = folder / "mlflow.db"
        shutil.copyfile(template, database)
        location = Location(f"sqlite:///{database}", database, folder / "artifacts")
        self.uri, self.folder = location.uri, folder
        self.client = MlflowClient(tracking_uri=self.uri)
        self.store = MLflowStore(location)
        self.run_id = self.store.create_run(NewRun("a" * 32, "rl8x", None, "run", 0))
        self.store.log_points(self.run_id, [Point(NAME, 1.0, 100, 64), Point(NAME, 5.0, 200, 128)])
        self.experiment_id = self.client.get_experiment_by_name("rl8x").experiment_id
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)  # samples of other weights may lack an action
            self.policies = {"last": plain_policy(), "best": masked_policy_with_memory()}
        about = {"last": {"step": 64, "metrics": {NAME: 1.0}}, "best": {"step": 128, "metrics": {NAME: 5.0}}}
        self.about = {
            name: model_about(describe_model(policy), key=f"spool/{name}", name=name, **about[name])
            for name, policy in self.policies.items()
        }
        self.ids = {name: self.log(name) for name in self.policies}

    def log(self, name, **changes):
        path = self.policies[name].save(self.folder / "policy.safetensors")
        return self.store.log_model(self.run_id, path, {**self.about[name], **changes})

    def load(self, name):
        return load_model(f"models:/{self.ids[name]}")


@pytest.fixture(scope="module")
def logged(tmp_path_factory, mlflow_template):
    made = Logged(tmp_path_factory.mktemp("models"), mlflow_template)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MLFLOW_ALLOW_PICKLE_DESERIALIZATION", "false")
        patch.setenv("MLFLOW_TRACKING_URI", made.uri)
        yield made


def test_models_of_an_experiment_are_ranked_by_the_metrics_of_their_step(logged):
    order = [{"field_name": f"metrics.{NAME}", "ascending": False}]
    best, last = logged.client.search_logged_models([logged.experiment_id], order_by=order)
    assert (best.name, last.name, best.status.value, best.source_run_id) == ("best", "last", "READY", logged.run_id)
    assert [(each.key, each.value, each.step) for each in best.metrics] == [(NAME, 5.0, 128)]
    run = logged.client.get_run(logged.run_id)
    expected = {(logged.ids["last"], 64), (logged.ids["best"], 128)}
    assert {(each.model_id, each.step) for each in run.outputs.model_outputs} == expected


def test_arrays_are_predicted_as_the_policy_decides(logged):
    model = logged.load("last")
    obs = np.random.default_rng(0).standard_normal((50, 4)).astype(np.float32)
    policy = logged.policies["last"]
    assert np.array_equal(model.predict(obs), policy.decide(obs).actions)
    sampled = model.predict(obs, params={"deterministic": False, "seed": 3})
    drawn = policy.decide(obs, deterministic=False, generator=torch.Generator().manual_seed(3))
    assert np.array_equal(sampled, drawn.actions)
    assert set(sampled) == {2, 3, 4, 5, 6}


def test_dicts_are_predicted_with_masks_and_memory_as_the_signature_says(logged):
    model = logged.load("best")
    assert [(each.name, each.type.name, each.shape) for each in model.metadata.signature.inputs.inputs] == [
        ("obs/action_mask/gear", "int8", (-1, 3)),
        ("obs/x", "float32", (-1, 4)),
        ("state/actor_h", "float32", (-1, 8)),
        ("starts", "bool", (-1,)),
    ]
    outputs = [each.name for each in model.metadata.signature.outputs.inputs]
    assert outputs == ["actions/gear", "actions/steer", "next_state/actor_h"]
    rng, mask = np.random.default_rng(0), np.eye(3, dtype=np.int8)
    policy, state = logged.policies["best"], None
    memory = {"state/actor_h": np.repeat(model.input_example["state/actor_h"], 3, 0)}
    for step in range(3):
        x = rng.standard_normal((3, 4)).astype(np.float32)
        given = {"obs/x": x, "obs/action_mask/gear": mask, "starts": np.full(3, step == 2), **memory}
        found = model.predict(given)
        expected, state = policy.decide({"x": x, "action_mask": {"gear": mask}}, None if step == 2 else state)
        assert np.array_equal(found["actions/gear"], [0, 1, 2])
        assert np.allclose(found["actions/steer"], expected["steer"], atol=1e-6)
        memory = {name: found[f"next_{name}"] for name in memory}


@pytest.mark.parametrize(
    ("space", "first"),
    [(Discrete(3, start=1), 1), (Discrete(2, start=-4), -4), (MultiDiscrete([2, 3], start=[5, 0]), [5, 0])],
)
def test_the_example_of_an_input_is_of_its_space(space, first):
    parts = Dict({"lane": space, "x": OBS})
    about = describe_model(Policy(parts, Discrete(2), model_config={"hidden_sizes": [8]}))
    assert about["example"] == {"obs/lane": [first], "obs/x": [[0.0] * 4]}


def test_requirements_are_pinned_and_nothing_is_pickled(logged):
    folder = logged.folder / "artifacts" / "models" / logged.ids["last"] / "artifacts"
    lines = (folder / "requirements.txt").read_text().split()
    assert all(re.fullmatch(r"[\w-]+==\d[\w.]*", line) for line in lines)
    assert {line.split("==")[0] for line in lines} >= {"mlflow", "rl8x", "torch", "safetensors"}
    assert [path.suffix for path in folder.rglob("*") if path.suffix in (".pkl", ".pt", ".pickle")] == []


@pytest.fixture
def server(logged):
    """MLflow's scoring server, which `mlflow models serve` starts, in a thread."""
    import uvicorn
    from mlflow.pyfunc.scoring_server import init

    app = init(logged.load("last"))
    made = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=0, log_level="error"))
    thread = threading.Thread(target=made.run, daemon=True)
    thread.start()
    while not made.started and thread.is_alive():
        time.sleep(0.01)
    host, port = made.servers[0].sockets[0].getsockname()[:2]
    yield f"http://{host}:{port}/invocations"
    made.should_exit = True
    thread.join()


def test_the_scoring_server_answers_over_http(logged, server):
    obs = np.random.default_rng(0).standard_normal((3, 4)).astype(np.float32)
    answer = requests.post(server, json={"inputs": obs.tolist()})
    assert answer.status_code == 200, answer.text
    assert answer.json()["predictions"] == logged.policies["last"].decide(obs).actions.tolist()
    assert requests.post(server, json={"inputs": [[1.0, 2.0]]}).status_code == 400


# MLflow's filters have no escapes for these.
ODD_NAMES = ["it's", 'say "hi"', """both ' and \"""", "end\\", "'\\", "tick`s", "50%_x", "x' OR '1'='1", "Łódź √"]


@pytest.mark.parametrize("name", ODD_NAMES)
def test_a_model_of_any_key_is_there_once_and_registered_once_under_any_name_that_the_registry_takes(logged, name):
    [model_id] = {logged.log("last", key=f"spool/{name}", register=name, alias="champion") for _ in range(2)}
    assert model_id not in logged.ids.values()
    assert logged.client.get_model_version_by_alias(name, "champion").version == 1
    versions = logged.client.search_model_versions(f"run_id = '{logged.run_id}'")
    location = logged.client.get_logged_model(model_id).artifact_location
    assert [each.source for each in versions if each.name == name] == [location]
