"""What rows of speeds have: cells, the fastest of them, shares of the machine's limits. The standard library alone."""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from benchmarks import results
from benchmarks.processes import PEERS
from benchmarks.results import Row, names, select, short

PRECISIONS = ("fp32", "tf32", "bf16")
table = functools.partial(results.table, rule="| --- ")


class Cell(NamedTuple):
    """What was measured of a work by a variant of a library, over its processes."""

    work: Any
    peer: str
    variant: str
    rates: list[float]
    rows: list[Row]

    @property
    def rate(self) -> float:
        """The median of transitions a second."""
        return statistics.median(self.rates)

    @property
    def names(self) -> list[str]:
        """Library and variant, as tables begin."""
        return [PEERS[self.peer].title, self.variant]

    @property
    def spread(self) -> str:
        """The range of transitions a second."""
        return f"{short(min(self.rates))} - {short(max(self.rates))}"

    def most(self, key: str) -> float:
        """Return the largest of a value; NaN where it was not measured."""
        return max(select(self.rows, key), default=float("nan"))


def ordered(peers: Iterable[str]) -> list[str]:
    """Return peers in the order of the tables."""
    return [peer for peer in PEERS if peer in set(peers)]


def variants_of(rows: Sequence[Row], peer: str) -> list[str]:
    """Return the variants of a peer that were tried: those that it always has, then others as they came."""
    tried = names(rows, "variant", peer=peer)
    known = [variant for variant in PEERS[peer].variants if variant in tried]
    return known + [variant for variant in tried if variant not in known]


def cells(rows: Sequence[Row], *peers: str, work: Any = None) -> list[Cell]:
    """Return the cells of rows, of all peers and works or of some, in the order of the tables."""
    return [
        Cell(each, peer, variant, select(mine, "transitions_per_s"), mine)
        for each in (names(rows, "work") if work is None else [work])
        for peer in peers or ordered(names(rows, "peer"))
        for variant in variants_of(rows, peer)
        for mine in [[row for row in rows if (row["work"], row["peer"], row["variant"]) == (each, peer, variant)]]
    ]


def precision_of(variant: str) -> str:
    """Return the precision that a variant multiplies in."""
    return next((precision for precision in PRECISIONS if precision in variant), "fp32")


def own_precisions(rows: Sequence[Row]) -> list[str]:
    """Return the precisions in which rl8x was tried."""
    tried = {precision_of(variant) for variant in variants_of(rows, "rl8x")}
    return [precision for precision in PRECISIONS if precision in tried]


def others(rows: Sequence[Row]) -> list[str]:
    """Return the libraries beside rl8x."""
    return [peer for peer in ordered(names(rows, "peer")) if peer != "rl8x"]


def best(rows: Sequence[Row], work: str, peer: str, precision: str | None = None) -> Cell | None:
    """Find the fastest variant of a library on a work, in a precision or in any; None where nothing was measured."""
    found = [cell for cell in cells(rows, peer, work=work) if precision in (None, precision_of(cell.variant))]
    return max((cell for cell in found if cell.rates), key=lambda cell: cell.rate, default=None)


def shown(cell: Cell | None, told: Callable[[Cell], str] = lambda cell: short(cell.rate)) -> str:
    """Write a cell's rate, or what else is told of it; a dash where nothing was measured."""
    return "-" if cell is None or not cell.rates else told(cell)


def best_limits(result: Row) -> dict[str, dict[str, float]]:
    """Return the highest GFLOP/s that was seen, by precision and width."""
    highest: dict[str, dict[str, float]] = {}
    for row in result.get("limits", []):
        for precision in PRECISIONS:
            for width, limit in row.get(precision, {}).items():
                known = highest.setdefault(precision, {})
                known[width] = max(known.get(width, 0.0), limit["gflops"])
    return highest


def best_bandwidth(result: Row) -> float | None:
    """Return the highest GB/s of memory that was seen; None where it was not measured."""
    return max(select(result.get("limits", []), "bytes_gb_per_s"), default=None)


def share_of_limit(result: Row, cell: Cell) -> float | None:
    """Return the share that a rate is of what the matrix product allows; None where that was not measured."""
    about = result["works"][cell.work]
    limit = best_limits(result).get(precision_of(cell.variant), {}).get(str(about["hidden"]))
    return None if not limit else cell.rate * about["flops"] / limit / 1e9


def share_of_memory(result: Row, cell: Cell) -> float | None:
    """Return the share that a rate is of what moving the activations allows; None where that was not measured."""
    bandwidth, numbers = best_bandwidth(result), result["works"][cell.work].get("activations")
    if bandwidth is None or numbers is None:
        return None
    return cell.rate * float(numbers) * (2 if precision_of(cell.variant) == "bf16" else 4) / bandwidth / 1e9


def seconds_of(cell: Cell) -> tuple[float, list[float]]:
    """Return median seconds to a return, a seed that failed being slower than any, and those of the other seeds."""
    seconds = select(cell.rows, "seconds", reached=True)
    tries = [*seconds, *[float("inf")] * (len(cell.rows) - len(seconds))]
    return statistics.median(tries) if tries else float("nan"), seconds
