"""Batched environments of tensors."""

from __future__ import annotations

from rl8x.envs import builtin
from rl8x.envs.base import Carry, Env, Observation, Parameter, State, Step
from rl8x.envs.bindings import Attribute, Function, Scale
from rl8x.envs.brax_env import BraxEnv
from rl8x.envs.builtin import *  # noqa: F403 - the classes in its `__all__`
from rl8x.envs.gymnasium_env import GymnasiumEnv
from rl8x.envs.mjlab_env import MjlabEnv
from rl8x.envs.mujoco_model import ModelField
from rl8x.envs.numpy_env import NumpyEnv
from rl8x.envs.observed import ObservedParameters
from rl8x.envs.parameters import EnvConfig
from rl8x.envs.pettingzoo_env import PettingZooEnv
from rl8x.envs.registry import BUILTIN, describe, env_maker, make, resolve
from rl8x.envs.validation import validate
from rl8x.envs.vmas_env import VmasEnv

__all__ = [
    *builtin.__all__,
    "BUILTIN",
    "Attribute",
    "BraxEnv",
    "Carry",
    "Env",
    "EnvConfig",
    "Function",
    "GymnasiumEnv",
    "MjlabEnv",
    "ModelField",
    "NumpyEnv",
    "Observation",
    "ObservedParameters",
    "Parameter",
    "PettingZooEnv",
    "Scale",
    "State",
    "Step",
    "VmasEnv",
    "describe",
    "env_maker",
    "make",
    "resolve",
    "validate",
]
