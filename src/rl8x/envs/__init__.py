"""Batched environments of tensors."""

from rl8x.envs import builtin
from rl8x.envs.base import Carry, Env, Observation, Parameter, State, Step
from rl8x.envs.builtin import *  # noqa: F403 - the classes in its `__all__`
from rl8x.envs.env_config import EnvConfig
from rl8x.envs.gymnasium_env import GymnasiumEnv
from rl8x.envs.mujoco_model import ModelField
from rl8x.envs.numpy_env import NumpyEnv
from rl8x.envs.registry import BUILTIN, env_maker, make, resolve
from rl8x.envs.setters import Attribute, Function, Scale
from rl8x.envs.validation import validate

__all__ = [
    *builtin.__all__,
    "BUILTIN",
    "Attribute",
    "Carry",
    "Env",
    "EnvConfig",
    "Function",
    "GymnasiumEnv",
    "ModelField",
    "NumpyEnv",
    "Observation",
    "Parameter",
    "Scale",
    "State",
    "Step",
    "env_maker",
    "make",
    "resolve",
    "validate",
]
