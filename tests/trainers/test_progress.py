import contextlib
import fcntl
import os
import pty
import re
import struct
import sys
import termios
import time
import types

import pytest

from rl8x import keys
from rl8x.algorithms import PPOConfig
from rl8x.conditions import HitsUpperBound, WallTime
from rl8x.envs import CartPole
from rl8x.tracking import MemoryTracker, NullTracker
from rl8x.trainers import Trainer
from rl8x.trainers.rows import ProgressReporter


@contextlib.contextmanager
def terminal(columns=80):
    """Put a terminal in place of standard error; yields what reads the lines that it was sent."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    os.set_blocking(master, False)

    def lines():
        sent = b""
        with contextlib.suppress(BlockingIOError):
            while chunk := os.read(master, 1 << 16):
                sent += chunk
        return [line for line in re.split(r"[\r\n]+", sent.decode()) if line.strip()]

    with os.fdopen(slave, "w", encoding="utf-8") as stream, contextlib.redirect_stderr(stream):
        yield lines
    os.close(master)


ROW = {
    keys.STEPS: 5.0,
    keys.ENV_STEPS: 1_234_567.0,
    "profiling/env_steps_per_s": 851_234.5,
    "returns/mean": -1234.5,
    "eval/returns/mean": -1150.25,
    "episodes/lengths/mean": 433.3,
    "monitors/kl_div": 0.0123456,
}


@pytest.mark.parametrize("total", [None, 100_000])
def test_evaluation_and_rate_are_seen_at_80_columns(total):
    with terminal() as lines:
        reporter = ProgressReporter("bar", total)
        reporter._bar.update(99_990)
        reporter._bar.start_t -= 36_000
        reporter._bar.mininterval = 0
        reporter.update(ROW, total)
        reporter.close()
        line = lines()[-1]
        assert len(line) <= 80
        assert "851k/s" in line
        assert "eval -1150" in line
        assert "10:00:0" in line


COMMON = ROW | {"episodes/returns/mean": 321.5, "eval/returns/mean": 345.25, "episodes/lengths/mean": 321.5}


@pytest.mark.parametrize(
    ("row", "columns", "done", "metrics"),
    [
        # Whole metrics, as many as fit; a bar of ten or more where three of them leave the room
        (COMMON, 80, 550, "851k/s, eval 345.2, return 321.5"),
        (COMMON, 100, 550, "851k/s, eval 345.2, return 321.5, transitions 1.23M"),
        (COMMON, 130, 550, "851k/s, eval 345.2, return 321.5, transitions 1.23M, kl 0.0123"),
        (COMMON | {"episodes/lengths/mean": 77.0}, 130, 550, "return 321.5, transitions 1.23M, length 77, kl 0.0123"),
    ],
)
def test_a_bar_of_ten_columns_stands_beside_whole_metrics(row, columns, done, metrics):
    with terminal(columns) as lines:
        reporter = ProgressReporter("bar", 1000)
        reporter._bar.update(done - 1)
        reporter._bar.mininterval = 0
        reporter.update(row, 1000)
        reporter.close()
        line = lines()[-1]
    assert len(line) <= columns
    assert line.endswith(f"{metrics}]")
    bar = re.fullmatch(r" 55%\|(.*)\| 550/1000 \[.*\]", line)
    assert bar is not None
    assert len(bar[1]) >= 10
    assert bar[1].count("█") == len(bar[1]) * 55 // 100


def test_where_there_is_no_room_the_bar_goes_before_the_metrics():
    with terminal(70) as lines:
        reporter = ProgressReporter("bar", 1000)
        reporter._bar.update(549)
        reporter._bar.mininterval = 0
        reporter.update(COMMON, 1000)
        reporter.close()
        assert re.fullmatch(r" 55% 550/1000 \[\S+<\S+, 851k/s, eval 345.2, return 321.5\]", lines()[-1])
    with terminal(30) as lines:
        reporter = ProgressReporter("bar", None)
        reporter._bar.mininterval = 0
        reporter.update(COMMON)
        reporter.close()
        assert re.fullmatch(r"1 steps \[\S+, 851k/s\]", lines()[-1])


@pytest.mark.parametrize(("seconds", "count"), [(0.3, 1), (0.0, 0)])
def test_a_wait_for_the_tracker_has_a_line(seconds, count, monkeypatch, capsys):
    monkeypatch.setattr("rl8x.trainers.rows._SECONDS_OF_SILENCE", 0.1)

    class Slow(MemoryTracker):
        location = "a slow place"

        def finish(self, status):
            time.sleep(seconds)
            super().finish(status)

    trainer = make(Slow())
    trainer.run(max_steps=1, progress="lines")
    lines = [line for line in capsys.readouterr().err.splitlines() if "writing" in line]
    assert lines == ["rl8x: writing the last of the run to a slow place ..."] * count


def test_one_labelled_return_that_does_not_alternate(capsys, monkeypatch):
    monkeypatch.setattr("rl8x.trainers.rows._SECONDS_PER_LINE", -1.0)
    reporter = ProgressReporter("lines")
    for episodes in ({}, {"episodes/returns/mean": -9.87}, {}, {"episodes/returns/mean": -8.0}):
        reporter.update(ROW | {"returns/mean": -0.65} | episodes)
    shown = [re.findall(r"[a-z ]*return -[\d.]+", line) for line in capsys.readouterr().err.splitlines()]
    assert shown == [[" horizon return -0.65"], [" return -9.87"], [" return -9.87"], [" return -8"]]


def make(tracker=None):
    small = {"num_envs": 4, "horizon": 8, "seed": 5, "device": "cpu", "model_config": {"hidden_sizes": [8]}}
    algorithm = PPOConfig(**small, num_sgd_iters=1).build(CartPole)
    return Trainer(algorithm, tracker=tracker or NullTracker(), eval_env=False, checkpoints=False)


@pytest.mark.parametrize(
    ("options", "total"),
    [
        ({"stop_conditions": [WallTime("1h"), HitsUpperBound(keys.ENV_STEPS, 100)]}, 4),
        ({"stop_conditions": HitsUpperBound(keys.ENV_STEPS, 64), "max_steps": 3}, 2),
        ({"stop_conditions": HitsUpperBound(keys.ENV_STEPS, 64) & HitsUpperBound(keys.STEPS, 3)}, None),
    ],
)
def test_a_bound_on_env_steps_gives_the_bar_a_total(options, total):
    with terminal() as lines:
        make().run(progress="bar", **options)
        bars = [line for line in lines() if "[" in line and "stopped" not in line]
        if total is None:
            assert "3 steps [" in bars[-1]
        else:
            assert re.search(rf" {total}/{total} \[\d+:\d+<", bars[-1])
            assert re.search(rf" 0/{total} \[00:00<\?", bars[0])


@pytest.fixture
def notebook(monkeypatch):
    """What a kernel of Jupyter's looks like from the inside."""
    shell = types.SimpleNamespace(config={"IPKernelApp": {}})
    monkeypatch.setitem(sys.modules, "IPython", types.SimpleNamespace(get_ipython=lambda: shell))
    return shell


def test_a_notebook_has_a_bar_without_asking(notebook):
    assert ProgressReporter("auto", 10).mode == "bar"
    assert ProgressReporter("lines", 10).mode == "lines"
    notebook.config = {}  # IPython in a terminal, whose standard error says what it is
    assert ProgressReporter("auto", 10).mode == "lines"


def test_a_notebooks_bar_follows_what_is_known_of_the_end(notebook, monkeypatch):
    made = []

    class Bar:
        """What tqdm has in a notebook, as far as it is used: the total is in a widget too."""

        def __init__(self, **options):
            self.total, self.steps = options["total"], 0
            self.container = types.SimpleNamespace(
                children=[None, types.SimpleNamespace(max=options["total"] or 1), None]
            )
            made.append(self)

        def update(self):
            self.steps += 1

    monkeypatch.setattr("tqdm.auto.tqdm", Bar)
    reporter = ProgressReporter("auto", None)
    (bar,) = made
    reporter.update(ROW, None)
    assert bar.container.children[1].max == 1
    reporter.update(ROW, 40)
    assert (bar.total, bar.container.children[1].max, bar.steps) == (40, 40, 2)
