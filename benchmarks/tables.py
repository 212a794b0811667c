"""Reads the rows of a measurement, and formats numbers and tables."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from benchmarks.processes import PEERS

Row = dict[str, Any]
PRECISIONS = ("fp32", "tf32", "bf16")


def names(rows: Sequence[Row], key: str) -> list[Any]:
    """Return the values of a key, in the order of their first row."""
    return list(dict.fromkeys(row[key] for row in rows))


def ordered(peers: Iterable[str]) -> list[str]:
    """Return peers in the order of the tables."""
    return [peer for peer in PEERS if peer in set(peers)]


def variants_of(rows: Sequence[Row], peer: str) -> list[str]:
    """Return the variants of a peer that were tried: those that it always has, then others as they came."""
    tried = set(select(rows, "variant", peer=peer))
    known = [variant for variant in PEERS[peer].variants if variant in tried]
    return known + [
        name for name in names([row for row in rows if row["peer"] == peer], "variant") if name not in known
    ]


def precision_of(variant: str) -> str:
    """Return the precision that a variant multiplies in."""
    return next((precision for precision in PRECISIONS if precision in variant), "fp32")


def select(rows: Sequence[Row], key: str, **tags: Any) -> list[Any]:
    """Return the values of a key in the rows with these tags."""
    return [row[key] for row in rows if key in row and all(row.get(name) == value for name, value in tags.items())]


class Best(NamedTuple):
    """The fastest variant of a library on a work: its median rate, and the most memory that a process of it took."""

    variant: str
    rate: float
    memory_mb: float


def best(rows: Sequence[Row], work: str, peer: str, precision: str | None = None) -> Best | None:
    """Find the fastest variant of a library on a work; None where nothing was measured.

    Args:
        rows: Of a throughput measurement.
        work: Which work.
        peer: Which library.
        precision: Only variants in this precision; None takes all.
    """
    found = []
    for variant in variants_of(rows, peer):
        tags = {"work": work, "peer": peer, "variant": variant}
        rates = select(rows, "transitions_per_s", **tags)
        if rates and precision in (None, precision_of(variant)):
            memory = max(select(rows, "peak_rss_mb", **tags), default=float("nan"))
            found.append(Best(variant, statistics.median(rates), memory))
    return max(found, key=lambda one: one.rate, default=None)


def best_limits(limits: Iterable[Row]) -> dict[str, dict[str, float]]:
    """Return the highest GFLOP/s that was seen, by precision and width."""
    highest: dict[str, dict[str, float]] = {}
    for row in limits:
        for precision in PRECISIONS:
            for width, limit in row.get(precision, {}).items():
                known = highest.setdefault(precision, {})
                known[width] = max(known.get(width, 0.0), limit["gflops"])
    return highest


def best_bandwidth(limits: Iterable[Row]) -> float | None:
    """Return the highest GB/s of memory that was seen; None where it was not measured."""
    return max((row["bytes_gb_per_s"] for row in limits if "bytes_gb_per_s" in row), default=None)


def share_of_limit(result: Row, work: str, rate: float, precision: str) -> float | None:
    """Return the share that a rate is of what the matrix product allows; None where that was not measured."""
    about = result["works"][work]
    limit = best_limits(result.get("limits", [])).get(precision, {}).get(str(about["hidden"]))
    return None if not limit else rate * about["flops"] / limit / 1e9


def short(rate: float) -> str:
    """Write a rate: 3.2M, 412k, 4.7k, 83."""
    for unit, size in (("M", 1e6), ("k", 1e3)):
        if rate >= size:
            number = rate / size
            return f"{number:.1f}{unit}" if number < 10 else f"{number:.0f}{unit}"
    return f"{rate:.0f}"


def percent(share: float | None) -> str:
    """Write a share; nothing where there is none."""
    return "" if share is None else f"{share:.0%}"


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
