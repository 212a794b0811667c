"""A trainer's evaluations: their environment, its parameters, their metrics and the names of these."""

from __future__ import annotations

import functools
import json
import math
import re
import warnings
from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
from torch import Tensor

from rl8x import keys
from rl8x.algorithms.base import GenericAlgorithmBase
from rl8x.algorithms.hyperparameters import part_seed
from rl8x.algorithms.memory_check import check_evaluation
from rl8x.conditions.kinds import is_collected
from rl8x.distributed import ranks
from rl8x.envs import Env, GymnasiumEnv, env_maker, validate
from rl8x.envs.base import MAX_EVAL_ENVS
from rl8x.envs.checks import is_vectorised
from rl8x.envs.parameters import (
    AnyEnvConfig,
    Parsed,
    called_with,
    inherited_config,
    moving_in,
    parsed,
    part_of_config,
    plain,
    wrong_number,
)
from rl8x.envs.vectorised import wrapped_normalisation
from rl8x.output import shown
from rl8x.plain import checked_number
from rl8x.randomization import ParameterDistribution, Scheduled
from rl8x.randomization.distributions import Constant, PerCopy
from rl8x.rollouts.episodes import EpisodeRunner, warn_of_cut
from rl8x.rollouts.statistics import Stats, agent_means, info_means, named, summary
from rl8x.spaces import are_alike
from rl8x.tracking.protocol import MAX_NAME_LENGTH, digest, legal_name
from rl8x.trainers.rows import pooled_row

NOWHERE: Final = (
    "there is nothing to evaluate in: the algorithm trains without an environment. Give the trainer an `eval_env`"
)
_NEVER: Final = (
    "would never apply: the training environment is reset once, at the first collect (`horizons_per_env_reset` < 0). "
    "Give the trainer an `eval_env`, or use horizons_per_env_reset=1."
)
# First parts of the metrics of an unnamed evaluation; no evaluation may have such a name.
_GROUPS: Final = ("returns", "horizon_returns", "rewards", "episodes")
_MAX_VALUE_NAME: Final = 60
_MAX_CONFIG_NAME: Final = 150


