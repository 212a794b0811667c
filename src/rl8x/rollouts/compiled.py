"""Steps of a policy in an environment: run eagerly, compiled, or as a captured horizon."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Hashable
from typing import Any, Final

import torch
from torch import Tensor

from rl8x import keys
from rl8x.envs.base import Carry, Env, Step
from rl8x.execution import Execution
from rl8x.execution.compiled import CompiledProgram
from rl8x.execution.programs import TreeProgram, trees_allclose
from rl8x.output import message_of
from rl8x.policy import Act, Policy, State
from rl8x.rollouts.buffer import Rollout
from rl8x.rollouts.filler import Filler, HorizonFiller, StepFiller
from rl8x.rollouts.step import Cursor, Transition, act_and_step, slot
from rl8x.trees import flatten_tree, tree_map

# Steps for which an environment is watched before it is compiled.
_TRIAL_STEPS: Final = 4

# Bytes of a rollout up to which its horizon is one program: that returns all of it, before it is copied to the rollout.
_WHOLE_BYTES: Final = 2**26


class Stepper:
    """Steps a policy in an environment, compiled or captured where that was asked for and the environment allows it.

    What is compiled or captured does what it did when it was recorded: an environment that counts in Python, or draws
    from a generator of its own, would do the same for ever. So the record is first run beside the environment, on the
    same noise; where the two differ, the environment runs as it is, around a compiled policy, and a warning says so
    once.

    Args:
        policy: The policy that acts.
        env: The environment.
        execution: How programs run.
        state_reset_every: The policy's state is set back to the initial one every so many steps of a horizon; 0 is
            never.
    """

    def __init__(self, policy: Policy, env: Env, execution: Execution, *, state_reset_every: int = 0) -> None:
        self.policy = policy
        self.env = env
        self.execution = execution
        self.state_reset_every = state_reset_every
        self.compiles_env = execution.mode == "compile" and env.capturable
        self.captures_env = execution.mode == "graph" and env.capturable
        self.truncates = env.time_limit is not None or not env.capturable
        self._work = env.num_envs * sum(weight.numel() for weight in policy.parameters())
        self._programs: dict[Hashable, TreeProgram] = {}
        self._fillers: dict[Hashable, Filler] = {}

    def __call__(self, carry: Carry, cursor: Cursor, env_noise: Tensor, policy_noise: Tensor | None) -> Transition:
        """Take one step; see `act_and_step`."""
        if self.execution.mode == "eager":
            return self._step(carry, cursor, env_noise, policy_noise)
        if self.compiles_env:
            key = (self.env.program_key, policy_noise is None)
            if key not in self._programs and not self._is_pure(carry, cursor, env_noise, policy_noise):
                return self(carry, cursor, env_noise, policy_noise)
            moved: Transition = self._program(key, self._step)(carry, cursor, env_noise, policy_noise)
            return moved
        act = self._program(policy_noise is None, self._act)(cursor, policy_noise)
        carry, step = self.env.advance(carry, self.policy.env_actions(act.actions), env_noise)
        return carry, Cursor(step.obs, step.terminated | step.truncated, act.state), act, step

    def fill(
        self, rollout: Rollout, carry: Carry, cursor: Cursor, env_noise: Tensor, policy_noise: Tensor
    ) -> tuple[Carry, Cursor]:
        """Take the steps of a horizon and write them into a rollout's slots, values of cut episodes with them.

        Args:
            rollout: What is written to.
            carry: Where the environment stands.
            cursor: Where environment and policy stand.
            env_noise: Noise of the environment, `[horizon, num_envs, *]`.
            policy_noise: Noise of sampling, `[horizon, num_envs, *]`.

        Returns:
            Where they stand after the horizon.
        """
        with self.execution.threads_for(self._work):
            if self.captures_env:
                return self._fill_captured(rollout, carry, cursor, env_noise, policy_noise)
            if self.compiles_env:
                key = self.env.program_key
                if key in self._fillers or self._is_pure(carry, cursor, env_noise[0], policy_noise[0], rollout):
                    if key not in self._fillers:
                        self._fillers[key] = HorizonFiller(self) if self._takes_whole(rollout) else StepFiller(self)
                    return self._fillers[key](rollout, carry, cursor, env_noise, policy_noise)
            return self._fill(self, rollout, carry, cursor, env_noise, policy_noise)

    def _takes_whole(self, rollout: Rollout) -> bool:
        """Say whether a horizon is one program: steps so small that Python between them counts, and few numbers."""
        small = self.execution.host_looks and not self.execution.shares(self._work)
        return small and sum(buffer.nbytes for buffer in rollout.memory.values()) <= _WHOLE_BYTES

    def refreshed(self, cursor: Cursor, t: int) -> Cursor:
        """Forget the policy's state where the schedule of state resets says so."""
        if not self.resets_state(t):
            return cursor
        return cursor._replace(state=self.policy.initial_state(self.env.num_envs))

    def resets_state(self, t: int) -> bool:
        """Say whether the policy's state is set back before slot t."""
        return self.state_reset_every > 0 and t % self.state_reset_every == 0

    def final_values(self, act: Act, step: Step) -> Tensor:
        """Value the observations at which time limits cut episodes, `[num_envs]`; elsewhere 0, which nothing reads.

        Where the host may look, only the copies that were cut are evaluated, else all of them.
        """
        host_looks = self.execution.host_looks
        if host_looks and not self.truncates:
            return self._zeros
        cut = step.truncated & ~step.terminated
        if not host_looks:
            return torch.where(cut, self._values(step.final_obs, act.state, torch.zeros_like(cut)), 0.0)
        if not cut.any():  # not every model takes no rows
            return self._zeros
        values = torch.zeros_like(act.values)
        self.value_cut(values, cut, step.final_obs, act.state)
        return values

    @functools.cached_property
    def _zeros(self) -> Tensor:
        return torch.zeros(self.env.num_envs, device=self.policy.device)

    def value_cut(self, values: Tensor, cut: Tensor, final_obs: Any, state: State) -> None:
        """Write the values of final observations where episodes were cut, and nothing elsewhere."""
        rows = cut.nonzero().squeeze(1)
        chosen = {name: value[rows] for name, value in state.items()}
        values[rows] = self._values(tree_map(lambda part: part[rows], final_obs), chosen, torch.zeros_like(cut[rows]))

    def _values(self, obs: Any, state: State, starts: Tensor) -> Tensor:
        """Value observations that no rollout holds; NaN where one is not finite, which a normaliser would hide."""
        values = self.policy.values(obs, state, starts)
        for part in flatten_tree(keys.OBS, obs).values():
            if part.is_floating_point():
                values = values.masked_fill(~part.isfinite().reshape(len(part), -1).all(1), torch.nan)
        return values

    def _step(self, carry: Carry, cursor: Cursor, env_noise: Tensor, policy_noise: Tensor | None) -> Transition:
        return act_and_step(self.policy, self.env, carry, cursor, env_noise, policy_noise)

    def _act(self, cursor: Cursor, policy_noise: Tensor | None) -> Act:
        return self.policy.act(cursor.obs, cursor.state, cursor.starts, policy_noise)

    def _program(self, key: Hashable, function: Callable[..., Any]) -> TreeProgram:
        if key not in self._programs:
            self._programs[key] = TreeProgram(function, self.execution.program)
        return self._programs[key]

    def _fill(
        self,
        step_once: Callable[..., Transition],
        rollout: Rollout,
        carry: Carry,
        cursor: Cursor,
        env_noise: Tensor,
        policy_noise: Tensor,
    ) -> tuple[Carry, Cursor]:
        """Take the steps one by one."""
        for t in range(rollout.horizon):
            before = self.refreshed(cursor, t)
            carry, cursor, act, step = step_once(carry, before, env_noise[t], policy_noise[t])
            rollout.write_slot(t, slot(before, act, step) | {keys.FINAL_VALUES: self.final_values(act, step)})
            rollout.write_state(t, before.state)
        self.write_last(rollout, cursor)
        return carry, cursor

    def write_last(self, rollout: Rollout, cursor: Cursor) -> None:
        """Write the slot after the last step: the next observation, its value and whether it begins an episode."""
        values = self.policy.values(cursor.obs, cursor.state, cursor.starts)
        named = flatten_tree(keys.OBS, cursor.obs) | {keys.STARTS: cursor.starts, keys.VALUES: values}
        rollout.write_slot(rollout.horizon, named)

    def _fill_captured(self, rollout: Rollout, *where: Any) -> tuple[Carry, Cursor]:
        """Replay a whole horizon, captured the first time; the first also runs eagerly, to compare the two."""
        key = self.env.program_key
        if key in self._programs:
            filled: tuple[Carry, Cursor] = self._programs[key](*where)
            return filled
        actual = self._fill(self._step, rollout, *where)
        written = {name: buffer.clone() for name, buffer in rollout.memory.items()}
        program = TreeProgram(functools.partial(self._fill, self._step, rollout), self.execution.program)
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
        """Run the environment and its record side by side for a few steps; give up compiling it where they differ.

        What a rollout will hold is allocated, since the shapes are known then.
        """
        record = TreeProgram(self._step, functools.partial(CompiledProgram, compiles=False))
        noise = torch.Generator(env_noise.device).manual_seed(0)
        try:
            for _ in range(_TRIAL_STEPS):
                drawn = torch.rand(env_noise.shape, generator=noise, device=env_noise.device)
                recorded = record(carry, cursor, drawn, policy_noise)
                actual = self._step(carry, cursor, drawn, policy_noise)
                if not trees_allclose(recorded, actual):
                    raise ValueError("steps on the same noise differ: it keeps something outside of its state")
                if rollout is not None:
                    _, _, act, step = actual
                    rollout.allocate(slot(cursor, act, step) | {keys.FINAL_VALUES: act.values})
                carry, cursor = actual[0], actual[1]
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
