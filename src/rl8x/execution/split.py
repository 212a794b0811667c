"""Splits functions that call `sum_over_ranks` into programs between the sums.

A compiled or captured program cannot wait for other processes. The function is therefore traced once, cut at each
`sum_over_ranks`, and each piece becomes a program: for an update, the gradient and the optimizer's step.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from rl8x.distributed import SUM, ranks
from rl8x.execution.loops import Loop
from rl8x.execution.private import is_view, written_by
from rl8x.execution.programs import ProgramError, layout_of, prepare
from rl8x.execution.traces import trace

Function = Callable[..., Sequence[Tensor]]


class Buildable(Protocol):
    """A program that can be compiled or captured before it is run."""

    def __call__(self, *tensors: Tensor) -> Sequence[Tensor]:
        """Run it."""

    def build(self, *tensors: Tensor) -> None:
        """Compile or capture it for arguments of this layout."""


Make = Callable[[Function, int], Buildable]
"""Makes a program of a function and the number of its leading arguments that are the same tensors in every call."""


class SplitProgram:
    """A function of tensors, as programs with sums over ranks between them.

    Args:
        function: The function of tensors, see `Execution.program`. If it writes to a tensor that is not a fixed
            argument, it must not read that tensor after a later sum.
        num_fixed: How many leading arguments are the same tensors in every call, see `Execution.program`.
        make: Makes the program of a piece.
        mode: The mode's name, for error messages.
    """

    def __init__(self, function: Function, num_fixed: int, make: Make, mode: str) -> None:
        self.function = function
        self.num_fixed = num_fixed
        self.make = make
        self.mode = mode
        self._ready: dict[Hashable, list[_Step]] = {}
        self._traced: dict[Hashable, list[_Step]] = {}

    def __call__(self, *tensors: Tensor) -> Sequence[Tensor]:
        """Run the pieces, with the sums between them."""
        key = layout_of(tensors)
        steps = self._ready.get(key)
        if steps is None:
            steps = self._steps(key, tensors)
            # All are built before the first sum: a rank that fails must not leave the others waiting in one.
            _rehearse(steps, tensors, lambda program, given: program.build(*given))
            self._ready[key] = steps
        with torch.no_grad():
            return _run(steps, tensors)

    def prepare(self, *tensors: Tensor) -> None:
        """Request compilation of the pieces for arguments of this layout, `[*]` each, without waiting for it."""
        key = layout_of(tensors)
        if key not in self._ready and key not in self._traced:
            _rehearse(self._steps(key, tensors), tensors, lambda program, given: prepare(program, *given))

    def _steps(self, key: Hashable, tensors: Sequence[Tensor]) -> list[_Step]:
        if key not in self._traced:
            try:
                with ranks().alone():
                    graph, read = trace(self.function, tensors)
                self._traced[key] = [self._step(piece, read) for piece in cut(graph, self.num_fixed, len(tensors))]
            except Exception as error:
                raise ProgramError(self.mode, error) from error
        return self._traced[key]

    def _step(self, piece: Piece, read: Sequence[Tensor]) -> _Step:
        return _Step(piece, self.make(piece.run, piece.num_fixed), read)


class SplitLoop(Loop):
    """A loop over items in Python whose function is a `SplitProgram`."""

    def prepare(self, *tensors: Tensor) -> None:
        """Request compilation of the function, given the loop's arguments, without waiting for it."""
        prepare(self.function, *self.first(tensors))


class Piece(NamedTuple):
    """The operations between two sums.

    Attributes:
        run: The operations, as a function of tensors.
        inputs: Names of its arguments, fixed ones first.
        num_fixed: How many of the inputs are the same tensors in every call.
        outputs: Names of its results.
        summed: Names of the output that is summed over the ranks after the piece, which is the last one, and of the
            sum; None for the last piece.
    """

    run: GraphModule
    inputs: list[str]
    num_fixed: int
    outputs: list[str]
    summed: tuple[str, str] | None


class _Step(NamedTuple):
    """A piece, its program, and the tensors that the function reads beside its arguments."""

    piece: Piece
    program: Buildable
    read: Sequence[Tensor]