class Evaluations:
    """Evaluates whole episodes in a separate environment, or horizons in the training environment."""

    def __init__(self, algorithm: GenericAlgorithmBase[Any], eval_env: Any, num_eval_envs: int | None) -> None:
        self._algorithm = algorithm
        self.env, self.factory = _own_env(algorithm, eval_env, num_eval_envs)
        self.env_in_use = algorithm.env if self.env is None else self.env  # None if there is neither
        # The training environment's resets if evaluations play in it, else None.
        self._resets = None if algorithm.horizons is None or self.env is not None else algorithm.horizons.resets
        # Without a training environment the initial configuration of the evaluation environment applies.
        self._came_with: Parsed = {} if self.env_in_use is None else self.env_in_use.parameter_state.next.config
        # The first evaluation warns if it plays an episodic task in the training environment by default.
        episodic = self.env_in_use is not None and self.env_in_use.episodic
        self._warns = eval_env == "auto" and self._resets is not None and episodic
        self._renamed, self.measured = _metric_names(self.env_in_use, whole_episodes=self.env is not None)
        # Each rank plays some of the copies.
        counts = ranks().share("copies to evaluate in", 0 if self.env_in_use is None else self.env_in_use.num_copies)
        self.num_envs, before = sum(counts), sum(counts[: ranks().rank])
        self._own = range(before, before + counts[ranks().rank])
        self.env_config: Mapping[str, Any] | None = None  # of the run's evaluations; None: as in training
        self.generator = torch.Generator(algorithm.device).manual_seed(part_seed(algorithm.seed, "eval_sampling"))
        self._warned = False  # of truncated episodes

    @functools.cached_property
    def _runner(self) -> EpisodeRunner:
        """The runner of whole episodes in the separate environment."""
        algorithm, env = self._algorithm, self.env
        assert env is not None
        return EpisodeRunner(algorithm.policy, env, algorithm.execution, self.generator)

    def measure(self, env_config: Mapping[str, Any] | None, *, deterministic: bool) -> dict[str, float]:
        """Evaluate as documented by `Trainer.eval`; return the metrics without the prefix `eval/`."""
        if self.env is not None:
            config = self.runs_config() if env_config is None else self._checked(env_config)
            config = {**config, **part_of_config(config, self.num_envs, self._own)}
            return pooled_row(self.play(self._runner, config, deterministic=deterministic))[0]
        env_config = self.env_config if env_config is None else env_config
        if self._resets is None:
            raise RuntimeError(f"{NOWHERE}.")
        collects = self._algorithm.counters[keys.COLLECTS]
        if steps := self._resets.until_due(collects):
            raise RuntimeError(
                "`eval()` in the training environment needs `algorithm/collects` to be a multiple of "
                f"`horizons_per_env_reset` = {self._resets.every}; it is {collects}. Call "
                f"`step()` {steps} more time(s), or give the trainer an `eval_env`."
            )
        if self._resets.once and env_config is not None:
            raise ValueError(f"An `env_config` for this evaluation {_NEVER}")
        if self._warns:
            self._warns = False
            assert self.env_in_use is not None
            name = type(self.env_in_use.unwrapped).__name__
            warnings.warn(
                f"{name} can neither be copied nor made again: evaluations play in the training "
                "environment, and measure sums over horizons (eval/horizon_returns/*), not whole episodes. Give the "
                "trainer an `eval_env`, or build from a class or factory; eval_env=False silences this.",
                stacklevel=3,
            )
        stats, *_ = pooled_row(self._algorithm.evaluate(env_config=env_config, deterministic=deterministic))
        named = {self._renamed.get(name) or name: value for name, value in stats.items()}
        return {name: value for name, value in named.items() if name in self.measured or not is_collected(name)}

    @torch.no_grad()
    def play(self, episodes: EpisodeRunner, env_config: Mapping[str, Any], *, deterministic: bool) -> Stats:
        """Play one episode in every copy; moving parameters are drawn from the current ranges of training."""
        algorithm, env = self._algorithm, episodes.env
        algorithm.make_ready(trains=False)
        training = None if algorithm.env is None else algorithm.env.parameter_state
        env.parameter_state.configure_for_evaluation(env_config, training)
        rewards, masks = list[Tensor](), list[Tensor]()
        metrics: dict[str, Tensor] = {}
        episodes.begin()
        for transition, counted in episodes.play(deterministic=deterministic):
            rewards.append(transition.step.rewards)
            masks.append(counted)
            for name, value in transition.step.metrics.items():
                metrics[name] = torch.where(counted, value, metrics.get(name, math.nan))
        (running, returns, lengths), mask, team = episodes.by_copy, torch.stack(masks), env.team
        self._warned = self._warned or warn_of_cut(int(running.sum()), env.num_copies, "evaluation")
        if team is not None:  # as in training
            metrics = {name: team.of_agents(values).nanmean(0) for name, values in metrics.items()}
        means, counts = info_means(metrics, ~running)
        if team is not None:
            means |= agent_means(team, episodes.returns, ~running)
        values: dict[str, Any] = {
            **named("returns", summary(returns)),
            **named("rewards", summary(torch.stack(rewards), mask)),
            **named("episodes/lengths", summary(lengths.to(torch.float32), ~running)),
            keys.EPISODES_ENDED: (~running).sum(),
            "_count/returns": env.num_copies,
            "_count/rewards": mask.sum(),
        }
        gates = {keys.EPISODES_ENDED: ("episodes/lengths/", keys.AGENTS_PREFIX), "_count/returns": ("returns/",)}
        return Stats(values | means, gates | {"_count/rewards": ("rewards/",)} | counts)

    def state_dict(self) -> dict[str, Any] | None:
        """Return the state of the separate environment and the generator; None without a separate environment."""
        return None if self.env is None else {"env": self.env.state_dict(), "generator": self.generator.get_state()}

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """Restore a `state_dict`, if there was a separate environment then and there is one now."""
        if self.env is None or state is None:
            return
        with warnings.catch_warnings():  # each evaluation begins new episodes in any case
            warnings.filterwarnings("ignore", ".*state cannot be saved")
            self.env.load_state_dict(state["env"])
        self.generator.set_state(state["generator"].cpu())

    @property
    def is_their_turn(self) -> bool:
        """Whether an evaluation can be made now; in the training environment only at a reset."""
        if self._resets is None:
            return self.env is not None
        return self._resets.until_due(self._algorithm.counters[keys.COLLECTS]) == 0

    def name_of(self, name: str) -> str | None:
        """Return the evaluation metric that corresponds to a metric of training rows; None if there is none."""
        if not is_collected(name):
            return name
        counterpart = self._renamed.get(name, name)
        return keys.EVAL_PREFIX + counterpart if counterpart in self.measured else None

    def check_run(self, steps_per_eval: int | None, env_config: Mapping[str, Any] | None, *, steps: int) -> None:
        """Raise if evaluations could not be made when due; `steps` is the number of steps made before a resume."""
        resets = self._resets
        if resets is None:
            if self.env is None and steps_per_eval is not None:
                raise ValueError(f"`steps_per_eval` is {steps_per_eval}, but {NOWHERE}.")
            return
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
        collects = self._algorithm.counters[keys.COLLECTS]
        if resets.until_due(collects - steps):
            raise RuntimeError(
                "Evaluations would not come at resets of the training environment: after the run's "
                f"{steps} steps `algorithm/collects` is {collects}, and `horizons_per_env_reset` {resets.every}. Call "
                f"`step()` {resets.until_due(collects - steps)} more time(s), or give the trainer an `eval_env`."
            )

    def checked_configs(
        self, env_config: AnyEnvConfig | None, eval_config: Mapping[str, Any] | None, known: Mapping[str, float]
    ) -> dict[str, AnyEnvConfig | None]:
        """Parse and check the `env_config` of training and of evaluations; a function is called with `known`."""
        trained, called = self._algorithm.env, "eval_env_config"
        if trained is None and env_config is not None:
            raise ValueError("`env_config` would never apply: the algorithm trains without an environment.")
        if self.env_in_use is None and eval_config is not None:
            raise ValueError("`eval_env_config` would never apply: give the trainer an `eval_env`.")
        function, values = (env_config, called_with(env_config, known)) if callable(env_config) else (None, env_config)
        given: Parsed | None = None
        if trained is not None and values is not None:
            given = trained.parameter_state.resolve(values).config
        if function is not None and trained is not None:
            trained.parameter_state.resolve(given or {}, steered=True)
        elif self._algorithm.horizons is not None:
            self._algorithm.horizons.check_applies(given)
        training = given if trained is None or given is not None else self.next_config
        evaluated = None if eval_config is None else self._checked(eval_config, called, training)
        if eval_config is None and training is not None and self.env is not None:
            self._checked(inherited_config(training, self.num_envs), f"{called} (None: as in training)", training)
        return {"env_config": given if function is None else function, "eval_env_config": evaluated}

    def made_name(self, env_config: Mapping[str, Any] | None, *, deterministic: bool) -> str | None:
        """Name an evaluation by its `env_config` and whether it samples; None if it equals the run's evaluations."""
        names = [] if deterministic else ["sampled"]
        if env_config is not None and self.env_in_use is not None:
            given = self._checked(env_config)
            names[:0] = [] if given == self.runs_config() else [config_name(plain(given))]
        return " ".join(names) or None

    def runs_config(self) -> Parsed:
        """Return the `env_config` of the run's evaluations: its `eval_env_config`, else that of training."""
        if self.env_config is not None:
            return self._checked(self.env_config)
        if self._algorithm.env is None or self.env is None:
            return self.next_config
        return inherited_config(self._algorithm.env.parameter_state.current.config, self.num_envs)

    @property
    def next_config(self) -> Parsed:
        """The `env_config` of training's next reset; without training, the evaluation environment's initial one."""
        trained = self._algorithm.env
        return self._came_with if trained is None else trained.parameter_state.next.config

    def are_alike(self, env_config: Any, eval_config: Any) -> tuple[bool, bool]:
        """Whether evaluations, and training, keep their configuration; a function counts as the one until now."""
        trained, until_now, steered = self._algorithm.env, self.next_config, callable(env_config)
        training = until_now if env_config is None or steered else env_config
        trains_alike = trained is None or begins(until_now, trained) == begins(training, trained)
        if self.env_in_use is None or (steered and eval_config is None):
            return True, trains_alike
        before = inherited_config(self.runs_config(), self.num_envs)
        after = inherited_config(training, self.num_envs) if eval_config is None else eval_config
        return begins(before, self.env_in_use) == begins(after, self.env_in_use), trains_alike

    def _checked(
        self, env_config: Mapping[str, Any], called: str = "env_config", training: Mapping[str, Any] | None = None
    ) -> Parsed:
        """Parse an `env_config` for evaluations; `training` is training's future one, None if it stays the same."""
        assert self.env_in_use is not None
        copies = "num_envs" if self.env is None else "num_eval_envs"
        own: dict[str, Any] = {}
        if self.env is not None and ranks().size > 1:
            env_config = parsed(env_config)
            own = part_of_config(env_config, self.num_envs, self._own)
            for name, value in env_config.items():
                if isinstance(value, PerCopy) and name not in own:
                    wrong = wrong_number(value, self.num_envs, copies)
                    raise ValueError(f"{type(self.env_in_use.unwrapped).__name__}: {called}[{name!r}] {wrong}")
        resolved = self.env_in_use.parameter_state.resolve({**env_config, **own} if own else env_config, called, copies)
        given = resolved.config | {name: env_config[name] for name in own}
        training = self.next_config if training is None else training
        for name, value in moving_in(given).items():
            if training.get(name) != value:
                raise ValueError(
                    f"`{called}[{name!r}]` moves with training, and an evaluation moves nothing: give what training "
                    "has, which is drawn as it stands there, or a distribution that stands still."
                )
        return given


