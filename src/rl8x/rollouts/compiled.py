"""Compiled or captured steps and horizons of a policy in an environment."""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable, Collection, Hashable, Sequence
from typing import Any, Final

import torch
from torch import Tensor

from rl8x import keys
from rl8x.envs.base import Carry
from rl8x.envs.steps import advanced
from rl8x.execution import Program
from rl8x.execution.compiled import CompiledProgram
from rl8x.execution.programs import Layout, ProgramError, TreeProgram, flat_of, prepare, trees_allclose
from rl8x.output import message_of
from rl8x.policy import Act
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
        eager: The eager stepper.

    Attributes:
        compiles_env: Whether the environment is part of compiled programs.
        captures_env: Whether the environment is part of captured programs.
    """

    def __init__(self, eager: Stepper) -> None:
        super().__init__(
            eager.policy,
            eager.env,
            eager.execution,
            slot=eager.slot,
            bootstrap=eager.bootstrap,
            state_reset_every=eager.state_reset_every,
        )
        execution, env = eager.execution, eager.env
        self._eager = eager
        self.compiles_env = execution.target == "compile" and env.capturable
        self.captures_env = execution.target == "graph" and env.capturable
        self._programs: dict[Hashable, TreeProgram] = {}
        self._horizons: dict[Hashable, Horizon] = {}
        self._prepared: set[Hashable] = set()
        self._written: Collection[str] = ()

    @property
    def runs_env(self) -> bool:
        """Whether the environment runs in the policy's mode, rather than eagerly around a compiled policy."""
        return self.captures_env or self.compiles_env or self.execution.mode == "eager"

    def step(self, carry: Carry, cursor: Cursor, env_noise: Tensor, policy_noise: Tensor | None) -> Transition:
        """Make one step; see `act_and_step`."""
        where = (carry, cursor, env_noise, policy_noise)
        if self.execution.prepares:
            with self.execution.ahead():
                self._prepare_step(*where)
        if self.execution.mode == "eager":
            return self._eager.step(*where)
        program = self._step_program(*where)
        if program is not None:
            after: Transition = program(*where)
            return after
        act = self._program(policy_noise is None, self._act)(cursor, policy_noise)
        carry, step = advanced(self.env, carry, self.policy.env_actions(act.actions), env_noise)
        return Transition(carry, Cursor(step.obs, step.terminated | step.truncated, act.state), act, step)

    def _step_program(self, *where: Any) -> TreeProgram | None:
        """Return the program of a whole step; None if the environment runs eagerly around the policy."""
        key = (self.env.program_key, where[-1] is None)
        if not self.compiles_env or (key not in self._programs and not self._is_pure(None, *where)):
            return None
        return self._program(key, self._eager.step)

    def _prepare_step(self, *where: Any) -> None:
        """Request compilation of the programs of a step, once."""
        _, cursor, _, policy_noise = where
        key = ("step", self.env.program_key, policy_noise is None)
        if key in self._prepared:
            return
        self._prepared.add(key)
        program = self._step_program(*where)
        if program is not None:
            program.prepare(*where)
        else:
            self._program(policy_noise is None, self._act).prepare(cursor, policy_noise)

    def fill(
        self, rollout: Rollout, carry: Carry, cursor: Cursor, env_noise: Tensor, policy_noise: Tensor
    ) -> tuple[Carry, Cursor]:
        """Make the steps of a horizon and write them into a rollout's slots; see `Stepper.fill`."""
        where = (carry, cursor, env_noise, policy_noise)
        if self.execution.prepares and self.compiles_env:
            with self.execution.ahead():
                self.prepare(rollout, *where)
            return self._eager.fill(rollout, *where)
        if self.execution.mode == "eager":
            return super().fill(rollout, *where)
        if self.captures_env:
            return self._fill_captured(rollout, *where)
        horizon = self._horizon(rollout, *where)
        return super().fill(rollout, *where) if horizon is None else horizon(rollout, *where)

    def _horizon(
        self, rollout: Rollout, carry: Carry, cursor: Cursor, env_noise: Tensor, policy_noise: Tensor
    ) -> Horizon | None:
        """Return the program of a horizon; None if the environment runs eagerly around the policy."""
        key = self.env.program_key
        first = (carry, cursor, env_noise[0], policy_noise[0])
        if self.compiles_env and key not in self._horizons and self._is_pure(rollout, *first):
            self._horizons[key] = Horizon(self, self._written)
        return self._horizons[key] if self.compiles_env else None

    def prepare(self, rollout: Rollout, *where: Any) -> None:
        """Request compilation of the program of a horizon, once; arguments are those of `fill`."""
        key = ("horizon", self.env.program_key)
        if key in self._prepared:
            return
        self._prepared.add(key)
        horizon = self._horizon(rollout, *where)
        if horizon is not None:
            horizon.prepare(rollout, *where)

    def _act(self, cursor: Cursor, policy_noise: Tensor | None) -> Act:
        return self.policy.act(cursor.obs, cursor.state, cursor.starts, policy_noise)

    def _program(self, key: Hashable, function: Callable[..., Any]) -> TreeProgram:
        if key not in self._programs:
            make = functools.partial(self.execution.program, name="step")
            self._programs[key] = TreeProgram(function, make)
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
    ) -> bool:
        """Compare the environment with its trace for a few steps, which also give the rollout's shapes."""
        trace = TreeProgram(self._eager.step, functools.partial(CompiledProgram, compiles=False))
        generator = torch.Generator(env_noise.device).manual_seed(0)
        try:
            for _ in range(_TRIAL_STEPS):
                drawn = torch.rand(env_noise.shape, generator=generator, device=env_noise.device)
                actual = self._eager.step(carry, cursor, drawn, policy_noise)
                if not trees_allclose(trace(carry, cursor, drawn, policy_noise), actual):
                    raise ValueError("steps on the same noise differ: it keeps something outside of its state")
                if rollout is not None:
                    final = {} if self.bootstrap is None else {keys.FINAL_VALUES: actual.act.values}
                    named = self.slot(cursor, actual.act, actual.step) | final
                    rollout.allocate(named)
                    self._written = tuple(named)
                    rollout.write_state(0, cursor.state)
                carry, cursor = actual.carry, actual.cursor
        except Exception as error:
            self.compiles_env = False
            if isinstance(error, ProgramError) and not self._traces_policy(cursor, policy_noise):
                self.execution.give_up(error)
            else:
                self._warn(error)
        return self.compiles_env

    def _traces_policy(self, cursor: Cursor, policy_noise: Tensor | None) -> bool:
        """Return whether the policy can be traced by itself; if not, the environment is not the cause of an error."""
        try:
            TreeProgram(self._act, functools.partial(CompiledProgram, compiles=False))(cursor, policy_noise)
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
    """

    def __init__(self, stepper: CompiledStepper, written: Collection[str]) -> None:
        self.stepper = stepper
        # Where the host may look, only truncated episodes' final observations are evaluated, after the loop.
        self._evaluates_later = stepper.bootstrap is not None and stepper.execution.host_looks
        self._names = [name for name in written if name != keys.FINAL_VALUES or not self._evaluates_later]
        self._keeps_final = self._evaluates_later and stepper.truncates
        self._layout: Layout | None = None
        self._final_layout: Layout | None = None
        self._program: Program | None = None

    def __call__(self, rollout: Rollout, *where: Any) -> tuple[Carry, Cursor]:
        """Fill the slots; see `Stepper.fill`."""
        stepper = self.stepper
        state, items, span = self._arguments(rollout, *where)
        assert self._layout is not None
        carry, cursor = self._layout.tree(state)
        finals: list[Sequence[Tensor]] = []
        for t in range(0, rollout.horizon, span):
            if stepper.resets_state(t):
                for name, value in stepper.policy.initial_state(stepper.env.num_envs).items():
                    cursor.state[name].copy_(value)
            rollout.write_state(t, cursor.state)
            finals.append(self._loop(*state, *[item[t : t + span] for item in items]))
        self._write_final_values(rollout, finals)
        stepper.write_last(rollout, cursor)
        return carry, cursor

    def prepare(self, rollout: Rollout, *where: Any) -> None:
        """Request compilation of the loop that `__call__` with these arguments runs."""
        state, items, span = self._arguments(rollout, *where)
        prepare(self._loop, *state, *[item[:span] for item in items])

    def _arguments(
        self, rollout: Rollout, carry: Carry, cursor: Cursor, *noises: Tensor
    ) -> tuple[list[Tensor], list[Tensor], int]:
        """Return copies of carry and cursor, which the loop changes, its items, and the steps that it makes at once."""
        self._layout, where = flat_of((carry, cursor))
        # Between two loops the policy's state is stored, or reset.
        span = math.gcd(rollout.state_every, self.stepper.state_reset_every) if cursor.state else rollout.horizon
        slots = [rollout[name][: rollout.horizon] for name in self._names]
        return [tensor.clone() for tensor in where], [*noises, *slots], span

    @property
    def _loop(self) -> Program:
        if self._program is None:
            assert self._layout is not None
            items = 2 + len(self._names)
            self._program = self.stepper.execution.loop(self._flat, self._layout.size, items, name="horizon")
        return self._program

    def _flat(self, *tensors: Tensor) -> Sequence[Tensor]:
        """Make a step, update carry and cursor, and write its slots; return what the final values are made of."""
        stepper, layout = self.stepper, self._layout
        assert layout is not None
        state, (noise, sampling, *slots) = tensors[: layout.size], tensors[layout.size :]
        carry, before = layout.tree(state)
        after = Stepper.step(stepper, carry, before, noise, sampling)
        written = stepper.slot(before, after.act, after.step)
        if keys.FINAL_VALUES in self._names:
            written[keys.FINAL_VALUES] = stepper.final_values(after.act, after.step)
        self._final_layout, final = flat_of((after.step.final_obs, after.act.state))
        results = [each.clone() for each in final] if self._keeps_final else []
        # What is written may share memory with the state, and so may the next state: in a history of frames each part
        # is the previous value of another.
        values = [written[name].clone() for name in self._names]
        following = flat_of((after.carry, after.cursor))[1]
        values += [new if new is tensor else new.clone() for tensor, new in zip(state, following, strict=True)]
        for target, value in zip([*slots, *state], values, strict=True):
            target.copy_(value)
        return results

    def _write_final_values(self, rollout: Rollout, finals: Sequence[Sequence[Tensor]]) -> None:
        """Write the values of truncated episodes' final observations, given what the loops returned, in order."""
        if not self._evaluates_later:
            return
        values = rollout[keys.FINAL_VALUES][: rollout.horizon].zero_()
        if not self._keeps_final:
            return
        assert self._final_layout is not None
        cut = (rollout[keys.TRUNCATED] & ~rollout[keys.TERMINATED])[: rollout.horizon]
        steps, copies = cut.nonzero(as_tuple=True)
        span = rollout.horizon // len(finals)
        # At most as many at a time as one step may have, for which there is memory.
        for i in range(0, len(steps), rollout.num_envs):
            at, of = steps[i : i + rollout.num_envs], copies[i : i + rollout.num_envs]
            loops = range(int(at[0]) // span, int(at[-1]) // span + 1)
            parts = [[each[at[at // span == j] - j * span, of[at // span == j]] for each in finals[j]] for j in loops]
            final = [torch.cat(part) for part in zip(*parts, strict=True)]
            values[at, of] = self.stepper.final_obs_values(*self._final_layout.tree(final))
