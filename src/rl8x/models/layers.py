"""Layers by name, initial weights, stacks of layers, and fast eager training of perceptrons on the CPU.

Autograd by itself keeps a new matrix for every product, activation and gradient. They come from memory that has left
the cache, and at the sizes of reinforcement learning that costs as much as the arithmetic. `perceptron` is one step of
automatic differentiation: activations and gradients overwrite matrices that nothing else refers to, and CPU matmul
kernels are chosen by shape. Eager PPO without it is 13% slower on one thread (Zen 5).
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rl8x.execution import kernels, private
from rl8x.names import unknown_name
from rl8x.output import shown

HIDDEN_GAIN = math.sqrt(2.0)
INITS: Final = ("orthogonal", "uniform")
"""Kinds of initial weights."""


class SquaredReLU(nn.Module):
    """Compute max(0, x)^2.

    Source: So et al. 2021, arXiv:2109.08668.
    """

    def forward(self, x: Tensor) -> Tensor:
        """Apply the function to every element.

        Args:
            x: `[...]`, as the result is.
        """
        return torch.relu(x).square()


ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "relu": nn.ReLU,
    "tanh": nn.Tanh,
    "elu": nn.ELU,
    "gelu": nn.GELU,
    "silu": nn.SiLU,
    "leaky_relu": nn.LeakyReLU,
    "sigmoid": nn.Sigmoid,
    "softplus": nn.Softplus,
    "squared_relu": SquaredReLU,
    "identity": nn.Identity,
}


def activation(name: str) -> nn.Module:
    """Make the activation of a name.

    Args:
        name: A key of `ACTIVATIONS`.
    """
    if name not in ACTIVATIONS:
        raise ValueError(unknown_name("activation", name, ACTIVATIONS))
    return ACTIVATIONS[name]()


def masked_logits(logits: Tensor, mask: Tensor) -> Tensor:
    """Replace the logits of masked elements by a number whose exponential is 0; return `[..., num_choices]`.

    It is finite, because 0 * -inf in the entropy and in its gradient would be NaN, and half of the least one, because
    `log_softmax` subtracts the largest logit from it.

    Args:
        logits: `[..., num_choices]`, floating-point.
        mask: True where an element counts, bool, of a shape that broadcasts to that of `logits`.
    """
    return torch.where(mask, logits, torch.finfo(logits.dtype).min / 2)


def masked_mean(x: Tensor, mask: Tensor, dim: int) -> Tensor:
    """Return the mean along `dim` of the elements that count, 0 if there are none: `[...]` without `dim`.

    Args:
        x: `[...]`; the values of masked elements, NaN too, have no influence.
        mask: True where an element counts, bool, of a shape that broadcasts to that of `x`.
        dim: The dimension to reduce.
    """
    mask = mask.expand_as(x)
    return torch.where(mask, x, 0.0).sum(dim) / mask.sum(dim).clamp(min=1)


class LinearStack(nn.Module):
    """Linear layers side by side, `[size, rows, inputs]` to `[size, rows, outputs]`, each block orthogonal."""

    def __init__(
        self, size: int, num_inputs: int, num_outputs: int, gain: float | None, *, num_blocks: int = 1
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size, num_inputs, num_outputs))
        self.bias = nn.Parameter(torch.zeros(size, 1, num_outputs))
        for weight in self.weight.data:
            for block in weight.T.chunk(num_blocks):
                initialise(block, gain)

    def forward(self, x: Tensor, part: slice | None = None) -> Tensor:
        """Multiply all rows, or those of a part of the layers, in one batched product."""
        if part is None:
            return torch.baddbmm(self.bias, x, self.weight)
        return torch.baddbmm(self.bias[part], x, self.weight[part])


class HeadStack(LinearStack):
    """Linear layers side by side that compute in float32, even under autocast to bfloat16."""

    def forward(self, x: Tensor, part: slice | None = None) -> Tensor:
        """Multiply all rows in one batched product."""
        with torch.autocast(x.device.type, enabled=False):
            return super().forward(x.to(self.weight.dtype), part)


class LayerNormStack(nn.Module):
    """Layer normalisations side by side, of `[size, rows, width]`, each with its own scales and shifts."""

    def __init__(self, size: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size, 1, width))
        self.bias = nn.Parameter(torch.zeros(size, 1, width))

    def forward(self, x: Tensor) -> Tensor:
        """Normalise each row."""
        return F.layer_norm(x, x.shape[-1:]) * self.weight + self.bias


# -- initial weights


def linear(
    num_inputs: int, num_outputs: int, gain: float | None = HIDDEN_GAIN, *, kind: type[nn.Linear] = nn.Linear
) -> nn.Linear:
    """Make a linear layer with an orthogonal weight times `gain` and a bias of 0.

    Args:
        num_inputs: Width of the input, `[..., num_inputs]`, at least 1.
        num_outputs: Width of the output, `[..., num_outputs]`, at least 1.
        gain: Factor of the weight; sqrt(2) keeps the scale of activations through ReLUs. None: the weight is uniform
            within 1 / sqrt(num_inputs).
        kind: Class of the layer.

    Source: Saxe et al. 2014, arXiv:1312.6120.
    """
    check_widths(num_inputs=num_inputs, num_outputs=num_outputs)
    layer = kind(num_inputs, num_outputs)
    initialise(layer.weight, gain)
    nn.init.zeros_(layer.bias)
    return layer


def initialise(weight: Tensor, gain: float | None) -> None:
    """Draw a weight `[outputs, inputs]`: orthogonal times `gain`; None: uniform within 1 / sqrt(inputs)."""
    if gain is None:
        nn.init.uniform_(weight, -(weight.shape[1] ** -0.5), weight.shape[1] ** -0.5)
    else:
        nn.init.orthogonal_(weight, gain)


def hidden_gain(init: str) -> float | None:
    """Return the gain of hidden layers with "orthogonal" initial weights; None for "uniform" ones."""
    if init not in INITS:
        raise ValueError(f"`init` must be {' or '.join(map(repr, INITS))}; got {init!r}.")
    return HIDDEN_GAIN if init == "orthogonal" else None


def check_widths(**widths: int) -> None:
    """Raise a `ValueError` for an argument that is not a whole number of at least 1."""
    for name, width in widths.items():
        if not isinstance(width, numbers.Integral) or isinstance(width, bool) or width < 1:
            raise ValueError(f"`{name}` must be a whole number of at least 1; got {width!r}.")


def check_sizes(name: str, sizes: Sequence[int]) -> None:
    """Raise a `ValueError` unless `sizes` is a list of whole numbers of at least 1."""
    legal = isinstance(sizes, Sequence) and not isinstance(sizes, str)
    if not legal or not all(isinstance(size, numbers.Integral) and size is not True and size >= 1 for size in sizes):
        raise ValueError(
            f"`{name}` must be a list of whole numbers of at least 1, such as [256, 256]; got {shown(sizes)}."
        )


# -- perceptrons as one step of automatic differentiation

# Multiplications (`_LARGE`), and rows, terms and columns (`_WIDE`), from which oneDNN is also faster in eager
# execution, where nothing is fused.
_LARGE: Final = 2**23
_WIDE: Final = 128

# Columns up to which MKL computes the transpose of a weight's gradient up to seven times faster than the gradient.
_NARROW: Final = 16

_HOOKS: Final = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")

# Activations whose derivatives follow from their results: the in-place function, and the backward operator, which
# takes the result's gradient, the result, and these further arguments.
_ACTIVATIONS: Final[dict[type[nn.Module] | None, tuple[Callable[[Tensor], Tensor], Any, tuple[Any, ...]]]] = {
    nn.ReLU: (torch.relu_, torch.ops.aten.threshold_backward, (0,)),
    nn.Tanh: (torch.tanh_, torch.ops.aten.tanh_backward, ()),
}


class Layer(NamedTuple):
    """A linear layer, or a stack of them, and the kind of activation after it, if any."""

    linear: nn.Linear | LinearStack
    activation: type[nn.Module] | None


def plain_layers(modules: Iterable[nn.Module], x: Tensor) -> list[Layer] | None:
    """Return the layers that `perceptron` can apply to x, `[rows, inputs]`; None if the modules must be called."""
    direct = x.device.type == "cpu" and x.dtype == torch.float32
    if not direct or torch.is_autocast_enabled("cpu") or private.is_traced():
        return None
    layers: list[Layer] = []
    for module in modules:
        if any(getattr(module, name) for name in _HOOKS):
            return None
        if type(module) is LinearStack or (type(module) is nn.Linear and module.bias is not None):
            layers.append(Layer(module, None))
        elif type(module) in _ACTIVATIONS and layers and layers[-1].activation is None:
            layers[-1] = layers[-1]._replace(activation=type(module))
        else:
            return None
    return layers or None


def perceptron(x: Tensor, layers: Sequence[Layer]) -> Tensor:
    """Apply layers one after the other, `[rows, inputs]` to `[rows, outputs]`; stacks have `[size, rows, ...]`."""
    weights = [weight for layer in layers for weight in (layer.linear.weight, layer.linear.bias)]
    result: Tensor = _Perceptron.apply(x, [layer.activation for layer in layers], *weights)  # type: ignore[no-untyped-call]
    return result


class _Perceptron(torch.autograd.Function):
    """The whole perceptron; its gradients can be differentiated again, through the layers."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, kinds: Sequence[type[nn.Module] | None], *weights: Tensor) -> Tensor:
        results = [x]
        for kind, weight, bias in zip(kinds, weights[::2], weights[1::2], strict=True):
            result = _multiply(results[-1], weight if weight.dim() == 3 else weight.t(), bias)
            results.append(result if kind is None else _ACTIVATIONS[kind][0](result))
        ctx.kinds = kinds
        ctx.save_for_backward(*results, *weights)
        return results[-1]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        kinds, saved, needed = ctx.kinds, ctx.saved_tensors, [ctx.needs_input_grad[0], *ctx.needs_input_grad[2:]]
        results, weights = saved[: len(kinds) + 1], saved[len(kinds) + 1 :]
        if torch.is_grad_enabled():
            gradients = _differentiable_gradients(gradient, kinds, (results[0], *weights), needed)
        else:
            gradients = _gradients(gradient, kinds, results, weights, needed)
        return gradients[0], None, *gradients[1:]


