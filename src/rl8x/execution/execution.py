"""Decides how an algorithm's functions of tensors run: eagerly, compiled, or captured in CUDA graphs.

Eager execution calls the functions directly and is the reference. `auto` runs eagerly while a separate process
compiles, and switches at a step that depends on the configuration alone, not on a clock, so that runs are reproducible.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import math
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, Literal, TypeVar

import torch
from torch import Tensor

from rl8x.distributed import ranks
from rl8x.execution.artifacts import limit_mb
from rl8x.execution.compiler import CompiledProgram, compiler
from rl8x.execution.kernels import has_bfloat16
from rl8x.execution.programs import CapturedProgram, Loop, Program, ProgramError
from rl8x.execution.verification import TOLERANCES, Check, Kind

FixedMode = Literal["eager", "compile", "graph"]
Mode = Literal["auto"] | FixedMode
Precision = Literal["fp32", "tf32", "bf16"]
MODES: Final = ("auto", "eager", "compile", "graph")
PRECISIONS: Final = ("fp32", "tf32", "bf16")

# Estimated seconds of eager execution: until `auto` switches to compiled programs (early, since on a few cores eager
# steps delay the compiler by more than they save); until it switches if the run's length is unknown, so that a few
# steps in a notebook compile nothing; and the length of a run from which compilation pays.
_CHANGE_SECONDS: Final = 0.5
_CHANGE_SECONDS_UNKNOWN: Final = 12.0
_WORTH_SECONDS: Final = 18.0

_T = TypeVar("_T")

# Rows times weights up to which one thread is faster than two: 512 rows of two perceptrons of 64 units a layer.
_SHARED_WORK: Final = 6_000_000
# The same for eager execution, whose workers compete for the GIL: 2,500 such rows.
_SHARED_WORK_EAGER: Final = 24_000_000

# MKL selects its kernels at its first call, made here by one thread. If two threads call at once, one may get sines of
# a less precise kernel, with errors of 1e-5: seen in one of twelve processes (torch 2.13, two Xeon cores).
torch.ones(1).sin()

_GENERATORS: Final = threading.RLock()


class Execution:
    """Runs the functions of one algorithm eagerly, compiled or captured.

    Args:
        mode: `"eager"`; `"compile"`; `"graph"`: CUDA graphs; or `"auto"`: CUDA graphs on CUDA, elsewhere eager at first
            and then compiled if the run is long enough.
        precision: `"fp32"`; `"tf32"`: matmuls in TF32 on CUDA; `"bf16"`: matmuls in bfloat16, heads and all else in
            float32.
        device: The device of the tensors.
        waits: Whether `auto` switches at a planned step, and waits there for missing programs; False switches at the
            first step for which all programs are ready.

    Attributes:
        mode: The current mode.
        target: The mode from `starts_at` on.
        starts_at: The step at which `auto` switches to compiled programs, by the algorithm's own count from 0; 0 if it
            never does, or if the step is not known yet.
        compiled_since: `starts_at` once that step has been reached, also in an earlier process of the run.
        verdicts: Verdicts on the compiled programs, by their keys; part of checkpoints. Empty for a program that agrees
            with its function; else the program is refused, and this is its name, a colon, and its error.
        host_looks: Whether the host may read values: free on the CPU, a host sync elsewhere.

    Raises:
        ValueError: If the device does not support the mode or the precision, or `RL8X_CACHE_MB` is not a legal limit.
    """

    def __init__(self, mode: Mode, precision: Precision, device: torch.device, *, waits: bool = True) -> None:
        on_cuda = device.type == "cuda"
        for name, value, instead in (("precision", precision, "tf32"), ("execution", mode, "graph")):
            if value == instead and not on_cuda:
                others = "'fp32' or 'bf16'" if name == "precision" else "'eager' or 'compile'"
                raise ValueError(f"{name}={value!r} needs a CUDA device; got {device}. Use {others}.")
        if precision == "bf16" and device.type == "cpu" and not has_bfloat16():
            warnings.warn(
                "precision='bf16' is emulated, since this processor has no bfloat16 instructions: iterations take "
                "about four times as long as with 'fp32'. Use precision='fp32'.",
                RuntimeWarning,
                stacklevel=2,
            )
        self.falls_back = mode == "auto"
        self.fell_back = False  # `auto` has failed to compile or capture, and stays eager
        self.target: FixedMode = ("graph" if on_cuda else "compile") if mode == "auto" else mode
        self.mode: FixedMode = "eager" if mode == "auto" and not on_cuda else self.target
        self.prepares = False  # programs should be compiled now, while the run is eager
        self.starts_at = 0
        self.compiled_since: int | None = None
        self.waits = waits
        self.due = math.inf  # the step from which on programs are prepared
        self.precision = precision
        self.verdicts: dict[str, str] = {}
        self.device = device
        self.host_looks = device.type == "cpu"
        self.threads = Threads(device, lambda: self.mode == "eager")
        self.set_precision()
        if device.type == "cpu":
            keep_freed_memory()
            if mode != "eager":
                limit_mb()  # raises here, rather than in the compiler's process

    def set_precision(self) -> None:
        """Set torch's own precision of matmuls, which all algorithms of a process and its user's code share."""
        torch.set_float32_matmul_precision("high" if self.precision == "tf32" else "highest")
        if self.device.type == "cuda":
            torch.backends.cudnn.allow_tf32 = self.precision == "tf32"
            # Else convolutions sum gradients in any order, and the bits of a resumed run differ from an unbroken one's.
            torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = True, False

    # -- the switch from eager to compiled execution

    def plan(self, seconds_per_step: float, steps: float, made: int = 0, *, gains: bool = True) -> None:
        """Decide from these arguments alone whether `auto` switches to compiled programs, and, if it `waits`, when.

        Args:
            seconds_per_step: Duration of an eager step, estimated from its amount of work rather than measured.
            steps: Total number of steps of the run; infinite if unbounded.
            made: Number of steps that the algorithm has made: eager ones, unless `compiled_since` is set.
            gains: Whether compiled programs are faster at all.
        """
        if not self.falls_back or self.fell_back or self.device.type == "cuda" or self.mode == "compile":
            return
        self.prepares = False  # may be left over from an interrupted `run()`
        eager_seconds = _CHANGE_SECONDS_UNKNOWN if math.isinf(steps) else _CHANGE_SECONDS
        worth = gains and steps * seconds_per_step >= _WORTH_SECONDS
        planned = max(math.ceil(eager_seconds / seconds_per_step), made)
        if self.compiled_since is not None:
            worth, self.waits, planned = True, True, self.compiled_since
        self.target = "compile" if worth else "eager"
        self.starts_at = planned if worth and self.waits else 0
        self.due = planned // 4 if math.isinf(steps) else 0

    @property
    def chosen(self) -> Mode:
        """The mode as a run's param: `auto` if it has switched or will switch, else the current mode."""
        return "auto" if self.starts_at or self.mode != self.target else self.mode

    def begin_step(self, step: int, *, prepared: bool = True) -> bool:
        """Start to prepare compiled programs, or switch to them, if this step is due; return whether it has switched.

        Args:
            step: The step, by the algorithm's own count from 0.
            prepared: Whether the programs of a step have been requested, if it does not wait.
        """
        if self.mode == self.target or step < self.due:
            return False
        changes = step >= self.starts_at
        if not self.waits:
            there = self.prepares and prepared and not compiler().num_missing()
            changes = ranks().all("whether the programs are there", there)
            self.starts_at = step if changes else 0
        self.prepares = not changes
        if changes:
            self.mode, self.compiled_since, self.waits = "compile", self.starts_at, True
        return changes

    def awaits(self, step: int) -> bool:
        """Return whether a step has to wait for compiled programs.

        Args:
            step: The number of the step, counted from 0.
        """
        return self.mode != self.target and self.waits and step >= self.starts_at > 0

    def fall_back(self) -> None:
        """Run eagerly from now on; for mode `auto`."""
        self.mode = self.target = "eager"
        self.prepares, self.fell_back = False, True

    def give_up(self, error: ProgramError) -> None:
        """Warn that a program could not be made, and run eagerly from now on; raise unless the mode is `auto`.

        Args:
            error: The reason.
        """
        if not self.falls_back:
            raise error
        self.fall_back()
        warnings.warn(f"{error} Running eagerly.", RuntimeWarning, stacklevel=4)

    @contextlib.contextmanager
    def ahead(self) -> Iterator[None]:
        """Set `mode` to `target` within the context, to prepare programs before the switch."""
        before, self.mode = self.mode, self.target
        try:
            yield
        finally:
            self.mode = "eager" if self.fell_back else before

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        """Return the context in which a policy's matmuls run in bfloat16 if that is the precision."""
        if self.precision != "bf16":
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, dtype=torch.bfloat16)

    @property
    def shown_mode(self) -> str:
        """The current mode as text, with the programs that were refused and run eagerly."""
        refused = sorted({verdict.partition(":")[0] for verdict in self.verdicts.values() if verdict})
        return self.mode if self.mode == "eager" or not refused else f"{self.mode}, eager: {', '.join(refused)}"

    def program(
        self, function: Program | Loop, num_fixed: int = 0, *, name: str = "program", kind: Kind = "step"
    ) -> GuardedProgram:
        """Make a program of a function of tensors, or of a `Loop`; compiled on the CPU, either is one call into C++.

        Args:
            function: Takes tensors and returns a sequence of tensors, each `[*]`. It may write in place to its first
                `num_fixed` arguments and to tensors that it holds itself. Tensors that it reads beside its arguments
                must be the same objects in every call; their values may change.
            num_fixed: How many leading arguments are the same tensors in every call.
            name: The program's name in messages.
            kind: Kind of its tensors, which decides how a compiled program is verified; see `verification`.

        A call raises a `ProgramError` if the function cannot be compiled or captured, unless the mode is `auto`.
        """
        if self.device.type == "cuda" if self.falls_back else self.target == "graph":
            return GuardedProgram(self, CapturedProgram(function, num_fixed))
        check = Check(name, kind, TOLERANCES[self.precision], self.verdicts)
        return GuardedProgram(self, CompiledProgram(function, check))


