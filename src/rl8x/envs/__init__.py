"""Batched environments of tensors."""

from rl8x.envs.base import Carry, Env, EnvConfig, Observation, Parameter, State, Step
from rl8x.envs.cartpole import CartPole, CartPoleInfinite
from rl8x.envs.pendulum import Pendulum
from rl8x.envs.registry import BUILTIN, make, resolve

__all__ = [
    "BUILTIN",
    "Carry",
    "CartPole",
    "CartPoleInfinite",
    "Env",
    "EnvConfig",
    "Observation",
    "Parameter",
    "Pendulum",
    "State",
    "Step",
    "make",
    "resolve",
]
