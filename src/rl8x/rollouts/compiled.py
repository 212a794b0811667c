"""Compiled or captured steps and horizons of a policy in an environment."""

from __future__ import annotations

import contextlib
import functools
import math
import warnings
from collections.abc import Callable, Collection, Hashable, Sequence
from typing import Any, Final

import torch
from torch import Tensor

from rl8x import keys
from rl8x.envs.base import Carry
from rl8x.execution.compiled import CompiledProgram
from rl8x.execution.programs import ProgramError, TreeProgram, flat_of, prepare, trees_allclose
from rl8x.output import message_of
from rl8x.rollouts.buffer import Rollout
from rl8x.rollouts.step import Cursor, Stepper, Transition

# Steps for which an environment is compared with its trace before it is compiled.
_TRIAL_STEPS: Final = 4


class CompiledStepper(Stepper):
    """Steps a policy in an environment, compiled or captured if the environment allows it.

    A trace freezes what the function did in Python: an environment with a Python counter or its own generator would
    repeat the traced step. The trace is therefore first compared with the environment on the same noise. If they
    differ, only the policy is compiled, the environment runs eagerly, and a warning is issued once.

    Args:
        arguments: Those of `Stepper`.
        options: Likewise.

    Attributes:
        compiles_env: Whether the environment is part of compiled programs.
        captures_env: Whether the environment is part of captured programs.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._eager = Stepper(*arguments, **options)
        self.compiles_env = self.execution.target == "compile" and self.env.capturable
        self.captures_env = self.execution.target == "graph" and self.env.capturable
        self._programs: dict[Hashable, TreeProgram] = {}
        self._horizons: dict[Hashable, Horizon] = {}

    @property
    def runs_env(self) -> bool:
        """Whether the environment runs in the policy's mode, rather than eagerly around a compiled policy."""
        return self.captures_env or self.compiles_env or self.execution.mode == "eager"

    def step(self, carry: Carry, cursor: Cursor, env_noise: Tensor, policy_noise: Tensor | None) -> Transition:
        """Make one step; see `Stepper.step`."""
        where = (carry, cursor, env_noise, policy_noise)
        with self._preparing():
            program = self._step_program(*where)
        if self.execution.mode == "eager":
            return self._eager.step(*where)
        if self.compiles_env:
            after: Transition = program(*where)
            return after
        return self.advance(carry, program(cursor, policy_noise), env_noise)

    def _step_program(self, *where: Any) -> TreeProgram:
        """Return the program of a whole step, or of the policy if the environment runs eagerly around it."""
        _, cursor, _, policy_noise = where
        key = (self.env.program_key, policy_noise is None)
        if self.compiles_env and (key in self._programs or self._is_pure(None, *where)):
            return self._program(key, self._eager.step, *where)
        return self._program(policy_noise is None, self.act, cursor, policy_noise)

    def fill(
        self, rollout: Rollout, carry: Carry, cursor: Cursor, env_noise: Tensor, policy_noise: Tensor
    ) -> tuple[Carry, Cursor]:
        """Make the steps of a horizon and write them into a rollout's slots; see `Stepper.fill`."""
        where = (carry, cursor, env_noise, policy_noise)
        horizon = self.prepare(rollout, *where)
        if horizon is not None:
            return self._eager.fill(rollout, *where) if self.execution.mode == "eager" else horizon(rollout, *where)
        if self.captures_env and self.execution.mode != "eager":
            return self._fill_captured(rollout, *where)
        return super().fill(rollout, *where)

    def prepare(
        self, rollout: Rollout, carry: Carry, cursor: Cursor, env_noise: Tensor, policy_noise: Tensor
    ) -> Horizon | None:
        """Return the program of a horizon, whose compilation is requested; None if the environment runs eagerly."""
        key = self.env.program_key
        if self.compiles_env and key not in self._horizons:
            with self._preparing():
                written = self._is_pure(rollout, carry, cursor, env_noise[0], policy_noise[0])
                if written:
                    self._horizons[key] = Horizon(self, written, rollout, carry, cursor, env_noise, policy_noise)
        return self._horizons.get(key) if self.compiles_env else None

    def _preparing(self) -> contextlib.AbstractContextManager[None]:
        """Return the context in which programs are made, maybe ahead of their time."""
        return self.execution.ahead() if self.execution.prepares else contextlib.nullcontext()

    def _program(self, key: Hashable, function: Callable[..., Any], *where: Any) -> TreeProgram:
        """Return a program, whose compilation for such arguments is requested when it is made."""
        if key not in self._programs:
            self._programs[key] = program = TreeProgram(
                function, functools.partial(self.execution.program, name="step")
            )
            program.prepare(*where)
        return self._programs[key]

    def _fill_captured(self, rollout: Rollout, *where: Any) -> tuple[Carry, Cursor]:
        """Replay a whole horizon; the first is captured, and also run eagerly to compare the two."""
        key = self.env.program_key
        if key in self._programs:
            filled: tuple[Carry, Cursor] = self._programs[key](*where)
            return filled
        fill = functools.partial(self._eager.fill, rollout)
        actual = fill(*where)
        written = {name: buffer.clone() for name, buffer in rollout.memory.items()}
        program = TreeProgram(fill, self.execution.program)
        try:
            if not trees_allclose((program(*where), rollout.memory), (actual, written)):
                raise ValueError("horizons on the same noise differ: it keeps something outside of its state")
            self._programs[key] = program
        except Exception as error:
            self.captures_env = False
            for name, buffer in rollout.memory.items():
                buffer.copy_(written[name])
            self._warn(error)
        return actual

    def _is_pure(
        self, rollout: Rollout | None, carry: Carry, cursor: Cursor, env_noise: Tensor, policy_noise: Tensor | None
    ) -> Collection[str]:
        """Compare the environment with its trace for a few steps; return what a slot holds, or nothing if they differ.

        A rollout is allocated by these steps.
        """
        trace = TreeProgram(self._eager.step, functools.partial(CompiledProgram, compiles=False))
        generator = torch.Generator(env_noise.device).manual_seed(0)
        named: dict[str, Tensor] = {}
        try:
            for _ in range(_TRIAL_STEPS):
                drawn = torch.rand(env_noise.shape, generator=generator, device=env_noise.device)
                actual = self._eager.step(carry, cursor, drawn, policy_noise)
                if not trees_allclose(trace(carry, cursor, drawn, policy_noise), actual):
                    raise ValueError("steps on the same noise differ: it keeps something outside of its state")
                final = {} if self.bootstrap is None else {keys.FINAL_VALUES: actual.act.values}
                named = self.slot(cursor, actual.act, actual.step) | final
                if rollout is not None:
                    rollout.allocate(named)
                    rollout.write_state(0, cursor.state)
                carry, cursor = actual.carry, actual.cursor
        except Exception as error:
            self.compiles_env = False
            if isinstance(error, ProgramError) and not self._traces_policy(cursor, policy_noise):
                self.execution.give_up(error)
            else:
                self._warn(error)
        return tuple(named) if self.compiles_env else ()

    def _traces_policy(self, cursor: Cursor, policy_noise: Tensor | None) -> bool:
        """Return whether the policy can be traced by itself; if not, the environment is not the cause of an error."""
        try:
            TreeProgram(self.act, functools.partial(CompiledProgram, compiles=False))(cursor, policy_noise)
        except ProgramError:
            return False
        return True

    def _warn(self, error: Exception) -> None:
        lines = message_of(error).strip().splitlines()
        reason = lines[0] if lines else type(error).__name__
        around = {"compile": " around a compiled policy", "graph": " around a captured policy"}
        warnings.warn(
            f"{type(self.env).__name__} runs eagerly{around.get(self.execution.mode, '')}: {reason}.",
            RuntimeWarning,
            stacklevel=5,
        )


