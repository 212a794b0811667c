"""Evaluation on whole episodes in a separate environment, so that long episodes count as much as short ones."""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
from torch import Tensor

from rl8x import keys
from rl8x.algorithms.base import GenericAlgorithmBase
from rl8x.algorithms.memory_check import check_evaluation
from rl8x.algorithms.seeds import part_seed
from rl8x.distributed import ranks
from rl8x.envs import Env, GymnasiumEnv, env_maker, validate
from rl8x.envs.base import MAX_EVAL_ENVS
from rl8x.envs.vectorised import own_statistics
from rl8x.execution import Execution
from rl8x.policy import Policy
from rl8x.rollouts.collector import Collector
from rl8x.rollouts.episodes import FirstEpisodes
from rl8x.rollouts.statistics import Stats, info_means, masked_summary, named, summary
from rl8x.spaces import are_alike

# Steps between two looks at whether all episodes have ended: each look is a copy to the host.
_STEPS_PER_LOOK: Final = 16
_MAX_STEPS: Final = 10_000


class EpisodeEvaluator:
    """Plays one episode in each copy of an environment that is not used for training.

    The first episode of each copy counts, however long it lasts. Counting the episodes that end within a number of
    steps would be biased towards short ones.

    Args:
        env: The evaluation environment; its copies are the episodes of one evaluation.
        policy: The policy, shared with training.
        generator: Source of sampling noise for evaluations that are not deterministic.
        execution: How the steps run.
        state_reset_every: The policy's state is reset every so many steps, as in training; 0 is never.
        factory: Makes such environments; None where an instance was given.
    """

    def __init__(
        self,
        env: Env,
        policy: Policy,
        generator: torch.Generator,
        execution: Execution,
        *,
        state_reset_every: int = 0,
        factory: Callable[..., Env] | None = None,
    ) -> None:
        self.env = env
        self.factory = factory
        self.generator = generator
        self._collector = Collector(env, policy, generator, execution, state_reset_every=state_reset_every)
        self._warned = False

    @torch.no_grad()
    def evaluate(
        self, env_config: Mapping[str, Any] | None, *, deterministic: bool, training: Env | None = None
    ) -> Stats:
        """Play an episode in every copy and return the statistics.

        Args:
            env_config: What the environment is reset with; None keeps the present one.
            deterministic: Whether the policy takes its most likely action rather than a sample.
            training: The training environment, whose current ranges the moving parameters of `env_config` are drawn
                from.
        """
        if env_config is not None:
            self.env.configure_for_evaluation(env_config, training)
        self._collector.reset()
        episodes = FirstEpisodes(self.env)
        metrics: dict[str, Tensor] = {}
        rewards: list[Tensor] = []
        masks: list[Tensor] = []
        played = self._collector.play(deterministic=deterministic, noise_steps=_STEPS_PER_LOOK)
        for t, (_, _, _, step) in enumerate(itertools.islice(played, _MAX_STEPS), 1):
            counted = episodes.add(step)
            rewards.append(step.rewards)
            masks.append(counted)
            for name, value in step.metrics.items():
                metrics[name] = torch.where(counted, value, metrics.get(name, math.nan))
            if t % _STEPS_PER_LOOK == 0 and not bool(episodes.running.any()):
                break
        else:
            self._warn_unfinished(int(episodes.running.sum()))
        ended = ~episodes.running
        means, counts = info_means(metrics, ended)
        mask = torch.stack(masks)
        return Stats(
            named("returns", summary(episodes.returns))
            | named("rewards", masked_summary(torch.stack(rewards), mask))
            | named("episodes/lengths", masked_summary(episodes.lengths.to(torch.float32), ended))
            | {keys.EPISODES_ENDED: ended.sum(), **means}
            | {"_count/returns": self.env.num_envs, "_count/rewards": mask.sum()},
            {
                keys.EPISODES_ENDED: ("episodes/lengths/",),
                "_count/returns": ("returns/",),
                "_count/rewards": ("rewards/",),
                **counts,
            },
        )

    def _warn_unfinished(self, count: int) -> None:
        if count and not self._warned:
            self._warned = True
            warnings.warn(
                f"{count} of {self.env.num_envs} evaluation episodes had not ended after {_MAX_STEPS} steps; they are "
                "counted with their returns so far. Give the evaluation environment a `time_limit`.",
                stacklevel=2,
            )

    def state_dict(self) -> dict[str, Any]:
        """Return what the next evaluation depends on, except the weights."""
        return {"env": self.env.state_dict(), "generator": self.generator.get_state()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from where `state_dict` was taken."""
        with warnings.catch_warnings():  # each evaluation begins new episodes in any case
            warnings.filterwarnings("ignore", ".*state cannot be saved")
            self.env.load_state_dict(state["env"])
        self.generator.set_state(state["generator"].cpu())


def _make_env(
    algorithm: GenericAlgorithmBase[Any], factory: Any, eval_env: Any, num_eval_envs: int | None, seed: int
) -> Env | None:
    """Make an evaluation environment by a factory or by copying the training's; None if neither is possible."""
    trained, policy = algorithm.env, algorithm.policy
    # Each rank plays its share of the copies that are asked for, or else of the training copies of all ranks.
    share = None if num_eval_envs is None else max(1, ranks().share_of(num_eval_envs))
    if factory is not None:
        trains = MAX_EVAL_ENVS if trained is None else trained.num_envs * ranks().size
        num_envs = share or max(1, ranks().share_of(min(trains, MAX_EVAL_ENVS)))
        check_evaluation(num_envs, algorithm.device, policy, policy.observation_space)
        made: Env = factory(num_envs, device=algorithm.device, seed=seed)
        return made
    if trained is None:
        raise ValueError(
            "`eval_env=True` needs to make an environment, but the algorithm trains without one. Pass an instance, a "
            "class or a factory."
        )
    another = trained.another(share, seed=seed)
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


def _warn_of_statistics(env: Env, config: Any) -> None:
    """Warn where an environment of its own goes by statistics that are not those of the training."""
    options = own_statistics(env.vector_env) if isinstance(env, GymnasiumEnv) else []
    if options:
        known = " and ".join(f"`{option}`" for option in options if hasattr(config, option))
        warnings.warn(
            "a wrapper of the environment normalises by statistics of its own, which each environment gathers anew: "
            "evaluations, films and whoever has the policy go by others than it was trained with. Leave that wrapper "
            f"out{f' and use {known}, whose statistics are saved with the run' if known else ''}.",
            RuntimeWarning,
            stacklevel=4,
        )


def make_evaluator(
    algorithm: GenericAlgorithmBase[Any], eval_env: Any, num_eval_envs: int | None
) -> EpisodeEvaluator | None:
    """Make the evaluator of `eval()`; None if evaluations use the training environment.

    Args:
        algorithm: The algorithm that is trained.
        eval_env: The trainer's `eval_env`; `"auto"` also uses the training environment if it has no episodes that end,
            or cannot be made again.
        num_eval_envs: Copies of the environment that is made here.

    Raises:
        ValueError: If a separate environment is asked for and cannot be made, or its episodes never end, or it is the
            training environment; or `num_eval_envs` is not legal.
    """
    if num_eval_envs is not None and (type(num_eval_envs) is not int or num_eval_envs < 1):
        raise ValueError(f"`num_eval_envs` must be a whole number, at least 1, or None; got {num_eval_envs!r}.")
    trained, policy = algorithm.env, algorithm.policy
    if isinstance(eval_env, Env) and eval_env is trained:
        raise ValueError(
            f"`eval_env` is the {type(eval_env).__name__} that is trained in, and evaluations would cut its episodes. "
            "Pass another one, True for a copy, or False to evaluate in its horizons."
        )
    plays_whole = trained is not None and trained.episodic
    if eval_env is None or eval_env is False or (eval_env == "auto" and not plays_whole):
        return None
    env_seed, noise_seed = part_seed(algorithm.seed, "eval_env"), part_seed(algorithm.seed, "eval_sampling")
    given, is_named = isinstance(eval_env, Env), isinstance(eval_env, str) and eval_env != "auto"
    is_made = is_named or (callable(eval_env) and not given)
    factory = None if given else env_maker(eval_env) if is_made else algorithm.env_factory
    env = eval_env if given else _make_env(algorithm, factory, eval_env, num_eval_envs, env_seed)
    if env is None:
        return None
    if not env.episodic:
        raise ValueError(
            f"`eval_env` must have episodes that end, to be played whole; {type(env).__name__} never ends. "
            "Give it a `time_limit`, or use eval_env=False."
        )
    spaces = (env.single_observation_space, env.single_action_space)
    if not all(map(are_alike, spaces, (policy.observation_space, policy.action_space))):
        raise ValueError(f"`eval_env` must have the training environment's spaces; got {spaces[0]} and {spaces[1]}.")
    _warn_of_statistics(env, algorithm.config)
    if eval_env not in (True, "auto"):  # others are of the training's own kind
        validate(env)
    generator = torch.Generator(algorithm.device).manual_seed(noise_seed)
    reset_every = algorithm.state_reset_every
    return EpisodeEvaluator(env, policy, generator, algorithm.execution, state_reset_every=reset_every, factory=factory)
