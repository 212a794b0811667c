"""Sources of the rows that a learner's updates read: a replay that its policy fills, or a data set."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from fractions import Fraction
from typing import Any, Final

import torch
from torch import Tensor, nn

from rl8x import keys
from rl8x.algorithms.horizons import COLLECTED, Horizons, gathered_not_finite
from rl8x.algorithms.memory_check import check_memory, check_replay_on_disk, check_training, row_bytes
from rl8x.algorithms.off_policy.config import LearnerConfig, OffPolicyConfig, collecting_options, updates_for
from rl8x.algorithms.off_policy.updates import SCALE, WEIGHTS
from rl8x.distributed import ranks
from rl8x.envs.base import Step
from rl8x.envs.parameters import AnyEnvConfig
from rl8x.envs.team import Team
from rl8x.functional import RunningMoments, running_returns
from rl8x.policy import Act, Policy
from rl8x.replay.dataset import Dataset
from rl8x.replay.nstep import NStep
from rl8x.replay.prioritized import PrioritizedReplay
from rl8x.replay.ring import Replay
from rl8x.rollouts.statistics import Array, Number, Stats, rollout_stats
from rl8x.rollouts.step import Cursor, experience
from rl8x.schedules import Schedule
from rl8x.spaces import describe_space
from rl8x.trees import Tree, without_ends

REPLAY_SIZE: Final = "replay/size"
# Maximum updates between writes of priorities, as the batches of a block are drawn before it.
_PRIORITIZED_BLOCK: Final = 16

Exploring = Callable[..., AbstractContextManager[Mapping[str, Number]]]
"""Given `warms_up`, returns the context of a collect, which yields metrics of the exploration."""


def transition(cursor: Cursor, act: Act, step: Step) -> dict[str, Tree]:
    """Return what to store of a step, `[num_envs, ...]` each, with the next observation before any reset."""
    final = step.final_obs
    if final is not step.obs:  # else no episode ended
        final = without_ends(final, step.terminated)
    return experience(cursor, act, step) | {keys.NEXT_OBS: final}


def collected_stats(rollout: Mapping[str, Array], horizon: int, team: Team | None = None) -> Stats:
    """Summarise a rollout's tensors or arrays by key, `[horizon + 1, num_envs, ...]`, and flag non-finite ones."""
    return Stats.merge(rollout_stats(rollout, horizon, team), gathered_not_finite(rollout))


class Source:
    """A source of rows. Its defaults are those of a source without an environment."""

    rows: Replay | Dataset
    batch_size: int  # on this rank
    updates_per_step: Fraction  # of one `step()`, on average
    most_at_once: int = 2**31  # updates in one program
    metrics: tuple[str, ...] = ()  # that `stats` returns

    def take_due(self) -> int:
        """Return the number of updates that are due, and count them as made."""
        raise NotImplementedError

    def params(self, others: dict[str, Any]) -> dict[str, Any]:
        """Return all params of a run, given the others."""
        return others

    def state_dict(self) -> dict[str, Any]:
        """Return all state that the next collect and step depend on, except the learned state."""
        raise NotImplementedError

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state of `state_dict`, after the learned state."""

    def learned_state(self) -> dict[str, Any]:
        """Return references to its part of the learned state; see `GenericAlgorithmBase.learned_state`."""
        return {}

    def load_learned_state(self, state: Mapping[str, Any]) -> None:
        """Restore a `learned_state`, in place."""

    def join(self, state: Mapping[str, Any]) -> None:
        """Start on a rank that is new to the run, from the `state_dict` of another rank."""

    def collect(self, env_config: AnyEnvConfig | None, exploring: Exploring) -> Stats:
        """Add rows, if there is an environment; see `GenericAlgorithmBase.collect`."""
        return Stats({})

    def cut(self) -> None:
        """Cut whatever continues across horizons, such as n-step returns, since the next one begins new episodes."""

    def items(self, index: Tensor) -> dict[str, Tensor]:
        """Gather inputs of updates, `[updates, ...]`, laid out as stored, by row numbers, `[updates, batch_size]`."""
        return self.rows.columns.gather(index, self.rows.device)

    def learned_from(self, index: Tensor, errors: Sequence[Tensor]) -> None:
        """Receive the numbers of the rows used, `[updates, batch_size]`, and their errors in parts, for priorities."""

    def stats(self) -> dict[str, Number]:
        """Return metrics of the rows after a step's updates."""
        return {}


