"""A trainer's evaluations: where and under what they play, and how their metrics are called."""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Mapping
from typing import Any, Final

import numpy as np

from rl8x import keys
from rl8x.algorithms.base import GenericAlgorithmBase
from rl8x.algorithms.online import OnlineAlgorithm
from rl8x.distributed import ranks
from rl8x.envs import Env
from rl8x.envs.env_config import AnyEnvConfig, function_form, inherited_config, moving_in, parsed_value, part_of_config
from rl8x.envs.parameters import wrong_number
from rl8x.randomization import Grid
from rl8x.tracking.names import MAX_NAME_LENGTH, digest, legal_name
from rl8x.trainers.evaluator import EpisodeEvaluator
from rl8x.trainers.ranks import pooled_row

NOWHERE: Final = (
    "there is nothing to evaluate in: the algorithm trains without an environment. Give the trainer an `eval_env`"
)
_NEVER: Final = (
    "would never apply: the training environment is reset once, at the first collect (`horizons_per_env_reset` < 0). "
    "Give the trainer an `eval_env`, or use horizons_per_env_reset=1."
)
# First parts of the metrics that an evaluation without a name has.
_GROUPS: Final = ("returns", "horizon_returns", "rewards", "episodes")
_MAX_VALUE_NAME: Final = 60
_MAX_CONFIG_NAME: Final = 150


