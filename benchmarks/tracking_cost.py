"""Measure what logging a row takes of the training thread, with a local database and with MLflow's server.

A fresh process trains with a full row of metrics at every step; the trainer measures (`profiling/tracking_ms`).
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from rl8x.algorithms import PPOConfig
from rl8x.envs import CartPole
from rl8x.tracking import MLflowTracker
from rl8x.trainers import Trainer


@contextlib.contextmanager
def opened(store: str) -> Iterator[str]:
    """Give the address of a fresh store in the current folder, "sqlite" or "http"."""
    database = f"sqlite:///{Path('mlflow.db').resolve()}"
    if store == "sqlite":
        yield database
        return
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "mlflow", "server", "--workers", "1", "--host", "127.0.0.1", "--port", str(port)]
    environment = {**os.environ, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
    options = {"env": environment, "stdout": sys.stderr, "stderr": sys.stderr, "start_new_session": True}
    server = subprocess.Popen([*command, "--backend-store-uri", database], **options)
    try:
        for _ in range(600):
            with contextlib.suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=1):
                break
            time.sleep(0.1)
        yield f"http://127.0.0.1:{port}"
    finally:
        os.killpg(server.pid, signal.SIGKILL)  # with its workers
        server.wait()


def measure(address: str, steps: int, threads: int) -> dict[str, Any]:
    """Train for some steps; returns metrics a row and milliseconds a row, the first, which begins the run, apart."""
    took, metrics = [], []

    def note(trainer: Any, stats: Any) -> None:
        metrics.append(len(stats.fresh))
        took.append(float(stats["profiling/tracking_ms"]))

    sizes = {"num_envs": 256, "horizon": 32, "sgd_minibatch_size": 4096, "model_config": {"hidden_sizes": [64, 64]}}
    config = PPOConfig.rl8(**sizes, num_threads=threads, device="cpu", seed=0)
    tracker = MLflowTracker(tracking_uri=address)
    trainer = Trainer(config.build(CartPole), tracker=tracker, checkpoints=False, callbacks=(note,))
    # A row tells what the one before it took, and the first tells of none.
    trainer.run(max_steps=steps + 2, progress="none")
    first, *others = took[1:]
    found = {"first_ms": first, "median_ms": np.median(others), "p99_ms": np.quantile(others, 0.99)}
    milliseconds = {name: round(float(value), 3) for name, value in {**found, "max_ms": max(others)}.items()}
    return {"steps": len(others), "metrics": int(np.median(metrics)), **milliseconds}


if __name__ == "__main__":
    asked = json.loads(sys.stdin.read())
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: asked["threads"]])
    with opened(asked["store"]) as store:
        print(json.dumps(measure(store, asked["steps"], asked["threads"])))
