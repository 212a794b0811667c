"""A policy's steps in an environment: a pure function of tensors, run eagerly, compiled, or as a captured horizon."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from rl8x import keys
from rl8x.envs.base import Carry, Env, Step
from rl8x.execution import CompiledProgram, Execution, Program
from rl8x.policy import Act, Policy, State
from rl8x.rollout import Rollout
from rl8x.trees import Tree, flatten_tree, tree_map

# Steps for which an environment is watched before it is compiled.
_TRIAL_STEPS: Final = 4


class Cursor(NamedTuple):
    """Where the environment and the policy stand between two steps.

    Attributes:
        obs: The observation to act on, `[num_envs, *obs]` or a dict of such.
        starts: Where it begins an episode, `[num_envs]`, bool.
        state: The policy's state before it, each `[num_envs, *]`.
    """

    obs: Tree
    starts: Tensor
    state: State


Moved = tuple[Carry, Cursor, Act, Step]


def act_and_step(
    policy: Policy, env: Env, carry: Carry, cursor: Cursor, env_noise: Tensor, policy_noise: Tensor | None
) -> Moved:
    """Act on the cursor's observation and step the environment: one slot of a rollout."""
    act = policy.act(cursor.obs, cursor.state, cursor.starts, policy_noise)
    carry, step = env.advance(carry, policy.env_actions(act.actions), env_noise)
    return carry, Cursor(step.obs, step.terminated | step.truncated, act.state), act, step


