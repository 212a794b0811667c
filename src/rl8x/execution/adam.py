"""An Adam step on one flat vector of weights: torch's fused kernel in eager mode, elementwise operators when compiled.

In eager mode the elementwise form makes nine passes over the weights and launches two dozen small operators. It takes
three to five times as long as the fused kernel, which is a tenth of an eager update of SAC (256 rows, two layers of
256). Traces contain the fused kernel, so that running a trace gives the same bits as the function. Lowering replaces
the kernel by the elementwise form, which Inductor fuses with the surrounding operators.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor

from rl8x.execution import private


@functools.cache
def adam_step(device: str, decoupled: bool) -> Callable[..., None]:
    """Return what makes a step on a kind of device, with the arguments of torch's fused kernel, where there is one."""
    return _FUSED[decoupled] if device in ("cpu", "cuda") else functools.partial(_elementwise, decoupled)


def advance(
    gradient: Tensor, first: Tensor, second: Tensor, step: Tensor, beta1: float, beta2: float
) -> tuple[Tensor, Tensor]:
    """Update the running means of gradients, `[size]`, and of their squares, in place; return their bias corrections.

    These are 1 - beta^step, `[1]`, computed as -expm1(step log beta), which is accurate where beta^step is near 1.
    """
    first.mul_(beta1).add_(gradient, alpha=1.0 - beta1)
    second.mul_(beta2).addcmul_(gradient, gradient, value=1.0 - beta2)
    first_total, second_total = (torch.expm1(step * _log(beta)).neg() for beta in (beta1, beta2))
    return first_total, second_total


def _elementwise(
    decoupled: bool, *vectors: Any, lr: Any, beta1: Any, beta2: Any, weight_decay: Any, eps: Any, **_: Any
) -> None:
    """Make the step of a fused kernel by elementwise operators.

    Numerator and denominator are multiplied by sqrt(c2), as in section 2 of Kingma and Ba 2015, arXiv:1412.6980, so
    that each weight costs one division.
    """
    [weights], [gradient], [first], [second], _, [step] = vectors
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


_FUSED: Final = {each: private.fused_adam(each) for each in (False, True)}
# Applied by lowering.
DECOMPOSITIONS: Final = {kernel: functools.partial(_elementwise, each) for each, kernel in _FUSED.items()}
