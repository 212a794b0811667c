"""Describes objects that a script made, an algorithm, its environment and a trainer's options, as a `RunSpec`."""

from __future__ import annotations

import dataclasses
import inspect
import types
from typing import Any

from rl8x import algorithms
from rl8x.algorithms.base import AlgorithmConfig, GenericAlgorithmBase
from rl8x.config.files import unwritable
from rl8x.config.spec import AlgorithmSpec, EnvSpec, RunSpec, TrainerSpec, default_of
from rl8x.envs import GymnasiumEnv, registry
from rl8x.envs.bindings import Binding
from rl8x.importing import CLASS, NOT_PLAIN, dotted_path, import_named, to_plain
from rl8x.plain import own_values


def run_spec(algorithm: GenericAlgorithmBase[Any], trainer: TrainerSpec | None = None) -> RunSpec:
    """Return the spec that makes an algorithm and its trainer."""
    config = algorithm_spec(algorithm.config)
    return RunSpec(env=env_spec(algorithm), algorithm=config, trainer=trainer or TrainerSpec())


def env_spec(algorithm: GenericAlgorithmBase[Any]) -> EnvSpec:
    """Return the spec that makes an algorithm's environment, unwritable if no file can describe it."""
    if algorithm.env is None:
        return EnvSpec()
    if algorithm.env_factory is None:
        return EnvSpec(env=unwritable("the environment was given as an instance"))
    made_by = registry.env_maker(algorithm.env_factory, trust=True)
    maker, path = made_by.func, _path(made_by.func)
    args, kwargs = (to_plain(own_values(given), _form_for_env) for given in (list(made_by.args), made_by.arguments))
    if path is None:
        why = "the environment is not made by a class or a function that is an attribute of a module"
        return EnvSpec(env=unwritable(why))
    if args is NOT_PLAIN or kwargs is NOT_PLAIN:
        return EnvSpec(env=unwritable("the environment's arguments cannot be saved to a file"))
    if registry.BUILTIN.get(getattr(maker, "__name__", "")) is maker and not args:
        return EnvSpec(env=maker.__name__, env_kwargs=kwargs)
    if maker is GymnasiumEnv and len(args) == 1 and args[0] not in [*registry.BUILTIN]:
        named = args[0][CLASS] if isinstance(args[0], dict) and set(args[0]) == {CLASS} else None
        if named is None or isinstance(import_named(named, trust=True), type):
            return EnvSpec(env=str(named or args[0]), env_kwargs=kwargs)
    by_name = dict(zip(inspect.signature(maker).parameters, args, strict=False)) if args else {}
    return EnvSpec(env=path, env_kwargs=by_name | kwargs)


def algorithm_spec(config: AlgorithmConfig) -> AlgorithmSpec:
    """Describe a config by its class and the hyperparameters that are not at their defaults."""
    cls, values = type(config), {}
    path: Any = dotted_path(cls)
    if path is None:
        path = unwritable(f"{cls.__qualname__} is not an attribute of a module")
    elif getattr(algorithms, cls.__name__, None) is cls:
        path = cls.__name__.removesuffix("Config")
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if value != default_of(field):
            by_path = isinstance(value, type) and "type[" in str(field.type)
            values[field.name] = (dotted_path(value) if by_path else None) or plain_value(field.name, value)
    return AlgorithmSpec(algorithm=path, algorithm_config=values)


def plain_value(name: str, value: Any) -> Any:
    """Return a hyperparameter as JSON data, or an `unwritable` placeholder."""
    plain = to_plain(value, _form)
    if plain is NOT_PLAIN:
        return unwritable(f"`{name}` is {type(value).__name__}, which cannot be saved to a file")
    return plain


def _form(part: Any) -> Any:
    return part.to_dict() if isinstance(part, Binding) else part


def _form_for_env(part: Any) -> Any:
    """Return an environment's argument in plain form; a function, such as one that makes a copy, by its path."""
    path = _path(part) if isinstance(part, types.FunctionType) else None
    return _form(part) if path is None else {CLASS: path}


def _path(maker: Any) -> str | None:
    """Return the dotted path of a class or function; None if no other process can import it."""
    path = dotted_path(maker)
    own = path is not None and path.startswith("__main__.") and not isinstance(maker, type)
    return None if own else path
