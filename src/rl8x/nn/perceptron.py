"""Layers of a perceptron as one step of automatic differentiation, for eager training on the CPU.

Autograd by itself keeps a new matrix for every product, activation and gradient. They come from memory that has left
the cache, and at the sizes of reinforcement learning that costs as much as the arithmetic. Here activations and
gradients overwrite matrices that nothing else refers to, and CPU matmul kernels are chosen by shape. Eager PPO without
it is 13% slower on one thread (Zen 5). A stack of perceptrons, `[size, rows, ...]`, goes the same way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rl8x.execution import matmul as products
from rl8x.nn.stacks import LinearStack

# From this size of all activations on, that of a core's cache, `perceptron` saves more time than its Python takes.
_MANY_ACTIVATIONS: Final = 2**17

_HOOKS: Final = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


# Activations whose derivatives are known from their results: what computes one in place, and the operator, with its
# further arguments, that gives the gradient of its input from that of its result and the result.
_ACTIVATIONS: Final[dict[type[nn.Module] | None, tuple[Callable[[Tensor], Tensor], Any, tuple[Any, ...]]]] = {
    nn.ReLU: (torch.relu_, torch.ops.aten.threshold_backward, (0,)),
    nn.Tanh: (torch.tanh_, torch.ops.aten.tanh_backward, ()),
}


class Layer(NamedTuple):
    """A linear layer, or a stack of such, and the kind of activation after it, if any."""

    linear: nn.Linear | LinearStack
    activation: type[nn.Module] | None


def plain_layers(modules: Iterable[nn.Module], x: Tensor, num_activations: int | None = None) -> list[Layer] | None:
    """Return the layers of a sequential perceptron that `perceptron` can apply to x, `[rows, inputs]`, or of a stack.

    None where the modules should be called: another precision, device or tracing is in force, or one of them is not a
    plain linear layer, ReLU or tanh without hooks. With `num_activations`, those of a row in all layers, also where it
    would save no time.
    """
    if products.is_traced():  # before rows are counted: an export would keep their number
        return None
    if num_activations is not None and x.numel() // x.shape[-1] * num_activations < _MANY_ACTIVATIONS:
        return None
    direct = x.device.type == "cpu" and x.dtype == torch.float32
    if not direct or torch.is_autocast_enabled("cpu"):
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
    """Apply layers one after the other, `[rows, inputs]` to `[rows, outputs]`; `[size, rows, ...]` where stacked."""
    weights = [weight for layer in layers for weight in (layer.linear.weight, layer.linear.bias)]
    result: Tensor = _Perceptron.apply(x, [layer.activation for layer in layers], *weights)  # type: ignore[no-untyped-call]
    return result


class _Perceptron(torch.autograd.Function):
    """The whole perceptron; its gradients can be differentiated again, through the layers."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, kinds: Sequence[type[nn.Module] | None], *weights: Tensor) -> Tensor:
        results = [x]
        for kind, weight, bias in zip(kinds, weights[::2], weights[1::2], strict=True):
            result = _output(results[-1], weight, bias)
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


def _output(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Apply a linear layer, of a weight `[outputs, inputs]`, or a stack of them, of `[size, inputs, outputs]`."""
    return products.multiply(x, weight if weight.dim() == 3 else weight.t(), bias)


def _weights_gradient(gradient: Tensor, x: Tensor) -> Tensor:
    """Return the gradient of a layer's weight, in the layout of that."""
    return products.multiply_transposed(*((x, gradient) if x.dim() == 3 else (gradient, x)))


def _inputs_gradient(gradient: Tensor, weight: Tensor) -> Tensor:
    return products.multiply(gradient, weight.mT if weight.dim() == 3 else weight)


def _gradients(
    gradient: Tensor,
    kinds: Sequence[type[nn.Module] | None],
    results: Sequence[Tensor],
    weights: Sequence[Tensor],
    needed: Sequence[bool],
) -> list[Tensor | None]:
    """Go back through the layers; return the gradients of the input and of each weight and bias that needs one."""
    gradients: list[Tensor | None] = [None] * len(needed)
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
            gradients[2 * i + 1] = _weights_gradient(gradient, results[i])
        if needed[2 * i + 2]:
            gradients[2 * i + 2] = gradient.sum(-2, keepdim=gradient.dim() == 3)
        if not any(needed[: 2 * i + 1]):
            break
        gradient = _inputs_gradient(gradient, weights[2 * i])
        gradients[0] = gradient if i == 0 else None
    return gradients


def _differentiable_gradients(
    gradient: Tensor, kinds: Sequence[type[nn.Module] | None], inputs: Sequence[Tensor], needed: Sequence[bool]
) -> list[Tensor | None]:
    """Compute the same gradients, layer by layer, so that they can be differentiated themselves."""
    result = inputs[0]
    for kind, weight, bias in zip(kinds, inputs[1::2], inputs[2::2], strict=True):
        stacked = weight.dim() == 3
        result = torch.baddbmm(bias, result, weight) if stacked else F.linear(result, weight, bias)
        result = result if kind is None else kind()(result)
    wanted = [tensor for tensor, need in zip(inputs, needed, strict=True) if need]
    gradients = iter(torch.autograd.grad(result, wanted, gradient, create_graph=True))
    return [next(gradients) if need else None for need in needed]
