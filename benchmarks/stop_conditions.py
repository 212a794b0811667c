"""Where conditions stop curves of known shapes: the table of docs/conditions.md.

Noise is Gaussian, of `SEEDS` seeds. Nothing is trained.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable
from typing import NamedTuple

from benchmarks.results import table
from rl8x import conditions
from rl8x.conditions import Condition

SEEDS, LENGTH, NAME = 100, 1000, "metric"


class Curve(NamedTuple):
    """A metric by the number of its values, and its noise."""

    title: str
    value: Callable[[int], float]
    noise: float


def rise(k: int, tau: float) -> float:
    """Return a return that goes from 20 to 480."""
    return 480.0 - 460.0 * math.exp(-k / tau)


def late(k: int) -> float:
    """Return one that is exactly -200 until something is reached at last, as in MountainCar."""
    return -200.0 if k < 60 else -110.0 - 90.0 * math.exp(-(k - 60) / 40)


SMOOTH = Curve("a smooth rise, `480 - 460 exp(-k / 60)`", lambda k: rise(k, 60), 0.0)
SLOW = Curve("a slower one, `480 - 460 exp(-k / 200)`", lambda k: rise(k, 200), 0.0)
NOISY = Curve("a noisy rise, `480 - 460 exp(-k / 30)`, noise 24", lambda k: rise(k, 30), 24.0)
FLAT = Curve("flat and noisy, 100, noise 5", lambda k: 100.0, 5.0)
LATE = Curve("a late start, -200 for 60 values, then to -110", late, 0.0)
LOSS = Curve("a loss that falls to 0, `exp(-k / 30)`, noise 0.01", lambda k: math.exp(-k / 30), 0.01)
# Conditions for the curves, each with why it does not fit, if so.
CASES = (
    (SMOOTH, "Plateau(name, patience=10, rtol=0.01)", ""),
    (SMOOTH, "StopsIncreasing(name, patience=10, rtol=0.01)", ""),
    (SMOOTH, "StopsIncreasing(name, patience=10)", "every value is the highest, by however little"),
    (SLOW, "Plateau(name, patience=10, rtol=0.01)", ""),
    (SLOW, "Plateau(name, patience=3, rtol=0.01)", "three values are too short to see it rise"),
    (NOISY, "Plateau(name, patience=30, rtol=0.05)", ""),
    (NOISY, "StopsIncreasing(name, patience=30)", ""),
    (NOISY, "Plateau(name, patience=10, rtol=0.01)", "means of ten values still differ by more"),
    (FLAT, "Plateau(name, patience=20, rtol=0.05)", ""),
    (FLAT, "StopsIncreasing(name, patience=20)", ""),
    (FLAT, "Plateau(name, patience=5, rtol=0.001)", "the defaults are for evaluations that repeat"),
    (LATE, "Plateau(name, patience=10, rtol=0.01, after=60)", ""),
    (LATE, "StopsIncreasing(name, patience=10, atol=1.0, after=60)", ""),
    (LATE, "Plateau(name, patience=10, rtol=0.01)", "before it starts it is as flat as it can be"),
    (LOSS, "Plateau(name, patience=20, rtol=0.0, atol=0.01)", ""),
    (LOSS, "StopsDecreasing(name, patience=20, atol=0.01)", ""),
    (LOSS, "Plateau(name, patience=20, rtol=0.05)", "5% of nothing is nothing"),
)


def stop(condition: Condition, curve: Curve, seed: int) -> int | None:
    """Return the number of values that a condition has seen when it is met; None if it never is."""
    draw = random.Random(seed)
    for k in range(LENGTH):
        if condition({NAME: curve.value(k) + (draw.gauss(0.0, curve.noise) if curve.noise else 0.0)}):
            return k + 1
    return None


def row(curve: Curve, condition: str) -> tuple[str, str, str]:
    """Return the condition, after how many values it stops the curve, and how much of its way that has come then."""
    seeds = range(SEEDS if curve.noise else 1)
    stops = [stop(eval(condition, {**vars(conditions), "name": NAME}), curve, seed) for seed in seeds]
    shown = f"`{condition}`"
    ends = sorted(LENGTH + 1 if end is None else end for end in stops)
    if ends[0] > LENGTH:
        return shown, f"never in {LENGTH:,}", ""
    low, middle, high = ends[len(ends) // 20], int(statistics.median_low(ends)), ends[-1 - len(ends) // 20]
    after = f"{middle}" if low == high else f"{middle} ({low} to {'never' if high > LENGTH else high})"
    first, last = curve.value(0), curve.value(LENGTH)
    return shown, after, f"{(curve.value(middle - 1) - first) / (last - first):.0%}" if first != last else "flat"


def report() -> str:
    """Return the table as Markdown."""
    lines, before = [], None
    for curve, condition, why in CASES:
        shown, after, way = row(curve, condition)
        fits = "never" not in after and (way == "flat" or float(way.rstrip("%")) >= 85)
        assert fits == (why == ""), f"{shown} stops {curve.title} after {after} values"
        lines.append(["" if curve is before else curve.title, shown, after, way, why])
        before = curve
    return table(["curve", "condition", "stops after values", "of its way", "does not fit, since"], lines)
