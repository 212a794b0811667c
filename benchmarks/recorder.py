"""The clock of a library's training loop, and what it has measured.

This runs in the virtual environments of all libraries: it imports the standard library and, to evaluate, numpy.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import platform
import resource
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

from benchmarks.processes import ask
from benchmarks.results import Row, version
from benchmarks.works import Job

EVAL_EPISODES = 128
LAST = 100  # iterations at either end of a long run that are compared


class DoneError(Exception):
    """Raised out of a library's own training loop when enough was measured."""


Act = Callable[[Any], Any]


class Recorder:
    """Times iterations; with a target, evaluates after each, outside the time, and stops when it is reached."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.durations, self.resident_mb = list[float](), list[float]()
        self.fresh, self.returns, self.reached = list[float](), list[float](), False
        self.warmup, self.begun, self._mark = 1, 0, 0.0

    def start(self) -> None:
        """Call this when everything is built and training begins."""
        self._synchronize()
        self._mark = time.perf_counter()

    def tick(self, act: Act | None = None) -> None:
        """Call this when an iteration has ended; raises `DoneError` when enough was measured.

        `act` is the deterministic policy, from observations `[n, d]` to actions `[n]` or `[n, 1]`, numpy arrays.
        """
        self._synchronize()
        self.durations.append(time.perf_counter() - self._mark)
        self.resident_mb.append(resident_mb())
        if self.job.target is not None and act is not None:
            self.returns.append(evaluate(self.job.work.env, act, seed=1000 + len(self.returns)))
            self.reached = self.returns[-1] >= self.job.target
        if self._enough():
            raise DoneError
        self._time_fresh()
        self._mark = time.perf_counter()

    def block(self, act: Act | None = None) -> None:
        """Call this before each block of an iteration, where a library does not tell when one has ended."""
        if self.begun and self.begun % self.job.work.blocks == 0:
            self.tick(act)
        self.begun += 1

    def _enough(self) -> bool:
        job, total = self.job, sum(self.durations)
        if job.target is not None:
            return self.reached or total > job.budget_s
        if job.transitions is not None:
            return len(self.durations) * job.work.transitions >= job.transitions
        if total - self.durations[0] < job.warmup_s:
            self.warmup = len(self.durations)
        timed = self.durations[self.warmup :]
        return len(timed) >= job.work.iterations and sum(timed) >= job.timed_s

    def _synchronize(self) -> None:
        if self.job.device != "cpu":
            sys.modules["torch"].cuda.synchronize()

    def _time_fresh(self) -> None:
        """In turn with the last hundred iterations, time half as many of a fresh process on the same work."""
        job, left = self.job, self.job.work.iterations - (len(self.durations) - self.warmup)
        if not job.fresh or not 0 < left <= LAST or left % (LAST // job.fresh):
            return
        work = dataclasses.replace(job.work, iterations=LAST // 2)
        other = dataclasses.replace(job, fresh=0, timed_s=0.0, work=work)
        row = ask(sys.executable, sys.argv[1], other.to_json(), os.environ)
        self.fresh.append(job.work.transitions / row["transitions_per_s"])

    def row(self) -> Row:
        """Summarise what was measured."""
        job, timed, total = self.job, self.durations[self.warmup :], round(sum(self.durations), 3)
        count, transitions = len(self.durations), self.job.work.transitions
        row: Row = {
            "first_iteration_s": round(self.durations[0], 4),
            "peak_rss_mb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6, 1),
            "resident_mb": [round(self.resident_mb[0], 1), round(self.resident_mb[-1], 1)],
        }
        if job.device != "cpu":
            row["peak_device_mb"] = round(sys.modules["torch"].cuda.max_memory_allocated() / 1e6, 1)
        if job.target is not None:
            reached = {"reached": self.reached, "final_return": round(self.returns[-1], 1)}
            return row | reached | {"seconds": total, "iterations": count}
        if job.transitions is not None:
            return row | {"seconds": total, "transitions": count * transitions}
        row |= {"iterations": len(timed), "warmup_iterations": self.warmup}
        row["transitions_per_s"] = round(transitions / statistics.median(timed), 1)
        if len(timed) >= 4 * LAST:
            last = statistics.median(timed[-LAST:])
            row["last_over_first"] = round(last / statistics.median(timed[:LAST]), 4)
            if self.fresh:
                row["last_over_fresh"] = round(last / statistics.median(self.fresh), 4)
        return row


def resident_mb() -> float:
    """Return the memory of this process that is in RAM now, in MB (10^6 bytes)."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize() / 1e6


def evaluate(env_name: str, act: Act, *, seed: int, episodes: int = EVAL_EPISODES) -> float:
    """Return the mean return of the first episode of each of some fresh copies."""
    import numpy as np

    from benchmarks.peers.envs import NumpyEnv

    env = NumpyEnv(env_name, episodes, seed)
    obs = env.reset()
    returns, running = np.zeros(episodes), np.ones(episodes, dtype=bool)
    while running.any():  # each episode ends at the limit of its time
        step = env.step(np.asarray(act(obs)))
        obs = step.obs
        returns += np.where(running, step.rewards, 0.0)
        running &= ~(step.terminated | step.truncated)
    return float(returns.mean())


def recorded(train: Callable[[Job, Recorder], None], library: str, *packages: str) -> Callable[[dict[str, Any]], Row]:
    """Return what answers a job: `train` builds the work with a library, of some packages.

    It calls `recorder.start()`, and `recorder.tick()` after every iteration.
    """

    def answer(asked: dict[str, Any]) -> Row:
        job = Job.of(asked)
        if "torch" in sys.modules:
            sys.modules["torch"].manual_seed(job.seed)
        recorder = Recorder(job)
        with contextlib.suppress(DoneError):
            train(job, recorder)
        versions = {"version": version(library), "packages": {name: version(name) for name in packages}}
        about = {"python": platform.python_version(), "threads": job.threads, "device": job.device, "seed": job.seed}
        return {"library": library, **versions, **about, **recorder.row()}

    return answer
