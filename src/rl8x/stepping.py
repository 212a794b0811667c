"""One step of a policy in an environment: a pure function of tensors, run eagerly or as a compiled program."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from rl8x.envs.base import Carry, Env, Step
from rl8x.execution import CompiledProgram, Execution
from rl8x.policy import Act, Policy, State
from rl8x.trees import Tree

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


class Stepper:
    """Steps a policy in an environment, compiled where that was asked for and the environment allows it.

    A compiled environment does what it did when it was recorded: one that counts in Python, or draws from a generator
    of its own, would do the same for ever. So the record is first run beside the environment, on the same noise; where
    the two differ, the environment runs as it is, around a compiled policy, and a warning says so once.

    Args:
        policy: The policy that acts.
        env: The environment.
        execution: How programs run.
    """

    def __init__(self, policy: Policy, env: Env, execution: Execution) -> None:
        self.policy = policy
        self.env = env
        self.execution = execution
        self.compiles_env = execution.mode == "compile" and env.capturable
        self._programs: dict[Hashable, _TreeProgram] = {}

    def __call__(self, carry: Carry, cursor: Cursor, env_noise: Tensor, policy_noise: Tensor | None) -> Moved:
        """Take one step; see `act_and_step`."""
        if self.execution.mode == "eager":
            return act_and_step(self.policy, self.env, carry, cursor, env_noise, policy_noise)
        if self.compiles_env:
            key = (self.env.program_key, policy_noise is None)
            if key not in self._programs and not self._is_pure(carry, cursor, env_noise, policy_noise):
                return self(carry, cursor, env_noise, policy_noise)
            program = self._programs.setdefault(key, _TreeProgram(self._step))
            moved: Moved = program(carry, cursor, env_noise, policy_noise)
            return moved
        act = self._programs.setdefault(policy_noise is None, _TreeProgram(self._act))(cursor, policy_noise)
        carry, step = self.env.advance(carry, self.policy.env_actions(act.actions), env_noise)
        return carry, Cursor(step.obs, step.terminated | step.truncated, act.state), act, step

    def _step(self, carry: Carry, cursor: Cursor, env_noise: Tensor, policy_noise: Tensor | None) -> Moved:
        return act_and_step(self.policy, self.env, carry, cursor, env_noise, policy_noise)

    def _act(self, cursor: Cursor, policy_noise: Tensor | None) -> Act:
        return self.policy.act(cursor.obs, cursor.state, cursor.starts, policy_noise)

    def _is_pure(self, carry: Carry, cursor: Cursor, env_noise: Tensor, policy_noise: Tensor | None) -> bool:
        """Run the environment and its record side by side for a few steps; give up compiling it where they differ."""
        record = _TreeProgram(self._step, compiles=False)
        noise = torch.Generator(env_noise.device).manual_seed(0)
        try:
            for _ in range(_TRIAL_STEPS):
                drawn = torch.rand(env_noise.shape, generator=noise, device=env_noise.device)
                recorded = record(carry, cursor, drawn, policy_noise)
                actual = self._step(carry, cursor, drawn, policy_noise)
                if not _agree(recorded, actual):
                    raise ValueError("steps on the same noise differ: it keeps something outside of its state")
                carry, cursor = actual[0], actual[1]
        except Exception as error:
            self.compiles_env = False
            reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            warnings.warn(
                f"{type(self.env).__name__} runs eagerly around a compiled policy: {reason}.",
                RuntimeWarning,
                stacklevel=4,
            )
        return self.compiles_env


class _TreeProgram:
    """A program over nested dicts and tuples of tensors.

    Args:
        function: Takes and returns trees of tensors; None may stand for a tensor, always in the same places.
        compiles: Whether its record is compiled, or run as it is.
    """

    def __init__(self, function: Callable[..., Any], *, compiles: bool = True) -> None:
        self.function = function
        self._program = CompiledProgram(self._flat, compiles=compiles)
        self._inputs: _Layout | None = None
        self._outputs: _Layout | None = None

    def __call__(self, *trees: Any) -> Any:
        """Run the program."""
        self._inputs, tensors = _Layout.of(trees)
        flat = self._program(*tensors)
        assert self._outputs is not None
        return self._outputs.tree(flat)

    def _flat(self, *tensors: Tensor) -> Sequence[Tensor]:
        assert self._inputs is not None
        self._outputs, flat = _Layout.of(self.function(*self._inputs.tree(tensors)))
        return flat


class _Layout(NamedTuple):
    """Where the tensors of a tree are: its structure, and which of its leaves are tensors rather than None."""

    structure: TreeSpec
    is_tensor: list[bool]

    @classmethod
    def of(cls, tree: Any) -> tuple[_Layout, list[Tensor]]:
        """Take a tree apart."""
        leaves, structure = tree_flatten(tree)
        return cls(structure, [leaf is not None for leaf in leaves]), [leaf for leaf in leaves if leaf is not None]

    def tree(self, tensors: Sequence[Tensor]) -> Any:
        """Put a tree together."""
        rest = iter(tensors)
        return tree_unflatten([next(rest) if is_tensor else None for is_tensor in self.is_tensor], self.structure)


def _agree(first: Any, second: Any) -> bool:
    """Whether two trees have the same tensors, but for rounding."""
    (_, one), (_, two) = _Layout.of(first), _Layout.of(second)
    pairs = zip(one, two, strict=True)
    return all(torch.allclose(a.double(), b.double(), atol=1e-5, rtol=1e-5, equal_nan=True) for a, b in pairs)
