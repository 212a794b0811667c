"""Functions of tensors compiled by Inductor: traced first, so that no Python is left in what is compiled."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, Final, NamedTuple

import torch
import torch._inductor
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from rl8x.execution import matmul
from rl8x.execution.hoisting import hoist_scalars
from rl8x.execution.loops import OPERATORS, Loop, looped
from rl8x.execution.memory import keep_small_blocks
from rl8x.execution.programs import ProgramError

# Inductor caches loops only where they are marked as cacheable: ours hold nothing but what is in their graph.
_CACHED_LOOPS: Final = {"unsafe_marked_cacheable_functions": dict.fromkeys(OPERATORS, torch.__version__)}


class CompiledProgram:
    """A function of tensors, compiled once for every layout of its arguments.

    A traced graph has no Python left in it, so Inductor gets it as it is, without the guards that `torch.compile`
    would check at every call: they cost as much as an update of a small minibatch. On the CPU a whole program is one
    call into C++.

    Args:
        function: As `Execution.program` takes it.
        compiles: Whether the traced graph is compiled, or run as it is, for comparison.
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
            graph, read = self.trace(tensors)
            with torch.no_grad():
                return _Ready(self._compile(graph, [*tensors, *read]), read)
        except Exception as error:
            raise ProgramError("compile", error) from error

    def trace(self, tensors: Sequence[Tensor]) -> tuple[torch.fx.GraphModule, list[Tensor]]:
        """Trace the function with tensors laid out like these, `[*]` each, without touching them.

        Returns:
            The graph, and the tensors that the function read beside its arguments, such as weights; the graph takes
            them as further arguments, since a compiler would take their present values for constants.
        """
        # Probed now: what is called below is traced, and has no values to compare.
        _ = matmul.has_fast_linear() and matmul.lower_linear()
        copies = [tensor.detach().clone() for tensor in tensors]
        graph: torch.fx.GraphModule = make_fx(self.function)(*copies)
        read = _lift(graph)
        # Traced once more: the compiler needs metadata of every argument, which only tracing gives.
        lifted = make_fx(graph, decomposition_table=matmul.DECOMPOSITIONS if self.compiles else None)
        traced: torch.fx.GraphModule = lifted(*copies, *[tensor.clone() for tensor in read])
        if all(tensor.device.type == "cpu" for tensor in (*copies, *read)):
            hoist_scalars(traced)
        return traced, read

    @staticmethod
    def _compile(graph: torch.fx.GraphModule, examples: Sequence[Tensor]) -> Callable[..., Sequence[Tensor]]:
        on_cpu = all(tensor.device.type == "cpu" for tensor in examples)
        if on_cpu:
            keep_small_blocks()
        # The number of threads is written into the code: as a setting it is part of the compiler's cache key.
        patches = {"cpp_wrapper": True, "cpp.threads": torch.get_num_threads(), **_CACHED_LOOPS} if on_cpu else {}
        return torch._inductor.standalone_compile(
            graph, list(examples), dynamic_shapes="from_example_inputs", options={"config_patches": patches}
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
        """Trace a loop of what the function does with one item; tensors as the loop takes them, items `[n, *]`."""
        first = self.loop.first(tensors)
        graph, read = super().trace(first)
        results = graph(*[tensor.clone() for tensor in (*first, *read)])
        read = [*read, torch.ones((), dtype=torch.bool)]
        function = looped(graph, self.loop, len(tensors) - self.loop.num_items, results)
        copies = [tensor.detach().clone() for tensor in (*tensors, *read)]
        # What an operator of a loop returns while it is traced has shapes but no values.
        return make_fx(function, tracing_mode="fake", _allow_non_fake_inputs=True)(*copies), read


class _Ready(NamedTuple):
    """A program for one layout of its arguments, and what it reads beside them."""

    run: Callable[..., Sequence[Tensor]]
    read: Sequence[Tensor]


def _lift(traced: torch.fx.GraphModule) -> list[Tensor]:
    """Turn the tensors that a traced module holds into further arguments, and return them in order."""
    graph, lifted = traced.graph, list[Tensor]()
    nodes: dict[Any, torch.fx.Node] = {}
    last = [node for node in graph.nodes if node.op == "placeholder"][-1]
    for node in [node for node in graph.nodes if node.op == "get_attr"]:
        if node.target not in nodes:
            with graph.inserting_after(last):
                last = nodes[node.target] = graph.placeholder(f"read_{len(lifted)}")
            lifted.append(getattr(traced, node.target).detach())
            delattr(traced, node.target)
        node.replace_all_uses_with(nodes[node.target])
        graph.erase_node(node)
    traced.recompile()
    return lifted
