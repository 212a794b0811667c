"""Reads run files and `key=value` overrides into plain data, and finds the algorithms and classes that it names.

Run files are never executed. A key that occurs twice is an error.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
import json
import tomllib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import gymnasium
import yaml
from torch import nn

from rl8x import algorithms
from rl8x.algorithms import AlgorithmConfig, GenericAlgorithmBase
from rl8x.conditions import Condition
from rl8x.distributions import Distribution
from rl8x.envs import Env
from rl8x.importing import Trust, from_plain, import_class, import_named, is_dotted, values_in
from rl8x.models import Model
from rl8x.names import did_you_mean
from rl8x.output import shown
from rl8x.plain import MAX_DEPTH, MAX_VALUES, Loader

# rl8's names of keys.
ALIASES: Final = {"env_cls": "env", "algorithm_cls": "algorithm", "algorithm_config_cls": "algorithm"}
UNWRITABLE: Final = "$unwritable"
"""Key of the placeholder for a value that no file can hold: `{"$unwritable": "the environment was an instance"}`."""
SUFFIXES: Final = (".yaml", ".yml", ".toml", ".json")
_MAX_BYTES: Final = 4 * 2**20
# Whole numbers of 64 bits, signed or not, as in tensors and generators.
_WHOLE: Final = range(-(2**63), 2**64)
# Base classes of the classes that a file may name.
_KINDS: Final = (Env, gymnasium.Env, AlgorithmConfig, Condition, Model, Distribution, nn.Module)


def load_run_file(path: str | Path) -> dict[str, Any]:
    """Read a run file, UTF-8, by its suffix.

    Args:
        path: The file, `.yaml`, `.yml`, `.toml` or `.json`.

    Returns:
        A mapping of None, booleans, numbers, texts, lists and mappings only.

    Raises:
        ValueError: If it cannot be read, or is not such a mapping.
    """
    path = Path(path)
    suffix = path.suffix.lower()
    if suffix not in SUFFIXES:
        raise ValueError(f"{path}: a run file ends in {', '.join(SUFFIXES)}; got {path.suffix or 'no suffix'!r}.")
    try:
        with path.open("rb") as file:
            content = file.read(_MAX_BYTES + 1)
        if len(content) > _MAX_BYTES:
            raise ValueError(f"too large: a run file has at most {_MAX_BYTES // 2**20} MiB")
        text = content.decode("utf-8-sig")  # editors on Windows write a mark first
        if suffix == ".toml":
            data: Any = tomllib.loads(text)
        elif suffix == ".json":
            data = json.loads(text, object_pairs_hook=_unique)
        else:
            data = _parse_yaml(text)
            data = {} if data is None else data
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {error.strerror}.") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: {one_line(error)}") from None
    if not isinstance(data, dict):
        raise ValueError(f"{path}: a run file is a mapping, such as `env: CartPole`; got {shown(data)}.")
    _check_plain(data, str(path))
    return data


def _parse_yaml(text: str) -> Any:
    try:
        return yaml.load(text, Loader=Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = f" at line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise ValueError(f"{error.problem or error.context}{where}") from None
    except (yaml.YAMLError, TypeError, AttributeError, LookupError, OverflowError, ValueError) as error:
        # PyYAML trips over some tags and escapes that do not fit their values (`!!bool maybe`, "\\UFFFFFFFF")
        raise ValueError(f"not plain YAML ({one_line(error)})") from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    data: dict[str, Any] = {}
    for name, value in pairs:
        if name in data:
            raise ValueError(f"the key {shown(name)} occurs twice")
        data[name] = value
    return data


def _check_plain(value: Any, where: str) -> None:
    """Raise `ValueError` unless a value is plain data within the limits of depth and size."""
    count = itertools.count()

    def walk(value: Any, path: str, depth: int) -> None:
        if depth > MAX_DEPTH or next(count) >= MAX_VALUES:
            raise ValueError(f"{where}: {path or 'the file'} is nested too deeply or too large.")
        if isinstance(value, dict):
            for name, item in value.items():
                if not isinstance(name, str):
                    at = f"{path}: " if path else ""
                    raise ValueError(f"{where}: {at}keys are texts; got {shown(name)}. Put it in quotes.")
                walk(item, f"{path}.{name}" if path else name, depth + 1)
        elif isinstance(value, list):
            for index, item in enumerate(value):
                walk(item, f"{path}[{index}]", depth + 1)
        elif isinstance(value, int) and value not in _WHOLE:
            raise ValueError(f"{where}: {path or 'the value'} is a whole number of more than 64 bits.")
        elif value is not None and not isinstance(value, bool | int | float | str):
            raise ValueError(f"{where}: {path} is a {type(value).__name__}, which means nothing here; got {value!r}.")

    walk(value, "", 0)


def parse_value(text: str) -> Any:
    """Read a value from the command line: a YAML number, word, list or mapping in one line; anything else is a text.

    Args:
        text: The value as it was typed.

    Raises:
        ValueError: If it is a malformed list or mapping, or a whole number that is too large.
    """
    try:
        value = _parse_yaml(text)
        _check_plain(value, shown(text))
    except (ValueError, RecursionError) as error:
        if text.strip().lstrip("+-").isdecimal():
            raise ValueError(f"{shown(text)} is a whole number of more than 64 bits.") from None
        if text.lstrip()[:1] in ("[", "{"):
            raise ValueError(f"{shown(text)} is not a list or mapping in YAML: {one_line(error)}.") from None
        return text
    return value


def apply_overrides(
    data: Mapping[str, Any], overrides: Iterable[str], aliases: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Return a copy of the data with `key=value` overrides applied.

    Args:
        data: A run's data.
        overrides: Texts such as `algorithm_config.lr=3e-4`: dots lead into mappings, which are made if they are
            missing.
        aliases: Other names of top-level keys.

    Raises:
        ValueError: If one has another form, or leads into something that is not a mapping, such as `env`.
    """
    result: dict[str, Any] = copy.deepcopy(dict(data))
    for override in overrides:
        path, equals, text = override.partition("=")
        names = [name.strip() for name in path.split(".")]
        if not equals or not all(names):
            raise ValueError(f"an override is KEY=VALUE, as in lr=3e-4 or env_config.length=0.4; got {override!r}.")
        if names[0] == "env" and len(names) > 1:
            raise ValueError(
                f"`env` is a name; got {override!r}. Arguments of the environment's constructor are under "
                "`env_kwargs`, values of its parameters under `env_config`."
            )
        names[0] = (aliases or {}).get(names[0], names[0])
        put_at(result, names, parse_value(text), repr(override))
    return result


