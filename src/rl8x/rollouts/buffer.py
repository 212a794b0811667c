"""What a horizon of all copies gave: a buffer that is allocated once, and the statistics of what is in it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from tensordict import TensorDict
from torch import Tensor

from rl8x import keys
from rl8x.functional.stats import masked_summary, summary
from rl8x.policy import State
from rl8x.rollouts.statistics import Number, Stats
from rl8x.trees import Tree, unflatten_tree


class Rollout:
    """What `horizon` steps of all copies gave, time-major; allocated at the first write, its pointers never change.

    Args:
        horizon: Steps of each copy.
        num_envs: Copies of the environment.
        state_every: The policy's state is kept at every slot that is a multiple of this.
    """

    def __init__(self, horizon: int, num_envs: int, *, state_every: int = 1) -> None:
        self.horizon = horizon
        self.num_envs = num_envs
        self.state_every = state_every
        self.tensors: dict[str, Tensor] = {}
        self.states: State = {}
        self._slots: dict[tuple[str, ...], list[tuple[Tensor, ...]]] = {}
        self._views: dict[str, tuple[Tensor, ...]] = {}

    @property
    def memory(self) -> dict[str, Tensor]:
        """All buffers, the policy's states too."""
        return self.tensors | {f"{keys.STATES}/{name}": state for name, state in self.states.items()}

    def __getitem__(self, key: str) -> Tensor:
        return self.tensors[key]

    def allocate(self, named: Mapping[str, Tensor]) -> None:
        """Make the buffers that are not there yet, for one step of each key, `[num_envs, ...]`."""
        for name, value in named.items():
            if name not in self.tensors:
                # A figure that some steps do not tell is NaN there.
                empty = math.nan if name.startswith(f"{keys.METRICS}/") else 0.0
                self.tensors[name] = value.new_full((self.horizon + 1, *value.shape), empty)
                self._views[name] = self.tensors[name].unbind(0)

    def write_slot(self, t: int, named: Mapping[str, Tensor]) -> None:
        """Copy one step of some keys, each `[num_envs, ...]`, into slot t."""
        self.allocate(named)
        torch._foreach_copy_([self._views[name][t] for name in named], list(named.values()))

    def slots(self, names: Sequence[str]) -> list[tuple[Tensor, ...]]:
        """Return views of some keys' slots but the last, `[horizon][key]`, each `[num_envs, ...]`."""
        key = tuple(names)
        if key not in self._slots:
            buffers = [self._views[name][: self.horizon] for name in names]
            self._slots[key] = list(zip(*buffers, strict=True))
        return self._slots[key]

    def tree(self, key: str) -> Tree:
        """Return an observation or action as it was written, each tensor `[horizon + 1, num_envs, ...]`."""
        tree: Tree = unflatten_tree(key, self.tensors)
        return tree

    def write_state(self, t: int, state: State) -> None:
        """Keep the policy's state before slot t, where it begins a sequence."""
        if t % self.state_every:
            return
        for name, value in state.items():
            if name not in self.states:
                self.states[name] = value.new_zeros((self.horizon // self.state_every, *value.shape))
            self.states[name][t // self.state_every].copy_(value)

    def cut(self) -> None:
        """Truncate the episodes that go on at the end of the horizon, because a reset follows.

        Their final observation is the one of the last slot.
        """
        last = self.horizon - 1
        terminated, truncated = self.tensors[keys.TERMINATED][last], self.tensors[keys.TRUNCATED][last]
        final_values = self.tensors[keys.FINAL_VALUES][last]
        goes_on = ~(terminated | truncated)
        final_values.copy_(torch.where(goes_on, self.tensors[keys.VALUES][self.horizon], final_values))
        truncated |= goes_on

    def metrics(self) -> dict[str, Tensor]:
        """Return the further figures of episodes that the environment told, each `[horizon, num_envs]`."""
        prefix = f"{keys.METRICS}/"
        return {
            name.removeprefix(prefix): tensor[: self.horizon]
            for name, tensor in self.tensors.items()
            if name.startswith(prefix)
        }

    def as_tensordict(self) -> TensorDict:
        """Show the buffer as a TensorDict of batch size `[num_envs, horizon + 1]`, sharing its memory."""
        views = {key: value.transpose(0, 1) for key, value in self.tensors.items()}
        return TensorDict(views, batch_size=[self.num_envs, self.horizon + 1])


def collect_stats(
    rewards: Tensor,
    ended: Tensor,
    episode_returns: Tensor,
    episode_lengths: Tensor,
    valid: Tensor | None = None,
    metrics: Mapping[str, Tensor] | None = None,
) -> Stats:
    """Summarise a horizon: sums over it, each reward, and the episodes that ended in it.

    Args:
        rewards: `[horizon, num_envs]`.
        ended: Where an episode ended, `[horizon, num_envs]`, bool.
        episode_returns: Return of the episode so far, `[horizon, num_envs]`; read where it ended.
        episode_lengths: Its length so far in steps, `[horizon, num_envs]`; read where it ended.
        valid: Which rows are experience, `[horizon, num_envs]`, bool; None is all. Filler rows have reward 0.
        metrics: Further figures of the episode so far, each `[horizon, num_envs]`; NaN where there is none.
    """
    if valid is not None:
        ended = ended & valid
    values: dict[str, Number] = {}
    values.update(named("returns", summary(rewards.sum(0))))
    values.update(named("rewards", summary(rewards) if valid is None else masked_summary(rewards, valid)))
    values.update(named("episodes/returns", masked_summary(episode_returns, ended)))
    values.update(named("episodes/lengths", masked_summary(episode_lengths.to(torch.float32), ended)))
    values[keys.EPISODES_ENDED] = ended.sum()
    means, counts = info_means(metrics or {}, ended)
    if valid is not None:
        values["_count/rewards"], counts["_count/rewards"] = valid.sum(), ("rewards/",)
    return Stats(values | means, {keys.EPISODES_ENDED: ("episodes/returns/", "episodes/lengths/"), **counts})


def info_means(metrics: Mapping[str, Tensor], ended: Tensor) -> tuple[dict[str, Number], dict[str, tuple[str, ...]]]:
    """Average figures over the episodes that ended, as far as they have them; return values and counts for `Stats`."""
    values: dict[str, Number] = {}
    counts: dict[str, tuple[str, ...]] = {}
    for name, figures in metrics.items():
        (metric,) = keys.info_metrics([name])
        told = ended & ~figures.isnan()
        count = told.sum()
        values |= {metric: torch.where(told, figures, 0.0).sum() / count, f"_count/{metric}": count}
        counts[f"_count/{metric}"] = (metric,)
    return values, counts


def stacked_metrics(steps: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Stack the figures of each step, `[horizon, num_envs]`; NaN in steps before one was first told."""
    found = {name: figure for step in steps for name, figure in step.items()}
    return {
        name: torch.stack([step.get(name, torch.full_like(figure, math.nan)) for step in steps])
        for name, figure in found.items()
    }


def named(group: str, figures: tuple[Tensor, Tensor, Tensor, Tensor]) -> dict[str, Tensor]:
    """Pair the four figures of a summary with their metric names."""
    return dict(zip(keys.summary(group), figures, strict=True))
