"""The conditions of rl8x: a new one is imported and listed here, and nowhere else."""

from __future__ import annotations

import re
from typing import Final

from rl8x.conditions.base import And, Condition, Not, Or
from rl8x.conditions.confirmed import Confirmed
from rl8x.conditions.metrics import (
    HitsLowerBound,
    HitsUpperBound,
    NonFinite,
    Plateau,
    StopsDecreasing,
    StopsIncreasing,
)
from rl8x.conditions.wall_time import WallTime

__all__ = [  # noqa: RUF022 - in the order in which messages list them
    "And",
    "Or",
    "Not",
    "HitsLowerBound",
    "HitsUpperBound",
    "Plateau",
    "StopsDecreasing",
    "StopsIncreasing",
    "WallTime",
    "NonFinite",
    "Confirmed",
]
_OTHER_NAMES: Final = {"And": "all", "Or": "any", "Not": "not"}
KINDS: Final[dict[str, type[Condition]]] = {
    _OTHER_NAMES.get(name, re.sub("(?<=[a-z])(?=[A-Z])", "_", name).lower()): globals()[name] for name in __all__
}
"""By the names that run files use: `WallTime` is `wall_time`."""
