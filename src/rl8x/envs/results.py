"""What simulators return: of the right form, and nobody else's memory.

Gymnasium's API has changed over the years, and what an older environment returns is only noticed deep inside. So the
forms are looked at where they come in: of one copy when a policy is built for it, of all in the first step.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import random
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

import gymnasium
import gymnasium.spaces as spaces
import numpy as np
import torch
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv
from gymnasium.wrappers import HumanRendering, RecordVideo
from torch import Tensor

from rl8x.execution.threads import kept_generators
from rl8x.keys import ACTION_MASK
from rl8x.spaces import describe_space, element_of, named_parts, only_legal, outside, tree_of

_RESET: Final = "(observation, info)"
_RAISED: Final = object()
_STEP: Final = "(observation, reward, terminated, truncated, info)"


class OwnResults(gymnasium.Wrapper[Any, Any, Any, Any]):
    """One copy of an environment, whose results are looked at the first time, and copied every time.

    Environments may overwrite and return the same arrays, also in the reset that follows an episode's end within the
    same step, or share them with other copies.
    """

    _is_known = False

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Reset the copy; seed and options are passed on."""
        if not self._is_known:
            check_takes_seeds(self.env)
        result = self.env.reset(seed=seed, options=options)
        if not self._is_known:
            check_reset(self.env, result, self.env.observation_space)
        obs, info = result
        return _own(obs), info

    def step(self, action: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        """Step the copy by an action of its space."""
        result = self.env.step(action)
        if not self._is_known:
            check_step(self.env, result, self.env.observation_space)
            self._is_known = True
        obs, reward, terminated, truncated, info = result
        if terminated or truncated:  # a reset may follow
            reward, terminated, truncated, info = map(_own, (reward, terminated, truncated, info))
        return obs.copy() if type(obs) is np.ndarray else _own(obs), reward, terminated, truncated, info


def _own(value: Any) -> Any:
    """Return a result in memory of its own; what is no array, nor a dict, list or tuple of them, is passed on."""
    if isinstance(value, np.ndarray):
        return value.copy()
    if isinstance(value, dict):
        return {name: _own(part) for name, part in value.items()}
    return type(value)(map(_own, value)) if type(value) in (tuple, list) else value


# -- forms


def check_takes_seeds(env: Any) -> None:
    """Raise TypeError if the reset of an environment, or of a wrapper around it, does not take `seed` and `options`."""
    for layer in _layers(env):
        try:
            parameters = inspect.signature(layer.reset).parameters.values()
        except ValueError:  # it is not written in Python
            continue
        names = {each.name for each in parameters if each.kind is not each.VAR_POSITIONAL}
        if not {"seed", "options"} <= names and not any(each.kind is each.VAR_KEYWORD for each in parameters):
            takes = ", ".join(map(str, parameters)) or "nothing"
            raise TypeError(
                f"{type(layer).__name__}.reset must take `seed` and `options` by name, as Gymnasium's API has it; it "
                f"takes {takes}."
            )


def check_reset(env: Any, result: Any, space: spaces.Space[Any], *, num_envs: int | None = None) -> None:
    """Raise TypeError or ValueError unless a reset's result has the form of Gymnasium's API.

    Args:
        env: What was reset.
        result: What its `reset` returned.
        space: Space of the observations of one copy.
        num_envs: Copies that it has; None for a single environment.
    """
    owner = f"{type(env).__name__}.reset"
    obs, _ = _values(owner, result, _RESET)
    _check_obs(owner, "the observation", obs, space, () if num_envs is None else (num_envs,))


def check_step(env: Any, result: Any, space: spaces.Space[Any], *, num_envs: int | None = None) -> None:
    """Raise TypeError or ValueError unless a step's result has the form of Gymnasium's API; see `check_reset`."""
    owner = f"{type(env).__name__}.step"
    obs, *numbers, _ = _values(owner, result, _STEP)
    for name, value in zip(("reward", "terminated", "truncated"), numbers, strict=True):
        name = name + "s" * (num_envs is not None and name == "reward")
        _check_numbers(owner, name, value, () if num_envs is None else (num_envs,))
    _check_obs(owner, "the observation", obs, space, () if num_envs is None else (num_envs,))


def check_rows(owner: str, num_envs: int, **numbers: Any) -> None:
    """Raise ValueError unless each of some numbers, such as rewards, is `[num_envs]`.

    Args:
        owner: What gave them, in error messages.
        num_envs: Copies of the environment.
        numbers: The numbers by name.
    """
    for name, value in numbers.items():
        _check_numbers(owner, name, value, (num_envs,))


def _values(owner: str, result: Any, form: str) -> Any:
    """Return the values that a function returned; raise unless they are as many as the form has, with an info last."""
    if not isinstance(result, tuple | list) or len(result) != form.count(",") + 1:
        got = f"a tuple of {len(result)} values" if isinstance(result, tuple) else _described(result)
        raise TypeError(f"{owner} must return {form}, as Gymnasium's API has it; it returned {got}.")
    if not isinstance(result[-1], Mapping):
        raise TypeError(f"{owner} must return {form} with a dict as `info`; got {_described(result[-1])} as `info`.")
    return result


def _check_numbers(owner: str, name: str, value: Any, shape: tuple[int, ...]) -> None:
    array = value if isinstance(value, Tensor) else np.asarray(value)
    if tuple(array.shape) != shape or (not isinstance(array, Tensor) and array.dtype.kind not in "biuf"):
        need = f"shaped {list(shape)}, one number for each copy" if shape else "one number, of the shape []"
        raise ValueError(f"{owner}: `{name}` must be {need}; got {_described(value)}.")


def _check_obs(owner: str, name: str, obs: Any, space: spaces.Space[Any], batch: tuple[int, ...]) -> None:
    """Raise unless an observation, or a batch of them, has the parts, shapes and kinds of numbers that a space says."""
    if isinstance(space, spaces.Dict | spaces.Tuple):
        given = obs if isinstance(obs, Mapping) and isinstance(space, spaces.Dict) else {}
        if isinstance(obs, tuple | list) and isinstance(space, spaces.Tuple):
            given = {str(i): part for i, part in enumerate(obs)}
        for key, part in named_parts(space):
            if key not in given:
                got = f"{', '.join(map(str, given))}" if given else _described(obs)
                raise ValueError(f"{owner}: {name} must have the parts of {describe_space(space)}; got {got}.")
            _check_obs(owner, f"{name}[{key!r}]", given[key], part, batch)
        return
    array = obs if isinstance(obs, Tensor) else np.asarray(obs)
    fits = tuple(array.shape) == (*batch, *(space.shape or ()))
    if fits and not isinstance(array, Tensor):
        fits = np.can_cast(array.dtype, np.dtype(space.dtype), "same_kind")
    if not fits:
        need = (
            f"elements of {describe_space(space)}" if not batch else f"{batch[0]} elements of {describe_space(space)}"
        )
        raise ValueError(f"{owner}: {name} must be {need}, as the space says; got {_described(obs)}.")


def _described(value: Any) -> str:
    """Name what came, in a few words."""
    if isinstance(value, np.ndarray | np.generic | Tensor):
        return f"{type(value).__name__} {list(value.shape)} of {str(value.dtype).removeprefix('torch.')}"
    if isinstance(value, bool | int | float | str | None):
        return repr(value)
    return f"a {type(value).__name__}" + (f" of {len(value)} values" if isinstance(value, tuple | list) else "")


# -- one copy is tried


def try_copy(vector_env: Any) -> None:
    """Make one more copy of those that a vector environment steps one by one, and look at what it returns.

    The copies themselves stay as they are. What a copy raises by itself is left to the training, whose traceback shows
    where; so is all of a simulator of which there can be one only.

    Raises:
        TypeError: If a function takes or returns other things than in Gymnasium's API.
        ValueError: If an observation is not of the space, or a number is none.
    """
    inner = vector_env.unwrapped
    if not isinstance(inner, SyncVectorEnv | AsyncVectorEnv):
        return
    far: list[str] = []
    with _kept_random(), warnings.catch_warnings(action="ignore"):
        env = _came(inner.env_fns[0])
        if env is _RAISED or any(env.unwrapped is stepped.unwrapped for stepped in getattr(inner, "envs", ())):
            return
        layers = [layer for layer in _layers(env) if not isinstance(layer, OwnResults)]
        try:
            for layer in layers:
                if isinstance(layer, RecordVideo | HumanRendering):  # the film of an episode that is none
                    break
                if layer is layers[-1] or not type(layer).__module__.startswith("gymnasium."):
                    far += _try_layer(layer)
            if isinstance(inner, AsyncVectorEnv) and inner.autoreset_mode == AutoresetMode.SAME_STEP:
                _check_own_memory(env)
        finally:
            env.close()
    warn_outside(type(env.unwrapped).__name__, far)


def warn_outside(owner: str, far: Sequence[str]) -> None:
    """Warn of the first of the observations that are `outside` of their space, if there are any."""
    if far:
        text = f"{owner}: {far[0]}. Nothing is cut off; mend `observation_space`, or the observation."
        warnings.warn(text, RuntimeWarning, stacklevel=4)


def _check_own_memory(env: Any) -> None:
    """Raise ValueError if a reset overwrites the last observation of an episode, which a worker sends after it."""
    last, first = _came(_step_at_random, env, _came(env.reset)), _came(env.reset)
    if last is not _RAISED and first is not _RAISED and _shares_memory(last[0], first[0]):
        raise ValueError(
            f"{type(env.unwrapped).__name__} overwrites and returns one array, so that an AsyncVectorEnv that resets "
            "copies in the same step sends the first observation of an episode as the last of the one before. Give "
            "GymnasiumEnv the function that makes a copy, with vectorization='async', or take another autoreset_mode."
        )


def _shares_memory(one: Any, other: Any) -> bool:
    """Whether two observations of one space have memory in common."""
    if isinstance(one, Mapping):
        return any(_shares_memory(part, other[key]) for key, part in one.items())
    if isinstance(one, tuple):
        return any(map(_shares_memory, one, other))
    return isinstance(one, np.ndarray) and np.shares_memory(one, other)


def _layers(env: Any) -> list[Any]:
    """Return an environment and the wrappers around it, the innermost first."""
    return [*(_layers(env.env) if isinstance(env, gymnasium.Wrapper) else ()), env]


def _try_layer(env: Any) -> list[str]:
    """Reset and step an environment, or a wrapper with what is in it; return what is out of bounds of what it sees."""
    check_takes_seeds(env)
    space, far = env.observation_space, []
    result = _came(env.reset, seed=0)
    if result is not _RAISED:
        check_reset(env, result, space)
        far += outside(tree_of(result[0], _as_tensor), space)
        result = _came(_step_at_random, env, result)
    if result is not _RAISED:
        check_step(env, result, space)
        far += outside(tree_of(result[0], _as_tensor), space)
    return far


def _as_tensor(part: Any) -> Tensor:
    return torch.as_tensor(np.asarray(part))


def _step_at_random(env: Any, reset: Any) -> Any:
    """Step by a random action, a legal one if the observation that the reset gave has an action mask."""
    obs, _ = reset
    space = copy.deepcopy(env.action_space)
    space.seed(0)
    actions, seen = tree_of((space.sample(), obs), lambda part: torch.as_tensor(np.asarray(part)[None])).values()
    if isinstance(seen, Mapping) and ACTION_MASK in seen:
        actions = only_legal(actions, seen[ACTION_MASK], space)
    return env.step(element_of(space, actions, lambda part, rows: rows[0].numpy().astype(part.dtype)[()]))


def _came(function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    """Return what a function of a simulator gives; `_RAISED` where it raises."""
    try:
        return function(*arguments, **named)
    except Exception:
        return _RAISED


@contextlib.contextmanager
def _kept_random() -> Iterator[None]:
    """Keep the global random generators, which old environments seed or draw from, as they are."""
    numbers, drawn = np.random.get_state(), random.getstate()
    try:
        with kept_generators(torch.device("cpu")):
            yield
    finally:
        np.random.set_state(numbers)
        random.setstate(drawn)
