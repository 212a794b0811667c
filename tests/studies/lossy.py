"""Jobs for workers of `test_jobs`, which import this and little else."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

from rl8x.tracking.locks import FolderLock
from rl8x.trainers.ranks import SignalGuard


def begin(driver, stop):
    """Begin a worker in place of `rl8x.studies.jobs.begin_worker`, for which each would import torch."""


def work(job):
    """Leave a mark; the job that is told to kills its process at its first times, another waits for its mark."""
    marks = Path(job["folder"])
    times = len(list(marks.glob(f"{job['key']}-*")))
    (marks / f"{job['key']}-{times}").touch()
    if times < job["dies"]:
        os.kill(os.getpid(), signal.SIGKILL)
    while not (marks / job.get("after", "")).exists():
        time.sleep(0.01)
    time.sleep(job.get("takes_s", 0))
    return {"key": job["key"], "result": os.getpid()}


def save(job):
    """Train until a signal, and save, as the trainer does; the job after that must not begin."""
    marks = Path(job["folder"])
    marks.mkdir(exist_ok=True)
    with FolderLock(marks), SignalGuard(quiet=True) as signals:
        (marks / f"{job['key']}-begun").touch()
        while signals.stop is None:
            time.sleep(0.01)
        time.sleep(0.5)
        (marks / f"{job['key']}-saved").touch()
    raise signals.exception()
