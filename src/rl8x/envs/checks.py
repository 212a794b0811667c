"""Checks of the arguments that users give to environments, and of the results of simulators.

Gymnasium's API has changed over the years, and the results of an older environment would only fail deep inside. So they
are checked where they come in: for one copy when a policy is built for it, for all copies in the first step.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Iterable, Mapping
from typing import Any, TypeGuard

import gymnasium
import gymnasium.spaces as spaces
import numpy as np
import torch
from gymnasium.vector import VectorEnv
from torch import Tensor

from rl8x.envs.parameters import Parameter
from rl8x.output import shown
from rl8x.spaces import check_elements, describe_space, named_parts, torch_dtype
from rl8x.trees import flatten_tree


def is_vectorised(env: object) -> TypeGuard[VectorEnv[Any, Any, Any]]:
    """Whether an object steps many copies: a `VectorEnv`, or an object with its attributes, such as Isaac Lab's."""
    names = ("num_envs", "single_observation_space", "single_action_space", "reset", "step")
    return isinstance(env, VectorEnv) or (not isinstance(env, type) and all(hasattr(env, name) for name in names))


def whole_number(number: Any, owner: str, name: str) -> int:
    """Return a number as an int; raise `TypeError` if it is not whole; `owner` is the environment."""
    try:
        if isinstance(number, bool):  # Python would take `time_limit: true` as 1
            raise TypeError
        return operator.index(number)
    except TypeError:
        raise TypeError(f"{owner}: {name} must be a whole number; got {shown(number)}.") from None


def narrow_seed(seed: int) -> int:
    """Return a seed of at most 31 bits, even after adding a copy's index, as many simulators take no larger ones."""
    return operator.index(seed) % (2**31 - 2**24)


def check_time_limit(limit: Any, owner: str) -> None:
    """Raise an error for a time limit that is neither None nor a positive number of steps."""
    if limit is not None and whole_number(limit, owner, "time_limit") < 1:
        raise ValueError(f"{owner}: time_limit must be at least 1 or None; got {limit}.")


def refuse_observing(observe_parameters: Any, owner: str) -> None:
    """Raise `TypeError` if a constructor gets `observe_parameters`, which only the wrapper implements."""
    if observe_parameters != "none":
        raise TypeError(
            f"{owner}: a constructor does not take observe_parameters={observe_parameters!r}. Wrap the environment, "
            f"rl8x.envs.ObservedParameters({owner}(...), {observe_parameters!r}), or use `build` or `env_kwargs`."
        )


def check_declared(env: Any) -> None:
    """Raise `TypeError` if an environment lacks the space of observations or actions, or declares wrong parameters."""
    owner, declared = type(env).__name__, env.parameters
    for name in ("single_observation_space", "single_action_space"):
        space = getattr(env, name, None)
        if not isinstance(space, gymnasium.Space):
            raise TypeError(f"{owner}: declare `{name}`, the gymnasium.spaces.Space of one copy; got {space!r}.")
    items = declared.items() if isinstance(declared, Mapping) else [("", declared)]
    wrong = {name: each for name, each in items if not (isinstance(name, str) and isinstance(each, Parameter))}
    if wrong:
        raise TypeError(
            f"{owner}: declare `parameters` as {{name: rl8x.Parameter(default=1.0, low=0.5, high=2.0, unit='m', "
            f"description='...')}}; got {wrong if isinstance(declared, Mapping) else declared!r:.200}."
        )


def taken_actions(actions: Any, space: gymnasium.Space[Any], num_envs: int, owner: str, name: str = "actions") -> Any:
    """Return actions as int64 or float32; raise `ValueError` for a wrong shape or, on the CPU, an illegal choice."""
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
        check_elements(actions, space, f"{owner}: {name}")
        return actions if actions.is_floating_point() else actions.long()  # in uint8, 0 - 1 is 255
    return actions.float() if actions.dtype == torch.float64 else actions


def check_restored(name: str, saved: Mapping[str, Tensor], made: Mapping[str, Tensor]) -> None:
    """Raise `ValueError` if a saved state has other parts or shapes than the state that `initial_state` makes."""
    flat = (flatten_tree("state", state) for state in (saved, made))
    before, now = ({path: list(part.shape) for path, part in parts.items()} for parts in flat)
    if before != now:
        raise ValueError(
            f"{name}: the class was changed since: the saved state is {before}, what `initial_state` makes {now}. "
            "Begin a new run, or bring the former class back."
        )


# -- results of simulators


def check_takes_seeds(env: Any) -> None:
    """Raise TypeError if the reset of an environment, or of a wrapper around it, does not take `seed` and `options`."""
    for layer in layers_of(env):
        try:
            inspect.signature(layer.reset).bind(seed=0, options=None)
        except ValueError:  # it is not written in Python
            continue
        except TypeError as error:
            owner = f"{type(layer).__name__}.reset"
            raise TypeError(f"{owner} must take `seed` and `options`, as Gymnasium's API has it: {error}.") from None


