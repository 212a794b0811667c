"""Action distributions by name, and the one that goes with an action space."""

from __future__ import annotations

import inspect
import numbers
from collections.abc import Mapping
from typing import Any, Final

import gymnasium

from rl8x.distributions.base import Distribution
from rl8x.frozen import thawed
from rl8x.names import check_arguments, unknown_name
from rl8x.spaces import describe_space

BUILTIN: Final[dict[str, type[Distribution]]] = {}
"""The built-in distributions by name; the package fills it, since one of them makes its parts by this table."""


def make_distribution(
    spec: str | type[Distribution] | None,
    action_space: gymnasium.Space[Any],
    config: Mapping[str, Any] | None = None,
) -> Distribution:
    """Make the distribution over an action space.

    Args:
        spec: Built-in name or a subclass of `Distribution`; None picks by the space.
        action_space: Space of one copy's action.
        config: Further arguments of its class.

    Raises:
        TypeError: If `spec` is none of these, or the class is not for such a space.
        ValueError: If the name, the space or an argument is unknown.
    """
    if spec is None:
        spec = _default_name(action_space)
    if isinstance(spec, str):
        if spec not in BUILTIN:
            raise ValueError(unknown_name("distribution", spec, BUILTIN))
        spec = BUILTIN[spec]
    if not inspect.isclass(spec) or not issubclass(spec, Distribution):
        raise TypeError(
            f"`distribution` must be a name ({', '.join(BUILTIN)}) or a subclass of Distribution; got {spec!r}."
        )
    config = thawed(dict(config or {}))
    check_arguments(spec, config, "distribution_config", num_positional=1)
    made = spec(action_space, **config)
    for name in ("num_features", "num_noise"):
        number = getattr(made, name, None)
        if not isinstance(number, numbers.Integral) or number < 0:
            raise ValueError(
                f"{spec.__name__}.{name} must be a whole number, at least 0, set by the class or its __init__; got "
                f"{number!r}."
            )
    return made


def _default_name(action_space: gymnasium.Space[Any]) -> str:
    for name, distribution in BUILTIN.items():
        if isinstance(action_space, distribution.default_for):
            return name
    legal = ", ".join(kind.__name__ for distribution in BUILTIN.values() for kind in distribution.default_for)
    given = describe_space(action_space)
    raise ValueError(f"no built-in distribution for the action space {given}; there are for {legal}. Pass your own.")
