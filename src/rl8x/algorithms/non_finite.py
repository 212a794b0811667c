"""Seeing on the device whether numbers are finite, for a few reductions a step and no copy of its own to the host.

A row of statistics says 1 under `finite/` and a quantity's name where it has a NaN or an infinity, else 0. The trainer
takes these out of the row, and looks closely only where one is not 0.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from rl8x import keys

# What was gathered, by the keys of a rollout. Discrete actions are always finite, their log-probabilities are not.
_GATHERED = {"observations": (keys.OBS,), "actions": (keys.ACTIONS, keys.LOGP), "rewards": (keys.REWARDS,)}


def any_not_finite(tensors: Iterable[Tensor]) -> Tensor:
    """Return 1.0 where a floating-point tensor among some has a NaN or an infinity, else 0.0; 0-d.

    The extremes of a tensor are found in one pass, and a NaN is both of them.
    """
    extremes = [extreme for tensor in tensors if tensor.is_floating_point() for extreme in tensor.aminmax()]
    if not extremes:
        return torch.zeros(())
    return (~torch.isfinite(torch.stack([extreme.to(torch.float32) for extreme in extremes])).all()).to(torch.float32)


@torch.no_grad()
def gathered_not_finite(rollout: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Look at what a rollout gathered.

    Args:
        rollout: Its tensors, by the keys of a rollout.
    """
    found = {
        f"finite/{quantity}": any_not_finite(value for name, value in rollout.items() if name.split("/")[0] in names)
        for quantity, names in _GATHERED.items()
    }
    final = final_not_finite(rollout[keys.VALUES], rollout[keys.FINAL_VALUES]).any()
    found["finite/observations"] = torch.maximum(found["finite/observations"], final.to(torch.float32))
    return found


def final_not_finite(values: Tensor, final_values: Tensor) -> Tensor:
    """Tell where the final observation of an episode that was cut is not finite, which a rollout shows by its value.

    Args:
        values: Of the observations acted on, any shape. Where these are NaN too, weights are to blame.
        final_values: Of the final observations, in the same shape.
    """
    return final_values.isnan() & values.isfinite()


@torch.no_grad()
def updates_not_finite(rows: Tensor, weights: Tensor) -> dict[str, Tensor]:
    """Look at a step's updates. After the first bad one all numbers are bad, so that only the first is looked at.

    Args:
        rows: Of each update the losses and, last, the norm of the gradient, `[updates, num_losses + 1]`.
        weights: All weights after the updates, as one vector.
    """
    bad = ~torch.isfinite(rows)
    first = bad.any(1).to(torch.float32).argmax()
    # Indexing with a 0-d tensor would copy it to the host.
    worst = bad.index_select(0, first.reshape(1)).squeeze(0)
    losses, gradient = worst[:-1].any(), worst[-1]
    return {
        "finite/losses": losses.to(torch.float32),
        "finite/gradients": gradient.to(torch.float32),
        "finite/parameters": any_not_finite([weights]),
    }
