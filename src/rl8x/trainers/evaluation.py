"""Evaluation: of whole episodes in an environment of its own, unbiased by their length, or in the training's."""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Mapping
from typing import Any, Final

import torch
from torch import Tensor

from rl8x import keys
from rl8x.algorithms.base import GenericAlgorithmBase
from rl8x.algorithms.memory_check import check_evaluation
from rl8x.algorithms.online import OnlineAlgorithm
from rl8x.algorithms.seeds import part_seed
from rl8x.envs import Env
from rl8x.envs.base import MAX_EVAL_ENVS
from rl8x.envs.parameters import inherited_config
from rl8x.execution import Execution
from rl8x.policy import Policy
from rl8x.rollouts.collector import Collector
from rl8x.rollouts.statistics import Number, Stats, info_means, masked_summary, named, summary
from rl8x.trainers.evaluation_names import EvaluationNames, config_name

# Steps between two looks at whether all episodes have ended: each look is a copy to the host.
_STEPS_PER_LOOK: Final = 16
_MAX_STEPS: Final = 10_000
_NOWHERE: Final = (
    "there is nothing to evaluate in: the algorithm trains without an environment. Give the trainer an `eval_env`"
)
_NEVER: Final = (
    "would never apply: the training environment is reset once, at the first collect (`horizons_per_env_reset` < 0). "
    "Give the trainer an `eval_env`, or use horizons_per_env_reset=1."
)


class EpisodeEvaluator:
    """Plays one episode in each copy of an environment that training never touches.

    Counting the first episode of each copy, however long it lasts, gives short and long episodes their true weight; to
    count the episodes that end within some steps would favour the short ones.

    Args:
        env: The evaluation environment; its copies are the episodes of one evaluation.
        policy: The policy, shared with training.
        generator: Source of sampling noise for evaluations that are not deterministic.
        execution: How the steps run.
        state_reset_every: As the training's collector has it.
    """

    def __init__(
        self,
        env: Env,
        policy: Policy,
        generator: torch.Generator,
        execution: Execution,
        *,
        state_reset_every: int = 0,
    ) -> None:
        self.env = env
        self.generator = generator
        self._collector = Collector(env, policy, generator, execution, state_reset_every=state_reset_every)
        self._warned = False

    @torch.no_grad()
    def evaluate(self, env_config: Mapping[str, Any] | None, *, deterministic: bool) -> Stats:
        """Play an episode in every copy and return the statistics.

        Args:
            env_config: What the environment is reset with; None goes on with the one in force.
            deterministic: Whether the policy takes its most likely action rather than a sample.
        """
        self._collector.reset(env_config)
        running = torch.ones(self.env.num_envs, dtype=torch.bool, device=self.env.device)
        returns = torch.zeros(self.env.num_envs, device=self.env.device)
        lengths = torch.zeros(self.env.num_envs, dtype=torch.int64, device=self.env.device)
        metrics: dict[str, Tensor] = {}
        rewards: list[Tensor] = []
        masks: list[Tensor] = []
        played = self._collector.play(deterministic=deterministic, noise_steps=_STEPS_PER_LOOK)
        for t, (_, _, _, step) in enumerate(itertools.islice(played, _MAX_STEPS), 1):
            counted = running if step.valid is None else running & step.valid
            rewards.append(step.rewards)
            masks.append(counted)
            returns = torch.where(counted, step.episode_returns, returns)
            lengths = torch.where(counted, step.episode_lengths, lengths)
            for name, value in step.metrics.items():
                metrics[name] = torch.where(counted, value, metrics.get(name, math.nan))
            running = running & ~(step.terminated | step.truncated)
            if t % _STEPS_PER_LOOK == 0 and not bool(running.any()):
                break
        else:
            self._warn_unfinished(int(running.sum()))
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
    trained, policy = algorithm.env, algorithm.policy
    factory = eval_env if callable(eval_env) else algorithm.env_factory
    if factory is not None:
        num_envs = num_eval_envs or min(MAX_EVAL_ENVS if trained is None else trained.num_envs, MAX_EVAL_ENVS)
        check_evaluation(num_envs, algorithm.device, policy, policy.observation_space)
        made: Env = factory(num_envs, device=algorithm.device, seed=seed)
        return made
    if trained is None:
        raise ValueError(
            "`eval_env=True` needs to make an environment, but the algorithm trains without one. Pass an instance, a "
            "class or a factory."
        )
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
    trained, policy = algorithm.env, algorithm.policy
    plays_whole = trained is not None and trained.episodic
    if eval_env is None or eval_env is False or (eval_env == "auto" and not plays_whole):
        return None
    env_seed, noise_seed = part_seed(algorithm.seed, "eval_env"), part_seed(algorithm.seed, "eval_sampling")
    env = eval_env if isinstance(eval_env, Env) else _make_env(algorithm, eval_env, num_eval_envs, env_seed)
    if env is None:
        return None
    if not env.episodic:
        raise ValueError(
            f"`eval_env` must have episodes that end, to be played whole; {type(env).__name__} never ends. "
            "Give it a `time_limit`, or use eval_env=False."
        )
    spaces = (env.single_observation_space, env.single_action_space)
    if spaces != (policy.observation_space, policy.action_space):
        raise ValueError(f"`eval_env` must have the training environment's spaces; got {spaces[0]} and {spaces[1]}.")
    generator = torch.Generator(algorithm.device).manual_seed(noise_seed)
    return EpisodeEvaluator(env, policy, generator, algorithm.execution, state_reset_every=algorithm.state_reset_every)


