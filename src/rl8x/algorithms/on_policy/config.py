"""Hyperparameters that algorithms which learn from rollouts share."""

from __future__ import annotations

import dataclasses
from typing import Any, Final

from rl8x.algorithms.config import OnlineConfig, TrainedConfig
from rl8x.algorithms.hyperparameters import Default, nearest_divisor, option
from rl8x.algorithms.memory_check import Space
from rl8x.algorithms.on_policy.minibatches import packed_bytes

# Bytes that these algorithms add to a slot of the rollout: log-probability, value, final value (float32).
_STORED: Final = 3 * 4
_MOST_MINIBATCHES: Final = 16  # in an epoch, by default
SEQ_LEN: Final = 4  # of recurrent models, by default


@dataclasses.dataclass(frozen=True, kw_only=True)
class OnPolicyConfig(TrainedConfig, OnlineConfig, defaults={"lr": 1e-3, "max_grad_norm": 5.0}):
    """Hyperparameters of every algorithm that learns from a rollout in epochs of minibatches, then discards it."""

    num_sgd_iters: int = option(4, "Epochs over each rollout.", low=1)
    sgd_minibatch_size: int | None = option(
        None,
        "Transitions per minibatch; must divide num_envs * horizon. None: the whole rollout. A default that is a "
        "number gives way to a 16th of the rollout if that is more, and to the nearest that divides it.",
        low=1,
    )
    shuffle_minibatches: bool = option(True, "Whether to shuffle the rollout before each epoch.")
    accumulate_grads: bool = option(
        False, "Whether to accumulate the gradients of an epoch's minibatches into one optimizer step."
    )
    seq_len: int | None = option(
        None,
        "Length of training sequences in steps (truncated backpropagation through time); must divide horizon. None: "
        "1 for feedforward models, 4 for recurrent ones.",
        low=1,
    )
    seqs_per_state_reset: int | None = option(
        None,
        "Reset the recurrent state after every so many sequences of a rollout; -1: only where episodes begin. None: "
        "in tasks that never end 8, or the nearest number that divides the sequences of a copy; -1 in episodic ones.",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.seq_len is not None:
            check_seq_len(self, self.seq_len)
        transitions = self.num_envs * self.horizon
        if isinstance(self.sgd_minibatch_size, Default):  # whole sequences, and about a 16th of a large rollout
            default: Any = next(each.default for each in dataclasses.fields(self) if each.name == "sgd_minibatch_size")
            unit = self.seq_len or (SEQ_LEN if self.horizon % SEQ_LEN == 0 else 1)
            wanted = max(default, transitions // _MOST_MINIBATCHES)
            size = unit * nearest_divisor(transitions // unit, round(wanted / unit))
            object.__setattr__(self, "sgd_minibatch_size", Default(size))
        if self.sgd_minibatch_size is not None and transitions % self.sgd_minibatch_size:
            raise ValueError(
                f"`sgd_minibatch_size` must divide num_envs * horizon = {transitions}; got {self.sgd_minibatch_size}. "
                f"Try {nearest_divisor(transitions, self.sgd_minibatch_size)}."
            )
        if self.seqs_per_state_reset == 0 or (self.seqs_per_state_reset or 0) < -1:
            raise ValueError(
                "`seqs_per_state_reset` must be positive, or -1 to reset only where episodes begin; got "
                f"{self.seqs_per_state_reset}."
            )

    def rollout_bytes(self, observation: Space | None, action: Space | None) -> int:
        """Return a lower bound of the memory that a rollout takes, including its packed copy for the updates."""
        stored = super().rollout_bytes(observation, action) + self.num_envs * (self.horizon + 1) * _STORED
        return stored + self.num_envs * self.horizon * packed_bytes(observation, action)


def check_seq_len(config: OnPolicyConfig, seq_len: int) -> None:
    """Raise a `ValueError` unless `seq_len` divides the horizon."""
    if config.horizon % seq_len:
        raise ValueError(
            f"`seq_len` must divide `horizon`; got {seq_len} and {config.horizon}. "
            f"Try {nearest_divisor(config.horizon, seq_len)}."
        )
