"""Optimizers of one flat vector of weights.

A policy of eight small tensors costs an optimizer eight times the overhead of one. All weights of a policy are laid out
in one vector, the gradients in another, and every module keeps views of them: clipping is one norm, and a step is a
handful of operations on vectors, written in place so that the same function runs eagerly and inside a compiled update.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from rl8x.algorithms.config import check_names_in

# A cache line of float32; a view that begins in the middle of one is slower to multiply with.
_ALIGNMENT = 16


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rule(ABC):
    """How a gradient moves weights. `weight_decay` is the weight of an L2 penalty."""

    weight_decay: float = 0.0

    @abstractmethod
    def moments(self, weights: Tensor) -> dict[str, Tensor]:
        """Return what it keeps beside weights `[size]`, by name, as it is before the first step."""

    @abstractmethod
    def apply(self, weights: Tensor, gradient: Tensor, moments: Sequence[Tensor], lr: Tensor) -> None:
        """Move the weights and the moments in place.

        Args:
            weights: `[size]`.
            gradient: `[size]`.
            moments: In the order of `moments()`.
            lr: Learning rate, 0-d; 0 leaves the weights, not the moments, as they are.
        """


@dataclasses.dataclass(frozen=True, kw_only=True)
class Adam(Rule):
    """Adaptive moments.

        m = b1 m + (1 - b1) g,  v = b2 v + (1 - b2) g^2,  c1 = b1 c1 + (1 - b1),  c2 = b2 c2 + (1 - b2)
        w = w - lr m / c1 / (sqrt(v / c2) + eps)

    c1 = 1 - b1^t and c2 = 1 - b2^t are what the moments would be had every gradient been 1. Kept like them, they have
    all their digits, and cost a compiled step no power for every few weights. Numerator and denominator are multiplied
    by sqrt(c2), as in the paper's section 2, which leaves one division for each weight.

    Source: Kingma and Ba 2015, arXiv:1412.6980, algorithm 1; decoupled weight decay: Loshchilov and Hutter 2019,
    arXiv:1711.05101, algorithm 2.
    """

    betas: Sequence[float] = (0.9, 0.999)
    eps: float = 1e-8
    decoupled: bool = False

    def moments(self, weights: Tensor) -> dict[str, Tensor]:
        """Return the running means of gradients and of their squares, and the sums of the weights in each."""
        vectors = {name: torch.zeros_like(weights) for name in ("first", "second")}
        return vectors | {name: weights.new_zeros(1) for name in ("first_total", "second_total")}

    def apply(self, weights: Tensor, gradient: Tensor, moments: Sequence[Tensor], lr: Tensor) -> None:
        """Move the weights by the rule above."""
        first, second, first_total, second_total = moments
        beta1, beta2 = self.betas
        if self.weight_decay and self.decoupled:
            weights.mul_(1.0 - lr * self.weight_decay)
        elif self.weight_decay:
            gradient = gradient + self.weight_decay * weights
        first.mul_(beta1).add_(gradient, alpha=1.0 - beta1)
        second.mul_(beta2).addcmul_(gradient, gradient, value=1.0 - beta2)
        first_total.mul_(beta1).add_(1.0 - beta1)
        second_total.mul_(beta2).add_(1.0 - beta2)
        unbias = second_total.sqrt()
        root = second.sqrt().add_(self.eps * unbias)
        weights.sub_(first / root * (lr * unbias / first_total))


@dataclasses.dataclass(frozen=True, kw_only=True)
class SGD(Rule):
    """Gradient descent with momentum.

    b = momentum b + g,  w = w - lr b  (with `nesterov`: w - lr (g + momentum b))
    """

    momentum: float = 0.0
    nesterov: bool = False

    def moments(self, weights: Tensor) -> dict[str, Tensor]:
        """Return the running sum of gradients, where there is momentum."""
        return {"velocity": torch.zeros_like(weights)} if self.momentum else {}

    def apply(self, weights: Tensor, gradient: Tensor, moments: Sequence[Tensor], lr: Tensor) -> None:
        """Move the weights by the rule above."""
        if self.weight_decay:
            gradient = gradient + self.weight_decay * weights
        direction = gradient
        for velocity in moments:
            velocity.mul_(self.momentum).add_(gradient)
            direction = gradient + self.momentum * velocity if self.nesterov else velocity
        weights.sub_(direction * lr)


OPTIMIZERS: dict[str, type[Rule]] = {"adam": Adam, "adamw": Adam, "sgd": SGD}


def make_rule(name: str, config: Mapping[str, Any]) -> Rule:
    """Make the rule of a built-in optimizer.

    Raises:
        ValueError: If `config` has an option that it does not know.
    """
    legal = [field.name for field in dataclasses.fields(OPTIMIZERS[name]) if field.name != "decoupled"]
    check_names_in(config, legal, f"`optimizer_config` of {name}")
    if name == "adamw":
        return Adam(**{"weight_decay": 0.01, **config}, decoupled=True)
    return OPTIMIZERS[name](**config)


def clip_and_apply(
    rule: Rule,
    state: Sequence[Tensor],
    gradient: Tensor,
    lr: Tensor,
    *,
    max_grad_norm: float | None,
    active: Tensor | None = None,
) -> Tensor:
    """Clip a gradient to an L2 norm and move the weights by a rule; in place, and free of copies to the host.

    Args:
        rule: How a gradient moves weights.
        state: The weights, `[size]`, and the rule's moments.
        gradient: `[size]`.
        lr: Learning rate, 0-d.
        max_grad_norm: Largest L2 norm of the gradient over all weights; None does not clip.
        active: 0-d bool; False leaves the state as it is, decided on the device.

    Returns:
        The norm before clipping, 0-d.
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


