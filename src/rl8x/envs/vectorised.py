"""Make the vector environments that `GymnasiumEnv` steps: from ids, from functions, or from given ones."""

from __future__ import annotations

import functools
import inspect
import math
import re
import sys
from collections.abc import Callable, Collection, Sequence
from types import EllipsisType
from typing import Any, Final, TypeAlias

import gymnasium
import numpy as np
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv, VectorEnv
from gymnasium.wrappers import TimeLimit

from rl8x.envs.bound_parameters import BoundCopies
from rl8x.envs.checks import check_reset, check_step, check_takes_seeds, is_vectorised, layers_of
from rl8x.names import did_you_mean, package_of

Source: TypeAlias = "str | Callable[[], gymnasium.Env[Any, Any]] | VectorEnv[Any, Any, Any]"
_Wrap: TypeAlias = "Callable[[gymnasium.Env[Any, Any]], Any]"
_VECTORIZATIONS: Final = {"sync": "sync", "async": "async", "vector": "vector_entry_point"}
"""Our names and Gymnasium's."""
# Arguments that `gymnasium.make_vec` adds to those of a spec
OF_MAKE_VEC: Final = ("num_envs", "vectorization_mode", "vector_kwargs", "wrappers", "max_episode_steps")
# Running statistics of normalising wrappers, and the options of rl8x with the same purpose.
_STATISTICS: Final = {"obs_rms": "normalize_observations", "return_rms": "normalize_rewards"}


def vectorised(
    env: Source,
    num_envs: int | None,
    time_limit: int | EllipsisType | None,
    vectorization: str,
    kwargs: dict[str, Any],
    copies: BoundCopies | None,
) -> VectorEnv[Any, Any, Any]:
    """Return a given vector environment, or make one; the arguments are those of `GymnasiumEnv`."""
    if is_vectorised(env):
        if num_envs not in (None, env.num_envs):
            raise ValueError(
                f"GymnasiumEnv: the vector environment has {env.num_envs} copies; got num_envs={num_envs}."
            )
        if kwargs or not isinstance(time_limit, EllipsisType):
            given = ", ".join([*kwargs, *([] if isinstance(time_limit, EllipsisType) else ["time_limit"])])
            raise ValueError(f"GymnasiumEnv: a vector environment is taken as it is; set {given} where it is made.")
        return env
    if num_envs is None or num_envs < 1:
        raise ValueError(f"GymnasiumEnv: num_envs must be at least 1; got {num_envs}.")
    if vectorization not in _VECTORIZATIONS:
        known = ", ".join(map(repr, _VECTORIZATIONS))
        raise ValueError(f"GymnasiumEnv: vectorization must be one of {known}; got {vectorization!r}.")
    if vectorization != "vector":
        # Python 3.14's default start method on Linux runs a script without `if __name__ == "__main__"` again.
        start = {"context": "fork"} if vectorization == "async" and sys.platform == "linux" else {}
        vector_kwargs = {"autoreset_mode": AutoresetMode.SAME_STEP, **start, **kwargs.get("vector_kwargs", {})}
        kwargs = {**kwargs, "vector_kwargs": vector_kwargs}
    wrappers: list[_Wrap] = []
    if vectorization == "async":  # copies in this process are wrapped later: `copy_results`, `BoundCopies.adopt`
        wrappers = [CopiedResults, *([] if copies is None else [copies.wrapped])]
    if isinstance(env, str):
        if wrappers:
            kwargs = {**kwargs, "wrappers": [*(kwargs.get("wrappers") or ()), *wrappers]}
        return _from_id(env, num_envs, time_limit, vectorization, kwargs)
    if not callable(env):
        raise TypeError(
            f"GymnasiumEnv: env must be an id, a function that makes an environment, or a VectorEnv; got {env!r}."
        )
    if vectorization == "vector":
        raise ValueError("GymnasiumEnv: a function makes one copy at a time; vectorization must be 'sync' or 'async'.")
    vector_kwargs = kwargs.pop("vector_kwargs")
    make_one = functools.partial(_limited, functools.partial(env, **kwargs), time_limit, wrappers)
    kind = SyncVectorEnv if vectorization == "sync" else AsyncVectorEnv
    return kind([make_one] * num_envs, **vector_kwargs)


