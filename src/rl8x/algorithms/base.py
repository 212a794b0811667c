"""The base of all algorithms, with or without an environment: the interface that trainers use."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import math
import numbers
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar, Final, Generic, Self, TypeVar

import gymnasium
import torch
from torch import nn

from rl8x import keys
from rl8x.algorithms.horizons import Horizons, locate_non_finite
from rl8x.algorithms.hyperparameters import (
    check_names,
    check_options,
    draw_seed,
    flatten_params,
    ineffective_values,
    option,
    part_seed,
    qualified_name,
    scheduled,
    seeded,
    with_preset,
)
from rl8x.algorithms.memory_check import allocations_refused
from rl8x.algorithms.optimizer import FlatOptimizer, make_rule
from rl8x.distributed import ranks, resolve_device
from rl8x.envs import Env
from rl8x.envs.parameters import AnyEnvConfig
from rl8x.execution import MODES, PRECISIONS, Execution, Mode, Precision
from rl8x.models.base import BUILTIN, TrainingEffects, default_model
from rl8x.output import shown
from rl8x.policy import Policy, check_torch_defaults
from rl8x.rollouts.statistics import Stats
from rl8x.rollouts.step import Rollout
from rl8x.schedules import Schedule
from rl8x.spaces import leaves

ConfigT = TypeVar("ConfigT", bound="AlgorithmConfig")
PolicyT = TypeVar("PolicyT", bound=Policy)
EnvFactory = Callable[..., Env]


def check_algorithm(algorithm: object) -> None:
    """Raise a `TypeError` unless this is an algorithm."""
    if not isinstance(algorithm, GenericAlgorithmBase):
        raise TypeError(f"a trainer needs an algorithm like PPOConfig().build(CartPole); got {shown(algorithm)}.")


def refuse_torch_modes() -> None:
    """Raise where torch makes tensors that cannot change in place later, or computes in another type or place."""
    if torch.is_inference_mode_enabled():
        raise RuntimeError(
            "this builds or trains an algorithm, which torch.inference_mode() does not allow: leave it, or use "
            "torch.no_grad(), which does no harm here."
        )
    if torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"):
        raise RuntimeError(
            "this builds or trains an algorithm, which torch.autocast() would change, in parts that nobody chose: "
            "leave it, and give the config precision='bf16'."
        )
    check_torch_defaults()


# Observations of at least so many numbers count as images: PPO on 84 x 84 x 4 of them, 8 x 128 steps, makes 307
# transitions/s compiled and 314 eager (an Intel Xeon, two threads).
_IMAGE: Final = 2**12

_ONCE: Final = {
    "policy": "load weights into it, algorithm.policy.load_state_dict(other.state_dict())",
    "env": "build another algorithm, config.build(env)",
    "config": "build another algorithm of another config, or resume the run with `overrides`",
}

WITHOUT_VALUES: Final = {name: {"shared": True} for name in BUILTIN}
"""Default arguments of models whose values are not used; they leave out the critic's own layers."""

LR: Final = "coefficients/lr"
"""The metric of the learning rate of a step's updates."""


def eager_seconds(env_steps: float, updates: float, multiplied: float) -> float:
    """Estimate the seconds of an eager step: its operations, and its multiplications at 100 GFLOP/s a thread.

    An operation costs microseconds however small its tensors are: some 50 of them an environment step, 150 a gradient
    and an update, as measured on an Intel Xeon and an AMD Zen 5 to within a factor of two.
    """
    return env_steps * 3e-4 + updates * 1e-3 + multiplied / (1e11 * torch.get_num_threads())


