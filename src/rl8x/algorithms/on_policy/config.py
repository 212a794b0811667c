"""The hyperparameters that algorithms which learn from rollouts share, each explained once, at its field."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Final

from rl8x.algorithms.hyperparameters import nearest_divisor, option
from rl8x.algorithms.memory_check import Space
from rl8x.algorithms.on_policy.minibatches import packed_bytes
from rl8x.algorithms.online_config import OnlineConfig
from rl8x.algorithms.optimizer_rules import OPTIMIZERS, make_rule
from rl8x.models import Model

# Bytes that these algorithms add to a slot of the rollout: log-probability, value, final value (float32).
_STORED: Final = 3 * 4


@dataclasses.dataclass(frozen=True, kw_only=True)
class OnPolicyConfig(OnlineConfig):
    """Hyperparameters of every algorithm that learns from a rollout in epochs of minibatches, and then drops it.

    Raises:
        TypeError: As `AlgorithmConfig` does.
        ValueError: If `sgd_minibatch_size` or `seq_len` divides nothing, a schedule or an option of the optimizer is
            not legal, and as `OnlineConfig` does.
    """

    model: str | type[Model] | Model | None = option(
        None,
        "Network: 'mlp', 'cnn', 'lstm', 'gru', 'attention', a dotted path to a Model class, a class, or an "
        "instance, of which `build` trains a copy, from its weights. None: 'cnn' where there are images, else 'mlp'.",
    )
    model_config: dict[str, Any] = option({}, "Keyword arguments of the model's class, such as hidden_sizes=[64, 64].")
    lr: float = option(1e-3, "Learning rate of the optimizer.", above=0.0)
    lr_schedule: list[list[float]] | dict[str, Any] | None = option(
        None,
        "Learning rate over transitions: [[transitions, value], ...], each held, or a mapping with kind and points.",
    )
    optimizer: str = option("adam", "Optimizer of the weights.", choices=tuple(OPTIMIZERS))
    optimizer_config: dict[str, Any] = option({}, "Keyword arguments of the optimizer, such as eps or weight_decay.")
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
    normalize_observations: bool = option(
        False, "Whether the policy shifts and scales observations by running moments."
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
        self.schedule("lr").bounded(0.0, math.inf, "lr_schedule")
        make_rule(self.optimizer, self.optimizer_config)
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
