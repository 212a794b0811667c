"""One whole episode in each copy of an environment: for evaluations, and for films and `rl8x play`."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rl8x.envs.base import Carry, Env, Step
from rl8x.execution import Execution
from rl8x.policy import Policy
from rl8x.rollouts.step import Noises, Stepper, first_cursor

MAX_STEPS = 1000
_MAX_STEPS_WITHOUT_END = 200


class FirstEpisodes:
    """The first episode of each copy of an environment, as far as it was stepped.

    Attributes:
        running: Whether the episode goes on, `[num_envs]`.
        returns: Sum of its rewards so far, `[num_envs]`.
        lengths: Its steps so far, `[num_envs]`.
    """

    def __init__(self, env: Env) -> None:
        self.running = torch.ones(env.num_envs, dtype=torch.bool, device=env.device)
        self.returns = torch.zeros(env.num_envs, device=env.device)
        self.lengths = torch.zeros(env.num_envs, dtype=torch.int64, device=env.device)

    def add(self, step: Step) -> Tensor:
        """Take in a step; return in which copies it belongs to the first episode, `[num_envs]`."""
        counted = self.running if step.valid is None else self.running & step.valid
        self.returns = torch.where(counted, step.episode_returns, self.returns)
        self.lengths = torch.where(counted, step.episode_lengths, self.lengths)
        self.running = self.running & ~(step.terminated | step.truncated)
        return counted


class Moment(NamedTuple):
    """The copies at one time. After a copy's episode has ended, its state and parameters are those of the next one.

    Attributes:
        state: The environment's state, `[num_envs, ...]` each; at the end of an episode the state before the reset, if
            the environment's physics are pure functions.
        parameters: The episode's parameters, `[num_envs]` each.
        running: Whether the first episode of a copy is still running, `[num_envs]`.
        returns: Sum of the episode's rewards so far, `[num_envs]`.
        lengths: The episode's steps so far, `[num_envs]`.
    """

    state: Mapping[str, Tensor]
    parameters: Mapping[str, Tensor]
    running: NDArray[np.bool_]
    returns: NDArray[np.float64]
    lengths: NDArray[np.int64]


@torch.no_grad()
def play_episodes(
    policy: Policy,
    env: Env,
    *,
    env_config: Mapping[str, Any] | None = None,
    deterministic: bool = True,
    seed: int = 0,
    max_steps: int | None = None,
    counted: int | None = None,
    state_reset_every: int = 0,
) -> Iterator[Moment]:
    """Play an episode in each copy, and yield the copies before the first action and after each.

    Args:
        policy: The policy that acts.
        env: The environment, which is reset.
        env_config: Values of its parameters; None changes nothing.
        deterministic: Whether the policy takes its most likely actions rather than samples.
        seed: Seed of the environment and of sampling.
        max_steps: Maximum number of steps; None is 1,000, or 200 if episodes never end.
        counted: Stop when the episodes of this many first copies have ended; None waits for all.
        state_reset_every: Steps between resets of the policy's state, as in training; 0 never resets it.
    """
    generator = torch.Generator(policy.device).manual_seed(seed)
    obs, _ = env.reset(seed=seed, config=env_config)
    execution = Execution("eager", "fp32", policy.device)
    stepper = Stepper(policy, env, execution, state_reset_every=state_reset_every)
    carry, used, episodes = env.carry, list[Tensor](), FirstEpisodes(env)
    assert carry is not None
    yield _moment(carry, carry["state"], episodes)

    limit = MAX_STEPS if env.episodic else _MAX_STEPS_WITHOUT_END

    def noises() -> Noises:
        while True:
            used[:] = [env.noise(1)[0]]
            yield used[0], None if deterministic else policy.noise(1, env.num_envs, generator)[0]

    for _, transition in itertools.islice(stepper.play(carry, first_cursor(policy, obs), noises()), max_steps or limit):
        step, state = transition.step, transition.carry["state"]
        if env.capturable and bool((step.terminated | step.truncated).any()):  # compute the state before the reset
            state, _, _ = env.outcome(carry, policy.env_actions(transition.act.actions), used[0])
        episodes.add(step)
        env.carry = transition.carry
        yield _moment(carry, state, episodes)
        if not bool(episodes.running[:counted].any()):
            return
        carry = transition.carry


def _moment(carry: Carry, state: Mapping[str, Tensor], episodes: FirstEpisodes) -> Moment:
    counts = (each.cpu().numpy() for each in (episodes.running, episodes.returns.double(), episodes.lengths))
    return Moment(state, carry["parameters"], *counts)
