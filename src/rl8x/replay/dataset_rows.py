"""Checks of a data set's transitions, and the columns that are copied from the next row."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from typing import Any, Final

import gymnasium
import torch
from torch import Tensor

from rl8x import keys
from rl8x.spaces import check_mask, far_outside, leaves, only_legal
from rl8x.trees import flatten_tree, is_part, unflatten_tree, without_ends

_FLAGS: Final = (keys.TERMINATED, keys.TRUNCATED)
_NAMES: Final = "`obs`, `actions`, `rewards`, `terminated`, `truncated` and, where it is known, `next_obs`"


def checked(transitions: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return transitions in the dtypes that are stored, or raise `ValueError` with the first thing that is wrong."""
    parts = dict.fromkeys(name.split("/", 1)[0] for name in transitions)
    legal = (keys.OBS, keys.ACTIONS, keys.REWARDS, *_FLAGS, keys.NEXT_OBS)
    missing = [name for name in legal[:-1] if name not in parts]
    unknown = [name for name in parts if name not in legal]
    if missing or unknown:
        problem = f"has no {', '.join(missing)}" if missing else f"has {', '.join(unknown)}, which is not known"
        raise ValueError(f"a data set holds {_NAMES}; this one {problem}.")
    lengths = {name: len(tensor) if tensor.ndim else 0 for name, tensor in transitions.items()}
    if len(set(lengths.values())) != 1 or 0 in lengths.values():
        raise ValueError(f"a data set needs equally many rows of each name, and at least 1; got {lengths}.")
    rows = {name: tensor.float() if tensor.is_floating_point() else tensor for name, tensor in transitions.items()}
    for name in (keys.REWARDS, *_FLAGS):
        if rows[name].numel() != lengths[name]:
            raise ValueError(f"`{name}` must be one number a row; got the shape {list(rows[name].shape)}.")
        rows[name] = rows[name].reshape(-1)
    for name in _FLAGS:
        rows[name] = _flags(name, rows[name])
    rows[keys.REWARDS] = rows[keys.REWARDS].float()
    rows = {name: _finite(name, tensor, rows[keys.TERMINATED]) for name, tensor in rows.items()}
    for name in rows:
        _check_same_kind(name, rows)
    return rows


def _flags(name: str, tensor: Tensor) -> Tensor:
    wrong = ((tensor != 0) & (tensor != 1)).nonzero()
    if len(wrong):
        row = int(wrong[0])
        raise ValueError(f"`{name}` must be true or false, or 0 or 1; got {tensor[row].item()} in row {row:,}.")
    return tensor.bool()


def _finite(name: str, tensor: Tensor, terminated: Tensor) -> Tensor:
    """Return numbers `[rows, ...]` that are finite; refuse others, but after a termination, where none bootstraps."""
    if not tensor.is_floating_point() or tensor.isfinite().all():
        return tensor
    if is_part(name, keys.NEXT_OBS):
        tensor = without_ends(tensor, terminated)
    wrong = (~tensor.isfinite()).reshape(len(tensor), -1).any(1)
    if wrong.any():
        row = int(wrong.to(torch.uint8).argmax())
        raise ValueError(f"`{name}` is not finite in row {row:,} of {len(tensor):,}: leave such rows out.")
    return tensor


def _check_same_kind(name: str, rows: Mapping[str, Tensor]) -> None:
    """Raise if `obs` and `next_obs` differ in their parts, shapes or dtypes."""
    if not any(is_part(each, keys.NEXT_OBS) for each in rows) or not is_part(name, keys.OBS, keys.NEXT_OBS):
        return
    first = name.partition("/")[0]
    other = (keys.NEXT_OBS if first == keys.OBS else keys.OBS) + name.removeprefix(first)
    if other not in rows:
        raise ValueError(f"`{name}` has no `{other}` to go with it.")
    kinds = [f"{each.dtype} {list(each.shape[1:])}" for each in (rows[name], rows[other])]
    if kinds[0] != kinds[1]:
        raise ValueError(f"`{name}` and `{other}` must be alike; got {kinds[0]} and {kinds[1]}.")


