"""The rollout buffer: one horizon of all copies of the environment."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rl8x import keys
from rl8x.models import State
from rl8x.trees import Tree, unflatten_tree

if TYPE_CHECKING:
    from tensordict import TensorDict


class Rollout:
    """A time-major buffer of `horizon` steps of all copies; allocated at the first write, at fixed addresses.

    Args:
        horizon: Steps of each copy.
        num_envs: Copies of the environment.
        state_every: Slots between stored states of the policy; None stores the first.
    """

    def __init__(self, horizon: int, num_envs: int, *, state_every: int | None = None) -> None:
        self.horizon = horizon
        self.num_envs = num_envs
        self.state_every = state_every or horizon
        self.tensors: dict[str, Tensor] = {}
        self.states: State = {}
        self._metrics: list[str] = []
        self._views: dict[str, tuple[Tensor, ...]] = {}

    @property
    def memory(self) -> dict[str, Tensor]:
        """All buffers, `[horizon + 1, num_envs, ...]`, and the states, `[horizon / state_every, num_envs, ...]`."""
        return self.tensors | {f"{keys.STATES}/{name}": state for name, state in self.states.items()}

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

    def tree(self, key: str) -> Tree:
        """Return observations or actions as a tree, each tensor `[horizon + 1, num_envs, ...]`."""
        tree: Tree = unflatten_tree(key, self.tensors)
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
        """Truncate the episodes that are running at the end of the horizon, because a reset follows.

        Entries for their final observations, such as `final_values`, are copied from the last slot's (`values`).
        """
        last = self.horizon - 1
        terminated, truncated = self.tensors[keys.TERMINATED][last], self.tensors[keys.TRUNCATED][last]
        running = ~(terminated | truncated)
        for name, stored in self.tensors.items():
            if name.startswith(keys.FINAL_PREFIX):
                final = stored[last]
                mask = running.view(-1, *[1] * (final.dim() - 1))
                final.copy_(torch.where(mask, self.tensors[name.removeprefix(keys.FINAL_PREFIX)][self.horizon], final))
        truncated |= running
        if keys.ENDED in self.tensors:
            self.tensors[keys.ENDED][last] = True

    def as_tensordict(self) -> TensorDict:
        """Return the buffer as a TensorDict of batch size `[num_envs, horizon + 1]`, sharing its memory."""
        from tensordict import TensorDict  # imports torch's compiler, which takes a second

        views = {key: value.transpose(0, 1) for key, value in self.tensors.items()}
        return TensorDict(views, batch_size=[self.num_envs, self.horizon + 1])


def under(group: str, tensors: Mapping[str, Tensor], horizon: int) -> dict[str, Tensor]:
    """Return the tensors of a group of keys, by their names without the prefix, their first `horizon` slots."""
    named = [(name.partition("/"), tensor[:horizon]) for name, tensor in tensors.items()]
    return {name: tensor for (first, _, name), tensor in named if first == group}
