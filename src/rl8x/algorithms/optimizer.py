"""Weights as one flat vector, and its optimizer; the update rules are in `optimizer_rules.py`.

An optimizer's overhead grows with the number of tensors. All weights of a policy are one vector, their gradients
another, and the modules hold views: clipping is one norm, and a step is a few in-place vector operations, by a function
that runs eagerly and inside a compiled update.

State dicts have the layout of `torch.optim`, by weight name, so that either loads what the other saved.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from rl8x.algorithms.optimizer_rules import STEP, Rule
from rl8x.rollouts.finite import any_not_finite

# Floats in a cache line; matmuls with views that are not aligned to one are slower.
_ALIGNMENT = 16


def clip_and_apply(
    rule: Rule,
    state: Sequence[Tensor],
    gradient: Tensor,
    lr: Tensor,
    *,
    max_grad_norm: float | None,
    active: Tensor | None = None,
) -> Tensor:
    """Clip a gradient to an L2 norm and make a step of a rule, in place; return the norm before clipping, 0-d.

    The `state` is the weights, `[size]`, and the rule's moments; where `active`, 0-d bool, is False, it stays as it is.
    """
    weights, *moments = state
    before = [] if active is None else [tensor.clone() for tensor in state]
    norm: Tensor = torch.linalg.vector_norm(gradient)
    if max_grad_norm is not None:
        gradient.mul_((max_grad_norm / (norm + 1e-6)).clamp(max=1.0))
    rule.apply(weights, gradient, moments, lr)
    for tensor, old in zip(state, before, strict=False):
        assert active is not None
        tensor.copy_(torch.where(active, tensor, old))
    return norm


@torch.no_grad()
def updates_not_finite(rows: Tensor, norms: Sequence[bool], weights: Iterable[Tensor]) -> dict[str, Tensor]:
    """Return whether losses, gradients or weights of a step's updates are non-finite, 0-d bools by metric.

    Only the first bad update of the rows, `[updates, metrics]`, is examined: after it all numbers are bad. `norms` says
    which metrics are gradient norms.
    """
    bad = ~torch.isfinite(rows)
    first = bad.any(1).to(torch.float32).argmax()
    # Indexing with a 0-d tensor would be a host sync.
    worst = bad.index_select(0, first.reshape(1)).squeeze(0)
    of_gradients = [is_bad for is_bad, is_norm in zip(worst, norms, strict=True) if is_norm]
    of_losses = [is_bad for is_bad, is_norm in zip(worst, norms, strict=True) if not is_norm]
    return {
        "finite/losses": torch.stack(of_losses).any(),
        "finite/gradients": torch.stack(of_gradients).any(),
        "finite/parameters": any_not_finite(weights),
    }


class FlatWeights:
    """A set of weights as one vector, `[size]`; the modules' weights, if they require gradients, are views of it."""

    def __init__(self, weights: Iterable[tuple[str, nn.Parameter]]) -> None:
        trained = [(name, parameter) for name, parameter in weights if parameter.requires_grad]
        self.names, self.views = [name for name, _ in trained], [parameter for _, parameter in trained]
        self.sizes = [-(-parameter.numel() // _ALIGNMENT) * _ALIGNMENT for parameter in self.views]
        self._shapes = [parameter.shape for parameter in self.views]
        self._padded = [size > shape.numel() for size, shape in zip(self.sizes, self._shapes, strict=True)]
        self.weights = self.joined(self.views)
        for parameter, values in zip(self.views, self.split(self.weights), strict=True):
            parameter.data = values

    def split(self, vector: Tensor) -> list[Tensor]:
        """Return a vector's parts in the shapes of the weights, as views."""
        parts = torch.split_with_sizes(vector, self.sizes)
        # Slicing a part without padding would add a backward operator that zero-fills a gradient and copies into it.
        return [
            (part[: shape.numel()] if padded else part).view(shape)
            for part, shape, padded in zip(parts, self._shapes, self._padded, strict=True)
        ]

    @torch.no_grad()
    def joined(self, parts: Iterable[Tensor | None]) -> Tensor:
        """Return tensors in the shapes of the weights as a new vector, zero-padded between them, and 0 for None."""
        first = self.views[0]
        vector = torch.zeros(sum(self.sizes), dtype=first.dtype, device=first.device)
        for place, part in zip(self.split(vector), parts, strict=True):
            if part is not None:
                place.copy_(part)
        return vector


class FlatOptimizer(FlatWeights):
    """Clips and applies the gradients of a set of weights as one vector.

    Attributes:
        gradient: The gradient, `[size]`, which backward passes add to.
        moments: The rule's state, by name.
        lr: Learning rate, 0-d: a tensor, so that a compiled step reads the current value, not the traced one.
    """

    def __init__(self, weights: Iterable[tuple[str, nn.Parameter]], rule: Rule, *, lr: float) -> None:
        super().__init__(weights)
        self.rule = rule
        self.gradient = torch.zeros_like(self.weights)
        for parameter, gradients in zip(self.views, self.split(self.gradient), strict=True):
            parameter.grad = gradients
        self.moments = rule.moments(self.weights)
        self.lr = torch.tensor(lr, dtype=torch.float32, device=self.weights.device)

    @property
    def state(self) -> tuple[Tensor, ...]:
        """The tensors that a step changes: the weights and the rule's moments."""
        return self.weights, *self.moments.values()

    @property
    def param_groups(self) -> NoReturn:
        """There are none: all weights are one vector."""
        raise AttributeError("rl8x's optimizers have no `param_groups`: set the rate by `algorithm.set_lr(1e-4)`.")

    @torch.no_grad()
    def step(self, max_grad_norm: float | None, active: Tensor | None = None) -> Tensor:
        """Clip the gradient and make one step; see `clip_and_apply`."""
        return clip_and_apply(self.rule, self.state, self.gradient, self.lr, max_grad_norm=max_grad_norm, active=active)

    def state_dict(self, *, copies: bool = True) -> dict[str, Any]:
        """Return the moments of each weight by name, in the layout of `torch.optim`, whose optimizers load it."""
        state: dict[str, dict[str, Tensor]] = {name: {} for name in self.names}
        for kind, moment in self.moments.items():
            vector = moment.clone() if copies else moment
            parts = [vector[0].clone() for _ in self.views] if kind == STEP else self.split(vector)
            for name, part in zip(self.names, parts, strict=True):
                state[name][kind] = part
        group = {"lr": float(self.lr), **self.rule.options(), "params": list(self.names)}
        return {"state": state, "param_groups": [group]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore moments and learning rate in place, so that captured pointers stay valid."""
        saved = self._matched(state)
        for kind, moment in self.moments.items():
            moment.zero_()
            if kind == STEP:
                moment.fill_(next((parts[kind] for parts in saved if parts), 0.0))
                continue
            for part, parts in zip(self.split(moment), saved, strict=True):
                if parts:
                    part.copy_(parts[kind])
        self.lr.fill_(state["param_groups"][0]["lr"])
        # Exclude the padding between weights, which may be non-finite after a non-finite gradient.
        self.weights.copy_(self.joined(self.views))

    def _matched(self, state: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Return the saved moments of each weight, in order; empty before its first step."""
        if not {"state", "param_groups"} <= state.keys():
            raise ValueError(
                f"An optimizer's state has `state` and `param_groups`; got {', '.join(map(repr, state)) or 'nothing'}."
            )
        groups = state["param_groups"]
        ids = [key for group in groups for key in group["params"]]
        names = [name for group in groups for name in group.get("param_names", group["params"])]
        if not all(isinstance(name, str) for name in names):
            names = self.names[: len(ids)] + [f"number {i}" for i in range(len(self.names), len(ids))]
        if set(names) != set(self.names):
            name = next(name for name in (*self.names, *names) if (name in names) != (name in self.names))
            which = "does not know" if name in self.names else "is also of"
            raise ValueError(
                f"The saved optimizer {which} {name!r}; it has {len(names)} weights, this one {len(self.names)}. Use "
                "the model that it was saved with."
            )
        by_name = {
            name: {kind: value for kind, value in state["state"].get(key, {}).items() if value is not None}
            for name, key in zip(names, ids, strict=True)
        }
        saved = [by_name[name] for name in self.names]
        self._check(saved)
        return saved

    def _check(self, saved: Sequence[Mapping[str, Any]]) -> None:
        """Raise if moments belong to another kind of optimizer, or to weights of other shapes."""
        for name, view, parts in zip(self.names, self.views, saved, strict=True):
            if parts and parts.keys() != self.moments.keys():
                raise ValueError(
                    f"The saved optimizer keeps {', '.join(sorted(parts))} of a weight, this one "
                    f"{', '.join(sorted(self.moments)) or 'nothing'}: use the same."
                )
            for kind, value in parts.items():
                if kind != STEP and value.shape != view.shape:
                    raise ValueError(
                        f"The saved optimizer's {kind} of {name!r} has the shape {list(value.shape)}, the weight "
                        f"{list(view.shape)}. Use the model that it was saved with."
                    )
        steps = {float(parts[STEP]) for parts in saved if STEP in parts}
        if len(steps) > 1:
            few, many = min(steps), max(steps)
            raise ValueError(
                f"The saved optimizer's weights have taken from {few:.0f} to {many:.0f} steps; here all take each."
            )
