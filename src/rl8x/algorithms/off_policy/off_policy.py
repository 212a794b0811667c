"""Algorithms that learn from a replay: collect a short horizon, append it, and make the updates that are due.

One step of the trainer is

    collect   `horizon` steps of each copy; rows with n-step returns go to the replay, unless a number is not finite
    due       owed += updates_per_sample * samples;  K = floor(owed);  owed -= K
    sample    K batches at once, with all that is drawn for them
    loop      K updates, without Python between them

An algorithm is a `Learner` with this as another base, which may say how it explores (`explore`).
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any, Final, TypeVar

import gymnasium
import torch
from torch import Tensor

from rl8x import keys
from rl8x.algorithms.base import EnvFactory
from rl8x.algorithms.memory_check import available_bytes, check_replay, check_replay_on_disk, check_training
from rl8x.algorithms.off_policy.config import OffPolicyConfig
from rl8x.algorithms.off_policy.learner import Learner
from rl8x.algorithms.off_policy.updates import WEIGHTS
from rl8x.algorithms.online import OnlineAlgorithm, ResetSchedule
from rl8x.distributed import ranks
from rl8x.envs import Env
from rl8x.envs.base import Step
from rl8x.envs.env_config import AnyEnvConfig
from rl8x.policy import Act
from rl8x.replay.nstep import NStep
from rl8x.replay.prioritized import PrioritizedReplay
from rl8x.replay.ring import Replay
from rl8x.rollouts.buffer import Rollout
from rl8x.rollouts.collector import Collector
from rl8x.rollouts.finite import COLLECTED, gathered_not_finite, locate_non_finite
from rl8x.rollouts.statistics import Array, Number, Stats, on_host, rollout_stats
from rl8x.rollouts.step import Cursor, experience
from rl8x.trees import flatten_tree, without_ends

OffPolicyConfigT = TypeVar("OffPolicyConfigT", bound=OffPolicyConfig)

REPLAY_SIZE: Final = "replay/size"
# Maximum updates between writes of priorities, as the batches of a block are drawn before it.
_PRIORITIZED_BLOCK: Final = 16
# Measured for an eager step of small environments.
_SECONDS_PER_ENV_STEP: Final = 3e-4


def transition(cursor: Cursor, act: Act, step: Step) -> dict[str, Tensor]:
    """Return the tensors of a step to store, `[num_envs, ...]` each, with the next observation before any reset."""
    return experience(cursor, act, step) | flatten_tree(keys.NEXT_OBS, without_ends(step.final_obs, step.terminated))


def collected_stats(rollout: Mapping[str, Array], horizon: int) -> Stats:
    """Summarise a rollout's numbers, each `[horizon + 1, num_envs, ...]`, by key, and flag non-finite ones."""
    return Stats.merge(rollout_stats(rollout, horizon), Stats(gathered_not_finite(rollout)))


