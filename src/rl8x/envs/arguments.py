"""Checks of the arguments that users give to environments."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

import gymnasium
import gymnasium.spaces as spaces
import torch
from torch import Tensor

from rl8x.envs.parameters import Parameter
from rl8x.envs.steps import State
from rl8x.spaces import describe_space, named_parts
from rl8x.trees import flatten_tree


def whole_number(number: Any, owner: str, name: str) -> int:
    """Return a number as an int.

    Args:
        number: The argument's value.
        owner: The environment's name in error messages.
        name: The argument's name there.

    Raises:
        TypeError: If it is not a whole number.
    """
    try:
        if isinstance(number, bool):  # Python would take `time_limit: true` as 1
            raise TypeError
        return operator.index(number)
    except TypeError:
        raise TypeError(f"{owner}: {name} must be a whole number; got {number!r}.") from None


def narrow_seed(seed: int) -> int:
    """Return a seed that any simulator takes: of 31 bits, as many have no more, also with the number of a copy added.

    Args:
        seed: Any whole number; one below 2^31 - 2^24 stays as it is.
    """
    return operator.index(seed) % (2**31 - 2**24)


def check_time_limit(limit: Any, owner: str) -> None:
    """Refuse a time limit that is not a positive number of steps.

    Args:
        limit: Steps until an episode is truncated; None for never.
        owner: The environment's name in error messages.

    Raises:
        TypeError: If it is not a whole number.
        ValueError: If it is less than 1.
    """
    if limit is not None and whole_number(limit, owner, "time_limit") < 1:
        raise ValueError(f"{owner}: time_limit must be at least 1 or None; got {limit}.")


def refuse_observing(observe_parameters: Any, owner: str) -> None:
    """Raise `TypeError` where a constructor, called by itself, is to show the parameters, which a wrapper does."""
    if observe_parameters != "none":
        raise TypeError(
            f"{owner}: a constructor does not take observe_parameters={observe_parameters!r}. Wrap the environment, "
            f"rl8x.envs.ObservedParameters({owner}(...), {observe_parameters!r}), or use `build` or `env_kwargs`."
        )


def check_declared(env: Any) -> None:
    """Raise `TypeError` where an environment declares no space of observations or actions, or wrong parameters."""
    for name in ("single_observation_space", "single_action_space"):
        space = getattr(env, name, None)
        if not isinstance(space, gymnasium.Space):
            raise TypeError(
                f"{type(env).__name__}: declare `{name}`, the gymnasium.spaces.Space of one copy; got {space!r}."
            )
    declared, is_one = env.parameters, isinstance(env.parameters, Mapping)
    items = declared.items() if is_one else ()
    wrong = {name: each for name, each in items if not (isinstance(name, str) and isinstance(each, Parameter))}
    if wrong or not is_one:
        raise TypeError(
            f"{type(env).__name__}: declare `parameters` as {{name: rl8x.Parameter(default=1.0, low=0.5, high=2.0, "
            f"unit='m', description='...')}}; got {wrong or declared!r:.200}."
        )


def taken_actions(actions: Any, space: gymnasium.Space[Any], num_envs: int, owner: str, name: str = "actions") -> Any:
    """Return actions in the types that policies give: discrete ones int64, floating-point numbers float32.

    In others the arithmetic of an environment is another: of uint8, 0 - 1 is 255. Those that are not one for each copy
    are refused, as torch would broadcast a single one to all.

    Args:
        actions: Tensors, in dicts where the space has parts.
        space: Space of one copy's action.
        num_envs: Copies of the environment.
        owner: The environment's name in error messages.
        name: The actions' name there.

    Raises:
        ValueError: If a tensor is missing, is not `[num_envs, *action]`, or holds a number that is not an action. The
            last is checked on the CPU alone: elsewhere the check would have to wait for the device.
    """
    if isinstance(space, spaces.Dict | spaces.Tuple):
        parts = actions if isinstance(actions, dict) else {}
        return {
            key: taken_actions(parts.get(key), part, num_envs, owner, f"{name}[{key!r}]")
            for key, part in named_parts(space)
        }
    need = [num_envs, *(space.shape or ())]
    if not isinstance(actions, Tensor) or list(actions.shape) != need:
        got = list(actions.shape) if isinstance(actions, Tensor) else f"a {type(actions).__name__}"
        raise ValueError(f"{owner}: {name} must be shaped {need}; got {got}.")
    if isinstance(space, spaces.Discrete | spaces.MultiDiscrete):
        _check_elements(actions, space, f"{owner}: {name}")
        return actions if actions.is_floating_point() else actions.long()
    return actions.float() if actions.dtype == torch.float64 else actions


def _check_elements(actions: Tensor, space: spaces.Discrete | spaces.MultiDiscrete, owner: str) -> None:
    if actions.device.type != "cpu":
        return
    first = torch.as_tensor(space.start)
    number = torch.as_tensor(space.n if isinstance(space, spaces.Discrete) else space.nvec)
    wrong = ~((actions >= first) & (actions < first + number))
    if wrong.any():
        raise ValueError(f"{owner} must be elements of {describe_space(space)}; got {actions[wrong][0].item()}.")


def check_restored(name: str, saved: State, made: State) -> None:
    """Refuse a saved state that has other parts or shapes than the one that `initial_state` makes.

    Raises:
        ValueError: If it does: the environment's class was changed since.
    """
    before, now = (
        {path: list(part.shape) for path, part in flatten_tree("state", state).items()} for state in (saved, made)
    )
    if before != now:
        raise ValueError(
            f"{name}: the class was changed since: the saved state is {before}, what `initial_state` makes {now}. "
            "Begin a new run, or bring the former class back."
        )
