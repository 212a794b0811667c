"""Gathering experience: the loop that fills a rollout, the same for every environment, model and algorithm.

What it does in one step is a pure function of tensors, so that `execution.py` can compile or capture it; the noise that
sampling and resets need is drawn for the whole horizon beforehand.
"""

from __future__ import annotations

from typing import Any

import torch

from rl8x.envs.base import Carry, Env, Step
from rl8x.execution import Execution
from rl8x.policy import Policy
from rl8x.rollouts.buffer import Rollout, collect_stats, stacked_metrics
from rl8x.rollouts.compiled import Stepper
from rl8x.rollouts.statistics import Stats
from rl8x.rollouts.step import Cursor
from rl8x.trees import first_tensor, tree_map


class Collector:
    """Runs a policy in an environment, a horizon at a time.

    Args:
        env: The environment; its `carry` follows the collector's.
        policy: The policy that acts.
        generator: Source of the sampling noise, on the policy's device.
        execution: How the steps run; None is eagerly.
        state_reset_every: The policy's state is set back to the initial one every so many steps of a horizon; 0 is
            never.
    """

    def __init__(
        self,
        env: Env,
        policy: Policy,
        generator: torch.Generator,
        *,
        execution: Execution | None = None,
        state_reset_every: int = 0,
    ) -> None:
        self.env = env
        self.policy = policy
        self.generator = generator
        self.cursor: Cursor | None = None
        self.stepper = Stepper(
            policy,
            env,
            execution or Execution("eager", "fp32", policy.device),
            state_reset_every=state_reset_every,
        )

    @property
    def runs_env(self) -> bool:
        """Whether the environment runs as the policy does: eagerly in eager execution, else inside the programs."""
        stepper = self.stepper
        return stepper.captures_env or stepper.compiles_env or stepper.execution.mode == "eager"

    def reset(self, env_config: Any = None) -> None:
        """Start every copy afresh, with a new `env_config` where one is given."""
        obs, _ = self.env.reset(config=env_config)
        starts = torch.ones(self.env.num_envs, dtype=torch.bool, device=first_tensor(obs).device)
        self.cursor = Cursor(obs, starts, self.policy.initial_state(self.env.num_envs))

    @torch.no_grad()
    def fill(self, rollout: Rollout) -> None:
        """Run one horizon and write it into the buffer, values of cut episodes' final observations with it."""
        cursor, carry = self._start()
        env_noise = self.env.noise(rollout.horizon)
        policy_noise = self.policy.noise(rollout.horizon, rollout.num_envs, self.generator)
        self.env.carry, self.cursor = self.stepper.fill(rollout, carry, cursor, env_noise, policy_noise)

    @torch.no_grad()
    def evaluate(self, horizon: int, *, deterministic: bool) -> Stats:
        """Run one horizon without keeping any of it, and return its statistics."""
        cursor, carry = self._start()
        env_noise = self.env.noise(horizon)
        policy_noise = None if deterministic else self.policy.noise(horizon, self.env.num_envs, self.generator)
        steps: list[Step] = []
        for t in range(horizon):
            cursor = self.stepper.refreshed(cursor, t)
            noise = None if policy_noise is None else policy_noise[t]
            carry, cursor, _, step = self.stepper(carry, cursor, env_noise[t], noise)
            steps.append(step)
        self.env.carry = carry
        self.cursor = cursor
        return collect_stats(
            torch.stack([step.rewards for step in steps]),
            torch.stack([step.terminated | step.truncated for step in steps]),
            torch.stack([step.episode_returns for step in steps]),
            torch.stack([step.episode_lengths for step in steps]),
            None if steps[0].valid is None else torch.stack([step.valid for step in steps if step.valid is not None]),
            stacked_metrics([step.metrics for step in steps]),
        )

    def _start(self) -> tuple[Cursor, Carry]:
        if self.cursor is None:
            self.reset()
        assert self.cursor is not None
        assert self.env.carry is not None
        return self.cursor, self.env.carry

    def state_dict(self) -> dict[str, Any]:
        """Return the cursor, the environment and the generator: all that the next horizon needs but the weights."""
        cursor = self.cursor
        return {
            "env": self.env.state_dict(),
            "generator": self.generator.get_state(),
            "cursor": None
            if cursor is None
            else {"obs": cursor.obs, "starts": cursor.starts, "state": dict(cursor.state)},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from where `state_dict` was taken."""
        self.env.load_state_dict(state["env"])
        self.generator.set_state(state["generator"].cpu())
        cursor = state["cursor"]
        device = self.policy.device
        if not self.env.resumable:
            # Its simulator cannot be set back: the next horizon begins with a reset.
            cursor = None
        self.cursor = cursor and Cursor(
            tree_map(lambda part: part.to(device), cursor["obs"]),
            cursor["starts"].to(device),
            {name: value.to(device) for name, value in cursor["state"].items()},
        )