@dataclasses.dataclass(frozen=True, kw_only=True)
class AlgorithmConfig(ABC):  # noqa: B024 - its subclasses are what is built
    """Hyperparameters that every algorithm has.

    A preset is a subclass with other defaults; command line and run files name it like an algorithm:

        @dataclasses.dataclass(frozen=True, kw_only=True)
        class FastTD3Config(TD3Config, defaults={"num_envs": 1024, "tau": 0.1}): ...

    Raises:
        TypeError: If a value is not of its option's kind.
        ValueError: If a name is not an option, a value is out of its range or not finite, or options do not fit
            together.
    """

    algorithm: ClassVar[type[GenericAlgorithmBase[Any]] | None] = None
    """The class that `build` instantiates; set when the algorithm's class is defined."""

    seed: int | None = option(
        None,
        "Seed of the run, a whole number from 0 to 2^63 - 1; equal seeds give equal bits on one machine. None draws "
        "one, which is recorded in the run's params.",
        low=0,
    )
    device: str = option("auto", "Device of environment, policy and update; 'auto' is CUDA if available, else the CPU.")
    num_threads: int | None = option(
        None, "CPU threads of torch in this process. None: torch's own choice.", low=1, high=1024
    )
    execution: Mode = option(
        "auto",
        "How rollout and update run: 'eager', 'compile' (from the first step), 'graph' (CUDA graphs), or 'auto': "
        "graph on CUDA; elsewhere eager at first, compiled in longer runs.",
        choices=MODES,
    )
    precision: Precision = option(
        "fp32",
        "Precision of the policy's matmuls: 'fp32', 'tf32' (CUDA only) or 'bf16' (where the hardware supports it).",
        choices=PRECISIONS,
    )

    def __init_subclass__(cls, *, defaults: Mapping[str, Any] | None = None, **options: Any) -> None:
        """Override defaults of the base class's hyperparameters; ranges and help texts stay."""
        super().__init_subclass__(**options)
        defaults = defaults or {}
        check_names(defaults, cls)
        declared = {field.name: field for field in dataclasses.fields(cls)}
        own = inspect.get_annotations(cls)
        cls.__annotations__ = own | {name: declared[name].type for name in defaults}
        for name, default in defaults.items():
            setattr(cls, name, option(default, **declared[name].metadata))

    def __new__(cls, **options: Any) -> Self:
        """Raise if a name is not a hyperparameter, with suggestions."""
        check_names(options, cls)
        return super().__new__(cls)

    fixed: ClassVar[tuple[str, ...]] = ()
    """Hyperparameters that set the meaning of the networks' outputs, so that a resumed run cannot change them."""

    def __post_init__(self) -> None:
        if isinstance(self.device, torch.device):  # a config is plain data
            object.__setattr__(self, "device", str(self.device))
        check_options(self)
        declared = {field.name: field.metadata for field in dataclasses.fields(self)}
        for name in scheduled(self):
            low, high = max(declared[name]["low"], declared[name]["above"]), declared[name]["high"]
            self.schedule(name).bounded(low, high, f"{name}_schedule")

    @classmethod
    def preset(cls, name: str, /, **given: Any) -> Self:
        """Return the config with the values of a preset; given hyperparameters replace them.

        Args:
            name: A preset in `rl8x.algorithms.hyperparameters.PRESETS`; a `ValueError` if the algorithm lacks it.
            given: Hyperparameters by name.
        """
        return cls(**with_preset(cls, name, given))

    def build(self, env: Any = None, /, **env_kwargs: Any) -> GenericAlgorithmBase[Any]:
        """Return the algorithm, after checking that config and environment fit.

        Args:
            env: The training environment: a class, a factory, a built-in name, a Gymnasium id, a dotted path, an
                instance, or one of Gymnasium's vector environments; None for an algorithm without one.
            env_kwargs: Keyword arguments for the environment's constructor, such as `time_limit`.

        Raises:
            TypeError: If no algorithm declares this class as its `config=`, or it takes no environment.
            ValueError: If config, environment and model do not fit together, or there is too little memory.
            RuntimeError: In `torch.inference_mode()` or `torch.autocast()`.
        """
        refuse_torch_modes()
        if env is None or env is ...:  # beside an environment, `env` is an argument of its constructor
            env = env_kwargs.pop("env", None)
        algorithm, name = self.algorithm, type(self).__name__
        if algorithm is None:
            raise TypeError(
                f"{name} has no algorithm: declare one by `class ...(GenericAlgorithmBase, config={name})`."
            )
        config = self._for_env(env, env_kwargs)
        for given, why in config.without_effect().items():
            warnings.warn(f"`{given}` has no effect: {why}.", RuntimeWarning, stacklevel=3)
        if config.num_threads is not None:
            torch.set_num_threads(config.num_threads)
        seed = draw_seed(config.seed)
        made_env, factory = config.make_env(env, part_seed(seed, "env"), env_kwargs)
        if made_env is not None:
            made_env.parameter_state.shared_seed = part_seed(seed, "parameters", rank=0)
        with allocations_refused(algorithm.__name__, vars(config)):
            return algorithm(config, made_env, seed, factory)

    def _for_env(self, env: Any, env_kwargs: Mapping[str, Any]) -> Self:
        """Return the config for an environment; defaults that the user left alone may change to fit it."""
        return self

    def without_effect(self) -> dict[str, str]:
        """Return the given hyperparameters that have no effect, as `name=value`, each with the reason.

        `build` warns of them. One at its default does not count as given.
        """
        unused: dict[str, str] = {}
        for name in scheduled(self):
            if getattr(self, f"{name}_schedule") is not None and getattr(self, name) != self.schedule(name)(0):
                clear = f"set {name}_schedule=None if a preset sets it"
                unused[name] = f"`{name}_schedule` replaces it. Leave one of them out, or {clear}"
        for field in dataclasses.fields(self):
            if field.metadata and (reason := field.metadata["idle"](self)):
                unused[field.name] = reason
        return ineffective_values(self, unused)

    def schedule(self, name: str) -> Schedule:
        """Return the schedule of a hyperparameter: `<name>_schedule`, or its constant value if that is None.

        Args:
            name: The hyperparameter, such as `lr`.
        """
        schedule = getattr(self, f"{name}_schedule")
        return Schedule.make(getattr(self, name) if schedule is None else schedule, name=f"{name}_schedule")

    def make_env(self, env: Any, seed: int, env_kwargs: Mapping[str, Any]) -> tuple[Env | None, EnvFactory | None]:
        """Return the training environment and a factory of environments like it, or None for both.

        Args:
            env: The environment, in any form that `build` accepts.
            seed: Seeds the environment.
            env_kwargs: Keyword arguments for the environment's constructor.
        """
        if env is not None or env_kwargs:
            raise TypeError(f"{type(self).__name__} trains without an environment; got {env!r}.")
        return None, None


