"""What a trainer needs of an algorithm, and what every algorithm shares."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import secrets
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Generic, Self, TypeVar

import gymnasium
import torch
from torch import nn

from rl8x import keys
from rl8x.algorithms.hyperparameters import check_names, check_options, option, resolve_device
from rl8x.algorithms.memory_check import check_training
from rl8x.envs import Env, GymnasiumEnv, env_maker
from rl8x.envs.vector_envs import is_vectorised
from rl8x.policy import Policy
from rl8x.rollouts.statistics import Stats

ConfigT = TypeVar("ConfigT", bound="AlgorithmConfig")
EnvFactory = Callable[..., Env]
EnvLike = str | type[Env] | Env | gymnasium.vector.VectorEnv[Any, Any, Any] | Callable[..., Env]


@dataclasses.dataclass(frozen=True, kw_only=True)
class AlgorithmConfig(ABC):
    """Hyperparameters that every algorithm has."""

    num_envs: int = option(8192, "Copies of the environment, stepped together.", low=1)
    horizon: int = option(32, "Steps taken by each copy in one collect.", low=1)
    horizons_per_env_reset: int | None = option(
        None,
        "k > 0 resets the environment before every k-th collect, k < 0 once at the first. "
        "None: 1 for tasks that never end, -1 for episodic ones.",
    )
    seed: int | None = option(
        None,
        "Makes a run reproducible, bit for bit on one machine. None draws one, which the run's params tell.",
        low=0,
    )
    device: str = option("auto", "Where environment, policy and update live; 'auto' is CUDA where there is one.")
    num_threads: int | None = option(
        None, "CPU threads that torch uses in this process. None leaves torch's own choice.", low=1
    )

    def __new__(cls, **options: Any) -> Self:
        """Refuse names that are no hyperparameters, with the nearest that are."""
        check_names(options, cls)
        return super().__new__(cls)

    def __post_init__(self) -> None:
        """Check every field against its declaration."""
        if self.horizons_per_env_reset == 0:
            raise ValueError(
                "`horizons_per_env_reset` must be positive (every k-th collect) or negative (once); got 0."
            )
        check_options(self)

    @abstractmethod
    def build(self, env: EnvLike, **env_kwargs: Any) -> GenericAlgorithmBase[Any]:
        """Make the environment, check that it fits, and return the algorithm.

        Args:
            env: A class, a factory, a built-in name, a Gymnasium id, a dotted path, an instance, or one of Gymnasium's
                vector environments.
            env_kwargs: Keyword arguments for the environment's constructor, such as `time_limit`.
        """


class GenericAlgorithmBase(ABC, Generic[ConfigT]):
    """Gathers experience with `collect()` and learns from it with `step()`.

    Attributes:
        clock: The counter that metrics are plotted against.
        config: The hyperparameters as given.
        counters: Running totals, by metric name (`keys.COUNTERS`).
        env: The environment that is trained on.
        env_factory: Makes another such environment; None where an instance was given.
        state_reset_every: The policy's state is forgotten every so many steps of a horizon; 0 is never.
        metrics: What a row of `step()` has, by the names under which it is tracked.
        policy: The policy that is trained.
        seed: The seed in use, also where the config left it open.
    """

    clock: ClassVar[str] = keys.ENV_STEPS
    metrics: tuple[str, ...] = ()

    policy: Policy
    state_reset_every: int = 0

    def __init__(self, config: ConfigT, env: Env, seed: int, env_factory: EnvFactory | None = None) -> None:
        self.config = config
        self.env_factory = env_factory
        self.env = env
        self.seed = seed
        self.device = env.device
        self.horizons_per_env_reset = config.horizons_per_env_reset or (-1 if env.episodic else 1)
        self.counters: dict[str, int] = dict.fromkeys(keys.COUNTERS, 0)

    @abstractmethod
    def collect(self, *, env_config: Mapping[str, Any] | None = None) -> Stats:
        """Gather a horizon of experience with the present policy and return its statistics."""

    @abstractmethod
    def step(self) -> Stats:
        """Update the policy with what the last `collect()` gathered and return the update's statistics.

        Raises:
            RuntimeError: If there is nothing fresh to learn from.
        """

    @abstractmethod
    def evaluate(self, *, env_config: Mapping[str, Any] | None = None, deterministic: bool = True) -> Stats:
        """Run `max(1, horizons_per_env_reset)` horizons in the training environment, learning nothing from them.

        Args:
            env_config: Values for the environment's parameters; the next training reset goes back to what was in force
                before. None evaluates under that.
            deterministic: Whether the policy takes its most likely action rather than a sample.
        """

    @abstractmethod
    def validate(self) -> None:
        """Raise `ValueError` where the config, the environment and the policy do not fit together."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Return all that the next step depends on: weights, optimizer, counters, environment, generators."""

    @abstractmethod
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from where `state_dict` was taken, bit for bit."""

    @property
    def params(self) -> dict[str, Any]:
        """Every hyperparameter by name, nested ones with dots, as they are in force."""
        params: dict[str, Any] = {"algorithm": type(self).__name__}
        for field in dataclasses.fields(self.config):
            params.update(flatten_params(field.name, getattr(self.config, field.name)))
        params.update(
            seed=self.seed,
            device=str(self.device),
            horizons_per_env_reset=self.horizons_per_env_reset,
            num_threads=torch.get_num_threads(),
        )
        env = self.env
        params.update({"env": type(env).__name__, "env.time_limit": env.time_limit})
        params.update(flatten_params("env", env.params or {"kwargs": _factory_arguments(self.env_factory)}))
        for part, arguments in self.policy.arguments.items():
            params.update(flatten_params(part, arguments))
        params["model.class"] = qualified_name(type(self.policy.model))
        params["model.num_parameters"] = sum(weights.numel() for weights in self.policy.parameters())
        params["distribution.class"] = qualified_name(type(self.policy.distribution))
        return params

    @property
    def tags(self) -> dict[str, str]:
        """What a run shows of itself by its end, by the name of a tag."""
        # Some simulators show at their first ended episode that they keep it to themselves.
        if self.env.gives_final_obs:
            return {}
        return {"rl8x.final_obs": "missing: time limits bootstrap from the observation after the reset"}

    def watch(self, row: Mapping[str, float]) -> None:
        """Look at a step's row of statistics, now that it is on the host, for what should be warned of."""

    def memory_stats(self) -> dict[str, float]:
        """Say how much device memory torch holds for this process, in MB (10^6 bytes); empty on the CPU."""
        if self.device.type != "cuda":
            return {}
        return {"memory/device_mb": torch.cuda.memory_allocated(self.device) / 1e6}

    def reset_is_due(self) -> bool:
        """Whether the next collect begins by resetting the environment."""
        collects, every = self.counters[keys.COLLECTS], self.horizons_per_env_reset
        return collects == 0 if every < 0 else collects % every == 0


