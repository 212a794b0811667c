"""Steps and horizons of a policy in an environment, compiled or captured."""

from __future__ import annotations

import functools
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Final

import torch
from torch import Tensor

from rl8x import keys
from rl8x.envs.base import Carry, Env
from rl8x.execution import Execution, Program
from rl8x.execution.compiled import CompiledProgram
from rl8x.execution.programs import Layout, TreeProgram, flat_of, prepare, trees_allclose
from rl8x.output import message_of
from rl8x.policy import Act, Policy
from rl8x.rollouts.buffer import Rollout
from rl8x.rollouts.step import Bootstrap, Cursor, Slot, Stepper, Transition, experience

# Steps for which an environment is watched before it is compiled.
_TRIAL_STEPS: Final = 4

_PURE: Final = "its steps depend on nothing outside of their arguments"

# Bytes of a rollout up to which its horizon is one program: that returns all of it, before it is copied to the rollout.
_WHOLE_BYTES: Final = 2**26


class CompiledStepper(Stepper):
    """Steps a policy in an environment, compiled or captured where the environment allows it.

    A trace does what the function did when it was traced: an environment that counts in Python, or draws from a
    generator of its own, would repeat itself for ever. So the trace is first run beside the environment, on the same
    noise; where the two differ, the environment runs eagerly around a compiled policy, and a warning says so once.

    Args:
        policy: The policy that acts.
        env: The environment.
        execution: How programs run; not eagerly.
        slot: What a slot of a rollout holds.
        bootstrap: As `Stepper` takes it.
        state_reset_every: The policy's state is reset every so many steps; 0 is never.

    Attributes:
        compiles_env: Whether the environment is part of compiled programs.
        captures_env: Whether the environment is part of captured programs.
    """

    def __init__(
        self,
        policy: Policy,
        env: Env,
        execution: Execution,
        *,
        slot: Slot = experience,
        bootstrap: Bootstrap | None = None,
        state_reset_every: int = 0,
    ) -> None:
        options: dict[str, Any] = {"slot": slot, "bootstrap": bootstrap, "state_reset_every": state_reset_every}
        super().__init__(policy, env, execution, **options)
        self.compiles_env = execution.target == "compile" and env.capturable
        self.captures_env = execution.target == "graph" and env.capturable
        self._eager = Stepper(policy, env, execution, **options)
        self._programs: dict[Hashable, TreeProgram] = {}
        self._horizons: dict[Hashable, _Horizon] = {}
        self._prepared: set[Hashable] = set()

    @property
    def runs_env(self) -> bool:
        """Whether the environment runs as the policy does, rather than eagerly around a compiled policy."""
        return self.captures_env or self.compiles_env or self.execution.mode == "eager"

    def step(self, carry: Carry, cursor: Cursor, env_noise: Tensor, policy_noise: Tensor | None) -> Transition:
        """Take one step; see `act_and_step`."""
        if self.execution.prepares:
            with self.execution.ahead():
                self._prepare_step(carry, cursor, env_noise, policy_noise)
        if self.execution.mode == "eager":
            return self._eager.step(carry, cursor, env_noise, policy_noise)
        program = self._step_program(carry, cursor, env_noise, policy_noise)
        if program is not None:
            after: Transition = program(carry, cursor, env_noise, policy_noise)
            return after
        act = self._program(policy_noise is None, self._act)(cursor, policy_noise)
        carry, step = self.env.advance(carry, self.policy.env_actions(act.actions), env_noise)
        return Transition(carry, Cursor(step.obs, step.terminated | step.truncated, act.state), act, step)

    def _step_program(
        self, carry: Carry, cursor: Cursor, env_noise: Tensor, policy_noise: Tensor | None
    ) -> TreeProgram | None:
        """Return the program of a whole step; None where the environment runs eagerly around the policy."""
        if not self.compiles_env:
            return None
        key = (self.env.program_key, policy_noise is None)
        if key not in self._programs and not self._is_pure(carry, cursor, env_noise, policy_noise):
            return None
        return self._program(key, self._eager.step)

    def _prepare_step(self, carry: Carry, cursor: Cursor, env_noise: Tensor, policy_noise: Tensor | None) -> None:
        """Have the programs of a step compiled, the first time that it is taken."""
        key = ("step", self.env.program_key, policy_noise is None)
        if key in self._prepared:
            return
        self._prepared.add(key)
        program = self._step_program(carry, cursor, env_noise, policy_noise)
        if program is not None:
            program.prepare(carry, cursor, env_noise, policy_noise)
        else:
            self._program(policy_noise is None, self._act).prepare(cursor, policy_noise)

    def fill(
        self, rollout: Rollout, carry: Carry, cursor: Cursor, env_noise: Tensor, policy_noise: Tensor
    ) -> tuple[Carry, Cursor]:
        """Take the steps of a horizon and write them into a rollout's slots; see `Stepper.fill`."""
        where = (carry, cursor, env_noise, policy_noise)
        if self.execution.prepares and self.compiles_env:
            with self.execution.ahead():
                self._prepare_fill(rollout, *where)
            return self._eager.fill(rollout, *where)
        if self.execution.mode == "eager":
            return super().fill(rollout, *where)
        if self.captures_env:
            return self._fill_captured(rollout, *where)
        horizon = self._horizon(rollout, *where)
        return super().fill(rollout, *where) if horizon is None else horizon(rollout, *where)

    def _horizon(
        self, rollout: Rollout, carry: Carry, cursor: Cursor, env_noise: Tensor, policy_noise: Tensor
    ) -> _Horizon | None:
        """Return the programs of a horizon; None where the environment runs eagerly around the policy."""
        if not self.compiles_env:
            return None
        key = self.env.program_key
        if key not in self._horizons:
            if not self._is_pure(carry, cursor, env_noise[0], policy_noise[0], rollout):
                return None
            self._horizons[key] = LoopedHorizon(self) if self._is_small(rollout) else SteppedHorizon(self)
        return self._horizons[key]

    def _prepare_fill(
        self, rollout: Rollout, carry: Carry, cursor: Cursor, env_noise: Tensor, policy_noise: Tensor
    ) -> None:
        """Have the programs of a horizon compiled, the first time that one is filled."""
        key = ("horizon", self.env.program_key)
        if key in self._prepared:
            return
        self._prepared.add(key)
        horizon = self._horizon(rollout, carry, cursor, env_noise, policy_noise)
        if horizon is not None:
            horizon.prepare(rollout, carry, cursor, env_noise, policy_noise)

    def _is_small(self, rollout: Rollout) -> bool:
        """Say whether a horizon is one program: steps so small that Python between them counts, and few numbers."""
        small = self.execution.host_looks and not self.execution.threads.shares(self.work)
        return small and sum(buffer.nbytes for buffer in rollout.memory.values()) <= _WHOLE_BYTES

    def _act(self, cursor: Cursor, policy_noise: Tensor | None) -> Act:
        return self.policy.act(cursor.obs, cursor.state, cursor.starts, policy_noise)

    def _program(self, key: Hashable, function: Callable[..., Any]) -> TreeProgram:
        if key not in self._programs:
            make = functools.partial(self.execution.program, made_of=self.made_of)
            self._programs[key] = TreeProgram(function, make)
        return self._programs[key]

    def made_of(self) -> Sequence[object]:
        """Return what decides a step: the policy, the environment, and what is stored."""
        return [self.policy, self.env, self.slot, self.bootstrap, self.state_reset_every]

    def _fill_captured(self, rollout: Rollout, *where: Any) -> tuple[Carry, Cursor]:
        """Replay a whole horizon, captured the first time; the first also runs eagerly, to compare the two."""
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
        self,
        carry: Carry,
        cursor: Cursor,
        env_noise: Tensor,
        policy_noise: Tensor | None,
        rollout: Rollout | None = None,
    ) -> bool:
        """Run the environment and its trace side by side for a few steps; give up compiling it where they differ.

        What a rollout will hold is allocated, since the shapes are known then.
        """
        is_known = self.execution.remembers(_PURE, self.made_of)
        trace = TreeProgram(self._eager.step, functools.partial(CompiledProgram, compiles=False))
        generator = torch.Generator(env_noise.device).manual_seed(0)
        try:
            for _ in range(_TRIAL_STEPS):
                drawn = torch.rand(env_noise.shape, generator=generator, device=env_noise.device)
                actual = self._eager.step(carry, cursor, drawn, policy_noise)
                if not (is_known or trees_allclose(trace(carry, cursor, drawn, policy_noise), actual)):
                    raise ValueError("steps on the same noise differ: it keeps something outside of its state")
                if rollout is not None:
                    final = {} if self.bootstrap is None else {keys.FINAL_VALUES: actual.act.values}
                    rollout.allocate(self.slot(cursor, actual.act, actual.step) | final)
                carry, cursor = actual.carry, actual.cursor
            if not is_known:
                self.execution.remember(_PURE, self.made_of)
        except Exception as error:
            self.compiles_env = False
            self._warn(error)
        return self.compiles_env

    def _warn(self, error: Exception) -> None:
        lines = message_of(error).strip().splitlines()
        reason = lines[0] if lines else type(error).__name__
        around = {"compile": " around a compiled policy", "graph": " around a captured policy"}
        warnings.warn(
            f"{type(self.env).__name__} runs eagerly{around.get(self.execution.mode, '')}: {reason}.",
            RuntimeWarning,
            stacklevel=5,
        )


