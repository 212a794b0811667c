"""How programs run: the one place that compiles.

Algorithms hand over functions of tensors. Eager execution calls them as they are and is the reference. Compiled
execution traces each once for every set of shapes and has torch.compile turn the trace into fused loops. Tracing first
leaves nothing of Python in what is compiled: no module, no dict, no attribute that would have to be checked at every
call, which at small batches costs more than the arithmetic.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, Final, Literal, NamedTuple

import torch
import torch._inductor
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from rl8x import products
from rl8x.hoisting import hoist_single_numbers
from rl8x.loops import OPERATORS, Loop, looped
from rl8x.malloc import keep_freed_memory, keep_small_blocks
from rl8x.output import message_of
from rl8x.workers import Workers

Mode = Literal["auto", "eager", "compile", "graph"]
Precision = Literal["fp32", "tf32", "bf16"]
MODES: Final = ("auto", "eager", "compile", "graph")
Program = Callable[..., Sequence[Tensor]]
Capture = Callable[[Callable[[], Sequence[Tensor]]], tuple[Callable[[], object], Sequence[Tensor]]]
PRECISIONS: Final = ("fp32", "tf32", "bf16")

# Rows times weights up to which one thread is faster than two: 512 rows of two perceptrons of 64 units a layer.
_SHARED_WORK: Final = 6_000_000
# The same for workers in eager execution, which take turns at Python between their operations: 2,500 such rows.
_SHARED_WORK_EAGER: Final = 24_000_000

# Inductor caches loops only where it is told that they may be: ours hold nothing but what is in their record.
_CACHED_LOOPS: Final = {"unsafe_marked_cacheable_functions": dict.fromkeys(OPERATORS, torch.__version__)}

# Runs before a capture, as torch's notes on CUDA graphs advise.
_WARM_UPS: Final = 3


class Execution:
    """How the programs of one algorithm run.

    Args:
        mode: `"eager"`; `"compile"`; `"graph"`: kernels captured once on CUDA and replayed; or `"auto"`: graph on CUDA,
            elsewhere eager, since compiling costs seconds that only longer runs earn back.
        precision: `"fp32"`; `"tf32"`: products in TF32 on CUDA; `"bf16"`: products in bfloat16, all else in float32.
        device: Where the programs run.

    Attributes:
        mode: The mode in force.
        host_looks: Whether the host may look at values: on the CPU it costs nothing, elsewhere it waits for all work.

    Raises:
        ValueError: If mode or precision are not to be had on the device.
    """

    def __init__(self, mode: Mode, precision: Precision, device: torch.device) -> None:
        on_cuda = device.type == "cuda"
        for name, value, instead in (("precision", precision, "tf32"), ("execution", mode, "graph")):
            if value == instead and not on_cuda:
                others = "'fp32' or 'bf16'" if name == "precision" else "'eager' or 'compile'"
                raise ValueError(f"{name}={value!r} needs a CUDA device; got {device}. Use {others}.")
        self.falls_back = mode == "auto"
        self.mode: Literal["eager", "compile", "graph"] = ("graph" if on_cuda else "eager") if mode == "auto" else mode
        self.precision = precision
        self.device = device
        self.host_looks = device.type == "cpu"
        self._workers: dict[int, Workers] = {}
        if on_cuda:
            torch.backends.cuda.matmul.allow_tf32 = precision == "tf32"
        if device.type == "cpu":
            keep_freed_memory()

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        """Return the context in which a policy's products run in the chosen precision."""
        if self.precision != "bf16":
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, dtype=torch.bfloat16)

    @contextlib.contextmanager
    def threads_for(self, work: int) -> Iterator[None]:
        """Use one thread on the CPU for what is too small to be shared: threads would wait for each other longer.

        Args:
            work: Rows times weights of a matrix product.
        """
        with self._threads(torch.get_num_threads() if self.shares(work) else 1):
            yield

    @staticmethod
    def shares(work: int) -> bool:
        """Say whether so many rows times weights are enough for more than one thread."""
        return work > _SHARED_WORK

    @contextlib.contextmanager
    def workers_for(self, work: int) -> Iterator[Workers]:
        """Give as many workers as there are threads on the CPU, where that is not too small to be shared; else one.

        Threads that share every operation wait for each other after each, and take their rows from another's cache.
        Workers have their own rows from the first operation to the last; each runs its operations on one thread.

        Args:
            work: Rows times weights of a matrix product.
        """
        shares = work > _SHARED_WORK_EAGER if self.mode == "eager" else self.shares(work)
        count = torch.get_num_threads() if self.device.type == "cpu" and shares else 1
        if count not in self._workers:
            self._workers[count] = Workers(count)
        with self._threads(1):
            yield self._workers[count]

    @contextlib.contextmanager
    def _threads(self, count: int) -> Iterator[None]:
        before = torch.get_num_threads()
        if self.device.type != "cpu" or count == before:
            yield
            return
        torch.set_num_threads(count)
        try:
            yield
        finally:
            torch.set_num_threads(before)

    def program(self, function: Callable[..., Sequence[Tensor]], num_fixed: int = 0) -> Program:
        """Make a program of a function of tensors.

        Args:
            function: Takes tensors and returns a sequence of tensors. It may write to its arguments, in place, and to
                memory that stays where it is; what else it reads must stay the same tensors, though their values may
                change.
            num_fixed: How many of the first arguments are the same tensors in every call. Only those and what the
                function holds itself may be written to.
        """
        if self.mode == "eager":
            return function
        made = CompiledProgram(function) if self.mode == "compile" else CapturedProgram(function, num_fixed)
        return self._guarded(made, function)

    def loop(
        self, function: Callable[..., Sequence[Tensor]], num_state: int, num_items: int = 1, *, ends: bool = False
    ) -> Program:
        """Make a program that calls a function for one item after the other; on the CPU compiled as one.

        Args:
            function: Takes the state, other tensors, and one slice of each of the items; changes the state in place,
                and returns tensors.
            num_state: How many of the first arguments are the state.
            num_items: How many of the last arguments are items, each `[n, *]`.
            ends: Whether the last tensor that the function returns is a 0-d bool: whether to go on to the next item.

        Returns:
            Takes the same, with all items, and returns the results of all, each `[n, *]`; 0 for items after the one
            that ended it.
        """
        options: Any = {"ends": ends, "host_looks": self.host_looks}
        loop = Loop(function, num_state, num_items, **options)
        if self.mode == "eager":
            return loop
        made: Program
        if self.mode == "graph":
            made = CapturedLoop(loop)
        elif self.device.type == "cpu":
            made = CompiledLoop(loop)
        else:  # kernels are launched ahead of what they compute, so that Python between the calls costs little
            made = Loop(CompiledProgram(function), num_state, num_items, **options)
        return self._guarded(made, loop)

    def _guarded(self, made: Program, function: Program) -> Program:
        """Run what was made of a function, or the function itself where that cannot be and `auto` may fall back."""

        def run(*tensors: Tensor) -> Sequence[Tensor]:
            if self.mode == "eager":
                return function(*tensors)
            try:
                return made(*tensors)
            except ProgramError as error:
                if not self.falls_back:
                    raise
                self.mode = "eager"
                warnings.warn(f"{error} Running eagerly.", RuntimeWarning, stacklevel=2)
                return function(*tensors)

        return run