class Evaluations:
    """A trainer's evaluations: in an environment of their own, in the training's, or none where there is neither.

    Args:
        algorithm: What is trained.
        evaluator: Plays in an environment of their own; None where they play in the training's, if there is one.
        warns: Whether the first one warns where it plays in the training environment though episodes end.

    Attributes:
        measured: All of their metrics, without `eval/`.
        num_envs: Copies that one is made in, those of all ranks; 0 where there is nothing to evaluate in.
        env_config: Under which the run evaluates; None is as in training.
    """

    def __init__(
        self, algorithm: GenericAlgorithmBase[Any], evaluator: EpisodeEvaluator | None, *, warns: bool
    ) -> None:
        self._algorithm = algorithm
        # The algorithm, where they play in its own environment.
        self._in_training = algorithm if evaluator is None and isinstance(algorithm, OnlineAlgorithm) else None
        self._evaluator = evaluator
        self._env = algorithm.env if evaluator is None else evaluator.env
        # What an environment of their own came with is in force where there is no training to take it from.
        self._came_with = {} if self._env is None else self._env.next_config
        self._warns = warns and self._in_training is not None and self._in_training.env.episodic
        self._renamed, self.measured = _metric_names(self._env, whole_episodes=evaluator is not None)
        # Each rank plays some of the copies.
        counts = ranks().share("copies to evaluate in", 0 if self._env is None else self._env.num_envs)
        self.num_envs, before = sum(counts), sum(counts[: ranks().rank])
        self._own = range(before, before + counts[ranks().rank])
        self.env_config: Mapping[str, Any] | None = None

    def measure(self, env_config: Mapping[str, Any] | None, *, deterministic: bool) -> dict[str, float]:
        """Evaluate as `Trainer.eval` documents it; returns the metrics without `eval/`.

        Raises:
            RuntimeError: If there is no environment, or it is not at a reset.
        """
        if self._evaluator is not None:
            config: dict[str, Any] = self.runs_config() if env_config is None else self._plain(env_config)
            config, training = config | part_of_config(config, self.num_envs, self._own), self._algorithm.env
            return pooled_row(self._evaluator.evaluate(config, deterministic=deterministic, training=training))[0]
        trained, env_config = self._in_training, self.env_config if env_config is None else env_config
        if trained is None:
            raise RuntimeError(f"{NOWHERE}.")
        _check_turn(trained, env_config)
        if self._warns:
            self._warns = False
            warnings.warn(
                f"{type(self._env).__name__} can neither be copied nor made again: evaluations play in the training "
                "environment, and measure sums over horizons (eval/horizon_returns/*), not whole episodes. Give the "
                "trainer an `eval_env`, or build from a class or factory; eval_env=False silences this.",
                stacklevel=3,
            )
        stats, *_ = pooled_row(trained.evaluate(env_config=env_config, deterministic=deterministic))
        named = {self._renamed.get(name) or name: value for name, value in stats.items()}
        return {name: value for name, value in named.items() if name in self.measured or not _is_collected(name)}

    @property
    def is_their_turn(self) -> bool:
        """Whether one can be made now: in the training environment only where that is at a reset."""
        trained = self._in_training
        if trained is None:
            return self._evaluator is not None
        return trained.resets.until_due(trained.counters[keys.COLLECTS]) == 0

    def name_of(self, name: str) -> str | None:
        """Return the name by which an evaluation measures a metric of a training row; see `EvaluationName`."""
        if not _is_collected(name):
            return name
        counterpart = self._renamed.get(name, name)
        return keys.EVAL_PREFIX + counterpart if counterpart in self.measured else None

    def check_run(self, steps_per_eval: int | None, env_config: Mapping[str, Any] | None, *, steps: int) -> None:
        """Refuse evaluations of a run under its `eval_env_config` that could not be made when they are due.

        Args:
            steps_per_eval: An evaluation comes after every so many steps; None is never.
            env_config: The run's `eval_env_config`.
            steps: How many steps the run has made, before a resume.

        Raises:
            ValueError: If there is no environment, or the options do not fit the schedule of its resets.
            RuntimeError: If the training environment would not be at a reset.
        """
        if self._in_training is None:
            if self._evaluator is None and steps_per_eval is not None:
                raise ValueError(f"`steps_per_eval` is {steps_per_eval}, but {NOWHERE}.")
            return
        resets = self._in_training.resets
        if resets.once and env_config is not None:
            raise ValueError(f"`eval_env_config` {_NEVER}")
        if resets.once or steps_per_eval is None:
            return
        if steps_per_eval % resets.every:
            raise ValueError(
                "`steps_per_eval` must be a multiple of `horizons_per_env_reset`; got "
                f"{steps_per_eval} and {resets.every}. Try {steps_per_eval + resets.until_due(steps_per_eval)}, or "
                "give the trainer an `eval_env`."
            )
        if steps == 0:
            _check_turn(self._in_training, None)
        collects = self._in_training.counters[keys.COLLECTS]
        if resets.until_due(collects - steps):
            raise RuntimeError(
                "Evaluations would not come at resets of the training environment: after the run's "
                f"{steps} steps `algorithm/collects` is {collects}, and `horizons_per_env_reset` {resets.every}. Call "
                f"`step()` {resets.until_due(collects - steps)} more time(s), or give the trainer an `eval_env`."
            )

    def plain_configs(
        self, env_config: AnyEnvConfig | None, eval_config: Mapping[str, Any] | None, known: Mapping[str, float]
    ) -> dict[str, dict[str, object] | None]:
        """Check what a run is to train and to evaluate under, and return both in plain form by the options' names.

        Args:
            env_config: What it is to train under; of a function, what it returns now is checked, and its form is its
                name.
            eval_config: What it is to evaluate under.
            known: What a function is given.

        Raises:
            ValueError: If a value is not legal or has not as many numbers as there are copies, or it would never apply.
        """
        trained, played = self._algorithm.env, self._env
        if trained is None and env_config is not None:
            raise ValueError("`env_config` would never apply: the algorithm trains without an environment.")
        if played is None and eval_config is not None:
            raise ValueError("`eval_env_config` would never apply: give the trainer an `eval_env`.")
        asked_config = env_config
        function = function_form(asked_config) if callable(asked_config) else None
        env_config = asked_config(known) if callable(asked_config) else asked_config
        plain = None if trained is None or env_config is None else trained.plain_config(env_config)
        if trained is not None and callable(asked_config):
            trained.check_steered_config(plain or {})
        elif isinstance(self._algorithm, OnlineAlgorithm):
            self._algorithm.check_applies(env_config)
        training = {} if trained is None else trained.next_config if plain is None else plain
        plain_eval = None if eval_config is None else self._plain(eval_config, "eval_env_config", training)
        if eval_config is None and trained is not None and self._evaluator is not None:
            config = inherited_config(training, self.num_envs)
            self._plain(config, "eval_env_config (None: as in training)", training)
        return {"env_config": function or plain, "eval_env_config": plain_eval}

    def config_name(self, env_config: Mapping[str, Any] | None) -> str | None:
        """Name an evaluation by its `env_config`; None where it is the one under which the run evaluates."""
        if env_config is None or self._env is None:
            return None
        plain = self._plain(env_config)
        return None if plain == self.runs_config() else config_name(plain)

    def _plain(
        self, env_config: Mapping[str, Any], called: str = "env_config", training: Mapping[str, Any] | None = None
    ) -> dict[str, object]:
        """Check an `env_config` for evaluations, and return it in plain form.

        `training` is what training has, or will have; None is what it has now.
        """
        assert self._env is not None
        copies = "num_envs" if self._evaluator is None else "num_eval_envs"
        shared = self._evaluator is not None and ranks().size > 1
        own = part_of_config(env_config, self.num_envs, self._own) if shared else {}
        for name in env_config.keys() - own if shared else ():
            if np.ndim(env_config[name]):
                wrong = wrong_number(env_config[name], self.num_envs, copies)
                raise ValueError(f"{type(self._env).__name__}: {called}[{name!r}] {wrong}")
        plain = self._env.plain_config({**env_config, **own}, called=called, copies=copies)
        plain |= {name: _plain_values(env_config[name]) for name in own}
        if training is None:
            training = {} if self._algorithm.env is None else self._algorithm.env.next_config
        for name, value in moving_in(plain).items():
            if training.get(name) != value:
                raise ValueError(
                    f"`{called}[{name!r}]` moves with training, and an evaluation moves nothing: give what training "
                    "has, which is drawn as it stands there, or a distribution that stands still."
                )
        return plain

    def runs_config(self) -> dict[str, object]:
        """Return what the run evaluates under, in plain form: its own config for that, else what training has."""
        if self.env_config is not None:
            return self._plain(self.env_config)
        if self._in_training is not None:
            return self._in_training.env.next_config
        training = self._algorithm.env
        assert self._env is not None
        return self._came_with if training is None else inherited_config(training.config, self.num_envs)


