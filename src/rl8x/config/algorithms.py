"""Classes that plain data names: algorithms by their names, models and whatever hyperparameters take by their paths."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any, Final

import gymnasium
from torch import nn

from rl8x import algorithms
from rl8x.algorithms import AlgorithmConfig, GenericAlgorithmBase
from rl8x.conditions import Condition
from rl8x.config.files import shortened
from rl8x.distributions import Distribution
from rl8x.envs import Env
from rl8x.importing import Trust, dotted_path, from_plain, import_class, import_named, is_dotted
from rl8x.models import Model
from rl8x.names import did_you_mean

# What a file may name: all that rl8x calls by a user's word.
_KINDS: Final = (Env, gymnasium.Env, AlgorithmConfig, Condition, Model, Distribution, nn.Module)


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
            f"no built-in algorithm {shortened(name)}; there are {listed} One of your own is named by its config "
            "class, such as my_module.MyConfig."
        )
    cls = import_named(name, trust=trust)
    if not isinstance(cls, type) or not issubclass(cls, AlgorithmConfig):
        raise ValueError(
            f"`algorithm` must name a subclass of rl8x.algorithms.AlgorithmConfig; got {name!r}{_config_hint(cls)}."
        )
    return cls


def _config_hint(named: object) -> str:
    """Return which config classes build what was named, if it is an algorithm's class."""
    if not isinstance(named, type) or not issubclass(named, GenericAlgorithmBase):
        return ""
    configs = dict.fromkeys(_below(AlgorithmConfig))
    paths = [dotted_path(cls) for cls in configs if cls.algorithm is named and not _is_preset(cls)]
    listed = " or ".join(path for path in paths if path is not None)
    return f", which is an algorithm. Name its config: {listed}" if listed else ", an algorithm that no config builds"


def _below(cls: type[AlgorithmConfig]) -> Iterator[type[AlgorithmConfig]]:
    for each in cls.__subclasses__():
        yield each
        yield from _below(each)


def _is_preset(cls: type[AlgorithmConfig]) -> bool:
    """Whether a config builds what its base class does."""
    return any(getattr(base, "algorithm", None) is cls.algorithm for base in cls.__bases__)


def restored(value: Any, trust: Trust) -> Any:
    """Replace `{"$class": path}` in plain data by the classes."""
    return from_plain(value, _KINDS, trust=trust)


def restored_options(config_class: type[AlgorithmConfig], values: Mapping[str, Any], trust: Trust) -> dict[str, Any]:
    """Return hyperparameters with the classes that they name, also by a dotted path alone where a class is wanted."""
    kinds = {field.name: str(field.type) for field in dataclasses.fields(config_class)}
    return {
        name: import_class(value, _KINDS, trust=trust)
        if "type[" in kinds.get(name, "") and isinstance(value, str) and is_dotted(value)
        else restored(value, trust)
        for name, value in values.items()
    }
