"""A compiled policy and environment fill a rollout: by one program a step, or by one for the whole horizon."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rl8x import keys
from rl8x.envs.base import Carry
from rl8x.execution import Program
from rl8x.execution.programs import Layout, flat_of
from rl8x.rollouts.buffer import Rollout
from rl8x.rollouts.step import Cursor, act_and_step, slot

if TYPE_CHECKING:
    from rl8x.rollouts.compiled import Stepper

Filler = Callable[[Rollout, Carry, Cursor, Tensor, Tensor], tuple[Carry, Cursor]]


class _Filler:
    """Fills a rollout's horizon.

    Args:
        stepper: What takes the steps.
    """

    def __init__(self, stepper: Stepper) -> None:
        self.stepper = stepper
        self._where: Layout | None = None
        self._final: Layout | None = None
        self._names: list[str] = []


class StepFiller(_Filler):
    """Fills a horizon by one compiled program a step, which writes into the rollout's slots itself."""

    @functools.cached_property
    def _program(self) -> Program:
        return self.stepper.execution.program(self._flat)

    def __call__(
        self, rollout: Rollout, carry: Carry, cursor: Cursor, env_noise: Tensor, policy_noise: Tensor
    ) -> tuple[Carry, Cursor]:
        """Fill the slots; see `Stepper.fill`."""
        stepper = self.stepper
        where: Sequence[Tensor]
        self._where, where = flat_of((carry, cursor))
        self._names = [
            name for name in rollout.tensors if name != keys.FINAL_VALUES or not stepper.execution.host_looks
        ]
        noises = zip(env_noise.unbind(0), policy_noise.unbind(0), rollout.slots(self._names), strict=True)
        finals = []
        for t, (noise, sampling, slots) in enumerate(noises):
            if cursor.state:
                where = self._with_state(rollout, t, where)
            results = self._program(*where, noise, sampling, *slots)
            where = results[: len(where)]
            finals.append(results[len(where) :])
        if stepper.execution.host_looks:
            _write_final_values(stepper, rollout, lambda t: self._final and self._final.tree(finals[t]))
        carry, cursor = self._where.tree(where)
        stepper.write_last(rollout, cursor)
        return carry, cursor

    def _with_state(self, rollout: Rollout, t: int, where: Sequence[Tensor]) -> Sequence[Tensor]:
        """Forget and keep the policy's state as the slot asks."""
        assert self._where is not None
        carry, cursor = self._where.tree(where)
        cursor = self.stepper.refreshed(cursor, t)
        rollout.write_state(t, cursor.state)
        return flat_of((carry, cursor))[1]

    def _flat(self, *tensors: Tensor) -> Sequence[Tensor]:
        """Take a step and write the slot: what is compiled."""
        stepper, layout = self.stepper, self._where
        assert layout is not None
        carry, before = layout.tree(tensors[: layout.size])
        noise, sampling, *slots = tensors[layout.size :]
        carry, cursor, act, step = act_and_step(stepper.policy, stepper.env, carry, before, noise, sampling)
        written = slot(before, act, step)
        if keys.FINAL_VALUES in self._names:
            written[keys.FINAL_VALUES] = stepper.final_values(act, step)
        for name, target in zip(self._names, slots, strict=True):
            target.copy_(written[name])
        _, where = flat_of((carry, cursor))
        self._final, final = flat_of((step.final_obs, act.state))
        return [*where, *final]


class HorizonFiller(_Filler):
    """Fills a horizon by one compiled program, for steps so small that calling one each would cost more than they do.

    What each step gives is returned and then copied to the rollout, which is twice the memory for a moment.
    """

    def __call__(
        self, rollout: Rollout, carry: Carry, cursor: Cursor, env_noise: Tensor, policy_noise: Tensor
    ) -> tuple[Carry, Cursor]:
        """Fill the slots; see `Stepper.fill`."""
        stepper, horizon = self.stepper, rollout.horizon
        self._where, where = flat_of((carry, cursor))
        self._names = [name for name in rollout.tensors if name != keys.FINAL_VALUES]
        # The program changes them in place, and some may share their memory.
        state = [tensor.clone() for tensor in where]
        resets_state = torch.tensor([stepper.resets_state(t) for t in range(horizon)])
        columns = self._program(*state, env_noise, policy_noise, resets_state)
        for name in self._names:
            column, *columns = columns
            rollout[name][:horizon].copy_(column)
        states, finals = columns[: len(cursor.state)], columns[len(cursor.state) :]
        for t in range(0, horizon, rollout.state_every):
            rollout.write_state(t, {name: each[t] for name, each in zip(cursor.state, states, strict=True)})
        _write_final_values(stepper, rollout, lambda t: self._final and self._final.tree([each[t] for each in finals]))
        carry, cursor = self._where.tree(state)
        stepper.write_last(rollout, cursor)
        return carry, cursor

    @functools.cached_property
    def _program(self) -> Program:
        assert self._where is not None
        return self.stepper.execution.loop(self._flat, self._where.size, num_items=3)

    def _flat(self, *tensors: Tensor) -> Sequence[Tensor]:
        """Take a step, leave in the state where it led to, and return the slot: what is compiled."""
        stepper, layout = self.stepper, self._where
        assert layout is not None
        state, (noise, sampling, resets_state) = tensors[: layout.size], tensors[layout.size :]
        carry, before = layout.tree(state)
        initial = stepper.policy.initial_state(stepper.env.num_envs)
        kept = {name: torch.where(resets_state, initial[name], value) for name, value in before.state.items()}
        before = before._replace(state=kept)
        carry, cursor, act, step = act_and_step(stepper.policy, stepper.env, carry, before, noise, sampling)
        written = slot(before, act, step)
        self._final, final = flat_of((step.final_obs, act.state))
        results = [written[name] for name in self._names] + [*kept.values(), *final]
        results = [result.clone() for result in results]  # some are the state's memory
        for tensor, new in zip(state, flat_of((carry, cursor))[1], strict=True):
            tensor.copy_(new)
        return results


def _write_final_values(stepper: Stepper, rollout: Rollout, final: Callable[[int], Any]) -> None:
    """Value the observations at which time limits cut episodes, of which there are few.

    Args:
        stepper: What took the steps.
        rollout: What is written to.
        final: Returns the final observation and the policy's state after a step, by its number.
    """
    values = rollout[keys.FINAL_VALUES][: rollout.horizon].zero_()
    if not stepper.truncates:
        return
    cut = (rollout[keys.TRUNCATED] & ~rollout[keys.TERMINATED])[: rollout.horizon]
    for t in cut.any(1).nonzero().squeeze(1).tolist():
        stepper.value_cut(values[t], cut[t], *final(t))
