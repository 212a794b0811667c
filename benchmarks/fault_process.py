"""Children of benchmarks/faults.py: forked after the imports, MLflow's own process too, and what they said and logged.

A try costs what training costs: nothing is imported again, and a database is a copy of an empty one.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import dataclasses
import inspect
import json
import mmap
import os
import random
import runpy
import select
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from rl8x.cli.errors import LOST_ROWS

RECORD_BYTES = 8 << 20
_MODULES = {"rl8x.cli.main", *(f"benchmarks.{name}" for name in ("faults", "cuda_checks", "limits", "peers.rl8x"))}
_EXECUTED = inspect.signature(subprocess.Popen._execute_child)  # type: ignore[attr-defined]


@dataclasses.dataclass
class Ended:
    """What a child ended with, and said.

    Attributes:
        code: Its exit code, negative for a signal; None where it had to be killed because it did not end.
        out: Its standard output.
        err: Its standard error.
    """

    code: int | None
    out: str
    err: str

    @property
    def finished(self) -> bool:
        """Whether it came to its end by itself, even if rows of it are lost."""
        return self.code in (0, LOST_ROWS)

    @property
    def said(self) -> str:
        """Both streams."""
        return self.out + self.err

    @property
    def tracebacks(self) -> int:
        """Count what a user would take for a bug."""
        return sum(self.said.count(text) for text in ("Traceback (most", "Exception ignored", "Exception in thread"))


class Child:
    """A forked child whose streams are pipes: a disk that is full or gone takes nothing from them.

    Args:
        function: What it does; `SystemExit` ends it as it would end Python.
        folder: Its working directory.
        forks: Whether MLflow's process is a fork too, rather than a Python that imports it, as it is for users.
        env: Additions to its environment.
    """

    def __init__(
        self, function: Callable[[], Any], folder: Path | None = None, *, forks: bool = True, **env: str
    ) -> None:
        pipes = [os.pipe(), os.pipe()]
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if not self.pid:
            if forks:
                subprocess.Popen = ForkedPython  # type: ignore[misc]
            _behave_as_python(function, folder, env, [write for _, write in pipes])
        for _, write in pipes:
            os.close(write)
        self._streams = {read: bytearray() for read, _ in pipes}
        self._order = list(self._streams)
        self._code: int | None = None

    def kill_after(self, seconds: float, number: int = signal.SIGKILL) -> None:
        """Let it run for a while, then send it a signal."""
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0 and not self._ended():
            self._read(min(left, 0.02))
        if not self._ended():
            os.kill(self.pid, number)

    def wait(self, timeout_s: float = 120.0) -> Ended:
        """Wait until it has ended; one that does not is killed."""
        end, given_up = time.monotonic() + timeout_s, False
        while not self._ended():
            self._read(0.02)
            if time.monotonic() > end and not given_up:
                given_up = True
                os.kill(self.pid, signal.SIGKILL)
        while self._read(0.0):
            pass
        for stream in self._streams:
            os.close(stream)
        out, err = (bytes(self._streams[stream]).decode(errors="replace") for stream in self._order)
        return Ended(None if given_up else self._code, out, err)

    def _ended(self) -> bool:
        if self._code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self._code = os.waitstatus_to_exitcode(status) if pid else None
        return self._code is not None

    def _read(self, timeout_s: float) -> bool:
        """Take what it said; says whether there was anything."""
        ready, _, _ = select.select(list(self._streams), [], [], timeout_s)
        got = [(stream, os.read(stream, 1 << 16)) for stream in ready]
        for stream, data in got:
            self._streams[stream] += data
        if got and not any(data for _, data in got):
            time.sleep(timeout_s)  # both are at their end, and the process nearly so
        return any(data for _, data in got)


def _behave_as_python(function: Callable[[], Any], folder: Path | None, env: dict[str, str], streams: list[int]) -> Any:
    """Be a fresh Python that does something and ends: its exit code, its traceback, its exit handlers."""
    _end_with_parent()
    try:
        for number, stream in enumerate(streams, 1):
            os.dup2(stream, number)
        os.closerange(3, 256)
        atexit._clear()
        sys.stdout, sys.stderr = _stream(1), _stream(2)
        sys.__stdout__, sys.__stderr__ = sys.stdout, sys.stderr
        os.environ.update(env)
        if folder is not None:
            os.chdir(folder)
        _end_as_python(function)
    finally:
        os._exit(1)


def _end_as_python(function: Callable[[], Any]) -> None:
    """Do something, and end this process as Python ends: its exit code, its traceback, its exit handlers."""
    code = 1
    try:
        try:
            function()
            code = 0
        except SystemExit as stop:
            code = stop.code if isinstance(stop.code, int) else 0 if stop.code is None else 1
        except KeyboardInterrupt:
            code = 130
        except BaseException as error:
            sys.last_value = error
            traceback.print_exc()
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        try:
            sys.stdout.flush()
            sys.stderr.flush()
        except OSError:
            code = 120  # Python's own for this
    finally:
        os._exit(code)


class ForkedPython(subprocess.Popen):  # type: ignore[type-arg]
    """A `Popen` that forks where a Python is asked for that imports rl8x: MLflow's process has MLflow at once.

    It sees to `python -c CODE` and `python -m MODULE`; a Python of its own would take seconds for the imports.
    """

    def _execute_child(self, args: Any, *rest: Any) -> None:
        given = _EXECUTED.bind(self, args, *rest).arguments
        words = [args] if isinstance(args, str) else list(args)
        if words[1:3] == ["-X", "utf8"]:  # which this process is already
            del words[1:3]
        forks = len(words) > 2 and words[0] == sys.executable
        if not forks or not ((words[1] == "-c" and "rl8x" in words[2]) or (words[1] == "-m" and words[2] in _MODULES)):
            super()._execute_child(args, *rest)  # type: ignore[misc]
            return
        self.pid = forked(lambda: _become(words, given))
        if (group := given.get("process_group", -1)) is not None and group >= 0:
            with contextlib.suppress(OSError):  # it has done so, and may have ended
                os.setpgid(self.pid, group)  # for who signals the group before it gets to do so
        self._child_created = True
        names = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
        self._close_pipe_fds(*(given[name] for name in names))  # type: ignore[attr-defined]


def forked(do: Callable[[], object]) -> int:
    """Fork a process that does something and ends; returns its ID.

    A thread forks that has computed nothing. OpenMP's threads are not forked with the one that they work for, which in
    the new process would wait for them forever.
    """
    found: list[int] = []

    def fork() -> None:
        pid = os.fork()
        if not pid:
            try:
                do()
            finally:
                os._exit(1)
        found.append(pid)

    thread = threading.Thread(target=fork)
    thread.start()
    thread.join()
    return found[0]


def _become(words: Sequence[str], given: dict[str, Any]) -> None:
    """Do in a forked process what `python -c` would."""
    try:
        if (given.get("process_group") or 0) >= 0 and given.get("process_group") is not None:
            os.setpgid(0, given["process_group"])
        if given["start_new_session"]:
            os.setsid()
        for number, name in enumerate(("p2cread", "c2pwrite", "errwrite")):
            if given[name] != -1:
                os.dup2(given[name], number)
        kept = {0, 1, 2, *given["pass_fds"]}
        # The numbers stay taken: what is inherited and thrown away later closes them, and not a file of this process.
        nothing = os.open(os.devnull, os.O_RDWR)
        for descriptor in set(range(256)) - kept - {nothing}:
            with contextlib.suppress(OSError):
                os.fstat(descriptor)
                os.dup2(nothing, descriptor)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
            if callable(signal.getsignal(number)):
                signal.signal(number, signal.SIG_DFL)
        atexit._clear()
        sys.stdin, sys.stdout, sys.stderr = _stream(0, "r"), _stream(1), _stream(2)
        if given["env"] is not None:
            os.environ.clear()
            os.environ.update({os.fsdecode(name): os.fsdecode(value) for name, value in given["env"].items()})
        if given["cwd"] is not None:
            os.chdir(given["cwd"])
        sys.argv = ["-c", *words[3:]]
        if words[1] == "-m":
            sys.modules.pop(words[2], None)  # it is run anew, under another name
            _end_as_python(lambda: runpy.run_module(words[2], run_name="__main__", alter_sys=True))
        _end_as_python(lambda: exec(words[2], {"__name__": "__main__"}))
    finally:
        os._exit(1)


def _stream(number: int, mode: str = "w") -> Any:
    return open(number, mode, buffering=1, closefd=False)


def obey_permissions() -> None:
    """Have this process and its children obey permissions, which root does not; of no effect for others."""
    if os.geteuid():
        return
    libc = ctypes.CDLL(None, use_errno=True)
    for capability in (1, 2):  # CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH: PR_CAPBSET_DROP
        libc.prctl(24, capability, 0, 0, 0)
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)
    data = (ctypes.c_uint32 * 6)()
    libc.capget(header, data)
    for index in (0, 1):  # effective and permitted
        data[index] &= ~0b110
    libc.capset(header, data)


class Record:
    """The rows that a child handed to its tracker, in memory that outlives it whatever happens to the disk.

    Each has its step and its values, None for those that are not finite.
    """

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, RECORD_BYTES)

    def add(self, entry: Any) -> None:
        """Add an entry: a row, or a note."""
        length = int.from_bytes(self._memory[:8], "little")
        line = json.dumps(entry).encode() + b"\n"
        self._memory[8 + length : 8 + length + len(line)] = line
        self._memory[:8] = (length + len(line)).to_bytes(8, "little")

    def entries(self) -> list[Any]:
        """List what was added."""
        length = int.from_bytes(self._memory[:8], "little")
        return [json.loads(line) for line in self._memory[8 : 8 + length].splitlines()]

    def close(self) -> None:
        """Give the memory back."""
        self._memory.close()


def side_by_side(tries: int, do: Callable[[int], dict[str, Any]], *, first: int = 0, workers: int = 2) -> list[Any]:
    """Do tries by their numbers in so many processes at a time; returns what each came to, in order.

    What is wrong of a try, its `why`, is printed to standard error as it comes. A try that raises is a fault of the
    instrument, and ends all.
    """
    numbers = list(range(first, first + tries))
    reads = []
    for worker in range(workers):
        read, write = os.pipe()
        sys.stdout.flush()
        if not os.fork():
            _do_some(do, numbers[worker::workers], write)
        os.close(write)
        reads.append(read)
    results: dict[int, Any] = {}
    for number, result in _lines(reads):
        results[number] = result
        for why in result.get("why", ()):
            print(why, file=sys.stderr, flush=True)
    for _ in reads:
        os.wait()
    missing = [number for number in numbers if number not in results]
    if missing:
        raise RuntimeError(f"tries that did not come to an end: {missing[:5]}")
    return [results[number] for number in numbers]


def _end_with_parent() -> None:
    """Have Linux kill this process when the one that forked it ends."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG


def _do_some(do: Callable[[int], dict[str, Any]], numbers: Sequence[int], write: int) -> None:
    _end_with_parent()
    try:
        for number in numbers:
            random.seed(number)
            os.write(write, json.dumps([number, do(number)]).encode() + b"\n")
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(0)


def _lines(reads: list[int]) -> Iterator[Any]:
    """Yield what comes through pipes, a line of JSON each, until all are at their ends."""
    rest = dict.fromkeys(reads, b"")
    while rest:
        ready, _, _ = select.select(list(rest), [], [])
        for read in ready:
            data = os.read(read, 1 << 16)
            *lines, rest[read] = (rest[read] + data).split(b"\n")
            yield from map(json.loads, lines)
            if not data:
                os.close(read)
                del rest[read]
