"""How programs run: the one place that compiles.

Algorithms hand over functions of tensors. Eager execution calls them as they are and is the reference. Compiled
execution traces each once for every set of shapes and has torch.compile turn the trace into fused loops. Tracing first
leaves nothing of Python in what is compiled: no module, no dict, no attribute that would have to be checked at every
call, which at small batches costs more than the arithmetic.
"""

from __future__ import annotations

import contextlib
import ctypes
import sys
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, Final, Literal, NamedTuple

import torch
import torch._inductor
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

Mode = Literal["auto", "eager", "compile"]
Precision = Literal["fp32", "tf32", "bf16"]
MODES: Final = ("auto", "eager", "compile")
PRECISIONS: Final = ("fp32", "tf32", "bf16")

# Rows times weights up to which one thread is faster than two: 512 rows of two perceptrons of 64 units a layer.
_SHARED_WORK: Final = 6_000_000

# glibc's names for what `keep_freed_memory` sets (malloc.h).
_M_TRIM_THRESHOLD: Final = -1
_M_TOP_PAD: Final = -2
_M_MMAP_MAX: Final = -4


class Execution:
    """How the programs of one algorithm run.

    Args:
        mode: `"eager"`, `"compile"`, or `"auto"`, which is eager: compiling costs 10 to 40 s, which only long runs earn
            back.
        precision: `"fp32"`; `"tf32"`: products in TF32 on CUDA; `"bf16"`: products in bfloat16, all else in float32.
        device: Where the programs run.

    Raises:
        ValueError: If the precision is not to be had on the device.
    """

    def __init__(self, mode: Mode, precision: Precision, device: torch.device) -> None:
        if precision == "tf32" and device.type != "cuda":
            raise ValueError(f"precision='tf32' needs a CUDA device; got {device}. Use 'fp32' or 'bf16'.")
        self.mode: Literal["eager", "compile"] = "compile" if mode == "compile" else "eager"
        self.precision = precision
        self.device = device
        if device.type == "cuda":
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
        threads = torch.get_num_threads()
        if self.device.type != "cpu" or threads == 1 or work > _SHARED_WORK:
            yield
            return
        torch.set_num_threads(1)
        try:
            yield
        finally:
            torch.set_num_threads(threads)

    def program(self, function: Callable[..., Sequence[Tensor]]) -> Callable[..., Sequence[Tensor]]:
        """Make a program of a function of tensors.

        Args:
            function: Takes tensors and returns a sequence of tensors. It may write to its arguments, in place, and to
                nothing else; what else it reads must stay the same tensors, though their values may change.
        """
        return function if self.mode == "eager" else CompiledProgram(function)


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
        record, read = self.trace(tensors)
        if not self.compiles:
            return _Ready(record, read)
        with torch.no_grad():
            return _Ready(self._compile(record, [*tensors, *read]), read)

    def trace(self, tensors: Sequence[Tensor]) -> tuple[torch.fx.GraphModule, list[Tensor]]:
        """Record what the function does with tensors laid out like these, without touching them.

        Returns:
            The record, and the tensors that the function read beside its arguments, such as weights; the record takes
            them as further arguments, since a compiler would take their present values for constants.
        """
        copies = [tensor.detach().clone() for tensor in tensors]
        graph: torch.fx.GraphModule = make_fx(self.function)(*copies)
        read = _lift(graph)
        # Recorded once more: the compiler wants to know of every argument what only a recording tells.
        return make_fx(graph)(*copies, *[tensor.clone() for tensor in read]), read

    @staticmethod
    def _compile(record: torch.fx.GraphModule, examples: Sequence[Tensor]) -> Callable[..., Sequence[Tensor]]:
        on_cpu = all(tensor.device.type == "cpu" for tensor in examples)
        # The number of threads is written into the code: as a setting it is part of the compiler's cache key.
        patches = {"cpp_wrapper": True, "cpp.threads": torch.get_num_threads()} if on_cpu else {}
        return torch._inductor.standalone_compile(
            record, list(examples), dynamic_shapes="from_example_inputs", options={"config_patches": patches}
        )


class _Ready(NamedTuple):
    """A program for one layout of its arguments, and what it reads beside them."""

    run: Callable[..., Sequence[Tensor]]
    read: Sequence[Tensor]


def _lift(record: torch.fx.GraphModule) -> list[Tensor]:
    """Turn the tensors that a record holds into further arguments, and return them in order."""
    graph, lifted, nodes = record.graph, [], {}
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


def keep_freed_memory() -> None:
    """Have the C library keep the memory that tensors free, for the next ones, instead of giving it back at once.

    Every pass over a minibatch frees and takes the same few megabytes. Given back to the system and taken again, each
    page is zeroed and mapped anew, which costs more than the arithmetic on it. Does nothing where the library is not
    glibc.
    """
    if not sys.platform.startswith("linux"):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_MAX, 0)
        mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)
        mallopt(_M_TOP_PAD, 64 * 2**20)
