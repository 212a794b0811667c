"""rl8x: train policies on batched tensor environments, tracked in MLflow, stopped by composable conditions.

    from rl8x import HitsUpperBound, PPOConfig, Trainer
    from rl8x.envs import CartPole

    config = PPOConfig(num_envs=64, gamma=0.99, lr=5e-3, sgd_minibatch_size=512)
    trainer = Trainer(config.build(CartPole))
    trainer.run(steps_per_eval=5, stop_conditions=[HitsUpperBound("eval/returns/mean", 475)])

The names below are loaded when they are first used, so that `import rl8x` is quick; MLflow is loaded when a run starts.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from rl8x._version import __version__

if TYPE_CHECKING:
    from rl8x.algorithms import PPO, PPOConfig, distill
    from rl8x.checkpoint import load_algorithm
    from rl8x.checkpoint import load_policy as load_policy
    from rl8x.conditions import Condition, Confirmed, HitsLowerBound, HitsUpperBound, Plateau, WallTime
    from rl8x.config.tuned import tuned
    from rl8x.distributions import Distribution
    from rl8x.envs import Env, Parameter
    from rl8x.models import Model
    from rl8x.policy import Policy
    from rl8x.studies import Study
    from rl8x.studies.compare import compare
    from rl8x.tracking import MemoryTracker, MLflowTracker, NullTracker
    from rl8x.trainers import Trainer

_HOMES = {
    "PPO": "algorithms",
    "PPOConfig": "algorithms",
    "Condition": "conditions",
    "Confirmed": "conditions",
    "HitsLowerBound": "conditions",
    "HitsUpperBound": "conditions",
    "Plateau": "conditions",
    "WallTime": "conditions",
    "Distribution": "distributions",
    "Env": "envs",
    "MLflowTracker": "tracking",
    "MemoryTracker": "tracking",
    "Model": "models",
    "NullTracker": "tracking",
    "Parameter": "envs",
    "Policy": "policy",
    "Study": "studies",
    "Trainer": "trainers",
    "compare": "studies.compare",
    "distill": "algorithms",
    "load_algorithm": "checkpoint",
    "load_policy": "checkpoint",
    "tuned": "config.tuned",
}

__all__ = [
    "PPO",
    "Condition",
    "Confirmed",
    "Distribution",
    "Env",
    "HitsLowerBound",
    "HitsUpperBound",
    "MLflowTracker",
    "MemoryTracker",
    "Model",
    "NullTracker",
    "PPOConfig",
    "Parameter",
    "Plateau",
    "Policy",
    "Study",
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
        raise AttributeError(f"module 'rl8x' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"rl8x.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
