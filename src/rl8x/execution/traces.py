"""Traces of functions of tensors, and their texts, from which they are compiled."""

from __future__ import annotations

import json
import operator
from collections.abc import Callable, MutableMapping, Sequence
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from rl8x.execution.private import TorchDispatchMode, tree_flatten, tree_unflatten

LIBRARY: Final[Any] = torch.library.Library("rl8x", "DEF")  # type: ignore[no-untyped-call]
LIBRARY.define("kept(Tensor x) -> Tensor")
LIBRARY.impl("kept", torch.clone, "CompositeExplicitAutograd")
KEPT: Final = torch.ops.rl8x.kept.default
"""Clones a tensor to memory of its own, also in programs; traces contain it in place of every clone.

Inductor (torch 2.13 and 2.14) takes a clone of an argument for the argument itself, and so gives both the new value in

    old = now.clone(); now.copy_(new); before.copy_(old)
"""


class Trace(NamedTuple):
    """A traced function. The graph takes its arguments, then `read`: to compilers, other tensors are constants."""

    graph: torch.fx.GraphModule
    read: list[Tensor]  # tensors that it read other than its arguments, such as weights
    results: list[tuple[torch.Size, torch.dtype]]  # shape and dtype of each
    inputs: list[tuple[torch.Size, tuple[int, ...], str]]  # shape, strides and dtype of each

    @property
    def text(self) -> str:
        """JSON from which another process compiles the trace: torch.fx's code, the inputs, and the thread count."""
        return json.dumps([self.graph.code, self.inputs, torch.get_num_threads()])


def trace(function: Callable[..., Sequence[Tensor]], tensors: Sequence[Tensor]) -> Trace:
    """Trace a function on copies of tensors, `[*]` each, so that they do not change.

    It raises an error if the function reads a value that may differ in the next call, or if an operator has an argument
    that cannot be part of a graph, such as a generator.
    """
    copies = [tensor.detach().clone() for tensor in tensors]
    recorder = Recorder()
    for i, each in enumerate(copies):
        recorder.nodes[each] = recorder.placeholder(f"arg_{i}")
    caches = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)  # weights cast before the trace would become constants
    try:
        with recorder:
            results = function(*copies)
    finally:
        torch.set_autocast_cache_enabled(caches)
    recorder.graph.output([recorder.node(each) for each in results])
    recorder.graph.eliminate_dead_code()
    layouts = [(each.shape, each.dtype) for each in results]
    inputs = [(one.shape, one.stride(), str(one.dtype).removeprefix("torch.")) for one in (*tensors, *recorder.read)]
    return Trace(torch.fx.GraphModule(torch.nn.Module(), recorder.graph), recorder.read, layouts, inputs)


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records the operators that run, below autograd and functorch, as a graph.

    `make_fx` records the same, but imports torch's compiler, which takes seconds and 80 MB.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.graph = torch.fx.Graph()
        self.nodes: MutableMapping[Tensor, torch.fx.Node] = WeakTensorKeyDictionary()  # of arguments and results
        self.read: list[Tensor] = []  # other tensors that operators have read, which become arguments of the graph
        self._last_placeholder: torch.fx.Node | None = None
        self._argument = torch.fx.proxy.TracerBase().create_arg

    _should_skip_dynamo = bool  # returns False; else torch would import its compiler, to keep it away from this mode

    def placeholder(self, name: str) -> torch.fx.Node:
        """Add an input of the graph, after the others."""
        with self.graph.inserting_after(self._last_placeholder):
            self._last_placeholder = self.graph.placeholder(name)
        self._last_placeholder.meta["constant"] = False
        return self._last_placeholder

    def node(self, tensor: Tensor) -> torch.fx.Node:
        """Return the node of a tensor `[*]`, a new input if the function did not compute it."""
        if tensor not in self.nodes:
            self.nodes[tensor] = self.placeholder(f"read_{len(self.read)}")
            self.read.append(tensor.detach())
        return self.nodes[tensor]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator, and record it."""
        with self:
            parts = func.decompose(*args, **(kwargs or {}))
        if parts is not NotImplemented:
            return parts
        leaves, structure = tree_flatten((args, kwargs or {}))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        if torch.Tag.data_dependent_output in func.tags:
            if any(each in self.nodes and not self.nodes[each].meta["constant"] for each in tensors):
                by = ", by autograd's detection of anomalies" if torch.is_anomaly_enabled() else ""
                raise RuntimeError(f"the value of a tensor is read{by} ({func}); it may be another at the next call")
            return func(*args, **(kwargs or {}))
        is_number = func is torch.ops.aten.lift_fresh.default
        if func is torch.ops.aten.clone.default and not kwargs:
            func = KEPT
        if is_number:
            func = torch.ops.aten.clone.default  # the function may change it in place
        given = [self.node(each) if isinstance(each, Tensor) else self._argument(each) for each in leaves]
        node = self.graph.call_function(func, *tree_unflatten(given, structure))
        result = func(*args, **(kwargs or {}))
        computed = bool(tensors) and torch.Tag.nondeterministic_seeded not in func.tags
        constant = is_number or (computed and all(self.nodes[each].meta["constant"] for each in tensors))
        self._note(result, node, constant)
        return result

    def _note(self, result: Any, node: torch.fx.Node, constant: bool) -> None:
        """Record the node of a result, or of each in a tuple or list; only single numbers may be constants."""
        if isinstance(result, tuple | list):
            for i, each in enumerate(result):
                if each is not None:
                    self._note(each, self.graph.call_function(operator.getitem, (node, i)), constant)
        elif isinstance(result, Tensor):
            self.nodes[result] = node
            node.meta["constant"] = constant and result.numel() == 1
