"""Runs whose standard output and standard error cannot be written end as if they could."""

import contextlib
import io
import os
import pty
import subprocess
import sys

import pytest
from tests.forks import ForkedPython
from tests.trainers.test_rows import ROW, make

from rl8x import keys
from rl8x.checkpoint import listed, read
from rl8x.output import cut_apart, measured, say, table
from rl8x.trainers.rows import ProgressReporter

TRAIN = ["train", "CartPole", "--num-envs", "4", "--horizon", "4", "--device", "cpu", "--no-tracking"]
TRAIN += ["algorithm_config.model_config.hidden_sizes=[8]", "--num-eval-envs", "2", "--steps-per-eval", "1"]


def pipe_without_reader():
    reader, writer = os.pipe()
    os.close(reader)
    return writer


def terminal_gone():
    master, slave = pty.openpty()
    os.close(master)
    return slave


@pytest.mark.parametrize(
    ("begin", "broken", "progress"),
    [
        ((), pipe_without_reader, "lines"),
        ((), terminal_gone, "bar"),
        pytest.param(*(("sh", "-c", 'exec "$@" >&- 2>&-', "sh"), pipe_without_reader, "auto"), marks=pytest.mark.long),
    ],
    ids=["pipe", "terminal", "closed"],
)
def test_a_command_trains_to_its_end_and_says_so_by_its_exit_code(tmp_path, begin, broken, progress):
    command = [*begin, sys.executable, "-m", "rl8x.cli.main", *TRAIN, "--max-steps", "2", "--progress", progress]
    start = subprocess.Popen if begin else ForkedPython  # each Python of its own takes seconds to import torch
    descriptor = broken()
    try:
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        streams = {"stdin": subprocess.DEVNULL, "stdout": descriptor, "stderr": descriptor}
        command.append(f"checkpoints.directory={tmp_path / 'job'}")
        code = start(command, env=environment, cwd=tmp_path, **streams).wait(timeout=240)
    finally:
        os.close(descriptor)
    assert code == 0
    about = read(listed(tmp_path / "job")[-1]).metadata
    assert (about["status"], about["counters"][keys.STEPS]) == ("FINISHED", 2)


@contextlib.contextmanager
def broken_stream(kind):
    if kind == "none":
        yield None
    elif kind == "closed":
        stream = io.StringIO()
        stream.close()
        yield stream
    else:
        stream = os.fdopen(pipe_without_reader() if kind == "pipe" else terminal_gone(), "w", encoding="utf-8")
        yield stream
        stream.close()  # what it could not write does not come back here


@pytest.mark.parametrize("progress", ["auto", "bar", "lines"])
@pytest.mark.parametrize("kind", ["none", "closed", "pipe", "terminal"])
def test_a_run_shows_nothing_and_finishes(monkeypatch, kind, progress):
    monkeypatch.setattr("rl8x.trainers.rows._SECONDS_PER_LINE", -1.0)
    trainer = make()
    with broken_stream(kind) as stream, contextlib.redirect_stderr(stream):
        stats = trainer.run(progress=progress, max_steps=2)
        reporter = ProgressReporter(progress, 10)
        reporter.update(ROW, 10)
        reporter.say("something")
        reporter.close()
    assert stats.stop_reason == trainer.stop_reason == "max_steps=2"


SIGNALLED = """
import os, signal, sys
from rl8x.trainers.ranks import SignalGuard
os.close(2)
sys.stderr = sys.__stderr__ = None  # as Python has them where it is started so
taken = os.open(sys.argv[1], os.O_CREAT | os.O_WRONLY)
assert taken == 2, taken
with SignalGuard():
    os.kill(os.getpid(), signal.SIGTERM)
"""


def test_a_signal_is_not_told_to_a_file_that_has_the_number_of_standard_error(tmp_path):
    path = tmp_path / "database"
    command = [sys.executable, "-c", SIGNALLED, str(path)]
    assert ForkedPython(command, stdin=subprocess.DEVNULL).wait(timeout=240) == 0
    assert path.read_bytes() == b""


def test_letters_that_a_locale_does_not_have_are_escaped_and_the_rest_is_written(monkeypatch):
    written = io.BytesIO()
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(written, encoding="ascii", errors="surrogateescape"))
    for line in ("run Läufer is in gr\udcc3\udcbcn", "as it was"):
        say(line)
    assert written.getvalue() == b"run L\\xe4ufer is in gr\\udcc3\\udcbcn\nas it was\n"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        *[(0.123456, "0.1235"), (-152.34, "-152.3"), (9_999.4, "9999"), (9_999.7, "10000"), (-10_934.2, "-10934")],
        *[(12_345_678.9, "12345679"), (1e300, "1e+300"), (0.0, "0"), (1e-9, "1e-09"), (float("nan"), "nan")],
    ],
)
def test_measured_numbers_have_four_digits_or_all_before_the_point(value, text):
    assert measured(value) == text


@pytest.mark.parametrize(
    ("texts", "width", "cut"),
    [
        (["abcdefghij", "abc"], 7, ["ab...ij", "abc"]),
        (["abcdeXghijk", "abcdeYghijk", "abcdeXghijk"], 8, ["abcdeXghijk", "abcdeYghijk", "abcdeXghijk"]),
        (["abXdefghijk", "abYdefghijk"], 6, ["abX...ijk", "abY...ijk"]),
        ([], 5, []),
    ],
)
def test_texts_are_cut_as_far_as_they_still_differ(texts, width, cut):
    assert cut_apart(texts, width) == cut


def test_rows_of_a_narrow_table_keep_the_part_of_their_names_that_differs():
    names = [f"wide, hidden_sizes={sizes}, lr_schedule=adaptive" for sizes in ("[32]", "[64, 32]")]
    shown = table([["", "mean"], [names[0], "1.0"], [names[1], "1.0"]], 40).splitlines()
    assert len(set(shown)) == len(shown)
    assert [line.split()[-1] for line in shown] == ["mean", "1.0", "1.0"]
