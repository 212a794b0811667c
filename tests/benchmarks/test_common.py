"""The clock of the measured processes."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks import common  # noqa: E402


class Clock:
    """Moves on by the seconds that are asked of it; the machine can become slower."""

    def __init__(self):
        self.now, self.slowdown = 0.0, 1.0

    def work(self, seconds):
        self.now += seconds * self.slowdown

    def perf_counter(self):
        return self.now


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(common, "time", clock)
    return clock


@pytest.fixture
def started(clock, monkeypatch):
    """The jobs of fresh processes, each of which takes 1 s an iteration on the machine as it is then."""
    jobs = []

    def run(command, *, input, **options):
        job = common.Job.from_json(input)
        jobs.append(job)
        clock.work(1000.0)
        rate = job.work.transitions / clock.slowdown
        return subprocess.CompletedProcess(command, 0, stdout=f'{{}}\n{{"transitions_per_s": {rate}}}\n')

    monkeypatch.setattr(common.subprocess, "run", run)
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", SimpleNamespace(name="benchmarks.peers.rl8x"))
    return jobs


def long_run(clock, *, drift=0.0, slowdown=1.0, fresh=4, iterations=1000):
    """Record a run whose iterations take 1 s and `drift` s more each time, on a machine that slows down half-way."""
    work = dataclasses.replace(common.WORKS["small"], iterations=iterations)
    recorder = common.Recorder(common.Job(work=work, warmup_s=0.0, fresh=fresh))
    recorder.start()
    for index in range(iterations + 1):
        clock.slowdown = slowdown if index > iterations // 2 else 1.0
        clock.work(1.0 + drift * index)
        if index < iterations:
            recorder.tick()
    with pytest.raises(common.DoneError):
        recorder.tick()
    return recorder.row()


def test_a_slower_machine_is_told_from_a_slower_run(clock, started):
    row = long_run(clock, slowdown=1.3)
    assert row["last_over_first"] == 1.3
    assert row["last_over_fresh"] == 1.0
    assert row["transitions_per_s"] < 2048.0  # 16 x 128 a second on the machine as it was at first
    assert [(job.fresh, job.work.iterations) for job in started] == [(0, 50)] * 4


def test_a_run_that_becomes_slower_is_seen(clock, started):
    # Iterations 1 to 100 take 1.0505 s in the middle, iterations 901 to 1,000 take 1.9505 s.
    row = long_run(clock, drift=0.001)
    assert row["last_over_first"] == round(1.9505 / 1.0505, 4)
    assert row["last_over_fresh"] == 1.9505


def test_fresh_processes_are_no_part_of_an_iteration(clock, started):
    with_fresh, without = (long_run(clock, fresh=fresh, iterations=400) for fresh in (4, 0))
    assert with_fresh["transitions_per_s"] == without["transitions_per_s"] == 2048.0
    assert len(started) == 4
    assert "last_over_fresh" not in without
    assert without["last_over_first"] == 1.0
