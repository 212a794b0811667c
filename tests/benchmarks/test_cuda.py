"""The script for a CUDA machine, as far as it runs without one."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.fault_process import ForkedPython  # noqa: E402

from benchmarks import cuda, cuda_checks, report  # noqa: E402
from rl8x._version import __version__  # noqa: E402

SIZES = {"num_envs": 8, "horizon": 8}


def test_the_script_checks_measures_and_writes_what_the_report_reads(tmp_path, monkeypatch):
    monkeypatch.setattr(cuda, "PEERS", ())
    monkeypatch.setattr(subprocess, "Popen", ForkedPython)  # four processes, each of which would import torch
    out = tmp_path / "cuda.json"
    words = ["--device", "cpu", "--quick", "--works", "small", "--modes", "eager", "--precisions", "fp32"]
    assert cuda.main([*words, "--threads", "1", "--out", str(out)]) == 0
    result = json.loads(out.read_text())
    assert [check["passed"] for check in result["checks"]] == [True] * 3 + [None] * 3
    (row,) = result["throughput"]
    assert (row["peer"], row["variant"], row["work"], row["version"]) == ("rl8x", "eager fp32", "small", __version__)
    assert row["transitions_per_s"] > 0
    assert result["limits"][0]["bytes_gb_per_s"] > 0
    assert result["left_out"] == []
    assert result["works"]["small"]["num_envs"] == 16
    assert str(ROOT) not in out.read_text()
    page = report.render(result)
    assert "**A quick run: tiny sizes, the rates mean nothing.**" in page
    assert "| eager as eager, weights within 1e-05 | cartpole, feedforward | yes |" in page
    assert "| rl8x | eager fp32 |" in page


@pytest.fixture
def answers(monkeypatch):
    """Answer in place of processes."""
    asked = []

    def answer(session, module, question, most_s):
        asked.append((module, json.loads(question)))
        if module == "benchmarks.cuda_checks":
            return {"gpu": "a GPU", "checks": [{"name": "n", "case": "c", "passed": True, "told": "t"}]}
        if module == "benchmarks.limits":
            return {"tf32": {"256": {"gflops": 1000.0}}, "bytes_gb_per_s": 100.0}
        return {"transitions_per_s": 1e5, "first_iteration_s": 1.0, "peak_rss_mb": 900.0, "peak_device_mb": 80.0}

    monkeypatch.setattr(cuda.Session, "call", answer)
    monkeypatch.setattr(cuda.importlib.util, "find_spec", lambda name: None)
    return asked


def test_every_work_in_every_mode_the_important_first(tmp_path, answers):
    out = tmp_path / "cuda.json"
    assert cuda.main(["--out", str(out)]) == 0
    jobs = [question for module, question in answers if module == "benchmarks.peers.rl8x"]
    assert len(jobs) == 5 * 3 * 3
    assert [job["execution"] for job in jobs] == ["graph"] * 15 + ["eager"] * 15 + ["compile"] * 15
    assert [job["precision"] for job in jobs[:3]] == ["fp32", "tf32", "bf16"]
    assert jobs[0]["work"]["num_envs"] == 8192
    assert answers[0][1]["modes"] == ["eager", "compile", "graph"]  # graph is what eager is compared with
    page = report.render(json.loads(out.read_text()))
    assert page.startswith("a GPU; ")
    # 1e5 transitions/s * 3.47 MFLOP = 347 GFLOP/s of 1000;
    # 4 * 256 * (2 * 33/32 + 6 * 4) numbers * 4 bytes * 1e5 transitions/s = 10.7 GB/s of 100.
    assert "| rl8x | graph tf32 | 100k | 100k - 100k | 1.00 | 900 | 35% | 11% | 80 |" in page
    assert "| rl8-defaults | at least 30M transitions/s | 100k (eager fp32) | no |" in page
    assert "| rl8-defaults | rl8x at least 10 times rl8 1.0 |  | not measured |" in page


def test_what_there_is_no_time_for_is_named(tmp_path, answers, capsys):
    out = tmp_path / "cuda.json"
    assert cuda.main(["--budget", "1", "--works", "small", "--modes", "graph", "--out", str(out)]) == 1
    result = json.loads(out.read_text())
    assert result["left_out"] == ["small rl8x graph fp32", "small rl8x graph tf32", "small rl8x graph bf16"]
    assert result["throughput"] == []
    assert "Left out for lack of time: small rl8x graph fp32" in capsys.readouterr().out


def test_a_check_that_does_not_hold_is_told_by_the_exit_code(tmp_path, monkeypatch, answers, capsys):
    before = cuda.Session.call
    failed = {"checks": [{"name": "n", "case": "c", "passed": False, "told": "too far"}]}
    monkeypatch.setattr(
        cuda.Session,
        "call",
        lambda session, module, *rest: failed if "checks" in module else before(session, module, *rest),
    )
    assert cuda.main(["--works", "small", "--out", str(tmp_path / "cuda.json")]) == 1
    assert "| n | c | **no** | too far |" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--device", "cpu", "--quick", "--modes", "graph"], "--modes: on cpu there are eager, compile; got graph"),
        (["--device", "cpu", "--quick", "--precisions", "tf32"], "--precisions: on cpu there are fp32, bf16; got tf32"),
        (["--device", "cpu"], "give --quick"),
        (["--works", "tiny"], "invalid choice: 'tiny'"),
    ],
)
def test_wrong_words_are_refused(words, message, capsys):
    with pytest.raises(SystemExit) as raised:
        cuda.parse(words)
    assert raised.value.code == 2
    assert message in capsys.readouterr().err


def test_carried_packages_are_found_from_other_folders(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert cuda.absolute("carried:/opt/x") == f"{tmp_path.resolve()}/carried:/opt/x"
    assert cuda.absolute("") == ""


# -- checks


def test_weights_that_differ_fail_the_check(monkeypatch):
    build = cuda_checks.build

    def built(case, device, execution, sizes, **options):
        wrong = {} if execution == "eager" else {"lr": 2e-3}
        return build(case, device, "eager", sizes, **options, **wrong)

    monkeypatch.setattr(cuda_checks, "build", built)
    passed, told = cuda_checks.compare("cartpole, feedforward", "cpu", "compile", SIZES)
    assert not passed
    assert told.startswith("1.0e-03 after one update, which moved them by 1.0e-03; ")  # Adam's first step is lr long


def test_equal_weights_pass_the_check():
    passed, told = cuda_checks.compare("cartpole, recurrent", "cpu", "eager", SIZES)
    assert passed, told


def test_an_exception_fails_a_check():
    def raises():
        raise RuntimeError("called a synchronizing CUDA operation | here\nmore lines")

    check = cuda_checks.checked("n", "c", raises)
    assert not check["passed"]
    assert check["told"] == "RuntimeError: called a synchronizing CUDA operation / here"