def values_under(config: Parsed, env: Env) -> dict[str, ParameterDistribution]:
    """Return the value of each parameter of an environment under a configuration."""
    return {name: config.get(name, Constant((parameter.default,))) for name, parameter in env.parameters.items()}


def begins(config: Parsed, env: Env) -> dict[str, ParameterDistribution]:
    """Return the value of each parameter of an environment; of a schedule its first point."""
    values = values_under(config, env).items()
    return {name: value.at(None) if isinstance(value, Scheduled) else value for name, value in values}


# -- names of their metrics


def _metric_names(env: Env | None, *, whole_episodes: bool) -> tuple[dict[str, str | None], frozenset[str]]:
    """Return the new names of training metrics that evaluations rename, None if dropped, and all they measure."""
    renamed: dict[str, str | None] = {keys.EPISODES_ENDED: None}
    if env is None:
        return renamed, frozenset()
    returns, rewards = keys.summary("returns"), keys.summary("rewards")
    if not env.episodic:
        return renamed, frozenset((*returns, *rewards))
    own = (*keys.info_metrics(env.metric_names), *([] if env.team is None else keys.agent_metrics(env.team.names)))
    lasting = (*rewards, *keys.summary("episodes/lengths"), keys.EPISODES_ENDED, *own)
    if whole_episodes:
        renamed |= dict.fromkeys(returns)
        renamed |= dict(zip(keys.summary("episodes/returns"), returns, strict=True))
        return renamed, frozenset((*returns, *lasting))
    sums = keys.summary("horizon_returns")
    renamed |= dict(zip(returns, sums, strict=True))
    return renamed, frozenset((*sums, *keys.summary("episodes/returns"), *lasting))


