"""Gathering experience: a buffer that is allocated once, and the loop that fills it.

The loop is the same for every environment, model and algorithm. What it calls for one step, `act_and_step`, is a pure
function
of tensors, so that `execution.py` can compile or capture it; the noise that sampling and resets need is drawn for the
whole
horizon beforehand.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor

from rl8x import keys
from rl8x.envs.base import Carry, Env, Step
from rl8x.execution import Execution
from rl8x.functional.stats import masked_summary, summary
from rl8x.policy import Act, Policy, State
from rl8x.stats import Number, Stats
from rl8x.stepping import Cursor, Stepper
from rl8x.trees import Tree, first_tensor, flatten_tree, tree_map, unflatten_tree


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

    def __getitem__(self, key: str) -> Tensor:
        return self.tensors[key]

    def write(self, key: str, t: int, value: Tensor, *, empty: float = 0.0) -> None:
        """Copy one step of a key, `[num_envs, ...]`, into slot t; `empty` is what a new buffer is filled with."""
        buffer = self.tensors.get(key)
        if buffer is None:
            buffer = value.new_full((self.horizon + 1, *value.shape), empty)
            self.tensors[key] = buffer
        buffer[t].copy_(value)

    def write_tree(self, key: str, t: int, tree: Tree) -> None:
        """Copy one step of an observation or action, a tensor or nested dicts, into slot t."""
        if isinstance(tree, Tensor):
            self.write(key, t, tree)
            return
        for name, value in flatten_tree(key, tree).items():
            self.write(name, t, value)

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


class Collector:
    """Runs a policy in an environment, a horizon at a time.

    Args:
        env: The environment; its `carry` follows the collector's.
        policy: The policy that acts.
        generator: Source of the sampling noise, on the policy's device.
        execution: How the steps run; None is eagerly.
        state_reset_every: The policy's state is set back to the initial one every so many steps of a horizon; 0 is
            never.
    """

    def __init__(
        self,
        env: Env,
        policy: Policy,
        generator: torch.Generator,
        *,
        execution: Execution | None = None,
        state_reset_every: int = 0,
    ) -> None:
        self.env = env
        self.policy = policy
        self.generator = generator
        self.state_reset_every = state_reset_every
        self.cursor: Cursor | None = None
        self.act_and_step = Stepper(policy, env, execution or Execution("eager", "fp32", policy.device))
        self.truncates = env.time_limit is not None or not env.capturable

    def reset(self, env_config: Any = None) -> None:
        """Start every copy afresh, with a new `env_config` where one is given."""
        obs, _ = self.env.reset(config=env_config)
        starts = torch.ones(self.env.num_envs, dtype=torch.bool, device=first_tensor(obs).device)
        self.cursor = Cursor(obs, starts, self.policy.initial_state(self.env.num_envs))

    @torch.no_grad()
    def fill(self, rollout: Rollout) -> None:
        """Run one horizon and write it into the buffer, values of cut episodes' final observations with it."""
        cursor, carry = self._start()
        env_noise = self.env.noise(rollout.horizon)
        policy_noise = self.policy.noise(rollout.horizon, rollout.num_envs, self.generator)
        for t in range(rollout.horizon):
            cursor = self.refreshed(cursor, t)
            rollout.write_tree(keys.OBS, t, cursor.obs)
            rollout.write(keys.STARTS, t, cursor.starts)
            rollout.write_state(t, cursor.state)
            carry, cursor, act, step = self.act_and_step(carry, cursor, env_noise[t], policy_noise[t])
            self._write(rollout, t, act, step)
        self.env.carry = carry
        self.cursor = cursor
        self._write_last(rollout, cursor)

    def _write(self, rollout: Rollout, t: int, act: Act, step: Step) -> None:
        rollout.write_tree(keys.ACTIONS, t, act.actions)
        rollout.write(keys.LOGP, t, act.logp)
        rollout.write(keys.VALUES, t, act.values)
        rollout.write(keys.REWARDS, t, step.rewards)
        rollout.write(keys.TERMINATED, t, step.terminated)
        rollout.write(keys.TRUNCATED, t, step.truncated)
        rollout.write(keys.EPISODE_RETURNS, t, step.episode_returns)
        rollout.write(keys.EPISODE_LENGTHS, t, step.episode_lengths)
        if step.valid is not None:
            rollout.write(keys.VALID, t, step.valid)
        for name, figure in step.metrics.items():
            rollout.write(f"{keys.METRICS}/{name}", t, figure, empty=math.nan)
        rollout.write(keys.FINAL_VALUES, t, self._final_values(act, step))

    def _write_last(self, rollout: Rollout, cursor: Cursor) -> None:
        rollout.write_tree(keys.OBS, rollout.horizon, cursor.obs)
        rollout.write(keys.STARTS, rollout.horizon, cursor.starts)
        rollout.write(keys.VALUES, rollout.horizon, self.policy.values(cursor.obs, cursor.state, cursor.starts))

    def _final_values(self, act: Act, step: Step) -> Tensor:
        """Value the observations at which time limits cut episodes, `[num_envs]`; elsewhere 0, which nothing reads.

        On the CPU only the copies that were cut are evaluated. On an accelerator to look which those are would cost a
        copy to the host, so all are.
        """
        cut = step.truncated & ~step.terminated
        starts = torch.zeros_like(cut)
        if cut.device.type != "cpu":
            return torch.where(cut, self.policy.values(step.final_obs, act.state, starts), 0.0)
        values = torch.zeros_like(act.values)
        if self.truncates and bool(cut.any()):
            rows = cut.nonzero().squeeze(1)
            state = {name: value[rows] for name, value in act.state.items()}
            values[rows] = self.policy.values(tree_map(lambda part: part[rows], step.final_obs), state, starts[rows])
        return values

    @torch.no_grad()
    def evaluate(self, horizon: int, *, deterministic: bool) -> Stats:
        """Run one horizon without keeping any of it, and return its statistics."""
        cursor, carry = self._start()
        env_noise = self.env.noise(horizon)
        policy_noise = None if deterministic else self.policy.noise(horizon, self.env.num_envs, self.generator)
        steps: list[Step] = []
        for t in range(horizon):
            cursor = self.refreshed(cursor, t)
            noise = None if policy_noise is None else policy_noise[t]
            carry, cursor, _, step = self.act_and_step(carry, cursor, env_noise[t], noise)
            steps.append(step)
        self.env.carry = carry
        self.cursor = cursor
        return collect_stats(
            torch.stack([step.rewards for step in steps]),
            torch.stack([step.terminated | step.truncated for step in steps]),
            torch.stack([step.episode_returns for step in steps]),
            torch.stack([step.episode_lengths for step in steps]),
            None if steps[0].valid is None else torch.stack([step.valid for step in steps if step.valid is not None]),
            stacked_metrics([step.metrics for step in steps]),
        )

    def _start(self) -> tuple[Cursor, Carry]:
        if self.cursor is None:
            self.reset()
        assert self.cursor is not None
        assert self.env.carry is not None
        return self.cursor, self.env.carry

    def refreshed(self, cursor: Cursor, t: int) -> Cursor:
        """Forget the policy's state where the schedule of state resets says so."""
        if not self.state_reset_every or t % self.state_reset_every:
            return cursor
        return cursor._replace(state=self.policy.initial_state(self.env.num_envs))

    def state_dict(self) -> dict[str, Any]:
        """Return the cursor, the environment and the generator: all that the next horizon needs but the weights."""
        cursor = self.cursor
        return {
            "env": self.env.state_dict(),
            "generator": self.generator.get_state(),
            "cursor": None
            if cursor is None
            else {"obs": cursor.obs, "starts": cursor.starts, "state": dict(cursor.state)},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from where `state_dict` was taken."""
        self.env.load_state_dict(state["env"])
        self.generator.set_state(state["generator"].cpu())
        cursor = state["cursor"]
        device = self.policy.device
        if not self.env.resumable:
            # Its simulator cannot be set back: the next horizon begins with a reset.
            cursor = None
        self.cursor = cursor and Cursor(
            tree_map(lambda part: part.to(device), cursor["obs"]),
            cursor["starts"].to(device),
            {name: value.to(device) for name, value in cursor["state"].items()},
        )


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
