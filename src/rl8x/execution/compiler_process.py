"""The compiler's process: reads programs as lines of JSON, and compiles each in a forked child.

It imports torch's compiler once, for all children, and shares no memory with the run that started it.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
from pathlib import Path
from typing import Final

import filelock

from rl8x.execution import private
from rl8x.execution.artifacts import Artifacts
from rl8x.execution.building import remove_unfinished
from rl8x.execution.lowering import lower
from rl8x.output import message_of

# The run goes on meanwhile and has priority.
_NICENESS: Final = 10


def main() -> None:
    """Compile programs until stdin is closed."""
    artifacts = Artifacts(Path(sys.argv[1]))
    artifacts.unwritable = artifacts.folder  # where it is, the run has decided
    os.nice(_NICENESS)
    private.trust_processor_flags()
    with contextlib.suppress(RuntimeError):  # each program reports it
        private.inductor().pick_vec_isa()  # once for all forks
    answers = os.dup(1)
    os.dup2(2, 1)  # keeps the output of compilers apart from the answers
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # no zombies
    remove_unfinished(artifacts.folder)
    for line in sys.stdin:
        if os.fork() == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            _watch(artifacts, json.loads(line), answers)
            os._exit(0)
    os.killpg(0, signal.SIGKILL)


def _watch(artifacts: Artifacts, request: dict[str, str], answers: int) -> None:
    """Answer a request from a child process, and send an error if that process is killed, such as by the OOM killer."""
    worker = os.fork()
    if worker == 0:
        _send(answers, request["key"], _compile(artifacts, **request))
        os._exit(0)
    _, status = os.waitpid(worker, 0)
    if status:
        _send(answers, request["key"], f"the compiler ended with status {status}")


def _send(answers: int, key: str, error: str | None) -> None:
    os.write(answers, (json.dumps({"key": key, "error": error}) + "\n").encode())


def _compile(artifacts: Artifacts, key: str, program: str) -> str | None:
    """Compile a program unless the cache has it; return what went wrong."""
    built, lock = artifacts.beside("so"), artifacts.folder / f".{key}.lock"
    try:
        with filelock.FileLock(lock):  # ranks of one machine request the same program at once
            if artifacts.find(key) is None:
                lower(program, built)
                artifacts.put(key, built)
            lock.unlink(missing_ok=True)
    except BaseException as error:  # this process has nothing else to do
        lines = message_of(error).strip().splitlines()
        return lines[0] if lines else type(error).__name__
    finally:
        built.unlink(missing_ok=True)
    return None