class Horizon:
    """Fills a rollout by a compiled loop over steps, whose items are slots of the rollout, which it writes in place.

    With a program for each step, compiled PPO on 16 x 128 steps of Pendulum is 12% slower (two Xeon cores, torch 2.13).

    Args:
        stepper: Makes the steps.
        written: Names of the tensors that the steps write; a rollout may also hold tensors of an earlier `env_config`.
        rollout: A rollout for which the compilation of the loop is requested.
        where: Further arguments of `Stepper.fill`, for their layouts.
    """

    def __init__(self, stepper: CompiledStepper, written: Collection[str], rollout: Rollout, *where: Any) -> None:
        self.stepper = stepper
        # Where the host may look, only truncated episodes' final observations are evaluated, after the loop.
        self._evaluates_later = stepper.bootstrap is not None and stepper.execution.host_looks
        self._keeps_final = self._evaluates_later and stepper.truncates
        self._names = [name for name in written if name != keys.FINAL_VALUES or not self._evaluates_later]
        carry, cursor, *_ = where
        (self._layout, _), (self._final_layout, _) = flat_of((carry, cursor)), flat_of((cursor.obs, cursor.state))
        state, items, _ = self._arguments(rollout, *where)
        self._loop = stepper.execution.loop(self._step, len(state), len(items), name="horizon")
        prepare(self._loop, *state, *[item[: self._span(rollout)] for item in items])

    def __call__(self, rollout: Rollout, *where: Any) -> tuple[Carry, Cursor]:
        """Fill the slots; see `Stepper.fill`."""
        stepper, span = self.stepper, self._span(rollout)
        state, items, finals = self._arguments(rollout, *where)
        carry, cursor = self._layout.tree(state)
        for t in range(0, rollout.horizon, span):
            if stepper.resets_state(t):
                for name, value in stepper.policy.initial_state(stepper.env.num_envs).items():
                    cursor.state[name].copy_(value)
            rollout.write_state(t, cursor.state)
            self._loop(*state, *[item[t : t + span] for item in items])
        if self._evaluates_later:
            self._write_final_values(rollout, finals)
        stepper.write_last(rollout, cursor)
        return carry, cursor

    def _span(self, rollout: Rollout) -> int:
        """Return the steps that a loop makes: between two loops the policy's state is stored, or reset."""
        return math.gcd(rollout.state_every, self.stepper.state_reset_every)

    def _arguments(
        self, rollout: Rollout, carry: Carry, cursor: Cursor, *noises: Tensor
    ) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        """Return copies of carry and cursor, which the loop changes; its items; and those that are evaluated later."""
        state = [tensor.clone() for tensor in flat_of((carry, cursor))[1]]
        slots = [rollout[name][: rollout.horizon] for name in self._names]
        like = flat_of((cursor.obs, cursor.state))[1] if self._keeps_final else []
        finals = [each.new_empty((rollout.horizon, *each.shape)) for each in like]
        return state, [*noises, *slots, *finals], finals

    def _step(self, *tensors: Tensor) -> Sequence[Tensor]:
        """Make a step, write its slots and what is evaluated later, and update carry and cursor."""
        stepper, size = self.stepper, self._layout.size
        state, (noise, sampling, *items) = tensors[:size], tensors[size:]
        carry, before = self._layout.tree(state)
        after = Stepper.step(stepper, carry, before, noise, sampling)
        written = stepper.slot(before, after.act, after.step)
        if keys.FINAL_VALUES in self._names:
            written[keys.FINAL_VALUES] = stepper.final_values(after.act, after.step)
        values = [written[name] for name in self._names]
        values += flat_of((after.step.final_obs, after.act.state))[1] if self._keeps_final else []
        values += flat_of((after.carry, after.cursor))[1]
        targets = [*items, *state]
        # What is written may share memory with the state, and so may the next state: in a history of frames each part
        # is the previous value of another.
        values = [new if new is target else new.clone() for target, new in zip(targets, values, strict=True)]
        for target, value in zip(targets, values, strict=True):
            target.copy_(value)
        return []

    def _write_final_values(self, rollout: Rollout, finals: Sequence[Tensor]) -> None:
        """Write the values of truncated episodes' final observations, `[horizon, num_envs, ...]` with the states."""
        values = rollout[keys.FINAL_VALUES][: rollout.horizon].zero_()
        if not finals:
            return
        cut = (rollout[keys.TRUNCATED] & ~rollout[keys.TERMINATED])[: rollout.horizon].nonzero()
        # At most as many at a time as one step may have, for which there is memory.
        for first in range(0, len(cut), rollout.num_envs):
            at = cut[first : first + rollout.num_envs].unbind(1)
            values[at] = self.stepper.final_obs_values(*self._final_layout.tree([each[at] for each in finals]))
