"""The built-in environments by name."""

from __future__ import annotations

import difflib
from typing import Any

from rl8x.envs.acrobot import Acrobot
from rl8x.envs.algo_trading import AlgoTrading
from rl8x.envs.base import Env
from rl8x.envs.cartpole import CartPole, CartPoleInfinite
from rl8x.envs.dummy import ContinuousDummy, DiscreteDummy
from rl8x.envs.mountain_car import MountainCar, MountainCarContinuous
from rl8x.envs.pendulum import Pendulum

BUILTIN: dict[str, type[Env]] = {
    cls.__name__: cls
    for cls in (
        CartPole,
        CartPoleInfinite,
        Pendulum,
        MountainCar,
        MountainCarContinuous,
        Acrobot,
        AlgoTrading,
        DiscreteDummy,
        ContinuousDummy,
    )
}


def resolve(name: str) -> type[Env]:
    """Return the class of a built-in environment.

    Raises:
        ValueError: If there is none of that name; the message has the nearest ones.
    """
    if name in BUILTIN:
        return BUILTIN[name]
    near = difflib.get_close_matches(str(name), BUILTIN, n=2, cutoff=0.5)
    by_case = [key for key in BUILTIN if key.lower() == str(name).lower()]
    hint = f"Did you mean {' or '.join(by_case or near)}? " if by_case or near else ""
    raise ValueError(f"no built-in environment {name!r}. {hint}There are {', '.join(BUILTIN)}.")


def make(name: str, num_envs: int, **kwargs: Any) -> Env:
    """Make a built-in environment by name; further arguments go to its constructor."""
    return resolve(name)(num_envs, **kwargs)
