"""Kernels of compiled programs: matmuls for the CPU, chosen by shape and processor, and a step of Adam.

Matmuls of an update are either large, and take nearly all its time, or thin, such as a first layer with four inputs or
a value head with one output. For thin ones a library call costs more than the arithmetic. Without this module compiled
PPO is 37% slower on one thread (Zen 5).

An Adam step on one flat vector of weights is torch's fused kernel in eager mode: the elementwise form makes nine passes
over the weights and launches two dozen small operators, which takes three to five times as long, a tenth of an eager
update of SAC (256 rows, two layers of 256). Traces contain the fused kernel, so that running a trace gives the same
bits as the function. Lowering replaces it by the elementwise form, which Inductor fuses with the surrounding operators.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor

from rl8x.execution import private
from rl8x.execution.artifacts import cpu_info
from rl8x.execution.traces import KEPT, LIBRARY

# A product with at most `_THIN` columns is written as sums, which fuse with the surrounding operators. So is one with
# at most `_THIN` rows or terms if it has at most `_SMALL` multiplications, and any with a single row or term.
_THIN: Final = 4
_SMALL: Final = 2**16

# Multiplications from which oneDNN's higher call overhead pays, also per item of a stack: on Zen 5, updates of SAC with
# 256 rows and of DQN with 64, both with two layers of 256, take 0.7 and 0.88 times as long as with 2^24 and no stacks.
_LARGE: Final = 2**22
_ITEMS: Final = 16  # at most in a stack, since each is a separate call

# Multiplications up to which bfloat16 matrices are multiplied in float32 on any processor: the bfloat16 kernels
# reorder their inputs, which costs more than the arithmetic.
_SMALL_BFLOAT16: Final = 2**20

LIBRARY.define("linear(Tensor x, Tensor weight, Tensor? bias) -> Tensor")


def product(left: Tensor, right: Tensor, bias: Tensor | None = None) -> Any:
    """Multiply `[rows, terms]` by `[terms, columns]`, or batches of such, in float32 or bfloat16 on the CPU.

    This is a decomposition for tracing. The bias, `[columns]` or `[batch, 1, columns]`, is added to every row. The
    result is contiguous; it is NotImplemented, which keeps torch's operator, if that is fastest, or for other devices
    and dtypes.
    """
    if left.device.type != "cpu" or left.dtype not in (torch.float32, torch.bfloat16):
        return NotImplemented
    dtype, work = left.dtype, left.shape[-2] * right.shape[-2] * right.shape[-1]
    result = _thin_product(left.float(), right.float())
    if result is None:
        # Sums are accumulated in float32 either way.
        widened = dtype == torch.bfloat16 and (work <= _SMALL_BFLOAT16 or not has_bfloat16())
        if widened:
            left, right = left.float(), right.float()
        one = left.dim() == 2
        few = one or len(left) <= _ITEMS
        if few and left.dtype == torch.float32 and work >= _LARGE and has_fast_linear():
            if one:
                return LINEAR(left.contiguous(), right.t(), bias if bias is None else bias.float()).to(dtype)
            biases = [None] * len(left) if bias is None else bias.expand(len(left), 1, -1).squeeze(1)
            return torch.stack([product(*item) for item in zip(left, right, biases, strict=True)]).to(dtype)
        if bias is None and not widened:
            return NotImplemented
        result = torch.mm(left, right) if one else torch.bmm(left, right)
    if bias is not None:
        # Written as a double negation, since Inductor would turn a sum back into addmm, which first copies the bias to
        # every row. This form fuses with the operators that follow.
        result = result - -bias
    return result.to(dtype)


def _thin_product(left: Tensor, right: Tensor) -> Tensor | None:
    (rows, terms), columns = left.shape[-2:], right.shape[-1]
    few = _THIN if rows * terms * columns <= _SMALL else 1
    if terms <= few:
        each = [right[..., k, :] for k in range(terms)]
        if right.stride(-1) != 1:  # a transposed weight: vector instructions could not read along its rows
            each = [KEPT(row) for row in each]
        return functools.reduce(torch.add, [left[..., k : k + 1] * each[k].unsqueeze(-2) for k in range(terms)])
    if rows <= few:
        return (left.mT.unsqueeze(-1) * right.unsqueeze(-2)).sum(-3).contiguous()
    # For a transposed matrix, as in gradients of weights, a library is faster: by a tenth of an update of 16,384 rows.
    if columns > _THIN or left.stride(-2) == 1:
        return None
    return (left.unsqueeze(-2) * right.mT.unsqueeze(-3)).sum(-1).contiguous()


# Decompositions of matmuls, applied by lowering.
MATMULS: Final[dict[Any, Callable[..., Any]]] = {
    torch.ops.aten.mm.default: product,
    torch.ops.aten.addmm.default: lambda bias, left, right, **scales: (
        NotImplemented if scales or bias.dim() != 1 else product(left, right, bias)
    ),
    torch.ops.aten.bmm.default: product,
    torch.ops.aten.baddbmm.default: lambda bias, left, right, **scales: (
        NotImplemented if scales or bias.shape[-2:-1] != (1,) else product(left, right, bias)
    ),
}


linear = private.onednn_linear  # as an operator it is `rl8x::linear`
LIBRARY.impl("linear", linear, "CPU")
LIBRARY.impl("linear", lambda x, weight, bias: x.new_empty(x.shape[0], weight.shape[0]), "Meta")
LINEAR: Final = torch.ops.rl8x.linear.default


@functools.cache
def has_bfloat16() -> bool:
    """Return whether the processor has bfloat16 instructions; without them float32 is five times as fast."""
    return re.search(r"\b(avx512_|amx_)?bf16\b", cpu_info() or "bf16") is not None


@functools.cache
def has_fast_linear() -> bool:
    """Return whether oneDNN's matmul kernels are available, and faster than torch's on this processor.

    Vendor and instructions decide, not a timing, so that repeated runs have the same bits. MKL, which torch's matmul
    uses, is optimised for Intel's processors, and has AVX2 kernels for AMD's: on Zen 3, updates of SAC with 256 rows
    and of PPO with 4,096 take 3 to 6% longer with oneDNN. With AVX-512 it is faster: a tenth on Zen 4, twice on Zen 5.
    """
    about = cpu_info() or "GenuineIntel"
    if "GenuineIntel" in about or ("AuthenticAMD" in about and "avx512f" not in about):
        return False
    x, weight = torch.arange(6.0).view(2, 3), torch.eye(3)
    try:
        return torch.equal(linear(x, weight, torch.ones(3)), x + 1.0)
    except Exception:  # a private operator, missing in some versions of torch
        return False


@functools.cache
def adam_step(device: str, decoupled: bool) -> Callable[..., None]:
    """Return the function of an Adam step on a kind of device: torch's fused kernel, or one with its arguments."""
    return private.FUSED_ADAM[decoupled] if device in ("cpu", "cuda") else functools.partial(_elementwise, decoupled)


