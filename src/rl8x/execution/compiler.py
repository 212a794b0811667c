"""Compiles programs in a separate process, and loads them."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import json
import os
import select
import signal
import subprocess
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from rl8x.execution.artifacts import Artifacts, key_of
from rl8x.processes import python_process

Run = Callable[..., Sequence[Tensor]]

# Garbage collection in the compiler's process finds little and costs a second.
_CODE: Final = "import gc; gc.disable(); from rl8x.execution.compiler_process import main; main()"
_VARIABLES: Final = {"OMP_NUM_THREADS": "1"}


class Compiler:
    """Compiles programs, several at a time, in separate processes.

    Args:
        artifacts: The cache of compiled programs.

    Attributes:
        say: Called with a message when this process has to wait for a program.
    """

    def __init__(self, artifacts: Artifacts) -> None:
        self.artifacts = artifacts
        self.say: Callable[[str], None] = lambda _: None
        self._process: subprocess.Popen[str] | None = None
        self._owner = 0  # the process that started the compiler; forks of it do not share the compiler
        self._requested: set[str] = set()
        self._failed: dict[str, str] = {}
        self._answer = b""  # the part of an answer that has come

    def start(self) -> None:
        """Start the process unless it runs; its imports take seconds."""
        if self._process is None or self._owner != os.getpid() or self._process.poll() is not None:
            self._start()

    def _start(self) -> None:
        self.artifacts.make_folder()
        process = python_process("-c", _CODE, str(self.artifacts.folder), variables=os.environ | _VARIABLES)
        self._process = subprocess.Popen(
            **process,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            # A process group of its own keeps Ctrl-C from it; a session of its own would make its niceness ineffective.
            process_group=0,
        )
        self._owner, self._answer = os.getpid(), b""
        self._requested.clear()
        atexit.register(self.stop)

    def stop(self) -> None:
        """Kill the process and its children."""
        if self._process is not None and self._owner == os.getpid():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        self._process = None
        self._requested.clear()

    def request(self, program: str) -> str:
        """Request the compilation of a described program unless it is in the cache, without waiting; return its key."""
        key = key_of(program)
        if key not in self._requested and key not in self._failed and self.artifacts.find(key) is None:
            self.start()
            self._requested.add(key)
            assert self._process is not None
            print(json.dumps({"key": key, "program": program}), file=self._process.stdin, flush=True)
        return key

    def library(self, program: str) -> Path:
        """Return the shared library of a program, waiting for it; a `RuntimeError` says why there is none."""
        key = self.request(program)
        if key in self._requested:
            later = "later runs like this one find what it makes in the cache"
            if (folder := self.artifacts.unwritable) is not None:
                why = f"{folder} {self.artifacts.why}: set RL8X_CACHE_DIR to another folder"
                later = f"each run like this one will, since {why}"
            self.say(f"waiting for the compiler; {later}")
        while key in self._requested:
            self.missing(None)
        if key in self._failed:
            raise RuntimeError(self._failed[key])
        return self.artifacts.library(key)

    def missing(self, seconds: float | None = 0.0) -> int:
        """Return how many of the requested programs are not compiled yet.

        Args:
            seconds: How long to wait for the next one at most; None waits until it comes.

        Raises:
            RuntimeError: If the process has ended.
        """
        if not self._requested or self._owner != os.getpid():
            return 0
        assert self._process is not None
        assert self._process.stdout is not None
        answers = self._process.stdout.fileno()
        if select.select([answers], [], [], seconds)[0]:
            read = os.read(answers, 2**16)
            if not read:
                self.stop()
                raise RuntimeError("the compiler's process ended")
            *lines, self._answer = (self._answer + read).split(b"\n")
            for reply in map(json.loads, lines):
                self._requested.discard(reply["key"])
                if reply["error"] is not None:
                    self._failed[reply["key"]] = reply["error"]
        return len(self._requested)


def load(library: Path, items: range = range(0)) -> Run:
    """Load a compiled program as a function of tensors that returns contiguous ones.

    Several threads may call it at once; it releases the GIL. The buffers that it keeps are freed with the function.

    Args:
        library: The shared library.
        items: Which of the arguments are items of a loop, `[n, *]`, as its results then are; of any number.
    """
    functions = ctypes.CDLL(str(library))
    call, layouts, free = functions.rl8x_run, functions.rl8x_results, functions.rl8x_free
    call.restype = layouts.restype = ctypes.c_char_p
    results = [(shape, getattr(torch, dtype)) for shape, dtype in json.loads(layouts())]
    addresses = ctypes.c_void_p * len(results)

    def run(*tensors: Tensor) -> list[Tensor]:
        count = [len(tensors[items.start])] if items else []
        outputs = [torch.empty((*count, *shape), dtype=dtype) for shape, dtype in results]
        given = (ctypes.c_void_p * len(tensors))(*[tensor.data_ptr() for tensor in tensors])
        made = addresses(*[tensor.data_ptr() for tensor in outputs])
        error = call(given, made, ctypes.c_int64(count[0] if items else 1))
        if error is not None:
            raise RuntimeError(f"a compiled program failed: {error.decode()}")
        return outputs

    weakref.finalize(run, free).atexit = False
    return run


@functools.cache
def compiler() -> Compiler:
    """Return the compiler of this process."""
    return Compiler(Artifacts())
