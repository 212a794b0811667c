"""Commands that show what there is: environments, programs, runs in MLflow, rows that wait for it, and policies."""

from __future__ import annotations

import io
import os
import re

import numpy as np
import pytest
import torch
from tests.probes import ActionMatches

from rl8x import Checkpoints, MLflowTracker, Policy, PPOConfig, Trainer, tracking
from rl8x.cli.main import main
from rl8x.config import RunSpec, parse_value
from rl8x.envs import BUILTIN
from rl8x.execution.artifacts import Artifacts
from rl8x.tracking import JournalReport, SyncReport
from rl8x.tracking.appending import Journal


def words_of(text):
    return [" ".join(line.split()) for line in text.splitlines()]


def test_the_list_has_every_environment_with_spaces_parameters_bounds_and_units(call):
    out = " ".join(words_of(call("envs")))
    assert all(name in out for name in BUILTIN)
    assert "CartPole Box[4] -> Discrete(2), episodes end with the task or after 500 steps" in out
    assert "CartPoleInfinite Box[5] -> Discrete(3), episodes never end" in out
    assert "length 0.5 in [0.025, 10] m" in out


def test_one_environment_in_full(call):
    lines = words_of(call("envs", "CartPole"))
    table = ["env_config default low high unit", "gravity 9.8 0.1 100 m/s^2 gravitational acceleration"]
    assert {"action Discrete(2)", "episodes end with the task or after 500 steps", *table} <= {*lines}


def test_every_example_of_an_environment_is_legal(call):
    for name, cls in BUILTIN.items():
        example = call("envs", name).splitlines()[-1]
        if "env_config." in example:
            key, _, value = example.partition("env_config.")[2].partition("=")
            cls(4, seed=0).parameter_state.configure({key: parse_value(value.strip("'"))})
            RunSpec.from_plain({"env": name, "env_config": {key: parse_value(value.strip("'"))}})


def test_gymnasiums_and_ones_own_are_described(call, tmp_path, monkeypatch):
    out = call("envs", "CartPole-v1")
    lines = words_of(out)
    assert lines[0] == "CartPole-v1"
    assert "cart-pole problem" in out
    assert "## " not in out
    end = "episodes end with the task or after 500 steps"
    assert {"action Discrete(2)", end, "env_kwargs sutton_barto_reward=False"} <= {*lines}
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_own_task.py").write_text(
        'from rl8x.envs import CartPole\n\nclass Cart(CartPole):\n    """A cart of my own."""\n'
    )
    out = call("envs", "my_own_task.Cart")
    assert "A cart of my own." in out
    assert "rl8x train my_own_task.Cart env_config.gravity=" in out


@pytest.fixture
def kept(tmp_path, monkeypatch):
    monkeypatch.setenv("RL8X_CACHE_DIR", str(tmp_path / "cache"))
    artifacts = Artifacts()
    artifacts.make_folder()
    for i, key in enumerate(("a" * 40, "b" * 40)):
        built = artifacts.folder / ".built.so"
        built.write_bytes(bytes(250_000 * (i + 1)))
        artifacts.put(key, built)
        os.utime(artifacts.library(key), (1000 + i, 1000 + i))
    return artifacts


def test_programs_are_listed_the_one_used_last_first_and_removed(kept, call):
    head, first, second, _, total = call("cache").splitlines()
    assert head.split() == ["key", "MB", "last", "used", "torch"]
    assert re.fullmatch(rf"b{{12}} +0\.5 +19\d\d-.* +{re.escape(torch.__version__)}", first)
    assert second.startswith(f"{'a' * 12} ")
    assert total == f"2 programs, 0.8 of 500 MB, in {kept.folder}"
    assert call("cache", "--clear") == f"0.8 MB removed from {kept.folder}\n"
    assert kept.list() == []
    assert call("cache") == f"0 programs, 0.0 of 500 MB, in {kept.folder}\n"


@pytest.mark.parametrize("browser", [True, False])
def test_ui_prints_and_opens_the_link_to_the_runs(tmp_path, monkeypatch, call, browser):
    calls = []
    monkeypatch.setattr(tracking, "runs_link", lambda *arguments: calls.append(arguments) or ("http://x/#/runs", False))
    monkeypatch.setattr(tracking, "serve_ui", lambda *arguments, link: calls.append((*arguments, link)) or 3)
    words = [] if browser else ["--no-browser"]
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x.db").touch()
    out = call("ui", "--port", "5050", "--tracking-uri", "sqlite:///x.db", *words, code=3)
    asked = ("sqlite:///x.db", "127.0.0.1", 5050)
    assert calls == [asked, (*asked, "http://x/#/runs" if browser else None)]
    assert out == "http://x/#/runs (Ctrl-C ends it)\n"


def test_ui_of_runs_on_a_server_opens_its_own_page(monkeypatch, call):
    opened = []
    monkeypatch.setattr(tracking, "runs_link", lambda *_: ("http://server/#/runs", True))
    monkeypatch.setattr(tracking, "open_browser", opened.append)
    assert call("ui", "--tracking-uri", "http://server") == "http://server/#/runs\n"
    assert opened == ["http://server/#/runs"]


@pytest.mark.parametrize(("outcome", "code"), [("sent", 0), ("busy", 0), ("failed", 1)])
def test_sync_tells_what_became_of_every_journal(tmp_path, monkeypatch, call, outcome, code):
    report = SyncReport([JournalReport(tmp_path / "s1", outcome, "r1", 7)])
    calls = []
    monkeypatch.setattr(tracking, "sync", lambda *arguments, allow: calls.append(arguments) or report)
    about = "" if outcome == "busy" else " (run r1, 7 rows)"
    assert f"{outcome} s1{about}\n" in call("sync", tmp_path, "--to", "sqlite:///x.db", code=code)
    assert calls == [(str(tmp_path), "sqlite:///x.db")]


def test_a_store_that_only_a_journal_names_is_asked_about_on_a_terminal(tmp_path, monkeypatch, capsys):
    for journal_id in ("one", "two"):
        header = {"op": "open", "version": 1, "journal_id": journal_id, "t": 1, "uri": "http://127.0.0.1:9"}
        Journal.create(tmp_path / "spool", header).close()
    words = ["sync", str(tmp_path / "spool")]
    assert main(words) == 1
    assert "`rl8x sync --yes`" in capsys.readouterr().out
    for answer, told in (("n", "which you have not"), ("y", "Connection refused")):
        terminal = io.StringIO(f"{answer}\n")  # one answer for both journals
        terminal.isatty = lambda: True
        monkeypatch.setattr("sys.stdin", terminal)
        assert main(words) == 1
        said = capsys.readouterr()
        assert said.out.count(told) == 2
        assert said.err.count("A journal names the store http://127.0.0.1:9. Send its rows there?") == 1


# -- policies

METRIC = "eval/returns/mean"
OBS = np.linspace(-1, 1, 33, dtype=np.float32)[:, None]


def test_last_and_best_of_a_run_are_exported_and_logged(mlruns, mlflow_client, call):
    """Of a run whose best checkpoint, the first, is not its last."""
    config = PPOConfig(num_envs=8, horizon=8, device="cpu", seed=0, execution="eager", lr=0.05)
    options = {"tracker": MLflowTracker(finish_timeout_s=300), "num_eval_envs": 16}
    options |= {"checkpoints": Checkpoints(best=METRIC, mode="min", every_steps=1, keep=9)}
    trainer = Trainer(config.build(ActionMatches), **options)
    trainer.run(max_steps=3, steps_per_eval=1, progress="none")
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