class CopiedResults(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Wraps one copy: copies its results, whose arrays it may overwrite or share, and checks first and odd ones."""

    reported: Collection[str] | None = None
    """Names to keep of `info`; None for all. Merging the rest takes 5% of the time of PPO on 16 HalfCheetahs."""
    latest: Any = None
    """The latest result, to say which one could not be put beside those of the other copies."""
    _is_known = False

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Reset the copy; seed and options are passed on."""
        if not self._is_known:
            check_takes_seeds(self.env)
        result = self.env.reset(seed=seed, options=options)
        if not (self._is_known and _has_form(result, 2)):
            check_reset(self.env, result, self.env.observation_space)
        self.latest = result
        obs, info = result
        return copied(obs), self._read_of(info)

    def step(self, action: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        """Step the copy by an action of its space."""
        result = self.env.step(action)
        if not (self._is_known and _has_form(result, 5)):
            check_step(self.env, result, self.env.observation_space)
            self._is_known = True
        self.latest = result
        obs, reward, terminated, truncated, info = result
        info = self._read_of(info)
        if terminated or truncated:  # a reset may follow
            reward, terminated, truncated, info = map(copied, (reward, terminated, truncated, info))
        return obs.copy() if type(obs) is np.ndarray else copied(obs), reward, terminated, truncated, info

    def _read_of(self, info: dict[str, Any]) -> dict[str, Any]:
        return info if self.reported is None else {name: info[name] for name in self.reported if name in info}


def _has_form(result: Any, count: int) -> bool:
    """Whether a result has the usual form, by a quick check: `count` values, with a dict as `info`."""
    return type(result) is tuple and len(result) == count and type(result[-1]) is dict


def copied(value: Any) -> Any:
    """Copy the arrays of a result, also those in dicts, lists and tuples; other values are passed on."""
    if isinstance(value, np.ndarray):
        return value.copy()
    if isinstance(value, dict):
        return {name: copied(part) for name, part in value.items()}
    return type(value)(map(copied, value)) if type(value) in (tuple, list) else value


def copy_results(vector_env: VectorEnv[Any, Any, Any], reported: Collection[str] | None) -> None:
    """Wrap the copies of this process in `CopiedResults`; raise `ValueError` if two are the same environment."""
    inner = vector_env.unwrapped
    if not isinstance(inner, SyncVectorEnv):
        return
    distinct = len({id(copy.unwrapped) for copy in inner.envs})
    if distinct < len(inner.envs):
        raise ValueError(
            f"GymnasiumEnv: {len(inner.envs)} copies are {distinct} environment(s), which several would step in turn: "
            "the function that makes a copy must make a new one at each call."
        )
    owners: list[Any] = [env if isinstance(env, CopiedResults) else CopiedResults(env) for env in inner.envs]
    for owner in owners:
        owner.reported = reported
    inner.envs = owners


def copies_of(vector_env: Any) -> Sequence[Any]:
    """Return the copies that a vector environment steps in this process."""
    return getattr(vector_env, "envs", ())


def wrapped_normalisation(vector_env: Any) -> list[str]:
    """Return rl8x's normalisation options that wrappers, of all copies or one, already cover by running statistics."""
    layers = layers_of(vector_env)
    base = layers[0]
    layers += [layer for copy in copies_of(base) for layer in layers_of(copy)]
    gathering = [layer for layer in layers if getattr(layer, "update_running_mean", True)]
    found = {name for name in _STATISTICS if any(hasattr(layer, name) for layer in gathering)}
    if isinstance(base, AsyncVectorEnv):
        there = {name: any(base.call("has_wrapper_attr", name)) for name in (*_STATISTICS, "update_running_mean")}
        if not there["update_running_mean"] or any(base.call("get_wrapper_attr", "update_running_mean")):
            found |= {name for name in _STATISTICS if there[name]}
    return [option for name, option in _STATISTICS.items() if name in found]


def spec_of(vector_env: VectorEnv[Any, Any, Any]) -> Any:
    """Return the spec of the copies; None if they were not made from an id."""
    copies = copies_of(vector_env)
    return copies[0].spec if copies else vector_env.spec


def time_limit_of(vector_env: VectorEnv[Any, Any, Any]) -> int | None:
    """Return the largest of the copies' time limits; None if none is known."""
    limit = getattr(spec_of(vector_env), "max_episode_steps", None)
    # Without an id, no spec has the limits of wrappers; the smallest of a copy's limits applies first.
    limiting = ([layer for layer in layers_of(copy) if isinstance(layer, TimeLimit)] for copy in copies_of(vector_env))
    limits = [
        min((each.get_wrapper_attr("_max_episode_steps") for each in layers), default=math.inf) for layers in limiting
    ]
    if min(limits, default=math.inf) < math.inf:
        limit = max(limits)
    limit = getattr(vector_env.spec, "kwargs", {}).get("max_episode_steps", limit)
    return limit if limit is not None and 0 < limit < sys.maxsize else None


def autoreset_mode_of(vector_env: Any) -> AutoresetMode:
    """Return when copies whose episode ended are reset; an environment's metadata may give the mode by name."""
    given = (vector_env.metadata or {}).get("autoreset_mode")
    if given is None:
        return AutoresetMode.NEXT_STEP if isinstance(vector_env, VectorEnv) else AutoresetMode.SAME_STEP
    try:
        return AutoresetMode(given)
    except ValueError:
        known = ", ".join(repr(mode.value) for mode in AutoresetMode)
        raise ValueError(f"GymnasiumEnv: metadata['autoreset_mode'] must be one of {known}; got {given!r}.") from None


def _limited(
    make_one: Callable[[], gymnasium.Env[Any, Any]],
    time_limit: int | EllipsisType | None,
    wrappers: Sequence[_Wrap],
) -> Any:
    """Make one copy, with the given time limit, if any, instead of its own, and with rl8x's wrappers."""
    env = make_one()
    if not isinstance(env, gymnasium.Env):
        raise TypeError(
            f"GymnasiumEnv: `env` must make a gymnasium.Env, one copy; it made {type(env).__name__}. One of the older "
            "`gym` package becomes one by shimmy's GymV26CompatibilityV0 or GymV21CompatibilityV0."
        )
    for name in ("observation_space", "action_space"):
        if not isinstance(space := getattr(env, name, None), gymnasium.Space):
            maker = type(env.unwrapped).__name__
            raise TypeError(f"{maker}: declare `{name}`, a gymnasium.spaces.Space; got {space!r}.")
    if not isinstance(time_limit, EllipsisType):
        env = _without_time_limit(env)
        env = env if time_limit is None else TimeLimit(env, time_limit)
    return functools.reduce(lambda inner, wrap: wrap(inner), wrappers, env)


def _without_time_limit(env: gymnasium.Env[Any, Any]) -> gymnasium.Env[Any, Any]:
    """Remove `TimeLimit` from the wrappers around a copy, as `gymnasium.make` adds one."""
    if isinstance(env, TimeLimit):
        return _without_time_limit(env.env)
    if isinstance(env, gymnasium.Wrapper):
        env.env = _without_time_limit(env.env)
    return env


def _from_id(
    name: str, num_envs: int, time_limit: int | EllipsisType | None, vectorization: str, kwargs: dict[str, Any]
) -> VectorEnv[Any, Any, Any]:
    """Make a registered environment; raise `ValueError` with similar ids if there is none."""
    if not isinstance(time_limit, EllipsisType):
        never = sys.maxsize if vectorization == "vector" else -1
        kwargs = {**kwargs, "max_episode_steps": never if time_limit is None else time_limit}
    try:
        return gymnasium.make_vec(name, num_envs, vectorization_mode=_VECTORIZATIONS[vectorization], **kwargs)
    except TypeError as error:
        unknown = re.search(r"unexpected keyword argument '(\w+)'", str(error))
        if unknown is None or unknown[1] not in kwargs:
            raise
        known = _keywords_of(name, vectorization)
        hint = did_you_mean(unknown[1], known)
        takes = f" It takes {', '.join(known)}." if known else ""
        raise ValueError(f"{name!r} takes no argument {unknown[1]!r}.{hint}{takes}") from error
    except (gymnasium.error.Error, ImportError) as error:
        if getattr(error, "name", None) is not None:  # what the environment itself imports is not there
            raise
        # Gymnasium's own messages are good, except for unknown ids, and malformed ones, which are a plain Error.
        if not isinstance(error, gymnasium.error.UnregisteredEnv) and type(error) is not gymnasium.error.Error:
            raise ValueError(f"{name!r} cannot be made: {error}") from error
        if name.rpartition(":")[-1] in gymnasium.registry:  # it has no vectorised form
            raise ValueError(f"{name!r} cannot be made with vectorization={vectorization!r}: {error}") from error
        package = package_of(name)
        if package:
            raise ValueError(f"no Gymnasium environment {name!r} is registered.{package}") from error
        hint = did_you_mean(name, gymnasium.registry, most=3, cutoff=0.5, show=str)
        own = "" if ":" in name else f" One that a module of yours registers is written 'module:{name}'."
        raise ValueError(f"no Gymnasium environment {name!r} is registered.{hint}{own}") from error


def _keywords_of(name: str, vectorization: str) -> list[str]:
    """Return the names of the keyword arguments of a registered environment's constructor."""
    spec = gymnasium.spec(name.rpartition(":")[-1])
    entry = spec.vector_entry_point if vectorization == "vector" else spec.entry_point
    maker = gymnasium.envs.registration.load_env_creator(entry) if isinstance(entry, str) else entry
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    takes = {} if maker is None else inspect.signature(maker).parameters
    return [name for name, each in takes.items() if each.kind not in variable]


def ask_for_final_obs(vector_env: Any) -> None:
    """Ask Isaac Lab for the observation before a reset; raise `ValueError` if it leaves resets to the caller."""
    config: Any = getattr(getattr(vector_env, "unwrapped", vector_env), "cfg", None)
    if isinstance(vector_env, VectorEnv) or not hasattr(config, "compute_final_obs"):
        return
    if getattr(config, "autoreset_mode", None) == AutoresetMode.DISABLED:
        raise ValueError(
            "GymnasiumEnv: Isaac Lab must reset its copies itself; set `autoreset_mode` to SAME_STEP in its config."
        )
    config.compute_final_obs = True
