"""The trace of a function of tensors, and its text, which decides the program that is compiled of it."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rl8x.execution.private import has_loaded_compiler, one_fake_mode
from rl8x.importing import importing_much


class Trace(NamedTuple):
    """A traced function.

    Attributes:
        graph: Its operations; takes the function's arguments, then what it reads.
        read: The tensors that the function read beside its arguments, such as weights: a compiler would take their
            present values for constants.
    """

    graph: torch.fx.GraphModule
    read: list[Tensor]


@dataclasses.dataclass(frozen=True)
class LoopShape:
    """The arguments and results of a traced function that is called in a loop; see `Execution.loop`.

    Attributes:
        num_given: How many arguments come before the items.
        num_items: How many come after those, of which it gets one slice each.
        ends: Whether its last result says if the loop goes on.
    """

    num_given: int
    num_items: int
    ends: bool

    def first(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return the tensors of the first call: `tensors` `[*]`, of the items `[n, *]` among them slice 0."""
        last = self.num_given + self.num_items
        return [*tensors[: self.num_given], *[items[0] for items in tensors[self.num_given : last]], *tensors[last:]]


@dataclasses.dataclass(frozen=True)
class ProgramDescription:
    """A program as plain data, from which another process compiles it.

    Attributes:
        code: Source of the traced graph, as torch.fx writes it.
        inputs: Shape, strides and dtype of each input of the graph, or of the loop, whose items are `[n, *]`.
        loop: How the graph is called in a loop; None calls it once.
        threads: CPU threads that share a loop over memory; written into the code.
    """

    code: str
    inputs: tuple[tuple[tuple[int, ...], tuple[int, ...], str], ...]
    loop: LoopShape | None
    threads: int

    def to_json(self) -> str:
        """Write it as JSON, always the same text for the same program."""
        return json.dumps(dataclasses.asdict(self), sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> ProgramDescription:
        """Read what `to_json` wrote."""
        fields = json.loads(text)
        loop = fields.pop("loop")
        fields["inputs"] = tuple((tuple(shape), tuple(stride), dtype) for shape, stride, dtype in fields["inputs"])
        return cls(**fields, loop=None if loop is None else LoopShape(**loop))


def describe_program(
    graph: torch.fx.GraphModule, examples: Sequence[Tensor], loop: LoopShape | None = None
) -> ProgramDescription:
    """Write a traced graph down.

    Args:
        graph: The graph.
        examples: Arguments of the function, or of the loop, `[*]` each.
        loop: How the graph is called in a loop.
    """
    return ProgramDescription(
        code=graph.code,
        inputs=tuple((tuple(each.shape), each.stride(), str(each.dtype).removeprefix("torch.")) for each in examples),
        loop=loop,
        threads=torch.get_num_threads(),
    )


def trace(function: Callable[..., Sequence[Tensor]], tensors: Sequence[Tensor]) -> Trace:
    """Trace a function with tensors laid out like these, `[*]` each, without touching them."""
    from torch.fx.experimental.proxy_tensor import make_fx

    copies = [tensor.detach().clone() for tensor in tensors]
    # The first one loads torch's compiler, a second that a run without tracing need not pay.
    with contextlib.nullcontext() if has_loaded_compiler() else importing_much(), one_fake_mode():
        graph: torch.fx.GraphModule = make_fx(lambda *given: function(*given))(*copies)  # it counts a method's `self`
    return Trace(graph, _lift(graph))


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
