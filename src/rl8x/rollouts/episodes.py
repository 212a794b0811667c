"""Plays whole episodes, one in each copy of an environment, for evaluations, studies, grids, films and `rl8x play`."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterator, Mapping
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rl8x.envs.base import Carry, Env
from rl8x.execution import Execution
from rl8x.policy import Policy
from rl8x.rollouts.collector import Collector
from rl8x.rollouts.step import Noises, Transition

MAX_STEPS: Final = 10_000
"""Steps after which episodes that have not ended are counted as they stand."""
STEPS_PER_LOOK: Final = 16
"""Steps between two checks whether all episodes have ended: each check is a copy to the host."""
_MAX_STEPS_SHOWN: Final = 1000
_MAX_STEPS_WITHOUT_END: Final = 200


class EpisodeRunner:
    """Plays the first episode of each copy; to count all that end within some steps would favour short ones.

    Steps run eagerly if no `execution` is given; without a `generator`, actions have to be deterministic. `running` has
    whether an episode continues, `returns` its rewards so far, and `lengths` its steps, `[num_envs]` each.
    """

    def __init__(
        self,
        policy: Policy,
        env: Env,
        execution: Execution | None = None,
        generator: torch.Generator | None = None,
    ) -> None:
        execution = execution or Execution("eager", "fp32", policy.device)
        generator = generator or torch.Generator(policy.device)
        self.collector = Collector(env, policy, generator, execution, state_reset_every=policy.state_reset_every)
        self.env = env

    def begin(self, env_config: Any = None, *, seed: int | None = None, noises: Noises | None = None) -> None:
        """Reset all copies, by the first of the `noises` if they are given."""
        env = self.env
        self.collector.reset(env_config, seed=seed, noise=None if noises is None else next(noises)[0])
        self.running = torch.ones(env.num_envs, dtype=torch.bool, device=env.device)
        self.returns = torch.zeros(env.num_envs, device=env.device)
        self.lengths = torch.zeros(env.num_envs, dtype=torch.int64, device=env.device)

    @torch.no_grad()
    def play(
        self,
        *,
        deterministic: bool = True,
        noises: Noises | None = None,
        max_steps: int | None = None,
        steps_per_look: int = STEPS_PER_LOOK,
        awaited: int | None = None,
    ) -> Iterator[tuple[Transition, Tensor]]:
        """Step until the first episodes of the first `awaited` copies, or of all, have ended; yield transitions.

        Each comes with a mask of the copies in which it belongs to the first episode, `[num_envs]`, bool.
        """
        noises = noises or self.collector.noises(steps_per_look, deterministic=deterministic)
        for t, transition in enumerate(itertools.islice(self.collector.play(noises), max_steps or MAX_STEPS), 1):
            step = transition.step
            counted = self.running if step.valid is None else self.running & step.valid
            self.returns = torch.where(counted, step.episode_returns, self.returns)
            self.lengths = torch.where(counted, step.episode_lengths, self.lengths)
            self.running = self.running & ~step.is_over
            yield transition, counted
            if t % steps_per_look == 0 and not bool(self.running[:awaited].any()):
                return

    @property
    def by_copy(self) -> tuple[Tensor, Tensor, Tensor]:
        """`running`, `returns` and `lengths` by copy, `[copies]` each; for several agents, those of the team."""
        team = self.env.team
        if team is None:
            return self.running, self.returns, self.lengths
        running, lengths = (team.of_agents(each) for each in (self.running, self.lengths))
        return running.any(0), team.returns(self.returns), lengths.amax(0)


def warn_of_cut(count: int, total: int, kind: str) -> bool:
    """Warn if some of the episodes of an evaluation had not ended after `MAX_STEPS`; return whether there are any."""
    if count:
        warnings.warn(
            f"{count} of {total} {kind} episodes had not ended after {MAX_STEPS:,} steps; they are counted as they "
            "stood. Give the environment a `time_limit`.",
            stacklevel=3,
        )
    return count > 0


class Moment(NamedTuple):
    """The copies at one time; with several agents, the rows of `state` and `parameters` are ordered by agent.

    At the end of an episode, `state` is the state before the reset, if the environment's physics are pure functions.
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
    awaited: int | None = None,
) -> Iterator[Moment]:
    """Play an episode in each copy, and yield the copies before the first action and after each.

    It stops once the first `awaited` copies, or all, are done, or after `max_steps`, by default 1,000 (endless: 200).
    """
    generator = torch.Generator(policy.device).manual_seed(seed)
    runner = EpisodeRunner(policy, env, generator=generator)
    runner.begin(env_config, seed=seed)
    carry = env.carry
    assert carry is not None

    def moment(carry: Carry, state: Mapping[str, Tensor]) -> Moment:
        running, returns, lengths = (each.cpu() for each in runner.by_copy)
        return Moment(state, carry["parameters"], running.numpy(), returns.double().numpy(), lengths.numpy())

    yield moment(carry, carry["state"])
    limit = max_steps or (_MAX_STEPS_SHOWN if env.episodic else _MAX_STEPS_WITHOUT_END)
    noises, used = itertools.tee(runner.collector.noises(1, deterministic=deterministic))
    played = runner.play(noises=noises, max_steps=limit, steps_per_look=1, awaited=awaited)
    for (transition, _), (noise, _) in zip(played, used, strict=False):
        step, state = transition.step, transition.carry["state"]
        if env.capturable and bool((step.terminated | step.truncated).any()):  # compute the state before the reset
            state, _, _ = env.outcome(carry, policy.env_actions(transition.act.actions), noise)
        carry = transition.carry
        yield moment(carry, state)
