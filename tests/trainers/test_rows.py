"""What a run says that it has come to, against its rows; and how its progress is shown."""

import contextlib
import copy
import dataclasses
import fcntl
import json
import math
import os
import pickle
import pty
import re
import struct
import subprocess
import sys
import termios
import threading
import types
from unittest import mock

import pytest
from tests.trainers import helpers

from rl8x import HitsUpperBound, MemoryTracker, MLflowTracker, NullTracker, Trainer, WallTime, keys
from rl8x.trainers.rows import MAX_POINTS, Course, ProgressReporter, Results, TrainStats


def history(client, trainer, name):
    return [(point.step, point.value) for point in client.get_metric_history(trainer.tracker.run_id, name)]


def test_the_last_and_the_best_are_logged_once_at_the_end(mlflow_client):
    trainer = helpers.make(trainer={"tracker": MLflowTracker(), "num_eval_envs": 2})
    helpers.run(trainer, max_steps=4, steps_per_eval=1)
    end = trainer.state["env/steps"]
    for name in ("eval/returns/mean", "episodes/returns/mean"):
        steps, values = zip(*history(mlflow_client, trainer, name), strict=True)
        assert len(values) > 1
        best = values.index(max(values))
        ends = [history(mlflow_client, trainer, f"{kind}/{name}") for kind in ("final", "best", "best_step")]
        assert ends == [[(end, values[-1])], [(end, values[best])], [(end, steps[best])]]


