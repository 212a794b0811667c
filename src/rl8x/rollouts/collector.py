"""Collects horizons of experience, eagerly, compiled or captured; noise is drawn before, for the whole horizon."""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import warnings
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from typing import Any, Final

import torch
from torch import Tensor

from rl8x import keys
from rl8x.envs.base import Carry, Env, restarted
from rl8x.execution import Execution, Program
from rl8x.execution.compiler import CompiledProgram
from rl8x.execution.programs import Loop, ProgramError
from rl8x.output import first_line
from rl8x.policy import Policy
from rl8x.rollouts.step import Cursor, Noises, Rollout, Stepper, Transition, flat, outcome
from rl8x.trees import first_tensor, flat_of, tree_map


class Collector:
    """Runs a policy in an environment; the `options` are those of `Stepper`.

    The `generator` of sampling noise is on the policy's device. The `cursor` is the current observation and policy
    state; with None the environment is reset before the next step.
    """

    def __init__(
        self, env: Env, policy: Policy, generator: torch.Generator, execution: Execution, **options: Any
    ) -> None:
        self.env = env
        self.policy = policy
        self.generator = generator
        self.cursor: Cursor | None = None
        self.execution = execution
        kind = Stepper if execution.target == "eager" else CompiledStepper
        self.stepper = kind(policy, env, execution, **options)

    def reset(self, env_config: Any = None, *, seed: int | None = None, noise: Tensor | None = None) -> None:
        """Reset all copies, with a new `env_config` and a new seed if given; by `noise`, `[num_envs, *]`, if given."""
        env, num = self.env, self.env.num_envs
        if noise is None:
            obs, _ = env.reset(seed=seed, config=env_config)
        else:
            env.parameter_state.configure(env_config)
            env.parameter_state.adopt()
            env.set_seed(seed)
            env.carry, obs = restarted(env, noise)
        starts = torch.ones(num, dtype=torch.bool, device=first_tensor(obs).device)
        self.cursor = Cursor(obs, starts, self.policy.initial_state(num))

    @torch.no_grad()
    def fill(self, rollout: Rollout) -> None:
        """Run one horizon into a rollout."""
        carry, cursor = self._start()
        env_noise = self.env.noise(rollout.horizon)
        policy_noise = self.policy.noise(rollout.horizon, rollout.num_envs, self.generator)
        with self.execution.threads.for_work(self.stepper.work), self._reset_if_interrupted():
            self.env.carry, self.cursor = self.stepper.fill(rollout, carry, cursor, env_noise, policy_noise)

    @torch.no_grad()
    def prepare(self, rollout: Rollout) -> bool:
        """Request the compilation of a horizon's program in advance; return False if it is not known before a reset."""
        stepper, carry = self.stepper, self.env.carry
        if not isinstance(stepper, CompiledStepper) or not stepper.compiles_env or self.cursor is None or carry is None:
            return False
        env_noise = torch.zeros(rollout.horizon, rollout.num_envs, self.env.noise_width, device=self.env.device)
        drawn_from = torch.Generator(self.generator.device)  # only the layout counts
        policy_noise = self.policy.noise(rollout.horizon, rollout.num_envs, drawn_from)
        with self.execution.threads.for_work(stepper.work):
            return stepper.prepare(rollout, carry, self.cursor, env_noise, policy_noise) is not None

    @torch.no_grad()
    def play(self, noises: Noises) -> Iterator[Transition]:
        """Make a step for each pair of noise tensors, from an endless iterator, and yield the transition."""
        played = self.stepper.play(*self._start(), noises)
        while True:
            with self._reset_if_interrupted():
                _, transition = next(played)
                self.env.carry, self.cursor = transition.carry, transition.cursor
            yield transition

    @contextlib.contextmanager
    def _reset_if_interrupted(self) -> Iterator[None]:
        """Reset before the next step if a simulator was interrupted: its state no longer fits the cursor."""
        try:
            yield
        except BaseException:
            if not self.env.capturable:
                self.cursor = None
            raise

    def noises(self, steps: int, *, deterministic: bool) -> Noises:
        """Yield noise for `play` without end, drawn for `steps` steps at a time."""
        while True:
            env_noise = self.env.noise(steps).unbind(0)
            none = itertools.repeat(None, steps)
            noise = none if deterministic else self.policy.noise(steps, self.env.num_envs, self.generator)
            yield from zip(env_noise, noise, strict=True)

    def evaluate(self, horizon: int, *, deterministic: bool, cut: bool = False) -> Rollout:
        """Run one horizon without keeping its observations, and return its rollout; pass `cut` if a reset follows."""
        played = self.play(self.noises(horizon, deterministic=deterministic))
        rollout = Rollout(horizon, self.env.num_envs)
        for t, transition in enumerate(itertools.islice(played, horizon)):
            rollout.write_slot(t, flat(outcome(transition.step)))
        if cut:
            rollout.truncate()
        return rollout

    def _start(self) -> tuple[Carry, Cursor]:
        if self.cursor is None:
            self.reset()
        assert self.cursor is not None
        assert self.env.carry is not None
        return self.env.carry, self.cursor

    def state_dict(self) -> dict[str, Any]:
        """Return all state that the next horizon needs, except weights."""
        cursor = self.cursor and dict(zip(("obs", "starts", "state"), self.cursor, strict=True))
        return {"env": self.env.state_dict(), "generator": self.generator.get_state(), "cursor": cursor}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state of `state_dict`."""
        self.env.load_state_dict(state["env"])
        self.generator.set_state(state["generator"].cpu())
        # If the simulator's state cannot be restored, the next horizon begins with a reset.
        cursor = state["cursor"] if self.env.resumable else None
        self.cursor = cursor and Cursor(**tree_map(lambda part: part.to(self.policy.device), cursor))


# Steps for which an environment is compared with its trace before it is compiled.
_TRIAL_STEPS: Final = 4
_ROUNDING: Final[Any] = {"atol": 1e-5, "rtol": 1e-5, "equal_nan": True}


class CompiledStepper(Stepper):
    """Steps a policy in an environment, compiled or captured if the environment allows it.

    A trace freezes Python side effects of a function, such as counting. The environment is therefore first compared
    with its trace on the same noise; if they differ, only the policy is compiled, and a warning is issued once.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._eager = Stepper(*arguments, **options)
        self.compiles_env = self.env.capturable  # it is part of compiled or captured programs
        # By the environment's key, or None for the policy alone, and whether actions are deterministic.
        self._programs: dict[tuple[Hashable, bool], TreeProgram] = {}
        self._horizons: dict[Hashable, Horizon] = {}

    def step(self, carry: Carry, cursor: Cursor, env_noise: Tensor, policy_noise: Tensor | None) -> Transition:
        """Make one step; see `Stepper.step`."""
        where = (carry, cursor, env_noise, policy_noise)
        if self._is_eager:
            return self._eager.step(*where)
        # A captured horizon includes the environment; in a single step, the environment is not worth a graph.
        whole = self.compiles_env and self.execution.target == "compile"
        key = self.env.program_key if whole else None, policy_noise is None
        if key not in self._programs:
            with self.execution.ahead():
                if key[0] is not None and not self._slots_of_trial(None, *where):
                    key = None, policy_noise is None
                function, given = (self.act, where[1::2]) if key[0] is None else (self._eager.step, where)
                program = TreeProgram(function, functools.partial(self.execution.program, name="step"))
                self._programs.setdefault(key, program).prepare(*given)
        if self.execution.mode == "eager":
            return self._eager.step(*where)
        if key[0] is None:
            return self.advance(carry, self._programs[key](cursor, policy_noise), env_noise)
        return self._programs[key](*where)  # type: ignore[no-any-return]

    def fill(
        self, rollout: Rollout, carry: Carry, cursor: Cursor, env_noise: Tensor, policy_noise: Tensor
    ) -> tuple[Carry, Cursor]:
        """Make the steps of a horizon and write them into a rollout's slots; see `Stepper.fill`."""
        where = (carry, cursor, env_noise, policy_noise)
        horizon = self.prepare(rollout, *where)
        if self._is_eager or (horizon is not None and self.execution.mode == "eager"):
            return self._eager.fill(rollout, *where)
        if horizon is not None:
            try:
                return horizon(rollout, *where)
            except ProgramError as error:
                if self.execution.mode != "graph":
                    raise
                self._leave_env(error)
        return super().fill(rollout, *where)

    def prepare(
        self, rollout: Rollout, carry: Carry, cursor: Cursor, env_noise: Tensor, policy_noise: Tensor
    ) -> Horizon | None:
        """Return the program of a horizon, whose compilation is requested; None if the environment runs eagerly."""
        if self._is_eager or not self.compiles_env:
            return None
        key = self.env.program_key
        if key not in self._horizons:
            with self.execution.ahead():
                written = self._slots_of_trial(rollout, carry, cursor, env_noise[0], policy_noise[0])
                if written:
                    self._horizons[key] = Horizon(self, written, rollout, carry, cursor, env_noise, policy_noise)
        return self._horizons.get(key)

    @property
    def _is_eager(self) -> bool:
        """Whether programs are neither used nor prepared."""
        return self.execution.mode == "eager" and not self.execution.prepares

    def _slots_of_trial(
        self, rollout: Rollout | None, carry: Carry, cursor: Cursor, env_noise: Tensor, policy_noise: Tensor | None
    ) -> Collection[str]:
        """Compare the environment with its trace for a few steps; return a slot's names, none if they differ."""
        traced = functools.partial(CompiledProgram, compiles=False)
        step, act = TreeProgram(self._eager.step, traced), TreeProgram(self.act, traced)
        generator = torch.Generator(env_noise.device).manual_seed(0)
        named: dict[str, Tensor] = {}
        leave: Callable[[Any], None] = self._leave_env if self.execution.target == "graph" else self.execution.give_up
        try:
            act(cursor, policy_noise)  # an error here is not caused by the environment
            leave = self._leave_env
            for _ in range(_TRIAL_STEPS):
                drawn = torch.rand(env_noise.shape, generator=generator, device=env_noise.device)
                actual = self._eager.step(carry, cursor, drawn, policy_noise)
                pairs = zip(flat_of(step(carry, cursor, drawn, policy_noise))[0], flat_of(actual)[0], strict=True)
                if not all(torch.allclose(a.double(), b.double(), **_ROUNDING) for a, b in pairs):
                    raise ValueError("steps on the same noise differ: it keeps something outside of its state")
                final = {} if self.bootstrap is None else {keys.FINAL_VALUES: actual.act.values}
                named = flat(self.slot(cursor, actual.act, actual.step)) | final
                if rollout is not None:
                    rollout.allocate(named)
                    rollout.write_state(0, cursor.state)
                carry, cursor = actual.carry, actual.cursor
        except Exception as error:
            self.compiles_env, named = False, {}
            leave(error)
        return tuple(named)

    def _leave_env(self, error: Exception) -> None:
        """Run the environment eagerly from now on, and warn."""
        self.compiles_env = False
        around = {"compile": " around a compiled policy", "graph": " around a captured policy"}
        where = f"{type(self.env.unwrapped).__name__} runs eagerly{around.get(self.execution.mode, '')}"
        warnings.warn(f"{where}: {first_line(error)}.", RuntimeWarning, stacklevel=4)


