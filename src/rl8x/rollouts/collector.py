"""Collects horizons of experience; the same for all environments, models and algorithms.

A step is a pure function of tensors, so that it can be compiled or captured. The noise for sampling and resets is
therefore drawn before, for the whole horizon.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from rl8x.envs.base import Carry, Env
from rl8x.execution import Execution
from rl8x.policy import Policy
from rl8x.rollouts.compiled import CompiledStepper
from rl8x.rollouts.statistics import Stats, rollout_stats
from rl8x.rollouts.step import (
    Bootstrap,
    Cursor,
    Noises,
    Rollout,
    Slot,
    Stepper,
    Transition,
    experience,
    first_cursor,
    flat,
    outcome,
)
from rl8x.trees import tree_map


class Collector:
    """Runs a policy in an environment; the `generator` of its sampling noise is on the policy's device.

    The `cursor` is the current observation and policy state; with None the environment is reset before the next step.
    """

    def __init__(
        self,
        env: Env,
        policy: Policy,
        generator: torch.Generator,
        execution: Execution,
        *,
        slot: Slot = experience,
        bootstrap: Bootstrap | None = None,
        state_reset_every: int = 0,
    ) -> None:
        self.env = env
        self.policy = policy
        self.generator = generator
        self.cursor: Cursor | None = None
        self.execution = execution
        kind = Stepper if execution.target == "eager" else CompiledStepper
        self.stepper = kind(policy, env, execution, slot=slot, bootstrap=bootstrap, state_reset_every=state_reset_every)

    def reset(self, env_config: Any = None, *, seed: int | None = None) -> None:
        """Reset all copies, with a new `env_config` and a new seed if given."""
        obs, _ = self.env.reset(seed=seed, config=env_config)
        self.cursor = first_cursor(self.policy, obs)

    @torch.no_grad()
    def fill(self, rollout: Rollout, meanwhile: Callable[[], None] | None = None) -> None:
        """Run one horizon into a rollout; `meanwhile` is called while its program is compiled, if it is."""
        carry, cursor = self._start()
        env_noise = self.env.noise(rollout.horizon)
        policy_noise = self.policy.noise(rollout.horizon, rollout.num_envs, self.generator)
        where = (rollout, carry, cursor, env_noise, policy_noise)
        with self.execution.threads.for_work(self.stepper.work), self._reset_if_interrupted():
            if meanwhile is not None and self.stepper.prepare(*where):
                meanwhile()
            self.env.carry, self.cursor = self.stepper.fill(*where)

    @torch.no_grad()
    def prepare(self, rollout: Rollout) -> bool:
        """Request the compilation of a horizon's program ahead; return False if it is not known before a reset."""
        carry = self.env.carry
        if self.cursor is None or carry is None:
            return False
        env_noise = torch.zeros(rollout.horizon, rollout.num_envs, self.env.noise_width, device=self.env.device)
        drawn_from = torch.Generator(self.generator.device)  # only the layout counts
        policy_noise = self.policy.noise(rollout.horizon, rollout.num_envs, drawn_from)
        with self.execution.threads.for_work(self.stepper.work):
            return self.stepper.prepare(rollout, carry, self.cursor, env_noise, policy_noise) is not None

    @torch.no_grad()
    def play(self, noises: Noises) -> Iterator[Transition]:
        """Make a step for each pair of noise tensors, of which there is no end, and yield the transition."""
        played = self.stepper.play(*self._start(), noises)
        while True:
            with self._reset_if_interrupted():
                _, transition = next(played)
                self.env.carry, self.cursor = transition.carry, transition.cursor
            yield transition

    @contextlib.contextmanager
    def _reset_if_interrupted(self) -> Iterator[None]:
        """Reset before the next step if a simulator was interrupted: it is no longer where the cursor says."""
        try:
            yield
        except BaseException:
            if not self.env.capturable:
                self.cursor = None
            raise

    def noises(self, steps: int, *, deterministic: bool) -> Noises:
        """Yield noise for `play` without end, drawn for so many `steps` at a time."""
        while True:
            env_noise = self.env.noise(steps).unbind(0)
            none = itertools.repeat(None, steps)
            noise = none if deterministic else self.policy.noise(steps, self.env.num_envs, self.generator)
            yield from zip(env_noise, noise, strict=True)

    def evaluate(self, horizon: int, *, deterministic: bool) -> Stats:
        """Run one horizon without keeping its observations, and return its statistics."""
        played = self.play(self.noises(horizon, deterministic=deterministic))
        rollout = Rollout(horizon, self.env.num_envs)
        for t, transition in enumerate(itertools.islice(played, horizon)):
            rollout.write_slot(t, flat(outcome(transition.step)))
        return rollout_stats(rollout.tensors, horizon, self.env.team)

    def _start(self) -> tuple[Carry, Cursor]:
        if self.cursor is None:
            self.reset()
        assert self.cursor is not None
        assert self.env.carry is not None
        return self.env.carry, self.cursor

    def state_dict(self) -> dict[str, Any]:
        """Return all state that the next horizon needs beside weights."""
        cursor = self.cursor and dict(zip(("obs", "starts", "state"), self.cursor, strict=True))
        return {"env": self.env.state_dict(), "generator": self.generator.get_state(), "cursor": cursor}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from where `state_dict` was taken."""
        self.env.load_state_dict(state["env"])
        self.generator.set_state(state["generator"].cpu())
        # If the simulator's state cannot be restored, the next horizon begins with a reset.
        cursor = state["cursor"] if self.env.resumable else None
        self.cursor = cursor and Cursor(**tree_map(lambda part: part.to(self.policy.device), cursor))
