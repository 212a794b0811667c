"""Hoists scalars out of loops in compiled CPU programs, so that each is computed once and not for every element.

Inductor fuses the computation of a scalar into the loop over the vector that it scales. The C++ compiler cannot hoist
it, since the loop also writes memory that might alias its inputs: gradient clipping and Adam's bias correction then
cost two square roots and three divisions for every 16 weights. Without hoisting, compiled PPO is 5% to 8% slower on
16 x 128 steps of Pendulum, and 5% slower on 4096 x 32 (two Xeon cores, torch 2.13).
"""

from __future__ import annotations

import functools
from typing import Any, Final

import torch
from torch import Tensor

from rl8x.execution import private

# Elements that a scalar must scale to be worth a buffer of its own.
_MANY: Final = 64
_OPERATOR: Final = type(torch.ops.aten.add.Tensor)

_LIBRARY: Final[Any] = torch.library.Library("rl8x", "FRAGMENT")  # type: ignore[no-untyped-call]
_LIBRARY.define("computed(Tensor x) -> Tensor")
_LIBRARY.impl("computed", torch.clone, "CompositeExplicitAutograd")
COMPUTED: Final = torch.ops.rl8x.computed.default


def hoist_scalars(traced: torch.fx.GraphModule) -> None:
    """Materialise each computed scalar of a traced graph that scales a vector, in place."""
    lower_computed()
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
    lower_computed()
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
def lower_computed() -> None:
    """Register the operator's lowering with Inductor, which gives its result a buffer of its own."""
    inductor = private.inductor()

    @inductor.register_lowering(COMPUTED, type_promotion_kind=None)  # type: ignore[untyped-decorator, unused-ignore]
    def lower(x: Any) -> Any:
        result = inductor.clone(x)
        result.realize()
        return result
