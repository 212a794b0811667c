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
from typing import IO, Final, Literal

import torch
from torch import Tensor

from rl8x.execution.artifacts import Artifacts, key_of

Kind = Literal["program", "source"]
Run = Callable[..., Sequence[Tensor]]

_MODULE: Final = "rl8x.execution.compiler_process"


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

    def _start(self) -> None:
        """Begin the process, which takes seconds to import what it compiles with."""
        self.artifacts.make_folder()
        path = os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")])
        environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            [sys.executable, "-m", _MODULE, str(self.artifacts.folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=environment,
            start_new_session=True,  # so that Ctrl-C is the run's alone
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

    def request(self, kind: Kind, content: str) -> str:
        """Have something compiled unless it is.

        Args:
            kind: What it is.
            content: A description as JSON, or C++ source.

        Returns:
            Its key.
        """
        key = key_of(kind, content)
        if key not in self._requested and key not in self._failed and self.artifacts.find(key) is None:
            if self._process is None or self._owner != os.getpid() or self._process.poll() is not None:
                self._start()
            self._requested.add(key)
            print(json.dumps({"key": key, kind: content}), file=self._pipe("stdin"), flush=True)
        return key

    def library(self, kind: Kind, content: str) -> Path:
        """Return the shared library of what is requested, compiled by now or waited for.

        Raises:
            RuntimeError: If it cannot be compiled.
        """
        key = self.request(kind, content)
        if key in self._requested:
            self.say("waiting for the compiler; later runs like this one find what it makes in the cache")
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
    """Load a compiled program: takes tensors and returns a list of tensors.

    It is called past torch's own runner, which would keep Python from running other threads meanwhile.

    Raises:
        RuntimeError: If the library does not load.
    """
    functions, container, num_outputs = ctypes.CDLL(str(library)), ctypes.c_void_p(), ctypes.c_size_t()
    # As many at a time as there are processors: another caller would wait.
    copies = ctypes.c_size_t(os.cpu_count() or 1)
    failed = functions.AOTInductorModelContainerCreateWithDevice(ctypes.byref(container), copies, b"cpu", None)
    if failed or functions.AOTInductorModelContainerGetNumOutputs(container, ctypes.byref(num_outputs)):
        raise RuntimeError(f"the compiled program {library.name} does not load")
    call = functions.AOTInductorModelContainerRun
    call.argtypes = [_POINTER, _POINTERS, ctypes.c_size_t, _POINTERS, ctypes.c_size_t, _POINTER, _POINTER]
    results = _POINTER * num_outputs.value

    def run(*tensors: Tensor) -> list[Tensor]:
        given = torch._C._aoti.unsafe_alloc_void_ptrs_from_tensors(list(tensors))
        inputs = (_POINTER * len(given))(*[_pointer_of(each, None) for each in given])
        outputs = results()
        if call(container, inputs, len(given), outputs, len(outputs), None, None):
            raise RuntimeError(f"the compiled program {library.name} failed")
        return torch._C._aoti.alloc_tensors_by_stealing_from_void_ptrs([_capsule(each, None, None) for each in outputs])

    return run


_POINTER: Final = ctypes.c_void_p
_POINTERS: Final = ctypes.POINTER(ctypes.c_void_p)
# Torch hands out and takes the handles of tensors as capsules.
_pointer_of: Final = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)
_capsule: Final = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)(
    ("PyCapsule_New", ctypes.pythonapi)
)


@functools.cache
def compiler() -> Compiler:
    """Return the compiler of this process."""
    return Compiler(Artifacts())
