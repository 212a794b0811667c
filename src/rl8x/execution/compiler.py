"""Compiled functions of tensors: traced here, compiled in a separate process, verified, called as one C++ function.

That process imports torch's compiler once, reads programs as lines of JSON, and compiles each in a forked child. It
shares no memory with the run that started it.
"""

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
import sys
import warnings
import weakref
from collections.abc import Callable, Hashable, Iterator, Sequence
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from rl8x.execution import private
from rl8x.execution.artifacts import Artifacts, key_of
from rl8x.execution.programs import Loop, Program, ProgramError, layout_of
from rl8x.execution.traces import Trace, describe_program, trace
from rl8x.execution.verification import Check, verdict
from rl8x.output import message_of
from rl8x.processes import python_process

# Garbage collection in the compiler's process finds little and costs a second.
_CODE: Final = "import gc; gc.disable(); from rl8x.execution.compiler import main; main()"
_VARIABLES: Final = {"OMP_NUM_THREADS": "1"}
# The run goes on meanwhile and has priority.
_NICENESS: Final = 10


class CompiledProgram:
    """A function of tensors, or a loop, compiled once for each layout of its arguments.

    The traced graph is compiled without the guards that `torch.compile` checks at every call, which cost as much as an
    update of a small minibatch. On the CPU a call of the program is one call into C++, of a loop too. A program that
    does not compute what its function does, of a loop the first two items, is refused with a warning, and the function
    runs instead. Unless it `compiles`, the trace is interpreted, for comparison.
    """

    def __init__(self, function: Program, check: Check | None = None, *, compiles: bool = True) -> None:
        self.function = function
        self.loop = function if isinstance(function, Loop) else None
        self.check = check or Check()
        self.compiles = compiles
        self._traced: dict[Hashable, tuple[str, Trace]] = {}  # programs that are being compiled
        self._ready: dict[Hashable, Program] = {}

    def __call__(self, *tensors: Tensor) -> Sequence[Tensor]:
        """Run the program."""
        key = layout_of(tensors)
        program = self._ready.get(key)
        if program is None:
            with _as_program_error():
                program = self._ready[key] = self._compile(tensors) if self.compiles else self._interpret(tensors)
        return program(*tensors)

    def prepare(self, *tensors: Tensor) -> None:
        """Request compilation for arguments of this layout, `[*]` each, without waiting for it."""
        key = layout_of(tensors)
        if key not in self._ready and key not in self._traced:
            with _as_program_error():
                self._traced[key] = text, _ = self._describe(tensors)
                if tensors[0].is_cpu:
                    compiler().request(text)

    def _compile(self, tensors: Sequence[Tensor]) -> Program:
        text, (graph, read) = self._traced.pop(layout_of(tensors), None) or self._describe(tensors)
        if all(tensor.is_cpu for tensor in tensors):
            program = load(compiler().library(text), self._items(tensors), read)
        else:  # in this process; kernels are launched asynchronously, so that a loop in Python costs little
            from rl8x.execution.lowering import compiled_here

            program = self._looped(
                compiled_here(graph, [*(self.loop.first(tensors) if self.loop else tensors), *read]), read
            )
        return program if self._agrees(key_of(text), program, tensors, read) else self.function

    def _interpret(self, tensors: Sequence[Tensor]) -> Program:
        return self._looped(*self._trace(tensors))

    def _looped(self, run: Program, read: Sequence[Tensor]) -> Program:
        """Return what runs a graph that also takes `read`, `[*]` each, in a loop in Python if the function is one."""
        program: Program = lambda *tensors: [result.clone() for result in run(*tensors, *read)]  # noqa: E731
        if self.loop:
            program = Loop(program, self.loop.num_state, self.loop.num_items, ends=self.loop.ends)
        return torch.no_grad()(program)

    def _describe(self, tensors: Sequence[Tensor]) -> tuple[str, Trace]:
        traced, ends = self._trace(tensors), self.loop is not None and self.loop.ends
        return describe_program(traced.graph, [*tensors, *traced.read], self._items(tensors), ends=ends), traced

    def _trace(self, tensors: Sequence[Tensor]) -> Trace:
        return trace(self.loop.function, self.loop.first(tensors)) if self.loop else trace(self.function, tensors)

    def _items(self, tensors: Sequence[Tensor]) -> range:
        """Return which of the arguments are items of a loop."""
        return range(len(tensors) - self.loop.num_items, len(tensors)) if self.loop else range(0)

    def _agrees(self, key: str, program: Program, tensors: Sequence[Tensor], read: Sequence[Tensor]) -> bool:
        """Return whether a program does what its function does: as the run or the cache knows, else by trying both."""
        verdicts, artifacts = self.check.verdicts, compiler().artifacts
        if key not in verdicts:
            found = artifacts.verdict(key)
            if found is None:
                items = self._items(tensors)
                few = [tensor[:2] if i in items else tensor for i, tensor in enumerate(tensors)]
                run, function = (functools.partial(each, *few) for each in (program, self.function))
                found = verdict(run, function, [*few, *read], self.check, items)
                artifacts.judge(key, found)
            verdicts[key] = found
        if verdicts[key]:
            warnings.warn(
                f"a compiled program differs from eager execution, so it runs eagerly: {verdicts[key]}.",
                RuntimeWarning,
                stacklevel=2,
            )
        return not verdicts[key]