def make_env(
    config: AlgorithmConfig, env: EnvLike, seed: int, env_kwargs: Mapping[str, Any]
) -> tuple[Env, EnvFactory | None]:
    """Make the environment that a config asks for, or take the instance that was given.

    Returns:
        The environment, and what makes another such with other copies and another seed; None for an instance.

    Raises:
        ValueError: If an instance has another number of copies or lives on another device than the config says, or
            there is too little memory.
        TypeError: If what was given makes no environment.
    """
    device = resolve_device(config.device)
    if not isinstance(env, Env) and is_vectorised(env):
        env = GymnasiumEnv(env, device=device, seed=seed)
    if isinstance(env, Env):
        _check_instance(config, env, device, env_kwargs)
        _check_memory(config, env, device)
        return env, None
    maker = env_maker(env, trust=True)  # a name that a file gave does not come here
    factory = functools.partial(maker, **env_kwargs)
    _check_memory(config, maker, device)
    made = factory(config.num_envs, device=device, seed=seed)
    if not isinstance(made, Env):
        raise TypeError(
            f"{env!r} must make an rl8x Env; it made {type(made).__name__}. Let GymnasiumEnv make the "
            "copies: functools.partial(rl8x.envs.GymnasiumEnv, make_one)."
        )
    _check_memory(config, made, device)
    return made, factory


def _check_memory(config: AlgorithmConfig, env: Any, device: torch.device) -> None:
    """Refuse what will not fit as early as can be: a class may know its spaces, other makers do not."""
    found = [getattr(env, f"single_{name}_space", None) for name in ("observation", "action")]
    observation, action = (space if isinstance(space, gymnasium.Space) else None for space in found)
    check_training(config.num_envs, config.horizon, device, observation=observation, action=action)


def _check_instance(config: AlgorithmConfig, env: Env, device: torch.device, env_kwargs: Mapping[str, Any]) -> None:
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


def draw_seed(seed: int | None) -> int:
    """Return the seed given, or draw one."""
    return secrets.randbelow(2**31) if seed is None else seed


def _factory_arguments(factory: EnvFactory | None) -> dict[str, Any]:
    """Return what a factory gives the environment's class, by name; the time limit has a param of its own."""
    if not isinstance(factory, functools.partial):
        return {}
    signature = inspect.signature(factory.func)
    arguments = dict(signature.bind_partial(*factory.args, **factory.keywords).arguments)
    for name, parameter in signature.parameters.items():
        if parameter.kind is parameter.VAR_KEYWORD:
            arguments |= arguments.pop(name, {})
    arguments.pop("time_limit", None)
    return arguments


def flatten_params(name: str, value: Any) -> dict[str, Any]:
    """Spread nested mappings over dotted names; classes and modules become their names."""
    if isinstance(value, Mapping):
        flat: dict[str, Any] = {}
        for key, item in value.items():
            flat.update(flatten_params(f"{name}.{key}", item))
        return flat
    if isinstance(value, type):
        return {name: qualified_name(value)}
    if isinstance(value, nn.Module):
        return {name: qualified_name(type(value))}
    return {name: value}


def qualified_name(cls: type) -> str:
    """Name a class by module and name; built-in parts by their name alone."""
    return cls.__name__ if cls.__module__.startswith("rl8x.") else f"{cls.__module__}.{cls.__qualname__}"