def _gradients(
    gradient: Tensor,
    kinds: Sequence[type[nn.Module] | None],
    results: Sequence[Tensor],
    weights: Sequence[Tensor],
    needed: Sequence[bool],
) -> list[Tensor | None]:
    """Go back through the layers; return the gradients of the input and of each weight and bias that needs one."""
    gradients: list[Tensor | None] = [None] * len(needed)
    stacked = weights[0].dim() == 3  # `[size, inputs, outputs]`; else `[outputs, inputs]`
    for i in reversed(range(len(kinds))):
        kind = kinds[i]
        if kind is not None:
            _, derivative, arguments = _ACTIVATIONS[kind]
            # The incoming gradient belongs to the caller; those computed here are overwritten.
            if i == len(kinds) - 1:
                gradient = derivative(gradient, results[i + 1], *arguments)
            else:
                derivative.grad_input(gradient, results[i + 1], *arguments, grad_input=gradient)
        if needed[2 * i + 1]:
            both = (results[i], gradient) if stacked else (gradient, results[i])
            gradients[2 * i + 1] = _multiply_transposed(*both)
        if needed[2 * i + 2]:
            gradients[2 * i + 2] = gradient.sum(-2, keepdim=gradient.dim() == 3)
        if not any(needed[: 2 * i + 1]):
            break
        gradient = _multiply(gradient, weights[2 * i].mT if stacked else weights[2 * i])
        gradients[0] = gradient if i == 0 else None
    return gradients


