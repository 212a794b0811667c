"""CPU matmul kernels, chosen by shape and processor.

What an update multiplies is either large, and nearly all its time goes there, or thin, such as the first layer of four
numbers or the head of one value, where a call into a library costs more than the arithmetic. Compiled PPO without it is
37% slower on one thread (Zen 5).
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from rl8x.execution import private

# Rows, terms or columns up to which a product is written as sums, which fuse with what is around them: columns always,
# the others where the whole product has at most so many multiplications, else only where there is one.
_THIN: Final = 4
_SMALL: Final = 2**16

# Multiplications from which oneDNN earns back what a call of it costs more, and from which it does so too where the
# left side has to be transposed before, as in the gradients of weights. From 2^22 on, PPO's updates of 64 rows and two
# layers of 256 took 1.2 times as long (forced, on an Intel Xeon); other processors may differ.
_LARGE: Final = 2**23
_LARGE_TRANSPOSED: Final = 2**24

# Multiplications of bfloat16 numbers up to which they are multiplied as float32, whatever the processor: the call of a
# kernel that has to lay them out anew costs more than the arithmetic.
_SMALL_BFLOAT16: Final = 2**20

# Rows, terms and columns from which oneDNN is the faster one in eager execution too, where it fuses with nothing.
_WIDE: Final = 128

# Columns up to which MKL is up to seven times faster with the gradient of a weight if it computes the transposed one.
_NARROW: Final = 16

_LIBRARY: Final[Any] = torch.library.Library("rl8x", "DEF")  # type: ignore[no-untyped-call]
_LIBRARY.define("linear(Tensor x, Tensor weight, Tensor? bias) -> Tensor")


def product(left: Tensor, right: Tensor, bias: Tensor | None = None) -> Any:
    """Multiply matrices of float32 or bfloat16 numbers on the CPU, or a batch of such.

    Args:
        left: `[rows, terms]` or `[batch, rows, terms]`.
        right: `[terms, columns]` or `[batch, terms, columns]`.
        bias: Added to every row, `[columns]` or `[batch, 1, columns]`.

    Returns:
        `[rows, columns]` or `[batch, rows, columns]`, contiguous; or NotImplemented where the usual way is the best, or
        none of these is meant.
    """
    if left.device.type != "cpu" or left.dtype not in (torch.float32, torch.bfloat16):
        return NotImplemented
    dtype, work = left.dtype, left.shape[-2] * right.shape[-2] * right.shape[-1]
    result = _thin_product(left.float(), right.float())
    if result is None:
        # Sums of bfloat16 numbers are taken in float32 either way.
        widened = dtype == torch.bfloat16 and (work <= _SMALL_BFLOAT16 or not has_bfloat16())
        if widened:
            left, right = left.float(), right.float()
        least = _LARGE if left.is_contiguous() else _LARGE_TRANSPOSED
        one = left.dim() == 2
        if one and left.dtype == torch.float32 and work >= least and has_fast_linear() and lower_linear():
            return LINEAR(left.contiguous(), right.t(), bias if bias is None else bias.float()).to(dtype)
        if bias is None and not widened:
            return NotImplemented
        result = torch.mm(left, right) if one else torch.bmm(left, right)
    if bias is not None:
        # Minus the negative: Inductor would take a sum back to a product that begins with a copy of the bias to every
        # row, where this fuses with what comes after it.
        result = result - -bias
    return result.to(dtype)


def _thin_product(left: Tensor, right: Tensor) -> Tensor | None:
    (rows, terms), columns = left.shape[-2:], right.shape[-1]
    few = _THIN if rows * terms * columns <= _SMALL else 1
    if terms <= few:
        return functools.reduce(torch.add, [left[..., k : k + 1] * right[..., k : k + 1, :] for k in range(terms)])
    if rows <= few:
        return (left.mT.unsqueeze(-1) * right.unsqueeze(-2)).sum(-3).contiguous()
    if columns > _THIN:
        return None
    if left.stride(-2) == 1:  # a transposed matrix is summed along its rows
        return (right.unsqueeze(-1) * left.mT.unsqueeze(-2)).sum(-3).mT.contiguous()
    return (left.unsqueeze(-2) * right.mT.unsqueeze(-3)).sum(-1).contiguous()


def multiply(left: Tensor, right: Tensor, bias: Tensor | None = None) -> Tensor:
    """Multiply matrices of float32 numbers on the CPU, `[rows, terms]` by `[terms, columns]`; not while tracing."""
    if _is_wide(left, right.shape[1]) and left.is_contiguous() and has_fast_linear():
        return linear(left, right.t(), bias)
    return torch.mm(left, right) if bias is None else torch.addmm(bias, left, right)


def multiply_transposed(left: Tensor, right: Tensor) -> Tensor:
    """Multiply `[terms, rows]`, transposed, by `[terms, columns]`, as the gradient of a linear layer's weight is."""
    if right.shape[1] <= _NARROW:
        return torch.mm(right.t(), left).t().contiguous()
    if _is_wide(left.t(), right.shape[1]) and has_fast_linear():
        return linear(left.t().contiguous(), right.t(), None)
    return torch.mm(left.t(), right)


