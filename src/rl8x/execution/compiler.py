"""Compiled functions of tensors: traced here, compiled in a separate process, verified, called as one C++ function.

The compiling process imports torch's compiler once, reads programs as lines of JSON, and forks a child for each.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import dataclasses
import functools
import json
import os
import select
import signal
import subprocess
import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Hashable, Sequence
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from rl8x.execution import private
from rl8x.execution.artifacts import Artifacts, key_of
from rl8x.execution.programs import Loop, Program, as_program_error, layout_of
from rl8x.execution.traces import Trace, trace
from rl8x.execution.verification import Check, verdict
from rl8x.output import first_line
from rl8x.processes import python_process

# Garbage collection in the compiler's process finds little and costs a second.
_CODE: Final = "import gc; gc.disable(); from rl8x.execution.compiler import main; main()"
# The run goes on meanwhile and has priority.
_NICENESS: Final = 10
_LOOK_S: Final = 0.1  # the longest wait for an answer that another thread reads


class CompiledProgram:
    """A function of tensors, or a loop, compiled once for each layout of its arguments.

    The traced graph is compiled without the guards that `torch.compile` checks at every call, which cost as much as an
    update of a small minibatch. On the CPU a call of the program, even of a loop, is one call into C++. A program whose
    results differ from its function's (in the first two items of a loop) is refused with a warning, and the function
    runs instead. Without `compiles`, the trace is interpreted, for comparison.
    """

    def __init__(self, function: Program, check: Check | None = None, *, compiles: bool = True) -> None:
        self.function = function
        self.loop = function if isinstance(function, Loop) else Loop(function, 0, num_items=0)
        self.check = check or Check()
        self.compiles = compiles
        self._traced: dict[Hashable, Trace] = {}  # programs that are being compiled
        self._ready: dict[Hashable, Program] = {}

    def __call__(self, *tensors: Tensor) -> Sequence[Tensor]:
        """Run the program."""
        key = layout_of(tensors)
        program = self._ready.get(key)
        if program is None:
            with as_program_error("compile"):
                program = self._ready[key] = self._compile(tensors) if self.compiles else self._interpret(tensors)
        return program(*tensors)

    def prepare(self, *tensors: Tensor) -> None:
        """Request compilation for arguments of this layout, `[*]` each, without waiting for it."""
        key = layout_of(tensors)
        if key not in self._ready and key not in self._traced:
            with as_program_error("compile"):
                traced = self._traced[key] = trace(self.loop.function, self.loop.first(tensors))
                if tensors[0].is_cpu:
                    compiler().request(traced.text)

    def _compile(self, tensors: Sequence[Tensor]) -> Program:
        first = self.loop.first(tensors)
        traced = self._traced.pop(layout_of(tensors), None) or trace(self.loop.function, first)
        text = traced.text
        if all(tensor.is_cpu for tensor in tensors):
            program = load(compiler().library(text), traced, self.loop, tensors)
        else:  # in this process; kernels are launched asynchronously, so that a loop in Python costs little
            from rl8x.execution.lowering import compiled_here

            program = self._looped(compiled_here(traced.graph, [*first, *traced.read]), traced.read)
        return program if self._agrees(key_of(text), program, tensors, traced.read) else self.function

    def _interpret(self, tensors: Sequence[Tensor]) -> Program:
        traced = trace(self.loop.function, self.loop.first(tensors))
        return self._looped(traced.graph, traced.read)

    def _looped(self, run: Program, read: Sequence[Tensor]) -> Program:
        """Return a function that runs a graph with extra arguments `read`, `[*]` each; a loop runs in Python."""
        program: Program = lambda *tensors: [result.clone() for result in run(*tensors, *read)]  # noqa: E731
        return torch.no_grad()(dataclasses.replace(self.loop, function=program) if self.loop.num_items else program)

    def _agrees(self, key: str, program: Program, tensors: Sequence[Tensor], read: Sequence[Tensor]) -> bool:
        """Return whether a program agrees with its function, by a verdict of run or cache, else by running both."""
        verdicts, artifacts = self.check.verdicts, compiler().artifacts
        found = verdicts[key] if key in verdicts else (artifacts.find(key) or {}).get("verdict")
        if found is None:
            items = range(len(tensors) - self.loop.num_items, len(tensors))
            few = [tensor[:2] if i in items else tensor for i, tensor in enumerate(tensors)]
            run, function = (functools.partial(each, *few) for each in (program, self.function))
            found = verdict(run, function, [*few, *read], self.check, items)
            artifacts.judge(key, found)
        verdicts[key] = found
        if found:
            text = f"a compiled program differs from eager execution, so it runs eagerly: {found}."
            warnings.warn(text, RuntimeWarning, stacklevel=2)
        return not found


class Compiler:
    """Compiles programs into the cache, also for several threads at once; says at the first wait that it waits."""

    def __init__(self, artifacts: Artifacts) -> None:
        self.artifacts = artifacts
        self.say: Callable[[str], None] | None = None
        self._process: subprocess.Popen[str] | None = None
        self._owner = 0  # the process that started the compiler; forks of it do not share the compiler
        self._requested: set[str] = set()
        self._failed: dict[str, str] = {}
        self._answer = b""  # the incomplete answer read so far
        self._guard = threading.RLock()

    def start(self) -> None:
        """Start the process unless it runs; its imports take seconds."""
        if self._process is not None and self._owner == os.getpid() and self._process.poll() is None:
            return
        self.artifacts.make_folder()
        given = python_process("-c", _CODE, str(self.artifacts.folder), variables=os.environ | {"OMP_NUM_THREADS": "1"})
        self._process = subprocess.Popen(
            **given,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            # Its own process group keeps Ctrl-C from it; its own session would make its niceness ineffective.
            process_group=0,
        )
        assert self._process.stdout is not None
        os.set_blocking(self._process.stdout.fileno(), False)  # another thread may read what both wait for
        self._owner, self._answer = os.getpid(), b""
        self._requested.clear()
        atexit.register(self.stop)

    def stop(self) -> None:
        """Kill the process and its children."""
        if self._process is not None and self._owner == os.getpid():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.communicate()  # waits, and closes the pipes
        self._process = None
        self._requested.clear()

    def request(self, program: str) -> str:
        """Request the compilation of a program unless it is in the cache, without waiting; return its key."""
        key = key_of(program)
        with self._guard:
            if key not in self._requested and key not in self._failed and self.artifacts.find(key) is None:
                self.start()
                self._requested.add(key)
                assert self._process is not None
                print(json.dumps({"key": key, "program": program}), file=self._process.stdin, flush=True)
        return key

    def library(self, program: str) -> Path:
        """Wait for the shared library of a program, and return its path; a `RuntimeError` says why there is none."""
        key = self.request(program)
        if key in self._requested and self.say is not None:
            later = "later runs like this one find what it makes in the cache"
            if why := self.artifacts.left:
                later = f"each run like this one will, since {why}: set RL8X_CACHE_DIR to another folder"
            self.say(f"waiting for the compiler; {later}")
            self.say = None
        while key in self._requested:
            self.num_missing(_LOOK_S)
        library = self.artifacts.library(key)
        if key in self._failed or not library.exists():
            raise RuntimeError(self._failed.get(key, "the compiler's process ended, or its folder was emptied"))
        return library

    def num_missing(self, seconds: float = 0.0) -> int:
        """Return how many requested programs are missing, after `seconds` or one more; 0 if the process has ended."""
        process = self._process
        if not self._requested or process is None or self._owner != os.getpid():
            return 0
        assert process.stdout is not None
        with contextlib.suppress(OSError, ValueError):  # another thread has closed it, as the process had ended
            select.select([process.stdout], [], [], seconds)
        with self._guard:
            if process is self._process:
                self._read_answers()
        return len(self._requested)

    def _read_answers(self) -> None:
        assert self._process is not None
        assert self._process.stdout is not None
        try:
            read = os.read(self._process.stdout.fileno(), 2**16)
        except BlockingIOError:
            return
        if not read:
            self.stop()
        *lines, self._answer = (self._answer + read).split(b"\n")
        for reply in map(json.loads, lines):
            self._requested.discard(reply["key"])
            if reply["error"] is not None:
                self._failed[reply["key"]] = reply["error"]


def load(library: Path, traced: Trace, loop: Loop, like: Sequence[Tensor]) -> Program:
    """Load the compiled program of a loop whose function was traced; its arguments need the strides of `like`.

    Several threads may call it at once; it releases the GIL. The buffers that it keeps are freed with the function.
    """
    functions = ctypes.CDLL(str(library))
    call = functions.rl8x_run
    call.argtypes = [*[ctypes.c_void_p] * 3, ctypes.c_size_t, ctypes.c_int64, ctypes.c_bool]
    call.restype = ctypes.c_char_p
    make = torch.zeros if loop.ends else torch.empty
    first, num_given = len(like) - loop.num_items, len(like) + len(traced.read)
    inputs, addresses = ctypes.c_void_p * num_given, ctypes.c_void_p * len(traced.results)
    steps = (ctypes.c_int64 * num_given)()  # bytes from one item to the next
    steps[first : len(like)] = [tensor.stride(0) * tensor.itemsize for tensor in like[first:]]

    def run(*tensors: Tensor) -> list[Tensor]:
        count = (tensors[first].size(0),) if loop.num_items else ()
        outputs = [make(count + shape, dtype=dtype) for shape, dtype in traced.results]
        given = inputs(*[tensor.data_ptr() for tensor in (*tensors, *traced.read)])
        made = addresses(*[tensor.data_ptr() for tensor in outputs])
        error = call(given, steps, made, len(made), *count or (1,), loop.ends)
        if error is not None:
            raise RuntimeError(f"a compiled program failed: {error.decode()}")
        return outputs

    weakref.finalize(run, functions.rl8x_free).atexit = False
    return run


@functools.cache
def compiler() -> Compiler:
    """Return the compiler of this process."""
    return Compiler(Artifacts())


# -- the process


def main() -> None:
    """Compile programs until stdin is closed."""
    import rl8x.execution.lowering  # noqa: F401, once for all forks

    artifacts = Artifacts(Path(sys.argv[1]))
    artifacts.left = "seen by the run"
    os.nice(_NICENESS)
    private.load_inductor()
    answers = os.dup(1)
    os.dup2(2, 1)  # keeps the compilers' output apart from the answers
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # no zombies
    artifacts.remove_unfinished()
    for line in sys.stdin:
        if os.fork() == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            _watch(artifacts, json.loads(line), answers)
            os._exit(0)
    os.killpg(0, signal.SIGKILL)


def _watch(artifacts: Artifacts, request: dict[str, str], answers: int) -> None:
    """Answer a request from a child process, and send an error if that is killed, for example by the OOM killer."""

    def answer(error: str | None) -> None:
        os.write(answers, (json.dumps({"key": request["key"], "error": error}) + "\n").encode())

    worker = os.fork()
    if worker == 0:
        answer(_compile(artifacts, **request))
        os._exit(0)
    _, status = os.waitpid(worker, 0)
    if status:
        answer(f"the compiler ended with status {status}")


def _compile(artifacts: Artifacts, key: str, program: str) -> str | None:
    """Compile a program unless the cache has it; return the error, or None."""
    import filelock

    from rl8x.execution import lowering

    built, lock = artifacts.beside("so"), artifacts.folder / f".{key}.lock"
    try:
        with filelock.FileLock(lock):  # ranks of one machine request the same program at once
            if artifacts.find(key) is None:
                lowering.lower(program, built)
                artifacts.put(key, built)
            lock.unlink(missing_ok=True)
    except BaseException as error:  # this process has nothing else to do
        return first_line(error)
    finally:
        built.unlink(missing_ok=True)
    return None
