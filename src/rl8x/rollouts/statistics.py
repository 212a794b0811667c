"""Statistics that stay on the device until somebody reads them.

A collect and an update each make a few dozen numbers. Copying them one by one stalls a GPU at every copy, so a `Stats`
keeps
0-d tensors and moves all of them in one vector, once, when the first is read. `Stats.merge` joins several without
reading any.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor

Number = float | int | Tensor


class Stats(Mapping[str, float]):
    """A read-only mapping from metric names to floats, copied from the device on first use.

    Args:
        values: Metric name to a number or a 0-d tensor (all tensors on one device).
        counts: Names of statistics to the name-prefixes that they gate: where the count is 0 (no episode ended), every
            metric under the prefix is left out rather than reported as NaN. A count whose name begins with an
            underscore is not reported itself.
    """

    def __init__(self, values: Mapping[str, Number], counts: Mapping[str, tuple[str, ...]] | None = None) -> None:
        self._pending: dict[str, Number] = dict(values)
        self._counts: dict[str, tuple[str, ...]] = dict(counts or {})
        self._floats: dict[str, float] | None = None

    @classmethod
    def merge(cls, *parts: Mapping[str, float]) -> Stats:
        """Join statistics; later ones win. What is still on the device stays there."""
        values: dict[str, Number] = {}
        counts: dict[str, tuple[str, ...]] = {}
        for part in parts:
            if isinstance(part, Stats) and part._floats is None:
                values.update(part._pending)
                counts.update(part._counts)
            else:
                values.update(part)
        return cls(values, counts)

    def _fetch(self) -> dict[str, float]:
        if self._floats is None:
            on_device = {name: value for name, value in self._pending.items() if isinstance(value, Tensor)}
            copied: Iterable[float] = ()
            if on_device:
                copied = torch.stack([value.detach().to(torch.float64) for value in on_device.values()]).tolist()
            numbers = dict(zip(on_device, copied, strict=True))
            floats = {name: numbers.get(name, value) for name, value in self._pending.items()}
            empty = tuple(prefix for name, prefixes in self._counts.items() if not floats[name] for prefix in prefixes)
            self._floats = {
                name: float(value)
                for name, value in floats.items()
                if not (empty and name.startswith(empty)) and not name.startswith("_")
            }
            self._pending = {}
        return self._floats

    def __getitem__(self, name: str) -> float:
        return self._fetch()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._fetch())

    def __len__(self) -> int:
        return len(self._fetch())

    def __repr__(self) -> str:
        return f"Stats({self._fetch()!r})"


def reduce_horizons(horizons: list[Mapping[str, float]]) -> dict[str, float]:
    """Reduce the statistics of several horizons to one row.

    The minimum of minima, the maximum of maxima, the mean of means, the root of the mean square of standard
    deviations, and
    the sum of the rest, over the horizons in which a metric occurs.
    """
    names = list(dict.fromkeys(name for horizon in horizons for name in horizon))
    reduced = {}
    for name in names:
        values = [horizon[name] for horizon in horizons if name in horizon]
        figure = name.rsplit("/", 1)[-1]
        if any(math.isnan(value) for value in values):  # which min() and max() would hide, or not, by their order
            reduced[name] = math.nan
        elif figure == "min":
            reduced[name] = min(values)
        elif figure == "max":
            reduced[name] = max(values)
        elif figure == "mean":
            reduced[name] = sum(values) / len(values)
        elif figure == "std":
            reduced[name] = (sum(value * value for value in values) / len(values)) ** 0.5
        else:
            reduced[name] = sum(values)
    return reduced
