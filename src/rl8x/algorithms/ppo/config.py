"""The hyperparameters of PPO, each explained once, at its field."""

from __future__ import annotations

import dataclasses
from typing import Any, Final

from rl8x.algorithms.hyperparameters import nearest_divisor, option
from rl8x.algorithms.memory_check import Space
from rl8x.algorithms.online import OnlineConfig
from rl8x.algorithms.optimizer import OPTIMIZERS
from rl8x.algorithms.ppo.minibatches import packed_bytes
from rl8x.distributions import Distribution
from rl8x.models import Model
from rl8x.schedules import Schedule

# Bytes that PPO adds to a slot of the rollout: log-probability, value, final value (float32).
_STORED: Final = 3 * 4


@dataclasses.dataclass(frozen=True, kw_only=True)
class PPOConfig(OnlineConfig):
    """Hyperparameters of PPO; the defaults are rl8's."""

    model: str | type[Model] | Model | None = option(
        None, "Network: 'mlp' (the default), 'lstm', 'gru', a dotted path to a Model class, a class or an instance."
    )
    model_config: dict[str, Any] = option({}, "Keyword arguments of the model's class, such as hidden_sizes=[64, 64].")
    distribution: str | type[Distribution] | None = option(
        None, "Action distribution: a built-in name, a dotted path, or a class. None picks by the action space."
    )
    distribution_config: dict[str, Any] = option({}, "Keyword arguments of the distribution's class.")
    gamma: float = option(0.95, "Discount of a reward one step later.", low=0.0, high=1.0)
    gae_lambda: float = option(
        0.95, "Weight of longer estimates in the advantages: 0 is one step, 1 the whole return.", low=0.0, high=1.0
    )
    lr: float = option(1e-3, "Learning rate of the optimizer.", above=0.0)
    lr_schedule: list[list[float]] | dict[str, Any] | None = option(
        None,
        "Learning rate over transitions: [[transitions, value], ...], each held, or a mapping with kind and points.",
    )
    optimizer: str = option("adam", "Optimizer of the weights.", choices=tuple(OPTIMIZERS))
    optimizer_config: dict[str, Any] = option({}, "Keyword arguments of the optimizer, such as eps or weight_decay.")
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
    max_grad_norm: float | None = option(
        5.0, "Largest L2 norm of the gradient over all weights. None does not clip.", above=0.0
    )
    num_sgd_iters: int = option(4, "Epochs of a step: passes over a collect's data.", low=1)
    sgd_minibatch_size: int | None = option(
        None, "Transitions of a minibatch; it must divide num_envs * horizon. None is all of them.", low=1
    )
    shuffle_minibatches: bool = option(True, "Whether each pass draws a fresh order of the data.")
    accumulate_grads: bool = option(
        False, "Whether the gradients of all minibatches of an epoch make one optimizer step."
    )
    normalize_advantages: bool = option(
        True, "Whether a collect's advantages are shifted and scaled to mean 0 and std 1."
    )
    normalize_rewards: bool = option(True, "Whether rewards are divided by the running std of the discounted return.")
    normalize_observations: bool = option(
        False, "Whether the policy shifts and scales observations by running moments."
    )
    normalize_values: bool = option(
        False,
        "Whether values are predicted, and their loss is taken, in units of the running moments of their targets.",
    )
    seq_len: int | None = option(
        None,
        "Steps of a training sequence; it must divide horizon. None: 1 for feedforward models, 4 for recurrent ones.",
        low=1,
    )
    seqs_per_state_reset: int | None = option(
        None,
        "A recurrent state is forgotten every so many sequences of a collect, -1 only where episodes begin. "
        "None: 8 for tasks that never end, -1 for episodic ones.",
    )

    def __post_init__(self) -> None:
        """Check what can be checked without an environment."""
        super().__post_init__()
        Schedule.make(self.lr_schedule if self.lr_schedule is not None else self.lr, name="lr_schedule")
        Schedule.make(
            self.entropy_coeff_schedule if self.entropy_coeff_schedule is not None else self.entropy_coeff,
            name="entropy_coeff_schedule",
        )
        transitions = self.num_envs * self.horizon
        if self.sgd_minibatch_size is not None and transitions % self.sgd_minibatch_size:
            raise ValueError(
                f"`sgd_minibatch_size` must divide num_envs * horizon = {transitions}; got {self.sgd_minibatch_size}. "
                f"Try {nearest_divisor(transitions, self.sgd_minibatch_size)}."
            )
        if self.seq_len is not None and self.horizon % self.seq_len:
            raise ValueError(
                f"`seq_len` must divide `horizon`; got {self.seq_len} and {self.horizon}. "
                f"Try {nearest_divisor(self.horizon, self.seq_len)}."
            )
        if self.seqs_per_state_reset == 0 or (self.seqs_per_state_reset or 0) < -1:
            raise ValueError(
                f"`seqs_per_state_reset` must be positive, or -1 for never; got {self.seqs_per_state_reset}."
            )

    @property
    def updates_per_step(self) -> int:
        """Optimizer steps of one `step()`, where no KL limit ends them."""
        size = self.sgd_minibatch_size
        minibatches = 1 if size is None or self.accumulate_grads else self.num_envs * self.horizon // size
        return self.num_sgd_iters * minibatches

    def rollout_bytes(self, observation: Space | None, action: Space | None) -> int:
        """Return a lower bound of the memory that a collect takes, with what is packed of it for the updates."""
        stored = super().rollout_bytes(observation, action) + self.num_envs * (self.horizon + 1) * _STORED
        return stored + self.num_envs * self.horizon * packed_bytes(observation, action)
