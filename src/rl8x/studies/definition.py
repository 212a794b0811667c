"""The config of a study, from a file or a script: the keys of a run and further keys of a study."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import importlib.util
import itertools
import json
import math
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Final

from rl8x.algorithms.hyperparameters import check_options, option
from rl8x.algorithms.memory_check import check_cells
from rl8x.config import RunSpec, apply_overrides, load_run_file
from rl8x.config.files import ALIASES, algorithm_config_class, one_line, put_at, renamed
from rl8x.config.spec import FIELDS, AlgorithmSpec, class_named_in, overridden, under_algorithm, without_schedules
from rl8x.disk import named_path
from rl8x.envs import Env
from rl8x.envs.cells import Cells, check_test, inside, make_cells, num_cells, support, why_none_is_inside
from rl8x.envs.parameters import moving_in
from rl8x.importing import CLASS, Trust, texts
from rl8x.names import did_you_mean
from rl8x.output import shown
from rl8x.plain import MAX_WHOLE, frozen, thawed
from rl8x.tracking.location import mlruns_dir
from rl8x.tracking.secrets import hide_in_data
from rl8x.trainers import Trainer

# Keys of a run that a study sets itself, with the keys to use instead.
_DECIDED: Final = {
    "env_config": "give it by name under `train`",
    "seed": "list them as `seeds`",
    "run_name": "a study has a `name`",
}
_FREE: Final = ("progress", "trials", "directory")  # may change when a study is resumed
_MAX_TRAININGS: Final = 10_000
_RANGES: Final = ("uniform", "log_uniform", "int", "log_int", "choice")  # such as {"log_uniform": [1e-4, 1e-2]}


@dataclasses.dataclass(frozen=True)
class Training:
    """One training of a study: the name of a training configuration, varied keys with their values, and a seed."""

    training: str
    vary: Mapping[str, Any]
    seed: int
    trial: int | None = None  # the trial's number in a search

    @property
    def label(self) -> str:
        """A readable name: `wide lr=0.001 seed=0`."""
        return f"{self.group} seed={self.seed}"

    @property
    def group(self) -> str:
        """The common name of trainings that differ only by seed; in a search it has rounded values and the trial."""
        parts, searched = [self.training], self.trial is not None
        for name, value in (dict(self.vary) | ({"trial": self.trial} if searched else {})).items():
            text = value if isinstance(value, str) else json.dumps(value)
            if isinstance(value, float) and (searched or float(f"{value:.4g}") == value):
                text = f"{value:.4g}"
            parts.append(f"{name}={text}")
        return " ".join(parts)

    @property
    def key(self) -> str:
        """A unique name for the training's folder."""
        text = json.dumps([self.training, dict(self.vary), self.seed, self.trial], sort_keys=True)
        readable = re.sub(r"[^\w.=-]+", "-", self.label)[:60].strip("-.")
        return f"{readable}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class StudyConfig:
    """A study: trainings under several configurations, hyperparameters and seeds, and the cells to test them in.

    Args:
        trust: Whether names in it may be imported, see `RunSpec`.

    Raises:
        TypeError: If a value has a wrong type.
        ValueError: If a value is out of its range, the trainings never end, are too many, or there is no test cell.
    """

    trust: dataclasses.InitVar[Trust] = False
    trusted: ClassVar[Trust] = False

    name: str = option("study", "Name of the study: of its parent run, and of its folder.")
    run: dict[str, Any] = option({}, "What all trainings have in common, by the keys of a run file.")
    train: dict[str, Any] = option({}, "The env_config of each training configuration, by name.")
    test: dict[str, Any] = option(
        {},
        "The test cells: of each parameter a list of values, or {linspace: [low, high, count]}, all combined; or "
        "distributions, such as {uniform: [low, high]}.",
    )
    test_cells: int | None = option(None, "Cells to draw, where the test has distributions.", low=1)
    test_seed: int = option(0, "Seed of the cells that are drawn, and of the episodes in all cells.", low=0)
    episodes: int = option(64, "Episodes in each cell.", low=1)
    evaluate_at: Any = option(
        None, "Steps of the trainer after which to test too: a list, or a number for every so many. None: at the end."
    )
    seeds: Any = option(1, "Seeds of each training: a list, or their number.")
    vary: dict[str, Any] = option(
        {},
        "Hyperparameters, or any keys of a run, and the lists of their values, all combined; in a search ranges, such "
        "as {log_uniform: [1e-4, 1e-2]}, {uniform: [0, 1]}, {int: [1, 8]}.",
    )
    trials: int | None = option(None, "Trials of a search over the ranges in `vary`; None combines lists.", low=1)
    directory: str | None = option(None, "The study's folder. None: mlruns/studies/NAME in the working directory.")

    def __post_init__(self, trust: Trust) -> None:
        """Check everything that needs no environment."""
        object.__setattr__(self, "trusted", trust)
        for field in dataclasses.fields(self):
            object.__setattr__(self, field.name, _plain_value(getattr(self, field.name), field.name))
        check_options(self)
        if not isinstance(self.name, str) or not re.fullmatch(r"[\w][\w .:-]{0,79}", self.name):
            raise ValueError(f"`name` must be letters, digits, spaces and `_ - . :`, at most 80; got {self.name!r}.")
        if self.directory is not None:
            named_path(self.directory, "`directory`")
        listed = {"seeds": _listed_seeds(self.seeds), "evaluate_at": _listed_points(self.evaluate_at)}
        for name, value in (listed | {"train": self._checked_train()}).items():
            object.__setattr__(self, name, frozen(value))
        self._check_vary()
        self._check_run()
        self.cells()  # raises if there are none

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], *, trust: Trust = False) -> StudyConfig:
        """Make a study from plain data: the keys of a run file together with those of a study.

        Args:
            data: The content of a study's file.
            trust: Whether names in it may be imported, see `RunSpec.from_file`.

        Raises:
            ValueError: If a key is unknown or a value is not legal.
            TypeError: If a value has a wrong type.
        """
        data = renamed(data)
        own = [field.name for field in dataclasses.fields(cls) if field.name != "run"]
        legal = [*own, *(name for name in FIELDS if name not in _DECIDED)]
        for name in data:
            if name in _DECIDED:
                raise ValueError(f"`{name}` is no key of a study: {_DECIDED[name]}.")
            if name not in legal:
                hint = f"{did_you_mean(name, legal)} Legal are {', '.join(legal)}."
                raise ValueError(f"unknown key {shown(name)}.{hint}")
        given = {name: data.pop(name) for name in own if name in data}
        return cls(run=data, **given, trust=trust)

    @classmethod
    def from_file(cls, path: str | Path, overrides: Iterable[str] = (), *, trust: Trust | None = None) -> StudyConfig:
        """Read a study's file and apply `key=value` overrides; the study's default name is the file's stem.

        Args:
            path: YAML, TOML or JSON.
            overrides: Texts such as `episodes=8` or `lr=3e-4`.
            trust: Whether names in it may be imported, see `RunSpec.from_file`; None trusts those in the overrides.
        """
        data, overrides = renamed(load_run_file(path)), list(overrides)
        fields = {field.name for field in dataclasses.fields(cls)}
        own = [word for word in overrides if re.split(r"[.=]", word, maxsplit=1)[0].strip() in fields]
        words = [word for word in overrides if word not in own]
        trusted = trust or frozenset(texts(apply_overrides({}, overrides, ALIASES)))
        config_class = class_named_in(apply_overrides(data, words, ALIASES), trusted)
        data = {"name": Path(path).stem} | apply_overrides(overridden(data, words, config_class), own)
        return cls.from_dict(data, trust=trusted)

    @property
    def plain(self) -> dict[str, Any]:
        """The study as plain data, from which `from_dict` makes an equal one."""
        own = {each.name: getattr(self, each.name) for each in dataclasses.fields(self) if each.name != "run"}
        return dict(thawed({**self.run, **own}))

    def to_dict(self) -> dict[str, Any]:
        """Return the study as plain data for a file, without passwords."""
        return dict(hide_in_data(self.plain))

    def changes(self, before: Mapping[str, Any]) -> list[str]:
        """Return a sentence for each key that differs from a stored definition, except keys that may change.

        Args:
            before: The result of `to_dict()` when the study began.
        """
        now = json.loads(json.dumps(self.to_dict()))
        different = [name for name in {**before, **now} if name not in _FREE and before.get(name) != now.get(name)]
        return [f"`{name}` was {shown(before.get(name))} and is {shown(now.get(name))}" for name in different]

    @property
    def folder(self) -> Path:
        """The study's folder, absolute."""
        if self.directory is not None:
            return Path(os.path.expanduser(self.directory)).absolute()
        return mlruns_dir() / "studies" / re.sub(r"[^\w.-]+", "-", self.name)

    def _checked_train(self) -> dict[str, Any]:
        if not self.train:
            raise ValueError("`train` must name at least one training, such as {default: {}} or {wide: {length: ...}}.")
        for name, config in self.train.items():
            if not re.fullmatch(r"[\w][\w .-]{0,39}", name):
                raise ValueError(f"`train`: a name is letters, digits, spaces and `_ - .`, at most 40; got {name!r}.")
            if config is not None and not isinstance(config, Mapping):
                raise TypeError(f"train[{name!r}] must be an env_config, a mapping; got {shown(config)}.")
        return {name: dict(config or {}) for name, config in self.train.items()}

    def _check_run(self) -> None:
        for name in sorted({"directory", "best"} & {*(self.run.get("checkpoints") or {})}):
            raise ValueError(f"`checkpoints` of a study's trainings have no `{name}`: they lie in the study's folder.")
        given = {name for name, value in self.run.items() if value not in (None, [])}
        if not {"max_steps", "stop_conditions"} & (given | {name.partition(".")[0] for name in self.vary}):
            raise ValueError("a study's trainings must end: give `max_steps` or `stop_conditions`.")
        # No point may be after the end of every training.
        at = self.evaluate_at if isinstance(self.evaluate_at, list) else [self.evaluate_at or 0]
        steps = self.vary.get("max_steps", [self.run.get("max_steps")])
        if isinstance(steps, list) and all(type(each) is int for each in steps) and at[-1:] > [max(steps)]:
            raise ValueError(f"`evaluate_at` has step {at[-1]}, but trainings end after `max_steps` = {max(steps)}.")

    def _check_vary(self) -> None:
        ranged = [name for name, values in self.vary.items() if isinstance(values, Mapping)]
        for name, values in self.vary.items():
            first = name.partition(".")[0]
            if first in (*_DECIDED, *(field.name for field in dataclasses.fields(self))):
                hint = _DECIDED.get(first, "a study has one value of it")
                raise ValueError(f"vary[{name!r}] is no hyperparameter or key of a run: {hint}.")
            if isinstance(values, Mapping):
                _check_range(name, values)
            elif not isinstance(values, list) or not values or any(values.count(value) > 1 for value in values):
                raise ValueError(f"vary[{name!r}] must be a list of different values; got {shown(values)}.")
        if ranged and self.trials is None:
            raise ValueError(f"vary[{ranged[0]!r}] is a range: say by `trials` how many to try, or list values.")
        if self.trials is not None and not self.vary:
            raise ValueError("`trials` are of a search: give the ranges of hyperparameters under `vary`.")
        if self.trials is None and len(self.trainings()) > _MAX_TRAININGS:
            raise ValueError(f"{len(self.trainings()):,} trainings; at most {_MAX_TRAININGS:,}. Vary less.")

    def check(self) -> list[str]:
        """Build the trainings' configs and environments, and check that these have the parameters and test cells.

        Returns:
            A sentence with the reason for each training whose range contains no test cell, unless its range moves.

        Raises:
            ValueError: For the first illegal part.
        """
        if self.searches and importlib.util.find_spec("optuna") is None:
            raise ValueError("`trials` need optuna: pip install 'rl8x[studies]', or list values in `vary`.")
        notes: dict[str, str | None] = {}
        for training in self.first_trainings():
            try:
                run = self.run_of(training)
            except (ValueError, TypeError) as error:
                where = f"{training.group}: " if training.vary else ""
                raise ValueError(f"{where}{one_line(error)}.") from None
            num_envs = getattr(run.config, "num_envs", 1)
            key = json.dumps([tested_env(run), run.env.env_kwargs, num_envs, training.training], sort_keys=True)
            if key not in notes:
                notes[key] = self._check_env(run, training.training, num_envs)
        Trainer.from_spec(self.run_of(self.first_trainings()[0]).replace(tracking=False))
        return list(dict.fromkeys(filter(None, notes.values())))

    def _check_env(self, run: RunSpec, name: str, num_envs: int) -> str | None:
        """Check a training and the test in an environment; return why no cell is inside its range, None if one is."""
        with _opened(run, num_envs) as env:
            cells, config = self.cells(), self.train[name]
            env.plain_config(config, called=f"train[{name!r}]")
            check_test(env, cells, self.episodes, name=tested_env(run))
            check_cells(self.episodes, num_cells(cells), env)
            trained = config, env.parameters, num_envs
            if moving_in(config) or inside(cells, *trained).any():
                return None
            return f"{name}: {why_none_is_inside(cells, support(*trained))}"

    @property
    def searches(self) -> bool:
        """Whether the study searches for hyperparameters, rather than combining all values."""
        return self.trials is not None

    def cells(self) -> Cells:
        """Make the test cells; in tables they have numbers, which do not go by the order of `test`."""
        cells = make_cells(dict(sorted(self.test.items())), self.test_cells, self.test_seed)
        return {name: cells[name] for name in self.test}

    def units(self) -> dict[str, str]:
        """Return the units of test parameters, without those that have none, by the first training's environment."""
        with _opened(self.run_of(self.first_trainings()[0]), 1) as env:
            return {name: known.unit for name, known in env.parameters.items() if name in self.test and known.unit}

    def trainings(self) -> list[Training]:
        """List the trainings by configuration and hyperparameters, with consecutive seeds."""
        combined = [dict(zip(self.vary, each, strict=True)) for each in itertools.product(*self.vary.values())]
        return [Training(name, dict(each), seed) for name in self.train for each in combined for seed in self.seeds]

    def first_trainings(self) -> list[Training]:
        """List one training of each configuration and set of hyperparameters, at most 256 sets, with ranges' ends."""
        # A range contributes its two ends, a choice all its values.
        values = [next(iter(each.values())) if isinstance(each, Mapping) else each for each in self.vary.values()]
        combined = (dict(zip(self.vary, each, strict=True)) for each in itertools.product(*values))
        return [Training(name, each, self.seeds[0]) for each in itertools.islice(combined, 256) for name in self.train]

    def run_of(self, training: Training) -> RunSpec:
        """Make the run of a training.

        Args:
            training: One of `trainings()`.

        Raises:
            ValueError: If it is not legal, or a varied key leads into what is no mapping, or is given twice.
        """
        algorithm = training.vary.get("algorithm", self.run.get("algorithm", AlgorithmSpec.algorithm))
        config_class = algorithm_config_class(str(algorithm), self.trusted)
        wholes = {name: under_algorithm(name, config_class) for name in training.vary}
        numbers = (whole.removeprefix("algorithm_config.") for whole in wholes.values())
        data = without_schedules(thawed(self.run), numbers)
        set_by: dict[str, str] = {}
        for name, value in training.vary.items():
            whole = wholes[name]
            if set_by.setdefault(whole, name) != name:
                raise ValueError(f"vary[{name!r}] and vary[{set_by[whole]!r}] are both {whole!r}: keep one.")
            # A copy, as another varied key may lead into the value.
            put_at(data, whole.split("."), thawed(value), f"vary[{name!r}]")
        if self.train[training.training] or data.get("env"):  # a data set has no physics to set
            data["env_config"] = self.train[training.training]
        data |= {"seed": training.seed, "run_name": f"{self.name} {training.label}"[:240], "progress": "none"}
        return RunSpec.from_plain(data, trust=self.trusted)