def renamed(data: Mapping[str, Any], aliases: Mapping[str, str] = ALIASES) -> dict[str, Any]:
    """Return a run's data with rl8's names of keys replaced by rl8x's."""
    result: dict[str, Any] = {}
    for name, value in data.items():
        target = aliases.get(name, name)
        if target in result or (target != name and target in data):
            raise ValueError(f"{name!r} is another name of {target!r}, and both are given. Keep one.")
        result[target] = value
    return result


def hyperparameter_aliases(hyperparameters: Collection[str]) -> dict[str, str]:
    """Return rl8's names of hyperparameters as aliases of rl8x's, if the config has only the latter."""
    aliases = {"model_cls": "model", "distribution_cls": "distribution"}
    return {alias: name for alias, name in aliases.items() if name in hyperparameters and alias not in hyperparameters}


def put_at(data: dict[str, Any], names: Sequence[str], value: Any, owner: str) -> None:
    """Put a value at a path of keys into nested mappings, which are made if they are missing."""
    *path, last = names
    for depth, name in enumerate(path, 1):
        if data.get(name) is None:
            data[name] = {}
        data = data[name]
        if not isinstance(data, dict):
            raise ValueError(f"{owner}: {'.'.join(path[:depth])} is {shown(data)}, not a mapping.")
    data[last] = value


def one_line(error: object) -> str:
    """Return a message in one line, without full stops at its end."""
    return " ".join(str(error).split()).rstrip(".")


# -- values that no file can hold


def unwritable(why: str) -> Any:
    """Return the placeholder for a value that no file can hold, with the reason."""
    return {UNWRITABLE: why}


def is_unwritable(value: object) -> bool:
    """Whether a value is the placeholder for one that no file can hold."""
    return isinstance(value, Mapping) and set(value) == {UNWRITABLE}


def unwritable_in(value: Any) -> Iterator[str]:
    """Yield the reasons of all unwritable values in plain data."""
    return (str(each[UNWRITABLE]) for each in values_in(value) if is_unwritable(each))


# -- algorithms and classes by name


def algorithm_configs() -> dict[str, type[AlgorithmConfig]]:
    """Return the config classes of the built-in algorithms by the algorithm's name."""
    return {
        name.removesuffix("Config"): cls
        for name, cls in vars(algorithms).items()
        if isinstance(cls, type) and issubclass(cls, AlgorithmConfig) and cls.algorithm is not None
    }


def plain_name(name: str) -> str:
    """Return a built-in algorithm's name in lower case: fast_td3 and FastTD3Config are fasttd3."""
    return name.lower().replace("_", "").removesuffix("config")


def algorithm_config_class(name: str, trust: Trust) -> type[AlgorithmConfig]:
    """Return the config class of an algorithm by its name, or by the dotted path of the class."""
    known = algorithm_configs()
    builtin = {known_name.lower(): cls for known_name, cls in known.items()}.get(plain_name(name))
    if builtin is not None:
        return builtin
    if not is_dotted(name):
        listed = f"{', '.join(known)}.{did_you_mean(name, known)}"
        raise ValueError(
            f"no built-in algorithm {shown(name)}; there are {listed} One of your own is named by its config "
            "class, such as my_module.MyConfig."
        )
    cls = import_named(name, trust=trust)
    if isinstance(cls, type) and issubclass(cls, AlgorithmConfig):
        return cls
    is_algorithm = isinstance(cls, type) and issubclass(cls, GenericAlgorithmBase)
    hint = ", an algorithm: name the class of its config" if is_algorithm else ""
    raise ValueError(f"`algorithm` must name a subclass of rl8x.algorithms.AlgorithmConfig; got {name!r}{hint}.")


def restored(value: Any, trust: Trust) -> Any:
    """Return plain data with `{"$class": path}` replaced by the classes."""
    return from_plain(value, _KINDS, trust=trust)


def restored_options(config_class: type[AlgorithmConfig], values: Mapping[str, Any], trust: Trust) -> dict[str, Any]:
    """Return hyperparameters with names replaced by classes; a field for a class may be a dotted path alone."""
    kinds = {field.name: str(field.type) for field in dataclasses.fields(config_class)}
    return {
        name: import_class(value, _KINDS, trust=trust)
        if "type[" in kinds.get(name, "") and isinstance(value, str) and is_dotted(value)
        else restored(value, trust)
        for name, value in values.items()
    }
