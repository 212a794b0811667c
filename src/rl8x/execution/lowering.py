"""Compiles a traced graph to a shared library: decompose, lower with Inductor, build the C++ that Inductor generates.

It runs in the compiler's processes, and is the only module that depends on internals of AOTInductor.
"""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final
from unittest import mock

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from rl8x.execution import adam, matmul, private
from rl8x.execution.building import build, source_of
from rl8x.execution.traces import ProgramDescription

# `vec_isa_ok`: as in `private.trust_processor_flags`.
_SETTINGS: Final = {"cpp.vec_isa_ok": True, "fx_graph_cache": False}

# Elements that a scalar must scale to be worth a buffer of its own.
_MANY: Final = 64
_OPERATOR: Final = type(torch.ops.aten.add.Tensor)
_LIBRARY: Final[Any] = torch.library.Library("rl8x", "FRAGMENT")  # type: ignore[no-untyped-call]
_LIBRARY.define("computed(Tensor x) -> Tensor")
_LIBRARY.impl("computed", torch.clone, "CompositeExplicitAutograd")
COMPUTED: Final = torch.ops.rl8x.computed.default

# Loaded once, before processes are forked. If a name is missing, each of those reports it.
with contextlib.suppress(RuntimeError):
    private.inductor()


def lower(program: str, library: Path) -> None:
    """Compile a program that `describe_program` has described to a shared library.

    Raises:
        Exception: Whatever the compilers raise.
    """
    description, inductor = ProgramDescription(**json.loads(program)), private.inductor()
    with torch.no_grad():
        graph, examples = fused(description)
        [output] = graph.graph.find_nodes(op="output")
        results = [node.meta["val"] for node in output.args[0]]

        def link(graph: Any, wrapper: str, kernels: str, operators: str | None, **_: Any) -> str:
            """Build the C++ that Inductor generated; replaces Inductor's own builder."""
            if operators or graph.constants:
                raise RuntimeError("one of its operators has no C++ function")
            build(source_of(wrapper, kernels, description, results), library)
            return str(library)

        options = {"cpp.threads": description.threads, **_SETTINGS}
        with mock.patch.object(inductor.AotCodeCompiler, "compile", link):
            inductor.aot_compile(graph, tuple(examples), options=options)


def compiled_here(graph: torch.fx.GraphModule, examples: Sequence[Tensor]) -> Callable[..., Sequence[Tensor]]:
    """Compile a traced graph for an accelerator, in this process, with arguments like the examples, `[*]` each."""
    # Traced again, since the compiler needs the metadata that tracing records for every argument.
    traced = make_fx(graph, decomposition_table=adam.DECOMPOSITIONS)(*[tensor.detach().clone() for tensor in examples])
    keep_copies(traced)
    _lower_operators()
    with torch.no_grad():
        compiled: Callable[..., Sequence[Tensor]] = private.inductor().standalone_compile(
            traced, list(examples), dynamic_shapes="from_example_inputs", options={}
        )
    return compiled


def fused(description: ProgramDescription) -> tuple[torch.fx.GraphModule, list[Tensor]]:
    """Return the graph to compile, with matmuls decomposed, and example inputs, `[*]` each."""
    # Probed before tracing, since traced tensors have no values to compare.
    matmul.has_fast_linear()
    _lower_operators()
    inputs = [
        torch.empty_strided(shape, stride, dtype=getattr(torch, dtype)).zero_()
        for shape, stride, dtype in description.inputs
    ]
    items = range(*description.items)
    inputs = [each[0] if i in items else each for i, each in enumerate(inputs)]
    names: dict[str, Any] = {"torch": torch, "device": torch.device, "inf": float("inf"), "nan": float("nan")}
    exec(description.code, names)  # the source that torch.fx generated in the parent process
    table = matmul.DECOMPOSITIONS | adam.DECOMPOSITIONS
    function = functools.partial(names["forward"], None)
    graph = make_fx(function, decomposition_table=table, **private.FAKE_TRACING)(*inputs)
    hoist_scalars(graph)
    keep_copies(graph)
    return graph, inputs


def hoist_scalars(traced: torch.fx.GraphModule) -> None:
    """Compute each scalar of a traced graph that scales a vector once, and not for every element.

    Inductor fuses the computation of a scalar into the loop over the vector. The C++ compiler cannot hoist it, since
    the loop also writes memory that might alias its inputs: gradient clipping and Adam's bias correction then cost two
    square roots and three divisions for every 16 weights. Without hoisting, compiled PPO takes 1.12 times as long on
    16 x 128 steps of Pendulum with minibatches of 64 (CPU time of one thread, Xeon, torch 2.13).
    """
    graph = traced.graph
    for node in list(graph.nodes):
        users = [user for user in node.users if _numel(user) >= _MANY] if _is_computed(node) else []
        if users:
            with graph.inserting_after(node):
                computed = graph.call_function(COMPUTED, (node,))
            computed.meta.update(node.meta)
            for user in users:
                user.replace_input_with(node, computed)
    traced.recompile()


def _is_computed(node: torch.fx.Node) -> bool:
    """Return whether a node is a floating-point scalar that is computed, rather than a view or a constant."""
    if not isinstance(node.target, _OPERATOR) or node.target.is_view or not node.all_input_nodes:
        return False
    return _numel(node) == 1 and node.meta["val"].is_floating_point()


def _numel(node: torch.fx.Node) -> int:
    value = node.meta.get("val")
    return value.numel() if isinstance(value, Tensor) else 0


def keep_copies(traced: torch.fx.GraphModule) -> None:
    """Have a traced graph keep the copy of an argument that another argument becomes after the first has changed.

    Inductor (torch 2.13) takes the copy for the argument itself, and so gives both the new value:

        old = now.clone(); now.copy_(new); before.copy_(old)
    """
    for written in traced.graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default):
        to, copied = written.args[:2]
        if copied.target is torch.ops.aten.clone.default and _memory_of(copied.args[0]) not in (None, _memory_of(to)):
            copied.target, copied.kwargs = COMPUTED, {}
    traced.recompile()


def _memory_of(node: torch.fx.Node) -> torch.fx.Node | None:
    """Return the placeholder whose memory the node shares, else None."""
    while isinstance(node.target, _OPERATOR):
        writes_in_place = node.target.__name__.partition(".")[0].endswith("_")
        if not node.target.is_view and not writes_in_place:
            break
        node = node.all_input_nodes[0]
    return node if node.op == "placeholder" else None


@functools.cache
def _lower_operators() -> None:
    """Register lowerings of our own operators with Inductor."""
    inductor = private.inductor()

    def computed(x: Any) -> Any:
        """Give the result a buffer of its own."""
        result = inductor.clone(x)
        result.realize()
        return result

    def linear(x: Any, weight: Any, bias: Any) -> Any:
        """Call oneDNN, as Inductor's own lowering does for weights that are constant."""
        node = inductor.LinearUnary
        inputs = [node.require_contiguous(node.realize_input(x)), node.realize_input(weight)]
        inputs += [] if bias is None else [node.realize_input(bias)]
        options = [*([None] if bias is None else []), "none", [-1], ""]
        size = [x.get_size()[0], weight.get_size()[0]]
        layout = inductor.FixedLayout(device=x.get_device(), dtype=x.get_dtype(), size=size)
        called = node(layout=layout, inputs=inputs, constant_args=options)
        return type(x).create(inductor.create_output_node(called))

    for operator, lowering in ((COMPUTED, computed), (matmul.LINEAR, linear)):
        inductor.register_lowering(operator, type_promotion_kind=None)(lowering)
