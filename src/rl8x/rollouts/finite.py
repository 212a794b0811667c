"""Where a rollout has numbers that are not finite: flags for a row's metrics, and places for a message."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from rl8x import keys
from rl8x.trees import is_part

# Collected quantities, by the keys of a rollout. Discrete actions are always finite, but not their log-probabilities.
COLLECTED: Final = {
    "observations": (keys.OBS, keys.NEXT_OBS),
    "actions": (keys.ACTIONS, keys.LOGP),
    "rewards": (keys.REWARDS,),
}
# Keys by which a non-finite quantity is located in a rollout. Losses are non-finite where values are.
_LOCATED_BY = {**COLLECTED, "observations": (keys.OBS,), "losses": (keys.VALUES, keys.FINAL_VALUES)}
_MAX_LISTED = 32


def any_not_finite(tensors: Iterable[Tensor]) -> Tensor:
    """Return whether any floating-point tensor, `[...]` each, contains a non-finite number; 0-d, bool."""
    found: Tensor = _each_not_finite({"": list(tensors)})[""]
    return found


@functools.cache
def _collected(names: tuple[str, ...]) -> dict[str, list[str]]:
    """Return which of a rollout's keys each quantity has."""
    return {quantity: [name for name in names if is_part(name, *parts)] for quantity, parts in COLLECTED.items()}


def gathered_not_finite(rollout: Mapping[str, Any]) -> dict[str, Any]:
    """Flag the quantities of a rollout, numbers by key, `[horizon + 1, num_envs, ...]`, by metric, 0-d bools."""
    groups = {quantity: [rollout[name] for name in names] for quantity, names in _collected(tuple(rollout)).items()}
    flags = {f"finite/{name}": flag for name, flag in _each_not_finite(groups).items()}
    if keys.FINAL_VALUES in rollout:
        flags["finite/observations"] = flags["finite/observations"] | _final_not_finite(rollout).any()
    return flags


def _each_not_finite(groups: Mapping[str, Sequence[Any]]) -> dict[str, Any]:
    """Return for each group of tensors or arrays, `[...]` each, whether one contains a non-finite number; 0-d, bool."""
    first = next((each for group in groups.values() for each in group), None)
    if first is not None and not isinstance(first, Tensor):
        whole = "iub"  # kinds of numbers that are all finite
        return {
            name: not all(each.dtype.kind in whole or np.isfinite(each).all() for each in group)
            for name, group in groups.items()
        }
    floats = {
        name: [each for each in group if each.is_floating_point() and each.numel()] for name, group in groups.items()
    }
    every = [
        extreme.to(torch.float32) for group in floats.values() for each in group for extreme in torch.aminmax(each)
    ]
    device = first.device if first is not None else None
    # One vector for all: the number of operators counts.
    bad = ~torch.isfinite(torch.stack(every)) if every else torch.zeros(0, dtype=torch.bool, device=device)
    parts = torch.split_with_sizes(bad, [2 * len(group) for group in floats.values()])
    return {name: part.any() for name, part in zip(groups, parts, strict=True)}


def _final_not_finite(rollout: Mapping[str, Any]) -> Any:
    """Return where a truncated episode's final observation is non-finite, by its value, `[horizon + 1, num_envs]`."""
    final, values = rollout[keys.FINAL_VALUES], rollout[keys.VALUES]
    # Which is NaN. If the value of the observation acted on is too, the weights are the cause.
    return (final != final) & (values - values == 0.0)


def locate_non_finite(rollout: Mapping[str, Tensor]) -> dict[str, dict[str, Any]]:
    """Locate the first non-finite numbers of a rollout.

    Args:
        rollout: The rollout's tensors by key, each `[horizon + 1, num_envs, ...]`.

    Returns:
        Plain data for each non-finite quantity: `slot`, the first slot with a non-finite number; `environments`, the
        indices of at most 32 copies with one in that slot; `num_environments`, the number of such copies;
        `num_environments_in_rollout`, the number of copies with one in any slot; and `final`, whether it is in the
        final observation of a truncated episode.
    """
    places = {}
    for quantity, names in _LOCATED_BY.items():
        wrong = _slots_not_finite(rollout, names)
        of_final: list[Tensor] = []
        if quantity == "observations" and keys.FINAL_VALUES in rollout:
            of_final = [_final_not_finite(rollout)]
        elif quantity == "observations":
            # If the episode continues, the next slot contains the same observation.
            ended = rollout[keys.TERMINATED] | rollout[keys.TRUNCATED]
            of_final = [bad & ended for bad in _slots_not_finite(rollout, (keys.NEXT_OBS,))]
        if not any(each.any() for each in (*wrong, *of_final)):
            continue
        bad = torch.stack((*wrong, *of_final)).any(0)
        slot = int(bad.any(1).nonzero()[0])
        environments = bad[slot].nonzero().flatten().tolist()
        places[quantity] = {
            "slot": slot,
            "environments": environments[:_MAX_LISTED],
            "num_environments": len(environments),
            "num_environments_in_rollout": int(bad.any(0).sum()),
            "final": any(bool(each[slot].any()) for each in of_final),
        }
    return places


def _slots_not_finite(rollout: Mapping[str, Tensor], names: Sequence[str]) -> list[Tensor]:
    """Return for each tensor of some keys the slots and copies with a non-finite number, `[horizon + 1, num_envs]`."""
    floats = [value for name, value in rollout.items() if is_part(name, *names) and value.is_floating_point()]
    return [~torch.isfinite(value).reshape(*value.shape[:2], math.prod(value.shape[2:])).all(-1) for value in floats]
