"""What an algorithm with an environment has: horizons, resets, and evaluation in the training environment."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from abc import abstractmethod
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, ClassVar, TypeVar

import gymnasium
import torch
from torch import Tensor

from rl8x import keys
from rl8x.algorithms.base import AlgorithmConfig, AnyEnvConfig, EnvFactory, GenericAlgorithmBase, flatten_params
from rl8x.algorithms.hyperparameters import option, resolve_device
from rl8x.algorithms.memory_check import Space, check_training, slot_bytes
from rl8x.distributed import ranks
from rl8x.envs import Env, GymnasiumEnv, env_maker
from rl8x.envs.parameters import shown_value
from rl8x.envs.vectorised import is_vectorised
from rl8x.rollouts.buffer import Rollout
from rl8x.rollouts.collector import Collector
from rl8x.rollouts.statistics import Stats, collect_stats, parameter_stats, pool
from rl8x.trees import tree_map

OnlineConfigT = TypeVar("OnlineConfigT", bound="OnlineConfig")
EnvLike = str | type[Env] | Env | gymnasium.vector.VectorEnv[Any, Any, Any] | Callable[..., Env]


@dataclasses.dataclass(frozen=True)
class ResetSchedule:
    """When the training environment is reset.

    Attributes:
        every: k > 0 resets it before every k-th collect, k < 0 once, before the first.
    """

    every: int

    @property
    def once(self) -> bool:
        """Whether there is one reset only."""
        return self.every < 0

    @property
    def horizons(self) -> int:
        """Horizons from one reset to the next; 1 where there is one reset only."""
        return max(1, self.every)

    def is_due(self, collects: int) -> bool:
        """Whether the collect after so many begins with a reset."""
        return collects == 0 if self.once else collects % self.every == 0

    def until_due(self, collects: int) -> int:
        """Return how many more collects there are before one that begins with a reset; 0 where there is one only."""
        return 0 if self.once else -collects % self.every


@dataclasses.dataclass(frozen=True, kw_only=True)
class OnlineConfig(AlgorithmConfig):
    """Hyperparameters of every algorithm that has an environment.

    Raises:
        ValueError: If `horizons_per_env_reset` is 0, and as `AlgorithmConfig` does.
    """

    num_envs: int = option(8192, "Copies of the environment, stepped together.", low=1)
    horizon: int = option(32, "Steps taken by each copy in one collect.", low=1)
    horizons_per_env_reset: int | None = option(
        None,
        "k > 0 resets the environment before every k-th collect, k < 0 once at the first. "
        "None: 1 for tasks that never end, -1 for episodic ones.",
    )

    def __post_init__(self) -> None:
        """Check what can be checked without an environment."""
        if self.horizons_per_env_reset == 0:
            raise ValueError(
                "`horizons_per_env_reset` must be positive (every k-th collect) or negative (once); got 0."
            )
        super().__post_init__()

    def build(self, env: EnvLike, **env_kwargs: Any) -> GenericAlgorithmBase[Any]:  # type: ignore[override] # no None
        """Make the environment, check that it fits, and return the algorithm.

        Args:
            env: A class, a factory, a built-in name, a Gymnasium id, a dotted path, an instance, or one of Gymnasium's
                vector environments.
            env_kwargs: Keyword arguments for the environment's constructor, such as `time_limit`.

        Raises:
            TypeError: If what was given makes no environment.
            ValueError: If config, environment and model do not fit together, or there is too little memory.
        """
        return super().build(env, **env_kwargs)

    def rollout_bytes(self, observation: Space | None, action: Space | None) -> int:
        """Return a lower bound of the memory that the experience of one collect takes, in bytes.

        Args:
            observation: Space of one copy's observation; None where it is not known yet.
            action: Space of one copy's action, likewise.
        """
        return self.num_envs * (self.horizon + 1) * slot_bytes(observation, action)

    def make_env(self, env: EnvLike, seed: int, env_kwargs: Mapping[str, Any]) -> tuple[Env, EnvFactory | None]:
        """Make the environment that is asked for, or take the instance that was given.

        Args:
            env: As `build` takes it.
            seed: Seeds the environment.
            env_kwargs: As `build` takes them.

        Returns:
            The environment, and what makes another such with other copies and another seed; None for an instance.

        Raises:
            ValueError: If an instance has another number of copies or lives on another device than the config says, or
                there is too little memory.
            TypeError: If what was given makes no environment.
        """
        device = resolve_device(self.device)
        if not isinstance(env, Env) and is_vectorised(env):
            env = GymnasiumEnv(env, device=device, seed=seed)
        if isinstance(env, Env):
            _check_instance(self, env, device, env_kwargs)
            _check_memory(self, env, device)
            return env, None
        maker = env_maker(env, trust=True)  # a name that a file gave does not come here
        factory = functools.partial(maker, **env_kwargs)
        _check_memory(self, maker, device)
        _check_call(env, factory)
        made = factory(self.num_envs, device=device, seed=seed)
        if not isinstance(made, Env):
            raise TypeError(
                f"{env!r} must make an rl8x Env; it made {type(made).__name__}. Let GymnasiumEnv make the "
                "copies: functools.partial(rl8x.envs.GymnasiumEnv, make_one)."
            )
        _check_memory(self, made, device)
        return made, factory


class OnlineAlgorithm(GenericAlgorithmBase[OnlineConfigT]):
    """An algorithm that steps its policy in an environment.

    Args:
        config: The hyperparameters.
        env: The environment that is trained in.
        seed: The seed in use, also where the config leaves it open.
        env_factory: Makes another such environment; None where an instance was given.

    Attributes:
        collector: Steps the policy in the environment; the subclass makes it.
        resets: When the environment is reset.
    """

    clock: ClassVar[str] = keys.ENV_STEPS

    env: Env
    collector: Collector
    _row: Mapping[str, float] = MappingProxyType({})

    def __init__(self, config: OnlineConfigT, env: Env, seed: int, env_factory: EnvFactory | None = None) -> None:
        super().__init__(config, env, seed, env_factory)
        self.resets = ResetSchedule(config.horizons_per_env_reset or (-1 if env.episodic else 1))

    @abstractmethod
    def collect(self, *, env_config: AnyEnvConfig | None = None) -> Stats:
        """Gather a horizon of experience with the present policy.

        Args:
            env_config: Values for the environment's parameters, applied where a reset is due; or a function of the
                counters, and of the metrics that `follow` was given, that returns such values, which each copy's next
                episode is played under.

        Returns:
            Its statistics, by the names of metrics.

        Raises:
            ValueError: As `reset_if_due` does.
        """

    def finish_collect(self, rollout: Rollout) -> Stats:
        """Count the horizon that a rollout has, and truncate its episodes if a reset follows.

        Args:
            rollout: What was collected, `[horizon + 1, num_envs, ...]`.

        Returns:
            Its statistics, by the names of metrics.
        """
        horizon = self.config.horizon
        self.counters[keys.COLLECTS] += 1
        if self.reset_is_due():
            rollout.truncate()
        valid = rollout.tensors.get(keys.VALID)
        valid = None if valid is None else valid[:horizon]
        ended = (rollout[keys.TERMINATED] | rollout[keys.TRUNCATED])[:horizon]
        self._move_parameters(rollout, ended if valid is None else ended & valid)
        # Only simulators have masked steps, and they run on the host: counting there costs an accelerator no host sync.
        own = self.config.num_envs * horizon
        self.counters[keys.ENV_STEPS] += own * ranks().size if valid is None else int(ranks().sum(valid.sum()))
        stats = collect_stats(
            rollout[keys.REWARDS][:horizon],
            ended,
            rollout[keys.EPISODE_RETURNS][:horizon],
            rollout[keys.EPISODE_LENGTHS][:horizon],
            valid,
            rollout.metrics(),
        )
        return Stats.merge(stats, Stats(parameter_stats(self.env.drawn_parameters, self.env.parameter_ranges())))

    def _move_parameters(self, rollout: Rollout, ended: Tensor) -> None:
        """Have parameters that go by returns move, by where an episode ended, `[horizon, num_envs]`."""
        if self.env.moves_by_returns:
            horizon = self.config.horizon
            self.env.update_parameters_from_episodes(
                ended,
                rollout[keys.EPISODE_RETURNS][:horizon],
                rollout.metrics(),
                rollout.under(keys.SOURCES),
                is_reset=self.reset_is_due(),
            )

    def evaluate(self, *, env_config: Mapping[str, Any] | None = None, deterministic: bool = True) -> Stats:
        """Run the horizons from one reset to the next in the training environment, learning nothing from them.

        Args:
            env_config: Values for the environment's parameters; the next training reset goes back to what was in force
                before. None evaluates under that.
            deterministic: Whether the policy takes its most likely action rather than a sample.

        Returns:
            Statistics of these horizons, by the names of metrics.
        """
        rows: list[Mapping[str, float]] = []
        counts: dict[str, tuple[str, ...]] = {}
        with self.env.evaluating_parameters():
            for _ in range(self.resets.horizons):
                self.reset_if_due(env_config)
                row, gates = self.collector.evaluate(self.config.horizon, deterministic=deterministic).counted()
                rows.append(row)
                counts.update(gates)
                self.counters[keys.COLLECTS] += 1
        return pool(rows, counts)

    def observe_rollout(self, rollout: Rollout) -> None:
        """Have the observation normaliser learn from a horizon, where there is one.

        Args:
            rollout: What was collected, `[horizon + 1, num_envs, ...]`.
        """
        if self.policy.obs_moments is None:
            return
        horizon, valid = self.config.horizon, rollout.tensors.get(keys.VALID)
        obs = tree_map(lambda part: part[:horizon], rollout.tree(keys.OBS))
        self.policy.observe(obs, None if valid is None else valid[:horizon])

    def reset_is_due(self) -> bool:
        """Whether the next collect begins by resetting the environment."""
        return self.resets.is_due(self.counters[keys.COLLECTS])

    def follow(self, row: Mapping[str, float]) -> None:
        """Have the `env_config` of the next collect go by a row of metrics; its counters are known without one."""
        self._row = row

    def reset_if_due(self, env_config: AnyEnvConfig | None) -> bool:
        """Move the environment's parameters to where counters and metrics say, and reset it where that is due.

        Args:
            env_config: As `collect` takes it.

        Returns:
            Whether it was reset.

        Raises:
            ValueError: If a name is unknown or a value out of its bounds, or `env_config` is another than the one in
                force and no reset will ever apply it.
        """
        known = {**self._row, **self.counters}
        is_due = self.reset_is_due()
        if callable(env_config):
            self.env.steer_config(env_config(known))
        elif is_due:
            self.env.configure(env_config)
        self.env.update_parameters_from_metrics(known)
        if is_due:
            self._check_moves()
            self.collector.reset()
            return True
        if not callable(env_config):
            self.check_applies(env_config)
        return False

    def check_applies(self, env_config: Mapping[str, Any] | None) -> None:
        """Refuse an `env_config` that no reset will ever apply, or under which nothing that moves will ever move.

        Args:
            env_config: Values for the environment's parameters; None changes nothing.

        Raises:
            ValueError: If it is another than the one in force, and the environment was reset for the only time; or it
                moves with the returns of episodes, and none ever ends.
        """
        if self.reset_is_due():
            self._check_moves(env_config)
        elif env_config is not None and self.resets.once and self.env.plain_config(env_config) != self.env.config:
            raise ValueError(
                "This `env_config` would never apply: the environment was reset once, at the first collect "
                "(`horizons_per_env_reset` < 0). Give it to the first collect, or use horizons_per_env_reset=1."
            )

    def _check_moves(self, env_config: Mapping[str, Any] | None = None) -> None:
        """Refuse parameters that wait for the ends of episodes where none will come; None: as a reset has them now."""
        if self.resets.once and not self.env.episodic and self.env.will_move_by_returns(env_config):
            raise ValueError(
                "`env_config` moves with the returns of episodes, but none ever ends: the task has no end, and the "
                "environment is reset once (`horizons_per_env_reset` < 0). Use horizons_per_env_reset=1 or more, or "
                "give the environment a `time_limit`."
            )

    def join(self, state: Mapping[str, Any]) -> None:
        """Go on as a new rank: with episodes of its own, in environments as the other rank's are configured."""
        super().join(state)
        env_state = state["collector"]["env"]
        # After an evaluation in the training environment it is the next one.
        following = env_state["next_config"]
        self.env.configure(env_state["config"] if following is None else following)
        self.env.join_moving(env_state)
        self.collector.reset()  # now, so that the configuration is in force where no collect begins with a reset

    def discard_experience(self) -> None:
        """Begin new episodes with the next collect."""
        self.collector.cursor = None

    def state_dict(self) -> dict[str, Any]:
        """Return all that the next collect and step depend on."""
        return {**super().state_dict(), "collector": self.collector.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from where `state_dict` was taken, bit for bit."""
        super().load_state_dict(state)
        self.collector.load_state_dict(state["collector"])

    @property
    def params(self) -> dict[str, Any]:
        """Every hyperparameter by name, and those of the environment."""
        env = self.env
        return {
            **super().params,
            "horizons_per_env_reset": self.resets.every,
            "state_reset_every": self.state_reset_every,
            "env": type(env).__name__,
            "env.time_limit": env.time_limit,
            **({"env.observe_parameters": env.observe_parameters} if env.parameters else {}),
            **flatten_params("env", env.params or {"kwargs": _factory_arguments(self.env_factory)}),
        }

    @property
    def tags(self) -> dict[str, str]:
        """What a run records at its end, by the name of a tag."""
        mode = self.execution.mode if self.collector.stepper.runs_env else f"{self.execution.mode}, environment eager"
        tags = {**super().tags, "rl8x.execution": mode}
        # Some simulators show at their first ended episode that they keep it to themselves.
        if not self.env.gives_final_obs:
            tags["rl8x.final_obs"] = "missing: time limits bootstrap from the observation after the reset"
        present = self.env.present_config()
        tags |= {f"rl8x.env_config.{name}": str(shown_value(present[name])) for name in self.env.moving_names}
        return tags


def _check_memory(config: OnlineConfig, env: Any, device: torch.device) -> None:
    """Refuse what will not fit as early as can be: a class may know its spaces, other makers do not."""
    found = [getattr(env, f"single_{name}_space", None) for name in ("observation", "action")]
    observation, action = (space if isinstance(space, gymnasium.Space) else None for space in found)
    check_training(config.num_envs, config.horizon, device, config.rollout_bytes(observation, action))


def _check_instance(config: OnlineConfig, env: Env, device: torch.device, env_kwargs: Mapping[str, Any]) -> None:
    if env_kwargs:
        names = ", ".join(env_kwargs)
        raise TypeError(
            f"Arguments for the environment's constructor ({names}) need a class or a name, not an instance."
        )
    if env.num_envs != config.num_envs:
        raise ValueError(
            f"`num_envs` is {config.num_envs}, but the environment given has {env.num_envs} copies. Make them equal."
        )
    if env.device.type != device.type:
        raise ValueError(f"`device` is {device}, but the environment given lives on {env.device}. Make them equal.")


def _check_call(env: EnvLike, factory: EnvFactory) -> None:
    """Refuse a function that cannot be called as factories are.

    Raises:
        TypeError: If it cannot; a class says by itself what it lacks.
    """
    if isinstance(env, str) or inspect.isclass(env):
        return
    try:
        inspect.signature(factory).bind(1, device=None, seed=0)
    except TypeError as error:
        raise TypeError(
            f"{env!r} is called with the number of copies, `device=` and `seed=`, to make environments for training "
            f"and evaluations: {error}. Let it pass them on: lambda num_envs, **options: MyEnv(num_envs, **options); "
            "or functools.partial(rl8x.envs.GymnasiumEnv, make_one) for a Gymnasium environment."
        ) from None


def _factory_arguments(factory: EnvFactory | None) -> dict[str, Any]:
    """Return what a factory gives the environment's class, by name, but what has a param of its own."""
    if not isinstance(factory, functools.partial):
        return {}
    signature = inspect.signature(factory.func)
    arguments = dict(signature.bind_partial(*factory.args, **factory.keywords).arguments)
    for name, parameter in signature.parameters.items():
        if parameter.kind is parameter.VAR_KEYWORD:
            arguments |= arguments.pop(name, {})
    for name in ("time_limit", "observe_parameters"):
        arguments.pop(name, None)
    return arguments
