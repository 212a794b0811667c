"""Evaluation in an environment of its own: whole episodes, unbiased by their length."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from typing import Any, Final

import torch
from torch import Tensor

from rl8x import keys
from rl8x.algorithms.base import GenericAlgorithmBase
from rl8x.algorithms.config import split_seed
from rl8x.algorithms.memory import check_evaluation
from rl8x.collector import Collector
from rl8x.envs import Env
from rl8x.functional.stats import masked_summary, summary
from rl8x.policy import Policy
from rl8x.rollout import info_means, named
from rl8x.stats import Number, Stats

# Steps between two looks at whether all episodes have ended: each look is a copy to the host.
_STEPS_PER_LOOK: Final = 16
_MAX_STEPS: Final = 10_000


class EpisodeEvaluator:
    """Plays one episode in each copy of an environment that training never touches.

    Counting the first episode of each copy, however long it lasts, gives short and long episodes their true weight; to
    count the episodes that end within some steps would favour the short ones.

    Args:
        env: The evaluation environment; its copies are the episodes of one evaluation.
        policy: The policy, shared with training.
        generator: Source of sampling noise for evaluations that are not deterministic.
        state_reset_every: As the training's collector has it.
    """

    def __init__(self, env: Env, policy: Policy, generator: torch.Generator, *, state_reset_every: int = 0) -> None:
        self.env = env
        self.policy = policy
        self.generator = generator
        self.state_reset_every = state_reset_every
        self._warned = False

    @torch.no_grad()
    def evaluate(self, env_config: Mapping[str, Any] | None, *, deterministic: bool) -> Stats:
        """Play an episode in every copy and return the statistics.

        Args:
            env_config: What the environment is reset with; None goes on with the one in force.
            deterministic: Whether the policy takes its most likely action rather than a sample.
        """
        collector = Collector(self.env, self.policy, self.generator, state_reset_every=self.state_reset_every)
        collector.reset(env_config)
        cursor, carry = collector.cursor, self.env.carry
        assert cursor is not None
        assert carry is not None
        running = torch.ones(self.env.num_envs, dtype=torch.bool, device=self.env.device)
        returns = torch.zeros(self.env.num_envs, device=self.env.device)
        lengths = torch.zeros(self.env.num_envs, dtype=torch.int64, device=self.env.device)
        metrics: dict[str, Tensor] = {}
        rewards: list[Tensor] = []
        masks: list[Tensor] = []
        for t in range(_MAX_STEPS):
            if t % _STEPS_PER_LOOK == 0:
                if not bool(running.any()):
                    break
                noise = self.env.noise(_STEPS_PER_LOOK)
                sampling = (
                    None if deterministic else self.policy.noise(_STEPS_PER_LOOK, self.env.num_envs, self.generator)
                )
            cursor = collector.stepper.refreshed(cursor, t)
            slot = t % _STEPS_PER_LOOK
            policy_noise = None if sampling is None else sampling[slot]
            carry, cursor, _, step = collector.stepper(carry, cursor, noise[slot], policy_noise)
            counted = running if step.valid is None else running & step.valid
            rewards.append(step.rewards)
            masks.append(counted)
            returns = torch.where(counted, step.episode_returns, returns)
            lengths = torch.where(counted, step.episode_lengths, lengths)
            for name, figure in step.metrics.items():
                metrics[name] = torch.where(counted, figure, metrics.get(name, math.nan))
            running = running & ~(step.terminated | step.truncated)
        else:
            self._warn_unfinished(int(running.sum()))
        self.env.carry = carry
        return _episode_stats(returns, lengths, ~running, torch.stack(rewards), torch.stack(masks), metrics)

    def _warn_unfinished(self, count: int) -> None:
        if count and not self._warned:
            self._warned = True
            warnings.warn(
                f"{count} of {self.env.num_envs} evaluation episodes had not ended after {_MAX_STEPS} steps; they are "
                "counted as they stood. Give the evaluation environment a `time_limit`.",
                stacklevel=2,
            )

    def state_dict(self) -> dict[str, Any]:
        """Return what the next evaluation depends on but the weights."""
        return {"env": self.env.state_dict(), "generator": self.generator.get_state()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from where `state_dict` was taken."""
        self.env.load_state_dict(state["env"])
        self.generator.set_state(state["generator"].cpu())


def _episode_stats(
    returns: Tensor,
    lengths: Tensor,
    ended: Tensor,
    rewards: Tensor,
    counted: Tensor,
    metrics: Mapping[str, Tensor],
) -> Stats:
    values: dict[str, Number] = {}
    values.update(named("returns", summary(returns)))
    values.update(named("rewards", masked_summary(rewards, counted)))
    values.update(named("episodes/returns", masked_summary(returns, ended)))
    values.update(named("episodes/lengths", masked_summary(lengths.to(torch.float32), ended)))
    values[keys.EPISODES_ENDED] = ended.sum()
    means, counts = info_means(metrics, ended)
    return Stats(values | means, {keys.EPISODES_ENDED: ("episodes/returns/", "episodes/lengths/"), **counts})


def fitted_config(config: Mapping[str, Any], num_envs: int) -> dict[str, Any]:
    """Fit an `env_config` with values for each copy to another number of copies, taking evenly spaced ones of them."""
    fitted: dict[str, Any] = {}
    for name, value in config.items():
        if isinstance(value, list | tuple) and len(value) != num_envs:
            fitted[name] = [value[i * len(value) // num_envs] for i in range(num_envs)]
        else:
            fitted[name] = value
    return fitted


def make_evaluator(
    algorithm: GenericAlgorithmBase[Any], eval_env: Any, num_eval_envs: int | None
) -> EpisodeEvaluator | None:
    """Make what `eval()` plays in, or None where it is the training environment.

    Args:
        algorithm: What is trained.
        eval_env: `"auto"`, a bool, None, an environment or a factory, as the trainer documents it.
        num_eval_envs: Copies of an environment that is made here.

    Raises:
        ValueError: If an environment of its own is asked for and cannot be made, or never ends.
    """
    if eval_env == "auto":
        eval_env = algorithm.env.episodic and algorithm.env_factory is not None
    if eval_env is None or eval_env is False:
        return None
    env_seed, noise_seed = split_seed(algorithm.seed, 6)[4:]
    env = eval_env
    if not isinstance(env, Env):
        factory = algorithm.env_factory if eval_env is True else eval_env
        if factory is None:
            raise ValueError(
                "`eval_env=True` needs to make an environment, but the algorithm was built from an instance. "
                "Pass an instance or a factory."
            )
        num_envs = num_eval_envs or min(algorithm.env.num_envs, 128)
        check_evaluation(num_envs, algorithm.device, algorithm.policy, algorithm.env.single_observation_space)
        env = factory(num_envs, device=algorithm.device, seed=env_seed)
    if not env.episodic:
        raise ValueError(
            f"`eval_env` must have episodes that end, to be played whole; {type(env).__name__} never ends. "
            "Give it a `time_limit`, or use eval_env=False."
        )
    spaces = (env.single_observation_space, env.single_action_space)
    if spaces != (algorithm.env.single_observation_space, algorithm.env.single_action_space):
        raise ValueError(f"`eval_env` must have the training environment's spaces; got {spaces[0]} and {spaces[1]}.")
    generator = torch.Generator(algorithm.device).manual_seed(noise_seed)
    return EpisodeEvaluator(env, algorithm.policy, generator, state_reset_every=algorithm.state_reset_every)
