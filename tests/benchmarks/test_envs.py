from __future__ import annotations

import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks import envs  # noqa: E402


def test_page_says_what_was_measured_and_every_environment_keeps_the_bound():
    document = json.loads(envs.DEFAULT_OUT.read_text())
    assert envs.table(document) in envs.PAGE.read_text()
    assert [row["env"] for row in document["rows"]] == list(envs.BUILTIN)
    for row in document["rows"]:
        assert row["num_envs"] == 4096
        assert row["worst_ratio"] >= envs.BOUND
        assert all(len(rates) == 7 for rates in row["rounds"].values())


def test_measures_in_turn_and_publishes(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(envs, "BUILTIN", {"CartPole-v1": envs.CartPole})
    page, out = tmp_path / "page.md", tmp_path / "envs.json"
    page.write_text("before\n<!-- envs -->\nold\n<!-- /envs -->\nafter\n")
    monkeypatch.setattr(envs.publish, "__defaults__", (page,))
    envs.main(["--num-envs", "8", "--rounds", "3", "--out", str(out), "--publish"])
    (row,) = json.loads(out.read_text())["rows"]
    assert set(row["rounds"]) == {"built-in", "sync", "vector"}
    middle = {kind: sorted(rates)[1] for kind, rates in row["rounds"].items()}
    assert row["transitions_per_s"] == middle
    assert row["ratio"] == round(middle["built-in"] / middle["sync"], 1)
    table = envs.table(json.loads(out.read_text()))
    assert page.read_text() == f"before\n<!-- envs -->\n{table}\n<!-- /envs -->\nafter\n"
    assert "CartPole-v1" in capsys.readouterr().out
