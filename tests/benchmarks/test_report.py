from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.common import WORKS, DoneError, Job, Recorder, Work, evaluate  # noqa: E402
from benchmarks.peers import numpy_envs, torch_envs  # noqa: E402

from benchmarks import report  # noqa: E402


def test_page_says_what_the_results_say():
    page = ROOT / "docs" / "benchmarks.md"
    if not page.exists():
        pytest.skip("no page yet")
    assert report.filled(page.read_text(), ROOT / "benchmarks" / "results") == page.read_text()


def test_flops_of_the_two_sizes():
    small = Work(env="cartpole", num_envs=1, horizon=32, hidden=64, minibatches=1, passes=4)
    # P = 2*4*64 + 2*64*64 + 64*3 = 8896; F = 2*8896*33/32 + 4*(6*8896 - 4*4*64) = 227,756
    assert small.flops == pytest.approx(227_756)
    assert WORKS["rl8-defaults"].flops == pytest.approx(3.47e6, rel=0.01)


def test_job_survives_json():
    job = Job(work=WORKS["small"], seed=3, target=475.0, precision="bf16")
    assert Job.from_json(job.to_json()) == job


def test_recorder_leaves_warmup_out():
    recorder = Recorder(Job(work=Work(**{**vars(WORKS["small"]), "iterations": 2}), warmup_s=0.0, timed_s=0.0))
    recorder.start()
    recorder.tick()
    recorder.tick()
    with pytest.raises(DoneError):
        recorder.tick()
    row = recorder.row()
    assert (row["iterations"], row["warmup_iterations"]) == (2, 1)


@pytest.mark.parametrize("name", ["cartpole", "pendulum"])
def test_numpy_and_torch_physics_agree(name):
    ours, theirs = numpy_envs.make(name, 32, 0), torch_envs.make(name, 32)
    theirs.state = torch.from_numpy(ours.state.copy())
    random = np.random.default_rng(0)
    for _ in range(5):
        actions = random.integers(0, 2, 32) if name == "cartpole" else random.uniform(-3, 3, (32, 1)).astype(np.float32)
        a, b = ours.step(actions), theirs.step(torch.from_numpy(actions))
        np.testing.assert_allclose(a.obs, b.obs.numpy(), atol=1e-5)
        np.testing.assert_allclose(a.rewards, b.rewards.numpy(), atol=1e-5)


def test_time_limit_restarts():
    env = torch_envs.make("pendulum", 4)
    steps = [env.step(torch.zeros(4, 1)) for _ in range(201)]
    assert [bool(step.truncated.all()) for step in steps[198:]] == [False, True, False]
    assert env.lengths.tolist() == [1, 1, 1, 1]


def test_evaluation_of_a_policy_that_always_pushes_left():
    mean = evaluate("cartpole", lambda obs: np.zeros(len(obs), dtype=np.int64), seed=0)
    assert 8.0 < mean < 11.0  # a pole that is pushed one way falls in 8 to 11 steps


def test_tables():
    rows = [
        {"peer": peer, "variant": variant, "work": "small", "run": run, "transitions_per_s": rate * (1 + run)}
        | {"first_iteration_s": 1.0, "peak_rss_mb": 400.0}
        for peer, variant, rate in (("rl8x", "eager fp32", 40_000.0), ("sb3", "as it comes", 4_700.0))
        for run in range(3)
    ]
    result = {"throughput": rows, "works": {"small": {"flops": 1e6, "hidden": 64}}}
    result["limits"] = [{"fp32": {"64": {"gflops": 160.0}}}]
    assert "| small | 80k | 9.4k |" in report.summary_table(result)
    assert "| rl8x | eager fp32 | 80k | 40k - 120k | 1.00 | 400 | 50% |" in report.work_table(result, "small")


def test_seeds_that_failed_count_as_slowest():
    rows = [
        {
            "peer": "skrl",
            "variant": "as it comes",
            "work": "pendulum",
            "run": run,
            "seconds": seconds,
            "reached": seconds < 9,
        }
        for run, seconds in enumerate([1.0, 10.0, 3.0, 2.0, 4.0])
    ]
    assert "| skrl | as it comes | 3.00 | 1.00 - 4.00 | 4 of 5 |" in report.return_table(rows)