class ReplaySource(Source):
    """A replay of the policy's transitions in an environment; updates multiply rewards by `return_scale`, if any."""

    rows: Replay
    metrics = (REPLAY_SIZE,)

    def __init__(self, config: OffPolicyConfig, horizons: Horizons) -> None:
        self.config, self.horizons = config, horizons
        env, bound = horizons.env, getattr(config, "return_bound", None)
        size, path = config.buffer_size, config.buffer_path
        self.policy: Policy = horizons.collector.policy
        check_training(config, env, env.device, policy=self.policy)
        need = size * row_bytes(env.single_observation_space, env.single_action_space)
        if path is None:
            what, lower = f"buffer_size={size:,} needs", "`buffer_size`, or set `buffer_path`"
            check_memory(need, env.device, what, lower, warn=True)
        else:
            check_replay_on_disk(size, path, need)
        if config.prioritized:
            self.rows = PrioritizedReplay(size, env.device, alpha=config.priority_alpha, path=path)
            self.most_at_once = _PRIORITIZED_BLOCK
        else:
            self.rows = Replay(size, env.device, path=path)
        self.batch_size = config.batch_size
        self.updates_per_step = config.update_ratio * config.num_envs * config.horizon * env.num_agents
        self.nstep = NStep(config.n_step, config.gamma)
        self.return_scale = None if bound is None else ReturnScale(env.num_envs, config.gamma, bound).to(env.device)
        self.beta_schedule: Schedule = config.schedule("priority_beta")
        self.updates_owed = Fraction(0)
        self._has_rows = False

    def collect(self, env_config: AnyEnvConfig | None, exploring: Exploring) -> Stats:
        """Play a horizon and append its complete transitions to the replay."""
        horizons, counters = self.horizons, self.horizons.counters
        warms_up = counters[keys.ENV_STEPS] < self.config.warmup_steps
        with exploring(warms_up=warms_up) as explored:
            if horizons.reset_if_due(env_config) or horizons.collector.cursor is None:
                self.cut()
            horizons.collector.fill(horizons.rollout)
            before = counters[keys.ENV_STEPS]
            stats = horizons.finish()
            self._append(stats, samples=0 if warms_up else counters[keys.ENV_STEPS] - before)
        return Stats.merge(stats, explored)

    def _append(self, stats: Stats, samples: int) -> None:
        """Append a horizon to the replay, unless its statistics say that it contains a non-finite number."""
        # The only host sync of a collect, since the host has to know the number of rows. If the horizon of any rank is
        # non-finite, no rank appends, so that the same updates are due on all.
        numbers, _ = stats.counted()
        if ranks().any("whether a horizon is finite", any(numbers[f"finite/{name}"] for name in COLLECTED)):
            self.cut()
            return
        rollout, horizon = self.horizons.rollout.tensors, self.config.horizon
        self.rows.append(self.nstep.rows(rollout, horizon))
        self.updates_owed += updates_for(samples, self.config.updates_per_sample, ranks().size)
        self.horizons.observe(self.policy)
        if self.return_scale is not None:
            part = {name: each[:horizon] for name, each in rollout.items()}
            cuts = part[keys.TERMINATED] | part[keys.TRUNCATED]
            self.return_scale.observe(part[keys.REWARDS], cuts, part.get(keys.VALID))

    def cut(self) -> None:
        """Cut pending n-step returns, and the reward sums that the scale is computed from."""
        self.nstep.cut()
        if self.return_scale is not None:
            self.return_scale.cut()

    def take_due(self) -> int:
        """Return the number of updates that are due, and count them as made; 0 while any rank has no rows."""
        self._has_rows = self._has_rows or ranks().all("whether there are rows", self.rows.size > 0)
        due = int(self.updates_owed) if self._has_rows else 0
        if isinstance(self.rows, PrioritizedReplay):
            self.rows.begin_updates()
        self.updates_owed -= due
        return due

    def items(self, index: Tensor) -> dict[str, Tensor]:
        """Return the inputs of updates, with importance weights and the scale of returns if there are any."""
        items = super().items(index)
        if isinstance(self.rows, PrioritizedReplay):
            items[WEIGHTS] = self.rows.weights(index, self.beta_schedule(self.horizons.counters[keys.ENV_STEPS]))
        if self.return_scale is not None:
            items[SCALE] = self.return_scale.scale.repeat(index.size(0))
        return items

    def learned_from(self, index: Tensor, errors: Sequence[Tensor]) -> None:
        """Make the errors of the rows, `[updates, batch_size]` in parts, their priorities."""
        if isinstance(self.rows, PrioritizedReplay):
            assert errors, "the algorithm gives no errors to draw by"
            self.rows.update(index, torch.cat([*errors]))

    def stats(self) -> dict[str, Number]:
        """Return the number of rows."""
        return {REPLAY_SIZE: self.rows.size}

    # -- checkpoints

    def load_learned_state(self, state: Mapping[str, Any]) -> None:
        """Restore the scale of returns, and undo the priorities that the last step's errors set."""
        if isinstance(self.rows, PrioritizedReplay):
            self.rows.undo_updates()
        if ("return_scale" in state) != (self.return_scale is not None):
            had = "a" if "return_scale" in state else "no"
            raise ValueError(
                f"the run had {had} `return_bound`, which decides what its critics' values mean; "
                f"got {getattr(self.config, 'return_bound', None)}. Resume it as it was."
            )
        if self.return_scale is not None:
            self.return_scale.load_state_dict(state["return_scale"])

    def learned_state(self) -> dict[str, Any]:
        """Return the scale of returns."""
        return {} if self.return_scale is None else {"return_scale": self.return_scale.state_dict()}

    def state_dict(self) -> dict[str, Any]:
        """Return the rows, the number of updates owed, and the pending returns of running episodes."""
        owed = [self.updates_owed.numerator, self.updates_owed.denominator]
        replay = {"replay": self.rows.state_dict(), "n_step": self.nstep.state_dict(), "updates_owed": owed}
        behind = {} if self.return_scale is None else {"running_return": self.return_scale.carry}
        return {**replay, "returns": list(self.config.returns), **behind}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state of `state_dict`."""
        config, (n_step, gamma) = self.config, state["returns"]
        self._has_rows = False
        self.rows.load_state_dict(state["replay"])
        self.nstep.load_state_dict(state["n_step"])
        self.updates_owed = Fraction(*state["updates_owed"])
        if self.return_scale is not None:
            self.return_scale.carry.copy_(state["running_return"])
        if (n_step, gamma) != config.returns and self.rows.size:
            warnings.warn(
                f"the {self.rows.size:,} rows of the replay keep the returns of n_step={n_step} and gamma={gamma:g}; "
                f"rows from here on have n_step={config.n_step} and gamma={config.gamma:g}, and replace the "
                f"others within {config.buffer_size:,} transitions.",
                RuntimeWarning,
                stacklevel=2,
            )

    def join(self, state: Mapping[str, Any]) -> None:
        """Start with an empty replay; as many updates are due as on the other ranks."""
        self._has_rows = False
        self.updates_owed = Fraction(*state["updates_owed"])


class DatasetSource(Source):
    """A data set, without an environment; updates may also read `next_actions`, which not all rows have."""

    rows: Dataset

    def __init__(
        self, config: LearnerConfig, dataset: Dataset, device: torch.device, *, next_actions: bool = False
    ) -> None:
        self.config = config
        self.dataset = dataset
        self.batch_size = config.batch_size // ranks().size
        self.updates_per_step = Fraction(config.updates_per_step)
        need = dataset.prepared_bytes(next_actions=next_actions)
        check_memory(need, device, f"a data set of {dataset.size:,} transitions needs", "their number", warn=True)
        self.rows = dataset.prepared(*config.returns, device, next_actions=next_actions)

    def take_due(self) -> int:
        """Return the number of updates of a step."""
        return self.config.updates_per_step

    def params(self, others: dict[str, Any]) -> dict[str, Any]:
        """Return the other params without those of collecting, and the identity of the data set."""
        dataset, without = self.dataset, collecting_options()
        return {
            **{name: value for name, value in others.items() if name.split(".")[0] not in without},
            "dataset": self.config.dataset if isinstance(self.config.dataset, str) else "given",
            "dataset.transitions": dataset.size,
            "dataset.episodes": len(dataset.episode_returns),
            "dataset.digest": dataset.digest,
            "dataset.observation_space": describe_space(dataset.observation_space),
            "dataset.action_space": describe_space(dataset.action_space),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Raise a `ValueError` if the data set is not the one of a `state_dict`."""
        if state["dataset"] != self.dataset.digest:
            raise ValueError(
                f"the run learned from a data set of the digest {state['dataset']}; {self.config.dataset!r} has "
                f"{self.dataset.digest}. Give the same transitions."
            )

    def state_dict(self) -> dict[str, Any]:
        """Return the digest of the data set, rather than its rows."""
        return {"dataset": self.dataset.digest}