def _multiply(left: Tensor, right: Tensor, bias: Tensor | None = None) -> Tensor:
    """Multiply `[rows, terms]` by `[terms, columns]`, or stacks, eagerly in float32 on the CPU, and add a bias."""
    columns = right.shape[-1]
    if left.dim() == 2:
        if left.is_contiguous() and _suits_onednn(left, columns):
            return kernels.linear(left, right.t(), bias)
        return torch.mm(left, right) if bias is None else torch.addmm(bias, left, right)
    if left.shape[2] == 1:
        return left * right if bias is None else torch.addcmul(bias, left, right)
    if columns == 1 or _suits_onednn(left[0], columns):
        # One by one: torch's batched products take twice as long, those with vectors six times as long.
        result = left.new_empty(*left.shape[:2], columns)
        for i, product in enumerate(result):
            product.copy_(_multiply(left[i], right[i], None if bias is None else bias[i, 0]))
        return result
    return torch.bmm(left, right) if bias is None else torch.baddbmm(bias, left, right)


def _multiply_transposed(left: Tensor, right: Tensor) -> Tensor:
    """Multiply the transpose of `[terms, rows]` by `[terms, columns]`, or stacks, for a weight's gradient."""
    columns = right.shape[-1]
    if columns <= _NARROW:
        return torch.matmul(right.mT, left).mT.contiguous()
    if left.dim() == 3:
        if not _suits_onednn(left[0], columns):
            return torch.bmm(left.mT, right)
        result = left.new_empty(len(left), left.shape[2], columns)
        for i, product in enumerate(result):
            product.copy_(_multiply_transposed(left[i], right[i]))
        return result
    if _suits_onednn(left, columns):
        return kernels.linear(left.t().contiguous(), right.t(), None)
    return torch.mm(left.t(), right)


def _suits_onednn(matrix: Tensor, columns: int) -> bool:
    """Return whether oneDNN is fastest for the product of a matrix, or its transpose, and one with `columns`."""
    is_large = matrix.numel() * columns >= _LARGE
    return is_large and min(*matrix.shape, columns) >= _WIDE and kernels.has_fast_linear()


def _differentiable_gradients(
    gradient: Tensor, kinds: Sequence[type[nn.Module] | None], inputs: Sequence[Tensor], needed: Sequence[bool]
) -> list[Tensor | None]:
    """Compute the gradients of `_gradients` layer by layer, so that they can be differentiated again."""
    result = inputs[0]
    for kind, weight, bias in zip(kinds, inputs[1::2], inputs[2::2], strict=True):
        stacked = weight.dim() == 3
        result = torch.baddbmm(bias, result, weight) if stacked else F.linear(result, weight, bias)
        result = result if kind is None else kind()(result)
    wanted = [tensor for tensor, need in zip(inputs, needed, strict=True) if need]
    gradients = iter(torch.autograd.grad(result, wanted, gradient, create_graph=True))
    return [next(gradients) if need else None for need in needed]
