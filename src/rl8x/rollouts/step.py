"""Eager steps of a policy in an environment; the reference for compiled and captured ones."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rl8x import keys
from rl8x.envs.base import Carry, Env, Step, advanced
from rl8x.execution import Execution
from rl8x.models import State
from rl8x.policy import Act, Policy
from rl8x.rollouts.buffer import Rollout
from rl8x.trees import Tree, first_tensor, flatten_tree, tree_map

Slot = Callable[["Cursor", Act, Step], dict[str, Tensor]]
"""Returns the tensors of one step that a slot of a rollout holds, by name, each `[num_envs, ...]`."""

Bootstrap = Callable[[Tree, State, Tensor], Tensor]
"""Computes values `[rows]` of observations `[rows, *obs]`, given the policy's state `[rows, *]` and starts `[rows]`."""

Noises = Iterator[tuple[Tensor, Tensor | None]]
"""For each step the environment's noise, `[num_envs, *]`, and that of sampling, None for deterministic actions."""


class Cursor(NamedTuple):
    """The policy's inputs of the current step."""

    obs: Tree  # the observation to act on, `[num_envs, *obs]`, or a dict of such tensors
    starts: Tensor  # whether it begins an episode, `[num_envs]`, bool
    state: State  # the policy's state before it, each `[num_envs, *]`


def first_cursor(policy: Policy, obs: Tree) -> Cursor:
    """Return the cursor after a reset that led to observations `[num_envs, *obs]`."""
    first = first_tensor(obs)
    starts = torch.ones(len(first), dtype=torch.bool, device=first.device)
    return Cursor(obs, starts, policy.initial_state(len(first)))


class Transition(NamedTuple):
    """The result of one step: the environment's next carry, the policy's next cursor and its act, and the step."""

    carry: Carry
    cursor: Cursor
    act: Act
    step: Step


def experience(cursor: Cursor, act: Act, step: Step) -> dict[str, Tensor]:
    """Return the tensors of a step that every algorithm stores, by name, each `[num_envs, ...]`."""
    obs, actions = flatten_tree(keys.OBS, cursor.obs), flatten_tree(keys.ACTIONS, act.actions)
    return {**obs, keys.STARTS: cursor.starts, **actions, **outcome(step)}


def outcome(step: Step) -> dict[str, Tensor]:
    """Return the tensors of a step that statistics are made of, by name, each `[num_envs]`."""
    named = {
        keys.REWARDS: step.rewards,
        keys.TERMINATED: step.terminated,
        keys.TRUNCATED: step.truncated,
        keys.EPISODE_RETURNS: step.episode_returns,
        keys.EPISODE_LENGTHS: step.episode_lengths,
    }
    if step.valid is not None:
        named[keys.VALID] = step.valid
    if step.ended is not None:
        named[keys.ENDED] = step.ended
    named |= {f"{keys.SOURCES}/{label}": value for label, value in step.sources.items()}
    return named | {f"{keys.METRICS}/{name}": value for name, value in step.metrics.items()}


def actor_critic(cursor: Cursor, act: Act, step: Step) -> dict[str, Tensor]:
    """Return the tensors of a step that actor-critic algorithms store, by name, each `[num_envs, ...]`."""
    params = {} if act.params is None else flatten_tree(keys.PARAMS, act.params)
    return experience(cursor, act, step) | {keys.LOGP: act.logp, keys.VALUES: act.values} | params


def with_final_obs(cursor: Cursor, act: Act, step: Step) -> dict[str, Tensor]:
    """Return the tensors of `actor_critic`, and the observation before any reset, by name, each `[num_envs, ...]`."""
    return actor_critic(cursor, act, step) | flatten_tree(keys.FINAL_OBS, step.final_obs)


