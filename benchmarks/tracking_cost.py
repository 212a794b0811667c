"""Measure what logging a row takes of the training thread, with a local database and with MLflow's server.

A fresh process trains with a full row of metrics at every step; the trainer measures (`profiling/tracking_ms`).
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import numpy as np
from tests.browser.mlflow_pages import served

from rl8x.algorithms import PPOConfig
from rl8x.envs import CartPole
from rl8x.tracking import MLflowTracker
from rl8x.trainers import Trainer


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


def answer(asked: dict[str, Any]) -> dict[str, Any]:
    """Measure a store, `"sqlite"` or `"http"`, in the current folder."""
    here = Path.cwd()
    local = contextlib.nullcontext(f"sqlite:///{here / 'mlflow.db'}")
    with served(here) if asked["store"] == "http" else local as address:
        return measure(address, 3 if asked["quick"] else 300, asked["threads"])