def advance(gradient: Tensor, first: Tensor, second: Tensor, step: Tensor, beta1: float, beta2: float) -> list[Tensor]:
    """Update running means of gradients and squares, `[size]`, in place; return their bias corrections, `[1]`."""
    first.mul_(beta1).add_(gradient, alpha=1.0 - beta1)
    second.mul_(beta2).addcmul_(gradient, gradient, value=1.0 - beta2)
    logs = [math.log(beta) if beta else -math.inf for beta in (beta1, beta2)]
    return [torch.expm1(step * log).neg() for log in logs]  # 1 - beta^step, also where beta^step is near 1


def _elementwise(
    decoupled: bool, *vectors: Any, lr: Any, beta1: Any, beta2: Any, weight_decay: Any, eps: Any, **_: Any
) -> None:
    """Make the step of torch's fused kernel, with one division a weight: section 2 of arXiv:1412.6980."""
    [weights], [gradient], [first], [second], _, [step] = vectors
    if weight_decay and decoupled:
        weights.mul_(1.0 - lr * weight_decay)
    elif weight_decay:
        gradient = gradient + weight_decay * weights
    first_total, second_total = advance(gradient, first, second, step, beta1, beta2)
    unbias = second_total.sqrt()
    root = second.sqrt().add_(eps * unbias)
    weights.sub_((first / root).mul_(lr * unbias / first_total))


ADAM: Final = {
    private.FUSED_ADAM[False]: functools.partial(_elementwise, False),
    private.FUSED_ADAM[True]: functools.partial(_elementwise, True),
}
"""Decompositions of Adam's fused kernels, applied by lowering."""