class _Horizon(ABC):
    """Fills a rollout's horizon by compiled programs.

    Args:
        stepper: What takes the steps.
    """

    def __init__(self, stepper: CompiledStepper) -> None:
        self.stepper = stepper
        self._names: list[str] = []
        self._layout: Layout | None = None
        self._final_layout: Layout | None = None

    @abstractmethod
    def __call__(
        self, rollout: Rollout, carry: Carry, cursor: Cursor, env_noise: Tensor, policy_noise: Tensor
    ) -> tuple[Carry, Cursor]:
        """Fill the slots; see `Stepper.fill`."""

    def _made_of(self) -> Sequence[object]:
        return [*self.stepper.made_of(), self._names]

    @abstractmethod
    def prepare(self, rollout: Rollout, carry: Carry, cursor: Cursor, env_noise: Tensor, policy_noise: Tensor) -> None:
        """Have compiled what `__call__` with these would run."""

    def _step(self, tensors: Sequence[Tensor], *noises: Tensor, keep: Tensor | None = None) -> Any:
        """Take a step from flat tensors.

        Args:
            tensors: Where environment and policy stand.
            noises: Noise of the environment and of sampling.
            keep: Whether the policy's state is kept, 0-d, bool; None keeps it.

        Returns:
            The cursor before the step, the transition, and of what stands after the step and of the final observations
            the flat tensors.
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

    def _write_final_values(self, rollout: Rollout, final: Callable[[int], Sequence[Tensor]]) -> None:
        """Value the observations at which time limits truncate episodes, of which there are few.

        Args:
            rollout: What is written to.
            final: Returns the flat tensors of a step's final observation and the policy's state after it.
        """
        if self.stepper.bootstrap is None:
            return
        values = rollout[keys.FINAL_VALUES][: rollout.horizon].zero_()
        if not self.stepper.truncates:
            return
        assert self._final_layout is not None
        cut = (rollout[keys.TRUNCATED] & ~rollout[keys.TERMINATED])[: rollout.horizon]
        for t in cut.any(1).nonzero().squeeze(1).tolist():
            self.stepper.value_cut(values[t], cut[t], *self._final_layout.tree(final(t)))


class SteppedHorizon(_Horizon):
    """Fills a horizon by one compiled program a step, which writes into the rollout's slots itself."""

    @functools.cached_property
    def _program(self) -> Program:
        return self.stepper.execution.program(self._flat, made_of=self._made_of)

    def __call__(
        self, rollout: Rollout, carry: Carry, cursor: Cursor, env_noise: Tensor, policy_noise: Tensor
    ) -> tuple[Carry, Cursor]:
        """Fill the slots; see `Stepper.fill`."""
        host_looks = self.stepper.execution.host_looks
        where = self._begin(rollout, carry, cursor)
        noises = zip(env_noise.unbind(0), policy_noise.unbind(0), rollout.slots(self._names), strict=True)
        finals = []
        for t, (noise, sampling, slots) in enumerate(noises):
            if cursor.state:
                where = self._with_state(rollout, t, where)
            results = list(self._program(*where, noise, sampling, *slots))
            where, final = results[: len(where)], results[len(where) :]
            finals.append(final)
        if host_looks:
            self._write_final_values(rollout, finals.__getitem__)
        assert self._layout is not None
        carry, cursor = self._layout.tree(where)
        self.stepper.write_last(rollout, cursor)
        return carry, cursor

    def prepare(self, rollout: Rollout, carry: Carry, cursor: Cursor, env_noise: Tensor, policy_noise: Tensor) -> None:
        """Have compiled what `__call__` with these would run."""
        where = self._begin(rollout, carry, cursor)
        prepare(self._program, *where, env_noise[0], policy_noise[0], *rollout.slots(self._names)[0])

    def _begin(self, rollout: Rollout, carry: Carry, cursor: Cursor) -> list[Tensor]:
        """Note what is written; return where environment and policy stand as flat tensors."""
        host_looks = self.stepper.execution.host_looks
        self._layout, where = flat_of((carry, cursor))
        self._names = [name for name in rollout.tensors if name != keys.FINAL_VALUES or not host_looks]
        return where

    def _with_state(self, rollout: Rollout, t: int, where: Sequence[Tensor]) -> list[Tensor]:
        """Reset and store the policy's state as slot t asks."""
        stepper = self.stepper
        assert self._layout is not None
        carry, cursor = self._layout.tree(where)
        if stepper.resets_state(t):
            cursor = cursor._replace(state=stepper.policy.initial_state(stepper.env.num_envs))
        rollout.write_state(t, cursor.state)
        return flat_of((carry, cursor))[1]

    def _flat(self, *tensors: Tensor) -> Sequence[Tensor]:
        """Take a step and write the slot: what is compiled."""
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


