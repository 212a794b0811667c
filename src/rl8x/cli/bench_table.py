"""What `rl8x bench` says about its measurements: a row for each mode, and when compiling is earned back."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from rl8x.cli.envs import table

Row = Mapping[str, Any]


class BreakEven(NamedTuple):
    """When a mode that begins later has overtaken another.

    Attributes:
        transitions: After so many transitions, a whole number of iterations; 0 where it never was behind.
        seconds: After so many seconds of training in that mode.
    """

    transitions: int
    seconds: float


def break_even(eager: Row, other: Row) -> BreakEven | None:
    """Find when a mode has earned back against eager execution what its first iteration took longer.

        n iterations take  first + (n - 1) * each,  each = transitions / transitions_per_s
        first' + (n - 1) * each' <= first + (n - 1) * each   at   n = 1 + (first' - first) / (each - each')

    Args:
        eager: `first_iteration_s`, `transitions_per_s`, and `transitions` of an iteration, in eager execution.
        other: The same in the other mode.

    Returns:
        The first whole iteration after which it is not behind; None if it never catches up.
    """
    transitions = int(other["transitions"])
    behind = other["first_iteration_s"] - eager["first_iteration_s"]
    each = transitions / other["transitions_per_s"]
    gained = transitions / eager["transitions_per_s"] - each
    if behind <= 0:
        return BreakEven(0, 0.0) if gained >= 0 else None
    if gained <= 0:
        return None
    more = math.ceil(behind / gained - 1e-9)  # no further iteration for a rounding error
    return BreakEven((1 + more) * transitions, other["first_iteration_s"] + more * each)


def summarize(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Put the passes of each mode and precision together, in the order of their first.

    The middle is the median of the passes' medians; the range is that of the passes, or of the iterations of a single
    pass. A mode of which every pass failed has its `error`.
    """
    cells = dict.fromkeys((row["execution"], row["precision"]) for row in rows)
    return [_summarize([row for row in rows if (row["execution"], row["precision"]) == cell]) for cell in cells]


def _summarize(rows: Sequence[Row]) -> dict[str, Any]:
    named = {"execution": rows[0]["execution"], "precision": rows[0]["precision"]}
    good = [row for row in rows if "transitions_per_s" in row]
    failures = [row["error"] for row in rows if "error" in row]
    if failures:
        named |= {"error": failures[0], "failures": len(failures)}
    if not good:
        return named
    rates = [row["transitions_per_s"] for row in good]
    low, high = min(rates), max(rates)
    if len(good) == 1:
        low, high = (good[0]["transitions"] / good[0][name] for name in ("slowest_s", "fastest_s"))
    figures = ("first_iteration_s", "collect_ms", "step_ms", "tracking_ms")
    peaks = [name for name in ("peak_memory_mb", "peak_device_mb") if name in good[0]]
    return {
        **named,
        "passes": len(good),
        "transitions": good[0]["transitions"],
        "transitions_per_s": statistics.median(rates),
        "lowest": low,
        "highest": high,
        **{name: statistics.median(row[name] for row in good) for name in figures},
        **{name: max(row[name] for row in good) for name in peaks},
    }


def render(summary: Sequence[Row]) -> str:
    """Return the table, why modes failed below it, and which was the fastest."""
    measured = [row for row in summary if "transitions_per_s" in row]
    on_device = any("peak_device_mb" in row for row in measured)
    header = ["mode", "precision", "transitions/s", "range", "first iteration s", "collect ms", "step ms"]
    header += ["tracking ms", "peak memory MB", *(["peak device MB"] if on_device else [])]
    lines = [tuple(header)]
    for row in summary:
        if "transitions_per_s" not in row:
            lines.append((row["execution"], row["precision"], "failed", *[""] * (len(header) - 3)))
            continue
        cells = [row["execution"], row["precision"], short(row["transitions_per_s"])]
        cells += [f"{short(row['lowest'])} - {short(row['highest'])}", f"{row['first_iteration_s']:.2f}"]
        cells += [f"{row['collect_ms']:.1f}", f"{row['step_ms']:.1f}", f"{row['tracking_ms']:.2f}"]
        cells += [f"{row['peak_memory_mb']:.0f}"]
        cells += [f"{row.get('peak_device_mb', 0.0):.0f}"] if on_device else []
        lines.append(tuple(cells))
    failed = [f"{row['execution']} {row['precision']} failed: {row['error']}" for row in summary if "error" in row]
    return "\n".join([table(lines), *([""] if failed else []), *failed, "", verdict(summary)])


def verdict(summary: Sequence[Row]) -> str:
    """Say in one line which mode was the fastest, and when it has earned back what it takes to compile."""
    measured = [row for row in summary if "transitions_per_s" in row]
    if not measured:
        return "No mode could be measured."
    best = max(measured, key=lambda row: float(row["transitions_per_s"]))
    name = f"{best['execution']} {best['precision']}"
    said = f"Fastest: {name}, {short(best['transitions_per_s'])} transitions/s"
    eager = next(
        (row for row in measured if (row["execution"], row["precision"]) == ("eager", best["precision"])), None
    )
    if eager is None or eager is best:
        return f"{said}."
    ratio = best["transitions_per_s"] / eager["transitions_per_s"]
    said += f", {ratio:.2f} times eager {best['precision']}"
    point = break_even(eager, best)
    if point is None:
        return f"{said}; its longer first iteration is never earned back."
    if not point.transitions:
        return f"{said}; it is ahead from the first iteration on."
    return (
        f"{said}; its first iteration is earned back after {short(point.transitions)} transitions, "
        f"{point.seconds:.1f} s of training."
    )


def short(rate: float) -> str:
    """Write a count in three digits: 3.21M, 412k, 83."""
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if rate >= size:
            number = rate / size
            digits = 2 if number < 10 else 1 if number < 100 else 0
            return f"{number:.{digits}f}{unit}"
    return f"{rate:.0f}"
