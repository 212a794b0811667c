"""Virtual environments of the peers, and fresh processes in them."""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import subprocess
import sys
import tempfile
import venv
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.common import MALLOC_SETTINGS, Job

ROOT = Path(__file__).resolve().parent.parent
VENVS = ROOT / ".bench-venvs"
# Where MLflow keeps the rows of `--measure tracking`: in a file, or behind its server.
STORES = ("sqlite", "http")
TORCH = "torch==2.13.0"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Peer:
    """A library that is measured.

    Attributes:
        module: Its file in `benchmarks/peers/`.
        title: Its name in tables.
        requirements: What pip installs, one call for each; none for the environment that runs the benchmark.
        variants: The ways in which it is run, by name: fields of the job that they change, and under `"env"` additions
            to the environment of the process.
    """

    module: str
    title: str
    requirements: tuple[str, ...]
    variants: Mapping[str, Mapping[str, Any]]


AS_IT_COMES: dict[str, dict[str, Any]] = {"as it comes": {}, "malloc": {"env": MALLOC_SETTINGS}}
OWN_MODES = {
    f"{execution} {precision}": {"execution": execution, "precision": precision}
    for precision in ("fp32", "bf16")
    for execution in ("eager", "compile")
}

PEERS = {
    "rl8x": Peer(module="rl8x", title="rl8x", requirements=(), variants=OWN_MODES),
    "rl8": Peer(module="rl8", title="rl8 1.0", requirements=(TORCH, "rl8==1.0.0"), variants=AS_IT_COMES),
    "rsl_rl": Peer(module="rsl_rl", title="rsl_rl", requirements=(TORCH, "rsl-rl-lib==5.5.1"), variants=AS_IT_COMES),
    "skrl": Peer(module="skrl", title="skrl", requirements=(TORCH, "skrl==2.1.1"), variants=AS_IT_COMES),
    "sb3": Peer(
        module="stable_baselines3",
        title="Stable-Baselines3",
        requirements=(TORCH, "stable-baselines3==2.9.2"),
        variants=AS_IT_COMES,
    ),
    "tianshou": Peer(
        module="tianshou", title="Tianshou", requirements=(TORCH, "tianshou==2.0.1"), variants=AS_IT_COMES
    ),
    "rejax": Peer(module="rejax", title="rejax (JAX)", requirements=("rejax==0.1.3",), variants=AS_IT_COMES),
}


def python_of(peer: Peer) -> str:
    """Return the interpreter of a peer, making its environment at the first call."""
    if not peer.requirements:
        return sys.executable
    folder = VENVS / peer.module
    stamp, wanted = folder / "installed.txt", "\n".join(peer.requirements)
    python = str(folder / "bin" / "python")
    if not stamp.exists() or stamp.read_text() != wanted:
        print(f"installing {', '.join(peer.requirements)} ...", file=sys.stderr)
        venv.create(folder, with_pip=True, clear=True)
        for requirement in peer.requirements:  # torch by itself first: another package would choose its build
            subprocess.run([python, "-m", "pip", "install", "-qq", requirement], check=True)
        stamp.write_text(wanted)
    return python


def environment(threads: int, extra: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a measured process."""
    left_out = ("MALLOC_", "MLFLOW_", "RL8X_CACHE", "TORCHINDUCTOR_CACHE", "TRITON_CACHE")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(left_out)}
    return {
        **kept,
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        "JAX_PLATFORMS": "cpu",
        "MLFLOW_DISABLE_TELEMETRY": "true",
        **extra,
    }


def run(peer: Peer, job: Job, extra: Mapping[str, str], timeout_s: float) -> dict[str, Any]:
    """Do a job in a fresh process.

    Returns:
        What it measured, or `{"error": ...}` with the last line that it said.
    """
    command = [python_of(peer), "-m", f"benchmarks.peers.{peer.module}"]
    return call(command, job.to_json(), environment(job.threads, extra), timeout_s)


def call(command: list[str], text: str, env: Mapping[str, str], timeout_s: float) -> dict[str, Any]:
    """Run a command in an empty folder, give it text, and read its last line as JSON.

    Compilers find nothing in their caches, so that the first iteration has all of the compiling in it, unless the
    environment names them.
    """
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        caches = {f"{name}_CACHE_DIR": f"{folder}/{name.lower()}" for name in ("RL8X", "TORCHINDUCTOR", "TRITON")}
        try:
            done = subprocess.run(
                command,
                input=text,
                env={**caches, **env},
                cwd=folder,
                capture_output=True,
                text=True,
                timeout=timeout_s,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return {"error": f"took more than {timeout_s:.0f} s"}
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ["said nothing"]
        return {"error": lines[-1].replace(str(ROOT), ".").replace(folder, "..."), "exit_status": done.returncode}
    row: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return row


def machine() -> dict[str, Any]:
    """Describe this machine, without its name."""
    model = platform.processor() or platform.machine()
    with open("/proc/cpuinfo") as file:
        for line in file:
            if line.startswith("model name"):
                model = line.split(":", 1)[1].strip()
                break
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9
    return {
        "cpu": model,
        "cores": len(os.sched_getaffinity(0)),
        "memory_gb": round(memory, 1),
        "system": platform.system(),
        "python": platform.python_version(),
    }


def save(path: Path, result: Mapping[str, Any]) -> None:
    """Write a result beside its place and move it there, so that there never is half of one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_suffix(".writing")
    beside.write_text(json.dumps(result, indent=1) + "\n")
    beside.replace(path)