def config_name(config: Mapping[str, Any]) -> str:
    """Name an evaluation by its plain `env_config`, in characters that MLflow allows: `gravity 50`."""
    words = []
    for name, value in config.items():
        text = json.dumps(value, default=str)
        if len(text) > _MAX_VALUE_NAME:
            count = f"{len(value)} values " if isinstance(value, list | tuple) else ""
            words.append(f"{name} {count}{digest(text)[:8]}")
        else:
            short = re.sub(r"[^\w.\-]+", " ", re.sub(r"\.0\b", "", text.replace("e+", "e"))).strip()
            words.append(f"{name} {short}")
    text = " ".join(words) or "defaults"
    return legal_name(text if len(text) <= _MAX_CONFIG_NAME else f"{text[:_MAX_CONFIG_NAME]} {digest(text)[:8]}")


def check_evaluation_name(name: str) -> None:
    """Raise if MLflow would refuse or change an evaluation's name, or an unnamed evaluation has such metrics."""
    longest = f"{keys.EVAL_PREFIX}{name}/episodes/lengths/mean"
    if not name.strip() or name != name.strip("/ ") or legal_name(longest) != longest:
        raise ValueError(
            "The name of an evaluation must be letters, digits, spaces and `_ - . : /`, no '/' or space at an end, "
            f"and at most {MAX_NAME_LENGTH - len(longest) + len(name)} characters; got {shown(name)}."
        )
    if (group := name.split("/")[0]) in _GROUPS:
        raise ValueError(f"An evaluation cannot be called {name!r}: eval/{group}/ are metrics of those without a name.")


# -- their environment