@dataclasses.dataclass(eq=False, repr=False)
class Stepper:
    """Steps a policy in an environment.

    Args:
        policy: The policy that acts.
        env: The environment.
        execution: How programs run.
        slot: Returns the tensors that a slot of a rollout holds.
        bootstrap: Computes values of the observations at which time limits truncate episodes, stored as
            `final_values`, and of those after the last step, stored as `values`; None stores neither.
        state_reset_every: Steps between resets of the policy's state; 0 never resets it.
    """

    policy: Policy
    env: Env
    execution: Execution
    _: dataclasses.KW_ONLY
    slot: Slot = experience
    bootstrap: Bootstrap | None = None
    state_reset_every: int = 0
    compiles_env: bool = dataclasses.field(default=False, init=False)

    def __post_init__(self) -> None:
        self.truncates = self.env.time_limit is not None or not self.env.capturable

    def step(self, carry: Carry, cursor: Cursor, env_noise: Tensor, policy_noise: Tensor | None) -> Transition:
        """Act and step the environment: a pure function of tensors, with noises `[num_envs, *]`; None acts greedily."""
        return self.advance(carry, self.act(cursor, policy_noise), env_noise)

    def act(self, cursor: Cursor, policy_noise: Tensor | None) -> Act:
        """Make the policy's part of a step; noise `[num_envs, *]`."""
        return self.policy.act(cursor.obs, cursor.state, cursor.starts, policy_noise)

    def advance(self, carry: Carry, act: Act, env_noise: Tensor) -> Transition:
        """Make the environment's part of a step; noise `[num_envs, *]`."""
        actions = self.policy.env_actions(act.actions) if self.policy.clips else act.actions
        carry, step = advanced(self.env, carry, actions, env_noise)
        return Transition(carry, Cursor(step.obs, step.terminated | step.truncated, act.state), act, step)

    def play(self, carry: Carry, cursor: Cursor, noises: Noises) -> Iterator[tuple[Cursor, Transition]]:
        """Make a step for each pair of noise tensors; yield the cursor before it and the transition."""
        for t, (env_noise, policy_noise) in enumerate(noises):
            if self.resets_state(t):
                cursor = cursor._replace(state=self.policy.initial_state(self.env.num_envs))
            transition = self.step(carry, cursor, env_noise, policy_noise)
            yield cursor, transition
            carry, cursor = transition.carry, transition.cursor

    def fill(
        self, rollout: Rollout, carry: Carry, cursor: Cursor, env_noise: Tensor, policy_noise: Tensor
    ) -> tuple[Carry, Cursor]:
        """Make a horizon's steps on noises `[horizon, num_envs, *]`, and write its slots; return what follows it."""
        noises = zip(env_noise.unbind(0), policy_noise.unbind(0), strict=True)
        for t, (before, after) in enumerate(self.play(carry, cursor, noises)):
            named = self.slot(before, after.act, after.step)
            if self.bootstrap is not None:
                named[keys.FINAL_VALUES] = self.final_values(after.act, after.step)
            rollout.write_slot(t, named, before.state)
            carry, cursor = after.carry, after.cursor
        self.write_last(rollout, cursor)
        return carry, cursor

    def prepare(self, rollout: Rollout, *where: Any) -> Any:
        """Request the compilation of a horizon's program; None if there is none to be had."""
        return None

    @property
    def picks_rows(self) -> bool:
        """Whether values may be computed of some rows alone: of agents with weights of their own the places count."""
        return self.execution.host_looks and self.policy.num_separate == 1

    def resets_state(self, t: int) -> bool:
        """Return whether the policy's state is reset before slot t."""
        return self.state_reset_every > 0 and t % self.state_reset_every == 0

    def write_last(self, rollout: Rollout, cursor: Cursor) -> None:
        """Write the slot after the last step: the next observation, whether it begins an episode, and its value."""
        named = flatten_tree(keys.OBS, cursor.obs) | {keys.STARTS: cursor.starts}
        if self.bootstrap is not None:
            named[keys.VALUES] = self.bootstrap(cursor.obs, cursor.state, cursor.starts)
        rollout.write_slot(rollout.horizon, named)

    def final_values(self, act: Act, step: Step) -> Tensor:
        """Return the values of the observations at which time limits truncate episodes, `[num_envs]`; 0 elsewhere.

        If the host may read values, only truncated copies are evaluated; otherwise all are, without a host sync.
        """
        values = torch.zeros(self.env.num_envs, device=self.policy.device)
        if self.execution.host_looks and not self.truncates:
            return values
        cut = step.truncated & ~step.terminated
        if not self.picks_rows:
            return torch.where(cut, self.final_obs_values(step.final_obs, act.state), 0.0)
        if cut.any():  # not every model accepts an empty batch
            rows = cut.nonzero().squeeze(1)
            state = {name: value[rows] for name, value in act.state.items()}
            values[rows] = self.final_obs_values(tree_map(lambda part: part[rows], step.final_obs), state)
        return values

    @functools.cached_property
    def work(self) -> int:
        """Rows times weights of one step."""
        return self.env.num_envs * sum(weight.numel() for weight in self.policy.parameters())

    def final_obs_values(self, obs: Any, state: State) -> Tensor:
        """Return values `[rows]` of final observations; NaN for non-finite ones, which clipping would hide."""
        assert self.bootstrap is not None
        first = first_tensor(obs)
        values = self.bootstrap(obs, state, torch.zeros(len(first), dtype=torch.bool, device=first.device))
        for part in flatten_tree(keys.OBS, obs).values():
            if part.is_floating_point() and part.numel():
                values = values.masked_fill(~part.isfinite().reshape(len(part), -1).all(1), torch.nan)
        return values
