"""Evaluation in an environment of its own: whole episodes, unbiased by their length."""

from __future__ import annotations

import hashlib
import json
import math
import re
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
from rl8x.envs.base import MAX_EVAL_ENVS
from rl8x.functional.stats import masked_summary, summary
from rl8x.policy import Policy
from rl8x.rollout import info_means, named
from rl8x.stats import Number, Stats
from rl8x.tracking.names import MAX_NAME_LENGTH, legal_name

# Steps between two looks at whether all episodes have ended: each look is a copy to the host.
_STEPS_PER_LOOK: Final = 16
_MAX_STEPS: Final = 10_000
# First parts of the metrics that an evaluation without a name has.
_GROUPS: Final = ("returns", "horizon_returns", "rewards", "episodes")
_MAX_VALUE_NAME: Final = 60
_MAX_CONFIG_NAME: Final = 150


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
    values.update(named("episodes/lengths", masked_summary(lengths.to(torch.float32), ended)))
    values[keys.EPISODES_ENDED] = ended.sum()
    means, counts = info_means(metrics, ended)
    return Stats(values | means, {keys.EPISODES_ENDED: ("episodes/lengths/",), **counts})


def _make_env(algorithm: GenericAlgorithmBase[Any], eval_env: Any, num_eval_envs: int | None, seed: int) -> Env | None:
    """Make an evaluation environment by a factory, or from the instance that is trained on; None where nothing can.

    Raises:
        ValueError: If it is asked for by name, or with a number of copies, and cannot be made.
    """
    trained = algorithm.env
    factory = eval_env if callable(eval_env) else algorithm.env_factory
    if factory is not None:
        num_envs = num_eval_envs or min(trained.num_envs, MAX_EVAL_ENVS)
        check_evaluation(num_envs, algorithm.device, algorithm.policy, trained.single_observation_space)
        made: Env = factory(num_envs, device=algorithm.device, seed=seed)
        return made
    another = trained.another(num_eval_envs, seed=seed)
    if another is None and num_eval_envs not in (None, trained.num_envs):
        raise ValueError(
            f"`num_eval_envs` is {num_eval_envs}, but the algorithm was built from an instance of "
            f"{type(trained).__name__} with {trained.num_envs} copies, which cannot be made again with another number. "
            "Build it from a class or factory, pass an `eval_env`, or leave `num_eval_envs` out."
        )
    if another is None and eval_env is True:
        raise ValueError(
            f"`eval_env=True` needs to make an environment, but the algorithm was built from an instance of "
            f"{type(trained).__name__} that can neither be copied nor made again. Pass an instance or a factory."
        )
    return another


class EvaluationNames:
    """What an evaluation measures, and by which of its metrics it measures what a row of training tells.

    Args:
        env: Where evaluations play.
        whole_episodes: Whether they play whole episodes, in an environment of their own.
    """

    def __init__(self, env: Env, *, whole_episodes: bool) -> None:
        self._renamed: dict[str, str | None] = {keys.EPISODES_ENDED: None}
        lasting = (*keys.summary("episodes/lengths"), keys.EPISODES_ENDED, *keys.info_metrics(env.metric_names))
        returns = keys.summary("returns")
        if not env.episodic:
            measured = (*returns, *keys.summary("rewards"))
        elif whole_episodes:
            self._renamed |= dict.fromkeys(returns)
            self._renamed |= dict(zip(keys.summary("episodes/returns"), returns, strict=True))
            measured = (*returns, *keys.summary("rewards"), *lasting)
        else:
            sums = keys.summary("horizon_returns")
            self._renamed |= dict(zip(returns, sums, strict=True))
            measured = (*sums, *keys.summary("rewards"), *keys.summary("episodes/returns"), *lasting)
        self.measured: Final = frozenset(measured)
        """All of its metrics, without `eval/`."""

    def of(self, name: str) -> str | None:
        """Translate a metric as `conditions.base.EvaluationName` says."""
        if not _is_collected(name):
            return name
        counterpart = self._renamed.get(name, name)
        return keys.EVAL_PREFIX + counterpart if counterpart in self.measured else None

    def renamed(self, stats: Mapping[str, float]) -> dict[str, float]:
        """Return what was measured in the training environment under the names that it has in an evaluation."""
        named = {self._renamed.get(name) or name: value for name, value in stats.items()}
        return {name: value for name, value in named.items() if name in self.measured or not _is_collected(name)}


def _is_collected(name: str) -> bool:
    return name in keys.COLLECT_METRICS or name.startswith(keys.INFO_PREFIX)


def config_name(config: Mapping[str, Any]) -> str:
    """Name an evaluation by its `env_config` in plain form, with characters that MLflow takes: `gravity 50`."""
    text = " ".join(f"{name} {_value_name(value)}" for name, value in config.items()) or "defaults"
    return legal_name(text if len(text) <= _MAX_CONFIG_NAME else f"{text[:_MAX_CONFIG_NAME]} {_digest(text)}")


def _value_name(value: Any) -> str:
    """Write a number, `uniform 0.25 1`, or a short digest of many values."""
    numbers = json.dumps(value, default=str)
    if len(numbers) > _MAX_VALUE_NAME:
        count = f"{len(value)} values " if isinstance(value, list | tuple) else ""
        return count + _digest(numbers)
    text = re.sub(r"[^\w.\-]+", " ", re.sub(r"\.0\b", "", numbers.replace("e+", "e")))
    return text.strip()


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def check_evaluation_name(name: str) -> None:
    """Check the name of an evaluation, which its metrics have after `eval/`.

    Raises:
        TypeError: If it is no text.
        ValueError: If MLflow does not take it as it is, or an evaluation without a name has such metrics.
    """
    if not isinstance(name, str):
        raise TypeError(f"The name of an evaluation must be a text; got {name!r}.")
    longest = f"{keys.EVAL_PREFIX}{name}/episodes/lengths/mean"
    if not name.strip() or name != name.strip("/ ") or legal_name(longest) != longest:
        raise ValueError(
            "The name of an evaluation must be letters, digits, spaces and `_ - . : /`, no '/' or space at an end, "
            f"and at most {MAX_NAME_LENGTH - len(longest) + len(name)} characters; got {name!r}."
        )
    if name.split("/")[0] in _GROUPS:
        raise ValueError(
            f"An evaluation cannot be called {name!r}: eval/{name.split('/')[0]}/ are metrics of those without a name."
        )


def make_evaluator(
    algorithm: GenericAlgorithmBase[Any], eval_env: Any, num_eval_envs: int | None
) -> EpisodeEvaluator | None:
    """Make what `eval()` plays in, or None where it is the training environment.

    Args:
        algorithm: What is trained.
        eval_env: `"auto"`, a bool, None, an environment or a factory, as the trainer documents it.
        num_eval_envs: Copies of an environment that is made here.

    Returns:
        The evaluator; None also where `"auto"` finds no way to make another environment of episodes.

    Raises:
        ValueError: If an environment of its own is asked for and cannot be made, or never ends.
    """
    if eval_env is None or eval_env is False or (eval_env == "auto" and not algorithm.env.episodic):
        return None
    env_seed, noise_seed = split_seed(algorithm.seed, 6)[4:]
    made = eval_env if isinstance(eval_env, Env) else _make_env(algorithm, eval_env, num_eval_envs, env_seed)
    if made is None:
        return None
    env = made
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
