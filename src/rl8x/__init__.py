"""rl8x: train policies on batched tensor environments, tracked in MLflow, stopped by composable conditions.

    from rl8x import HitsUpperBound, PPOConfig, Trainer
    from rl8x.envs import CartPole

    config = PPOConfig()
    trainer = Trainer(config.build(CartPole))
    trainer.run(steps_per_eval=5, stop_conditions=[HitsUpperBound("eval/returns/mean", 475)])

The names below are loaded when they are first used, so that `import rl8x` is quick; MLflow is loaded when a run starts.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from rl8x.algorithms import (
        PPO,
        AlgorithmConfig,
        BCConfig,
        DistillationConfig,
        DQNConfig,
        FastSACConfig,
        FastTD3Config,
        FlashSACConfig,
        IQLConfig,
        LearnerConfig,
        OffPolicyConfig,
        OnlineConfig,
        OnPolicyConfig,
        PPOConfig,
        PQNConfig,
        SACConfig,
        TD3Config,
        distill,
    )
    from rl8x.checkpoint import Checkpoints, load_algorithm
    from rl8x.checkpoint import load_policy as load_policy
    from rl8x.conditions import (
        And,
        Condition,
        Confirmed,
        HitsLowerBound,
        HitsUpperBound,
        NonFinite,
        Not,
        Or,
        Plateau,
        StopsDecreasing,
        StopsIncreasing,
        WallTime,
    )
    from rl8x.config.tuned import tuned
    from rl8x.distributions import Distribution
    from rl8x.envs import Env, Parameter
    from rl8x.models import Model
    from rl8x.policy import Policy
    from rl8x.studies import Study
    from rl8x.studies.compare import compare
    from rl8x.tracking import MemoryTracker, MLflowTracker, NullTracker, Tracker
    from rl8x.trainers import Trainer

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
    "checkpoint": "Checkpoints load_algorithm load_policy",
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

__all__ = [
    "PPO",
    "AlgorithmConfig",
    "And",
    "BCConfig",
    "Checkpoints",
    "Condition",
    "Confirmed",
    "DQNConfig",
    "DistillationConfig",
    "Distribution",
    "Env",
    "FastSACConfig",
    "FastTD3Config",
    "FlashSACConfig",
    "HitsLowerBound",
    "HitsUpperBound",
    "IQLConfig",
    "LearnerConfig",
    "MLflowTracker",
    "MemoryTracker",
    "Model",
    "NonFinite",
    "Not",
    "NullTracker",
    "OffPolicyConfig",
    "OnPolicyConfig",
    "OnlineConfig",
    "Or",
    "PPOConfig",
    "PQNConfig",
    "Parameter",
    "Plateau",
    "Policy",
    "SACConfig",
    "StopsDecreasing",
    "StopsIncreasing",
    "Study",
    "TD3Config",
    "Tracker",
    "Trainer",
    "WallTime",
    "__version__",
    "compare",
    "distill",
    "load_algorithm",
    "tuned",
]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        from rl8x.names import called_here

        raise AttributeError(f"module 'rl8x' has no attribute {name!r}.{called_here(name, __all__)}".rstrip("."))
    value = getattr(importlib.import_module(f"rl8x.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
