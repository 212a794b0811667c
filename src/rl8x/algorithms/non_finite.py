"""Seeing on the device whether numbers are finite, for a few reductions a step and no copy of its own to the host.

A row of statistics says 1 under `finite/` and a quantity's name where it has a NaN or an infinity, else 0. The trainer
takes these out of the row, and looks closely only where one is not 0.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

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


# What a rollout shows of a quantity. Losses are not finite where values are not.
_SHOWN = {**_GATHERED, "losses": (keys.VALUES, keys.FINAL_VALUES)}
_MAX_LISTED = 32


def locate(rollout: Mapping[str, Tensor]) -> dict[str, dict[str, Any]]:
    """Find where a rollout is not finite first.

    Args:
        rollout: Its tensors, each `[horizon + 1, num_envs, ...]`.

    Returns:
        By quantity, of those that are not finite, plain data: the first `slot` of the horizon where one is not,
        `environments`: the copies where it is not in this slot, at most 32, and how many there are
        (`num_environments`), in how many it ever is not (`num_environments_in_rollout`), and whether the slot's is that
        of the `final` observation of an episode that was truncated.
    """
    found = {}
    for quantity, names in _SHOWN.items():
        shown = [value for name, value in rollout.items() if name.split("/")[0] in names and value.is_floating_point()]
        wrong = [~torch.isfinite(value).reshape(*value.shape[:2], -1).all(-1) for value in shown]
        final: Tensor | None = None
        if quantity == "observations" and keys.FINAL_VALUES in rollout:
            final = final_not_finite(rollout[keys.VALUES], rollout[keys.FINAL_VALUES])
            wrong.append(final)
        bad = torch.stack(wrong).any(0) if wrong else torch.zeros(1, 1, dtype=torch.bool)
        if not bad.any():
            continue
        slot = int(bad.any(1).nonzero()[0])
        environments = bad[slot].nonzero().flatten().tolist()
        found[quantity] = {
            "slot": slot,
            "environments": environments[:_MAX_LISTED],
            "num_environments": len(environments),
            "num_environments_in_rollout": int(bad.any(0).sum()),
            "final": final is not None and bool((final[slot] & bad[slot]).any()),
        }
    return found
