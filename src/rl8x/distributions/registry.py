"""Action distributions by name, and the one that goes with an action space."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import gymnasium

from rl8x.distributions.base import Distribution
from rl8x.distributions.bernoulli import Bernoulli
from rl8x.distributions.categorical import Categorical
from rl8x.distributions.composite import Composite
from rl8x.distributions.multi_categorical import MultiCategorical
from rl8x.distributions.normal import Normal
from rl8x.distributions.squashed_normal import SquashedNormal
from rl8x.nn.names import check_arguments, unknown_name
from rl8x.spaces import describe

BUILTIN: dict[str, type[Distribution]] = {
    "categorical": Categorical,
    "normal": Normal,
    "squashed_normal": SquashedNormal,
    "multi_categorical": MultiCategorical,
    "bernoulli": Bernoulli,
    "composite": Composite,
}
_BY_SPACE: dict[type[gymnasium.Space[Any]], str] = {
    gymnasium.spaces.Discrete: "categorical",
    gymnasium.spaces.Box: "normal",
    gymnasium.spaces.MultiDiscrete: "multi_categorical",
    gymnasium.spaces.MultiBinary: "bernoulli",
    gymnasium.spaces.Dict: "composite",
    gymnasium.spaces.Tuple: "composite",
}


def make_distribution(
    spec: str | type[Distribution] | None,
    action_space: gymnasium.Space[Any],
    config: Mapping[str, Any] | None = None,
) -> Distribution:
    """Make the distribution over an action space.

    Args:
        spec: Built-in name or a subclass of `Distribution`; None picks by the space, as `default_name` says.
        action_space: Space of one copy's action.
        config: Further arguments of its class.

    Raises:
        TypeError: If `spec` is none of these, or the class is not for such a space.
        ValueError: If the name, the space or an argument is unknown.
    """
    if spec is None:
        spec = default_name(action_space)
    if isinstance(spec, str):
        if spec not in BUILTIN:
            raise ValueError(unknown_name("distribution", spec, BUILTIN))
        spec = BUILTIN[spec]
    if not inspect.isclass(spec) or not issubclass(spec, Distribution):
        raise TypeError(
            f"`distribution` must be a name ({', '.join(BUILTIN)}) or a subclass of Distribution; got {spec!r}."
        )
    config = dict(config or {})
    check_arguments(spec, config, "distribution_config", num_positional=1)
    return spec(action_space, **config)


def default_name(action_space: gymnasium.Space[Any]) -> str:
    """Name the distribution that goes with an action space.

    Raises:
        ValueError: If there is none.
    """
    for space_class, name in _BY_SPACE.items():
        if isinstance(action_space, space_class):
            return name
    legal = ", ".join(space_class.__name__ for space_class in _BY_SPACE)
    given = describe(action_space)
    raise ValueError(f"no built-in distribution for the action space {given}; there are for {legal}. Pass your own.")
