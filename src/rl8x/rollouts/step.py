"""Eager steps of a policy in an environment, the reference for compiled ones, and the rollouts that they fill."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from rl8x import keys
from rl8x.envs.base import Carry, Env, Step, advanced
from rl8x.execution import Execution
from rl8x.models import State
from rl8x.policy import Act, Policy
from rl8x.spaces import where_rows
from rl8x.trees import Tree, first_tensor, flatten_tree, names_of, tree_map, unflatten_tree

if TYPE_CHECKING:
    from tensordict import TensorDict

Slot = Callable[["Cursor", Act, Step], dict[str, Tree]]
"""Returns the content of a rollout's slot from one step, by name: tensors `[num_envs, ...]`, or trees of them."""

Bootstrap = Callable[[Tree, State, Tensor], Tensor]
"""Computes values `[rows]` of observations `[rows, *obs]`, given the policy's state `[rows, *]` and starts `[rows]`."""

Noises = Iterator[tuple[Tensor, Tensor | None]]
"""The environment's noise of each step, `[num_envs, *]`, and the sampling noise, None for deterministic actions."""


class Cursor(NamedTuple):
    """The policy's inputs at the current step."""

    obs: Tree  # the observation to act on, `[num_envs, *obs]`, or a dict of such tensors
    starts: Tensor  # whether it begins an episode, `[num_envs]`, bool
    state: State  # the policy's state before it, each `[num_envs, *]`


class Transition(NamedTuple):
    """The result of one step: the environment's next carry, the policy's next cursor and its act, and the step."""

    carry: Carry
    cursor: Cursor
    act: Act
    step: Step


def experience(cursor: Cursor, act: Act, step: Step) -> dict[str, Tree]:
    """Return what every algorithm stores of a step, by name: tensors `[num_envs, ...]`, or trees of them."""
    return {keys.OBS: cursor.obs, keys.STARTS: cursor.starts, keys.ACTIONS: act.actions, **outcome(step)}


