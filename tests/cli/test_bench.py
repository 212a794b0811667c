from __future__ import annotations

import importlib
import json
import re
import statistics
import subprocess

import pytest

from rl8x import output
from rl8x.cli.bench import render, summarize, verdict
from rl8x.cli.main import main
from rl8x.envs import CartPole
from rl8x.execution.compiler import CompiledProgram
from rl8x.replay.recording import record

bench = importlib.import_module("rl8x.cli.bench")
SMALL = ["num_envs=4", "horizon=4", "model_config.hidden_sizes=[8]", "device=cpu", "tracking=false"]
BRIEF = [*SMALL, "--modes", "eager", "--seconds", "0"]


@pytest.fixture
def here(monkeypatch):
    """Measure in this process: a fresh one takes seconds to import torch."""
    monkeypatch.setattr(bench, "_in_fresh_process", lambda job, timeout_s: bench.measure(job))


# -- a measurement


def test_a_measurement_in_a_fresh_process(tmp_path, monkeypatch, capsys):
    (tmp_path / "my_bench_module.py").write_text(
        "from rl8x.envs import CartPole\nprint('a line of mine')\nclass Mine(CartPole): pass\n"
    )
    monkeypatch.chdir(tmp_path)
    assert main(["bench", "my_bench_module.Mine", *BRIEF, "--json", "bench.json"]) == 0
    out, err = capsys.readouterr()
    lines = out.splitlines()
    assert " ".join(lines[0].split()) == (
        "mode precision transitions/s range first iteration s collect ms step ms tracking ms peak memory MB"
    )
    assert lines[1].split()[:2] == ["eager", "fp32"]
    assert lines[-1].startswith("Fastest: eager fp32, ")
    assert err.startswith("eager fp32, pass 1 of 1: ")

    document = json.loads((tmp_path / "bench.json").read_text())
    (row,), (summary,) = document["rows"], document["summary"]
    assert row["transitions"] == 4 * 4
    assert row["iterations"] == len(row["seconds"]) == 2
    assert row["transitions_per_s"] == pytest.approx(16 / statistics.median(row["seconds"]))
    # Collecting and learning are parts of an iteration.
    assert 0 < row["collect_ms"] + row["step_ms"] <= 1e3 * row["slowest_s"]
    assert row["tracker"] == "NullTracker"
    assert 100 < row["peak_memory_mb"] < 2000
    assert summary["transitions_per_s"] == row["transitions_per_s"]
    assert (summary["lowest"], summary["highest"]) == pytest.approx((16 / row["slowest_s"], 16 / row["fastest_s"]))
    assert set(document["machine"]) == {"cpu", "cores", "system", "python", "torch", "rl8x"}
    small = {"num_envs": 4, "horizon": 4, "model_config": {"hidden_sizes": [8]}, "device": "cpu"}
    run = document["settings"]["run"]
    assert (run["env"], run["algorithm_config"]) == ("my_bench_module.Mine", small)
    assert {path.name for path in tmp_path.iterdir() if path.is_file()} == {"my_bench_module.py", "bench.json"}
    assert str(tmp_path) not in (tmp_path / "bench.json").read_text()


@pytest.mark.usefixtures("here")
def test_a_run_file_and_precisions_in_turn(tmp_path, call):
    path, out = tmp_path / "run.yaml", tmp_path / "new" / "bench.json"
    path.write_text(
        "env: Pendulum\nsteps_per_eval: 3\nstop_conditions: [{wall_time: 1}]\nexperiment_name: mine\ntracking: false\n"
        "algorithm_config: {num_envs: 4, horizon: 8, device: cpu, execution: compile, precision: bf16}\n"
    )
    words = ["bench", "-f", str(path), "horizon=4", "--modes", "eager", "--seconds", "0", "--passes", "2"]
    call(*words, "--precisions", "fp32", "bf16", "--num-envs", "2", "--json", out)
    document = json.loads(out.read_text())
    passes = [(row["precision"], row["pass"]) for row in document["rows"]]
    assert passes == [("fp32", 0), ("bf16", 0), ("fp32", 1), ("bf16", 1)]
    assert {row["transitions"] for row in document["rows"]} == {2 * 4}
    assert {row["ran_as"] for row in document["rows"]} == {"eager"}
    assert "mine" not in out.read_text()
    assert call(*words).splitlines()[-1].startswith("Fastest: eager bf16")  # the run's own precision


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(
    ("updates_per_sample", "updates", "transitions"),
    [(0.25, [4, 8, 12], 16), (0.03125, [0, 1, 1, 2, 2, 3], 32)],
    ids=["several a step", "one in two steps"],
)
def test_what_is_timed_of_a_replay_comes_after_its_warm_up(updates_per_sample, updates, transitions, monkeypatch):
    rows, step, measure = [], bench.Trainer.step, bench.measure
    monkeypatch.setattr(bench.Trainer, "step", lambda *given, **named: rows.append(step(*given, **named)) or rows[-1])
    monkeypatch.setattr(bench, "measure", lambda job: rows.append(measure(job)) or rows[-1])
    words = ["CartPole", "algorithm=dqn", "warmup_steps=100", f"{updates_per_sample=}", *BRIEF]
    assert main(["bench", *words]) == 0
    measured = rows.pop()
    assert [row["algorithm/updates"] for row in rows] == [0] * 7 + updates
    assert (measured["iterations"], measured["transitions"]) == (2, transitions)