def _is_wide(left: Tensor, columns: int) -> bool:
    return min(*left.shape, columns) >= _WIDE and left.numel() * columns >= _LARGE


def is_traced() -> bool:
    """Say whether what is called now is traced or transformed, and not simply executed."""
    return private.is_observed() or torch.compiler.is_compiling()


# What recording a program replaces, by what.
DECOMPOSITIONS: Final[dict[Any, Callable[..., Any]]] = {
    torch.ops.aten.mm.default: product,
    torch.ops.aten.addmm.default: lambda bias, left, right, **scales: (
        NotImplemented if scales or bias.dim() != 1 else product(left, right, bias)
    ),
    torch.ops.aten.bmm.default: product,
    torch.ops.aten.baddbmm.default: lambda bias, left, right, **scales: (
        NotImplemented if scales or bias.shape[-2:-1] != (1,) else product(left, right, bias)
    ),
}


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Compute `x weight^T + bias` by oneDNN in true float32: the operator `rl8x::linear`.

    Args:
        x: `[rows, inputs]`, contiguous.
        weight: `[outputs, inputs]`.
        bias: `[outputs]`.
    """
    return private.onednn_linear(x, weight, bias)


_LIBRARY.impl("linear", linear, "CPU")
_LIBRARY.impl("linear", lambda x, weight, bias: x.new_empty(x.shape[0], weight.shape[0]), "Meta")
LINEAR: Final = torch.ops.rl8x.linear.default


@functools.cache
def has_bfloat16() -> bool:
    """Whether the processor multiplies bfloat16 numbers; one that does not takes five times as long as for float32."""
    cpu = Path("/proc/cpuinfo")
    return not cpu.exists() or re.search(r"\b(avx512_|amx_)?bf16\b", cpu.read_text()) is not None


@functools.cache
def has_fast_linear() -> bool:
    """Probe once whether oneDNN's matmul kernels can be had, and are the faster ones here.

    By the processor and not by a clock: the same run must choose the same on every day, to the last bit. MKL, which
    torch's own matmul uses, has its best kernels for Intel's processors; on AMD's, oneDNN is the faster one, by a
    tenth on Zen 4 and twice on Zen 5.
    """
    cpu = Path("/proc/cpuinfo")
    if not cpu.exists() or "GenuineIntel" in cpu.read_text():
        return False
    x, weight = torch.arange(6.0).view(2, 3), torch.eye(3)
    try:
        return torch.equal(linear(x, weight, torch.ones(3)), x + 1.0)
    except Exception:  # private names of torch, which another version may not have
        return False


@functools.cache
def has_own_products() -> bool:
    """Whether programs multiply what is not large by themselves (`products.h`), as by a rule that no clock decides.

    On processors with AVX2 or AVX-512 that are not Intel's: on Zen 4, with two layers of 64, products of 64 rows take 5
    microseconds instead of 7, and PPO's updates a tenth less; with two threads, of which MKL wakes the second for them,
    5 instead of 12. Against oneDNN's, large ones gained nothing.
    """
    cpu = Path("/proc/cpuinfo")
    text = cpu.read_text() if cpu.exists() else ""
    return "GenuineIntel" not in text and re.search(r"\bavx2\b", text) is not None


@functools.cache
def lower_linear() -> bool:
    """Register with Inductor how to call `rl8x::linear` from C++; its own lowering takes constant weights only.

    Apart from the probe, since eager execution has no use for Inductor, whose import takes a second.

    Returns:
        Whether that was possible.
    """
    try:
        inductor, onednn = private.inductor(), private.onednn()
    except RuntimeError:
        return False

    @inductor.register_lowering(LINEAR, type_promotion_kind=None)  # type: ignore[untyped-decorator, unused-ignore]
    def lower(x: Any, weight: Any, bias: Any) -> Any:
        read = onednn.ExternKernel.realize_input
        inputs = [onednn.ExternKernel.require_contiguous(read(x)), read(weight)]
        options: list[Any] = ["none", [-1], ""]
        if bias is None:
            options.insert(0, None)
        else:
            inputs.append(read(bias))
        size = [x.get_size()[0], weight.get_size()[0]]
        layout = onednn.FixedLayout(device=x.get_device(), dtype=x.get_dtype(), size=size)
        called = onednn.LinearUnary(layout=layout, inputs=inputs, constant_args=options)
        return onednn.TensorBox.create(onednn.create_output_node(called))

    return True
