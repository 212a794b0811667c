"""Find environments: the built-in ones by name, Gymnasium's by id, others by dotted path."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import gymnasium

from rl8x.envs import builtin
from rl8x.envs.base import Env
from rl8x.envs.gymnasium_env import GymnasiumEnv
from rl8x.importing import Trust, check_gymnasium_id, import_class, is_dotted, is_gymnasium_id
from rl8x.names import did_you_mean

BUILTIN: dict[str, type[Env]] = {name: getattr(builtin, name) for name in builtin.__all__}


def resolve(name: str) -> type[Env]:
    """Return the class of a built-in environment.

    Args:
        name: A key of `BUILTIN`.

    Raises:
        ValueError: If there is none of that name; the message has the nearest ones.
    """
    if name in BUILTIN:
        return BUILTIN[name]
    hint = did_you_mean(name, BUILTIN, show=str)
    raise ValueError(f"no built-in environment {name!r}.{hint} There are {', '.join(BUILTIN)}.")


def env_maker(env: object, *, trust: Trust = False) -> Callable[..., Env]:
    """Find what makes an environment.

    Args:
        env: A built-in name, a Gymnasium id, a dotted path, a class of ours or of Gymnasium's, or a factory.
        trust: Whether a dotted path or an id may import any module, and name any factory rather than a class.

    Returns:
        What is called with the number of copies, and `device` and `seed` by name.

    Raises:
        ValueError: If nothing is known or importable by that name.
        TypeError: If it makes no environments.
    """
    if isinstance(env, str):
        if is_gymnasium_id(env):
            check_gymnasium_id(env, trust)
            return functools.partial(GymnasiumEnv, env)
        env = import_class(env, (Env, gymnasium.Env), trust=trust) if is_dotted(env) else resolve(env)
    if isinstance(env, type) and issubclass(env, gymnasium.Env):
        return functools.partial(GymnasiumEnv, env)
    if isinstance(env, gymnasium.Env):
        name = repr(type(env).__name__ if env.spec is None else env.spec.id)
        raise TypeError(
            f"{name} is one copy of a Gymnasium environment, and a policy is trained on `num_envs` of them. Pass its "
            "id, or functools.partial(rl8x.envs.GymnasiumEnv, make_one) with a function that makes a copy."
        )
    if not callable(env):
        raise TypeError(
            "An environment is a class, a factory, a built-in name, a Gymnasium id, a dotted path, an rl8x Env or a "
            f"vector environment; got {env!r}."
        )
    return env


def make(name: str, num_envs: int, **kwargs: Any) -> Env:
    """Make a built-in environment by name.

    Args:
        name: Its name, a key of `BUILTIN`.
        num_envs: Number of copies.
        kwargs: Further arguments of its constructor.

    Raises:
        TypeError: As the constructor does.
        ValueError: If there is none of that name; the message has the nearest ones. And as the constructor does.
    """
    return resolve(name)(num_envs, **kwargs)