def _own_env(
    algorithm: GenericAlgorithmBase[Any], eval_env: Any, num_eval_envs: int | None
) -> tuple[Env | None, Callable[..., Env] | None]:
    """Return the separate evaluation environment, None to use the training's, and a factory of more like it."""
    if num_eval_envs is not None:
        num_eval_envs = checked_number(num_eval_envs, "num_eval_envs", least=1, whole=True)
    trained, policy = algorithm.env, algorithm.policy
    if is_vectorised(eval_env) and not isinstance(eval_env, Env):
        eval_env = GymnasiumEnv(eval_env, device=algorithm.device, seed=part_seed(algorithm.seed, "eval_env"))
    given, auto = isinstance(eval_env, Env), isinstance(eval_env, str) and eval_env == "auto"
    of_training = auto or eval_env is True
    if given and eval_env is trained:
        raise ValueError(
            f"`eval_env` is the {type(trained.unwrapped).__name__} that is trained in, and evaluations would cut its "
            "episodes. Pass another one, True for a copy, or False to evaluate in its horizons."
        )
    if given and num_eval_envs not in (None, eval_env.num_copies * ranks().size):
        copies = eval_env.num_copies
        raise ValueError(f"`num_eval_envs` is {num_eval_envs}, but the `eval_env` has {copies} copies. Leave it out.")
    if eval_env is None or eval_env is False or (auto and (trained is None or not trained.episodic)):
        return None, algorithm.env_factory
    factory = None if given else algorithm.env_factory if of_training else env_maker(eval_env)
    env = eval_env if given else _make_env(algorithm, factory, num_eval_envs, must=eval_env is True)
    if env is None:
        return None, factory
    if not env.episodic:
        raise ValueError(
            f"`eval_env` must have episodes that end, to be played whole; {type(env.unwrapped).__name__} never ends. "
            "Give it a `time_limit`, or use eval_env=False."
        )
    spaces = (env.single_observation_space, env.single_action_space)
    if not all(map(are_alike, spaces, (policy.observation_space, policy.action_space))):
        raise ValueError(f"`eval_env` must have the training environment's spaces; got {spaces[0]} and {spaces[1]}.")
    _warn_of_statistics(env, algorithm.config)
    if not of_training:
        validate(env)
    return env, factory


def _make_env(
    algorithm: GenericAlgorithmBase[Any], factory: Callable[..., Env] | None, num_eval_envs: int | None, *, must: bool
) -> Env | None:
    """Make an evaluation environment by a factory or by copying the training's; None if neither is possible."""
    trained, policy, seed = algorithm.env, algorithm.policy, part_seed(algorithm.seed, "eval_env")
    # Each rank plays its share of the requested copies, else of the training copies of all ranks.
    share = None if num_eval_envs is None else max(1, ranks().share_of(num_eval_envs))
    if factory is not None:
        trains = MAX_EVAL_ENVS if trained is None else trained.num_copies * ranks().size
        num_envs = share or max(1, ranks().share_of(min(trains, MAX_EVAL_ENVS)))
        check_evaluation(num_envs, algorithm.device, policy.observation_space)
        return factory(num_envs, device=algorithm.device, seed=seed)
    if trained is None:
        raise ValueError(
            "`eval_env=True` needs to make an environment, but the algorithm trains without one. Pass an instance, a "
            "class or a factory."
        )
    another = trained.another(share, seed=seed)
    if another is None and (must or num_eval_envs not in (None, trained.num_copies)):
        raise ValueError(
            "`eval_env=True` and another `num_eval_envs` need to make an environment, but the algorithm was built from "
            f"an instance of {type(trained).__name__} with {trained.num_copies} copies, which cannot be made again so; "
            f"got num_eval_envs={num_eval_envs}. Build it from a class or factory, or pass an `eval_env`."
        )
    return another


def _warn_of_statistics(env: Env, config: Any) -> None:
    """Warn if a separate environment normalises by statistics of its own, not those of training."""
    options = wrapped_normalisation(env.unwrapped.vector_env) if isinstance(env.unwrapped, GymnasiumEnv) else []
    if options:
        known = " and ".join(f"`{option}`" for option in options if hasattr(config, option))
        warnings.warn(
            "a wrapper of the environment normalises by statistics of its own, which each environment gathers anew: "
            "evaluations, films and whoever has the policy go by others than it was trained with. Leave that wrapper "
            f"out{f' and use {known}, whose statistics are saved with the run' if known else ''}.",
            RuntimeWarning,
            stacklevel=4,
        )
