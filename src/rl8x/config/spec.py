"""The description of a run, its environment, algorithm, trainer and `run()` options, as values that a file can hold."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import functools
import inspect
import os
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, Literal

from rl8x.algorithms import AlgorithmConfig
from rl8x.algorithms.base import GenericAlgorithmBase
from rl8x.algorithms.hyperparameters import (
    check_names,
    check_names_in,
    check_options,
    ineffective_values,
    kind_of,
    option,
    with_preset,
)
from rl8x.algorithms.optimizer import is_adaptive
from rl8x.conditions import Condition, from_spec
from rl8x.conditions.base import as_conditions, named, parts
from rl8x.config.files import (
    ALIASES,
    UNWRITABLE,
    algorithm_config_class,
    apply_overrides,
    hyperparameter_aliases,
    is_unwritable,
    load_run_file,
    one_line,
    renamed,
    restored,
    restored_options,
)
from rl8x.disk import named_path
from rl8x.envs import Env, env_maker
from rl8x.importing import Trust, import_named
from rl8x.names import did_you_mean, name_here
from rl8x.output import shown
from rl8x.plain import frozen, thawed
from rl8x.replay.dataset import Dataset
from rl8x.replay.dataset_files import SPACES, lacks_spaces

if TYPE_CHECKING:
    from rl8x.tracking import Tracker


def default_of(field: dataclasses.Field[Any]) -> Any:
    """Return the default of a hyperparameter; `dataclasses.MISSING` if it has none."""
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Section:
    """Fields of a run file; a value at its default is left out of the file."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            object.__setattr__(self, field.name, _coerced(field, getattr(self, field.name)))
        check_options(self)

    def to_plain(self) -> dict[str, Any]:
        """Return the fields that are not at their defaults."""
        values = {field: getattr(self, field.name) for field in dataclasses.fields(self)}
        changed = {field.name: value for field, value in values.items() if value != default_of(field)}
        return {name: thawed(list(value) if isinstance(value, tuple) else value) for name, value in changed.items()}