class TreeProgram:
    """A program, made by `make`, of a function of nested dicts and tuples of tensors, with None in fixed places."""

    def __init__(self, function: Callable[..., Any], make: Callable[[Program], Any]) -> None:
        self.function = function
        self._program = make(self._flat)

    def __call__(self, *trees: Any) -> Any:
        """Run the program."""
        tensors, self._given = flat_of(trees)
        flat = self._program(*tensors)  # the first call finds what the function returns
        return self._returned(flat)

    def prepare(self, *trees: Any) -> None:
        """Request compilation for arguments of this layout, without running the program or waiting."""
        tensors, self._given = flat_of(trees)
        self._program.prepare(*tensors)

    def _flat(self, *tensors: Tensor) -> Sequence[Tensor]:
        flat, self._returned = flat_of(self.function(*self._given(tensors)))
        return flat


class Horizon:
    """Fills a rollout by a compiled loop over steps; the loop's items are the rollout's slots, written in place.

    With a program for each step, compiled PPO on 16 x 128 steps of Pendulum is 12% slower (two Xeon cores, torch 2.13).
    """

    def __init__(self, stepper: CompiledStepper, written: Collection[str], rollout: Rollout, *where: Any) -> None:
        self.stepper = stepper
        # If host syncs are allowed, only truncated episodes' final observations are evaluated, after the loop.
        self._keeps_final = stepper.bootstrap is not None and stepper.picks_rows and stepper.truncates
        self._names = [name for name in written if name != keys.FINAL_VALUES or not stepper.picks_rows]
        carry, cursor, *_ = where
        (_, self._carry_of), (_, self._final_of) = flat_of((carry, cursor)), flat_of((cursor.obs, cursor.state))
        state, items, _ = self._arguments(rollout, *where)
        self._num_state, num_written = len(state), len(items) - 2  # all but the noises
        loop = Loop(self._step, len(state), len(items), num_written=num_written)
        self._loop = stepper.execution.program(loop, name="horizon")
        self._loop.prepare(*state, *[item[: self._span(rollout)] for item in items])

    def __call__(self, rollout: Rollout, *where: Any) -> tuple[Carry, Cursor]:
        """Fill the slots; see `Stepper.fill`."""
        stepper, span = self.stepper, self._span(rollout)
        state, items, finals = self._arguments(rollout, *where)
        carry, cursor = self._carry_of(state)
        for t in range(0, rollout.horizon, span):
            if stepper.resets_state(t):
                for name, value in stepper.policy.state_at_reset(stepper.env.num_envs).items():
                    cursor.state[name].copy_(value)
            rollout.write_state(t, cursor.state)
            self._loop(*state, *[item[t : t + span] for item in items])
        if stepper.bootstrap is not None and stepper.picks_rows:
            rollout[keys.FINAL_VALUES].zero_()  # a reset has written others
        if self._keeps_final:
            # Evaluate at most `num_envs` truncated episodes at a time, as in one step, for which there is memory.
            values = rollout[keys.FINAL_VALUES]
            cut = (rollout[keys.TRUNCATED] & ~rollout[keys.TERMINATED])[: rollout.horizon].nonzero()
            for first in range(0, len(cut), rollout.num_envs):
                at = cut[first : first + rollout.num_envs].unbind(1)
                values[at] = stepper.final_obs_values(*self._final_of([each[at] for each in finals]))
        stepper.write_last(rollout, cursor)
        return carry, cursor

    def _span(self, rollout: Rollout) -> int:
        """Return the number of steps in a loop: between two loops the policy's state is stored, or reset."""
        return math.gcd(rollout.state_every, self.stepper.state_reset_every)

    def _arguments(
        self, rollout: Rollout, carry: Carry, cursor: Cursor, *noises: Tensor
    ) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        """Return copies of carry and cursor, which the loop changes; its items; and the items to evaluate later."""
        state = [tensor.clone() for tensor in flat_of((carry, cursor))[0]]
        slots = [rollout[name][: rollout.horizon] for name in self._names]
        like = flat_of((cursor.obs, cursor.state))[0] if self._keeps_final else []
        finals = [each.new_empty((rollout.horizon, *each.shape)) for each in like]
        return state, [*noises, *slots, *finals], finals

    def _step(self, *tensors: Tensor) -> Sequence[Tensor]:
        """Make a step, write its slots and the inputs to evaluate later, and update carry and cursor."""
        stepper, size = self.stepper, self._num_state
        state, (noise, sampling, *items) = tensors[:size], tensors[size:]
        carry, before = self._carry_of(state)
        after = Stepper.step(stepper, carry, before, noise, sampling)
        written = flat(stepper.slot(before, after.act, after.step))
        if keys.FINAL_VALUES in self._names:
            written[keys.FINAL_VALUES] = stepper.final_values(after.act, after.step)
        values = [written[name] for name in self._names]
        values += flat_of((after.step.final_obs, after.act.state))[0] if self._keeps_final else []
        values += flat_of((after.carry, after.cursor))[0]
        targets = [*items, *state]
        # Written values and the next state may share memory with the state: in a history of frames each part is the
        # previous value of another.
        values = [new if new is target else new.clone() for target, new in zip(targets, values, strict=True)]
        for target, value in zip(targets, values, strict=True):
            target.copy_(value)
        return []
