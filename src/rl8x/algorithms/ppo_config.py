"""The hyperparameters of PPO, each explained once, at its field."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, ClassVar, Self

from rl8x.algorithms.hyperparameters import Default, given_for_nothing, option
from rl8x.algorithms.memory_check import Space, slot_bytes
from rl8x.algorithms.on_policy import OnPolicyConfig
from rl8x.algorithms.optimizer import AdaptiveRate
from rl8x.distributions import Distribution
from rl8x.schedules import Schedule


@dataclasses.dataclass(frozen=True, kw_only=True)
class PPOConfig(
    OnPolicyConfig,
    defaults={
        "horizon": 64,
        "max_grad_norm": 0.5,
        "num_sgd_iters": 10,
        "sgd_minibatch_size": Default(256),
        "normalize_observations": True,
    },
):
    """Hyperparameters of PPO, with defaults that learn the classic tasks on a CPU; `rl8` and `gpu` have others.

    Raises:
        TypeError: If a value is not of its option's kind.
        ValueError: If a value is out of its range, `sgd_minibatch_size` does not divide `num_envs * horizon`, `seq_len`
            does not divide `horizon`, or a schedule is not legal.

    Source: Schulman et al. 2017, arXiv:1707.06347; `dual_clip_param`: Ye et al. 2020, arXiv:1912.09729, eq. 5.
    """

    model_config: dict[str, Any] = option(
        {},
        "Keyword arguments of the model class. 'mlp' has hidden_sizes=[64, 64] by default; separate=true gives each "
        "agent of an environment weights of its own.",
    )
    lr: float = option(
        1e-3, "Learning rate of the optimizer: the first one, unless lr_schedule is None (none: constant).", above=0.0
    )
    lr_schedule: list[list[float]] | dict[str, Any] | None = option(
        {"kind": "adaptive"},
        "{kind: adaptive, kl: 0.01, low: 1e-5, high: 3e-3}: the rate begins at lr, falls where a minibatch's KL "
        "divergence from the acting policy is above twice kl, and rises where it is below half of it. Or the rate over "
        "transitions: [[transitions, value], ...], constant between points, or {kind: interp, points: [...]}, linear "
        "between them. None: lr, constant.",
    )
    distribution: str | type[Distribution] | None = option(
        None, "Action distribution: a built-in name, a dotted path, or a class. None: chosen by the action space."
    )
    distribution_config: dict[str, Any] = option({}, "Keyword arguments of the distribution class.")
    gamma: float = option(0.99, "Discount factor of future rewards.", low=0.0, high=1.0)
    gae_lambda: float = option(
        0.95,
        "Lambda of generalised advantage estimation: 0 is the one-step TD error, 1 the Monte Carlo return "
        "(arXiv:1506.02438).",
        low=0.0,
        high=1.0,
    )
    clip_param: float = option(
        0.2, "Clipping range of the probability ratio: [1 - clip_param, 1 + clip_param].", above=0.0
    )
    dual_clip_param: float | None = option(
        None,
        "Dual-clip PPO: for negative advantages A the surrogate is at least this times A (arXiv:1912.09729). None: "
        "off.",
        above=1.0,
    )
    vf_clip_param: float | None = option(
        5.0, "Each sample's value loss is clipped to this; its gradient is 0 beyond. None: no clipping.", above=0.0
    )
    vf_coeff: float = option(1.0, "Weight of the value loss.", low=0.0)
    entropy_coeff: float = option(0.0, "Weight of the entropy bonus.", low=0.0)
    entropy_coeff_schedule: list[list[float]] | dict[str, Any] | None = option(
        None, "Entropy weight over transitions, in the form of lr_schedule; replaces entropy_coeff."
    )
    target_kl_div: float | None = option(
        None,
        "Early stopping: a step's updates end once the KL divergence from the acting policy exceeds 1.5 times this. "
        "None: no limit.",
        above=0.0,
    )
    normalize_advantages: bool = option(
        True, "Whether to normalise each rollout's advantages to mean 0 and standard deviation 1."
    )
    recompute_advantages: bool = option(
        False,
        "Whether to estimate advantages and targets of values anew before each epoch but the first, with the values of "
        "the present critic (arXiv:2006.05990). Observations before a reset are kept for it.",
    )
    normalize_rewards: bool = option(
        True, "Whether to divide rewards by the running standard deviation of the discounted return."
    )
    normalize_values: bool = option(
        False,
        "Whether the critic predicts values normalised by the running moments of their targets.",
    )

    separates: ClassVar[bool] = True

    @classmethod
    def rl8(cls, **given: Any) -> Self:
        """Return the config with rl8's defaults, 8,192 copies x 32 steps in one batch, but for what is given."""
        return cls.preset("rl8", **given)

    @classmethod
    def gpu(cls, **given: Any) -> Self:
        """Return the config with values for thousands of copies on a GPU, but for what is given."""
        return cls.preset("gpu", **given)

    def without_effect(self) -> dict[str, str]:
        """Return the given hyperparameters that have no effect; see `AlgorithmConfig.without_effect`."""
        names = ["recompute_advantages"] if self.num_sgd_iters == 1 else []
        return super().without_effect() | given_for_nothing(self, names, "num_sgd_iters=1 has no second epoch")

    def rollout_bytes(self, observation: Space | None, action: Space | None) -> int:
        """Return a lower bound of the memory that a rollout takes; see `OnPolicyConfig.rollout_bytes`."""
        final_obs = self.num_envs * (self.horizon + 1) * slot_bytes(observation, None)
        return super().rollout_bytes(observation, action) + final_obs * self.recompute_advantages

    @property
    def adaptive_rate(self) -> AdaptiveRate | None:
        """How the learning rate goes by the KL divergence; None if it does not."""
        return AdaptiveRate.make(self.lr_schedule, self.lr)

    def schedule(self, name: str) -> Schedule:
        """Return the schedule of a hyperparameter; of an adaptive learning rate the value that it begins with."""
        if name == "lr" and self.adaptive_rate is not None:
            return Schedule.make(self.lr)
        return super().schedule(name)

    def __post_init__(self) -> None:
        """Check what can be checked without an environment."""
        super().__post_init__()
        self.schedule("entropy_coeff").bounded(0.0, math.inf, "entropy_coeff_schedule")