def slot(cursor: Cursor, act: Act, step: Step) -> dict[str, Tensor]:
    """Name what one slot of a rollout holds but the values of final observations, each `[num_envs, ...]`."""
    named = {
        **flatten_tree(keys.OBS, cursor.obs),
        keys.STARTS: cursor.starts,
        **flatten_tree(keys.ACTIONS, act.actions),
        keys.LOGP: act.logp,
        keys.VALUES: act.values,
        keys.REWARDS: step.rewards,
        keys.TERMINATED: step.terminated,
        keys.TRUNCATED: step.truncated,
        keys.EPISODE_RETURNS: step.episode_returns,
        keys.EPISODE_LENGTHS: step.episode_lengths,
    }
    if step.valid is not None:
        named[keys.VALID] = step.valid
    return named | {f"{keys.METRICS}/{name}": figure for name, figure in step.metrics.items()}


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
        self._programs: dict[Hashable, _TreeProgram] = {}
        self._fillers: dict[Hashable, _Filler] = {}

    def __call__(self, carry: Carry, cursor: Cursor, env_noise: Tensor, policy_noise: Tensor | None) -> Moved:
        """Take one step; see `act_and_step`."""
        if self.execution.mode == "eager":
            return self._step(carry, cursor, env_noise, policy_noise)
        if self.compiles_env:
            key = (self.env.program_key, policy_noise is None)
            if key not in self._programs and not self._is_pure(carry, cursor, env_noise, policy_noise):
                return self(carry, cursor, env_noise, policy_noise)
            moved: Moved = self._program(key, self._step)(carry, cursor, env_noise, policy_noise)
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
                    filler = self._fillers.setdefault(key, _Filler(self))
                    return filler(rollout, carry, cursor, env_noise, policy_noise)
            return self._fill(self, rollout, carry, cursor, env_noise, policy_noise)

    def refreshed(self, cursor: Cursor, t: int) -> Cursor:
        """Forget the policy's state where the schedule of state resets says so."""
        if not self.state_reset_every or t % self.state_reset_every:
            return cursor
        return cursor._replace(state=self.policy.initial_state(self.env.num_envs))

    def final_values(self, act: Act, step: Step) -> Tensor:
        """Value the observations at which time limits cut episodes, `[num_envs]`; elsewhere 0, which nothing reads.

        Where the host may look, only the copies that were cut are evaluated, else all of them.
        """
        cut = step.truncated & ~step.terminated
        if not self.execution.host_looks:
            return torch.where(cut, self.policy.values(step.final_obs, act.state, torch.zeros_like(cut)), 0.0)
        values = torch.zeros_like(act.values)
        if self.truncates and bool(cut.any()):
            self.value_cut(values, cut, step.final_obs, act.state)
        return values

    def value_cut(self, values: Tensor, cut: Tensor, final_obs: Any, state: State) -> None:
        """Write the values of final observations where episodes were cut, and nothing elsewhere."""
        rows = cut.nonzero().squeeze(1)
        chosen = {name: value[rows] for name, value in state.items()}
        values[rows] = self.policy.values(
            tree_map(lambda part: part[rows], final_obs), chosen, torch.zeros_like(cut[rows])
        )

    def _step(self, carry: Carry, cursor: Cursor, env_noise: Tensor, policy_noise: Tensor | None) -> Moved:
        return act_and_step(self.policy, self.env, carry, cursor, env_noise, policy_noise)

    def _act(self, cursor: Cursor, policy_noise: Tensor | None) -> Act:
        return self.policy.act(cursor.obs, cursor.state, cursor.starts, policy_noise)

    def _program(self, key: Hashable, function: Callable[..., Any]) -> _TreeProgram:
        if key not in self._programs:
            self._programs[key] = _TreeProgram(function, self.execution.program)
        return self._programs[key]

    def _fill(
        self,
        step_once: Callable[..., Moved],
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
        program = _TreeProgram(functools.partial(self._fill, self._step, rollout), self.execution.program)
        try:
            if not _agree((program(*where), rollout.memory), (actual, written)):
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
        record = _TreeProgram(self._step, functools.partial(CompiledProgram, compiles=False))
        noise = torch.Generator(env_noise.device).manual_seed(0)
        try:
            for _ in range(_TRIAL_STEPS):
                drawn = torch.rand(env_noise.shape, generator=noise, device=env_noise.device)
                recorded = record(carry, cursor, drawn, policy_noise)
                actual = self._step(carry, cursor, drawn, policy_noise)
                if not _agree(recorded, actual):
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
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        around = {"compile": " around a compiled policy", "graph": " around a captured policy"}
        warnings.warn(
            f"{type(self.env).__name__} runs eagerly{around.get(self.execution.mode, '')}: {reason}.",
            RuntimeWarning,
            stacklevel=5,
        )


class _Filler:
    """Fills a horizon by one compiled program a step, which writes into the rollout's slots itself.

    Args:
        stepper: What takes the steps.
    """

    def __init__(self, stepper: Stepper) -> None:
        self.stepper = stepper
        self._program = stepper.execution.program(self._flat)
        self._where: _Layout | None = None
        self._final: _Layout | None = None
        self._names: list[str] = []

    def __call__(
        self, rollout: Rollout, carry: Carry, cursor: Cursor, env_noise: Tensor, policy_noise: Tensor
    ) -> tuple[Carry, Cursor]:
        """Fill the slots; see `Stepper.fill`."""
        stepper = self.stepper
        where: Sequence[Tensor]
        self._where, where = _flat_of((carry, cursor))
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
            self._write_final_values(rollout, finals)
        carry, cursor = self._where.tree(where)
        stepper.write_last(rollout, cursor)
        return carry, cursor

    def _with_state(self, rollout: Rollout, t: int, where: Sequence[Tensor]) -> Sequence[Tensor]:
        """Forget and keep the policy's state as the slot asks."""
        assert self._where is not None
        carry, cursor = self._where.tree(where)
        cursor = self.stepper.refreshed(cursor, t)
        rollout.write_state(t, cursor.state)
        return _flat_of((carry, cursor))[1]

    def _write_final_values(self, rollout: Rollout, finals: Sequence[Sequence[Tensor]]) -> None:
        values = rollout[keys.FINAL_VALUES][: rollout.horizon].zero_()
        if not self.stepper.truncates:
            return
        assert self._final is not None
        cut = (rollout[keys.TRUNCATED] & ~rollout[keys.TERMINATED])[: rollout.horizon]
        for t in cut.any(1).nonzero().squeeze(1).tolist():
            self.stepper.value_cut(values[t], cut[t], *self._final.tree(finals[t]))

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
        _, where = _flat_of((carry, cursor))
        self._final, final = _flat_of((step.final_obs, act.state))
        return [*where, *final]


class _TreeProgram:
    """A program over nested dicts and tuples of tensors.

    Args:
        function: Takes and returns trees of tensors; None may stand for a tensor, always in the same places.
        make: Makes a program of a function of tensors.
    """

    def __init__(
        self, function: Callable[..., Any], make: Callable[[Callable[..., Sequence[Tensor]]], Program]
    ) -> None:
        self.function = function
        self._program = make(self._flat)
        self._inputs: _Layout | None = None
        self._outputs: _Layout | None = None

    def __call__(self, *trees: Any) -> Any:
        """Run the program."""
        self._inputs, tensors = _flat_of(trees)
        flat = self._program(*tensors)
        assert self._outputs is not None
        return self._outputs.tree(flat)

    def _flat(self, *tensors: Tensor) -> Sequence[Tensor]:
        assert self._inputs is not None
        self._outputs, flat = _flat_of(self.function(*self._inputs.tree(tensors)))
        return flat


class _Layout(NamedTuple):
    """Where the tensors of a tree are: its structure, and which of its leaves are tensors rather than None."""

    structure: TreeSpec
    is_tensor: list[bool]

    @property
    def size(self) -> int:
        """Number of tensors."""
        return sum(self.is_tensor)

    def tree(self, tensors: Sequence[Tensor]) -> Any:
        """Put a tree together."""
        rest = iter(tensors)
        return tree_unflatten([next(rest) if is_tensor else None for is_tensor in self.is_tensor], self.structure)


def _flat_of(tree: Any) -> tuple[_Layout, list[Tensor]]:
    """Take a tree apart; its tensors become contiguous, so that a program need not be made for other strides."""
    leaves, structure = tree_flatten(tree)
    layout = _Layout(structure, [leaf is not None for leaf in leaves])
    return layout, [leaf.contiguous() for leaf in leaves if leaf is not None]


def _agree(first: Any, second: Any) -> bool:
    """Whether two trees have the same tensors, but for rounding."""
    (_, one), (_, two) = _flat_of(first), _flat_of(second)
    pairs = zip(one, two, strict=True)
    return all(torch.allclose(a.double(), b.double(), atol=1e-5, rtol=1e-5, equal_nan=True) for a, b in pairs)
