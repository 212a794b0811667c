"""The libraries that are compared, their virtual environments, and fresh processes that answer a question.

The standard library alone: `python -m benchmarks.processes MODULE`, the process's side of `ask`, runs in all of them.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import venv
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.results import ROOT, Row
from benchmarks.works import Job

Variants = Mapping[str, Mapping[str, Any]]

VENVS = ROOT / ".bench-venvs"
TORCH = "torch==2.13.0"
# glibc unmaps blocks over 32 MB when they are freed, and the next ones page-fault again; with these it keeps them.
MALLOC_SETTINGS = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": "100000000000", "MALLOC_TOP_PAD_": "268435456"}
MALLOC, UNTRACKED = "malloc", "untracked"
AS_IT_COMES: Variants = {"as it comes": {}}


def modes(executions: Iterable[str], precisions: Iterable[str]) -> dict[str, Mapping[str, Any]]:
    """Return rl8x's modes of execution in each precision."""
    pairs = [{"execution": execution, "precision": precision} for precision in precisions for execution in executions]
    return {" ".join(pair.values()): pair for pair in pairs}


OWN_MODES = modes(("eager", "compile"), ("fp32", "bf16"))
OWN_MODES[f"compile fp32 {UNTRACKED}"] = {"execution": "compile", "tracks": False}


@dataclasses.dataclass(frozen=True)
class Peer:
    """A library that is measured."""

    module: str  # its file in `benchmarks/peers/`
    title: str  # its name in tables
    # What pip installs, one call for each; none for the environment that runs the benchmark.
    requirements: tuple[str, ...]
    algorithms: tuple[str, ...] = ("ppo",)  # those of the works that it is measured with
    # The ways in which it is run on a CPU, by name: fields of the job that they change, and under `"env"` additions to
    # the environment of the process.
    variants: Variants = dataclasses.field(default_factory=lambda: {**AS_IT_COMES, MALLOC: {"env": MALLOC_SETTINGS}})


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


def variants_of(peer: str, device: str) -> Variants:
    """Return the ways in which a library is run on a device."""
    if device == "cpu":
        return PEERS[peer].variants
    return modes(("graph", "eager", "compile"), ("fp32", "tf32", "bf16")) if peer == "rl8x" else AS_IT_COMES


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


def run(peer: Peer, job: Job, extra: Mapping[str, str], timeout_s: float, *, here: bool = False) -> Row:
    """Do a job in a fresh process of the library's environment, or of this interpreter; as `ask` answers."""
    python = sys.executable if here else python_of(peer)
    return ask(python, f"peers.{peer.module}", job.to_json(), environment(job.threads, extra), timeout_s)


def ask(python: str, module: str, text: str, env: Mapping[str, str], timeout_s: float | None = None) -> Row:
    """Ask a module of the benchmarks, in an empty folder, and return its answer, or the error.

    The text is JSON, of a mapping with `threads`. Compilers find nothing in their caches, so that the first iteration
    has all of the compiling in it, unless the environment names them.
    """
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        caches = {f"{name}_CACHE_DIR": f"{folder}/{name.lower()}" for name in ("RL8X", "TORCHINDUCTOR", "TRITON")}
        options: dict[str, Any] = {"capture_output": True, "text": True, "start_new_session": True, "check": False}
        command, options["env"] = [python, "-m", "benchmarks.processes", module], {**caches, **env}
        try:
            done = subprocess.run(command, input=text, cwd=folder, timeout=timeout_s, **options)
        except subprocess.TimeoutExpired:
            return {"error": f"took more than {timeout_s:.0f} s"}
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ["said nothing"]
        return {"error": lines[-1].replace(str(ROOT), ".").replace(folder, "..."), "exit_status": done.returncode}
    return json.loads(done.stdout)


def main() -> None:
    """Have a module answer the question that standard input has, on so many cores and threads, and print that."""
    answer = os.dup(1)
    os.dup2(2, 1)  # what a library prints when it is imported and while it trains is no part of the answer
    module, asked = importlib.import_module(f"benchmarks.{sys.argv[1]}"), json.loads(sys.stdin.read())
    cores = sorted(os.sched_getaffinity(0))[: asked["threads"]]
    os.sched_setaffinity(0, cores)  # some libraries have no other way to be told how many threads to use
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(asked["threads"])
    row = module.answer(asked)
    sys.stdout.flush()
    os.write(answer, json.dumps(row).encode())
    # Threads of a library's logger must not keep the process, and nothing that they still write is wanted.
    os._exit(0)


if __name__ == "__main__":
    main()