def _opened(run: RunSpec, num_envs: int) -> contextlib.closing[Env]:
    """Make the environment to test a training's policies in; the context closes it."""
    return contextlib.closing(run.env.maker(run.trust, env=tested_env(run))(num_envs, device="cpu", seed=0))


def tested_env(run: RunSpec) -> str:
    """Return the name of the environment to test a training's policies in; with a data set its `eval_env`."""
    if run.env.env:
        return run.env.env
    if isinstance(own := run.trainer.eval_env, str) and own != "auto":
        return own
    raise ValueError("a study tests policies in an environment: give `eval_env`, as it trains on a data set.")


def _check_range(name: str, values: Mapping[str, Any]) -> None:
    """Raise `ValueError` if a range is not legal."""
    kind = next(iter(values), None)
    if len(values) != 1 or kind not in _RANGES:
        hint = did_you_mean(kind, _RANGES)
        raise ValueError(f"vary[{name!r}] must be a list, or one of {', '.join(_RANGES)}; got {dict(values)!r}.{hint}")
    given = values[kind]
    if not isinstance(given, list) or not given:
        raise ValueError(f"vary[{name!r}]: {kind!r} takes a list; got {given!r}.")
    if kind == "choice":
        return
    whole = kind in ("int", "log_int")
    kinds = (int,) if whole else (int, float)
    legal = len(given) == 2 and all(type(end) in kinds and (whole or math.isfinite(end)) for end in given)
    if not legal or not given[0] < given[1] or (kind.startswith("log") and given[0] <= 0):
        need = "two whole numbers" if whole else "two finite numbers"
        above = ", above 0" if kind.startswith("log") else ""
        raise ValueError(f"vary[{name!r}]: {kind!r} takes {need}, the lower one first{above}; got {given!r}.")


