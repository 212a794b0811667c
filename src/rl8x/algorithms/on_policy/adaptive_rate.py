"""A learning rate that follows the KL divergence of the updates."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, Final

import torch
from torch import Tensor

from rl8x.algorithms.hyperparameters import check_names_in

ADAPTIVE: Final = "adaptive"
_FACTOR: Final = 1.5


@dataclasses.dataclass(frozen=True)
class AdaptiveRate:
    """A learning rate that falls where updates move the policy too far, and rises where they hardly do.

        lr <- max(low, lr / 1.5)     where KL > 2 kl
              min(high, 1.5 lr)      where 0 < KL < kl / 2

    Args:
        kl: The wanted KL divergence between the policy that acted and the present one, in nats.
        low: The smallest rate.
        high: The largest.

    Raises:
        ValueError: If one is not a positive number, or `low` is above `high`.

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
        """Return the rate that an `lr_schedule` stands for; None if it is of another kind.

        Args:
            spec: The `lr_schedule`, as a config has it. A bound that it leaves out gives way to `lr`.
            lr: The rate that it begins with.

        Raises:
            ValueError: If it has an unknown key, a value is not legal, or `lr` is not in its range.
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
