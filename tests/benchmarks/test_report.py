from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.common import WORKS, DoneError, Job, Recorder, Work, evaluate  # noqa: E402
from benchmarks.peers import numpy_envs, torch_envs  # noqa: E402

from benchmarks import limits, processes, report, tables  # noqa: E402


def test_page_says_what_the_results_say():
    page = ROOT / "docs" / "benchmarks.md"
    assert report.filled(page.read_text(), ROOT / "benchmarks" / "results") == page.read_text()


def test_flops_of_the_two_sizes():
    small = Work(env="cartpole", num_envs=1, horizon=32, hidden=64, minibatches=1, passes=4)
    # P = 2*4*64 + 2*64*64 + 64*3 = 8896; F = 2*8896*33/32 + 4*(6*8896 - 4*4*64) = 227,756
    assert small.flops == pytest.approx(227_756)
    assert WORKS["rl8-defaults"].flops == pytest.approx(3.47e6, rel=0.01)


def test_job_survives_json():
    job = Job(work=WORKS["small"], seed=3, target=475.0, precision="bf16")
    assert Job.from_json(job.to_json()) == job


def test_activations_of_a_work():
    small = Work(env="cartpole", num_envs=1, horizon=32, hidden=64, minibatches=1, passes=4)
    # Two networks of two layers: 4 * 64 * (2 * 33/32 + 6 * 4) = 6672
    assert small.described()["activations"] == small.activations == pytest.approx(6672)


def test_processes_begin_without_compiled_code_and_say_why_they_failed():
    names = ["RL8X_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"]
    code = f"import json, os; print(json.dumps([os.environ[name] for name in {names}]))"
    first, second = (processes.call([sys.executable, "-c", code], "", {}, 60.0) for _ in range(2))
    assert not set(first) & set(second)
    failed = processes.call([sys.executable, "-c", f"raise SystemExit('no {ROOT}/here')"], "", {}, 60.0)
    assert failed == {"error": "no ./here", "exit_status": 1}
    slow = processes.call([sys.executable, "-c", "import time; time.sleep(60)"], "", {}, 0.2)
    assert slow == {"error": "took more than 0 s"}


def test_results_are_written_beside_and_moved(tmp_path):
    path = tmp_path / "new" / "cpu.json"
    processes.save(path, {"a": 1})
    processes.save(path, {"a": 2})
    assert path.read_text() == '{\n "a": 2\n}\n'
    assert [file.name for file in path.parent.iterdir()] == ["cpu.json"]


def test_limits_of_a_cpu():
    found = limits.measure(rows=(64,), copied=2**16)
    assert set(found) == {"fp32", "bf16", "bytes_gb_per_s"}
    assert found["fp32"]["64"]["gflops"] > 0
    assert found["fp32"]["256"]["rows"] == 64
    assert tables.best_limits([found, {"fp32": {"64": {"gflops": 1e9}}}, {"error": "x"}])["fp32"]["64"] == 1e9
    assert tables.best_bandwidth([found, {"error": "x"}]) == found["bytes_gb_per_s"]
    assert tables.best_bandwidth([{"fp32": {}}]) is None


def test_scaling_tells_how_the_largest_compares_with_the_smallest():
    rows = [
        {
            "peer": "rl8x",
            "variant": "eager fp32",
            "work": count,
            "run": 0,
            "transitions_per_s": rate,
            "peak_rss_mb": 9.0,
        }
        for count, rate in ((1024, 200e3), (65536, 150e3))
    ]
    assert "| rl8x | eager fp32 | 200k | 150k | 0.75 | 9 |" in report.scaling_table(rows)


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


def test_the_page_quotes_the_smaller_measurement():
    result = json.loads((ROOT / "benchmarks" / "results" / "cpu-small.json").read_text())
    peers = (("rl8x", "fp32"), ("rejax", None), ("sb3", None))
    rates = [tables.best(result["throughput"], "small", peer, precision) for peer, precision in peers]
    own, rejax, sb3 = (tables.short(found.rate) for found in rates)
    page = " ".join((ROOT / "docs" / "benchmarks.md").read_text().split())
    assert f"rl8x compiled {own} transitions/s, rejax {rejax}, Stable-Baselines3 {sb3}, medians" in page
    assert rates[0].variant == "compile fp32"