def outcome(step: Step) -> dict[str, Tree]:
    """Return the parts of a step that statistics use, by name: tensors `[num_envs]`, or trees of them."""
    named: dict[str, Tree] = {
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
    if step.sources:
        named[keys.SOURCES] = dict(step.sources)
    if step.metrics:
        named[keys.METRICS] = dict(step.metrics)
    return named


def actor_critic(cursor: Cursor, act: Act, step: Step) -> dict[str, Tree]:
    """Return what actor-critic algorithms store of a step, by name: tensors `[num_envs, ...]`, or trees of them."""
    named = experience(cursor, act, step) | {keys.LOGP: act.logp, keys.VALUES: act.values}
    if act.params is not None:
        named[keys.PARAMS] = dict(act.params)
    return named


def flat(named: Mapping[str, Tree], prefix: str = "") -> dict[str, Tensor]:
    """Return the tensors of a slot's content, each `[num_envs, ...]`, by their names in a rollout."""
    tensors: dict[str, Tensor] = {}
    for name, tree in named.items():
        tensors |= {prefix + name: tree} if isinstance(tree, Tensor) else flat(tree, f"{prefix}{name}/")
    return tensors


@dataclasses.dataclass(eq=False, repr=False)
class Stepper:
    """Steps a policy in an environment; the `slot` returns the tensors that a slot of a rollout holds.

    The `bootstrap` computes the values of observations where episodes are cut and after the last step; None stores
    none. The policy's state is reset every `state_reset_every` steps; 0 means never.
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
                cursor = cursor._replace(state={**cursor.state, **self.policy.state_at_reset(self.env.num_envs)})
            transition = self.step(carry, cursor, env_noise, policy_noise)
            yield cursor, transition
            carry, cursor = transition.carry, transition.cursor

    def fill(
        self, rollout: Rollout, carry: Carry, cursor: Cursor, env_noise: Tensor, policy_noise: Tensor
    ) -> tuple[Carry, Cursor]:
        """Make a horizon's steps on noises `[horizon, num_envs, *]`, and write its slots; return carry and cursor."""
        noises = zip(env_noise.unbind(0), policy_noise.unbind(0), strict=True)
        for t, (before, after) in enumerate(self.play(carry, cursor, noises)):
            named = flat(self.slot(before, after.act, after.step))
            if self.bootstrap is not None:
                named[keys.FINAL_VALUES] = self.final_values(after.act, after.step)
            rollout.write_slot(t, named, before.state)
            carry, cursor = after.carry, after.cursor
        self.write_last(rollout, cursor)
        return carry, cursor

    @functools.cached_property
    def picks_rows(self) -> bool:
        """Whether values may be computed for some rows only; with separate weights per agent, row positions matter."""
        return self.execution.host_looks and self.policy.num_separate == 1

    def resets_state(self, t: int) -> bool:
        """Return whether the policy's state is reset before slot t."""
        return self.state_reset_every > 0 and t % self.state_reset_every == 0

    def write_last(self, rollout: Rollout, cursor: Cursor) -> None:
        """Write the slot after the last step: the next observation, whether it begins an episode, and its value."""
        named = flat({keys.OBS: cursor.obs, keys.STARTS: cursor.starts})
        if self.bootstrap is not None:
            named[keys.VALUES] = self.bootstrap(cursor.obs, cursor.state, cursor.starts)
        rollout.write_slot(rollout.horizon, named)

    def final_values(self, act: Act, step: Step) -> Tensor:
        """Return the values of the observations at which time limits truncate episodes, `[num_envs]`; 0 elsewhere."""
        values = torch.zeros(self.env.num_envs, device=self.env.device)
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


class Rollout:
    """A time-major buffer of `horizon` steps of all copies; allocated at the first write, at fixed addresses.

    The policy's state is stored every `state_every` slots; with None, only before the first.
    """

    def __init__(self, horizon: int, num_envs: int, *, state_every: int | None = None) -> None:
        self.horizon = horizon
        self.num_envs = num_envs
        self.state_every = state_every or horizon
        self.tensors: dict[str, Tensor] = {}
        self.states: State = {}
        self._metrics: list[str] = []
        self._views: dict[str, tuple[Tensor, ...]] = {}

    def __getitem__(self, key: str) -> Tensor:
        return self.tensors[key]

    def allocate(self, named: Mapping[str, Tensor]) -> None:
        """Allocate missing buffers, given one step of each key, `[num_envs, ...]`."""
        for name, value in named.items():
            if name not in self.tensors:
                # NaN marks steps without a value of the metric.
                is_metric = name.startswith(f"{keys.METRICS}/")
                self._metrics += [name] * is_metric
                empty = math.nan if is_metric else 0.0
                self.tensors[name] = value.new_full((self.horizon + 1, *value.shape), empty)
                self._views[name] = self.tensors[name].unbind(0)

    def write_slot(self, t: int, named: Mapping[str, Tensor], state: State | None = None) -> None:
        """Copy one step of some keys, each `[num_envs, ...]`, into slot t, with the policy's state before it."""
        if not named.keys() <= self._views.keys():
            self.allocate(named)
        for name, value in named.items():
            self._views[name][t].copy_(value)
        for name in self._metrics if t < self.horizon else ():
            if name not in named:  # clear the value of the previous horizon
                self._views[name][t].fill_(math.nan)
        if state:
            self.write_state(t, state)

    def tree(self, key: str, index: Any = slice(None)) -> Tree:
        """Return a tree, such as the actions, with `index` applied to each tensor `[horizon + 1, num_envs, ...]`."""
        names = names_of(tuple(self.tensors), key)
        tree: Tree = unflatten_tree(key, {name: self.tensors[name][index] for name in names})
        return tree

    def write_state(self, t: int, state: State) -> None:
        """Store the policy's state before slot t, if the slot begins a sequence."""
        if t % self.state_every:
            return
        for name, value in state.items():
            if name not in self.states:
                self.states[name] = value.new_zeros((self.horizon // self.state_every, *value.shape))
            self.states[name][t // self.state_every].copy_(value)

    def truncate(self) -> None:
        """Truncate running episodes at the horizon's end, as a reset follows; their final data are the next slot's."""
        last = self.horizon - 1
        terminated, truncated = self.tensors[keys.TERMINATED][last], self.tensors[keys.TRUNCATED][last]
        running = ~(terminated | truncated)
        for name, stored in self.tensors.items():
            if name.startswith(keys.FINAL_PREFIX):
                after = self.tensors[name.removeprefix(keys.FINAL_PREFIX)][self.horizon]
                stored[last].copy_(where_rows(running, after, stored[last]))
        truncated |= running
        if keys.ENDED in self.tensors:
            self.tensors[keys.ENDED][last] = True

    def as_tensordict(self) -> TensorDict:
        """Return the buffer as a TensorDict of batch size `[num_envs, horizon + 1]`, sharing its memory."""
        from tensordict import TensorDict  # imports torch's compiler, which takes a second

        views = {key: value.transpose(0, 1) for key, value in self.tensors.items()}
        return TensorDict(views, batch_size=[self.num_envs, self.horizon + 1])


def under(group: str, tensors: Mapping[str, Any], horizon: int) -> dict[str, Any]:
    """Return the first `horizon` slots of a group's tensors, by their names without the group's prefix."""
    prefix = f"{group}/"
    return {name.removeprefix(prefix): each[:horizon] for name, each in tensors.items() if name.startswith(prefix)}