def _run(steps: Sequence[_Step], tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    known = _arguments(steps, tensors)
    for piece, program, _ in steps:
        results = program(*[known[name] for name in piece.inputs])
        if piece.summed is None:
            return results
        known.update(zip(piece.outputs, results, strict=True))
        known[piece.summed[1]] = ranks().sum(known[piece.summed[0]])
    raise AssertionError("the last piece has no sum after it")


def _rehearse(steps: Sequence[_Step], tensors: Sequence[Tensor], each: Callable[[Any, Sequence[Tensor]], None]) -> None:
    """Call `each` with every program and arguments of the layout that it will get, without summing over ranks.

    The pieces run on copies, so the tensors do not change. Arguments of the whole function are passed to `each`
    themselves, since a captured program keeps references to the fixed ones.
    """
    known = _arguments(steps, tensors)
    copies = {name: tensor.detach().clone() for name, tensor in known.items()}
    for piece, program, _ in steps:
        names = piece.inputs
        each(program, [known[name] if name in known else copies[name] for name in names])
        with torch.no_grad():
            results = piece.run(*[copies[name] for name in names])
        copies.update(zip(piece.outputs, [result.detach().clone() for result in results], strict=True))
        if piece.summed is not None:
            copies[piece.summed[1]] = copies[piece.summed[0]].clone()


def _arguments(steps: Sequence[_Step], tensors: Sequence[Tensor]) -> dict[str, Tensor]:
    names = [f"argument_{i}" for i in range(len(tensors))] + [f"read_{i}" for i in range(len(steps[0].read))]
    return dict(zip(names, [*tensors, *steps[0].read], strict=True))


# -- cutting


def cut(traced: GraphModule, num_fixed: int, num_arguments: int) -> list[Piece]:
    """Cut a traced function at its sums over ranks.

    A tensor that an earlier piece computes and a later one needs becomes an output and an input. Views are recomputed
    in each piece from their base, so that they see later writes to it.

    Args:
        traced: The function; takes its arguments, then the tensors that it reads.
        num_fixed: How many leading arguments are the same tensors in every call.
        num_arguments: How many arguments there are.

    Raises:
        ValueError: If a piece writes to a tensor that another piece has computed.
    """
    nodes = list(traced.graph.nodes)
    for node in nodes:
        if len(written := written_by(node)) == 1:  # an in-place operator returns the tensor that it writes
            node.replace_all_uses_with(written[0])
    arguments = [node for node in nodes if node.op == "placeholder"]
    names = {
        node: f"argument_{i}" if i < num_arguments else f"read_{i - num_arguments}" for i, node in enumerate(arguments)
    }
    stays = {*arguments[:num_fixed], *arguments[num_arguments:]}
    sums = [node for node in nodes if node.target is SUM]
    stages = dict[Node, int]()
    for node in nodes[len(arguments) : -1]:
        names[node] = node.name
        # An element of a tuple of results belongs to the piece of the operator that returned the tuple.
        stages[node] = stages[node.args[0]] if node.target is operator.getitem else sum(each in stages for each in sums)
    _check_writes(stages)
    wanted = [[node.args[0]] for node in sums] + [list(nodes[-1].args[0])]
    operations = [[node for node in stages if stages[node] == i and node.target is not SUM] for i in range(len(wanted))]
    taken = [_taken(each, needed) for each, needed in zip(operations, wanted, strict=True)]
    pieces = []
    for stage, needed in enumerate(wanted):
        later = dict.fromkeys(node for each in taken[stage + 1 :] for node in each)
        given = [node for node in later if stages.get(node) == stage and node.target is not SUM and node not in needed]
        inputs = sorted(taken[stage], key=lambda node: node not in stays)
        graph = _graph(inputs, operations[stage], [*given, *needed], names)
        num_staying, outputs = sum(node in stays for node in inputs), [names[node] for node in (*given, *needed)]
        summed = (names[needed[0]], names[sums[stage]]) if stage < len(sums) else None
        pieces.append(Piece(graph, [names[node] for node in inputs], num_staying, outputs, summed))
    return pieces


def _check_writes(stages: dict[Node, int]) -> None:
    """Raise if a piece writes to a tensor that an earlier piece computed, of which a captured program has a copy."""
    for node, stage in stages.items():
        for written in written_by(node):
            base = written
            while is_view(base):
                base = base.args[0]
            if base.target is SUM:
                lost = any(stages.get(user, stage) > stage for user in base.users)
            else:
                lost = stages.get(base, stage) != stage
            if lost:
                raise ValueError(f"{node.target} writes to a tensor that is also read beyond a sum over ranks")


def _taken(operations: Sequence[Node], needed: Sequence[Node]) -> list[Node]:
    """Return the nodes that a piece takes from outside: what its operations and results need, with views resolved."""
    own, taken, left = set(operations), dict[Node, None](), list(needed)
    for node in operations:
        left += node.all_input_nodes
    while left:
        node = left.pop()
        if node in own or node in taken:
            continue
        if is_view(node):
            own.add(node)
            left += node.all_input_nodes
        else:
            taken[node] = None
    return sorted(taken, key=lambda node: node.name)


def _graph(
    inputs: Sequence[Node], operations: Sequence[Node], outputs: Sequence[Node], names: dict[Node, str]
) -> GraphModule:
    """Build the graph module of a piece from its inputs, operations and outputs in the whole graph."""
    graph = Graph()
    copies = {node: graph.placeholder(names[node]) for node in inputs}

    def own(node: Node) -> Node:
        if node not in copies:  # a view that an earlier piece also computes
            copies[node] = graph.node_copy(node, own)
        return copies[node]

    for node in operations:
        copies[node] = graph.node_copy(node, own)
    graph.output(tuple(own(node) for node in outputs))
    return GraphModule(torch.nn.Module(), graph)
