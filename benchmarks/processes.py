"""The libraries that are compared, their virtual environments, and fresh processes in them."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import venv
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.results import ROOT
from benchmarks.works import Job

VENVS = ROOT / ".bench-venvs"
TORCH = "torch==2.13.0"
# glibc unmaps blocks over 32 MB when they are freed, and the next ones page-fault again; with these it keeps them.
MALLOC_SETTINGS = {
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": "100000000000",
    "MALLOC_TOP_PAD_": "268435456",
}
# Where MLflow keeps the rows that are timed: in a file, or behind its server.
STORES = ("sqlite", "http")
MALLOC, UNTRACKED = "malloc", "untracked"
AS_IT_COMES: dict[str, dict[str, Any]] = {"as it comes": {}, MALLOC: {"env": MALLOC_SETTINGS}}
OWN_MODES: dict[str, dict[str, Any]] = {
    f"{execution} {precision}": {"execution": execution, "precision": precision}
    for precision in ("fp32", "bf16")
    for execution in ("eager", "compile")
} | {f"compile fp32 {UNTRACKED}": {"execution": "compile", "tracks": False}}


@dataclasses.dataclass(frozen=True)
class Peer:
    """A library that is measured."""

    module: str  # its file in `benchmarks/peers/`
    title: str  # its name in tables
    # What pip installs, one call for each; none for the environment that runs the benchmark.
    requirements: tuple[str, ...]
    algorithms: tuple[str, ...] = ("ppo",)  # those of the works that it is measured with
    # The ways in which it is run, by name: fields of the job that they change, and under `"env"` additions to the
    # environment of the process.
    variants: Mapping[str, Mapping[str, Any]] = dataclasses.field(default_factory=lambda: AS_IT_COMES)


ALL = ("ppo", "dqn", "sac")
PEERS = {
    "rl8x": Peer("rl8x", "rl8x", (), ALL, OWN_MODES),
    "rl8": Peer("rl8", "rl8 1.0", (TORCH, "rl8==1.0.0")),
    "rsl_rl": Peer("rsl_rl", "rsl_rl", (TORCH, "rsl-rl-lib==5.5.1")),
    "skrl": Peer("skrl", "skrl", (TORCH, "skrl==2.1.1")),
    "sb3": Peer("stable_baselines3", "Stable-Baselines3", (TORCH, "stable-baselines3==2.9.2"), ALL),
    "tianshou": Peer("tianshou", "Tianshou", (TORCH, "tianshou==2.0.1"), ("sac",)),
    "rejax": Peer("rejax", "rejax (JAX)", ("rejax==0.1.3",)),
}


def variants_of(peer: str, device: str) -> Mapping[str, Mapping[str, Any]]:
    """Return the ways in which a library is run on a device."""
    if device == "cpu":
        return PEERS[peer].variants
    if peer != "rl8x":
        return {"as it comes": {}}
    return {
        f"{execution} {precision}": {"execution": execution, "precision": precision}
        for execution in ("graph", "eager", "compile")
        for precision in ("fp32", "tf32", "bf16")
    }


def is_there(peer: str) -> bool:
    """Whether this interpreter has a library."""
    return peer == "rl8x" or importlib.util.find_spec(PEERS[peer].module) is not None


def carried() -> dict[str, str]:
    """Return where processes of this interpreter, which run in folders of their own, find what it finds."""
    given = [str(Path(part).resolve()) for part in os.environ.get("PYTHONPATH", "").split(os.pathsep) if part]
    return {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "src"), *given])}


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


def run(peer: Peer, job: Job, extra: Mapping[str, str], timeout_s: float, *, here: bool = False) -> dict[str, Any]:
    """Do a job in a fresh process of the library's environment, or of this interpreter; as `ask` answers."""
    python = sys.executable if here else python_of(peer)
    return ask(python, f"peers.{peer.module}", job.to_json(), environment(job.threads, extra), timeout_s)


def ask(python: str, module: str, text: str, env: Mapping[str, str], timeout_s: float) -> dict[str, Any]:
    """Run a module of the benchmarks in an empty folder, give it text, and read its last line as JSON, or the error.

    Compilers find nothing in their caches, so that the first iteration has all of the compiling in it, unless the
    environment names them.
    """
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        caches = {f"{name}_CACHE_DIR": f"{folder}/{name.lower()}" for name in ("RL8X", "TORCHINDUCTOR", "TRITON")}
        command, env = [python, "-m", f"benchmarks.{module}"], {**caches, **env}
        options: dict[str, Any] = {"capture_output": True, "text": True, "timeout": timeout_s, "check": False}
        try:
            done = subprocess.run(command, input=text, env=env, cwd=folder, **options)
        except subprocess.TimeoutExpired:
            return {"error": f"took more than {timeout_s:.0f} s"}
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ["said nothing"]
        return {"error": lines[-1].replace(str(ROOT), ".").replace(folder, "..."), "exit_status": done.returncode}
    row: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return row
