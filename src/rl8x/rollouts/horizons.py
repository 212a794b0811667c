"""Horizons as compiled programs: one program per step, or one for the whole horizon."""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor

from rl8x import keys
from rl8x.envs.base import Carry
from rl8x.execution import Program
from rl8x.execution.programs import Layout, flat_of, prepare
from rl8x.rollouts.buffer import Rollout
from rl8x.rollouts.step import Cursor, Stepper


class Horizon(ABC):
    """Fills a rollout's horizon by compiled programs.

    Args:
        stepper: Makes the steps.
        written: Names of the tensors that the steps write; a rollout may also hold tensors of an earlier `env_config`.
    """

    def __init__(self, stepper: Stepper, written: Collection[str]) -> None:
        self.stepper = stepper
        self._written = written
        self._names: list[str] = []
        self._layout: Layout | None = None
        self._final_layout: Layout | None = None

    @abstractmethod
    def __call__(
        self, rollout: Rollout, carry: Carry, cursor: Cursor, env_noise: Tensor, policy_noise: Tensor
    ) -> tuple[Carry, Cursor]:
        """Fill the slots; see `Stepper.fill`."""

    @abstractmethod
    def prepare(self, rollout: Rollout, carry: Carry, cursor: Cursor, env_noise: Tensor, policy_noise: Tensor) -> None:
        """Request compilation of the programs that `__call__` with the same arguments runs."""

    def _step(self, tensors: Sequence[Tensor], *noises: Tensor, keep: Tensor | None = None) -> Any:
        """Make a step from flat tensors.

        Args:
            tensors: Carry and cursor, flattened.
            noises: Noise of the environment and of sampling.
            keep: Whether the policy's state is kept rather than reset, 0-d, bool; None keeps it.

        Returns:
            The cursor before the step, the transition, the flattened carry and cursor after the step, and the flattened
            final observations with the policy's state after the step.
        """
        stepper = self.stepper
        assert self._layout is not None
        carry, before = self._layout.tree(tensors)
        if keep is not None:
            initial = stepper.policy.initial_state(stepper.env.num_envs)
            state = {name: torch.where(keep, value, initial[name]) for name, value in before.state.items()}
            before = before._replace(state=state)
        after = Stepper.step(stepper, carry, before, *noises)
        self._final_layout, final = flat_of((after.step.final_obs, after.act.state))
        return before, after, flat_of((after.carry, after.cursor))[1], final

    def _write_final_values(self, rollout: Rollout, final: Callable[[Tensor, Tensor], Sequence[Tensor]]) -> None:
        """Write the values of the final observations of truncated episodes.

        Args:
            rollout: The buffer.
            final: Returns the flattened final observations of some steps and copies, `[rows]` each, in the order of
                the steps, and the policy's states after them.
        """
        if self.stepper.bootstrap is None:
            return
        values = rollout[keys.FINAL_VALUES][: rollout.horizon].zero_()
        if not self.stepper.truncates:
            return
        assert self._final_layout is not None
        cut = (rollout[keys.TRUNCATED] & ~rollout[keys.TERMINATED])[: rollout.horizon]
        steps, copies = cut.nonzero(as_tuple=True)
        # At most as many at a time as one step may have, for which there is memory.
        size = rollout.num_envs
        for i in range(0, len(steps), size):
            where = steps[i : i + size], copies[i : i + size]
            values[where] = self.stepper.final_obs_values(*self._final_layout.tree(final(*where)))


class SteppedHorizon(Horizon):
    """Fills a horizon by one call of a compiled program per step, which writes into the rollout's slots itself."""

    @functools.cached_property
    def _program(self) -> Program:
        return self.stepper.execution.program(self._flat, name="step")

    def __call__(
        self, rollout: Rollout, carry: Carry, cursor: Cursor, env_noise: Tensor, policy_noise: Tensor
    ) -> tuple[Carry, Cursor]:
        """Fill the slots; see `Stepper.fill`."""
        host_looks = self.stepper.execution.host_looks
        where = self._begin(rollout, carry, cursor)
        noises = zip(env_noise.unbind(0), policy_noise.unbind(0), rollout.slots(self._names), strict=True)
        finals: list[Sequence[Tensor]] = []
        for t, (noise, sampling, slots) in enumerate(noises):
            if cursor.state:
                where = self._with_state(rollout, t, where)
            results = list(self._program(*where, noise, sampling, *slots))
            where, final = results[: len(where)], results[len(where) :]
            finals.append(final)
        if host_looks:
            self._write_final_values(rollout, functools.partial(_rows, finals))
        assert self._layout is not None
        carry, cursor = self._layout.tree(where)
        self.stepper.write_last(rollout, cursor)
        return carry, cursor

    def prepare(self, rollout: Rollout, carry: Carry, cursor: Cursor, env_noise: Tensor, policy_noise: Tensor) -> None:
        """Have compiled what `__call__` with these would run."""
        where = self._begin(rollout, carry, cursor)
        prepare(self._program, *where, env_noise[0], policy_noise[0], *rollout.slots(self._names)[0])

    def _begin(self, rollout: Rollout, carry: Carry, cursor: Cursor) -> list[Tensor]:
        """Set the layout and the names of tensors to write; return the flattened carry and cursor."""
        host_looks = self.stepper.execution.host_looks
        self._layout, where = flat_of((carry, cursor))
        self._names = [
            name for name in rollout.tensors if name in self._written and (name != keys.FINAL_VALUES or not host_looks)
        ]
        return where

    def _with_state(self, rollout: Rollout, t: int, where: Sequence[Tensor]) -> list[Tensor]:
        """Reset the policy's state before slot t if due, and store it if the slot begins a sequence."""
        stepper = self.stepper
        assert self._layout is not None
        carry, cursor = self._layout.tree(where)
        if stepper.resets_state(t):
            cursor = cursor._replace(state=stepper.policy.initial_state(stepper.env.num_envs))
        rollout.write_state(t, cursor.state)
        return flat_of((carry, cursor))[1]

    def _flat(self, *tensors: Tensor) -> Sequence[Tensor]:
        """Make a step and write its slot; this function is compiled."""
        assert self._layout is not None
        size = self._layout.size
        noise, sampling, *slots = tensors[size:]
        before, after, where, final = self._step(tensors[:size], noise, sampling)
        written = self.stepper.slot(before, after.act, after.step)
        if keys.FINAL_VALUES in self._names:
            written[keys.FINAL_VALUES] = self.stepper.final_values(after.act, after.step)
        for name, target in zip(self._names, slots, strict=True):
            target.copy_(written[name])
        return [*where, *final]


