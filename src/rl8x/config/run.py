"""The config of a training run: read from a run file or the command line, built into a trainer."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import inspect
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Final

from rl8x.algorithms import AlgorithmConfig
from rl8x.algorithms.hyperparameters import check_names as check_hyperparameters
from rl8x.algorithms.hyperparameters import check_names_in, check_options, given_for_nothing, kind_of, option
from rl8x.algorithms.presets import with_preset
from rl8x.conditions import Condition, as_conditions, from_spec, parts
from rl8x.config.algorithms import algorithm_config_class
from rl8x.config.files import apply_overrides, load_run_file, one_line, shortened
from rl8x.envs import Env, env_maker
from rl8x.frozen import frozen, thawed
from rl8x.importing import Trust, import_named
from rl8x.names import did_you_mean
from rl8x.replay.dataset import Dataset
from rl8x.replay.dataset_files import SPACES, lacks_spaces
from rl8x.synonyms import name_here

if TYPE_CHECKING:
    from rl8x.algorithms.base import GenericAlgorithmBase
    from rl8x.checkpoint import Checkpoints
    from rl8x.trainers import Trainer, TrainStats

# rl8's names for the same
ALIASES: Final = {"env_cls": "env", "algorithm_cls": "algorithm", "algorithm_config_cls": "algorithm"}
# What the algorithm gives the environment that it makes, from hyperparameters of the same names.
_GIVEN_BY_ALGORITHM: Final = ("num_envs", "device", "seed")
_HYPERPARAMETER_ALIASES: Final = {"model_cls": "model", "distribution_cls": "distribution"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunConfig:
    """A training run.

    Args:
        trust: No part of it, and no key of a run file: whether what is named here may import any module, whose code
            then runs, and be any factory. Without it only classes are used, of modules that are imported already or are
            rl8x's, torch's or Gymnasium's own. A collection lists the names that are trusted.

    Attributes:
        trusted: The value of `trust`.

    Raises:
        TypeError: If a value is of another kind.
        ValueError: If a value is out of its range, or a name is unknown or may not be imported; of hyperparameters,
            checkpoints and stop conditions too. The environment is not made for that.
    """

    trust: dataclasses.InitVar[Trust] = False
    trusted: ClassVar[Trust] = False

    env: str = option(
        "", "Environment: a built-in name (`rl8x envs` lists them), a Gymnasium id, or a dotted path to a class."
    )
    env_kwargs: dict[str, Any] = option({}, "Keyword arguments of the environment's constructor, such as time_limit.")
    env_config: dict[str, Any] | None = option(
        None,
        "Values of the environment's parameters: numbers, or distributions such as {length: {uniform: [0.25, 1]}}. "
        "{}: the defaults. None: no change, which in a new run are the defaults too.",
    )
    eval_env_config: dict[str, Any] | None = option(None, "The same for evaluations. None: as in training.")
    algorithm: str = option("PPO", "Algorithm: a built-in name or a dotted path to an AlgorithmConfig class.")
    preset: str | None = option(
        None,
        "Other defaults of the algorithm by one word: rl8 (of PPO: rl8's, 8,192 copies in one batch) or gpu (of PPO, "
        "SAC and TD3: many copies, large batches). What algorithm_config has wins.",
    )
    algorithm_config: dict[str, Any] = option({}, "Hyperparameters of the algorithm by name.")
    seed: int | None = option(None, "The algorithm's seed, where algorithm_config has none.", low=0)
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
    eval_env: str | bool = option(
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
    progress: str = option(
        "auto",
        "What is shown while it runs. auto: a bar on a terminal and in a notebook, lines elsewhere.",
        choices=("auto", "bar", "lines", "none"),
    )

    def __post_init__(self, trust: Trust) -> None:
        """Check everything that can be checked without building the environment."""
        from rl8x.tracking.secrets import find_hidden

        object.__setattr__(self, "trusted", trust)
        for field in dataclasses.fields(self):
            object.__setattr__(self, field.name, _coerced(field, getattr(self, field.name)))
        check_options(self)
        if not isinstance(self.eval_env, str | bool):
            raise TypeError(f"`eval_env` must be auto, true, false or an environment's name; got {self.eval_env!r}.")
        for name in ("env_kwargs", "algorithm_config"):
            hidden = find_hidden(getattr(self, name), name)
            if hidden is not None:
                raise ValueError(f"`{hidden}` has `***` where its password was: write that in again.")
        cls = algorithm_config_class(self.algorithm, trust)
        if not self.env and _needs_env(cls):
            raise ValueError("no environment is named: give `env`, such as CartPole (`rl8x envs` lists them).")
        self.conditions()
        self.make_checkpoints()
        check_hyperparameters(self.algorithm_config, cls)
        coerced = {
            field.name: _coerced(field, self.algorithm_config[field.name])
            for field in dataclasses.fields(cls)
            if field.name in self.algorithm_config
        }
        object.__setattr__(self, "algorithm_config", frozen({**self.algorithm_config, **coerced}))
        self.make_algorithm_config()

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], *, trust: Trust = False) -> RunConfig:
        """Make a run's config from plain data; rl8's names `env_cls`, `model_cls`, ... are understood.

        Args:
            data: The content of a run file.
            trust: Which modules names in the data may import; see the class.

        Raises:
            ValueError: If a key is unknown or a value is not legal.
            TypeError: If a value is of the wrong type.
        """
        data = renamed(data)
        algorithm = data.get("algorithm", cls.algorithm)
        hyperparameters = _names(algorithm_config_class(algorithm, trust)) if isinstance(algorithm, str) else []
        names = _names(cls)
        for name in data:
            if name not in names and name in hyperparameters:
                raise ValueError(f"unknown key {name!r}: it is a hyperparameter. Put it under `algorithm_config`.")
            if name not in names:
                here = name_here(name, hyperparameters)
                if here is not None and name_here(name, names) is None:
                    raise ValueError(f"unknown key {name!r}: it is {here!r} here. Put it under `algorithm_config`.")
                hint = did_you_mean(name, names)
                raise ValueError(f"unknown key {shortened(name)}.{hint} Legal are {', '.join(names)}.")
        if isinstance(data.get("algorithm_config"), Mapping):
            data["algorithm_config"] = renamed(data["algorithm_config"], _aliases_of(hyperparameters))
        return cls(**data, trust=trust)

    @classmethod
    def from_file(cls, path: str | Path, overrides: Iterable[str] = (), *, trust: Trust = False) -> RunConfig:
        """Read a run file, put `key=value` overrides in, and check the result.

        Args:
            path: The file; see `load_run_file`.
            overrides: Texts `key=value`, with a dotted path as the key, such as `algorithm_config.lr=3e-4`.
            trust: Which modules names in the file may import; see the class.

        Raises:
            ValueError: If the file cannot be read, a key is unknown, or a value is not legal.
            TypeError: If a value is of the wrong type.
        """
        return cls.from_dict(apply_overrides(renamed(load_run_file(path)), overrides, ALIASES), trust=trust)

    def to_dict(self) -> dict[str, Any]:
        """Return the fields that are not at their defaults; `from_dict` makes the same config of them."""
        changed = {}
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            factory = field.default_factory
            if value != (field.default if factory is dataclasses.MISSING else factory()):
                changed[field.name] = thawed(list(value) if isinstance(value, tuple) else value)
        return changed

    def without_effect(self) -> dict[str, str]:
        """Return the given keys that have no effect, as `key=value`, each with the reason; `rl8x train` warns of them.

        One at its default does not count as given.
        """
        asked = any(part.evaluates for condition in self.conditions() for part in parts(condition))
        names = () if asked or self.steps_per_eval is not None else ("eval_env_config", "num_eval_envs")
        why = "the run makes no evaluations. Give steps_per_eval, such as 10, or leave it out"
        untracked = () if self.tracking else ("log_models",)
        return given_for_nothing(self, names, why) | given_for_nothing(
            self, untracked, "the run is not tracked. Leave it out, or have the run tracked in MLflow: tracking=true"
        )

    def conditions(self) -> list[Condition]:
        """Make the stop conditions, anew at each call, since they remember what they saw.

        Raises:
            ValueError: If one is not legal; the message has its place in the list.
        """
        conditions, find = [], functools.partial(import_named, trust=self.trusted)
        for index, spec in enumerate(self.stop_conditions):
            try:
                conditions.append(from_spec(thawed(spec), find=find))
            except (ValueError, TypeError) as error:
                raise ValueError(f"stop_conditions[{index}]: {one_line(error)}.") from None
        return as_conditions(conditions)

    def make_algorithm_config(self) -> AlgorithmConfig:
        """Make the algorithm's config of its hyperparameters.

        Raises:
            ValueError: If a hyperparameter is not legal, or both this and that have a seed.
        """
        cls = algorithm_config_class(self.algorithm, self.trusted)
        from rl8x.checkpoint.build import restored_options

        values = with_preset(cls, self.preset, restored_options(cls, self.algorithm_config, self.trusted))
        if self.seed is not None and values.setdefault("seed", self.seed) != self.seed:
            raise ValueError(
                f"`seed` is {self.seed}, but algorithm_config has {values['seed']!r}. Give one of the two."
            )
        try:
            return cls(**values)
        except ValueError as error:  # what a config refuses is the user's mistake, whoever wrote the config
            raise ValueError(str(error)) from error

    def make_checkpoints(self) -> Checkpoints | None:
        """Make the options of the checkpoints; None leaves them to the trainer."""
        if not self.checkpoints:
            return None
        from rl8x.checkpoint import Checkpoints

        check_names_in(self.checkpoints, _names(Checkpoints), "`checkpoints`")
        return Checkpoints(**self.checkpoints)

    def make_algorithm(self) -> GenericAlgorithmBase[Any]:
        """Build the environment, where there is one, and the algorithm.

        Raises:
            ValueError: If `env_kwargs` are not the environment's, or the config's `build` refuses the environment.
        """
        config = self.make_algorithm_config()
        build: Callable[..., GenericAlgorithmBase[Any]] = config.build
        if not self.env:
            dataset = self._dataset_with_spaces(config)
            return build() if dataset is None else build(dataset=dataset)
        return build(self.find_env(self.env))

    def find_env(self, env: str) -> Callable[..., Env]:
        """Return what makes the environments of a name with `env_kwargs`, once these are known to be theirs.

        Args:
            env: The name, as a run file has it.

        Raises:
            ValueError: If there are none of the name, or they do not take `env_kwargs`.
        """
        from rl8x.checkpoint.build import restored

        for name in _GIVEN_BY_ALGORITHM:
            if name in self.env_kwargs:
                raise ValueError(f"env_kwargs: `{name}` is a hyperparameter. Put it under `algorithm_config`.")
        maker = env_maker(env, restored(self.env_kwargs, self.trusted), trust=self.trusted)
        signature = inspect.signature(maker.func)
        try:
            signature.bind(*maker.args, 1, device="cpu", seed=0, **maker.keywords)
        except TypeError as error:
            raise ValueError(f"env_kwargs: {env} takes {', '.join(signature.parameters)}; {error}.") from None
        return maker

    def _dataset_with_spaces(self, config: AlgorithmConfig) -> Dataset | None:
        """Read a data set that does not say its spaces with those of the environment to evaluate in; None elsewhere."""
        path = getattr(config, "dataset", None)
        if not isinstance(path, str) or not lacks_spaces(Path(path)):
            return None
        if not isinstance(self.eval_env, str) or self.eval_env == "auto":
            raise ValueError(
                f"the data set {path!r} does not say what its spaces are: name the environment that it was recorded in "
                "as `eval_env`, such as Pendulum (--eval-env on the command line), or in Python give a "
                "Dataset.load(path, observation_space=..., action_space=...)."
            )
        env = env_maker(self.eval_env, trust=self.trusted)(1, device="cpu", seed=0)
        try:
            spaces = {name: getattr(env, f"single_{name}") for name in SPACES}
        finally:
            env.close()
        return Dataset.load(path, **spaces)

    def make_trainer(self, *, tracker: Any = None, callbacks: Sequence[Callable[..., Any]] = ()) -> Trainer:
        """Build environment, algorithm, tracker (unless one is given) and trainer, and check that all fit together.

        Args:
            tracker: Where params and metrics go; None makes one by `make_tracker`.
            callbacks: Called with the trainer and each row of statistics; see `Trainer`.

        Raises:
            ValueError: If something does not fit.
        """
        from rl8x.trainers import Trainer

        algorithm = self.make_algorithm()
        chosen: Any = {
            name: getattr(self, name) for name in ("eval_env", "num_eval_envs", "on_non_finite", "log_models")
        }
        chosen |= {"tracker": self.make_tracker() if tracker is None else tracker, "callbacks": callbacks}
        trainer = Trainer(algorithm, checkpoints=self.make_checkpoints(), **chosen)
        trainer.record.run_file = self.to_dict()
        trainer.check_run(**self._run_options())
        return trainer

    def train(self, trainer: Trainer) -> TrainStats:
        """Run a trainer until a stop condition is met.

        Args:
            trainer: A trainer that `make_trainer` made.

        Returns:
            Its last row.
        """
        progress: Any = self.progress
        return trainer.run(**self._run_options(), progress=progress)

    def _run_options(self) -> dict[str, Any]:
        names = ("env_config", "eval_env_config", "steps_per_eval", "evals_per_film", "max_steps")
        return {**{name: getattr(self, name) for name in names}, "stop_conditions": self.conditions()}

    def make_tracker(self) -> Any:
        """Make the tracker, which keeps params and metrics."""
        if not self.tracking:
            from rl8x.tracking import NullTracker

            return NullTracker()
        from rl8x.tracking import MLflowTracker

        chosen: dict[str, Any] = {name: getattr(self, name) for name in ("experiment_name", "run_name", "tracking_uri")}
        if self.system_metrics:
            chosen["system_metrics"] = True
        return MLflowTracker(**{name: value for name, value in chosen.items() if value is not None})


def _needs_env(cls: type[AlgorithmConfig]) -> bool:
    """Whether `build` must be given an environment; algorithms that learn from data alone can do without."""
    parameter = inspect.signature(cls.build).parameters.get("env")
    return parameter is None or parameter.default is not None


def _names(cls: Any) -> list[str]:
    return [field.name for field in dataclasses.fields(cls)]


def _aliases_of(hyperparameters: Collection[str]) -> dict[str, str]:
    """Return rl8's names for hyperparameters of a config that has them, and not under rl8's names."""
    return {
        alias: name
        for alias, name in _HYPERPARAMETER_ALIASES.items()
        if name in hyperparameters and alias not in hyperparameters
    }


def renamed(data: Mapping[str, Any], aliases: Mapping[str, str] = ALIASES) -> dict[str, Any]:
    """Return a run's data with rl8x's names for rl8's."""
    result: dict[str, Any] = {}
    for name, value in data.items():
        target = aliases.get(name, name)
        if target in result or (target != name and target in data):
            raise ValueError(f"{name!r} is another name of {target!r}, and both are given. Keep one.")
        result[target] = value
    return result


def under_algorithm(override: str, cls: type[AlgorithmConfig]) -> str:
    """Put the bare name of a hyperparameter, as in `lr=3e-4`, where run files have it; other overrides stay."""
    name = re.split(r"[.=]", override, maxsplit=1)[0].strip()
    of_run = {*_names(RunConfig), *ALIASES}
    hyperparameters = {*_names(cls), *_aliases_of(_names(cls))} - of_run
    near = [] if name in of_run else difflib.get_close_matches(name, of_run | hyperparameters, n=1)
    return f"algorithm_config.{override}" if near and near[0] in hyperparameters else override


def _coerced(field: dataclasses.Field[Any], value: Any) -> Any:
    """Check a value's type as far as `check_options` does not, and read `1e6` as a whole number where one is needed."""
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
        raise TypeError(f"`{field.name}` must be a text; got {shortened(value)}. Put it in quotes.")
    if kinds.startswith("Sequence"):
        return tuple(value) if isinstance(value, list | tuple) else (value,)
    return value