@pytest.mark.usefixtures("here")
def test_a_mode_that_fails_does_not_stop_the_others(monkeypatch, call):
    def refuse(*_):
        raise OSError("no compiler at /usr/local/bin/c++\nmore lines")

    monkeypatch.setattr(CompiledProgram, "_compile", refuse)
    monkeypatch.setattr(CompiledProgram, "prepare", lambda *_: None)
    words = ["bench", "CartPole", *SMALL, "--seconds", "0"]
    out = call(*words)
    failed = next(line for line in out.splitlines() if line.startswith("compile"))
    assert failed.split() == ["compile", "fp32", "failed"]
    assert "compile fp32 failed: execution='compile' is not possible here: no compiler at c++." in out
    assert "Fastest: eager fp32" in out
    assert call(*words, "--modes", "compile", code=1).splitlines()[-1] == "No mode could be measured."


@pytest.mark.parametrize(
    ("code", "stderr", "reason"),
    [
        (-9, "", "the process was ended by SIGKILL (is there too little memory?)"),
        (-11, "", "the process was ended by SIGSEGV"),
        (1, "Traceback\nMemoryError: 3 GB\n", "MemoryError: 3 GB"),
        (3, "", "the process ended with exit code 3"),
    ],
)
def test_a_process_that_dies_is_a_failure(code, stderr, reason, monkeypatch, call):
    died = subprocess.CompletedProcess([], code, "", stderr)
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: died)
    assert f"eager fp32 failed: {reason}" in call("bench", "CartPole", *BRIEF, code=1)


# -- arithmetic


def row(execution, rate, **others):
    figures = dict.fromkeys(("collect_ms", "step_ms", "tracking_ms"), 1.0)
    named = {"execution": execution, "precision": "fp32", "peak_memory_mb": 400.0, "slowest_s": 2.0, "fastest_s": 0.5}
    timed = {"unit": "transitions", "transitions": 1000, "transitions_per_s": rate, "first_iteration_s": 1.0}
    return {**timed, **figures, **named, **others}


def test_without_an_environment_updates_are_what_is_counted(here, call, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    record(None, CartPole(2), 20).dataset.save("data")
    small = ["updates_per_step=3", "batch_size=4", "device=cpu", "tracking=false"]
    out = call("bench", "--algorithm", "bc", "--dataset", "data", *small, "--modes", "eager", "--seconds", "0")
    assert "updates/s" in out.splitlines()[0]
    assert re.search(r"^Fastest: eager fp32, \S+ updates/s\.$", out, re.MULTILINE)


def test_passes_are_put_together():
    rows = [row("eager", 1000.0, collect_ms=3.0), row("eager", 3000.0, peak_memory_mb=500.0), row("eager", 1500.0)]
    (summary,) = summarize(rows)
    assert (summary["transitions_per_s"], summary["lowest"], summary["highest"]) == (1500.0, 1000.0, 3000.0)
    assert (summary["collect_ms"], summary["peak_memory_mb"], summary["passes"]) == (1.0, 500.0, 3)


@pytest.mark.parametrize(
    ("other", "says"),
    [
        # 10 s behind, 0.25 s gained by each iteration: after 1 + 40 of them, at 11 + 40 * 0.25 s.
        (
            row("compile", 4000.0, first_iteration_s=11.0),
            "compile fp32, 4.00k transitions/s, 2.00 times eager fp32; its first iteration is earned back after "
            "41.0k transitions, 21.0 s of training.",
        ),
        (row("compile", 4000.0), "2.00 times eager fp32; it is ahead from the first iteration on."),
        (row("compile", 4000.0, first_iteration_s=0.5), "; it is ahead from the first iteration on."),
        (row("compile", 1000.0), "eager fp32, 2.00k transitions/s."),
        (
            row("compile", 3000.0, unit="updates"),
            "compile fp32, 3.00k updates/s, 1.50 times eager fp32; it is ahead from the first iteration on.",
        ),
    ],
)
def test_the_verdict_says_when_compiling_is_earned_back(other, says):
    assert verdict(summarize([row("eager", 2000.0), other])).endswith(says)
    late = row("compile", 2000.0, first_iteration_s=2.0)  # and no faster
    assert verdict(summarize([late, row("eager", 2000.0)])).endswith("longer first iteration is never earned back.")


def test_a_mode_that_takes_twice_the_memory_of_eager_is_named_above_the_verdict():
    rows = [row("eager", 2000.0, peak_memory_mb=300.0), row("compile", 4000.0, peak_memory_mb=750.0)]
    assert render(summarize(rows)).splitlines()[-3] == "compile fp32 takes 2.5 times the memory of eager fp32."
    for modest in (rows[1:], [rows[0], row("compile", 4000.0, peak_memory_mb=599.0)]):
        assert "the memory of" not in render(summarize(modest))


@pytest.mark.parametrize(
    ("rate", "text"),
    [
        *[(0.4, "0"), (83.45, "83"), (4700, "4.70k"), (412_345, "412k"), (3.214e6, "3.21M"), (2e9, "2.00G")],
        *[(999.7, "1.00k"), (9_996, "10.0k"), (99_970, "100k"), (999_600, "1.00M"), (999.9e6, "1.00G")],
    ],
)
def test_rates_in_three_digits(rate, text):
    assert output.short(rate) == text