def _check_turn(trained: OnlineAlgorithm[Any], env_config: Mapping[str, Any] | None) -> None:
    """Refuse an evaluation in the training environment out of turn, or under what could not be applied."""
    resets, collects = trained.resets, trained.counters[keys.COLLECTS]
    if resets.until_due(collects):
        raise RuntimeError(
            "`eval()` in the training environment needs `algorithm/collects` to be a multiple of "
            f"`horizons_per_env_reset` = {resets.every}; it is {collects}. Call `step()` {resets.until_due(collects)} "
            "more time(s), or give the trainer an `eval_env`."
        )
    if resets.once and env_config is not None:
        raise ValueError(f"An `env_config` for this evaluation {_NEVER}")


def _plain_values(value: Any) -> object:
    """Return a `Grid`, or a value for each copy, in plain form."""
    parsed: Any = parsed_value(value)
    return parsed.to_dict() if isinstance(parsed, Grid) else [float(each) for each in parsed]


# -- how their metrics are called


def _metric_names(env: Env | None, *, whole_episodes: bool) -> tuple[dict[str, str | None], frozenset[str]]:
    """Return which metrics of a training row have other names in an evaluation, and all that evaluations measure."""
    renamed: dict[str, str | None] = {keys.EPISODES_ENDED: None}
    if env is None:
        return renamed, frozenset()
    returns, rewards = keys.summary("returns"), keys.summary("rewards")
    if not env.episodic:
        return renamed, frozenset((*returns, *rewards))
    lasting = (*rewards, *keys.summary("episodes/lengths"), keys.EPISODES_ENDED, *keys.info_metrics(env.metric_names))
    if whole_episodes:
        renamed |= dict.fromkeys(returns)
        renamed |= dict(zip(keys.summary("episodes/returns"), returns, strict=True))
        return renamed, frozenset((*returns, *lasting))
    sums = keys.summary("horizon_returns")
    renamed |= dict(zip(returns, sums, strict=True))
    return renamed, frozenset((*sums, *keys.summary("episodes/returns"), *lasting))


def _is_collected(name: str) -> bool:
    return name in keys.COLLECT_METRICS or name.startswith(keys.INFO_PREFIX)


def in_group(stats: Mapping[str, float], group: str | None) -> dict[str, float]:
    """Put the metrics of an evaluation under `eval/`, or under its name there."""
    prefix = keys.EVAL_PREFIX if group is None else f"{keys.EVAL_PREFIX}{group}/"
    return {prefix + name: value for name, value in stats.items()}


def config_name(config: Mapping[str, Any]) -> str:
    """Name an evaluation by its `env_config` in plain form, with characters that MLflow takes: `gravity 50`."""
    text = " ".join(f"{name} {_value_name(value)}" for name, value in config.items()) or "defaults"
    return legal_name(text if len(text) <= _MAX_CONFIG_NAME else f"{text[:_MAX_CONFIG_NAME]} {digest(text)[:8]}")


def _value_name(value: Any) -> str:
    """Write a number, `uniform 0.25 1`, or a short digest of many values."""
    numbers = json.dumps(value, default=str)
    if len(numbers) > _MAX_VALUE_NAME:
        count = f"{len(value)} values " if isinstance(value, list | tuple) else ""
        return count + digest(numbers)[:8]
    return re.sub(r"[^\w.\-]+", " ", re.sub(r"\.0\b", "", numbers.replace("e+", "e"))).strip()


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
