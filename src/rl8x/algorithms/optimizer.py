"""Weights as one flat vector, and their update rules: Adam, RAdam, gradient descent, and an adaptive learning rate.

An optimizer's overhead grows with the number of tensors. All weights of a policy are one vector, their gradients
another, and the modules hold views: clipping is one norm, and a step is a few in-place vector operations, by a function
that runs eagerly and inside a compiled update.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor, nn

from rl8x.algorithms.hyperparameters import check_names_in
from rl8x.execution.kernels import adam_step, advance
from rl8x.execution.private import places
from rl8x.policy import Policy, training_mode

STEP: Final = "step"
ADAPTIVE: Final = "adaptive"  # the kind of an `lr_schedule`
_FACTOR: Final = 1.5
# Floats in a cache line; matmuls with views that are not aligned to one are slower.
_ALIGNMENT = 16


class FlatOptimizer:
    """The weights of a module that require gradients as one vector, `[size]`; the module's own are views of it.

    Backward passes add to `gradient`, `[size]`.
    """

    def __init__(self, module: nn.Module, rule: Rule, *, lr: float, max_grad_norm: float | None = None) -> None:
        trained = [(name, parameter) for name, parameter in module.named_parameters() if parameter.requires_grad]
        self.module, self.rule, self.max_grad_norm = module, rule, max_grad_norm
        self.names, self.views = [name for name, _ in trained], [parameter for _, parameter in trained]
        self.sizes = [-(-parameter.numel() // _ALIGNMENT) * _ALIGNMENT for parameter in self.views]
        self._shapes = [parameter.shape for parameter in self.views]
        self._padded = [size > shape.numel() for size, shape in zip(self.sizes, self._shapes, strict=True)]
        self._modal = any(isinstance(part, Policy) and part.has_modes for part in module.modules())
        self.weights = self.joined(self.views)
        self.gradient = torch.zeros_like(self.weights)
        self._places, self._buffers = places(module, self.views)
        self._join()
        self.moments = rule.moments(self.weights)
        # A tensor, so that a compiled step reads the current value, not the traced one.
        self.lr = torch.tensor(lr, dtype=torch.float32, device=self.weights.device)

    def training(self) -> contextlib.AbstractContextManager[None]:
        """Put the module into training mode within the context, if that makes a difference."""
        return training_mode(self.module) if self._modal else contextlib.nullcontext()

    def under(self, weights: Sequence[Tensor], *inputs: Any) -> Any:
        """Call the module on inputs under other weights, `[*]` each as `split` returns them.

        Like `torch.func.functional_call`, which looks up the names each time: longer than evaluating a small module.
        """
        before = [owner[name] for owner, name, _ in self._places]
        for owner, name, i in self._places:
            owner[name] = weights[i]  # any tensor works
        try:
            return self.module(*inputs)
        finally:
            for (owner, name, _), weight in zip(self._places, before, strict=True):
                owner[name] = weight

    def _join(self) -> None:
        """Make the module's weights views of the vector."""
        parts = zip(self.views, self.split(self.weights), self.split(self.gradient), strict=True)
        for parameter, values, gradients in parts:
            parameter.data, parameter.grad = values, gradients
        self._pointers = [parameter.data_ptr() for parameter in self.views]

    def rejoin(self, *, trains: bool = True) -> None:
        """Copy weights that replaced the views, as by `module.to(...)`, into the vector, and make them views again."""
        for owner, name, own in self._buffers:  # compiled programs hold them too
            put = owner[name]
            if put is not own and put is not None and _kind(put) == _kind(own):
                owner[name] = own.copy_(put)
        views, pointers = self.views, self._pointers
        for owner, name, i in self._places:  # twice a step
            each = owner[name]
            if each is not views[i] or each.data_ptr() != pointers[i] or (trains and not each.requires_grad):
                break
        else:
            return
        found = [(owner[name], i) for owner, name, i in self._places]
        for each, i in found:
            now, trained = (_kind(tensor) for tensor in (each, self.split(self.weights)[i]))
            frozen = ", frozen" if trains and not each.requires_grad else ""
            if now != trained or frozen:
                raise RuntimeError(
                    f"the weights {self.names[i]!r} are {now}{frozen}, and are trained as {trained}. Move or freeze a "
                    "copy.deepcopy() of the policy; what is to stay as it is, freeze in the model's constructor."
                )
        first = {i: each for each, i in reversed(found)}
        self.views = [first[i] for i in range(len(self.views))]
        for owner, name, i in self._places:
            owner[name] = self.views[i]
        self.weights.copy_(self.joined(self.views))
        self._join()

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
        """Return tensors in the shapes of the weights as a new vector, with zeros as padding and for None."""
        first = self.views[0]
        vector = torch.zeros(sum(self.sizes), dtype=first.dtype, device=first.device)
        for place, part in zip(self.split(vector), parts, strict=True):
            if part is not None:
                place.copy_(part)
        return vector

    @property
    def state(self) -> tuple[Tensor, ...]:
        """The tensors that a step changes: the weights and the rule's moments."""
        return self.weights, *self.moments.values()

    def state_dict(self) -> dict[str, Any]:
        """Return the learning rate, the steps taken, `[1]`, and the moments of each weight by name, as references."""
        parts = {kind: self.split(moment) for kind, moment in self.moments.items() if kind != STEP}
        moments = {name: {kind: each[i] for kind, each in parts.items()} for i, name in enumerate(self.names)}
        return {"lr": float(self.lr), STEP: self.moments.get(STEP), "moments": moments}

    def apply(self, state: Sequence[Tensor], gradient: Tensor, lr: Tensor, *, active: Tensor | None = None) -> Tensor:
        """Clip a gradient, `[size]`, and step in place, if it is `active`; return the norm before clipping, 0-d."""
        before = [] if active is None else [tensor.clone() for tensor in state]
        norm: Tensor = torch.linalg.vector_norm(gradient)
        if self.max_grad_norm is not None:
            gradient.mul_((self.max_grad_norm / (norm + 1e-6)).clamp(max=1.0))
        self.rule.apply(state[0], gradient, state[1:], lr)
        for tensor, old in zip(state, before, strict=False):
            assert active is not None
            tensor.copy_(torch.where(active, tensor, old))
        return norm

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a `state_dict` in place, as programs hold pointers; raise a `ValueError` if it does not fit."""
        saved, own = state["moments"], self.state_dict()["moments"]
        for name in dict.fromkeys((*own, *saved)):
            had, has = (_layout(each.get(name, {})) for each in (saved, own))
            if had != has:
                raise ValueError(
                    f"the saved optimizer keeps {had} of {name!r}, this one {has}. Use the model and the "
                    "optimizer that it was saved with."
                )
        for kind, moment in self.moments.items():
            # The padding between weights becomes 0: a non-finite gradient may have made it NaN.
            moment.copy_(state[STEP] if kind == STEP else self.joined(saved[name][kind] for name in self.names))
        self.lr.fill_(state["lr"])
        self.weights.copy_(self.joined(self.views))


def _kind(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)} on {tensor.device}"


def _layout(parts: Mapping[str, Tensor]) -> str:
    return ", ".join(f"{kind} {list(part.shape)}" for kind, part in parts.items()) or "nothing"


def check_same(name: str, saved: Mapping[str, Tensor] | None, own: Mapping[str, Tensor]) -> None:
    """Raise a `ValueError` if saved weights are missing, or differ from the named network's in names or shapes."""
    why = "Hyperparameters that decide what is trained cannot change in a resume: leave them as they were."
    if saved is None:
        raise ValueError(f"the run trained no network {name!r}. {why}")
    for key in dict.fromkeys((*own, *saved)):
        had, has = (f"{list(getattr(each[key], 'shape', []))}" if key in each else "nothing" for each in (saved, own))
        if had != has:
            raise ValueError(f"the network {name!r} had {had} for `{key}` in the run, and has {has} here. {why}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rule(ABC):
    """The update rule of an optimizer. `weight_decay` is the weight of an L2 penalty."""

    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            if field.type == "float":
                _check_number(field.name, getattr(self, field.name))

    @abstractmethod
    def moments(self, weights: Tensor) -> dict[str, Tensor]:
        """Return the initial state by name: `[size]` each, like the weights; `step`, the steps so far, is `[1]`."""

    @abstractmethod
    def apply(self, weights: Tensor, gradient: Tensor, moments: Sequence[Tensor], lr: Tensor) -> None:
        """Update weights and moments in place."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Adam(Rule):
    """Adaptive moments.

        m = b1 m + (1 - b1) g,  v = b2 v + (1 - b2) g^2,  c1 = 1 - b1^t,  c2 = 1 - b2^t
        w = w - lr m / c1 / (sqrt(v / c2) + eps)

    Source: Kingma and Ba 2015, arXiv:1412.6980, algorithm 1; decoupled weight decay: Loshchilov and Hutter 2019,
    arXiv:1711.05101, algorithm 2.
    """

    betas: Sequence[float] = (0.9, 0.999)
    eps: float = 1e-8
    decoupled: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.betas, str) or not isinstance(self.betas, Sequence) or len(self.betas) != 2:
            raise ValueError(f"`optimizer_config`: `betas` must be two numbers; got {self.betas!r}.")
        for beta in self.betas:
            _check_number("betas", beta, below=1.0)

    def moments(self, weights: Tensor) -> dict[str, Tensor]:
        """Return the running means of gradients and of their squares, `[size]`, and the steps taken so far, `[1]`."""
        vectors = {name: torch.zeros_like(weights) for name in ("exp_avg", "exp_avg_sq")}
        return vectors | {STEP: weights.new_zeros(1)}

    def apply(self, weights: Tensor, gradient: Tensor, moments: Sequence[Tensor], lr: Tensor) -> None:
        """Move the weights, `[size]`, by the rule above."""
        first, second, step = moments
        step.add_(1.0)
        beta1, beta2 = self.betas
        options = {"beta1": beta1, "beta2": beta2, "weight_decay": self.weight_decay, "eps": self.eps}
        others = {"amsgrad": False, "maximize": False}
        make_step = adam_step(weights.device.type, self.decoupled)
        make_step([weights], [gradient], [first], [second], [], [step], lr=lr, **options, **others)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RAdam(Adam):
    """Adam with rectified steps, which grow as the second moment's variance falls; momentum alone until then.

        rho = 2 / (1 - b2) - 1,  rho_t = rho - 2 t b2^t / c2
        r   = sqrt((rho_t - 4) (rho_t - 2) rho / ((rho - 4) (rho - 2) rho_t))
        w   = w - lr m / c1 r sqrt(c2) / (sqrt(v) + eps)   where rho_t > 5
              w - lr m / c1                                before

    Source: Liu et al. 2020, arXiv:1908.03265, algorithm 2, with the threshold of `torch.optim`.
    """

    def apply(self, weights: Tensor, gradient: Tensor, moments: Sequence[Tensor], lr: Tensor) -> None:
        """Move the weights, `[size]`, by the rule above."""
        first, second, step = moments
        beta1, beta2 = self.betas
        if self.weight_decay and self.decoupled:
            weights.mul_(1.0 - lr * self.weight_decay)
        elif self.weight_decay:
            gradient = gradient + self.weight_decay * weights
        step.add_(1.0)
        first_total, second_total = advance(gradient, first, second, step, beta1, beta2)
        rho = 2.0 / (1.0 - beta2) - 1.0
        rho_t = rho - 2.0 * step * (1.0 - second_total) / second_total
        # rho_t stays below rho, so steps are never rectified if rho <= 5, where the denominator may be 0.
        share = rho / ((rho - 4.0) * (rho - 2.0)) if rho > 5.0 else 0.0
        ratio = (rho_t - 4.0) * (rho_t - 2.0) * share / rho_t
        rectified = ratio.clamp(min=0.0).sqrt() * second_total.sqrt() / (second.sqrt() + self.eps)
        weights.sub_(first * torch.where(rho_t > 5.0, rectified, 1.0) * (lr / first_total))


@dataclasses.dataclass(frozen=True, kw_only=True)
class SGD(Rule):
    """Gradient descent with momentum.

    b = momentum b + g,  w = w - lr b  (with `nesterov`: w - lr (g + momentum b))
    """

    momentum: float = 0.0
    nesterov: bool = False

    def moments(self, weights: Tensor) -> dict[str, Tensor]:
        """Return the running sum of gradients, `[size]`, if there is momentum."""
        return {"momentum_buffer": torch.zeros_like(weights)} if self.momentum else {}

    def apply(self, weights: Tensor, gradient: Tensor, moments: Sequence[Tensor], lr: Tensor) -> None:
        """Move the weights, `[size]`, by the rule above."""
        if self.weight_decay:
            gradient = gradient + self.weight_decay * weights
        direction = gradient
        for velocity in moments:
            velocity.mul_(self.momentum).add_(gradient)
            direction = gradient + self.momentum * velocity if self.nesterov else velocity
        weights.sub_(direction * lr)


def _check_number(name: str, number: object, below: float = math.inf) -> None:
    """Raise if an option is not a number in [0, below)."""
    is_number = isinstance(number, int | float) and not isinstance(number, bool)
    if not is_number or not 0.0 <= number < below:  # type: ignore[operator] # mypy does not join the two
        limit = f" and less than {below:g}" if below < math.inf else ""
        raise ValueError(f"`optimizer_config`: `{name}` must be finite, at least 0{limit}; got {number!r}.")


OPTIMIZERS: dict[str, type[Rule]] = {"adam": Adam, "adamw": Adam, "radam": RAdam, "sgd": SGD}


def make_rule(name: str, config: Mapping[str, Any]) -> Rule:
    """Return the rule of a built-in optimizer; raise a `ValueError` if an option is unknown or out of its range."""
    legal = [field.name for field in dataclasses.fields(OPTIMIZERS[name]) if field.name != "decoupled"]
    check_names_in(config, legal, f"`optimizer_config` of {name}")
    if name == "adamw":
        return Adam(**{"weight_decay": 0.01, **config}, decoupled=True)
    return OPTIMIZERS[name](**config)


@dataclasses.dataclass(frozen=True)
class AdaptiveRate:
    """A learning rate that falls where updates move the policy too far, and rises where they hardly do.

        lr <- max(low, lr / 1.5)     where KL > 2 kl
              min(high, 1.5 lr)      where 0 < KL < kl / 2

    Source: rsl_rl's schedule "adaptive" (Schwarke et al. 2025, arXiv:2509.10771), whose largest rate is 1e-2.
    """

    kl: float = 0.01
    low: float = 1e-5
    high: float = 3e-3

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if not is_number or not 0.0 < value < math.inf:
                raise ValueError(f"`lr_schedule`: {name} must be a number greater than 0; got {value!r}.")
        if self.low > self.high:
            raise ValueError(f"`lr_schedule`: low must be at most high; got {self.low!r} and {self.high!r}.")

    @classmethod
    def make(cls, spec: Any, lr: float) -> AdaptiveRate | None:
        """Parse an `lr_schedule` that begins at `lr`; return None if it does not adapt."""
        if not is_adaptive(spec):
            return None
        fields = [field.name for field in dataclasses.fields(cls)]
        check_names_in(spec, ["kind", *fields], f"An `lr_schedule` of kind {ADAPTIVE!r}")
        bounds = {"low": min(lr, cls.low), "high": max(lr, cls.high)}  # those that are left out include `lr`
        rate = cls(**bounds | {name: value for name, value in spec.items() if name != "kind"})
        if not rate.low <= lr <= rate.high:
            raise ValueError(
                f"`lr_schedule` of kind {ADAPTIVE!r} begins at `lr`, which must be from {rate.low!r} to {rate.high!r}, "
                f"its low and high; got {lr!r}."
            )
        return rate

    def adapted(self, lr: Tensor, kl: Tensor) -> Tensor:
        """Return the rate of the next update, given a measured divergence, all 0-d; a NaN changes nothing."""
        lower, higher = (lr / _FACTOR).clamp(min=self.low), (lr * _FACTOR).clamp(max=self.high)
        raised = torch.where((kl > 0.0) & (kl < self.kl / 2.0), higher, lr)
        return torch.where(kl > 2.0 * self.kl, lower, raised)

    def to_dict(self) -> dict[str, Any]:
        """Return the form that configs accept."""
        return {"kind": ADAPTIVE, **vars(self)}


def is_adaptive(spec: object) -> bool:
    """Whether an `lr_schedule` is adaptive."""
    return isinstance(spec, Mapping) and spec.get("kind") == ADAPTIVE
