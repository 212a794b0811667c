"""Execution of an algorithm's programs: the one place that decides which of them are compiled, and when.

Algorithms hand over functions of tensors. Eager execution calls them as they are and is the reference. Compiled
execution traces each once for every layout of its arguments and calls what a compiler's process built of it. `auto` has
that done while the run goes on eagerly, and changes at a step that the configuration of the run decides.
"""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, Literal

import torch
from torch import Tensor

from rl8x.execution.artifacts import key_of
from rl8x.execution.captured import CapturedLoop, CapturedProgram
from rl8x.execution.compiled import CompiledLoop, CompiledProgram, MadeOf
from rl8x.execution.compiler import compiler
from rl8x.execution.fingerprint import fingerprint
from rl8x.execution.loops import Loop
from rl8x.execution.memory import keep_freed_memory
from rl8x.execution.programs import Program, ProgramError
from rl8x.execution.split import Make, SplitLoop, SplitProgram
from rl8x.execution.threads import Threads

FixedMode = Literal["eager", "compile", "graph"]
Mode = Literal["auto"] | FixedMode
Precision = Literal["fp32", "tf32", "bf16"]
MODES: Final = ("auto", "eager", "compile", "graph")
PRECISIONS: Final = ("fp32", "tf32", "bf16")


# In seconds of eager execution, by the model of its work: when `auto` changes to compiled programs, soon, since eager
# steps on a few cores delay the compiler by more than they save; when it changes where the end of the run is not known,
# so that a few steps in a notebook do not begin to compile; and how long a run has to be to be worth it.
_CHANGE_SECONDS: Final = 0.5
_CHANGE_SECONDS_UNKNOWN: Final = 12.0
_WORTH_SECONDS: Final = 18.0


