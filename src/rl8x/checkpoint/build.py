"""Describes how an algorithm was built as plain data, and rebuilds it; `rl8x.importing` limits what may be imported."""

from __future__ import annotations

import dataclasses
import functools
import types
import warnings
from collections.abc import Iterator, Mapping
from typing import Any, Final

import gymnasium
from torch import nn

from rl8x._version import __version__
from rl8x.algorithms.base import AlgorithmConfig, GenericAlgorithmBase
from rl8x.algorithms.hyperparameters import check_names, resolve_device
from rl8x.algorithms.memory_check import no_memory_checks
from rl8x.checkpoint.metadata import Build, DescribedEnv
from rl8x.checkpoint.tree import CheckpointError
from rl8x.conditions import Condition
from rl8x.distributions import Distribution
from rl8x.envs import Env, GymnasiumEnv
from rl8x.envs.setter_base import Setter
from rl8x.envs.stand_in import StandIn
from rl8x.importing import (
    CLASS,
    NOT_PLAIN,
    Trust,
    UntrustedError,
    check_gymnasium_id,
    dotted_path,
    from_plain,
    import_class,
    is_dotted,
    texts,
    to_plain,
)
from rl8x.models import Model
from rl8x.policy import Policy
from rl8x.replay.dataset import Dataset
from rl8x.spaces import space_from_plain, space_to_plain
from rl8x.tracking.secrets import find_hidden, hide_in_data

# What a file may name: all that rl8x calls by a user's word.
_KINDS: Final = (Env, gymnasium.Env, AlgorithmConfig, Condition, Model, Distribution, nn.Module)
# Problems with what is not needed to act: the spaces are enough.
_STOOD_IN_FOR: Final = ("`dataset` is ", "the environment")


def describe_algorithm(algorithm: GenericAlgorithmBase[Any]) -> Build:
    """Describe how an algorithm was built as plain data; values that a file cannot hold are listed as `problems`."""
    problems: list[str] = []
    config, policy = algorithm.config, algorithm.policy
    values = {}
    for field in dataclasses.fields(config):
        plain = _plain(getattr(config, field.name))
        if plain is NOT_PLAIN:
            problems.append(
                f"`{field.name}` is {type(getattr(config, field.name)).__name__}, which cannot be saved to a file"
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
        "env_class": None if algorithm.env is None else type(algorithm.env).__name__,
        "spaces": [_described_space(space) for space in (policy.observation_space, policy.action_space)],
        "policy": _describe_policy(policy),
        "algorithm": type(algorithm).__name__,
        "state_reset_every": algorithm.state_reset_every,
        "clock": algorithm.clock,
        "problems": problems,
    }


def _describe_env(algorithm: GenericAlgorithmBase[Any], problems: list[str]) -> DescribedEnv | None:
    factory = algorithm.env_factory
    if algorithm.env is None:
        return None
    if factory is None:
        problems.append("the environment was given as an instance")
        return None
    made_by = factory if isinstance(factory, functools.partial) else functools.partial(factory)
    path = _path(made_by.func)
    arguments = to_plain({"args": list(made_by.args), "kwargs": dict(made_by.keywords)}, _form_for_env)
    if path is None:
        problems.append("the environment is not made by a class or a function that is an attribute of a module")
        return None
    if arguments is NOT_PLAIN:
        problems.append("the environment's arguments cannot be saved to a file")
        return None
    return {"class": path, "args": arguments["args"], "kwargs": arguments["kwargs"]}


def _described_space(space: gymnasium.Space[Any]) -> Any:
    """Return a space as plain data; None for a kind that rl8x does not know."""
    try:
        return space_to_plain(space)
    except ValueError:
        return None


def _describe_policy(policy: Policy) -> dict[str, Any] | None:
    """Describe by what the policy is made beside its spaces; None if no file can say it."""
    try:
        return policy.describe()
    except TypeError:
        return None


def _plain(value: Any) -> Any:
    """Return a value as JSON data; `NOT_PLAIN` if JSON cannot represent it."""
    return to_plain(value, _form)


def _form(part: Any) -> Any:
    return part.to_dict() if isinstance(part, Setter) else part


def _form_for_env(part: Any) -> Any:
    """Return the form of an environment's argument in a file: of a function, as one that makes a copy, its path."""
    path = _path(part) if isinstance(part, types.FunctionType) else None
    return _form(part) if path is None else {CLASS: path}


def _path(maker: Any) -> str | None:
    """Return the dotted path of a class or function; None if no other process finds it."""
    path = dotted_path(maker)
    own = path is not None and path.startswith("__main__.") and not isinstance(maker, type)
    return None if own else path