@dataclasses.dataclass(frozen=True)
class Checkpoints(_Section):
    """When to save and which checkpoints to keep. A run is also saved at its end and on a signal.

    Raises:
        TypeError: If another value has a wrong type.
        ValueError: If the directory is no path, a number is not positive, or the mode is not legal.
    """

    directory: str | os.PathLike[str] | None = option(
        None,
        "The run's own folder of checkpoints. None: one beside the tracked run, in mlruns/checkpoints. A relative path "
        "is taken from the working directory of now, whatever that is later.",
    )
    every_steps: int | None = option(None, "Save whenever the steps are a multiple of this. None: not by steps.", low=1)
    every_minutes: float | None = option(
        5.0, "Save when so many minutes have passed since the last. None: not by time.", above=0.0
    )
    keep: int = option(3, "How many of the last checkpoints to keep.", low=1)
    best: str | None = option(
        None,
        "A metric, such as eval/returns/mean: whenever it is better than ever, the run is saved, and the best "
        "checkpoint is kept beside the last ones.",
    )
    mode: Literal["max", "min"] = option(
        "max", "Whether the largest (max) or the smallest (min) value of best is best.", choices=("max", "min")
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.directory is not None:
            directory = named_path(self.directory, "Checkpoints: `directory`")
            object.__setattr__(self, "directory", Path(os.path.expanduser(directory)).absolute())


CheckpointsLike = Checkpoints | str | os.PathLike[str] | bool | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class EnvSpec(_Section):
    """The environment and its constructor's arguments."""

    env: str = option("", "A built-in name (`rl8x envs` lists them), a Gymnasium id, or a dotted path to a class.")
    env_kwargs: dict[str, Any] = option({}, "Keyword arguments of the environment's constructor, such as time_limit.")

    def maker(self, trust: Trust = False, *, env: str | None = None) -> Callable[..., Env]:
        """Return the factory of the environment; raise what `env_maker` does.

        Args:
            trust: Which modules names may import; see `RunSpec`.
            env: Another environment's name, to make with the same arguments.
        """
        return env_maker(self.env if env is None else env, restored(self.env_kwargs, trust), trust=trust)


@dataclasses.dataclass(frozen=True, kw_only=True)
class AlgorithmSpec(_Section):
    """The algorithm and the hyperparameters that were given."""

    algorithm: str = option("PPO", "Algorithm: a built-in name or a dotted path to an AlgorithmConfig class.")
    preset: str | None = option(
        None,
        "Other defaults of the algorithm by one word: rl8 (of PPO: rl8's, 8,192 copies in one batch) or gpu (of PPO, "
        "SAC and TD3: many copies, large batches). What algorithm_config has wins.",
    )
    algorithm_config: dict[str, Any] = option({}, "Hyperparameters of the algorithm by name.")
    seed: int | None = option(None, "The algorithm's seed, where algorithm_config has none.", low=0)

    def make_config(self, trust: Trust = False) -> AlgorithmConfig:
        """Make the algorithm's config.

        Args:
            trust: Which modules names may import; see `RunSpec`.

        Raises:
            ValueError: If a hyperparameter is not legal, or `seed` and `algorithm_config` have different seeds.
        """
        cls = algorithm_config_class(self.algorithm, trust)
        values = with_preset(cls, self.preset, restored_options(cls, self.algorithm_config, trust))
        if self.seed is not None and values.setdefault("seed", self.seed) != self.seed:
            raise ValueError(f"`seed` is {self.seed}, but algorithm_config has {values['seed']!r}. Give one of them.")
        try:
            return cls(**values)
        except ValueError as error:  # an illegal value is the user's mistake, even if the config is the user's own
            raise ValueError(str(error)) from error


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainerSpec(_Section):
    """How a trainer evaluates, saves and tracks.

    Raises:
        TypeError: If `eval_env` is not `"auto"`, a boolean, a name or None.
    """

    eval_env: str | bool | None = option(
        "auto",
        "Evaluate whole episodes in an environment of its own (true) or in the training's (false). "
        "auto: an own one for tasks whose episodes end. A name, as in env: in that; learning from data has no other.",
    )
    num_eval_envs: int | None = option(None, "Copies, and so episodes, of an own evaluation environment.", low=1)
    checkpoints: dict[str, Any] = option(
        {},
        "When and where to save, such as {every_steps: 100, every_minutes: 5, keep: 3, best: eval/returns/mean, "
        "directory: ...}. Tracked runs are always saved, every 5 minutes and at the end.",
    )
    on_non_finite: str = option(
        "stop",
        "What happens when numbers are not finite: stop, skip the update, or rollback to the last checkpoint.",
        choices=("stop", "skip", "rollback"),
    )
    log_models: bool = option(
        False, "Whether the run ends with its last and best policy in MLflow as models, for `mlflow models serve`."
    )
    tracking: bool = option(True, "Whether params and metrics are kept in MLflow.")
    tracking_uri: str | None = option(
        None, "MLflow's tracking URI. None: the one set in the process, else mlruns/ in the working directory."
    )
    experiment_name: str | None = option(None, "MLflow experiment. None: the tracker's default.")
    run_name: str | None = option(None, "Name of the run in MLflow. None: one is made up.")
    system_metrics: bool = option(
        False, "Whether processors, memory and GPUs are sampled every 10 seconds, as metrics system/... of the run."
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (self.eval_env is None or isinstance(self.eval_env, str | bool) or is_unwritable(self.eval_env)):
            raise TypeError(f"`eval_env` must be auto, true, false or an environment's name; got {self.eval_env!r}.")

    def make_checkpoints(self) -> Checkpoints | None:
        """Make the options of the checkpoints; None leaves them to the trainer."""
        if not self.checkpoints:
            return None
        check_names_in(self.checkpoints, _names(Checkpoints), "`checkpoints`")
        return Checkpoints(**self.checkpoints)

    def make_tracker(self) -> Tracker:
        """Make the tracker, which keeps params and metrics."""
        from rl8x.tracking import MLflowTracker, NullTracker  # imported late, as `rl8x train --help` needs no MLflow

        if not self.tracking:
            return NullTracker()
        names = ("experiment_name", "run_name", "tracking_uri", "system_metrics")
        chosen: dict[str, Any] = {name: getattr(self, name) for name in names}
        return MLflowTracker(**{name: value for name, value in chosen.items() if value not in (None, False)})


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunOptions(_Section):
    """The options of a `run()`.

    Raises:
        ValueError: If `evals_per_film` is given without `steps_per_eval`.
    """

    env_config: dict[str, Any] | None = option(
        None,
        "Values of the environment's parameters: numbers, or distributions such as {length: {uniform: [0.25, 1]}}. "
        "{}: the defaults. None: no change, which in a new run are the defaults too.",
    )
    eval_env_config: dict[str, Any] | None = option(None, "The same for evaluations. None: as in training.")
    steps_per_eval: int | None = option(None, "An evaluation after every so many steps. None: never.", low=1)
    evals_per_film: int | None = option(
        None, "A film of an episode, kept with the run, after every so many evaluations. None: never.", low=1
    )
    max_steps: int | None = option(None, "The run ends after so many steps at the latest. None: no limit.", low=1)
    stop_conditions: Sequence[Any] = option(
        (),
        "The run ends when one of these is met, such as {plateau: {name: eval/returns/mean, patience: 10}} or "
        "'eval/returns/mean >= 475 and env/steps >= 1e5'.",
    )
    progress: str = option(
        "auto",
        "What is shown while it runs. auto: a bar on a terminal and in a notebook, lines elsewhere.",
        choices=("auto", "bar", "lines", "none"),
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.evals_per_film is not None and self.steps_per_eval is None:
            raise ValueError("`evals_per_film` counts the evaluations of the run: give `steps_per_eval` too.")

    def conditions(self, trust: Trust = False) -> list[Condition]:
        """Make the stop conditions, new ones at each call, since they have a state.

        Args:
            trust: Which modules names may import; see `RunSpec`.

        Raises:
            ValueError: If one is not legal; the message has its index in the list.
        """
        conditions, find = [], functools.partial(import_named, trust=trust)
        for index, spec in enumerate(self.stop_conditions):
            try:
                conditions.append(from_spec(thawed(spec), find=find))
            except (ValueError, TypeError) as error:
                raise ValueError(f"stop_conditions[{index}]: {one_line(error)}.") from None
        return as_conditions(conditions)


SECTIONS: Final[Mapping[str, type[_Section]]] = {
    "env": EnvSpec,
    "algorithm": AlgorithmSpec,
    "run": RunOptions,
    "trainer": TrainerSpec,
}
_OF_A_STUDY: Final = ("train", "test", "test_cells", "seeds", "vary", "trials")
FIELDS: Final = {field.name: field for section in SECTIONS.values() for field in dataclasses.fields(section)}
"""Every key of a run file with its field; no two sections share a key."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunSpec:
    """The description of a run, as values that a file can hold; `Trainer.from_spec` makes its trainer.

    Args:
        trust: Whether names in the spec may import any module, which runs its code, and may be any factory. Without it
            only classes are used, of modules that are already imported or belong to rl8x, torch or Gymnasium. A
            collection lists the trusted names. It is not compared, and not a key of run files.

    Attributes:
        env: The environment and its constructor's arguments.
        algorithm: The algorithm and its hyperparameters.
        trainer: How it is evaluated, saved and tracked.
        run: The options of `run()`.
    """

    env: EnvSpec = dataclasses.field(default_factory=EnvSpec)
    algorithm: AlgorithmSpec = dataclasses.field(default_factory=AlgorithmSpec)
    trainer: TrainerSpec = dataclasses.field(default_factory=TrainerSpec)
    run: RunOptions = dataclasses.field(default_factory=RunOptions)
    trust: Trust = dataclasses.field(default=False, compare=False, repr=False)

    # -- plain data

    @classmethod
    def from_plain(cls, data: Mapping[str, Any], *, trust: Trust = False) -> RunSpec:
        """Make a run from plain data, as in a run file, and check everything that needs no environment.

        Args:
            data: The content of a run file; rl8's names `env_cls`, `model_cls`, ... are accepted.
            trust: Which modules names in the data may import; see the class.

        Raises:
            TypeError: If a value has a wrong type.
            ValueError: If a key or a name is unknown, a value is not legal, or a name may not be imported.
        """
        data = renamed(data)
        hyperparameters = _names(class_named_in(data, trust))
        for name in data:
            if name not in FIELDS:
                raise ValueError(_unknown(name, hyperparameters))
        if isinstance(data.get("algorithm_config"), Mapping):
            data["algorithm_config"] = renamed(data["algorithm_config"], hyperparameter_aliases(hyperparameters))
        return cls.read(data, trust=trust).checked()

    @classmethod
    def from_file(cls, path: str | Path, overrides: Iterable[str] = (), *, trust: Trust = False) -> RunSpec:
        """Read a run file, apply `key=value` overrides, and check the result as `from_plain` does.

        Args:
            path: The file; see `load_run_file`.
            overrides: Texts `key=value` as for `rl8x train`: the key is a dotted path or a hyperparameter, and a number
                replaces the file's schedule of the hyperparameter.
            trust: Which modules names in the file may import; see the class.
        """
        data, overrides = renamed(load_run_file(path)), list(overrides)
        config_class = class_named_in(apply_overrides(data, overrides, ALIASES), trust)
        return cls.from_plain(overridden(data, overrides, config_class), trust=trust)

    @classmethod
    def read(cls, data: Mapping[str, Any], *, trust: Trust = False) -> RunSpec:
        """Make a run from plain data with known keys; check only types and ranges, without imports.

        Args:
            data: The content of a run file, or the `spec` of a checkpoint.
            trust: Which modules names in the data may import; see the class.
        """
        sections: dict[str, Any] = {
            name: section(**{key: data[key] for key in _names(section) if key in data})
            for name, section in SECTIONS.items()
        }
        return cls(**sections, trust=trust)

    def to_plain(self) -> dict[str, Any]:
        """Return the fields that are not at their defaults, as in a run file."""
        return {key: value for name in SECTIONS for key, value in getattr(self, name).to_plain().items()}

    def replace(self, **fields: Any) -> RunSpec:
        """Return a run with other values of some keys, checked as by `from_plain`.

        Args:
            fields: The keys of a run file and their values.
        """
        return RunSpec.from_plain(self.to_plain() | fields, trust=self.trust)

    def diff(self, other: RunSpec) -> dict[str, tuple[Any, Any]]:
        """Return the keys in which another run differs, with this run's value and the other's.

        Each hyperparameter is a separate key, such as `algorithm_config.lr`. `progress` is not compared.

        Args:
            other: The other run.
        """
        here, there = self.to_plain(), other.to_plain()
        for plain in (here, there):
            plain.pop("progress", None)
            plain |= {f"algorithm_config.{name}": value for name, value in plain.pop("algorithm_config", {}).items()}
        names = {**here, **there}
        return {name: (here.get(name), there.get(name)) for name in names if here.get(name) != there.get(name)}

    # -- checking

    @functools.cached_property
    def config(self) -> AlgorithmConfig:
        """The algorithm's config; raises `ValueError` if a hyperparameter is not legal."""
        return self.algorithm.make_config(self.trust)

    @functools.cached_property
    def evaluates(self) -> bool:
        """Whether the run makes evaluations, every `steps_per_eval` or for a stop condition."""
        asked = [part.evaluates for condition in self.run.conditions(self.trust) for part in parts(condition)]
        return any(asked) or self.run.steps_per_eval is not None

    @property
    def params(self) -> dict[str, Any]:
        """The `run()` options as params in MLflow; the algorithm's params have the hyperparameters."""
        shown = [_shown_condition(each, self.trust) for each in self.run.stop_conditions]
        numbers = {f"run.{name}": getattr(self.run, name) for name in ("steps_per_eval", "evals_per_film", "max_steps")}
        return {**numbers, "run.stop_conditions": shown}

    def checked(self) -> RunSpec:
        """Return the run with whole numbers coerced; raise if a part that needs no environment is not legal."""
        from rl8x.tracking.secrets import find_hidden

        hideable = {"env_kwargs": self.env.env_kwargs, "algorithm_config": self.algorithm.algorithm_config}
        for hidden in filter(None, (find_hidden(values, name) for name, values in hideable.items())):
            raise ValueError(f"`{hidden}` has `***` where its password was: write that in again.")
        cls = algorithm_config_class(self.algorithm.algorithm, self.trust)
        # Algorithms that learn from data alone need no environment.
        needed = inspect.signature(cls.build).parameters.get("env")
        if not self.env.env and (needed is None or needed.default is not None):
            raise ValueError("no environment is named: give `env`, such as CartPole (`rl8x envs` lists them).")
        self.trainer.make_checkpoints()
        given = self.algorithm.algorithm_config
        check_names(given, cls)
        # A float such as `1e6` becomes an integer if the hyperparameter is one.
        fields = (field for field in dataclasses.fields(cls) if field.name in given)
        coerced = {field.name: _coerced(field, given[field.name]) for field in fields}
        algorithm = dataclasses.replace(self.algorithm, algorithm_config=frozen({**given, **coerced}))
        spec = dataclasses.replace(self, algorithm=algorithm)
        _ = spec.evaluates, spec.config  # checks them, and caches them for making the run
        return spec

    def without_effect(self) -> dict[str, str]:
        """Return the keys that are not at their defaults but have no effect, as `key=value`, with the reasons."""
        unused: dict[str, str] = {}
        if not self.evaluates:
            why = "the run makes no evaluations. Give steps_per_eval, such as 10, or leave it out"
            unused |= ineffective_values(self.run, {"eval_env_config": why})
            unused |= ineffective_values(self.trainer, {"num_eval_envs": why})
        if not self.trainer.tracking:
            why = "the run is not tracked. Leave it out, or have the run tracked in MLflow: tracking=true"
            unused |= ineffective_values(self.trainer, {"log_models": why})
        return unused

    # -- making

    def make_algorithm(self) -> GenericAlgorithmBase[Any]:
        """Build the environment, if there is one, and the algorithm; raise `ValueError` if they do not fit."""
        return self.build(self.config, self.env.maker(self.trust) if self.env.env else None)

    def build(self, config: AlgorithmConfig, maker: Callable[..., Env] | None) -> GenericAlgorithmBase[Any]:
        """Build the algorithm of a config, with its environment or from its data set.

        Args:
            config: The config, whose `build` may raise `ValueError`.
            maker: The factory of the environment; None without an environment.
        """
        build: Callable[..., GenericAlgorithmBase[Any]] = config.build
        if maker is not None:
            return build(maker)
        dataset = self._dataset_with_spaces(config)
        return build() if dataset is None else build(dataset=dataset)

    def _dataset_with_spaces(self, config: AlgorithmConfig) -> Dataset | None:
        """Load a data set that lacks spaces, with those of the evaluation environment; else return None."""
        path, evaluated_in = getattr(config, "dataset", None), self.trainer.eval_env
        if not isinstance(path, str) or not lacks_spaces(Path(path)):
            return None
        if not isinstance(evaluated_in, str) or evaluated_in == "auto":
            raise ValueError(
                f"the data set {path!r} does not say what its spaces are: name the environment that it was recorded in "
                "as `eval_env`, such as Pendulum (--eval-env on the command line), or in Python give a "
                "Dataset.load(path, observation_space=..., action_space=...)."
            )
        env = env_maker(evaluated_in, trust=self.trust)(1, device="cpu", seed=0)
        try:
            spaces = {name: getattr(env, f"single_{name}") for name in SPACES}
        finally:
            env.close()
        return Dataset.load(path, **spaces)


def _shown_condition(spec: Any, trust: Trust) -> str:
    """Return the repr of a stop condition; its plain data if its class cannot be imported, as from a script."""
    if is_unwritable(spec):
        return str(spec[UNWRITABLE])
    with contextlib.suppress(ValueError, TypeError):
        return named(from_spec(thawed(spec), find=functools.partial(import_named, trust=trust)))
    return str(thawed(spec))


def _unknown(name: str, hyperparameters: Collection[str]) -> str:
    """Return the message for an unknown key, with its likely meaning."""
    if name in _OF_A_STUDY:
        return f"unknown key {name!r}: it is one of a study, which `rl8x study -f FILE` runs."
    here = name_here(name, hyperparameters)
    if name in hyperparameters or (here is not None and name_here(name, FIELDS) is None):
        meant = "a hyperparameter" if name in hyperparameters else f"{here!r} here"
        return f"unknown key {name!r}: it is {meant}. Put it under `algorithm_config`."
    return f"unknown key {shown(name)}.{did_you_mean(name, FIELDS)} Legal are {', '.join(FIELDS)}."


def _names(cls: Any) -> list[str]:
    return [field.name for field in dataclasses.fields(cls)]


def under_algorithm(override: str, cls: type[AlgorithmConfig]) -> str:
    """Prefix an override of a hyperparameter, such as `lr=3e-4`, by `algorithm_config.`; others stay unchanged."""
    name = re.split(r"[.=]", override, maxsplit=1)[0].strip()
    of_run = {*FIELDS, *ALIASES}
    hyperparameters = {*_names(cls), *hyperparameter_aliases(_names(cls))} - of_run
    near = [] if name in of_run else difflib.get_close_matches(name, of_run | hyperparameters, n=1)
    return f"algorithm_config.{override}" if near and near[0] in hyperparameters else override


def class_named_in(data: Mapping[str, Any], trust: Trust) -> type[AlgorithmConfig]:
    """Return the config class of the algorithm that a run's data names, else of the default algorithm."""
    named = data.get("algorithm")
    return algorithm_config_class(named if isinstance(named, str) else AlgorithmSpec.algorithm, trust)


def without_schedules(data: Mapping[str, Any], numbers: Iterable[str]) -> dict[str, Any]:
    """Return a run's data without the schedules of hyperparameters in `numbers`, except adaptive schedules."""
    given = data.get("algorithm_config")
    if not isinstance(given, Mapping):
        return dict(data)
    replaced = {f"{name}_schedule" for name in numbers} & given.keys()
    constant = dict.fromkeys(name for name in replaced if not is_adaptive(given[name]))
    return {**data, "algorithm_config": {**given, **constant}}


def overridden(
    data: Mapping[str, Any],
    words: Iterable[str],
    config_class: type[AlgorithmConfig],
    hyperparameters: Mapping[str, Any] = MappingProxyType({}),
) -> dict[str, Any]:
    """Return a run's data with `key=value` words and then hyperparameters applied; numbers replace schedules."""
    words = [under_algorithm(word, config_class) for word in words]
    given = apply_overrides({}, words, ALIASES).get("algorithm_config")
    numbers = {*(given if isinstance(given, Mapping) else ()), *hyperparameters}
    data = apply_overrides(without_schedules(data, numbers), words, ALIASES)
    inner = data.get("algorithm_config") or {}
    if hyperparameters and isinstance(inner, Mapping):
        data["algorithm_config"] = {**inner, **hyperparameters}
    if "seed" in hyperparameters:
        data.pop("seed", None)
    return data


def _coerced(field: dataclasses.Field[Any], value: Any) -> Any:
    """Check a value's type where `check_options` does not, and return floats such as `1e6` as integers if needed."""
    if is_unwritable(value):
        return value
    kinds = kind_of(field)
    optional = field.default is None or kinds.endswith("None")
    if value is None and not optional:
        # A key without a value, such as `env_kwargs:`, is an empty mapping or list.
        if field.default_factory is not dataclasses.MISSING:
            return field.default_factory()
        if field.default != ():
            raise TypeError(f"`{field.name}` must have a value; got none.")
        return ()
    if kinds.startswith("int") and isinstance(value, float) and value.is_integer():
        return int(value)
    if kinds in ("str", "str | None") and value is not None and not isinstance(value, str):
        raise TypeError(f"`{field.name}` must be a text; got {shown(value)}. Put it in quotes.")
    if kinds.startswith("Sequence"):
        return tuple(value) if isinstance(value, list | tuple) else (value,)
    return value
