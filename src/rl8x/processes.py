"""Starts Python processes that import nothing from the working directory, which may be somebody else's.

Python looks for modules there first if it is started with `-c` or `-m`, or if PYTHONPATH has an empty entry, as after
`export PYTHONPATH=$PYTHONPATH:/x`. A folder received from others may contain a `json.py`.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

OWN: Final = ("PYTHONPATH", "PYTHONSAFEPATH", "PYTHONWARNINGS")
"""The variables set for rl8x's own processes, but not for processes that a user's code starts in them."""
_USERS: Final = "RL8X_USERS_VARIABLES"
_ROOT: Final = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


def python_process(*words: str, variables: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Return `args` and `env` for `subprocess.Popen` or `run`, for a Python process of rl8x."""
    return {"args": [sys.executable, *words], "env": {**(variables or os.environ), **own_variables()}}


def guarded(command: Sequence[str], variables: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Like `python_process`, for a command that, with all it started, ends on a signal or when this process ends."""
    code = f"from {__name__} import guard; guard()"
    return python_process("-c", code, str(os.getpid()), *command, variables=variables)


def guard() -> None:
    """Run a command as the process of `guarded`."""
    import signal
    import subprocess
    import threading

    import psutil

    parent, *command = sys.argv[1:]
    told = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: told.set())
    child = subprocess.Popen(command)
    while child.poll() is None and os.getppid() == int(parent) and not told.is_set():
        told.wait(0.2)
    family = psutil.Process().children(recursive=True)
    for end in (psutil.Process.terminate, psutil.Process.kill):
        for process in family:
            with contextlib.suppress(psutil.Error):
                end(process)
        family = psutil.wait_procs(family, timeout=5)[1]
    code = child.wait()
    os._exit(code if code >= 0 else 128 - code)


@contextlib.contextmanager
def lending_variables() -> Iterator[None]:
    """Set the variables of `python_process` within the context, for processes that a library starts."""
    own = own_variables()
    before = {name: os.environ.get(name) for name in own}
    os.environ.update(own)
    try:
        yield
    finally:
        _restore(before)


def restore_variables() -> None:
    """Restore the user's variables in a process of rl8x, for processes that the user's code starts from now on."""
    import json

    _restore({**json.loads(os.environ.get(_USERS, "{}")), _USERS: None})


def _restore(variables: Mapping[str, str | None]) -> None:
    for name, value in variables.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def own_variables() -> dict[str, str]:
    """Return variables with which a process finds the same packages as this one, and turns no warning into an error."""
    import json  # not before `leave_working_directory`

    users = {name: os.environ.get(name) for name in OWN}
    own = (os.pathsep.join(_path()), "1", _without_errors(users["PYTHONWARNINGS"] or ""))
    return {**dict(zip(OWN, own, strict=True)), _USERS: json.dumps(users)}


def _path() -> list[str]:
    """Return this process's search path; the working directory only if PYTHONPATH names it or rl8x is there."""
    named = {_ROOT, *os.environ.get("PYTHONPATH", "").split(os.pathsep)}
    here = None
    with contextlib.suppress(OSError):  # it was removed
        here = os.path.realpath(os.getcwd())
    found = [os.path.abspath(entry) for entry in sys.path if entry and (here or os.path.isabs(entry))]
    kept = [entry for entry in found if entry in named or (os.pathsep not in entry and os.path.realpath(entry) != here)]
    return kept if _ROOT in kept else [*kept, _ROOT]


def leave_working_directory(*, runs_module: bool) -> None:
    """Remove the working directory from `sys.path` if only `python -m` or an empty entry of PYTHONPATH put it there."""
    if runs_module and not sys.flags.safe_path:
        sys.path.pop(0)
    given = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    if "" in given and not sys.flags.ignore_environment:
        with contextlib.suppress(OSError):
            here = os.getcwd()
            sys.path[:] = [entry for entry in sys.path if entry not in ("", here) or here in given]


def tolerate_warnings() -> None:
    """Remove filters that make warnings errors, except for rl8x's own warnings: libraries warn about each other."""
    import warnings

    own = [str(getattr(each[3], "pattern", each[3])).startswith("rl8x") for each in warnings.filters]
    kept = [each for each, is_own in zip(warnings.filters, own, strict=True) if each[0] != "error" or is_own]
    warnings.resetwarnings()
    warnings.filters[:] = kept  # type: ignore[index] # a list, typed as a sequence


def forget_errors() -> None:
    """Remove filters that make warnings errors in processes started from now on."""
    sys.warnoptions[:] = filter(_without_errors, sys.warnoptions)
    if "PYTHONWARNINGS" in os.environ:
        os.environ["PYTHONWARNINGS"] = _without_errors(os.environ["PYTHONWARNINGS"])


def _without_errors(kinds: str) -> str:
    """Remove the filters that make errors from a value of PYTHONWARNINGS or `-W`; actions may be abbreviated."""
    actions = {kind: kind.partition(":")[0].strip() for kind in kinds.split(",")}
    return ",".join(kind for kind, action in actions.items() if not (action and "error".startswith(action)))