def _rows(tensors: Sequence[Sequence[Tensor]], steps: Tensor, copies: Tensor) -> list[Tensor]:
    """Return rows of tensors, `[num_envs, *]` each for each step, of some steps in order and copies, `[rows]` each."""
    parts = []
    for t in sorted(set(steps.tolist())):
        rows = copies[steps == t]
        parts.append([each[rows] for each in tensors[t]])
    return [torch.cat(part) for part in zip(*parts, strict=True)]


class LoopedHorizon(Horizon):
    """Fills a horizon by a single program, for steps so small that the overhead of a call per step counts.

    Compiled PPO on 16 x 128 steps of Pendulum is 12% slower with a program for each step (two Xeon cores, torch 2.13).
    The program returns the slots, which are then copied into the rollout, so that they take twice the memory for a
    moment.
    """

    def __call__(
        self, rollout: Rollout, carry: Carry, cursor: Cursor, env_noise: Tensor, policy_noise: Tensor
    ) -> tuple[Carry, Cursor]:
        """Fill the slots; see `Stepper.fill`."""
        stepper, horizon = self.stepper, rollout.horizon
        where, keeps = self._begin(rollout, carry, cursor)
        columns = self._program(*where, env_noise, policy_noise, keeps)
        for name in self._names:
            column, *columns = columns
            rollout[name][:horizon].copy_(column)
        states, finals = columns[: len(cursor.state)], columns[len(cursor.state) :]
        for t in range(0, horizon, rollout.state_every):
            rollout.write_state(t, {name: each[t] for name, each in zip(cursor.state, states, strict=True)})
        self._write_final_values(rollout, lambda steps, copies: [each[steps, copies] for each in finals])
        assert self._layout is not None
        carry, cursor = self._layout.tree(where)
        stepper.write_last(rollout, cursor)
        return carry, cursor

    def prepare(self, rollout: Rollout, carry: Carry, cursor: Cursor, env_noise: Tensor, policy_noise: Tensor) -> None:
        """Have compiled what `__call__` with these would run."""
        where, keeps = self._begin(rollout, carry, cursor)
        prepare(self._program, *where, env_noise, policy_noise, keeps)

    def _begin(self, rollout: Rollout, carry: Carry, cursor: Cursor) -> tuple[list[Tensor], Tensor]:
        """Set the layout and names of results; return carry and cursor, flattened, and which steps keep the state."""
        self._layout, where = flat_of((carry, cursor))
        self._names = [name for name in rollout.tensors if name in self._written and name != keys.FINAL_VALUES]
        keeps = torch.tensor([not self.stepper.resets_state(t) for t in range(rollout.horizon)])
        # The program changes them in place, and some may share their memory.
        return [tensor.clone() for tensor in where], keeps

    @functools.cached_property
    def _program(self) -> Program:
        assert self._layout is not None
        return self.stepper.execution.loop(self._flat, self._layout.size, num_items=3, name="horizon")

    def _flat(self, *tensors: Tensor) -> Sequence[Tensor]:
        """Make a step, update carry and cursor in place, and return the slot; this function is compiled."""
        assert self._layout is not None
        state, (noise, sampling, keep) = tensors[: self._layout.size], tensors[self._layout.size :]
        before, after, where, final = self._step(state, noise, sampling, keep=keep)
        written = self.stepper.slot(before, after.act, after.step)
        results = [written[name] for name in self._names] + [*before.state.values(), *final]
        results = [result.clone() for result in results]  # some share memory with the state
        # So may the next state: in a history of frames each part is the previous value of another.
        following = [new if new is tensor else new.clone() for tensor, new in zip(state, where, strict=True)]
        for tensor, new in zip(state, following, strict=True):
            tensor.copy_(new)
        return results