def check_legal(rows: Mapping[str, Tensor], observation_space: Any, action_space: Any) -> None:
    """Raise if an action is illegal by the mask of its observation: it has no value and no log-probability."""
    seen = observation_space.spaces if isinstance(observation_space, gymnasium.spaces.Dict) else {}
    if keys.ACTION_MASK not in seen or action_space is None:
        return
    check_mask(seen[keys.ACTION_MASK], action_space, keys.ACTION_MASK)
    taken, mask = unflatten_tree(keys.ACTIONS, rows), unflatten_tree(f"{keys.OBS}/{keys.ACTION_MASK}", rows)
    legal = flatten_tree(keys.ACTIONS, only_legal(taken, mask, action_space))
    for name, part in legal.items():
        wrong = (part != rows[name]).reshape(len(part), -1).any(1)
        if wrong.any():
            row = int(wrong.to(torch.uint8).argmax())
            raise ValueError(
                f"`{name}` is {rows[name][row].tolist()} in row {row:,}, which the row's `{keys.ACTION_MASK}` says is "
                f"illegal (there are {int(wrong.sum()):,} such rows): leave such rows out, or mend their masks."
            )


def warn_of_far_actions(rows: Mapping[str, Tensor], action_space: Any) -> None:
    """Warn of actions out of the bounds of their `Box`, in which an environment may have clipped them."""
    for path, leaf in [] if action_space is None else leaves(action_space):
        if not isinstance(leaf, gymnasium.spaces.Box):
            continue
        name = "/".join((keys.ACTIONS, *path))
        far = far_outside(rows[name], leaf)
        wrong = far.reshape(len(far), math.prod(leaf.shape)).any(1)
        if not wrong.any():
            continue
        row = int(wrong.to(torch.uint8).argmax())
        place = tuple(far[row].nonzero()[0].tolist())
        warnings.warn(
            f"`{name}` is out of the bounds of its Box in {int(wrong.sum()):,} of {len(wrong):,} rows, first in row "
            f"{row:,}: {rows[name][row][place].item():g}, where {leaf.low[place]:g} to {leaf.high[place]:g} is legal. "
            "They are learned from as they are: clip what the environment clipped, or give the space that they are of.",
            RuntimeWarning,
            stacklevel=3,
        )


def check_gaps(rows: dict[str, Tensor], gaps: str) -> None:
    """Raise for, or truncate in place, episodes that do not continue in the next row; see `gaps` of `Dataset`."""
    goes_on = ~(rows[keys.TERMINATED] | rows[keys.TRUNCATED])[:-1]
    apart = torch.zeros_like(goes_on)
    for name, part in rows.items():
        if is_part(name, keys.OBS):
            later = rows[keys.NEXT_OBS + name.removeprefix(keys.OBS)]
            apart |= (later[:-1] != part[1:]).reshape(len(apart), math.prod(part.shape[1:])).any(1)
    apart &= goes_on
    if gaps == "truncate":
        rows[keys.TRUNCATED] = rows[keys.TRUNCATED] | torch.cat([apart, apart.new_zeros(1)])
    elif apart.any():
        row = int(apart.to(torch.uint8).argmax())
        raise ValueError(
            f"row {row:,} ends no episode, but its `next_obs` is not the `obs` of row {row + 1:,} (there are "
            f"{int(apart.sum()):,} such rows). Mark where episodes are cut in `truncated`, or take gaps='truncate'."
        )


def with_next(what: str, rows: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Give each row the observation, or the action, of the row after it, as `next_*`.

    The last row of an episode that did not terminate is left out; the row before it ends the episode as if truncated.
    """
    terminated, ends = rows[keys.TERMINATED], rows[keys.TERMINATED] | rows[keys.TRUNCATED]
    unknown = ~terminated & ends
    unknown[-1] = ~terminated[-1]
    cut = torch.cat([unknown[1:], unknown.new_zeros(1)]) & ~ends
    if unknown.all():
        raise ValueError(
            f"no row has `next_{what}`, which are the `{what}` of the row after it in its episode: the last rows of "
            "episodes that are truncated or not over have none, and there are no others. Record longer episodes"
            f"{', or `next_obs`' if what == keys.OBS else ''}."
        )
    # Observations after a termination are never bootstrapped from, but have to be finite.
    own = torch.arange(len(ends), device=ends.device)
    source = torch.where(ends, own, own + 1)[~unknown]
    kept = {name: tensor[~unknown] for name, tensor in rows.items()}
    kept[keys.TRUNCATED] = (rows[keys.TRUNCATED] | cut)[~unknown]
    parts = {name: part for name, part in rows.items() if is_part(name, what)}
    return kept | {f"next_{name}": part[source] for name, part in parts.items()}
