"""Reading run files and `key=value` overrides into plain data.

Nothing in a run file is evaluated. A key that occurs twice is an error.
"""

from __future__ import annotations

import copy
import json
import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import yaml

from rl8x.plain import MAX_DEPTH, MAX_VALUES, Loader

SUFFIXES: Final = (".yaml", ".yml", ".toml", ".json")
_MAX_BYTES: Final = 4 * 2**20
# Whole numbers of 64 bits, signed or not: what tensors and generators hold.
_WHOLE: Final = range(-(2**63), 2**64)
_KEY: Final = r"""(?:[A-Za-z0-9_-]+|"[^"\n]*"|'[^'\n]*')"""
# A dotted key of TOML that is nested too deeply: tomllib takes time by the square of its parts.
_DEEP_KEY: Final = re.compile(rf"(?<![\w-]){_KEY}(?:[ \t]*\.[ \t]*{_KEY}){{{MAX_DEPTH},}}", re.ASCII)


def load_run_file(path: str | Path) -> dict[str, Any]:
    """Read a run file, UTF-8, by its suffix.

    Args:
        path: The file, `.yaml`, `.yml`, `.toml` or `.json`.

    Returns:
        A mapping of None, booleans, numbers, texts, lists and mappings alone.

    Raises:
        ValueError: If it cannot be read, or is not a mapping of that kind.
    """
    path = Path(path)
    if path.suffix.lower() not in SUFFIXES:
        raise ValueError(f"{path}: a run file ends in {', '.join(SUFFIXES)}; got {path.suffix or 'no suffix'!r}.")
    try:
        with path.open("rb") as file:
            content = file.read(_MAX_BYTES + 1)
        if len(content) > _MAX_BYTES:
            raise ValueError(f"too large: a run file has at most {_MAX_BYTES // 2**20} MiB")
        data = _parse(content.decode("utf-8"), path.suffix.lower())
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not a text in UTF-8 ({error.reason} at byte {error.start}).") from None
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {error.strerror}.") from None
    except RecursionError:
        raise ValueError(f"{path}: nested too deeply.") from None
    except ValueError as error:
        raise ValueError(f"{path}: {one_line(error)}") from None
    if not isinstance(data, dict):
        raise ValueError(f"{path}: a run file is a mapping, such as `env: CartPole`; got {shortened(data)}.")
    _check_plain(data, str(path))
    return data


def _parse(text: str, suffix: str) -> Any:
    """Parse a text; everything that is wrong with it is a ValueError."""
    if suffix == ".json":
        return json.loads(text, object_pairs_hook=_unique)
    if suffix == ".toml":
        if _DEEP_KEY.search(text):
            raise ValueError(f"nested too deeply: a dotted key has at most {MAX_DEPTH} parts")
        return tomllib.loads(text)
    data = _parse_yaml(text)
    return {} if data is None else data


def _parse_yaml(text: str) -> Any:
    try:
        return yaml.load(text, Loader=Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = f" at line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise ValueError(f"{error.problem or error.context}{where}") from None
    except yaml.YAMLError as error:
        raise ValueError(one_line(error)) from None
    except (TypeError, AttributeError, KeyError, IndexError, OverflowError) as error:
        # PyYAML trips over some tags and escapes that do not fit their values (`!!bool maybe`, "\\UFFFFFFFF")
        raise ValueError(f"not plain YAML ({one_line(error)})") from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    data = dict(pairs)
    if len(data) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"the key {shortened(next(name for name in names if names.count(name) > 1))} occurs twice")
    return data


def _check_plain(value: Any, where: str) -> None:
    """Refuse what is not plain data, or so deep or large that it cannot be meant."""
    budget = [MAX_VALUES]

    def walk(value: Any, path: str, depth: int) -> None:
        budget[0] -= 1
        if depth > MAX_DEPTH or budget[0] < 0:
            raise ValueError(f"{where}: {path or 'the file'} is nested too deeply or too large.")
        if isinstance(value, dict):
            for name, item in value.items():
                if not isinstance(name, str):
                    at = f"{path}: " if path else ""
                    raise ValueError(f"{where}: {at}keys are texts; got {shortened(name)}. Put it in quotes.")
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
    """Read a value from the command line: a YAML number, word, list or mapping in one line; what is not YAML is text.

    Args:
        text: What was written.

    Raises:
        ValueError: If it is a list or mapping that is not well formed, or a whole number that is too large.
    """
    try:
        value = _parse_yaml(text)
        _check_plain(value, shortened(text))
    except (ValueError, RecursionError) as error:
        if text.strip().lstrip("+-").isdecimal():
            raise ValueError(f"{shortened(text)} is a whole number of more than 64 bits.") from None
        if text.lstrip()[:1] in ("[", "{"):
            raise ValueError(f"{shortened(text)} is not a list or mapping in YAML: {one_line(error)}.") from None
        return text
    return value


def apply_overrides(
    data: Mapping[str, Any], overrides: Iterable[str], aliases: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Return the data with `key=value` overrides put in.

    Args:
        data: A run's data.
        overrides: Texts such as `algorithm_config.lr=3e-4`: dots lead into mappings, which are made where they are
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
            raise ValueError(f"an override is written key=value, as in algorithm_config.lr=3e-4; got {override!r}.")
        if names[0] == "env" and len(names) > 1:
            raise ValueError(
                f"`env` is a name; got {override!r}. Arguments of the environment's constructor are under "
                "`env_kwargs`, values of its parameters under `env_config`."
            )
        names[0] = (aliases or {}).get(names[0], names[0])
        put_at(result, names, parse_value(text), repr(override))
    return result


def put_at(data: dict[str, Any], names: Sequence[str], value: Any, owner: str) -> None:
    """Put a value at a path of keys into nested mappings, which are made where they are missing."""
    *path, last = names
    for depth, name in enumerate(path, 1):
        if data.get(name) is None:
            data[name] = {}
        data = data[name]
        if not isinstance(data, dict):
            raise ValueError(f"{owner}: {'.'.join(path[:depth])} is {shortened(data)}, not a mapping.")
    data[last] = value


def one_line(error: object) -> str:
    """Return a message in one line, without a full stop at its end."""
    return " ".join(str(error).split()).rstrip(".")


def shortened(value: object) -> str:
    """Return the repr of a value, cut where it is long."""
    shown = repr(value)
    return shown if len(shown) <= 80 else f"{shown[:77]}..."
