"""Random runs of features combined, on the simulated device: `make fuzz-cuda MINUTES=10`.

The module is the command, and the plugin by which pytest has the device.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.simulated_cuda.device import Device, build


def pytest_configure() -> None:
    """Have torch take the device for a GPU."""
    from rl8x.execution import programs

    programs.capture_cuda = Device(Path(os.environ["LD_PRELOAD"])).capture


def main(minutes: str) -> int:
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "device.so"
        build(library)
        options = {"LD_PRELOAD": str(library), "RL8X_FUZZ_MINUTES": minutes, "RL8X_FUZZ_DEVICE": "cuda"}
        command = [sys.executable, "-m", "pytest", "-p", "tests.simulated_cuda.fuzz"]
        command += ["tests/combinations", "-s", "-k", "0", "-o", "faulthandler_timeout=0"]  # one test, for minutes
        return subprocess.run(command, env=os.environ | options).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
