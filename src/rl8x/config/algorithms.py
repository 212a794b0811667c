"""Config classes of algorithms, found by the names that run files and the command line use."""

from __future__ import annotations

from rl8x import algorithms
from rl8x.algorithms import AlgorithmConfig
from rl8x.config.files import shortened
from rl8x.importing import Trust, import_named, is_dotted
from rl8x.names import did_you_mean


def algorithm_configs() -> dict[str, type[AlgorithmConfig]]:
    """Return the config classes of the built-in algorithms by the algorithm's name."""
    return {
        name.removesuffix("Config"): cls
        for name, cls in vars(algorithms).items()
        if isinstance(cls, type) and issubclass(cls, AlgorithmConfig) and cls.algorithm is not None
    }


def algorithm_config_class(name: str, trust: Trust) -> type[AlgorithmConfig]:
    """Return the config class of an algorithm by its name, or by the dotted path of the class.

    Raises:
        ValueError: If there is no such config class, or it may not be imported.
    """
    known = algorithm_configs()
    plain = name.lower().replace("_", "").removesuffix("config")  # fast_td3 is FastTD3
    builtin = {known_name.lower(): cls for known_name, cls in known.items()}.get(plain)
    if builtin is not None:
        return builtin
    if not is_dotted(name):
        listed = f"{', '.join(known)}.{did_you_mean(name, known)}"
        raise ValueError(f"no built-in algorithm {shortened(name)}; there are {listed}")
    cls = import_named(name, trust=trust)
    if not isinstance(cls, type) or not issubclass(cls, AlgorithmConfig):
        raise ValueError(f"`algorithm` must name a subclass of rl8x.algorithms.AlgorithmConfig; got {name!r}.")
    return cls
