"""Metrics that a simulator reports in `info`, such as `success`, reduced over each copy's episode."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, TypeAlias

import numpy as np
import torch
from torch import Tensor

from rl8x.names import did_you_mean, unknown_name

REDUCTIONS = ("last", "mean", "sum", "max", "min")
AUTO = {"success": "last", "is_success": "last"}
"""The reductions of metrics that are collected by default, if a simulator reports them."""

_WIDEST: Final = {"b": np.bool_, "i": np.int64, "u": np.int64, "f": np.float64}
"""The type that makes each kind of number a tensor, regardless of its size and byte order."""

Accumulators: TypeAlias = dict[str, dict[str, Tensor]]
"""For each metric its value over the episode so far and how often it was reported, each `[num_envs]`."""
Reported: TypeAlias = tuple[Tensor, Tensor, bool]
"""Values float32 `[num_envs]`, a mask of the copies with one, and whether a wrapper of all copies reported them."""


class EpisodeMetrics:
    """Reduces metrics of `info` over episodes; all state is in the accumulators, which are passed in and out.

    Args:
        spec: Names, reduced to the episode's last value; or names mapped to `"last"`, `"mean"`, `"sum"`, `"max"` or
            `"min"`, such as `{"is_success": "last", "energy": "sum"}`; or `"auto"`. The name of a metric in a nested
            dict has slashes, such as `"log/success"`.

    Raises:
        ValueError: If a reduction is unknown.
    """

    def __init__(self, spec: str | Sequence[str] | Mapping[str, str]) -> None:
        self._looked = spec == "auto" or not spec
        if isinstance(spec, str):
            spec = AUTO if spec == "auto" else [spec]
        self.reductions = dict(spec) if isinstance(spec, Mapping) else dict.fromkeys(spec, "last")
        for name, reduction in self.reductions.items():
            if reduction not in REDUCTIONS:
                raise ValueError(unknown_name("reduction", reduction, REDUCTIONS, f" of {name!r} in `metrics`"))

    def update(
        self, accumulators: Accumulators, info: Mapping[str, Any], final: Tensor | None, counts: Tensor
    ) -> Accumulators:
        """Return the accumulators, initially empty, updated with the `info` of a step, by masks `[num_envs]`.

        Copies that were reset (`final`; None if that does not change `info`) have their values in `final_info`, if any.
        """
        updated = dict(accumulators)
        last_info = None if final is None else info.get("final_info")
        for name, reduction in self.reductions.items():
            now = _lookup(info, name, counts)
            if final is not None and isinstance(last_info, Mapping):
                last = _lookup(info, f"final_info/{name}", counts)
                if last is not None:
                    value, mask, _ = now or (last[0], torch.zeros_like(counts), False)
                    now = torch.where(final, last[0], value), torch.where(final, last[1], mask), False
                elif now is not None and not now[2]:
                    now = now[0], now[1] & ~final, False  # their values are of the episode that begins
            if now is None:
                continue
            value, mask = now[0], now[1] & counts
            before = updated.get(name) or {"value": torch.full_like(value, torch.nan), "count": torch.zeros_like(value)}
            reduced = value  # the last one; a mean is divided later
            if reduction != "last":
                combine = {"max": torch.maximum, "min": torch.minimum}.get(reduction, torch.add)
                reduced = torch.where(before["value"].isnan(), value, combine(before["value"], value))
            updated[name] = {"value": torch.where(mask, reduced, before["value"]), "count": before["count"] + mask}
        return updated

    def values(self, accumulators: Accumulators) -> dict[str, Tensor]:
        """Return each metric over the episode so far, `[num_envs]`, NaN where the simulator has not reported it."""
        return {
            name: parts["value"] / parts["count"] if self.reductions[name] == "mean" else parts["value"]
            for name, parts in accumulators.items()
        }

    def check_reported(self, accumulators: Accumulators, info: Mapping[str, Any], done: Tensor) -> None:
        """Warn, when the first episode has ended, of requested metrics that were not reported until then."""
        if self._looked or not bool(done.any()):
            return
        self._looked = True
        missing = [name for name in self.reductions if name not in accumulators]
        if not missing:
            return
        reports = [info, info["final_info"]] if isinstance(info.get("final_info"), Mapping) else [info]
        reported = sorted({name for report in reports for name in _reported_names(report, done)})
        hint = did_you_mean(missing[0], reported) if reported else ""
        warnings.warn(
            f"`metrics` names {', '.join(map(repr, missing))}, which the environment had not reported when its first "
            f"episode ended.{hint} In `info` it reported {', '.join(map(repr, reported)) or 'no numbers'}.",
            RuntimeWarning,
            stacklevel=2,
        )

    def restarted(self, accumulators: Accumulators, done: Tensor) -> Accumulators:
        """Return the accumulators, cleared for the copies whose episode ended, by `done`, `[num_envs]`."""
        return {
            name: {"value": parts["value"].masked_fill(done, torch.nan), "count": parts["count"].masked_fill(done, 0.0)}
            for name, parts in accumulators.items()
        }


def _reported_names(info: Mapping[str, Any], like: Tensor) -> Iterator[str]:
    """Yield the names of entries with a number for each copy; names in nested dicts have slashes."""
    for name, value in info.items():
        if isinstance(value, Mapping) and name != "final_info":
            yield from (f"{name}/{inner}" for inner in _reported_names(value, like))
        elif isinstance(name, str) and not name.startswith("_") and _lookup(info, name, like) is not None:
            yield name


def _lookup(info: Mapping[str, Any], name: str, like: Tensor) -> Reported | None:
    """Return the reported values of a metric, or None; a single number is one for all copies.

    A mask, named with a leading `_`, may be at each level; a wrapper of all copies only adds one for its dict.
    """
    last, outer = name, []
    while last not in info:  # a key may have slashes itself
        head, _, last = last.partition("/")
        child = info.get(head)
        if not last or not isinstance(child, Mapping):
            return None
        outer.append(_mask(info, head, like))
        info = child
    value, own = _tensor(info[last], like), _mask(info, last, like)
    if value is None:
        return None
    masks = [mask for mask in (*outer, own) if mask is not None]
    return (
        value.to(torch.float32),
        functools.reduce(torch.logical_and, masks, ~value.isnan()),
        own is None and bool(masks),
    )


def _mask(info: Mapping[str, Any], key: str, like: Tensor) -> Tensor | None:
    """Return the mask of the copies that have a value for a key, `[num_envs]`, bool; None without a mask."""
    mask = _tensor(info.get(f"_{key}"), like)
    return None if mask is None or mask.is_floating_point() else mask.bool()


def _tensor(value: Any, like: Tensor) -> Tensor | None:
    """Return numbers as `[num_envs]` on the device; None for anything else."""
    if not isinstance(value, Tensor):
        try:
            array = np.asarray(value)
            if array.dtype == object and array.ndim:  # Gymnasium merges `np.bool_` so, with None for no value
                array = np.asarray([np.nan if each is None else each for each in array.flat])
        except ValueError:  # lists of several lengths
            return None
        if array.dtype.kind not in _WIDEST:
            return None
        value = torch.from_numpy(array.astype(_WIDEST[array.dtype.kind]))
    if value.numel() not in (1, like.numel()):
        return None
    numbers: Tensor = value
    return numbers.to(like.device).reshape(-1).expand_as(like)
