"""A step of Adam on one vector of weights: torch's fused kernel where it runs eagerly, a formula where it is compiled.

Eagerly the formula passes nine times over the weights and calls two dozen small operators: three to five times as long
as the kernel, and a tenth of an eager update of SAC (256 rows, two layers of 256). A trace has the kernel, so that it
can be run with the bits of the function that it is of; lowering puts the formula in its place, which Inductor fuses
with what is around it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from torch import Tensor

from rl8x.execution import private


def apply_adam(
    weights: Tensor,
    gradient: Tensor,
    moments: Sequence[Tensor],
    lr: Tensor,
    *,
    betas: Sequence[float],
    eps: float,
    weight_decay: float,
    decoupled: bool,
) -> None:
    """Move weights and moments in place, by the rule of `optimizer.Adam`.

    Args:
        weights: `[size]`.
        gradient: `[size]`.
        moments: Running means of gradients and of their squares, `[size]`, and the steps taken before, `[1]`.
        lr: Learning rate, 0-d.
        betas: Decay of the running means in a step.
        eps: Added to the denominator.
        weight_decay: Weight of an L2 penalty, or with `decoupled` of what is taken off the weights.
        decoupled: Whether the penalty has no part in the moments.
    """
    (first, second, step), (beta1, beta2) = moments, betas
    step.add_(1.0)
    fused = private.fused_adam(decoupled) if weights.device.type in ("cpu", "cuda") else None
    if fused is None:
        _formula(weights, gradient, first, second, step, lr, beta1, beta2, weight_decay, eps, decoupled)
        return
    options = {"beta1": beta1, "beta2": beta2, "weight_decay": weight_decay, "eps": eps}
    fused([weights], [gradient], [first], [second], [], [step], lr=lr, **options, amsgrad=False, maximize=False)


def advance(
    gradient: Tensor, first: Tensor, second: Tensor, step: Tensor, beta1: float, beta2: float
) -> tuple[Tensor, Tensor]:
    """Move the means of gradients, `[size]`, and of their squares, in place.

    Returns:
        1 - beta^step of both, `[1]`, as -expm1(step log beta), which has all digits where beta^step is near 1.
    """
    first.mul_(beta1).add_(gradient, alpha=1.0 - beta1)
    second.mul_(beta2).addcmul_(gradient, gradient, value=1.0 - beta2)
    first_total, second_total = (torch.expm1(step * _log(beta)).neg() for beta in (beta1, beta2))
    return first_total, second_total


def _formula(
    weights: Tensor,
    gradient: Tensor,
    first: Tensor,
    second: Tensor,
    step: Tensor,
    lr: Tensor,
    beta1: float,
    beta2: float,
    weight_decay: float,
    eps: float,
    decoupled: bool,
) -> None:
    """Do the step, given the number of this one, `[1]`.

    Numerator and denominator are multiplied by sqrt(c2), as in section 2 of Kingma and Ba 2015, arXiv:1412.6980, which
    leaves one division for each weight.
    """
    if weight_decay and decoupled:
        weights.mul_(1.0 - lr * weight_decay)
    elif weight_decay:
        gradient = gradient + weight_decay * weights
    first_total, second_total = advance(gradient, first, second, step, beta1, beta2)
    unbias = second_total.sqrt()
    root = second.sqrt().add_(eps * unbias)
    weights.sub_((first / root).mul_(lr * unbias / first_total))


def _log(beta: float) -> float:
    return math.log(beta) if beta else -math.inf


def _decomposed(decoupled: bool) -> Callable[..., None]:
    """Return what takes the place of a fused kernel that `apply_adam` called."""

    def step(
        weights: Any, gradients: Any, first: Any, second: Any, _: Any, steps: Any, *, lr: Any, **options: Any
    ) -> None:
        beta1, beta2, weight_decay, eps = (options[name] for name in ("beta1", "beta2", "weight_decay", "eps"))
        for tensors in zip(weights, gradients, first, second, steps, strict=True):
            _formula(*tensors, lr, beta1, beta2, weight_decay, eps, decoupled)

    return step


DECOMPOSITIONS: Final[dict[Any, Callable[..., None]]] = {
    operator: _decomposed(decoupled)
    for decoupled in (False, True)
    if (operator := private.fused_adam(decoupled)) is not None
}
"""Decompositions of the fused Adam kernels, which lowering puts in their place."""