def test_a_run_that_fails_has_a_result_but_no_metrics_of_its_end_and_one_that_never_stepped_has_none(mlflow_client):
    fails = helpers.at_step(2, lambda trainer: 1 // 0)
    trainer = helpers.make(trainer={"tracker": MLflowTracker(), "callbacks": [fails]})
    with pytest.raises(ZeroDivisionError):
        helpers.run(trainer, max_steps=9)
    last = history(mlflow_client, trainer, "episodes/returns/mean")[-1][1]
    data = mlflow_client.get_run(trainer.tracker.run_id).data
    assert re.fullmatch(rf"{last:.4g}, best .* \(episodes/returns\)", data.tags["rl8x.result"])
    assert not [name for name in data.metrics if name.startswith("final/")]
    empty = helpers.make()
    empty.close()
    assert (empty.tracker.rows, empty.tracker.tags) == ([], {})


@pytest.mark.parametrize("resumes", [False, True])
def test_an_evaluation_between_two_runs_counts_as_any_other(resumes, tmp_path):
    tracker = MemoryTracker()
    trainer = helpers.make(trainer={"tracker": tracker, "num_eval_envs": 2, "checkpoints": tmp_path})
    helpers.run(trainer, max_steps=3, steps_per_eval=2)
    trainer = Trainer.resume(tmp_path, tracker=tracker) if resumes else trainer
    value = trainer.eval()["eval/returns/mean"]
    at, last = tracker.history("eval/returns/mean")[-1]
    assert (at, last) == (trainer.state["env/steps"], value)
    trainer.run(max_steps=4 if resumes else 1, steps_per_eval=None, progress="none")
    assert f"Last evaluation, at {at} of {trainer.state['env/steps']} transitions: `eval/returns` {value:.4g} " in (
        tracker.description
    )
    best = max(value for _, value in tracker.history("eval/returns/mean"))
    assert tracker.tags["rl8x.result"] == f"{value:.4g}, best {best:.4g} (eval/returns)"


@pytest.mark.parametrize("count", [1, 2, MAX_POINTS, MAX_POINTS + 1, 5000])
def test_a_course_is_thinned_evenly_and_goes_on_from_its_state(count):
    values = [math.sin(step) for step in range(count)]
    whole = saved = Course()
    for step, value in enumerate(values):
        whole.add(10 * step, value)
        if step == count // 2:
            saved = Course(**json.loads(json.dumps(dataclasses.asdict(whole))))
    for step, value in list(enumerate(values))[count // 2 + 1 :]:
        saved.add(10 * step, value)
    assert saved == whole
    assert (whole.last, whole.best, whole.best_step) == (values[-1], max(values), 10 * values.index(max(values)))
    every = 1
    while -(-count // every) > MAX_POINTS:
        every *= 2
    expected = [[10 * step, values[step]] for step in range(0, count, every)]
    last = [10 * (count - 1), values[-1]]
    assert whole.points == (expected if expected[-1] == last else [*expected, last])


def test_what_is_not_finite_is_no_result():
    results = Results()
    results.take({"returns/mean": math.nan, "losses/total": 1.0}, 1)
    assert (results.headline, results.row, str(results)) == (None, {}, "")
    results.take({"returns/mean": 3.0}, 2)
    results.take({"returns/mean": math.inf}, 3)
    assert results.row == {"final/returns/mean": 3.0, "best/returns/mean": 3.0, "best_step/returns/mean": 2}
    assert str(results) == "3, best 3 (returns)"
    assert (results.measured_at("returns/mean"), results.measured_at("eval/returns/mean")) == (3, None)


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


def bar_of(columns, done, total, row):
    """Return what a terminal has of a bar, once so many steps are done and a row is shown."""
    with terminal(columns) as lines:
        reporter = ProgressReporter("bar", total)
        reporter._bar.update(done - 1)
        reporter._bar.mininterval = 0
        reporter.update(row, total)
        reporter.close()
        return lines()[-1]


ROW = {
    keys.STEPS: 5.0,
    keys.ENV_STEPS: 1_234_567.0,
    "profiling/env_steps_per_s": 851_234.5,
    "returns/mean": -1234.5,
    "eval/returns/mean": -1150.25,
    "episodes/lengths/mean": 433.3,
    "monitors/kl_div": 0.0123456,
}


COMMON = ROW | {"episodes/returns/mean": 321.5, "eval/returns/mean": 345.25, "episodes/lengths/mean": 321.5}


@pytest.mark.parametrize(
    ("row", "columns", "metrics"),
    [
        # Whole metrics, as many as fit; a bar of ten or more where three of them leave the room
        (COMMON, 80, "851k/s, eval 345.2, return 321.5"),
        (COMMON, 100, "851k/s, eval 345.2, return 321.5, transitions 1.23M"),
        (COMMON, 130, "851k/s, eval 345.2, return 321.5, transitions 1.23M, kl 0.0123"),
        (COMMON | {"episodes/lengths/mean": 77.0}, 130, "return 321.5, transitions 1.23M, length 77, kl 0.0123"),
    ],
)
def test_a_bar_of_ten_columns_stands_beside_whole_metrics(row, columns, metrics):
    line = bar_of(columns, 550, 1000, row)
    assert len(line) <= columns
    bar = re.fullmatch(rf" 55%\|(.{{10,}})\| 550/1000 \[.*{re.escape(metrics)}\]", line)
    assert bar is not None
    assert bar[1].count("█") == len(bar[1]) * 55 // 100


def test_where_there_is_no_room_the_bar_goes_before_the_metrics():
    line = bar_of(70, 550, 1000, COMMON)
    assert re.fullmatch(r" 55% 550/1000 \[\S+<\S+, 851k/s, eval 345.2, return 321.5\]", line)
    assert re.fullmatch(r"1 steps \[\S+, 851k/s\]", bar_of(30, 1, None, COMMON))


@pytest.mark.parametrize(("silence", "count"), [(0.01, 1), (600.0, 0)])
def test_a_wait_for_the_tracker_has_a_line(silence, count, monkeypatch):
    monkeypatch.setattr("rl8x.trainers.rows._SECONDS_OF_SILENCE", silence)
    said, is_said = [], threading.Event()

    def say(reporter, message):
        if "writing" in message:
            said.append(message)
            is_said.set()

    monkeypatch.setattr(ProgressReporter, "say", say)

    class Slow(MemoryTracker):
        location = "a slow place"

        def finish(self, status):
            assert not count or is_said.wait(60)
            super().finish(status)

    make(Slow()).run(max_steps=1, progress="lines")
    assert said == ["writing the last of the run to a slow place ..."] * count


def test_one_labelled_return_that_does_not_alternate(capsys, monkeypatch):
    monkeypatch.setattr("rl8x.trainers.rows._SECONDS_PER_LINE", -1.0)
    reporter = ProgressReporter("lines")
    for episodes in ({}, {"episodes/returns/mean": -9.87}, {}, {"episodes/returns/mean": -8.0}):
        reporter.update(ROW | {"returns/mean": -0.65} | episodes)
    shown = [re.findall(r"[a-z ]*return -[\d.]+", line) for line in capsys.readouterr().err.splitlines()]
    assert shown == [[" horizon return -0.65"], [" return -9.87"], [" return -9.87"], [" return -8"]]


def make(tracker=None):
    return helpers.make(trainer={"tracker": tracker or NullTracker(), "eval_env": False, "checkpoints": False})


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
    bar = mock.Mock(total=None)  # what tqdm has in a notebook, as far as it is used: the total is in a widget too
    bar.container.children = [None, types.SimpleNamespace(max=1), None]
    monkeypatch.setattr("tqdm.auto.tqdm", lambda **options: bar)
    reporter = ProgressReporter("auto", None)
    reporter.update(ROW, None)
    assert bar.container.children[1].max == 1
    reporter.update(ROW, 40)
    assert (bar.total, bar.container.children[1].max, bar.update.call_count) == (40, 40, 2)


@pytest.mark.skipif(sys.platform != "linux", reason="processes begin in another way")
@pytest.mark.long
def test_a_bar_starts_no_process():
    """Which would find its modules in the working directory."""
    code = (
        "import multiprocessing, multiprocessing.resource_tracker as tracker\n"
        "multiprocessing.set_start_method('forkserver')\n"  # what Python 3.14 does
        "from rl8x.trainers.rows import ProgressReporter\n"
        "ProgressReporter('bar', 3).close()\n"
        "print(tracker._resource_tracker._pid)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=240)
    assert done.stdout == "None\n"


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda row: pickle.loads(pickle.dumps(row))])
def test_a_row_is_copied_whole_and_is_read_only_again(copied):
    row = TrainStats({"a": 1.0, "eval/b": 2.0, "eval/c": 3.0}, frozenset({"a"}), before_step=frozenset({"eval/b"}))
    row.stop_reason = "why"
    other = copied(row)
    assert (other, vars(other), type(other)) == (row, vars(row), TrainStats)
    with pytest.raises(TypeError, match="read-only"):
        other["a"] = 2.0