def _listed_seeds(seeds: Any) -> list[int]:
    """Return the seeds of each training as a list; a number of seeds gives 0, 1, ..."""
    listed = list(range(seeds)) if type(seeds) is int and seeds <= 10_000 else seeds
    legal = isinstance(listed, list) and all(type(seed) is int and 0 <= seed <= MAX_WHOLE for seed in listed)
    if not legal or not listed or len(set(listed)) < len(listed):
        raise ValueError(f"`seeds` must be their number, or different ones from 0 to 2^63 - 1; got {shown(seeds)}.")
    return listed


def _listed_points(points: Any) -> Any:
    """Return the trainer's steps at which to evaluate: a sorted list, or a number or None unchanged."""
    listed = points if isinstance(points, list) else [1 if points is None else points]
    if any(type(point) is not int or point < 1 for point in listed):
        raise ValueError(f"`evaluate_at` must be a list of steps, or a number for every so many; got {points!r}.")
    return sorted(set(points)) if isinstance(points, list) else points


def _plain_value(value: Any, where: str) -> Any:
    """Return a script's value as plain data, in the form that files use for distributions, arrays and classes."""
    if hasattr(value, "to_dict") and not isinstance(value, type):
        return _plain_value(value.to_dict(), where)
    if isinstance(value, type):
        path = f"{value.__module__}.{value.__qualname__}"
        return path if where.endswith((".env", ".algorithm", ".eval_env")) else {CLASS: path}
    if isinstance(value, Mapping):
        return {str(name): _plain_value(item, f"{where}.{name}") for name, item in value.items()}
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, range | Sequence) and not isinstance(value, str):
        return [_plain_value(item, where) for item in value]
    if value is not None and not isinstance(value, bool | int | float | str):
        raise TypeError(f"`{where}` must be what a file can say; got {shown(value)}.")
    return value
