"""One optimizer step on one flat vector of weights.

A policy of eight small tensors costs an optimizer eight times the overhead of one. All weights of a policy are laid
out in one
vector, the gradients in another, and every module keeps views of them: clipping is one norm and Adam is one fused
kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from rl8x.algorithms.config import check_names_in

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "sgd": torch.optim.SGD,
}
_LEGAL_OPTIONS = {
    "adam": ("betas", "eps", "weight_decay", "amsgrad"),
    "adamw": ("betas", "eps", "weight_decay", "amsgrad"),
    "sgd": ("momentum", "dampening", "weight_decay", "nesterov"),
}
# A cache line of float32; a view that begins in the middle of one is slower to multiply with.
_ALIGNMENT = 16


class FlatOptimizer:
    """Clips and applies the gradients of a set of weights as one vector.

    Args:
        weights: What to optimise; each tensor becomes a view of one vector.
        name: `"adam"`, `"adamw"` or `"sgd"`.
        config: Further keyword arguments of that optimizer (`betas`, `eps`, `weight_decay`, ...).
        lr: First learning rate.
    """

    def __init__(self, weights: Iterable[nn.Parameter], name: str, config: Mapping[str, Any], *, lr: float) -> None:
        check_names_in(config, _LEGAL_OPTIONS[name], f"`optimizer_config` of {name}")
        self.weights = [parameter for parameter in weights if parameter.requires_grad]
        self.flat = _flatten(self.weights)
        # A tensor, so that a captured or compiled step reads the present value instead of the one it was traced with.
        self.lr = torch.tensor(lr, dtype=torch.float32, device=self.flat.device)
        self.optimizer = OPTIMIZERS[name]([self.flat], lr=self.lr, fused=True, **config)

    @property
    def gradient(self) -> Tensor:
        """The flat gradient, which backward passes add to."""
        gradient = self.flat.grad
        assert gradient is not None
        return gradient

    def zero_grad(self) -> None:
        """Set the gradient to 0 in place."""
        self.gradient.zero_()

    def step(self, max_grad_norm: float | None, *, skip: Tensor | None = None) -> Tensor:
        """Clip the gradient to a norm and take one step.

        Args:
            max_grad_norm: Largest L2 norm of the gradient over all weights; None does not clip.
            skip: 0-d float tensor; 1 leaves weights and moments as they are, decided on the device.

        Returns:
            The norm before clipping, 0-d.
        """
        gradient = self.gradient
        norm: Tensor = torch.linalg.vector_norm(gradient)
        if max_grad_norm is not None:
            gradient.mul_((max_grad_norm / (norm + 1e-6)).clamp(max=1.0))
        # The fused kernels of torch take the flag that automatic mixed precision uses to leave a step out.
        self.optimizer.found_inf = skip  # type: ignore[attr-defined]
        self.optimizer.step()
        return norm

    def state_dict(self) -> dict[str, Any]:
        """Return the moments and step counts of the flat vector."""
        state = self.optimizer.state.get(self.flat, {})
        return {"lr": self.lr, "state": dict(state.items())}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the moments, in place where they exist, so that captured pointers stay valid."""
        self.lr.copy_(state["lr"])
        present = self.optimizer.state[self.flat]
        for name, value in state["state"].items():
            if name in present:
                present[name].copy_(value)
            else:
                # A fused optimizer keeps its step count on the device, too.
                present[name] = value.to(self.flat.device, copy=True)


def _flatten(weights: list[nn.Parameter]) -> nn.Parameter:
    """Lay weights and gradients out in one vector each, and make the given tensors views of them."""
    sizes = [-(-parameter.numel() // _ALIGNMENT) * _ALIGNMENT for parameter in weights]
    with torch.no_grad():
        data = torch.zeros(sum(sizes), dtype=weights[0].dtype, device=weights[0].device)
        gradient = torch.zeros_like(data)
        for parameter, values, slopes in zip(
            weights, torch.split(data, sizes), torch.split(gradient, sizes), strict=True
        ):
            view = values[: parameter.numel()].view(parameter.shape)
            view.copy_(parameter)
            parameter.data = view
            parameter.grad = slopes[: parameter.numel()].view(parameter.shape)
    flat = nn.Parameter(data)
    flat.grad = gradient
    return flat
