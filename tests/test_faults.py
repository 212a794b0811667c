"""A few tries of each kind of tests/faults, the same each time; `make faults MINUTES=60` draws others."""

import os
import re
import subprocess
import sys

import pytest
from tests.forks import ForkedPython
from tests.pages import ROOT

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs fork, and Linux's files")


@pytest.mark.long
@pytest.mark.store_process
@pytest.mark.draws_figures
@pytest.mark.parametrize(
    ("kind", "tries", "done"),
    [
        ("kill", 4, 4),
        ("ranks", 1, r"\d+"),
        ("disk", 4, 4),
        ("http", 2, 2),
        ("restarts", 1, 5),
        ("secrets", 1, 1),
        ("journals", 1, 20),
    ],
)
def test_nothing_is_lost_or_untrue_where_processes_are_killed_and_disks_and_addresses_fail(kind, tries, done, tmp_path):
    command = [sys.executable, "-m", "tests.faults", "--only", kind, "--tries", str(tries)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])}
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    process = ForkedPython(command, cwd=tmp_path, env=environment, **streams)  # which has torch and MLflow
    said, _ = process.communicate(timeout=800)
    assert process.returncode == 0, said
    assert re.search(rf"^{kind}: {done} tries, 0 lost, 0 doubled, 0 wrong, 0 second runs$", said, re.MULTILINE), said
