"""Has programs compiled by a process of its own, and loads them."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Final

import torch
from torch import Tensor

from rl8x.execution.artifacts import Artifacts, key_of

Run = Callable[..., Sequence[Tensor]]

# Little of what compilers make, or of what they import, is garbage before they end: looking for it costs a second.
_CODE: Final = "import gc; gc.disable(); from rl8x.execution.compiler_process import main; main()"


class Compiler:
    """Compiles programs, several at a time, in processes of their own.

    Args:
        artifacts: Where compiled programs are kept.

    Attributes:
        say: Is given a message where this process waits.
    """

    def __init__(self, artifacts: Artifacts) -> None:
        self.artifacts = artifacts
        self.say: Callable[[str], None] = lambda _: None
        self._process: subprocess.Popen[str] | None = None
        self._owner = 0  # a process that is forked of this one has none
        self._requested: set[str] = set()
        self._failed: dict[str, str] = {}

    def start(self) -> None:
        """Begin the process unless it runs; it takes seconds to import what it compiles with."""
        if self._process is None or self._owner != os.getpid() or self._process.poll() is not None:
            self._start()

    def _start(self) -> None:
        self.artifacts.make_folder()
        path = os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")])
        # Nobody sees its warnings, and PYTHONWARNINGS=error would end the import of torch's compiler.
        environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
        self._process = subprocess.Popen(
            [sys.executable, "-c", _CODE, str(self.artifacts.folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=environment,
            process_group=0,  # so that Ctrl-C is the run's alone; in a session of its own its niceness would not count
        )
        self._owner = os.getpid()
        self._requested.clear()
        atexit.register(self.stop)

    def stop(self) -> None:
        """End the process, and what it compiles."""
        if self._process is not None and self._owner == os.getpid():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        self._process = None
        self._requested.clear()

    def request(self, program: str) -> str:
        """Have a program compiled unless it is.

        Args:
            program: Its description as JSON.

        Returns:
            Its key.
        """
        key = key_of("program", program)
        if key not in self._requested and key not in self._failed and self.artifacts.find(key) is None:
            self.start()
            self._requested.add(key)
            print(json.dumps({"key": key, "program": program}), file=self._pipe("stdin"), flush=True)
        return key

    def library(self, program: str) -> Path:
        """Return the shared library of a program, compiled by now or waited for.

        Raises:
            RuntimeError: If it cannot be compiled.
        """
        key = self.request(program)
        if key in self._requested:
            lost, keeps = self.artifacts.unwritable, "later runs like this one find what it makes in the cache"
            none = (
                f"each run like this one will, since {lost} cannot be written to: set RL8X_CACHE_DIR to another folder"
            )
            self.say(f"waiting for the compiler; {keeps if lost is None else none}")
        while key in self._requested:
            self._wait()
        if key in self._failed:
            raise RuntimeError(self._failed[key])
        return self.artifacts.library(key)

    def _wait(self) -> None:
        """Wait for a program to be compiled, whichever is the next."""
        line = self._pipe("stdout").readline()
        if not line:
            self.stop()
            raise RuntimeError("the compiler's process ended")
        reply = json.loads(line)
        self._requested.discard(reply["key"])
        if reply["error"] is not None:
            self._failed[reply["key"]] = reply["error"]

    def _pipe(self, name: str) -> IO[str]:
        pipe: IO[str] = getattr(self._process, name)
        return pipe


def load(library: Path) -> Run:
    """Load a compiled program: takes tensors and returns a list of tensors, row-major ones.

    Several threads may call it at once; Python runs others meanwhile.

    Raises:
        RuntimeError: If the library is not one of a program.
    """
    functions = ctypes.CDLL(str(library))
    try:
        call, layouts = functions.rl8x_run, functions.rl8x_results
    except AttributeError:
        raise RuntimeError(f"{library.name} is no compiled program") from None
    call.restype = layouts.restype = ctypes.c_char_p
    results = [(shape, getattr(torch, dtype)) for shape, dtype in json.loads(layouts())]
    addresses = ctypes.c_void_p * len(results)

    def run(*tensors: Tensor) -> list[Tensor]:
        outputs = [torch.empty(shape, dtype=dtype) for shape, dtype in results]
        given = (ctypes.c_void_p * len(tensors))(*[tensor.data_ptr() for tensor in tensors])
        error = call(given, addresses(*[tensor.data_ptr() for tensor in outputs]))
        if error is not None:
            raise RuntimeError(f"a compiled program failed: {error.decode()}")
        return outputs

    return run


@functools.cache
def compiler() -> Compiler:
    """Return the compiler of this process."""
    return Compiler(Artifacts())
