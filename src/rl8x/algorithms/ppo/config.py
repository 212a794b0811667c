"""The hyperparameters of PPO, each explained once, at its field."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from rl8x.algorithms.hyperparameters import option
from rl8x.algorithms.on_policy import OnPolicyConfig
from rl8x.distributions import Distribution


@dataclasses.dataclass(frozen=True, kw_only=True)
class PPOConfig(OnPolicyConfig):
    """Hyperparameters of PPO; the defaults are rl8's.

    Raises:
        TypeError: If a value is not of its option's kind.
        ValueError: If a value is out of its range, `sgd_minibatch_size` does not divide `num_envs * horizon`, `seq_len`
            does not divide `horizon`, or a schedule is not legal.

    Source: Schulman et al. 2017, arXiv:1707.06347; `dual_clip_param`: Ye et al. 2020, arXiv:1912.09729, eq. 5.
    """

    distribution: str | type[Distribution] | None = option(
        None, "Action distribution: a built-in name, a dotted path, or a class. None picks by the action space."
    )
    distribution_config: dict[str, Any] = option({}, "Keyword arguments of the distribution's class.")
    gamma: float = option(0.95, "Discount of a reward one step later.", low=0.0, high=1.0)
    gae_lambda: float = option(
        0.95, "Weight of longer estimates in the advantages: 0 is one step, 1 the whole return.", low=0.0, high=1.0
    )
    clip_param: float = option(
        0.2, "How far the probability ratio may move from 1 before its gradient is cut.", above=0.0
    )
    dual_clip_param: float | None = option(
        None, "Bounds the surrogate from below by this times a negative advantage; None does not.", above=1.0
    )
    vf_clip_param: float | None = option(
        5.0, "Largest value loss of a sample; beyond it the gradient is 0. None: no limit.", above=0.0
    )
    vf_coeff: float = option(1.0, "Weight of the value loss in the total.", low=0.0)
    entropy_coeff: float = option(0.0, "Weight of the entropy bonus in the total.", low=0.0)
    entropy_coeff_schedule: list[list[float]] | dict[str, Any] | None = option(
        None, "Entropy weight over transitions, in the form of lr_schedule; it replaces entropy_coeff."
    )
    target_kl_div: float | None = option(
        None,
        "Updates of a step end when the KL divergence from the acting policy, measured before each, "
        "exceeds 1.5 times this.",
        above=0.0,
    )
    normalize_advantages: bool = option(
        True, "Whether a collect's advantages are shifted and scaled to mean 0 and std 1."
    )
    normalize_rewards: bool = option(True, "Whether rewards are divided by the running std of the discounted return.")
    normalize_values: bool = option(
        False,
        "Whether values are predicted, and their loss is taken, in units of the running moments of their targets.",
    )

    def __post_init__(self) -> None:
        """Check what can be checked without an environment."""
        super().__post_init__()
        self.schedule("entropy_coeff").bounded(0.0, math.inf, "entropy_coeff_schedule")
