"""Optimizer update rules on flat vectors, in place: Adam, RAdam, and gradient descent; and a rate that adapts."""

from __future__ import annotations

import dataclasses
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor

from rl8x.algorithms.hyperparameters import check_names_in
from rl8x.execution.adam import advance, apply_adam

STEP: Final = "step"
ADAPTIVE: Final = "adaptive"  # the kind of an `lr_schedule`
_FACTOR: Final = 1.5


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rule(ABC):
    """The update rule of an optimizer. `weight_decay` is the weight of an L2 penalty."""

    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        """Check the options; raise a `ValueError` if one is out of its range."""
        _check_number("weight_decay", self.weight_decay)

    def options(self) -> dict[str, Any]:
        """Return the options by the names of `torch.optim`."""
        return dataclasses.asdict(self)

    @abstractmethod
    def moments(self, weights: Tensor) -> dict[str, Tensor]:
        """Return the initial optimizer state for weights `[size]`, such as running moments, by `torch.optim`'s names.

        Each is `[size]`, except `step`, the steps taken so far, `[1]`.
        """

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
        """Check the options; `betas` are in [0, 1)."""
        super().__post_init__()
        _check_number("eps", self.eps)
        if isinstance(self.betas, str) or not isinstance(self.betas, Sequence) or len(self.betas) != 2:
            raise ValueError(f"`optimizer_config`: `betas` must be two numbers; got {self.betas!r}.")
        for beta in self.betas:
            _check_number("betas", beta, below=1.0)

    def options(self) -> dict[str, Any]:
        """Return the options by the names of `torch.optim`."""
        options = super().options()
        return options | {"decoupled_weight_decay": options.pop("decoupled")}

    def moments(self, weights: Tensor) -> dict[str, Tensor]:
        """Return the running means of gradients and of their squares, `[size]`, and the steps taken so far, `[1]`."""
        vectors = {name: torch.zeros_like(weights) for name in ("exp_avg", "exp_avg_sq")}
        return vectors | {STEP: weights.new_zeros(1)}

    def apply(self, weights: Tensor, gradient: Tensor, moments: Sequence[Tensor], lr: Tensor) -> None:
        """Move the weights, `[size]`, by the rule above."""
        options = {name: getattr(self, name) for name in ("betas", "eps", "weight_decay", "decoupled")}
        apply_adam(weights, gradient, moments, lr, **options)


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

    def __post_init__(self) -> None:
        """Check the options."""
        super().__post_init__()
        _check_number("momentum", self.momentum)

    def options(self) -> dict[str, Any]:
        """Return the options by the names of `torch.optim`."""
        return super().options() | {"dampening": 0.0}

    def moments(self, weights: Tensor) -> dict[str, Tensor]:
        """Return the running sum of gradients, `[size]`, where there is momentum."""
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
        """Return the rate that an `lr_schedule`, as a config has it, stands for; None if it is of another kind.

        A bound that it leaves out gives way to `lr`, the rate that it begins with. Raises a `ValueError` if a key is
        unknown, a value is not legal, or `lr` is not in its range.
        """
        if not is_adaptive(spec):
            return None
        fields = [field.name for field in dataclasses.fields(cls)]
        check_names_in(spec, ["kind", *fields], f"An `lr_schedule` of kind {ADAPTIVE!r}")
        bounds = {"low": min(lr, cls.low), "high": max(lr, cls.high)}
        rate = cls(**bounds | {name: value for name, value in spec.items() if name != "kind"})
        if not rate.low <= lr <= rate.high:
            raise ValueError(
                f"`lr_schedule` of kind {ADAPTIVE!r} begins at `lr`, which must be from {rate.low!r} to {rate.high!r}, "
                f"its low and high; got {lr!r}."
            )
        return rate

    def adapted(self, lr: Tensor, kl: Tensor) -> Tensor:
        """Return the rate of the update that follows a measured divergence, all 0-d; a NaN leaves it as it is."""
        lower, higher = (lr / _FACTOR).clamp(min=self.low), (lr * _FACTOR).clamp(max=self.high)
        raised = torch.where((kl > 0.0) & (kl < self.kl / 2.0), higher, lr)
        return torch.where(kl > 2.0 * self.kl, lower, raised)

    def to_dict(self) -> dict[str, Any]:
        """Return the form that a config takes."""
        return {"kind": ADAPTIVE, **vars(self)}


def is_adaptive(spec: object) -> bool:
    """Whether an `lr_schedule` is one that adapts."""
    return isinstance(spec, Mapping) and spec.get("kind") == ADAPTIVE
