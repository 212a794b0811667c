"""Hyperparameters of all algorithms that train a model: the model, its optimizer, and the policy's distribution."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

from rl8x.algorithms.base import AlgorithmConfig
from rl8x.algorithms.hyperparameters import option
from rl8x.algorithms.optimizer import OPTIMIZERS, make_rule
from rl8x.distributions import Distribution
from rl8x.models import Model


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainedConfig(AlgorithmConfig):
    """Hyperparameters of every algorithm that trains a model by gradients."""

    model: str | type[Model] | Model | None = option(
        None,
        "Network: 'mlp', 'cnn', of algorithms that learn from rollouts also 'lstm', 'gru' or 'attention'; a dotted "
        "path to a Model class, a class, or an instance, a copy of which is trained from its weights. None: 'cnn' for "
        "images, else 'mlp'.",
    )
    model_config: dict[str, Any] = option({}, "Keyword arguments of the model class, such as hidden_sizes=[64, 64].")
    lr: float = option(3e-4, "Learning rate of the optimizers.", above=0.0)
    lr_schedule: list[list[float]] | dict[str, Any] | None = option(
        None,
        "Learning rate over transitions, or over updates when learning from a data set: [[transitions, value], ...], "
        "constant between points, or {kind: interp, points: [...]}, linear between them.",
    )
    optimizer: str = option("adam", "Optimizer of the weights.", choices=tuple(OPTIMIZERS))
    optimizer_config: dict[str, Any] = option({}, "Keyword arguments of the optimizer, such as eps or weight_decay.")
    max_grad_norm: float | None = option(
        None, "Gradients of each network are clipped to this L2 norm over its weights. None: no clipping.", above=0.0
    )
    normalize_observations: bool = option(
        False,
        "Whether to normalise observations by their mean and standard deviation. A replay stores them unnormalised.",
    )

    separates: ClassVar[bool] = False
    """Whether agents of an environment may have weights of their own."""

    def __post_init__(self) -> None:
        super().__post_init__()
        separate = self.model_config.get("separate", False)
        if separate and not self.separates:
            raise ValueError(
                f"`model_config.separate` is for PPO; {type(self).__name__} has one policy for all agents."
            )
        if not isinstance(separate, bool):
            raise ValueError(f"`model_config.separate` must be true or false; got {separate!r}.")
        make_rule(self.optimizer, self.optimizer_config)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PolicyConfig(TrainedConfig):
    """Hyperparameters of every algorithm whose policy may have any distribution."""

    distribution: str | type[Distribution] | None = option(
        None, "Action distribution: a built-in name, a dotted path, or a class. None: chosen by the action space."
    )
    distribution_config: dict[str, Any] = option({}, "Keyword arguments of the distribution class.")
