"""Batched environments of tensors."""

from rl8x.envs.acrobot import Acrobot
from rl8x.envs.algo_trading import AlgoTrading
from rl8x.envs.base import Carry, Env, EnvConfig, Observation, Parameter, State, Step
from rl8x.envs.cartpole import CartPole, CartPoleInfinite
from rl8x.envs.dummy import ContinuousDummy, DiscreteDummy
from rl8x.envs.gymnasium_env import GymnasiumEnv
from rl8x.envs.mountain_car import MountainCar, MountainCarContinuous
from rl8x.envs.numpy_env import NumpyEnv
from rl8x.envs.pendulum import Pendulum
from rl8x.envs.registry import BUILTIN, env_maker, make, resolve
from rl8x.envs.validation import validate

__all__ = [
    "BUILTIN",
    "Acrobot",
    "AlgoTrading",
    "Carry",
    "CartPole",
    "CartPoleInfinite",
    "ContinuousDummy",
    "DiscreteDummy",
    "Env",
    "EnvConfig",
    "GymnasiumEnv",
    "MountainCar",
    "MountainCarContinuous",
    "NumpyEnv",
    "Observation",
    "Parameter",
    "Pendulum",
    "State",
    "Step",
    "env_maker",
    "make",
    "resolve",
    "validate",
]