class Evaluations:
    """A trainer's evaluations: in an environment of their own, in the training's, or none where there is neither.

    Args:
        algorithm: What is trained.
        evaluator: Plays in an environment of their own; None where they play in the training's, if there is one.
        warns: Whether the first one warns where it plays in the training environment though episodes end.

    Attributes:
        names: How their metrics are called.
        env_config: Under which the run evaluates; None is as in training.
    """

    def __init__(
        self, algorithm: GenericAlgorithmBase[Any], evaluator: EpisodeEvaluator | None, *, warns: bool
    ) -> None:
        self._algorithm = algorithm
        self._trained = algorithm if evaluator is None and isinstance(algorithm, OnlineAlgorithm) else None
        self._evaluator = evaluator
        self._env = algorithm.env if evaluator is None else evaluator.env
        # What an environment of their own came with is in force where there is no training to take it from.
        self._came_with = {} if self._env is None else self._env.next_config
        self._warns = warns and self._trained is not None and self._trained.env.episodic
        self.names = EvaluationNames(self._env, whole_episodes=evaluator is not None)
        self.env_config: Mapping[str, Any] | None = None

    def measure(self, env_config: Mapping[str, Any] | None, *, deterministic: bool) -> dict[str, float]:
        """Evaluate; returns the metrics without `eval/`.

        Args:
            env_config: Values for the environment's parameters; None are those under which the run evaluates.
            deterministic: Whether the policy takes its most likely action rather than a sample.

        Raises:
            RuntimeError: If there is no environment, or it is not at a reset.
        """
        if self._evaluator is not None:
            config = self._runs_config() if env_config is None else self._plain(env_config)
            return dict(self._evaluator.evaluate(config, deterministic=deterministic))
        env_config = self.env_config if env_config is None else env_config
        self.check_turn(env_config)
        assert self._trained is not None
        if self._warns:
            self._warns = False
            warnings.warn(
                f"{type(self._env).__name__} can neither be copied nor made again: evaluations play in the training "
                "environment, and measure sums over horizons (eval/horizon_returns/*), not whole episodes. Give the "
                "trainer an `eval_env`, or build from a class or factory; eval_env=False silences this.",
                stacklevel=3,
            )
        return self.names.renamed(self._trained.evaluate(env_config=env_config, deterministic=deterministic))

    @property
    def is_their_turn(self) -> bool:
        """Whether one can be made now: in the training environment only where that is at a reset."""
        return self._evaluator is not None or (self._trained is not None and self._until_reset == 0)

    @property
    def _until_reset(self) -> int:
        trained = self._trained
        return 0 if trained is None else trained.resets.until_due(trained.counters[keys.COLLECTS])

    def check_turn(self, env_config: Mapping[str, Any] | None) -> None:
        """Refuse an evaluation without an environment, out of turn, or under what could not be applied."""
        if self._evaluator is not None:
            return
        if self._trained is None:
            raise RuntimeError(f"{_NOWHERE}.")
        if not self.is_their_turn:
            raise RuntimeError(
                "`eval()` in the training environment needs `algorithm/collects` to be a multiple of "
                f"`horizons_per_env_reset` = {self._trained.resets.every}; it is "
                f"{self._trained.counters[keys.COLLECTS]}. Call `step()` {self._until_reset} more time(s), or give the "
                "trainer an `eval_env`."
            )
        if self._trained.resets.once and env_config is not None:
            raise ValueError(f"An `env_config` for this evaluation {_NEVER}")

    def check_run(self, steps_per_eval: int | None, env_config: Mapping[str, Any] | None, *, resumed: bool) -> None:
        """Refuse evaluations of a run that could not be made when they are due.

        Args:
            steps_per_eval: As `run()` takes it.
            env_config: The run's `eval_env_config`.
            resumed: Whether the run goes on: its next step then is not its first.

        Raises:
            ValueError: If there is no environment, or the options do not fit the schedule of its resets.
            RuntimeError: If the training environment is not at a reset now.
        """
        if self._trained is None:
            if self._evaluator is None and steps_per_eval is not None:
                raise ValueError(f"`steps_per_eval` is {steps_per_eval}, but {_NOWHERE}.")
            return
        resets = self._trained.resets
        if not resets.once and steps_per_eval is not None and steps_per_eval % resets.every:
            raise ValueError(
                "`steps_per_eval` must be a multiple of `horizons_per_env_reset`; got "
                f"{steps_per_eval} and {resets.every}. Try {steps_per_eval + resets.until_due(steps_per_eval)}, or "
                "give the trainer an `eval_env`."
            )
        if not resets.once and steps_per_eval is not None and not resumed:
            self.check_turn(None)
        if resets.once and env_config is not None:
            raise ValueError(f"`eval_env_config` {_NEVER}")

    def plain_configs(
        self, env_config: Mapping[str, Any] | None, eval_config: Mapping[str, Any] | None
    ) -> dict[str, dict[str, object] | None]:
        """Check what a run is to train and to evaluate under, and return both in plain form by the options' names.

        Raises:
            ValueError: If a value is not legal or has not as many numbers as there are copies, or it would never apply.
        """
        trained, played = self._algorithm.env, self._env
        if trained is None and env_config is not None:
            raise ValueError("`env_config` would never apply: the algorithm trains without an environment.")
        if played is None and eval_config is not None:
            raise ValueError("`eval_env_config` would never apply: give the trainer an `eval_env`.")
        plain = None if trained is None or env_config is None else trained.plain_config(env_config)
        plain_eval = None if eval_config is None else self._plain(eval_config, "eval_env_config")
        if eval_config is None and trained is not None and self._evaluator is not None:
            config = inherited_config(trained.next_config if plain is None else plain, self._evaluator.env.num_envs)
            self._plain(config, "eval_env_config (None: as in training)")
        return {"env_config": plain, "eval_env_config": plain_eval}

    def config_name(self, env_config: Mapping[str, Any] | None) -> str | None:
        """Name an evaluation by its `env_config`; None where it is the one under which the run evaluates."""
        if env_config is None or self._env is None:
            return None
        plain = self._plain(env_config)
        return None if plain == self._runs_config() else config_name(plain)

    def _plain(self, env_config: Mapping[str, Any], called: str = "env_config") -> dict[str, object]:
        """Check an `env_config`, and return it in plain form."""
        assert self._env is not None
        copies = "num_envs" if self._evaluator is None else "num_eval_envs"
        return self._env.plain_config(env_config, called=called, copies=copies)

    def _runs_config(self) -> dict[str, object]:
        """Return what the run evaluates under, in plain form: its own config for that, else what training has."""
        if self.env_config is not None:
            return self._plain(self.env_config)
        if self._trained is not None:
            return self._trained.env.next_config
        training = self._algorithm.env
        assert self._env is not None
        return self._came_with if training is None else inherited_config(training.config, self._env.num_envs)