def restored(value: Any, trust: Trust) -> Any:
    """Replace `{"$class": path}` in plain data by the classes.

    Raises:
        UntrustedError: If it names what it may not, also by a Gymnasium id of the form `module:MyEnv-v0`.
        ValueError: If there is no such class.
    """
    return from_plain(value, _KINDS, trust=trust)


def restored_options(config_class: type[AlgorithmConfig], values: Mapping[str, Any], trust: Trust) -> dict[str, Any]:
    """Return hyperparameters with the classes that they name, also by a dotted path alone where a class is wanted.

    Raises:
        UntrustedError: If a hyperparameter names a class that may not be imported.
        ValueError: If there is no such class.
    """
    kinds = {field.name: str(field.type) for field in dataclasses.fields(config_class)}
    return {
        name: import_class(value, _KINDS, trust=trust)
        if "type[" in kinds.get(name, "") and isinstance(value, str) and is_dotted(value)
        else restored(value, trust)
        for name, value in values.items()
    }


def build_algorithm(
    build: Build,
    overrides: Mapping[str, Any],
    *,
    trust: bool = False,
    only_acts: bool = False,
    env: Any = None,
) -> GenericAlgorithmBase[Any]:
    """Build the algorithm that `describe_algorithm` described, but for `overrides`, the user's own words.

    One that only acts does not learn: there may be no room for its experience on this machine, or its data set may not
    be here, or nothing that makes its environment; something of the same spaces then stands for them.

    Raises:
        CheckpointError: If it cannot be built from a file.
        ValueError: If an override is not a legal hyperparameter.
    """
    problems = [
        problem
        for problem in build["problems"]
        if not (only_acts and problem.startswith(_STOOD_IN_FOR) and None not in build["spaces"])
    ]
    instead = "" if only_acts else "pass `algorithm=`"
    hidden = find_hidden(build["config"], "config") or (None if only_acts else find_hidden(build["env"], "env"))
    if hidden is not None:
        problems.append(f"no password is kept in a checkpoint, and `{hidden}` had one")
    if problems:
        hint = instead and f". P{instead[1:]}"
        raise CheckpointError(f"the algorithm cannot be built again from the checkpoint: {problems[0]}{hint}")
    try:
        config_class: type[AlgorithmConfig] = _imported(build["config_class"], AlgorithmConfig, trust)
        values = restored_options(config_class, build["config"], trust)
        maker, kwargs = env_maker_of(build, trust) if env is None else (env, {})
        if only_acts and build["env_class"] is None and hasattr(config_class, "dataset"):
            values["dataset"] = Dataset.stand_in(*spaces_of(build))
    except (KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"the checkpoint does not say how its algorithm is built ({error!r})") from None
    except UntrustedError as error:
        raise CheckpointError(str(error)) from None
    except ValueError as error:
        hint = instead and f" Or {instead}"
        raise CheckpointError(f"the algorithm cannot be built again: {error}{hint}") from None
    check_names(overrides, config_class)
    _check_known(values, config_class)
    config = config_class(**{**values, **restored_options(config_class, overrides, trust=True)})
    if not only_acts:
        return config.build(maker, **kwargs)
    with no_memory_checks(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".* has no effect: ", RuntimeWarning)  # on learning
        return config.build(_stand_in(build, config) if maker is None and build["env_class"] else maker, **kwargs)


def env_maker_of(build: Build, trust: bool) -> tuple[Any, dict[str, Any]]:
    """Return the maker of the environment that a description describes, and its keyword arguments.

    The maker is None where there is no environment, or the description does not say all of it.

    Raises:
        ValueError: If what it names cannot be imported or makes no environments, or may not be imported.
    """
    described = build["env"]
    if described is None or find_hidden(described, "env") is not None:
        return None, {}
    maker = import_class(described["class"], (Env,), trust=trust)
    if not (issubclass(maker, Env) if isinstance(maker, type) else callable(maker)):
        raise CheckpointError(f"{described['class']!r} is not a subclass of Env, nor a function that makes one")
    args, kwargs = (restored(described[name], trust) for name in ("args", "kwargs"))
    is_gymnasiums = isinstance(maker, type) and issubclass(maker, GymnasiumEnv)
    for name in [*args[:1], kwargs.get("env")] if is_gymnasiums else ():
        if isinstance(name, str):
            check_gymnasium_id(name, trust)
    return functools.partial(maker, *args) if args else maker, kwargs


