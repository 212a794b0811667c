"""How an algorithm was built, as plain data, and building it again.

A file can make rl8x import classes of the expected kinds and call those; nothing else.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Mapping
from typing import Any, Final

from rl8x.algorithms.base import AlgorithmConfig, GenericAlgorithmBase
from rl8x.algorithms.config import check_names
from rl8x.checkpoint.errors import CheckpointError
from rl8x.envs import Env
from rl8x.importing import dotted_path, import_named
from rl8x.tracking.secrets import find_hidden, hide_in_data

_CLASS: Final = "$class"


def describe_algorithm(algorithm: GenericAlgorithmBase[Any]) -> dict[str, Any]:
    """Say how an algorithm was built; what cannot be said is listed under `problems`."""
    problems: list[str] = []
    config = algorithm.config
    values = {}
    for field in dataclasses.fields(config):
        plain = _plain(getattr(config, field.name))
        if plain is _NOT_PLAIN:
            problems.append(
                f"`{field.name}` is {type(getattr(config, field.name)).__name__}, which has no form in a file"
            )
        else:
            values[field.name] = plain
    values["seed"] = algorithm.seed
    config_class = dotted_path(type(config))
    if config_class is None:
        problems.append(f"{type(config).__qualname__} is not an attribute of a module")
    return {
        "config_class": config_class,
        "config": values,
        "env": _describe_env(algorithm, problems),
        "env_class": type(algorithm.env).__name__,
        "problems": problems,
    }


def _describe_env(algorithm: GenericAlgorithmBase[Any], problems: list[str]) -> dict[str, Any] | None:
    factory = algorithm.env_factory
    if factory is None:
        problems.append("the environment was given as an instance")
        return None
    maker, args, kwargs = factory, (), {}
    if isinstance(factory, functools.partial):
        maker, args, kwargs = factory.func, factory.args, factory.keywords
    path = dotted_path(maker) if isinstance(maker, type) and issubclass(maker, Env) else None
    arguments = _plain({"args": list(args), "kwargs": dict(kwargs)})
    if path is None:
        problems.append("the environment is not made by a class that is an attribute of a module")
        return None
    if arguments is _NOT_PLAIN:
        problems.append("the environment's arguments have no form in a file")
        return None
    return {"class": path, **arguments}


class _NotPlain:
    """What has no form in a file."""


_NOT_PLAIN: Final = _NotPlain()


def _plain(value: Any) -> Any:
    """Return a value as JSON can hold it, classes by their dotted path; `_NOT_PLAIN` where it cannot."""
    if isinstance(value, type):
        path = dotted_path(value)
        return _NOT_PLAIN if path is None else {_CLASS: path}
    if isinstance(value, Mapping):
        items = {key: _plain(item) for key, item in value.items()}
        bad = any(not isinstance(key, str) or item is _NOT_PLAIN for key, item in items.items())
        return _NOT_PLAIN if bad else items
    if isinstance(value, list | tuple):
        listed = [_plain(item) for item in value]
        return _NOT_PLAIN if any(item is _NOT_PLAIN for item in listed) else listed
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError):
        return _NOT_PLAIN
    return value


def _restored(value: Any) -> Any:
    if isinstance(value, dict):
        if set(value) == {_CLASS}:
            cls = import_named(value[_CLASS])
            if not isinstance(cls, type):
                raise CheckpointError(f"{value[_CLASS]!r} is not a class")
            return cls
        return {key: _restored(item) for key, item in value.items()}
    return [_restored(item) for item in value] if isinstance(value, list) else value


def build_algorithm(build: Mapping[str, Any], overrides: Mapping[str, Any]) -> GenericAlgorithmBase[Any]:
    """Build the algorithm that `describe_algorithm` described.

    Args:
        build: The description.
        overrides: Hyperparameters that are to be different.

    Raises:
        CheckpointError: If it cannot be built from a file.
        ValueError: If an override is not a legal hyperparameter.
    """
    problems = build.get("problems")
    if problems:
        raise CheckpointError(
            f"the algorithm cannot be built again from the checkpoint: {problems[0]}. Pass `algorithm=`"
        )
    hidden = find_hidden(build.get("env"), "env") or find_hidden(build.get("config"), "config")
    if hidden is not None:
        raise CheckpointError(
            f"the algorithm cannot be built again: no password is kept in a checkpoint, and `{hidden}` had one. "
            "Pass `algorithm=`"
        )
    try:
        config_class = _imported(build["config_class"], AlgorithmConfig)
        env_class = _imported(build["env"]["class"], Env)
        values = _restored(build["config"])
        args, kwargs = build["env"]["args"], build["env"]["kwargs"]
    except (KeyError, TypeError) as error:
        raise CheckpointError(f"the checkpoint does not say how its algorithm is built ({error!r})") from None
    except ValueError as error:
        raise CheckpointError(f"the algorithm cannot be built again: {error} Or pass `algorithm=`") from None
    check_names(overrides, config_class)
    config: AlgorithmConfig = config_class(**{**values, **overrides})
    return config.build(functools.partial(env_class, *args) if args else env_class, **kwargs)


def _imported(path: str, base: type) -> Any:
    """Import a class by its path; it must be of the expected kind, so that a file can name nothing else to call."""
    cls = import_named(path)
    if not isinstance(cls, type) or not issubclass(cls, base):
        raise CheckpointError(f"{path!r} is not a subclass of {base.__name__}")
    return cls


def changes(build: Mapping[str, Any], algorithm: GenericAlgorithmBase[Any]) -> dict[str, tuple[Any, Any]]:
    """Compare an algorithm with a description; return what differs, as it was and as it is.

    A seed that the config leaves open does not count, because the restored generators make it irrelevant.

    Raises:
        CheckpointError: If it is for another environment or of another kind.
    """
    now = hide_in_data(describe_algorithm(algorithm))
    for key, what in (("config_class", "config"), ("env_class", "environment")):
        if build.get(key) != now[key]:
            raise CheckpointError(f"the checkpoint's {what} is {build.get(key)}; the algorithm given has {now[key]}")
    before = build["config"]
    different = {name for name in {*before, *now["config"]} if before.get(name) != now["config"].get(name)}
    if algorithm.config.seed is None:
        different.discard("seed")
    return {name: (before.get(name), now["config"].get(name)) for name in sorted(different)}
