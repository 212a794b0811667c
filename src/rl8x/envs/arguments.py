"""Checks of what a user gives an environment, each with one line that says what came and what is needed."""

from __future__ import annotations

import operator
from typing import Any

import gymnasium
from torch import Tensor

from rl8x.spaces import leaves


def whole_number(number: Any, owner: str, name: str) -> int:
    """Return a number as an int.

    Args:
        number: What was given.
        owner: What the error calls the environment.
        name: What it calls the argument.

    Raises:
        TypeError: If it is no whole number.
    """
    try:
        return operator.index(number)
    except TypeError:
        raise TypeError(f"{owner}: {name} must be a whole number; got {number!r}.") from None


def check_time_limit(limit: Any, owner: str) -> None:
    """Refuse what is no number of steps.

    Args:
        limit: Steps until an episode is truncated; None for never.
        owner: What the error calls the environment.

    Raises:
        TypeError: If it is no whole number.
        ValueError: If it is less than 1.
    """
    if limit is not None and whole_number(limit, owner, "time_limit") < 1:
        raise ValueError(f"{owner}: time_limit must be at least 1 or None; got {limit}.")


def check_declared(env: Any) -> None:
    """Refuse an environment that does not say what is observed and done.

    Args:
        env: The environment, whose attributes are looked at.

    Raises:
        TypeError: If a space is missing, or is none.
    """
    for name in ("single_observation_space", "single_action_space"):
        space = getattr(env, name, None)
        if not isinstance(space, gymnasium.Space):
            raise TypeError(
                f"{type(env).__name__}: declare `{name}`, the gymnasium.spaces.Space of one copy; got {space!r}."
            )


def check_actions(actions: Any, space: gymnasium.Space[Any], num_envs: int, owner: str) -> None:
    """Refuse actions that are not one for each copy: torch would broadcast a single one to all.

    Args:
        actions: Tensors, in dicts where the space has parts.
        space: Space of one copy's action.
        num_envs: Copies of the environment.
        owner: What the error calls the environment.

    Raises:
        ValueError: If a tensor is not `[num_envs, *action]`, or is missing.
    """
    for path, leaf in leaves(space):
        part = actions
        for key in path:
            part = part.get(key) if isinstance(part, dict) else None
        need = [num_envs, *(leaf.shape or ())]
        if not isinstance(part, Tensor) or list(part.shape) != need:
            name = "".join(f"[{key!r}]" for key in path)
            got = list(part.shape) if isinstance(part, Tensor) else f"a {type(part).__name__}"
            raise ValueError(f"{owner}: actions{name} must be shaped {need}; got {got}.")
