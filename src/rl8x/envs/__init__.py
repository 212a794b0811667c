"""Batched environments of tensors."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from rl8x.envs import builtin
from rl8x.envs.base import Carry, Env, Observation, Parameter, State, Step
from rl8x.envs.bindings import Attribute, Function, Scale
from rl8x.envs.builtin import *  # noqa: F403 - the classes in its `__all__`
from rl8x.envs.gymnasium_env import GymnasiumEnv
from rl8x.envs.mujoco_model import ModelField
from rl8x.envs.numpy_env import NumpyEnv
from rl8x.envs.observed import ObservedParameters
from rl8x.envs.parameters import EnvConfig
from rl8x.envs.pettingzoo_env import PettingZooEnv
from rl8x.envs.registry import BUILTIN, describe, env_maker, make, resolve
from rl8x.envs.validation import validate

if TYPE_CHECKING:
    from rl8x.envs.brax_env import BraxEnv
    from rl8x.envs.mjlab_env import MjlabEnv
    from rl8x.envs.vmas_env import VmasEnv

# Adapters that are loaded when they are first used.
_HOMES = {"BraxEnv": "brax_env", "MjlabEnv": "mjlab_env", "VmasEnv": "vmas_env"}

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


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'rl8x.envs' has no attribute {name!r}")
    return getattr(importlib.import_module(f"rl8x.envs.{home}"), name)