@dataclasses.dataclass(eq=False, repr=False)
class GuardedProgram:
    """Calls a program; calls its function while execution is eager or after `auto` has fallen back."""

    execution: Execution
    made: CompiledProgram | CapturedProgram

    def __call__(self, *tensors: Tensor) -> Sequence[Tensor]:
        """Run the program or its function."""
        if self.execution.mode != "eager":
            try:
                return self.made(*tensors)
            except ProgramError as error:
                self.execution.give_up(error)
        return self.made.function(*tensors)

    def prepare(self, *tensors: Tensor) -> None:
        """Request compilation for arguments of this layout, `[*]` each, without running the program or waiting."""
        if self.execution.target == "compile" and not isinstance(self.made, CapturedProgram):
            try:
                self.made.prepare(*tensors)
            except ProgramError as error:
                self.execution.give_up(error)


# -- threads


@contextlib.contextmanager
def kept_generators(device: torch.device | None = None) -> Iterator[None]:
    """Restore torch's own generators at the end; a thread waits for another's context, as threads share them."""
    on_cuda = device is not None and device.type == "cuda"
    with _GENERATORS, torch.random.fork_rng(devices=[device] if on_cuda else []):
        yield


def flushed_denormals(device: torch.device) -> contextlib.ExitStack:
    """Flush denormal numbers to 0 in this thread's CPU operations until exit, as compiled programs do.

    Adam's moments of weights without gradient become denormal within a thousand updates. Each operation on one then
    costs a hundred cycles, a fifth of the time of SAC's eager updates.
    """
    until = contextlib.ExitStack()
    if device.type == "cpu" and sys.float_info.min / 2.0 > 0.0:  # else the user has already set it
        torch.set_flush_denormal(True)
        until.callback(torch.set_flush_denormal, False)
    return until