class FlatOptimizer:
    """Clips and applies the gradients of a set of weights as one vector.

    Args:
        weights: What to optimise; each tensor becomes a view of one vector, and its gradient of another.
        rule: How a gradient moves weights.
        lr: First learning rate.

    Attributes:
        weights: The vector of all weights, `[size]`.
        gradient: Their gradient, `[size]`, which backward passes add to.
        moments: What the rule keeps, by name.
        lr: Learning rate, 0-d: a tensor, so that a compiled step reads the present one and not the traced one.
        views: The modules' weights, views of the vector, in order.
    """

    def __init__(self, weights: Iterable[nn.Parameter], rule: Rule, *, lr: float) -> None:
        self.rule = rule
        self.views = [parameter for parameter in weights if parameter.requires_grad]
        self.sizes = [-(-parameter.numel() // _ALIGNMENT) * _ALIGNMENT for parameter in self.views]
        self.weights, self.gradient = self._flatten()
        self.moments = rule.moments(self.weights)
        self.lr = torch.tensor(lr, dtype=torch.float32, device=self.weights.device)

    def _flatten(self) -> tuple[Tensor, Tensor]:
        first = self.views[0]
        with torch.no_grad():
            weights = torch.zeros(sum(self.sizes), dtype=first.dtype, device=first.device)
            gradient = torch.zeros_like(weights)
            views = zip(self.views, self.split(weights), self.split(gradient), strict=True)
            for parameter, values, slopes in views:
                values.copy_(parameter)
                parameter.data = values
                parameter.grad = slopes
        return weights, gradient

    def split(self, vector: Tensor) -> list[Tensor]:
        """Return a vector's parts in the shapes of the weights, as views."""
        parts = torch.split(vector, self.sizes)
        return [part[: view.numel()].view(view.shape) for part, view in zip(parts, self.views, strict=True)]

    @torch.no_grad()
    def step(self, max_grad_norm: float | None, active: Tensor | None = None) -> Tensor:
        """Clip the gradient to a norm and take one step; in place, and free of copies to the host.

        Args:
            max_grad_norm: Largest L2 norm of the gradient over all weights; None does not clip.
            active: 0-d bool; False leaves weights and moments as they are, decided on the device.

        Returns:
            The norm before clipping, 0-d.
        """
        state = (self.weights, *self.moments.values())
        return clip_and_apply(self.rule, state, self.gradient, self.lr, max_grad_norm=max_grad_norm, active=active)

    def state_dict(self) -> dict[str, Any]:
        """Return the moments and the learning rate."""
        return {"lr": self.lr, "moments": self.moments}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore them in place, so that captured pointers stay valid.

        Raises:
            ValueError: If the state is another optimizer's.
        """
        if set(state["moments"]) != set(self.moments):
            raise ValueError(
                f"The saved optimizer keeps {sorted(state['moments'])}, this one {sorted(self.moments)}: use the same."
            )
        self.lr.copy_(state["lr"])
        for name, moment in self.moments.items():
            moment.copy_(state["moments"][name])
        # Between the weights there is padding, which is no part of them and may not be finite where a gradient was not.
        padded = torch.zeros_like(self.weights)
        for part, view in zip(self.split(padded), self.views, strict=True):
            part.copy_(view.detach())
        self.weights.copy_(padded)
