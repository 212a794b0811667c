"""The built-in environments: a new one is imported and listed here, and nowhere else."""

from __future__ import annotations

from rl8x.envs.acrobot import Acrobot
from rl8x.envs.algo_trading import AlgoTrading
from rl8x.envs.cartpole import CartPole, CartPoleInfinite
from rl8x.envs.dummy import ContinuousDummy, DiscreteDummy
from rl8x.envs.mountain_car import MountainCar, MountainCarContinuous
from rl8x.envs.pendulum import Pendulum
from rl8x.envs.spread import Spread

__all__ = [  # noqa: RUF022 - in the order in which `rl8x envs` lists them
    "CartPole",
    "CartPoleInfinite",
    "Pendulum",
    "MountainCar",
    "MountainCarContinuous",
    "Acrobot",
    "AlgoTrading",
    "Spread",
    "DiscreteDummy",
    "ContinuousDummy",
]