class OffPolicyAlgorithm(Learner[OffPolicyConfigT], OnlineAlgorithm[OffPolicyConfigT]):
    """An algorithm that learns from a replay of its policy's transitions in an environment.

    Args:
        config: The hyperparameters.
        env: The environment that is trained in.
        seed: The seed in use, also where the config leaves it open.
        env_factory: Makes another such environment; None where an instance was given.

    Attributes:
        rollout: The last collect, `[horizon + 1, num_envs, ...]`.
        replay: What is learned from.
        updates_owed: Updates that are due, with the fraction of one that is carried over.
    """

    metrics: tuple[str, ...] = (*Learner.metrics, REPLAY_SIZE)

    env: Env
    replay: Replay

    def __init__(self, config: OffPolicyConfigT, env: Env, seed: int, env_factory: EnvFactory | None = None) -> None:
        super().__init__(config, env, seed, env_factory)
        self.resets = ResetSchedule(config.horizons_per_env_reset or -1)
        self._check_fits()
        self.collector = Collector(env, self.policy, self._generator("sampling"), self.execution, slot=transition)
        self.rollout = Rollout(config.horizon, config.num_envs)
        self.nstep = NStep(config.n_step, config.gamma)
        self.replay = self._make_replay()
        self.beta_schedule = config.schedule("priority_beta")
        self.updates_owed = Fraction(0)
        self._has_rows = False

    def find_spaces(self) -> tuple[gymnasium.Space[Any], gymnasium.Space[Any]]:
        """Return those of one copy of the environment."""
        return self.env.single_observation_space, self.env.single_action_space

    def explore(self, *, warms_up: bool) -> dict[str, Number]:
        """Set the exploration of the next collect; return its metrics.

        Args:
            warms_up: Whether actions are to be random.
        """
        return {}

    def _check_fits(self) -> None:
        config, env = self.config, self.env
        spaces = (env.single_observation_space, env.single_action_space)
        check_training(config.num_envs, config.horizon, self.device, config.rollout_bytes(*spaces), policy=self.policy)
        if config.buffer_path is None:
            check_replay(config.buffer_size, self.device, config.replay_bytes(*spaces))
        else:
            check_replay_on_disk(config.buffer_size, config.buffer_path, config.replay_bytes(*spaces))

    def _make_replay(self) -> Replay:
        config = self.config
        options: Any = {"path": config.buffer_path, "available": available_bytes}
        if not config.prioritized:
            return Replay(config.buffer_size, self.device, **options)
        return PrioritizedReplay(config.buffer_size, self.device, alpha=config.priority_alpha, **options)

    # -- collecting

    @property
    def buffer(self) -> Any:
        """The last rollout as a TensorDict of batch size `[num_envs, horizon + 1]`, sharing its memory."""
        return self.rollout.as_tensordict()

    def collect(self, *, env_config: AnyEnvConfig | None = None) -> Stats:
        """Run the policy for a horizon and append its complete transitions to the replay."""
        warms_up = self.counters[keys.ENV_STEPS] < self.config.warmup_steps
        explored = self.explore(warms_up=warms_up)
        self.reset_if_due(env_config)
        if self.collector.cursor is None:
            self.cut_returns()
        self.collector.fill(self.rollout)
        before = self.counters[keys.ENV_STEPS]
        stats = self.finish_collect(self.rollout)
        self._append(stats, samples=0 if warms_up else self.counters[keys.ENV_STEPS] - before)
        return Stats.merge(stats, Stats(explored))

    def rollout_stats(self, rollout: Mapping[str, Tensor]) -> Stats:
        """Summarise a rollout and flag its non-finite tensors.

        Args:
            rollout: Its tensors by key, each `[horizon + 1, num_envs, ...]`.
        """
        return collected_stats(on_host(rollout) if self.execution.host_looks else rollout, self.config.horizon)

    def prepare(self) -> None:
        """Request the programs of a step, unless one has, or the environment has to be reset for it."""
        with self.execution.ahead():
            if not self.prepared:
                self.collector.prepare(self.rollout)
        super().prepare()

    def _append(self, stats: Stats, samples: int) -> None:
        """Append a horizon to the replay, unless its statistics say that it contains a non-finite number."""
        # The only host sync of a collect, since the host has to know the number of rows. If the horizon of any rank is
        # non-finite no rank appends, so that the same updates are due on all.
        numbers, _ = stats.counted()
        if ranks().any("whether a horizon is finite", any(numbers[f"finite/{name}"] for name in COLLECTED)):
            self.cut_returns()
            return
        self.replay.append(self.nstep.rows(self.rollout.tensors, self.config.horizon), checked=True)
        self.updates_owed += self.config.update_ratio * Fraction(samples, ranks().size)
        self.observe()

    def observe(self) -> None:
        """Update running moments by the last rollout, which is finite."""
        self.observe_rollout(self.rollout)

    def reset_if_due(self, env_config: AnyEnvConfig | None) -> bool:
        """Reset the environment if due; n-step returns end there."""
        is_reset = super().reset_if_due(env_config)
        if is_reset:
            self.cut_returns()
        return is_reset

    def evaluate(self, *, env_config: Mapping[str, Any] | None = None, deterministic: bool = True) -> Stats:
        """Evaluate in the training environment; see `OnlineAlgorithm.evaluate`. N-step returns end there."""
        self.cut_returns()
        return super().evaluate(env_config=env_config, deterministic=deterministic)

    def discard_experience(self) -> None:
        """Begin new episodes with the next collect; the replay never got the non-finite horizon."""
        super().discard_experience()
        self.cut_returns()

    def cut_returns(self) -> None:
        """Cut pending n-step returns at the end of the collected experience."""
        self.nstep.cut()

    def locate_non_finite(self) -> dict[str, dict[str, Any]]:
        """Locate non-finite numbers in the last rollout, by quantity; see `finite.locate_non_finite`."""
        return locate_non_finite(self.rollout.tensors)

    # -- learning

    def step(self) -> Stats:
        """Make the updates that are due; if none is, the step's row has no losses."""
        return Stats.merge(super().step(), Stats({REPLAY_SIZE: self.replay.size}))

    def _take_due(self) -> int:
        """Return the number of updates that are due, and count them as made; 0 while any rank has no rows."""
        self._has_rows = self._has_rows or ranks().all("whether there are rows", self.replay.size > 0)
        due = int(self.updates_owed) if self._has_rows else 0
        self.updates_owed -= due
        return due

    @property
    def updates_per_step(self) -> Fraction:
        """Updates of one `step()`, on average."""
        return self.config.updates_per_collect

    @property
    def _block_limits(self) -> dict[str, Any]:
        most = _PRIORITIZED_BLOCK if self.config.prioritized else None
        return {"masks": not self.env.capturable, "most": most}

    def _learned_from(self, index: Tensor, errors: Sequence[Tensor]) -> None:
        if isinstance(self.replay, PrioritizedReplay):
            assert errors, f"{type(self).__name__} gives no errors to draw by"
            self.replay.update(index, torch.cat([*errors]))

    def _items(self, index: Tensor) -> dict[str, Tensor]:
        items = super()._items(index)
        if isinstance(self.replay, PrioritizedReplay):
            items[WEIGHTS] = self.replay.weights(index, self.beta_schedule(self.counters[self.clock]))
        return items

    @property
    def seconds_per_step(self) -> float:
        """Estimated seconds of an eager step: environments and updates."""
        return self.config.horizon * _SECONDS_PER_ENV_STEP + super().seconds_per_step

    # -- params and checkpoints

    @property
    def params(self) -> dict[str, Any]:
        """The effective hyperparameters by name."""
        return super().params | {"priority_beta_schedule": self.beta_schedule.to_dict()}

    def state_dict(self) -> dict[str, Any]:
        """Return all state that the next collect and step depend on."""
        owed = [self.updates_owed.numerator, self.updates_owed.denominator]
        replay = {"replay": self.replay.state_dict(), "n_step": self.nstep.state_dict(), "updates_owed": owed}
        return {**super().state_dict(), **replay, "returns": list(self.config.returns)}

    def join(self, state: Mapping[str, Any]) -> None:
        """Restore another rank's state as a new rank, with an empty replay; the same updates are due on all ranks."""
        super().join(state)
        self._has_rows = False
        self.updates_owed = Fraction(*state["updates_owed"])

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state of `state_dict`; training continues with the same bits."""
        super().load_state_dict(state)
        self._has_rows = False
        self.replay.load_state_dict(state["replay"])
        self.nstep.load_state_dict(state["n_step"])
        self._warn_of_old_returns(*state.get("returns", self.config.returns))
        self.updates_owed = Fraction(*state["updates_owed"])

    def _warn_of_old_returns(self, n_step: int, gamma: float) -> None:
        """Warn if hyperparameters of n-step returns have changed: stored rows keep their returns."""
        if (n_step, gamma) == self.config.returns or not self.replay.size:
            return
        warnings.warn(
            f"the {self.replay.size:,} rows of the replay keep the returns of n_step={n_step} and gamma={gamma:g}; "
            f"rows from here on have n_step={self.config.n_step} and gamma={self.config.gamma:g}, and replace the "
            f"others within {self.config.buffer_size:,} transitions.",
            RuntimeWarning,
            stacklevel=2,
        )