class Workers:
    """`count` threads that run jobs in parallel, the calling one included; PyTorch's operations release the GIL."""

    def __init__(self, count: int) -> None:
        self.count = count
        # The number of intra-op threads is set per thread.
        self._pool = ThreadPoolExecutor(max(count - 1, 1), "rl8x-worker", torch.set_num_threads, (1,))

    def __deepcopy__(self, memo: object) -> Workers:
        return Workers(self.count)  # threads cannot be copied

    def share(self, jobs: Sequence[Callable[[], _T]]) -> list[_T]:
        """Run at most `count` jobs in parallel, the first in the calling thread, and return their results in order."""
        others = [self._pool.submit(job) for job in jobs[1:]]
        return [jobs[0](), *(other.result() for other in others)]


class Threads:
    """Chooses the number of threads of CPU programs by their amount of work, and by whether they run `eager` now."""

    def __init__(self, device: torch.device, eager: Callable[[], bool]) -> None:
        self._on_cpu = device.type == "cpu"
        self._eager = eager
        self._workers: dict[int, Workers] = {}

    def for_work(self, work: int) -> contextlib.ExitStack:
        """Use one thread until exit if the work, in rows times weights, is too small for several."""
        until, before = contextlib.ExitStack(), torch.get_num_threads()
        if self._on_cpu and work <= _SHARED_WORK and before > 1:
            torch.set_num_threads(1)
            until.callback(torch.set_num_threads, before)
        return until

    @contextlib.contextmanager
    def workers_for(self, work: int) -> Iterator[Workers]:
        """Yield one worker for each thread if the work is large enough, else one.

        Intra-op threads synchronise after every operation, and read rows from each other's caches. A worker keeps its
        rows from the first operation to the last, and runs each operation on one thread.
        """
        shares = work > (_SHARED_WORK_EAGER if self._eager() else _SHARED_WORK)
        count = torch.get_num_threads() if self._on_cpu and shares else 1
        if count not in self._workers:
            self._workers[count] = Workers(count)
        with self.for_work(0):
            yield self._workers[count]


# -- memory


def keep_freed_memory() -> None:
    """Make the allocator keep freed memory for reuse, instead of returning it to the system; glibc only.

    Every eager pass over a minibatch frees and allocates the same few megabytes. If they are returned to the system
    each time, every page is mapped and zeroed again: without this eager PPO on 4096 x 32 steps takes 1.1 to 1.2 times
    as long (CPU time of one thread, Xeon, glibc 2.36). Compiled programs keep their own memory, and gain nothing.
    """
    # M_MMAP_MAX, M_TRIM_THRESHOLD and M_TOP_PAD of malloc.h
    for option, value in ((-4, 0), (-1, 2**31 - 1), (-2, 64 * 2**20)):
        of_glibc("mallopt")(option, value)


def of_glibc(name: str) -> Callable[..., object]:
    """Return a function of glibc; on other systems, one that does nothing."""
    function = getattr(ctypes.CDLL(None), name, None) if sys.platform.startswith("linux") else None
    return function or (lambda *_: None)