class ProgramError(RuntimeError):
    """A function could not be compiled or captured."""

    def __init__(self, mode: str, error: Exception) -> None:
        lines = message_of(error).strip().splitlines()
        reason = lines[0].rstrip(".") if lines else type(error).__name__
        super().__init__(f"execution={mode!r} is not possible here: {reason}. execution='eager' always is.")


class CompiledProgram:
    """A function of tensors, compiled once for every layout of its arguments.

    What is recorded has no Python left in it, so Inductor gets it as it is, without the guards that `torch.compile`
    would check at every call: they cost as much as an update of a small minibatch. On the CPU a whole program is one
    call into C++.

    Args:
        function: As `Execution.program` takes it.
        compiles: Whether what is recorded is compiled, or run as it is, for comparison.
    """

    def __init__(self, function: Callable[..., Sequence[Tensor]], *, compiles: bool = True) -> None:
        self.function = function
        self.compiles = compiles
        self._ready: dict[Hashable, _Ready] = {}

    def __call__(self, *tensors: Tensor) -> Sequence[Tensor]:
        """Run the program."""
        key = tuple([(tensor.shape, tensor.stride()) for tensor in tensors])
        ready = self._ready.get(key)
        if ready is None:
            ready = self._ready[key] = self._prepare(tensors)
        with torch.no_grad():
            return ready.run(*tensors, *ready.read)

    def _prepare(self, tensors: Sequence[Tensor]) -> _Ready:
        if not self.compiles:
            return _Ready(*self.trace(tensors))
        try:
            record, read = self.trace(tensors)
            with torch.no_grad():
                return _Ready(self._compile(record, [*tensors, *read]), read)
        except Exception as error:
            raise ProgramError("compile", error) from error

    def trace(self, tensors: Sequence[Tensor]) -> tuple[torch.fx.GraphModule, list[Tensor]]:
        """Record what the function does with tensors laid out like these, without touching them.

        Returns:
            The record, and the tensors that the function read beside its arguments, such as weights; the record takes
            them as further arguments, since a compiler would take their present values for constants.
        """
        # Asked now: what is called below is recorded, and has no values to compare.
        _ = products.has_fast_linear() and products.lower_linear()
        copies = [tensor.detach().clone() for tensor in tensors]
        graph: torch.fx.GraphModule = make_fx(self.function)(*copies)
        read = _lift(graph)
        # Recorded once more: the compiler wants to know of every argument what only a recording tells.
        record = make_fx(graph, decomposition_table=products.DECOMPOSITIONS if self.compiles else None)
        recorded: torch.fx.GraphModule = record(*copies, *[tensor.clone() for tensor in read])
        if all(tensor.device.type == "cpu" for tensor in (*copies, *read)):
            hoist_single_numbers(recorded)
        return recorded, read

    @staticmethod
    def _compile(record: torch.fx.GraphModule, examples: Sequence[Tensor]) -> Callable[..., Sequence[Tensor]]:
        on_cpu = all(tensor.device.type == "cpu" for tensor in examples)
        if on_cpu:
            keep_small_blocks()
        # The number of threads is written into the code: as a setting it is part of the compiler's cache key.
        patches = {"cpp_wrapper": True, "cpp.threads": torch.get_num_threads(), **_CACHED_LOOPS} if on_cpu else {}
        return torch._inductor.standalone_compile(
            record, list(examples), dynamic_shapes="from_example_inputs", options={"config_patches": patches}
        )