class LoopedHorizon(_Horizon):
    """Fills a horizon by one compiled program, for steps so small that calling one each would cost more than they do.

    Compiled PPO on 16 x 128 steps of Pendulum is 12% slower with a program for each step (two Xeon cores, torch 2.13).
    What each step gives is returned and then copied to the rollout, which is twice the memory for a moment.
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
        self._write_final_values(rollout, lambda t: [each[t] for each in finals])
        assert self._layout is not None
        carry, cursor = self._layout.tree(where)
        stepper.write_last(rollout, cursor)
        return carry, cursor

    def prepare(self, rollout: Rollout, carry: Carry, cursor: Cursor, env_noise: Tensor, policy_noise: Tensor) -> None:
        """Have compiled what `__call__` with these would run."""
        where, keeps = self._begin(rollout, carry, cursor)
        prepare(self._program, *where, env_noise, policy_noise, keeps)

    def _begin(self, rollout: Rollout, carry: Carry, cursor: Cursor) -> tuple[list[Tensor], Tensor]:
        """Note what is returned; return where environment and policy stand, and which steps keep the policy's state."""
        self._layout, where = flat_of((carry, cursor))
        self._names = [name for name in rollout.tensors if name != keys.FINAL_VALUES]
        keeps = torch.tensor([not self.stepper.resets_state(t) for t in range(rollout.horizon)])
        # The program changes them in place, and some may share their memory.
        return [tensor.clone() for tensor in where], keeps

    @functools.cached_property
    def _program(self) -> Program:
        assert self._layout is not None
        return self.stepper.execution.loop(self._flat, self._layout.size, num_items=3, made_of=self._made_of)

    def _flat(self, *tensors: Tensor) -> Sequence[Tensor]:
        """Take a step, leave in the state where it led to, and return the slot: what is compiled."""
        assert self._layout is not None
        state, (noise, sampling, keep) = tensors[: self._layout.size], tensors[self._layout.size :]
        before, after, where, final = self._step(state, noise, sampling, keep=keep)
        written = self.stepper.slot(before, after.act, after.step)
        results = [written[name] for name in self._names] + [*before.state.values(), *final]
        results = [result.clone() for result in results]  # some are the state's memory
        for tensor, new in zip(state, where, strict=True):
            tensor.copy_(new)
        return results
