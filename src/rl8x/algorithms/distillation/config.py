"""The hyperparameters of distillation, each explained once, at its field."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, cast

from rl8x.algorithms.base import GenericAlgorithmBase
from rl8x.algorithms.distillation.teacher import acting_weights, describe_teacher, find_teacher
from rl8x.algorithms.hyperparameters import option, resolve_device
from rl8x.algorithms.on_policy import OnPolicyConfig
from rl8x.distributions import Distribution


@dataclasses.dataclass(frozen=True, kw_only=True)
class DistillationConfig(OnPolicyConfig):
    """Hyperparameters of distillation.

    Raises:
        TypeError: If a value is not of its option's kind, or `teacher_obs` is not a list.
        ValueError: As `PPOConfig` does, or if `beta_schedule` leaves [0, 1].

    Source: Ross, Gordon & Bagnell 2011, arXiv:1011.0686, algorithm 3.1.
    """

    teacher: Any = option(
        None,
        "The teacher: a run's name, ID, folder or checkpoint, or a policy file; in Python also a policy, an "
        "algorithm or a trainer.",
    )
    teacher_obs: list[str] | None = option(
        None,
        "Parts of a Dict observation that only the teacher observes. None: the environment's parameters "
        "(observe_parameters), and the parts that only a critic observes.",
    )
    loss: str | None = option(
        None,
        "'kl': KL(teacher || student); 'nll': negative log-likelihood of the teacher's most likely action "
        "(cross-entropy for discrete actions); 'mse': squared error of continuous actions. None: kl if both have the "
        "same kind of distribution, else nll.",
        choices=("kl", "nll", "mse"),
    )
    beta: float = option(
        0.0,
        "DAgger's beta: probability that a step takes the teacher's action while collecting.",
        low=0.0,
        high=1.0,
    )
    beta_schedule: list[list[float]] | dict[str, Any] | None = option(
        None,
        "Beta over transitions, in the form of lr_schedule; replaces beta. The paper's choice, 1 in the first "
        "rollout and 0 afterwards, is [[0, 1.0], [num_envs * horizon, 0.0]].",
    )
    sample_actions: bool | None = option(
        None,
        "Whether to sample the student's actions while collecting, rather than take the most likely ones. None: "
        "unless the loss is 'mse', which does not train standard deviations.",
    )
    distribution: str | type[Distribution] | None = option(
        None,
        "The student's action distribution: a built-in name, a dotted path, or a class. None: chosen by the action "
        "space.",
    )
    distribution_config: dict[str, Any] = option({}, "Keyword arguments of the distribution class.")

    def __post_init__(self) -> None:
        """Check what can be checked without an environment."""
        super().__post_init__()
        if isinstance(self.teacher_obs, str):
            raise TypeError(f"`teacher_obs` must be a list of names; got {self.teacher_obs!r}.")
        self.schedule("beta").bounded(0.0, 1.0, "beta_schedule")

    def build(self, env: Any = ..., /, **env_kwargs: Any) -> GenericAlgorithmBase[Any]:
        """Find the teacher, make the environment, check that they fit, and return the algorithm.

        Args:
            env: The environment, in any form that `OnlineConfig.build` accepts.
            env_kwargs: Keyword arguments for the environment's constructor, such as `observe_parameters`.

        Raises:
            ValueError: If there is no teacher or it does not fit, and as `OnlineConfig.build` does.
        """
        if self.teacher is None:
            raise ValueError("distillation needs a `teacher`: a run, a policy, an algorithm or a trainer.")
        if isinstance(self.teacher, Mapping):  # its description
            return super().build(env, **env_kwargs)
        policy, source = find_teacher(self.teacher, resolve_device(self.device))
        described = dataclasses.replace(self, teacher=describe_teacher(policy, source))
        algorithm: Any = described.build(env, **env_kwargs)
        algorithm.load_teacher(acting_weights(policy))
        return cast(GenericAlgorithmBase[Any], algorithm)
