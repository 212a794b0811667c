"""Stop conditions: callables on the train statistics that decide when a run ends, composed with `&`, `|` and `~`.

    learned = Plateau("episodes/returns/mean", patience=20) & HitsUpperBound("env/steps", 1_000_000)
    trainer.run(stop_conditions=[learned, WallTime("2h")])

The run stops when one condition of the list is met. Each condition sees every row, even if another one is met.
"""

from rl8x.conditions.base import And, Condition, Not, Or, as_condition
from rl8x.conditions.kinds import (
    Confirmed,
    HitsLowerBound,
    HitsUpperBound,
    NonFinite,
    Plateau,
    StopsDecreasing,
    StopsIncreasing,
    WallTime,
)
from rl8x.conditions.spec import from_spec, to_spec

__all__ = [
    "And",
    "Condition",
    "Confirmed",
    "HitsLowerBound",
    "HitsUpperBound",
    "NonFinite",
    "Not",
    "Or",
    "Plateau",
    "StopsDecreasing",
    "StopsIncreasing",
    "WallTime",
    "as_condition",
    "from_spec",
    "to_spec",
]
