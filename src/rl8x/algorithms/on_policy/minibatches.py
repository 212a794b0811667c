"""Divides a rollout into sequences of one copy, which updates gather into minibatches.

All numbers that an update reads of a transition are packed side by side in one matrix, once a step, so that a shuffled
minibatch costs a single gather instead of one for each key. Wide tensors, such as images, are gathered separately, in
their own dtype and directly from the rollout.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any, Final

import numpy as np
import torch
from gymnasium.spaces import Box
from torch import Tensor

from rl8x import keys
from rl8x.algorithms.memory_check import Space
from rl8x.spaces import leaves

SequenceBatch = dict[str, Any]
"""Tensors by name; observations, actions and parameters of distributions may be trees of tensors."""
# Tensors with more numbers per transition are not packed: copying them would cost more than a separate gather.
MOST_PACKED: Final = 256
# Numbers per transition beside observation and action, as float32. Packed: start, log-probability, advantage, return.
# During the estimation of advantages: scaled rewards, advantages, targets.
_PACKED_NUMBERS: Final = 4 + 3
# float32 represents all whole numbers up to this one exactly.
_MOST_EXACT: Final = 2**24


def packed_bytes(observation: Space | None, action: Space | None) -> int:
    """Return the bytes that packing takes for one transition; unknown spaces count as 0."""
    widths: list[int] = [
        math.prod(leaf.shape or ()) for space in (observation, action) if space for _, leaf in leaves(space)
    ]
    return 4 * (_PACKED_NUMBERS + sum(width for width in widths if width <= MOST_PACKED))


def rounded_parts(name: str, space: Space) -> frozenset[str]:
    """Return the flat names, beginning with `name`, of a space's parts whose whole numbers float32 would round."""
    return frozenset(
        "/".join((name, *path))
        for path, leaf in leaves(space)
        if isinstance(leaf, Box)
        and np.issubdtype(leaf.dtype, np.integer)
        and max(-int(leaf.low.min(initial=0)), int(leaf.high.max(initial=0))) > _MOST_EXACT
    )


class SequencePack:
    """Sequences of `seq_len` consecutive steps of one copy, packed for gathering.

    `sources` are the packed numbers, `[num_sequences, seq_len, columns]`, and the states, each `[num_sequences, *]`;
    tensors that are too wide, float64, or `exact` are not packed (`wide`), and some steps may be masked (`masked`).
    """

    def __init__(self, horizon: int, num_envs: int, seq_len: int, exact: Collection[str] = ()) -> None:
        self.horizon, self.num_envs, self.seq_len = horizon, num_envs, seq_len
        self.exact = exact
        self.num_sequences = horizon // seq_len * num_envs
        self.sources: list[Tensor] = []
        self.masked = False
        self.wide = False
        self.width = 0  # numbers of a transition, packed and not
        self._columns: dict[str, tuple[int, int, torch.Size, torch.dtype]] = {}
        self._wide: dict[str, Tensor] = {}
        self._states: dict[str, Tensor] = {}

    def fill(self, tensors: Mapping[str, Tensor], states: Mapping[str, Tensor]) -> None:
        """Pack a rollout's tensors, `[horizon, num_envs, ...]`, and its states, `[horizon / seq_len, num_envs, *]`."""
        packed = self.sources[0] if self.sources else self._allocate(tensors)
        sequences, length = self.horizon // self.seq_len, self.seq_len
        self._wide = {  # not copied: they must stay unchanged until the next `fill`
            name: tensor.reshape(sequences, length, *tensor.shape[1:])
            for name, tensor in tensors.items()
            if name not in self._columns
        }
        self._states = {name: state.flatten(0, 1) for name, state in states.items()}
        self.sources = [packed, *self._states.values()]
        self.renew({name: tensors[name] for name in self._columns})

    def renew(self, tensors: Mapping[str, Tensor]) -> None:
        """Replace some of the tensors that `fill` packed, `[horizon, num_envs, ...]` each."""
        sequences, length = self.horizon // self.seq_len, self.seq_len
        columns = self.sources[0].view(sequences, self.num_envs, length, -1)
        for name, tensor in tensors.items():
            low, high, _, _ = self._columns[name]
            source = tensor.reshape(sequences, length, self.num_envs, high - low)
            columns[..., low:high].copy_(source.transpose(1, 2))

    def _allocate(self, tensors: Mapping[str, Tensor]) -> Tensor:
        low = 0
        for name, tensor in tensors.items():
            width = math.prod(tensor.shape[2:])
            self.width += width
            # float64 is not packed as float32, which would lose small differences beside a large offset.
            if width > MOST_PACKED or tensor.dtype == torch.float64 or name in self.exact:
                self.wide = True
                continue
            self._columns[name] = (low, low + width, tensor.shape[2:], tensor.dtype)
            low += width
        self.masked = keys.VALID in tensors
        device = next(iter(tensors.values())).device
        return torch.empty((self.num_sequences, self.seq_len, low), dtype=torch.float32, device=device)

    def take(self, rows: Tensor) -> list[Tensor]:
        """Gather sequences by number, `[batch]`: packed numbers, states, `[batch, *]` each, and wide tensors."""
        taken = [tensor.index_select(0, rows) for tensor in self.sources]
        if self._wide:
            sequences, copies = rows.div(self.num_envs, rounding_mode="floor"), rows.remainder(self.num_envs)
            steps = torch.arange(self.seq_len, device=rows.device)
            # One index for whole rows: torch copies them four times as fast as by two indices.
            index = (sequences.unsqueeze(1) * self.seq_len + steps) * self.num_envs + copies.unsqueeze(1)
            taken += [
                tensor.flatten(0, 2).index_select(0, index.flatten()).view(*index.shape, *tensor.shape[3:])
                for tensor in self._wide.values()
            ]
        return taken

    def unpack(self, taken: list[Tensor]) -> tuple[SequenceBatch, SequenceBatch]:
        """Return the results of `take` by name: trees, `[seq_len, batch, ...]` each, and states, each `[batch, *]`."""
        packed = taken[0].transpose(0, 1)
        flat = {}
        for name, (low, high, shape, dtype) in self._columns.items():
            column = packed[..., low:high].reshape(*packed.shape[:2], *shape) if shape else packed[..., low]
            flat[name] = column.to(dtype)
        num_states = len(self._states)
        for name, wide in zip(self._wide, taken[1 + num_states :], strict=True):
            flat[name] = wide.transpose(0, 1)
        batch: SequenceBatch = {}
        for name, leaf in flat.items():
            *path, last = name.split("/")
            part = batch
            for step in path:
                part = part.setdefault(step, {})
            part[last] = leaf
        return batch, dict(zip(self._states, taken[1 : 1 + num_states], strict=True))

    def gather(self, rows: Tensor) -> tuple[SequenceBatch, SequenceBatch]:
        """Gather sequences by index, `[batch]`; return their tensors by name, as `unpack` does."""
        return self.unpack(self.take(rows))

    def of_agents(self, rows: Tensor, agents: int) -> Tensor:
        """Return the numbers of all agents' sequences, agent by agent as separate weights need them, by copies'."""
        copies = self.num_envs // agents
        first = rows.div(copies, rounding_mode="floor") * self.num_envs + rows.remainder(copies)
        others = copies * torch.arange(agents, device=rows.device).unsqueeze(-1)
        return (first.unsqueeze(-2) + others).flatten(-2)
