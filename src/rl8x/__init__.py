"""rl8x: train policies on batched tensor environments, tracked in MLflow, stopped by composable conditions.

    from rl8x import HitsUpperBound, PPOConfig, Trainer
    from rl8x.envs import CartPole

    config = PPOConfig()
    trainer = Trainer(config.build(CartPole))
    trainer.run(steps_per_eval=5, stop_conditions=[HitsUpperBound("eval/returns/mean", 475)])

The names below are loaded at their first use, so that `import rl8x` is quick; MLflow is loaded when a run starts.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from rl8x.algorithms import PPO as PPO
    from rl8x.algorithms import AlgorithmConfig as AlgorithmConfig
    from rl8x.algorithms import BCConfig as BCConfig
    from rl8x.algorithms import DistillationConfig as DistillationConfig
    from rl8x.algorithms import DQNConfig as DQNConfig
    from rl8x.algorithms import FastSACConfig as FastSACConfig
    from rl8x.algorithms import FastTD3Config as FastTD3Config
    from rl8x.algorithms import FlashSACConfig as FlashSACConfig
    from rl8x.algorithms import IQLConfig as IQLConfig
    from rl8x.algorithms import LearnerConfig as LearnerConfig
    from rl8x.algorithms import OffPolicyConfig as OffPolicyConfig
    from rl8x.algorithms import OnlineConfig as OnlineConfig
    from rl8x.algorithms import OnPolicyConfig as OnPolicyConfig
    from rl8x.algorithms import PPOConfig as PPOConfig
    from rl8x.algorithms import PQNConfig as PQNConfig
    from rl8x.algorithms import SACConfig as SACConfig
    from rl8x.algorithms import TD3Config as TD3Config
    from rl8x.algorithms import distill as distill
    from rl8x.checkpoint import Checkpoints as Checkpoints
    from rl8x.checkpoint import load_algorithm as load_algorithm
    from rl8x.checkpoint import load_policy as load_policy
    from rl8x.conditions import And as And
    from rl8x.conditions import Condition as Condition
    from rl8x.conditions import Confirmed as Confirmed
    from rl8x.conditions import HitsLowerBound as HitsLowerBound
    from rl8x.conditions import HitsUpperBound as HitsUpperBound
    from rl8x.conditions import NonFinite as NonFinite
    from rl8x.conditions import Not as Not
    from rl8x.conditions import Or as Or
    from rl8x.conditions import Plateau as Plateau
    from rl8x.conditions import StopsDecreasing as StopsDecreasing
    from rl8x.conditions import StopsIncreasing as StopsIncreasing
    from rl8x.conditions import WallTime as WallTime
    from rl8x.config.tuned import tuned as tuned
    from rl8x.distributions import Distribution as Distribution
    from rl8x.envs import Env as Env
    from rl8x.envs import Parameter as Parameter
    from rl8x.models import Model as Model
    from rl8x.policy import Policy as Policy
    from rl8x.studies import Study as Study
    from rl8x.studies.compare import compare as compare
    from rl8x.tracking import MemoryTracker as MemoryTracker
    from rl8x.tracking import MLflowTracker as MLflowTracker
    from rl8x.tracking import NullTracker as NullTracker
    from rl8x.tracking import Tracker as Tracker
    from rl8x.trainers import Trainer as Trainer

_NAMES_OF = {
    "algorithms": (
        "AlgorithmConfig BCConfig DQNConfig DistillationConfig FastSACConfig FastTD3Config "
        "FlashSACConfig IQLConfig LearnerConfig OffPolicyConfig OnPolicyConfig OnlineConfig PPO "
        "PPOConfig PQNConfig SACConfig TD3Config distill"
    ),
    "conditions": (
        "And Condition Confirmed HitsLowerBound HitsUpperBound NonFinite Not Or Plateau StopsDecreasing "
        "StopsIncreasing WallTime"
    ),
    "checkpoint": "Checkpoints load_algorithm",
    "distributions": "Distribution",
    "envs": "Env Parameter",
    "tracking": "MLflowTracker MemoryTracker NullTracker Tracker",
    "models": "Model",
    "policy": "Policy",
    "studies": "Study",
    "trainers": "Trainer",
    "studies.compare": "compare",
    "config.tuned": "tuned",
}
_HOMES = {name: home for home, names in _NAMES_OF.items() for name in names.split()}

__all__ = sorted([*_HOMES, "__version__"])
_HOMES["load_policy"] = "checkpoint"  # for `algorithms.teacher`; users import it from rl8x.checkpoint


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        from rl8x.names import called_here

        raise AttributeError(f"module 'rl8x' has no attribute {name!r}.{called_here(name, __all__)}".rstrip("."))
    value = getattr(importlib.import_module(f"rl8x.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