class Execution:
    """Runs the programs of one algorithm: eagerly, compiled or captured.

    Args:
        mode: `"eager"`; `"compile"`; `"graph"`: kernels captured once on CUDA and replayed; or `"auto"`: graph on CUDA,
            elsewhere compiled where the run is long enough, and eager until then.
        precision: `"fp32"`; `"tf32"`: matmuls in TF32 on CUDA; `"bf16"`: matmuls in bfloat16, heads and all else in
            float32.
        device: Where the programs run.
        configuration: A text that decides the programs, and some more: the first run that has it begins the compiler's
            process, which takes seconds, ahead of the first program.

    Attributes:
        mode: The mode in force.
        target: The mode that is in force from `starts_at` on.
        prepares: Whether programs are to be compiled now, while the run is eager.
        starts_at: The step from which `auto` is compiled, the algorithm's own, counted from 0; 0 where it never is.
        compiled_since: That step, once it has come, also in an earlier process of the run.
        due: The step at which `begin_step` has something to do next; infinite where it never has.
        fell_back: Whether `auto` has found that programs cannot be had, and stays eager.
        host_looks: Whether the host may look at values: on the CPU it costs nothing, elsewhere it waits for all work.

    Raises:
        ValueError: If mode or precision are not to be had on the device, or `RL8X_CACHE_MB` is no legal limit.
    """

    not_traced = (
        "mode",
        "target",
        "prepares",
        "starts_at",
        "compiled_since",
        "due",
        "threads",
        "falls_back",
        "fell_back",
        "_configuration",
    )

    def __init__(self, mode: Mode, precision: Precision, device: torch.device, configuration: str = "") -> None:
        on_cuda = device.type == "cuda"
        for name, value, instead in (("precision", precision, "tf32"), ("execution", mode, "graph")):
            if value == instead and not on_cuda:
                others = "'fp32' or 'bf16'" if name == "precision" else "'eager' or 'compile'"
                raise ValueError(f"{name}={value!r} needs a CUDA device; got {device}. Use {others}.")
        self.falls_back = mode == "auto"
        self.fell_back = False
        self.target: FixedMode = ("graph" if on_cuda else "compile") if mode == "auto" else mode
        self.mode: FixedMode = "eager" if mode == "auto" and not on_cuda else self.target
        self.prepares = False
        self.starts_at = 0
        self.compiled_since: int | None = None
        self.due = math.inf
        self.precision = precision
        self.device = device
        self.host_looks = device.type == "cpu"
        self.threads = Threads(device, eager=self.mode == "eager")
        self._configuration = configuration
        if on_cuda:
            torch.backends.cuda.matmul.allow_tf32 = precision == "tf32"
        if device.type == "cpu":
            keep_freed_memory()
            if mode != "eager":
                _ = compiler().artifacts.limit_mb  # what is wrong with it is said now, not by the compiler's process
            if self.mode == "compile":
                self._begin_compiler()

    def _begin_compiler(self) -> None:
        """Begin the compiler's process, unless an earlier run of the same configuration has left its programs."""
        key = key_of("configuration", self._configuration)
        if self._configuration and compiler().artifacts.noted(key) is None:
            compiler().start()
            compiler().artifacts.note(key, {})

    # -- the change from eager to compiled execution

    def plan(self, seconds_per_step: float, steps: float, made: int = 0) -> None:
        """Decide where `auto` changes to compiled programs, from nothing but these.

        Args:
            seconds_per_step: Estimate of an eager step, by a model of its work and not by a clock.
            steps: Steps that the run takes in all; infinite where nothing bounds it.
            made: Steps that the algorithm has made: eager ones, unless `compiled_since` says otherwise.
        """
        if not self.falls_back or self.fell_back or self.device.type == "cuda" or self.mode == "compile":
            return
        self.prepares = False  # of a run before, which was interrupted
        eager_seconds = _CHANGE_SECONDS_UNKNOWN if math.isinf(steps) else _CHANGE_SECONDS
        self.target = "compile" if steps * seconds_per_step >= _WORTH_SECONDS else "eager"
        planned = max(math.ceil(eager_seconds / seconds_per_step), made)
        if self.compiled_since is not None:
            planned = self.compiled_since
        self.starts_at = planned if self.target == "compile" else 0
        self.due = math.inf if not self.starts_at else self.starts_at // 4 if math.isinf(steps) else 0

    @property
    def _later(self) -> FixedMode:
        """The mode that may come into force: with `auto` a later run may be long enough, though this one is not."""
        if not self.falls_back:
            return self.target
        return "graph" if self.device.type == "cuda" else "compile"

    def begin_step(self, step: int) -> None:
        """Begin to have programs compiled, or change to them, where a step is the one for it.

        Args:
            step: The algorithm's own, counted from 0.
        """
        if step < self.due:
            return
        self.prepares, self.due = step < self.starts_at, self.starts_at
        if self.prepares:
            self._begin_compiler()
        if step >= self.starts_at:
            self.mode, self.threads.eager, self.due = "compile", False, math.inf
            self.compiled_since = self.starts_at

    def fall_back(self) -> None:
        """Run eagerly from now on, with `auto`."""
        self.mode = self.target = "eager"
        self.prepares, self.threads.eager, self.due, self.fell_back = False, True, math.inf, True

    def give_up(self, error: ProgramError) -> None:
        """Run eagerly from now on, with a warning, because programs cannot be had.

        Args:
            error: Why.

        Raises:
            RuntimeError: The error that was given, unless the mode is `auto`.
        """
        if not self.falls_back:
            raise error
        self.fall_back()
        warnings.warn(f"{error} Running eagerly.", RuntimeWarning, stacklevel=4)

    @staticmethod
    def announce(say: Callable[[str], None]) -> None:
        """Have it said where a run waits for the compiler.

        Args:
            say: Called with a line of text.
        """
        compiler().say = say

    def remembers(self, fact: str, made_of: MadeOf) -> bool:
        """Whether an earlier process has found something to be so of the same objects.

        Args:
            fact: A word for what it has found.
            made_of: Returns the objects, see `program`.
        """
        mark = fingerprint(made_of())
        return mark is not None and compiler().artifacts.noted(key_of(fact, mark.text)) is not None

    def remember(self, fact: str, made_of: MadeOf) -> None:
        """Let later processes know that something is so of objects like these.

        Args:
            fact: A word for it.
            made_of: Returns the objects, see `program`.
        """
        mark = fingerprint(made_of())
        if mark is not None:
            compiler().artifacts.note(key_of(fact, mark.text), {"is": fact})

    @contextlib.contextmanager
    def ahead(self) -> Iterator[None]:
        """Let what depends on the mode be as it will be, to prepare programs."""
        before, self.mode, self.threads.eager = self.mode, self.target, False
        try:
            yield
        finally:
            self.mode, self.threads.eager = before, before == "eager"

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        """Return the context in which a policy's matmuls run in the chosen precision."""
        if self.precision != "bf16":
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, dtype=torch.bfloat16)

    def program(
        self, function: Callable[..., Sequence[Tensor]], num_fixed: int = 0, made_of: MadeOf | None = None
    ) -> Program:
        """Make a program of a function of tensors.

        Args:
            function: Takes tensors and returns a sequence of tensors, each `[*]`. It may write to its arguments, in
                place, and to memory that stays where it is; what else it reads must stay the same tensors, though their
                values may change.
            num_fixed: How many of the first arguments are the same tensors in every call. Only those and what the
                function holds itself may be written to.
            made_of: Returns the objects whose attributes and code decide what the function does, beside its own code. A
                program that another process has had compiled of such is then found without tracing; None always traces.

        Returns:
            Takes and returns the same. A call raises `ProgramError` where the function cannot be compiled or captured,
            unless the mode is `auto`.
        """
        kind = self._later
        if kind == "eager":
            return function
        program = CompiledProgram(function, made_of) if kind == "compile" else CapturedProgram(function, num_fixed)
        return _Guarded(self, program, function)

    def split(self, function: Callable[..., Sequence[Tensor]], num_fixed: int = 0) -> Program:
        """Make programs of a function of tensors that adds up over ranks on its way.

        Args:
            function: Takes and returns tensors `[*]`, see `program`.
            num_fixed: How many of the first arguments are the same tensors in every call.

        Returns:
            Takes and returns the same.
        """
        kind = self._later
        if kind == "eager":
            return function
        make: Make = CapturedProgram
        if kind == "compile":
            make = _compiled
        return _Guarded(self, SplitProgram(function, num_fixed, make, kind), function)

    def split_loop(self, function: Callable[..., Sequence[Tensor]], num_state: int, num_items: int) -> Program:
        """Make a loop of a function that adds up over ranks.

        Args:
            function: Is called for one item after the other, see `loop`; its state, of tensors `[*]`, must stay where
                it is.
            num_state: How many of the first arguments are the state.
            num_items: How many of the last arguments are items, each `[n, *]`.

        Returns:
            Takes the same, with all items, and returns the results of all, each `[n, *]`, see `loop`.
        """
        return SplitLoop(self.split(function, num_state), num_state, num_items, host_looks=self.host_looks)

    def loop(
        self,
        function: Callable[..., Sequence[Tensor]],
        num_state: int,
        num_items: int = 1,
        *,
        ends: bool = False,
        made_of: MadeOf | None = None,
    ) -> Program:
        """Make a program that calls a function for one item after the other; on the CPU compiled as one.

        Args:
            function: Takes the state, other tensors, and one slice of each of the items; changes the state in place,
                and returns tensors.
            num_state: How many of the first arguments are the state.
            num_items: How many of the last arguments are items, each `[n, *]`.
            ends: Whether the last tensor that the function returns is a 0-d bool: whether to go on to the next item.
            made_of: Returns the objects that decide what the function does, see `program`.

        Returns:
            Takes the same, with all items, and returns the results of all, each `[n, *]`; 0 for items after the one
            that ended it.
        """
        options: Any = {"ends": ends, "host_looks": self.host_looks}
        loop, kind = Loop(function, num_state, num_items, **options), self._later
        if kind == "eager":
            return loop
        program: CompiledProgram | CapturedLoop | Loop
        if kind == "graph":
            program = CapturedLoop(loop)
        elif self.device.type == "cpu":
            program = CompiledLoop(loop, made_of)
        else:  # kernels are launched ahead of what they compute, so that Python between the calls costs little
            program = Loop(CompiledProgram(function), num_state, num_items, **options)
        return _Guarded(self, program, loop)


def _compiled(function: Callable[..., Sequence[Tensor]], num_fixed: int) -> CompiledProgram:
    """Make a piece of a function into a program; which arguments stay the same does not matter."""
    return CompiledProgram(function)


class _Guarded:
    """The program made of a function; the function itself while execution is eager, and where `auto` falls back.

    Args:
        execution: Decides which.
        made: The program.
        function: The function.
    """

    def __init__(self, execution: Execution, made: Program, function: Program) -> None:
        self.execution = execution
        self.made = made
        self.function = function

    def __call__(self, *tensors: Tensor) -> Sequence[Tensor]:
        if self.execution.mode == "eager":
            return self.function(*tensors)
        try:
            return self.made(*tensors)
        except ProgramError as error:
            self.execution.give_up(error)
            return self.function(*tensors)

    def prepare(self, *tensors: Tensor) -> None:
        """Have the program compiled for arguments laid out like these, `[*]` each, without running it or waiting."""
        if isinstance(self.made, CompiledProgram | SplitProgram) and self.execution.target == "compile":
            try:
                self.made.prepare(*tensors)
            except ProgramError as error:
                self.execution.give_up(error)
