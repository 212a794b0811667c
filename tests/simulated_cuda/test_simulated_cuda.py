"""rl8x on a CUDA device, as far as one can be simulated: see `device.cpp`."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tests.simulated_cuda.device import build
from tests.simulated_cuda.runs import RUNS

ROOT = Path(__file__).parents[2]
ON_RANKS = ["ppo, moving physics, normalised", "dqn"]
pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(shutil.which("g++") is None, reason="there is no g++, which builds the device"),
    pytest.mark.skipif(
        torch.version.cuda is not None,
        reason="torch is built with CUDA, whose hooks are where the device's would be: use a build for CPUs",
    ),
]


@pytest.fixture(scope="module")
def rows_of(tmp_path_factory):
    """Return what gives the rows that runs print, and what else they say."""
    library = tmp_path_factory.mktemp("device") / "device.so"
    build(library)
    # Loaded before torch is, which asks once for a GPU; ranks may take longer on a machine that is busy.
    options = {"LD_PRELOAD": str(library), "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}", "OMP_NUM_THREADS": "1"}
    options |= {"RL8X_RANK_TIMEOUT_S": "150"}

    def run(names, *before):
        command = [sys.executable, "-m", *before, "tests.simulated_cuda.runs", str(library), *names]
        done = subprocess.run(command, env=os.environ | options, capture_output=True, text=True, timeout=300)
        return [json.loads(line) for line in done.stdout.splitlines()], done.stderr[-3000:]

    return run


@pytest.fixture(scope="module")
def seen(rows_of):
    """What came out of each run, by its name; and what was printed, for those of which nothing did."""
    rows, errors = rows_of(["refusals", *RUNS])
    return {row["run"]: row for row in rows}, errors


@pytest.mark.parametrize("name", RUNS)
def test_a_run_on_the_device_is_that_on_the_cpu_and_seldom_waits(name, seen):
    """Its captured programs give the CPU's eager numbers, on the same noise; whatever is of the host is refused."""
    rows, errors = seen
    assert name in rows, errors
    *_, options, waits = RUNS[name]
    row = rows[name]
    assert (row["mode"], row["waits"], row["restored"]) == (options.get("execution", "graph"), waits, True)
    assert row["apart"] < 1e-6
    assert row["played"] == row["played"] != 0
    assert row["convolutions"] == [True, False]  # the same bits each time, in float32


def test_what_a_gpu_refuses_is_refused(seen):
    """Else the runs above would show nothing."""
    rows, errors = seen
    assert rows["refusals"]["refused"] == [
        "Expected all tensors to be on the same device",
        "Expected a 'cuda' device type for generator but found 'cpu'",
        "called a synchronizing CUDA operation",
    ], errors
    assert rows["refusals"]["waits"] == 2


def test_runs_of_two_ranks_on_devices_are_those_on_cpus(rows_of):
    """Captured in parts between the sums over ranks, which gloo does in the place of NCCL."""
    rows, errors = rows_of(ON_RANKS, "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m")
    assert sorted(row["run"] for row in rows) == sorted(2 * ON_RANKS), errors
    assert all(row["mode"] == "graph" and row["apart"] < 1e-6 and row["restored"] for row in rows), rows
