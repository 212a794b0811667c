from __future__ import annotations

import dataclasses
import json

import pytest
from benchmarks.learning_tasks import TASKS

from benchmarks import precision


def test_both_precisions_are_trained_with_the_same_seeds_and_settings(tmp_path, monkeypatch, capsys):
    short = dataclasses.replace(TASKS["cartpole"].changed(4096), bound=5.0)
    monkeypatch.setattr(precision, "TASKS", {"cartpole": short})
    out = tmp_path / "precision.json"
    assert precision.main(["--tasks", "cartpole", "--seeds", "2", "--out", str(out)]) == 0
    document = json.loads(out.read_text())
    assert [(row["task"], row["seed"]) for row in document["rows"]] == [
        ("cartpole fp32", 0),
        ("cartpole fp32", 1),
        ("cartpole bf16", 0),
        ("cartpole bf16", 1),
    ]
    single, half = (document["tasks"][f"cartpole {name}"]["run"]["algorithm_config"] for name in precision.PRECISIONS)
    assert (single.pop("precision"), half.pop("precision")) == precision.PRECISIONS
    assert single == half
    assert len({row["return_mean"] for row in document["rows"]}) == 4
    assert "| cartpole | ≥ 5 |" in capsys.readouterr().out
    monkeypatch.setattr(precision, "TASKS", {"cartpole": dataclasses.replace(short, bound=501.0)})
    assert precision.main(["--tasks", "cartpole", "--seeds", "1", "--out", str(out)]) == 1


def test_the_table_has_means_with_the_standard_error_of_their_difference():
    returns = {"fp32": [500.0, 498.0], "bf16": [497.0, 499.0]}
    rows = [{"task": f"cartpole {name}", "return_mean": each} for name, found in returns.items() for each in found]
    # Both variances are 2, of 2 seeds each: sqrt(2 / 2 + 2 / 2).
    line = "| cartpole | ≥ 475 | 498.0 | 499.0 | 497.0 | 498.0 | -1.0 ± 1.4 | 2 |"
    assert precision.report(rows).splitlines()[2:] == [line]
    assert len(precision.report(rows[:3]).splitlines()) == 2


def test_the_page_has_the_committed_measurement():
    document = json.loads(precision.DEFAULT_OUT.read_text())
    page = (precision.ROOT / "docs" / "learning.md").read_text()
    assert f"<!-- precision -->\n{precision.report(document['rows'])}\n<!-- /precision -->" in page
    described = {name: task.described for name, task in precision.variants().items()}
    for name, task in document["tasks"].items():
        measured = {key: value for key, value in task.items() if key != "machine"}
        assert measured == json.loads(json.dumps(described[name])), f"{name} was measured otherwise"


@pytest.mark.parametrize("name", [name for name, task in TASKS.items() if task.transitions > 300_000])
def test_tasks_that_take_longer_are_left_to_be_named(name):
    assert name not in precision.QUICK
