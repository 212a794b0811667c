"""Hyperparameters that algorithms share: of training a model, of its policy, and of an environment, which they make."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from types import EllipsisType
from typing import Any, ClassVar, Final, Self

import gymnasium
import torch
from torch import Tensor

from rl8x.algorithms.base import AlgorithmConfig, EnvFactory, GenericAlgorithmBase
from rl8x.algorithms.horizons import Horizons, ResetSchedule
from rl8x.algorithms.hyperparameters import Default, option, part_seed
from rl8x.algorithms.memory_check import Space, check_training, slot_bytes
from rl8x.algorithms.optimizer import OPTIMIZERS, make_rule
from rl8x.distributed import ranks, resolve_device
from rl8x.distributions import Distribution
from rl8x.envs import Env, GymnasiumEnv, env_maker
from rl8x.envs.checks import is_vectorised
from rl8x.envs.registry import steps_one_by_one
from rl8x.envs.team import Team
from rl8x.models import Model
from rl8x.output import say
from rl8x.policy import Policy
from rl8x.rollouts.collector import Collector
from rl8x.rollouts.statistics import Stats, rollout_stats
from rl8x.rollouts.step import Bootstrap, Rollout, Slot, experience

# Default number of copies of a simulator that is stepped copy by copy.
_ONE_BY_ONE: Final = 16

EnvLike = str | type[Env] | Env | gymnasium.vector.VectorEnv[Any, Any, Any] | Callable[..., Env]


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainedConfig(AlgorithmConfig):
    """Hyperparameters of every algorithm that trains a model by gradients."""

    model: str | type[Model] | Model | None = option(
        None,
        "Network: 'mlp', 'cnn', of algorithms that learn from rollouts also 'lstm', 'gru' or 'attention'; a dotted "
        "path to a Model class, a class, or an instance, a copy of which is trained from its weights. None: 'cnn' for "
        "images, else 'mlp'.",
    )
    model_config: dict[str, Any] = option({}, "Keyword arguments of the model class, such as hidden_sizes=[64, 64].")
    lr: float = option(3e-4, "Learning rate of the optimizers.", above=0.0)
    lr_schedule: list[list[float]] | dict[str, Any] | None = option(
        None,
        "Learning rate over transitions, or over updates when learning from a data set: [[transitions, value], ...], "
        "constant between points, or {kind: interp, points: [...]}, linear between them.",
    )
    optimizer: str = option("adam", "Optimizer of the weights.", choices=tuple(OPTIMIZERS))
    optimizer_config: dict[str, Any] = option({}, "Keyword arguments of the optimizer, such as eps or weight_decay.")
    max_grad_norm: float | None = option(
        None, "Gradients of each network are clipped to this L2 norm over its weights. None: no clipping.", above=0.0
    )
    normalize_observations: bool = option(
        False,
        "Whether to normalise observations by their mean and standard deviation. A replay stores them unnormalised.",
    )

    separates: ClassVar[bool] = False
    """Whether agents of an environment may have weights of their own."""

    def __post_init__(self) -> None:
        super().__post_init__()
        separate = self.model_config.get("separate", False)
        if separate and not self.separates:
            raise ValueError(
                f"`model_config.separate` is for PPO; {type(self).__name__} has one policy for all agents."
            )
        if not isinstance(separate, bool):
            raise ValueError(f"`model_config.separate` must be true or false; got {separate!r}.")
        make_rule(self.optimizer, self.optimizer_config)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PolicyConfig(TrainedConfig):
    """Hyperparameters of every algorithm whose policy may have any distribution."""

    distribution: str | type[Distribution] | None = option(
        None, "Action distribution: a built-in name, a dotted path, or a class. None: chosen by the action space."
    )
    distribution_config: dict[str, Any] = option({}, "Keyword arguments of the distribution class.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class OnlineConfig(AlgorithmConfig):
    """Hyperparameters of every algorithm that has an environment."""

    num_envs: int = option(
        Default(32),
        "Parallel copies of the environment, stepped as one batch. Where it is not given: 16 of a simulator that is "
        "stepped copy by copy, as many as an instance has.",
        low=1,
    )
    horizon: int = option(32, "Environment steps of each copy in one rollout.", low=1)
    horizons_per_env_reset: int | None = option(
        None,
        "k > 0: reset the environment before every k-th rollout; k < 0: only before the first. None: 1 for tasks "
        "that never end, -1 for episodic ones.",
    )
    random_start: bool = option(
        False,
        "Whether each copy's first episode counts as begun at a random time of its time limit, so that copies do not "
        "reach it all at once. These shortened episodes are left out of the statistics of episodes.",
    )

    resets_once: ClassVar[bool] = False
    """Whether the environment is by default reset only before the first rollout, even if it never ends."""

    def __post_init__(self) -> None:
        if self.horizons_per_env_reset == 0:
            raise ValueError(
                "`horizons_per_env_reset` must be positive (every k-th collect) or negative (once); got 0."
            )
        super().__post_init__()

    def build(self, env: EnvLike | EllipsisType = ..., /, **env_kwargs: Any) -> GenericAlgorithmBase[Any]:
        """Make the environment, check that it fits, and return the algorithm; see `AlgorithmConfig.build`."""
        return super().build(env, **env_kwargs)

    def _for_env(self, env: EnvLike | None, env_kwargs: Mapping[str, Any]) -> Self:
        """Return the config with a default `num_envs` changed to fit the environment; a given one stays."""
        if not isinstance(self.num_envs, Default) or env is None:
            return self
        known: Any = env
        if not isinstance(env, Env) and not is_vectorised(env):
            maker = env_maker(env, env_kwargs, trust=True)
            known = maker.args[0] if maker.args else maker.func
            if not is_vectorised(known) and not steps_one_by_one(maker):
                return self
        copies = getattr(known, "num_copies", known.num_envs) if is_vectorised(known) else _ONE_BY_ONE
        return dataclasses.replace(self, num_envs=Default(copies))

    def make_horizons(
        self,
        algorithm: GenericAlgorithmBase[Any],
        policy: Policy,
        *,
        slot: Slot = experience,
        bootstrap: Bootstrap | None = None,
        state_every: int | None = None,
        summarise: Callable[[Mapping[str, Tensor], int, Team | None], Stats] = rollout_stats,
    ) -> Horizons:
        """Return the horizons that a policy plays in an algorithm's environment.

        Args:
            algorithm: The algorithm.
            policy: The policy that acts.
            slot: Returns the tensors of a step that a rollout keeps.
            bootstrap: Computes values of the observations at which time limits truncate episodes.
            state_every: Steps between two stored states of the policy; None: the rollout stores only the first.
            summarise: Returns the statistics of a rollout's tensors, `[horizon + 1, num_envs, ...]`, given the horizon
                and the environment's team.
        """
        env, reset_every = algorithm.env, algorithm.state_reset_every
        assert env is not None
        options: Any = {"slot": slot, "bootstrap": bootstrap, "state_reset_every": reset_every}
        return Horizons(
            Collector(env, policy, algorithm.make_generator("sampling"), algorithm.execution, **options),
            Rollout(self.horizon, env.num_envs, state_every=state_every),
            algorithm.counters,
            ResetSchedule(self.horizons_per_env_reset or (-1 if env.episodic or self.resets_once else 1)),
            start_seed=part_seed(algorithm.seed, "start times") if self.random_start else None,
            summarise=summarise,
        )

    def rollout_bytes(self, observation: Space | None, action: Space | None) -> int:
        """Return a lower bound of the memory that one rollout takes, in bytes.

        Args:
            observation: Space of one copy's observation; None where it is not known yet.
            action: Space of one copy's action, likewise.
        """
        return self.num_envs * (self.horizon + 1) * slot_bytes(observation, action)

    def make_env(self, env: EnvLike, seed: int, env_kwargs: Mapping[str, Any]) -> tuple[Env, EnvFactory | None]:
        """Make the environment, or check the given instance; return it and a factory, None for an instance."""
        device = resolve_device(self.device)
        if not isinstance(env, Env) and is_vectorised(env):
            env = GymnasiumEnv(env, device=device, seed=seed)
        if isinstance(env, Env):
            _check_instance(self, env, device, env_kwargs)
            check_training(self, env, device)
            return env, None
        factory = env_maker(env, env_kwargs, trust=True)  # names from files never get here
        check_training(self, factory.func, device)
        made_env = factory(self.num_envs, device=device, seed=seed)
        check_training(self, made_env, device)
        if isinstance(self.num_envs, Default) and steps_one_by_one(factory) and ranks().is_first:
            name = next((word for word in (env, *factory.args) if isinstance(word, str)), type(made_env).__name__)
            copies = f"{self.num_envs} copies, as `num_envs` was not given"
            say(f"rl8x: {name} is stepped copy by copy: {copies}", err=True)
        return made_env, factory


def _check_instance(config: OnlineConfig, env: Env, device: torch.device, env_kwargs: Mapping[str, Any]) -> None:
    if env_kwargs:
        names = ", ".join(env_kwargs)
        raise TypeError(
            f"Arguments for the environment's constructor ({names}) need a class or a name, not an instance."
        )
    if env.num_copies != config.num_envs:
        raise ValueError(
            f"`num_envs` is {config.num_envs}, but the environment given has {env.num_copies} copies. Make them equal."
        )
    if env.device.type != device.type:
        raise ValueError(f"`device` is {device}, but the environment given lives on {env.device}. Make them equal.")
