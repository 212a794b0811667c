"""The learning benchmark's runs: the best evaluation on the way, runs that go on, rows of several processes."""

from __future__ import annotations

import dataclasses
import json
import sys
import threading
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import rl8x  # noqa: E402
from benchmarks import learning, learning_runs  # noqa: E402

SPENT = ("wall_s", "cpu_s", "load")
PPO = dataclasses.replace(
    learning.TASKS["cartpole"].changed(8192, num_envs=16, execution="eager"),
    steps_per_eval=2,
    eval_episodes=4,
    episodes=8,
    bound=5.0,
)
DQN = dataclasses.replace(
    learning.TASKS["cartpole-dqn"].changed(1280, warmup_steps=128, execution="eager"),
    steps_per_eval=2,
    eval_episodes=4,
    episodes=8,
    bound=5.0,
)


def without_times(row):
    return {name: value for name, value in row.items() if name not in SPENT}


def notes_of(path):
    about, *lines = path.read_text().splitlines()
    return json.loads(about), [json.loads(line) for line in lines]


def test_the_best_evaluation_on_the_way_stands_beside_the_final_one(tmp_path):
    row = learning.measure("cartpole", PPO, 0, tmp_path)
    about, lines = notes_of(tmp_path / "cartpole-0.jsonl")
    assert about == {"seed": 0, **json.loads(json.dumps(PPO.described))}
    assert [line["env_steps"] for line in lines] == [512 * k for k in range(1, 17)]
    # Rows before the first evaluation, at the second step, have none.
    evaluations = {line["env_steps"]: line["evaluation"] for line in lines[1:]}
    assert "evaluation" not in lines[0]
    assert row["best"] == pytest.approx(max(evaluations.values()), abs=0.005)
    assert row["best_at"] == min(at for at, value in evaluations.items() if value == max(evaluations.values()))
    assert row["best_at"] % 1024 == 0
    assert row["episodes"] == 8
    assert row["curve"] == [[line["env_steps"], line["return"]] for line in lines if "return" in line]
    # Saving changes nothing; without evaluations on the way there is no best one, and the end is the same.
    assert without_times(learning.measure("cartpole", PPO, 0)) == without_times(row)
    final = learning.measure("cartpole", dataclasses.replace(PPO, steps_per_eval=None), 0)
    assert "best" not in final
    assert final["return_mean"] == row["return_mean"]


@pytest.mark.parametrize(("name", "task"), [("cartpole", PPO), ("cartpole-dqn", DQN)])
@pytest.mark.parametrize("end", [False, True])
def test_a_run_that_was_cut_off_goes_on_to_the_same_row(tmp_path, monkeypatch, name, task, end):
    whole = learning.measure(name, task, 0)
    monkeypatch.setattr(learning_runs, "SAVED_EVERY", 1e-9)  # at every step
    kill = (lambda *_: 1 / 0) if end else None
    note, steps = learning_runs.Notes.__call__, []

    def killed(self, trainer, stats):
        note(self, trainer, stats)
        steps.append(stats["env/steps"])
        if len(steps) == 5:
            raise ZeroDivisionError

    with monkeypatch.context() as patch:
        # In the fifth step, before that is saved; or once all is learned, before the row.
        patch.setattr(*(learning_runs, "_final", kill) if end else (learning_runs.Notes, "__call__", killed))
        with pytest.raises(ZeroDivisionError):
            learning.measure(name, task, 0, tmp_path)
    path = tmp_path / f"{name}-0.jsonl"
    _, lines = notes_of(path)
    if not end:
        assert len(lines) == 5
        with path.open("a") as file:
            file.write('{"env_steps": 99')  # what a kill leaves of a line
    monkeypatch.setattr(learning_runs.Notes, "__call__", note)
    row = learning.measure(name, task, 0, tmp_path)
    assert without_times(row) == without_times(whole)
    _, after = notes_of(path)
    kept = len(lines) if end else 4
    assert after[:kept] == lines[:kept]
    times = [line["cpu_s"] for line in after]
    assert times == sorted(times)
    assert row["cpu_s"] >= times[-1]


def test_what_other_settings_left_is_not_gone_on_with(tmp_path):
    learning.measure("cartpole", PPO.changed(1024), 0, tmp_path)
    with pytest.raises(ValueError, match=r"cartpole-0.jsonl is of another seed or other settings: remove it"):
        learning.measure("cartpole", PPO, 0, tmp_path)


def test_once_the_row_is_written_nothing_is_left_of_the_run(tmp_path, monkeypatch):
    monkeypatch.setattr(learning, "TASKS", {"cartpole": PPO.changed(1024)})
    out, saved = tmp_path / "rows.json", tmp_path / "saved"
    assert learning.main(["--tasks", "cartpole", "--seeds", "1", "--out", str(out), "--checkpoints", str(saved)]) == 0
    assert [row["seed"] for row in learning.held(out)["rows"]] == [1]
    assert [*saved.iterdir()] == []


def test_rows_that_are_written_at_once_are_all_kept(tmp_path):
    out = tmp_path / "rows.json"
    rows = [{"task": "cartpole", "seed": seed, "return_mean": 500.0} for seed in range(24)]
    threads = [threading.Thread(target=learning.keep, args=(out, [row])) for row in rows]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert learning.held(out)["rows"] == rows
    assert [*tmp_path.iterdir()] == [out]


def test_rows_of_another_file_are_added_where_the_settings_are_those_of_now(tmp_path, monkeypatch, capsys):
    out, longer = tmp_path / "rows.json", tmp_path / "longer.json"
    row = {"seed": 0, "return_mean": 1.0}
    learning.keep(out, [{"task": "cartpole", **row}])
    learning.keep(longer, [{"task": "cartpole", **row, "seed": 1}, {"task": "pendulum", **row}])
    changed = {**learning.TASKS, "pendulum": learning.TASKS["pendulum"].changed(gamma=0.9)}
    monkeypatch.setattr(learning, "TASKS", changed)
    learning.add(longer, out)
    assert [(each["task"], each["seed"]) for each in learning.held(out)["rows"]] == [("cartpole", 0), ("cartpole", 1)]
    assert "pendulum             left out: longer.json has it under other settings" in capsys.readouterr().out


def test_the_table_has_the_mean_of_the_best_evaluations_and_what_it_must_be():
    row = {"env_steps": 1000, "updates": 500, "cpu_s": 1.0, "task": "cartpole", "return_mean": 480.0}
    rows = [{**row, "seed": 0, "best": 490.0}, {**row, "seed": 1, "best": 500.0, "return_mean": 482.0}]
    cells = {
        None: "495.0",
        490.0: "495.0 (≥ 490)",
        496.0: "495.0 (misses 496)",
    }
    for bound, cell in cells.items():
        task = dataclasses.replace(learning.TASKS["cartpole"], best_bound=bound)
        last = learning.report(rows, {"cartpole": task}).splitlines()[-1]
        assert last == f"| cartpole | ≥ 475 | 480.0 | 481.0 | {cell} | 2 of 5 | 1,000 | 500 | 1.0 |"
    assert rl8x.tuned("CartPole") == learning.TASKS["cartpole"].run