def check_reset(env: Any, result: Any, space: spaces.Space[Any], *, num_envs: int | None = None) -> None:
    """Raise TypeError or ValueError unless a reset's result, of `num_envs` copies or one, is of Gymnasium's form."""
    owner = f"{type(env).__name__}.reset"
    obs, _ = _values(owner, result, "(observation, info)")
    check_obs(owner, "the observation", obs, space, num_envs)


def check_step(env: Any, result: Any, space: spaces.Space[Any], *, num_envs: int | None = None) -> None:
    """Raise TypeError or ValueError unless a step's result has the form of Gymnasium's API; see `check_reset`."""
    owner = f"{type(env).__name__}.step"
    form = "(observation, reward, terminated, truncated, info)"
    obs, reward, terminated, truncated, _ = _values(owner, result, form)
    rewards = {"reward" if num_envs is None else "rewards": reward}
    check_rows(owner, num_envs, **rewards, terminated=terminated, truncated=truncated)
    check_obs(owner, "the observation", obs, space, num_envs)


def check_latest(copies: Iterable[Any]) -> None:
    """Raise TypeError or ValueError if the latest result of a `CopiedResults` has not the form of Gymnasium's API."""
    for copy in (each for each in copies if getattr(each, "latest", None) is not None):
        check = check_step if len(copy.latest) > 2 else check_reset
        check(copy.unwrapped, copy.latest, copy.observation_space)


def check_rows(owner: str, num_envs: int | None, **numbers: Any) -> None:
    """Raise ValueError unless each of the numbers, such as rewards, has the shape `[num_envs]`, or `[]` of one copy."""
    shape = () if num_envs is None else (num_envs,)
    for name, value in numbers.items():
        array = value if isinstance(value, Tensor) else np.asarray(value)
        if tuple(array.shape) != shape or (not isinstance(array, Tensor) and array.dtype.kind not in "biuf"):
            need = f"shaped {list(shape)}, one number for each copy" if shape else "one number, of the shape []"
            raise ValueError(f"{owner}: `{name}` must be {need}; got {_described(value)}.")


def _values(owner: str, result: Any, form: str) -> Any:
    """Return a function's result; raise `TypeError` unless it has as many values as the form, with a mapping last."""
    if not isinstance(result, tuple | list) or len(result) != form.count(",") + 1:
        got = f"a tuple of {len(result)} values" if isinstance(result, tuple) else _described(result)
        raise TypeError(f"{owner} must return {form}, as Gymnasium's API has it; it returned {got}.")
    if not isinstance(result[-1], Mapping):
        raise TypeError(f"{owner} must return {form} with a dict as `info`; got {_described(result[-1])} as `info`.")
    return result


def check_obs(owner: str, name: str, obs: Any, space: spaces.Space[Any], num_envs: int | None) -> None:
    """Raise ValueError unless an observation, or a batch, has the parts, shapes and kinds of numbers of its space."""
    if isinstance(space, spaces.Dict | spaces.Tuple):
        by_place = isinstance(obs, tuple | list) and isinstance(space, spaces.Tuple)
        given = obs if isinstance(obs, Mapping) else {str(i): part for i, part in enumerate(obs)} if by_place else {}
        for key, part in named_parts(space):
            if key not in given:
                got = f"{', '.join(map(str, given))}" if given else _described(obs)
                raise ValueError(f"{owner}: {name} must have the parts of {describe_space(space)}; got {got}.")
            check_obs(owner, f"{name}[{key!r}]", given[key], part, num_envs)
        return
    array = obs if isinstance(obs, Tensor) else np.asarray(obs)
    fits = tuple(array.shape) == (*(() if num_envs is None else (num_envs,)), *(space.shape or ()))
    if isinstance(array, Tensor):
        fits = fits and torch.can_cast(array.dtype, torch_dtype(space))
    else:
        fits = fits and np.can_cast(array.dtype, np.dtype(space.dtype), "same_kind")
    if not fits:
        need = f"{'' if num_envs is None else f'{num_envs} '}elements of {describe_space(space)}"
        raise ValueError(f"{owner}: {name} must be {need}, as the space says; got {_described(obs)}.")


def _described(value: Any) -> str:
    """Describe a value in a few words."""
    if isinstance(value, np.ndarray | np.generic | Tensor):
        return f"{type(value).__name__} {list(value.shape)} of {str(value.dtype).removeprefix('torch.')}"
    if isinstance(value, bool | int | float | str | None):
        return repr(value)
    return f"a {type(value).__name__}" + (f" of {len(value)} values" if isinstance(value, tuple | list) else "")


def layers_of(env: Any) -> list[Any]:
    """Return an environment or vector environment and the wrappers around it, innermost first."""
    inner = layers_of(env.env) if isinstance(env, gymnasium.Wrapper | gymnasium.vector.VectorWrapper) else []
    return [*inner, env]