class CompiledLoop(CompiledProgram):
    """A loop that runs in C++: beside a small minibatch's arithmetic, what Python does for each counts.

    Args:
        loop: What is called for each item.
        compiles: As for `CompiledProgram`.
    """

    def __init__(self, loop: Loop, *, compiles: bool = True) -> None:
        super().__init__(loop.function, compiles=compiles)
        self.loop = loop

    def trace(self, tensors: Sequence[Tensor]) -> tuple[torch.fx.GraphModule, list[Tensor]]:
        """Record a loop of what the function does with one item."""
        first = self.loop.first(tensors)
        record, read = super().trace(first)
        results = record(*[tensor.clone() for tensor in (*first, *read)])
        read = [*read, torch.ones((), dtype=torch.bool)]
        function = looped(record, self.loop, len(tensors) - self.loop.num_items, results)
        copies = [tensor.detach().clone() for tensor in (*tensors, *read)]
        # What an operator of a loop returns while it is recorded has shapes but no values.
        return make_fx(function, tracing_mode="fake", _allow_non_fake_inputs=True)(*copies), read


class CapturedProgram:
    """A function of tensors whose kernels are captured once for every layout of its arguments, and replayed.

    Args:
        function: As `Execution.program` takes it.
        num_fixed: As `Execution.program` takes it; the other arguments are copied to where the capture reads them.
        capture: Captures; see `capture_cuda`.
    """

    def __init__(
        self, function: Callable[..., Sequence[Tensor]], num_fixed: int = 0, capture: Capture | None = None
    ) -> None:
        self.function = function
        self.num_fixed = num_fixed
        self.capture = capture or capture_cuda
        self._captured: dict[Hashable, _Captured] = {}

    def __call__(self, *tensors: Tensor) -> Sequence[Tensor]:
        """Replay the program; the results are the caller's to keep."""
        key = tuple([(tensor.shape, tensor.stride()) for tensor in tensors])
        captured = self._captured.get(key)
        if captured is None:
            captured = self._captured[key] = self._make(tensors)
        with torch.no_grad():
            for place, tensor in zip(captured.varying, tensors[self.num_fixed :], strict=True):
                place.copy_(tensor)
            captured.replay()
            return [result.clone() for result in captured.results]

    def _make(self, tensors: Sequence[Tensor]) -> _Captured:
        fixed = list(tensors[: self.num_fixed])
        varying = [tensor.clone() for tensor in tensors[self.num_fixed :]]
        before = [tensor.clone() for tensor in fixed]
        try:
            with torch.no_grad():
                # A capture wants kernels and libraries loaded: a few runs do that, and are undone.
                replay, results = self.capture(lambda: self.function(*fixed, *varying))
        except Exception as error:
            raise ProgramError("graph", error) from error
        finally:
            for tensor, old in zip(fixed, before, strict=True):
                tensor.copy_(old)
        return _Captured(varying, replay, results)


