"""A small share of benchmarks/faults.py: processes that are killed for real, and disks and servers that fail."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from benchmarks.fault_process import ForkedPython

ROOT = Path(__file__).parent.parent
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs fork, and Linux's files")


def faults(tmp_path, *names, share):
    command = [sys.executable, "-m", "benchmarks.faults", "--tries", str(share), "--only", *names]
    command += ["--output", str(tmp_path / "faults.json")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])}
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    process = ForkedPython(command, cwd=tmp_path, env=environment, **streams)  # which has torch and MLflow
    said, _ = process.communicate(timeout=800)
    assert process.returncode == 0, said
    return {row["fault"]: row for row in json.loads((tmp_path / "faults.json").read_text())["faults"]}


@pytest.mark.store_process
@pytest.mark.draws_curves
def test_nothing_is_lost_or_untrue_where_processes_are_killed_and_disks_and_addresses_fail(tmp_path):
    table = faults(tmp_path, "kill", "write", "damage", "disk", "secrets", "spools", share=0.005)
    kill = table["SIGKILL at a random instant of a random run, then resume"]
    assert kill["tries"] == kill["resumed"] == kill["equal"] == kill["status"] == 2
    assert kill["rows_lost"] == kill["rows_doubled"] == kill["wrong_rows"] == 0
    write = table["SIGKILL inside a checkpoint write"]
    assert write["tries"] == write["resumed"] == write["equal"] == 1
    damage = table["flipped or cut bytes in a checkpoint"]
    assert damage["tries"] == damage["clear_errors"] == 1
    assert len(table) == 6
    assert all(row["ok"] for row in table.values())