def spaces_of(build: Build) -> list[gymnasium.Space[Any]]:
    """Return the spaces of observations and actions that a description describes.

    Raises:
        CheckpointError: If it does not.
    """
    try:
        return [space_from_plain(space or {}) for space in build["spaces"]]
    except (ArithmeticError, AssertionError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise CheckpointError(f"it does not say what the spaces are ({error!r:.120})") from None


def _stand_in(build: Build, config: Any) -> StandIn:
    """Make what has the spaces of the environment that a description does not describe."""
    problems = (each for each in build["problems"] if each.startswith("the environment"))
    problem = next(problems, "no password is kept in a checkpoint, and its arguments had one")
    return StandIn(
        config.num_envs,
        *spaces_of(build),
        episodic=not build["state_reset_every"],
        problem=problem,
        device=resolve_device(config.device),
    )


def _imported(path: str | None, base: type, trust: Trust) -> Any:
    """Import a class by its path, and check that it is a subclass of `base`, even if the path is trusted."""
    cls = import_class(str(path), (base,), trust=trust)
    if not isinstance(cls, type) or not issubclass(cls, base):
        raise CheckpointError(f"{path!r} is not a subclass of {base.__name__}")
    return cls


def _check_known(values: Mapping[str, Any], config_class: type[AlgorithmConfig]) -> None:
    """Raise if there are hyperparameters of a newer version, without which the run would differ."""
    known = {field.name for field in dataclasses.fields(config_class)}
    unknown = [name for name in values if name not in known]
    if unknown:
        listed = ", ".join(f"`{name}`" for name in unknown)
        raise CheckpointError(
            f"{config_class.__name__} of rl8x {__version__} does not have the hyperparameters {listed} of this "
            "checkpoint: resume it with the version that wrote it, which its checkpoint.json names"
        )


def names_in(build: Mapping[str, Any], *parts: str) -> Iterator[str]:
    """Yield what is imported when some parts of a description are made again, as far as it has a form in a file.

    The parts are `"env"` and `"policy"`; without any, those that the algorithm is built of.
    """
    for part in [build[name] or {} for name in parts or ("config", "env")]:
        yield from classes_in(part)
        if "class" in part:
            yield part["class"]
            yield from (text for text in texts([part.get("args"), part.get("kwargs")]) if not is_dotted(text))
    if not parts and build["config_class"] is not None:
        yield build["config_class"]


def classes_in(value: Any) -> Iterator[str]:
    """Yield the paths of the classes in plain data."""
    if isinstance(value, Mapping):
        if set(value) == {CLASS}:
            yield value[CLASS]
        value = list(value.values())
    for part in value if isinstance(value, list | tuple) else ():
        yield from classes_in(part)


def changes(build: Build, algorithm: GenericAlgorithmBase[Any]) -> dict[str, tuple[Any, Any]]:
    """Compare an algorithm with a description; return the differences, as old and new values.

    A seed that the config leaves open does not count, because the restored generators make it irrelevant.
    Hyperparameters that an older version did not have had their defaults; a warning names them.

    Raises:
        CheckpointError: If it is for another environment or of another kind.
    """
    now = hide_in_data(describe_algorithm(algorithm))
    for kind, was, is_now in (
        ("config", build["config_class"], now["config_class"]),
        ("environment", build["env_class"], now["env_class"]),
    ):
        if was != is_now:
            raise CheckpointError(f"the checkpoint's {kind} is {was}; the algorithm given has {is_now}")
    before = dict(build["config"])
    no_form = " ".join([*build["problems"], *now["problems"]])
    missing = {
        field.name: _plain(default_of(field))
        for field in dataclasses.fields(algorithm.config)
        if field.name not in before
        and f"`{field.name}` is " not in no_form
        and default_of(field) is not dataclasses.MISSING
    }
    if missing:
        listed = ", ".join(f"{name}={value!r}" for name, value in missing.items())
        warnings.warn(
            f"the checkpoint is of another version, without these hyperparameters, which take their defaults: {listed}",
            RuntimeWarning,
            stacklevel=5,
        )
    _check_known(before, type(algorithm.config))
    before |= missing
    different = {name for name in {*before, *now["config"]} if before.get(name) != now["config"].get(name)}
    if algorithm.config.seed is None:
        different.discard("seed")
    return {name: (before.get(name), now["config"].get(name)) for name in sorted(different)}


def default_of(field: dataclasses.Field[Any]) -> Any:
    """Return the default of a hyperparameter; `dataclasses.MISSING` if it has none."""
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