class CapturedLoop:
    """A loop whose kernels, those of all items, are captured once for every layout of its arguments.

    Args:
        loop: What is called for each item; its state is copied to where the capture has it and back, and need not stay
            where it is.
        capture: Captures; see `capture_cuda`.
    """

    def __init__(self, loop: Loop, capture: Capture | None = None) -> None:
        self.loop = loop
        self._program = CapturedProgram(self._with_state, capture=capture)

    def __call__(self, *tensors: Tensor) -> Sequence[Tensor]:
        """Replay the loop."""
        results = self._program(*tensors)
        for tensor, done in zip(tensors, results[: self.loop.num_state], strict=False):
            tensor.copy_(done)
        return results[self.loop.num_state :]

    def _with_state(self, *tensors: Tensor) -> Sequence[Tensor]:
        results = self.loop(*tensors)
        return [*tensors[: self.loop.num_state], *results]


class _Captured(NamedTuple):
    """What was captured: where its arguments are read, how it is replayed, where its results are."""

    varying: Sequence[Tensor]
    replay: Callable[[], object]
    results: Sequence[Tensor]


def capture_cuda(function: Callable[[], Sequence[Tensor]]) -> tuple[Callable[[], object], Sequence[Tensor]]:
    """Capture what a function does on a CUDA device, after running it a few times.

    Returns:
        What replays it, and where its results are after each replay.
    """
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(_WARM_UPS):
            function()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = function()
    return graph.replay, results


class _Ready(NamedTuple):
    """A program for one layout of its arguments, and what it reads beside them."""

    run: Callable[..., Sequence[Tensor]]
    read: Sequence[Tensor]


def _lift(record: torch.fx.GraphModule) -> list[Tensor]:
    """Turn the tensors that a record holds into further arguments, and return them in order."""
    graph, lifted = record.graph, list[Tensor]()
    nodes: dict[Any, torch.fx.Node] = {}
    last = [node for node in graph.nodes if node.op == "placeholder"][-1]
    for node in [node for node in graph.nodes if node.op == "get_attr"]:
        if node.target not in nodes:
            with graph.inserting_after(last):
                last = nodes[node.target] = graph.placeholder(f"read_{len(lifted)}")
            lifted.append(getattr(record, node.target).detach())
            delattr(record, node.target)
        node.replace_all_uses_with(nodes[node.target])
        graph.erase_node(node)
    record.recompile()
    return lifted
