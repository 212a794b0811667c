"""Numbers that are not finite: flags of rollouts and updates for a row's metrics, and places for a message."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from rl8x import keys
from rl8x.envs.team import Team
from rl8x.trees import names_of

# Collected quantities, by the keys of a rollout. Discrete actions are always finite, but not their log-probabilities.
COLLECTED: Final = {
    "observations": (keys.OBS, keys.NEXT_OBS),
    "actions": (keys.ACTIONS, keys.LOGP),
    "rewards": (keys.REWARDS,),
}
# Keys by which a non-finite quantity is located in a rollout. Losses are non-finite where values are.
_LOCATED_BY: Final = {**COLLECTED, "observations": (keys.OBS,), "losses": (keys.VALUES, keys.FINAL_VALUES)}
_MAX_LISTED: Final = 32


def gathered_not_finite(rollout: Mapping[str, Any]) -> dict[str, Any]:
    """Flag the quantities of a rollout, numbers by key, `[horizon + 1, num_envs, ...]`, by metric, 0-d bools."""
    names = tuple(rollout)
    flags = _flags({quantity: [rollout[name] for name in names_of(names, *of)] for quantity, of in COLLECTED.items()})
    if keys.FINAL_VALUES in rollout:
        flags["finite/observations"] = flags["finite/observations"] | _final_not_finite(rollout).any()
    return flags


@torch.no_grad()
def updates_not_finite(rows: Tensor, norms: Sequence[bool], weights: Iterable[Tensor]) -> dict[str, Tensor]:
    """Flag losses, gradients (`norms`) and weights at the first bad update of rows, `[updates, metrics]`."""
    bad = ~torch.isfinite(rows)
    first = bad.any(1).to(torch.float32).argmax()
    # Indexing with a 0-d tensor would be a host sync.
    worst = bad.index_select(0, first.reshape(1)).squeeze(0)
    of_gradients = [is_bad for is_bad, is_norm in zip(worst, norms, strict=True) if is_norm]
    of_losses = [is_bad for is_bad, is_norm in zip(worst, norms, strict=True) if not is_norm]
    return {
        "finite/losses": torch.stack(of_losses).any(),
        "finite/gradients": torch.stack(of_gradients).any(),
        **_flags({"parameters": list(weights)}),
    }


def _flags(groups: Mapping[str, Sequence[Any]]) -> dict[str, Any]:
    """Flag each group of tensors or arrays, `[...]` each, that contains a non-finite number, by metric, 0-d bools."""
    first = next(each for group in groups.values() for each in group)
    if not isinstance(first, Tensor):
        whole = "iub"  # kinds of numbers that are all finite
        return {
            f"finite/{name}": not all(each.dtype.kind in whole or np.isfinite(each).all() for each in group)
            for name, group in groups.items()
        }
    floats = [[each for each in group if each.is_floating_point() and each.numel()] for group in groups.values()]
    every = [extreme.to(torch.float32) for group in floats for each in group for extreme in torch.aminmax(each)]
    # One vector for all: the number of operators counts.
    bad = ~torch.isfinite(torch.stack(every)) if every else first.new_zeros(0, dtype=torch.bool)
    parts = bad.split_with_sizes([2 * len(group) for group in floats])
    return {f"finite/{name}": part.any() for name, part in zip(groups, parts, strict=True)}


def locate_non_finite(rollout: Mapping[str, Tensor], team: Team | None = None) -> dict[str, dict[str, Any]]:
    """Locate the first non-finite numbers of a rollout's tensors, each `[horizon + 1, num_envs, ...]`.

    Returns plain data for each such quantity: `slot`, the first with one; `environments`, at most 32 copies with one
    in it; `num_environments` and `num_environments_in_rollout`, how many there are in that slot and in any; and
    `final`, whether it is in the final observation of a truncated episode.
    """
    places = {}
    for quantity, names in _LOCATED_BY.items() if rollout else ():
        bad = _slots_not_finite(rollout, *names)
        of_final = torch.zeros_like(bad)
        if quantity == "observations" and keys.FINAL_VALUES in rollout:
            of_final = _final_not_finite(rollout)
        elif quantity == "observations":
            # If the episode continues, the next slot contains the same observation.
            ended = rollout[keys.TERMINATED] | rollout[keys.TRUNCATED]
            of_final = _slots_not_finite(rollout, keys.NEXT_OBS) & ended
        bad |= of_final
        if not bad.any():
            continue
        bad = bad if team is None else team.of_agents(bad).any(-2)
        slot = int(bad.any(1).nonzero()[0])
        environments = bad[slot].nonzero().flatten().tolist()
        places[quantity] = {
            "slot": slot,
            "environments": environments[:_MAX_LISTED],
            "num_environments": len(environments),
            "num_environments_in_rollout": int(bad.any(0).sum()),
            "final": bool(of_final[slot].any()),
        }
    return places


def _slots_not_finite(rollout: Mapping[str, Tensor], *names: str) -> Tensor:
    """Return the slots and copies in which a tensor of some keys has a non-finite number, `[horizon + 1, num_envs]`."""
    bad = torch.zeros_like(rollout[keys.REWARDS], dtype=torch.bool)
    for value in (rollout[name] for name in names_of(tuple(rollout), *names)):
        bad |= ~value.isfinite().reshape(*bad.shape, math.prod(value.shape[2:])).all(-1)
    return bad


def _final_not_finite(rollout: Mapping[str, Any]) -> Any:
    """Return where a truncated episode's final observation is non-finite, by its value, `[horizon + 1, num_envs]`."""
    final, values = rollout[keys.FINAL_VALUES], rollout[keys.VALUES]
    # Which is NaN. If the value of the observation acted on is too, the weights are the cause.
    return (final != final) & (values - values == 0.0)
