"""Processes that are forked of this one, which has imported torch, MLflow and rl8x: a Python would take seconds."""

import atexit
import contextlib
import inspect
import os
import runpy
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from rl8x.tracking import shipper

_MODULES = ("rl8x.cli.main", "tests.faults")
_EXECUTED = inspect.signature(subprocess.Popen._execute_child)


class ForkedPython(subprocess.Popen):
    """A `Popen` that forks where a Python is asked for that imports rl8x, or where it is given a function.

    It sees to `python -c CODE` and `python -m MODULE`: the shipper has MLflow at once.
    """

    def _execute_child(self, args: Any, *rest: Any) -> None:
        given = _EXECUTED.bind(self, args, *rest).arguments
        do = args if callable(args) else _meant([args] if isinstance(args, str) else list(args))
        if not callable(args) and _autograd_has_threads():
            do = None
        if do is None:
            super()._execute_child(args, *rest)
            return
        self.pid = forked(lambda: _become(do, given))
        if (group := given.get("process_group", -1)) is not None and group >= 0:
            with contextlib.suppress(OSError):  # it has done so, and may have ended
                os.setpgid(self.pid, group)  # for who signals the group before it gets to do so
        self._child_created = True
        names = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
        self._close_pipe_fds(*(given[name] for name in names))


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


def need_gradients_in_forks() -> None:
    """Skip a test that trains in a fork, where torch would compute no gradients in one."""
    if _autograd_has_threads():
        pytest.skip("torch is built for CUDA and has compiled: a fork computes no gradients then")


def _autograd_has_threads() -> bool:
    """Whether torch would compute no gradients in a fork: one built for CUDA, once torch.compile has run (2.13)."""
    names = (task / "comm" for task in Path("/proc/self/task").glob("*"))
    for name in names:
        with contextlib.suppress(OSError):  # the thread has ended
            if name.read_text().startswith("pt_autograd"):
                return True
    return False


def _meant(words: Sequence[str]) -> Callable[[], object] | None:
    """Return what a command would do, if it is one of a Python that imports rl8x."""
    words = [words[0], *words[3:]] if words[1:3] == ["-X", "utf8"] else words  # which this process is already
    if len(words) < 3 or words[0] != sys.executable:
        return None
    _, option, what, *rest = words
    if not (option == "-m" and what in _MODULES) and not (option == "-c" and "rl8x" in what):
        return None

    def do() -> None:
        sys.argv = ["-c", *rest]
        if option == "-c":
            exec(what, {"__name__": "__main__"})
        else:
            sys.modules.pop(what, None)  # it is run anew, under another name
            runpy.run_module(what, run_name="__main__", alter_sys=True)

    return do


def _become(do: Callable[[], object], given: dict[str, Any]) -> None:
    """Do something in a forked process as a fresh Python would."""
    shipper._importing = threading.Lock()  # which a thread of this process may hold, and none of the new one
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
        streams = [os.fdopen(number, mode, buffering=1, closefd=False) for number, mode in enumerate("rww")]
        sys.stdin, sys.stdout, sys.stderr = streams
        sys.__stdout__, sys.__stderr__ = sys.stdout, sys.stderr
        if given["env"] is not None:
            os.environ.clear()
            os.environ.update({os.fsdecode(name): os.fsdecode(value) for name, value in given["env"].items()})
        if given["cwd"] is not None:
            os.chdir(given["cwd"])
        _end_as_python(do)
    finally:
        os._exit(1)


def _end_as_python(function: Callable[[], object]) -> None:
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
        threading._shutdown()
        atexit._run_exitfuncs()
        try:
            sys.stdout.flush()
            sys.stderr.flush()
        except OSError:
            code = 120  # Python's own for this
    finally:
        os._exit(code)