def read_dataset(name: str, config: LearnerConfig) -> Dataset:
    """Return the data set of a config; raise a `ValueError` if the named algorithm cannot learn from it."""
    if config.dataset is None:
        raise ValueError(
            f"{name} learns from recorded transitions: give `dataset`, such as the folder that `rl8x collect RUN` "
            "writes."
        )
    dataset = config.dataset if isinstance(config.dataset, Dataset) else Dataset.load(config.dataset)
    if config.batch_size % ranks().size:
        raise ValueError(
            f"`batch_size` is shared out and must be a multiple of the {ranks().size} ranks; got "
            f"{config.batch_size}. Try {-(-config.batch_size // ranks().size) * ranks().size}."
        )
    if dataset.observation_space is None or dataset.action_space is None:
        raise ValueError(
            "the data set does not say what its spaces are: make it by `Dataset.load(..., observation_space=..., "
            "action_space=...)` or `from_tensors`, and `save` it to have them in its folder."
        )
    return dataset


class ReturnScale(nn.Module):
    """A factor that scales rewards so that discounted returns lie in [-bound, bound].

        1 / max(std of G, max |G| / bound),    G_t = r_t + gamma (1 - cut_{t-1}) G_{t-1}

    over all transitions ever seen. A replay stores unscaled rewards; updates multiply them by the current factor.

    Source: Engstrom et al. 2020, arXiv:2005.12729, section 3 (running returns).
    """

    carry: Tensor
    largest: Tensor

    def __init__(self, num_envs: int, gamma: float, bound: float) -> None:
        super().__init__()
        self.gamma = gamma
        self.bound = bound
        self.moments = RunningMoments()
        # Not part of the learned state: it belongs to the running episodes, and differs between ranks.
        self.register_buffer("carry", torch.zeros(num_envs), persistent=False)
        self.register_buffer("largest", torch.zeros(1))

    @torch.no_grad()
    def observe(self, rewards: Tensor, cuts: Tensor, valid: Tensor | None = None) -> None:
        """Update the scale by a horizon of all ranks, `[horizon, num_envs]`; masked steps are not `valid`."""
        returns, carry = running_returns(rewards, cuts, self.carry, self.gamma)
        if valid is not None:
            returns = torch.where(valid, returns, 0.0)
        self.carry.copy_(carry)
        largest = torch.stack(ranks().gather(returns.abs().max())).amax(0)
        self.largest.copy_(torch.maximum(self.largest, largest))
        self.moments.update(returns, valid)

    def cut(self) -> None:
        """Reset the reward sums, as the episodes of all copies have ended."""
        self.carry.zero_()

    @property
    def scale(self) -> Tensor:
        """The factor, `[1]`; finite even if all rewards are 0."""
        std = self.moments.std.float()
        return torch.maximum(std, self.largest / self.bound).clamp(min=1e-4).reciprocal()