@contextlib.contextmanager
def _as_program_error() -> Iterator[None]:
    try:
        yield
    except Exception as error:
        raise ProgramError("compile", error) from error


class Compiler:
    """Compiles programs, several at a time, into the cache; calls `say` with a line, once, where one is waited for."""

    def __init__(self, artifacts: Artifacts) -> None:
        self.artifacts = artifacts
        self.say: Callable[[str], None] | None = None
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
        if key in self._requested and self.say is not None:
            later = "later runs like this one find what it makes in the cache"
            if (folder := self.artifacts.unwritable) is not None:
                why = f"{folder} {self.artifacts.why}: set RL8X_CACHE_DIR to another folder"
                later = f"each run like this one will, since {why}"
            self.say(f"waiting for the compiler; {later}")
            self.say = None
        while key in self._requested:
            self.missing(None)
        if key in self._failed:
            raise RuntimeError(self._failed[key])
        return self.artifacts.library(key)

    def missing(self, seconds: float | None = 0.0) -> int:
        """Return how many of the requested programs are not compiled yet, after so many seconds or when one more is.

        None waits for one without end. A `RuntimeError` says that the process has ended.
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


def load(library: Path, items: range = range(0), read: Sequence[Tensor] = ()) -> Program:
    """Load a compiled program as a function of tensors, of which `items` are those of a loop, `[n, *]` each.

    It also reads the tensors `read`. Several threads may call it at once; it releases the GIL. The buffers that it
    keeps are freed with the function.
    """
    functions = ctypes.CDLL(str(library))
    call, layouts, free = functions.rl8x_run, functions.rl8x_results, functions.rl8x_free
    call.restype = layouts.restype = ctypes.c_char_p
    results = [(tuple(shape), getattr(torch, dtype)) for shape, dtype in json.loads(layouts())]
    addresses = ctypes.c_void_p * len(results)

    def run(*tensors: Tensor) -> list[Tensor]:
        count = (tensors[items.start].size(0),) if items else ()
        outputs = [torch.empty(count + shape, dtype=dtype) for shape, dtype in results]
        given = [tensor.data_ptr() for tensor in tensors] + [tensor.data_ptr() for tensor in read]
        made = addresses(*[tensor.data_ptr() for tensor in outputs])
        error = call((ctypes.c_void_p * len(given))(*given), made, ctypes.c_int64(*count or (1,)))
        if error is not None:
            raise RuntimeError(f"a compiled program failed: {error.decode()}")
        return outputs

    weakref.finalize(run, free).atexit = False
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
    artifacts.unwritable = artifacts.folder  # where it is, the run has decided
    os.nice(_NICENESS)
    private.trust_processor_flags()
    with contextlib.suppress(RuntimeError):  # each program reports it
        private.inductor().pick_vec_isa()  # once for all forks
    answers = os.dup(1)
    os.dup2(2, 1)  # keeps the output of compilers apart from the answers
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # no zombies
    artifacts.remove_unfinished()
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
        lines = message_of(error).strip().splitlines()
        return lines[0] if lines else type(error).__name__
    finally:
        built.unlink(missing_ok=True)
    return None