class GenericAlgorithmBase(ABC, Generic[ConfigT]):
    """An algorithm: `collect()` gathers experience, if there is an environment, and `step()` learns.

    A subclass names its config, which then builds it: `class Mine(GenericAlgorithmBase[MyConfig], config=MyConfig)`.
    One with an environment makes `horizons`, by its config's `make_horizons`.

    Args:
        config: The hyperparameters.
        env: The training environment; None without one.
        seed: The seed in use, drawn if the config has none.
        env_factory: Makes another environment of the same kind; None if an instance was given.

    Attributes:
        clock: The counter that metrics are plotted against and schedules depend on.
        counters: Running totals, by metric name (`keys.COUNTERS`).
        device: Device of environment, policy and update.
        execution: Runs the programs.
        horizons: Plays the policy in the environment; None without one.
        metrics: Names of the metrics that `step()` returns, as they are logged.
        observation_space: Space of one observation.
        action_space: Space of one action.
        optimizers: The optimizers of the weights.
        policy: The trained policy.
        schedules: Schedules of hyperparameters, such as `lr`, by name.
        state_reset_every: The recurrent state is reset every so many steps of a horizon; 0: only at episode starts.
    """

    metrics: tuple[str, ...] = ()
    of_rank: ClassVar[tuple[str, ...]] = ()
    """The parts of `learned_state` that differ between ranks, such as generators; all others are equal."""

    trains_by_copy: ClassVar[bool] = False
    """Whether updates ignore the scale of action distributions, so that it may differ between copies."""

    observation_space: gymnasium.Space[Any]
    action_space: gymnasium.Space[Any]
    policy: Policy
    optimizers: Sequence[FlatOptimizer] = ()
    horizons: Horizons | None = None
    state_reset_every: int = 0
    _lr: float | None = None
    _model_draws = False

    def __init_subclass__(cls, *, config: type[AlgorithmConfig] | None = None, **options: Any) -> None:
        """Register this class as the one that a config builds."""
        super().__init_subclass__(**options)
        if config is not None:
            config.algorithm = cls

    def __init__(self, config: ConfigT, env: Env | None, seed: int, env_factory: EnvFactory | None = None) -> None:
        self.config = config
        self.env = env
        if env is not None:
            self.observation_space, self.action_space = env.single_observation_space, env.single_action_space
        self.env_factory = env_factory
        self.seed = seed
        self.device = resolve_device(config.device) if env is None else env.device
        self.execution = Execution(config.execution, config.precision, self.device, waits=config.seed is not None)
        self.schedules = {name: config.schedule(name) for name in scheduled(config)}
        self.counters: dict[str, int] = dict.fromkeys(keys.COUNTERS, 0)
        self.clock = keys.UPDATES if env is None else keys.ENV_STEPS

    def __setattr__(self, name: str, value: Any) -> None:
        """Raise an `AttributeError` if `policy`, `env` or `config` is replaced: other objects would keep the old."""
        if name in _ONCE and name in vars(self):
            raise AttributeError(f"`{name}` of an algorithm cannot be replaced: {_ONCE[name]}.")
        super().__setattr__(name, value)

    def make_ready(self, *, trains: bool = True) -> None:
        """Prepare to act or to learn: set the modes that results depend on, which others may have changed.

        Weights that replaced the policy's own are taken over.

        Args:
            trains: Whether the weights will be trained: frozen ones then raise a `RuntimeError`.
        """
        refuse_torch_modes()
        self.execution.set_precision()
        if self.config.num_threads is not None:
            torch.set_num_threads(self.config.num_threads)
        if self.policy.training or self.policy.model.training:  # a callback has called `policy.train()`
            self.policy.eval()
        for optimizer in self.optimizers:
            optimizer.rejoin(trains=trains)

    # -- building, by a `TrainedConfig`

    def policy_of(
        self, kind: type[PolicyT], defaults: Mapping[str, Mapping[str, Any]] = MappingProxyType({}), **options: Any
    ) -> PolicyT:
        """Return a policy with the config's model, and with its distribution if the config has one.

        Args:
            kind: Class of the policy.
            defaults: Default arguments by model name, for those that `model_config` leaves out.
            options: Further keyword arguments of the class.
        """
        names = ("model", "model_config", "normalize_observations", "distribution", "distribution_config")
        given = {name: getattr(self.config, name) for name in names if hasattr(self.config, name)} | options
        model = default_model(self.observation_space) if given["model"] is None else given["model"]
        own = defaults.get(model, {}) if isinstance(model, str) else {}
        given["model_config"] = {**own, **given["model_config"]}
        return kind(self.observation_space, self.action_space, **given)

    def make_optimizer(self, module: nn.Module) -> FlatOptimizer:
        """Return the config's optimizer of a module's weights, which become views of one vector.

        Args:
            module: The module, on the device.
        """
        config: Any = self.config
        rule = make_rule(config.optimizer, config.optimizer_config)
        return FlatOptimizer(module, rule, lr=self.schedules["lr"](0), max_grad_norm=config.max_grad_norm)

    # -- experience

    def follow(self, row: Mapping[str, float]) -> None:
        """Receive the trainer's latest row of metrics, for the `env_config` of the next collect.

        Args:
            row: Metrics by name.
        """
        if self.horizons is not None:
            self.horizons.row = row

    def collect(self, *, env_config: AnyEnvConfig | None = None) -> Stats:
        """Collect a horizon of experience with the current policy; do nothing without an environment.

        Args:
            env_config: Values for the environment's parameters, applied if a reset is due; a `ValueError` if no reset
                will follow. Or a function that returns such values from the counters and the metrics given to
                `follow`; they apply to each copy's next episode.

        Returns:
            Its statistics by metric name.
        """
        if self.horizons is None:
            return Stats({})
        self.make_ready()
        self.horizons.reset_if_due(env_config)
        self.horizons.collector.fill(self.horizons.rollout)
        return self.horizons.finish()

    def evaluate(self, *, env_config: Mapping[str, Any] | None = None, deterministic: bool = True) -> Stats:
        """Evaluate in the training environment, over the horizons from one reset to the next.

        Args:
            env_config: Values for the environment's parameters in the evaluation; the next training reset restores the
                earlier ones. None evaluates under the earlier ones.
            deterministic: Whether the policy takes its most likely action rather than a sample.

        Returns:
            Statistics of these horizons by metric name.
        """
        self.make_ready(trains=False)
        assert self.horizons is not None, "there is no environment to evaluate in"
        return self.horizons.evaluate(env_config, deterministic=deterministic)

    @property
    def rollout(self) -> Rollout:
        """The last horizon that was collected."""
        assert self.horizons is not None, "there is no environment to collect in"
        return self.horizons.rollout

    @property
    def buffer(self) -> Any:
        """The rollout as a TensorDict of batch size `[num_envs, horizon + 1]`, sharing its memory."""
        return self.rollout.as_tensordict()

    # -- learning

    @abstractmethod
    def step(self) -> Stats:
        """Update the policy; return metrics by name: those under `finite/` are 1 if a quantity is not finite."""

    @property
    def seconds_per_step(self) -> float:
        """Estimated seconds of an eager step on a CPU, computed from its amount of work rather than measured."""
        return 1.0

    def plan_execution(self, steps: float) -> None:
        """Decide when `execution="auto"` switches to programs, by the length of the run.

        Args:
            steps: Number of steps, by the algorithm's counter, at which the run ends; infinite if unbounded.
        """
        # Convolutions over images are nearly all of the work, and call the same torch kernels eagerly and compiled.
        widest = max((math.prod(leaf.shape or ()) for _, leaf in leaves(self.policy.observation_space)), default=0)
        convolves = any(isinstance(part, nn.Conv1d | nn.Conv2d | nn.Conv3d) for part in self.policy.modules())
        gains = not convolves or widest < _IMAGE
        self.execution.plan(self.seconds_per_step, steps, self.counters[keys.STEPS], gains=gains)

    @property
    def prepared(self) -> bool:
        """Whether a step has requested its programs, while `execution="auto"` prepares them."""
        return True

    def prepare(self) -> None:
        """Request the programs of a step before it begins, for a resumed run that needs them at once."""

    def make_generator(self, part: str) -> torch.Generator:
        """Return a generator for a part of the run, on the device, seeded from the run's seed.

        Args:
            part: The part's name; see `hyperparameters.part_seed`.
        """
        return torch.Generator(self.device).manual_seed(part_seed(self.seed, part))

    def set_lr(self, lr: float | None) -> None:
        """Set the learning rate of all optimizers from the next step on; it replaces an adaptive rate.

        Checkpoints keep it; resuming with another `lr` or `lr_schedule` forgets it. With several ranks, call it on all.

        Args:
            lr: The rate, at least 0; None restores the config's. A `ValueError` if the rate follows a schedule.
        """
        if "lr" not in self.schedules:
            raise ValueError(f"{type(self).__name__} has no learning rate that could be set.")
        if lr is not None:
            if isinstance(lr, bool) or not isinstance(lr, numbers.Real):
                raise TypeError(f"the learning rate must be a number; got {lr!r}.")
            if not 0.0 <= lr < math.inf:
                raise ValueError(f"the learning rate must be finite and at least 0; got {lr!r}.")
            if self._has_schedule:
                raise ValueError("the learning rate follows `lr_schedule`, which set_lr would break: use one of them.")
        self._lr = None if lr is None else float(lr)
        # In every mode of execution, updates read the rate from a tensor that each step fills from the schedule.
        self.schedules["lr"] = self.config.schedule("lr") if lr is None else Schedule.make(self._lr)

    @property
    def _has_schedule(self) -> bool:
        return getattr(self.config, "lr_schedule", None) is not None

    # -- models that behave differently in training mode

    def check_model(self, seq_len: int = 1) -> TrainingEffects:
        """Run the policy once; train eagerly if its model draws random numbers or writes buffers in training mode.

        Args:
            seq_len: Length of its training sequences, in steps.

        Returns:
            Side effects of the model in training mode; a `ValueError` if they or the distribution are not supported.
        """
        distribution = self.policy.distribution
        if distribution.by_copy and not self.trains_by_copy:
            raise ValueError(
                f"{type(self).__name__} needs one action distribution for all copies of the environment, but this "
                f"{type(distribution).__name__} differs between them: leave `noise_std_min` out of "
                "`distribution_config`, or use TD3."
            )
        effects = self.policy.check_model(seq_len)
        self._model_draws = effects.draws
        if not any(effects):
            return effects
        name, execution = type(self.policy.model).__name__, self.execution
        does = "draws random numbers (dropout)" if effects.draws else "changes its buffers (batch normalisation)"
        if not execution.falls_back and execution.mode != "eager":
            raise ValueError(
                f"{name} {does} in training mode, which compiled programs do not support: use execution='eager' or "
                "'auto'."
            )
        if effects.writes and ranks().size > 1:
            raise ValueError(
                f"{name} {does} in training mode, which would differ between the {ranks().size} ranks: use layers "
                "without buffers, such as nn.LayerNorm, or one rank."
            )
        execution.fall_back()
        return effects

    def model_draws(self) -> contextlib.AbstractContextManager[None]:
        """Seed torch's global generators from run seed and step within the context, for models that use them."""
        if not self._model_draws:
            return contextlib.nullcontext()
        return seeded(part_seed(self.seed, f"model {self.counters[keys.STEPS]}"), self.device)

    # -- saving

    @abstractmethod
    def learned_state(self) -> dict[str, Any]:
        """Return references to the state that updates change, such as weights, optimizer and running moments.

        The trainer clones it before each step that it may have to undo. Experience belongs to `state_dict` alone.
        """

    @abstractmethod
    def load_learned_state(self, state: Mapping[str, Any]) -> None:
        """Restore the state of `learned_state`, in place; experience and counters stay.

        Args:
            state: What `learned_state` or `state_dict` returned.
        """

    def state_dict(self) -> dict[str, Any]:
        """Return all state that the next collect and step depend on."""
        state = {**self.learned_state(), "counters": dict(self.counters), "lr": self._lr}
        return state if self.horizons is None else state | {"collector": self.horizons.collector.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state of `state_dict`; training continues with the same bits.

        Args:
            state: A `state_dict`.
        """
        self._load_totals(state)
        self.load_learned_state(state)
        if self.horizons is not None:
            self.horizons.collector.load_state_dict(state["collector"])

    def _load_totals(self, state: Mapping[str, Any]) -> None:
        """Restore state outside the learned state: the counters, and the learning rate of `set_lr`."""
        self.counters.update(state["counters"])
        if "lr" in self.schedules and not self._has_schedule:
            self.set_lr(state["lr"])

    def join(self, state: Mapping[str, Any]) -> None:
        """Restore another rank's state on a rank that is new to the run, with episodes of its own.

        Args:
            state: That rank's `state_dict`.
        """
        own = self.learned_state()
        self._load_totals(state)
        self.load_learned_state({**state, **{name: own[name] for name in self.of_rank}})
        if self.horizons is not None:
            self.horizons.join(state["collector"])

    # -- non-finite numbers

    def discard_experience(self) -> None:
        """Discard collected experience with non-finite numbers; the next collect begins new episodes."""
        if self.horizons is not None:
            self.horizons.discard()

    def locate_non_finite(self) -> dict[str, dict[str, Any]]:
        """Locate non-finite numbers in the last experience, by quantity; see `horizons`."""
        horizons = self.horizons
        return {} if horizons is None else locate_non_finite(horizons.rollout.tensors, horizons.env.team)

    # -- params, tags and warnings of a run

    @property
    def params(self) -> dict[str, Any]:
        """Every effective hyperparameter by dotted name."""
        params: dict[str, Any] = {"algorithm": type(self).__name__}
        for field in dataclasses.fields(self.config):
            params.update(flatten_params(field.name, getattr(self.config, field.name)))
        for name, schedule in self.schedules.items():
            if name == "lr" or self.env is not None:
                params[f"{name}_schedule"] = schedule.to_dict()
        params.update(
            seed=self.seed,
            device=str(self.device),
            num_threads=torch.get_num_threads(),
            execution=self.execution.chosen,
        )
        if self.execution.starts_at:
            params["execution.compiled_from"] = self.execution.starts_at
        for part, arguments in self.policy.arguments.items():
            params.update(flatten_params(part, arguments))
        params["model.class"] = qualified_name(type(self.policy.model))
        params["model.num_parameters"] = sum(weights.numel() for weights in self.policy.parameters())
        params["distribution.class"] = qualified_name(type(self.policy.distribution))
        if self.horizons is not None:
            params["horizons_per_env_reset"] = self.horizons.resets.every
            params["state_reset_every"] = self.state_reset_every
            params.update(self.horizons.params(self.env_factory))
        return params

    @property
    def tags(self) -> dict[str, str]:
        """Tags that a run records at its end, by name; the execution mode may have changed since its start."""
        if self.horizons is None:
            return {"rl8x.execution": self.execution.shown_mode}
        whole = self.horizons.collector.stepper.compiles_env or self.execution.mode == "eager"
        mode = self.execution.shown_mode + ("" if whole else ", environment eager")
        return {"rl8x.execution": mode, **self.horizons.tags}

    def watch(self, row: Mapping[str, float]) -> None:
        """Warn if a step's metrics, on the host, show a problem.

        Args:
            row: Metrics by name.
        """
