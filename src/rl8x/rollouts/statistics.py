"""Statistics of rollouts and updates, which stay on the device until they are read.

A collect and an update each compute a few dozen numbers. Copying them one by one would be a host sync each. A `Stats`
keeps 0-d tensors and copies all of them in one vector when the first is read. `Stats.merge` joins several without a
copy.

The functions of tensors take NumPy's arrays too, and return its numbers then: see `StatsProgram`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from rl8x import keys
from rl8x.trees import is_part

Number = float | int | Tensor

# Collected quantities, by the keys of a rollout. Discrete actions are always finite, but not their log-probabilities.
COLLECTED: Final = {
    "observations": (keys.OBS, keys.NEXT_OBS),
    "actions": (keys.ACTIONS, keys.LOGP),
    "rewards": (keys.REWARDS,),
}
# Keys by which a non-finite quantity is located in a rollout. Losses are non-finite where values are.
_LOCATED_BY = {**COLLECTED, "observations": (keys.OBS,), "losses": (keys.VALUES, keys.FINAL_VALUES)}
_MAX_LISTED = 32
_FEW: Final = 4096
# Statistics that are summed over horizons or ranks; others are averaged, weighted by their counts.
_SUMS = (keys.EPISODES_ENDED, "replay/size")


class Stats(Mapping[str, float]):
    """A read-only mapping from metric names to floats, copied from the device on first use.

    Args:
        values: Metric name to a number or a 0-d tensor (all tensors on one device).
        counts: Names of counts, each with the prefixes of the metrics that it gates: if the count is 0 (no episode
            ended), these metrics are omitted rather than reported as NaN. A count whose name begins with an underscore
            is not reported itself.
    """

    def __init__(self, values: Mapping[str, Number], counts: Mapping[str, tuple[str, ...]] | None = None) -> None:
        self._pending: Mapping[str, Number] = dict(values)
        self._counts: dict[str, tuple[str, ...]] = dict(counts or {})
        self._numeric: Mapping[str, float] | None = None
        self._floats: dict[str, float] | None = None

    @classmethod
    def merge(cls, *parts: Mapping[str, float]) -> Stats:
        """Join statistics without reading them; later ones win."""
        values: dict[str, Number] = {}
        counts: dict[str, tuple[str, ...]] = {}
        for part in parts:
            more, gates = part.unread() if isinstance(part, Stats) else (part, {})
            values.update(more)
            counts.update(gates)
        return cls(values, counts)

    def unread(self) -> tuple[Mapping[str, Number], Mapping[str, tuple[str, ...]]]:
        """Return the values, 0-d tensors if not read yet, and the counts that gate them, without reading any."""
        return self._pending, self._counts

    def counted(self) -> tuple[Mapping[str, float], Mapping[str, tuple[str, ...]]]:
        """Return all numbers, including those that are gated by counts of 0, and the counts that gate them."""
        return self._numbers(), self._counts

    def read(self) -> dict[str, float]:
        """Return the numbers that are reported, by name."""
        if self._floats is None:
            self._floats = counted_only(self._numbers(), self._counts)
        return self._floats

    @torch.no_grad()
    def _numbers(self) -> Mapping[str, float]:
        """Copy the values to the host, by one transfer, and keep them in the tensors' place."""
        if self._numeric is None:
            tensors = {name: value for name, value in self._pending.items() if isinstance(value, Tensor)}
            names, vector = packed(tensors) if tensors else ([], torch.empty(0))
            numbers = dict(zip(names, vector.tolist(), strict=True))
            self._numeric = {name: float(numbers.get(name, value)) for name, value in self._pending.items()}
            self._pending = self._numeric
        return self._numeric

    def __getitem__(self, name: str) -> float:
        return self.read()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.read())

    def __len__(self) -> int:
        return len(self.read())

    def __repr__(self) -> str:
        return f"Stats({self.read()!r})"


def packed(values: Mapping[str, Tensor]) -> tuple[list[str], Tensor]:
    """Return the names of some numbers, 0-d tensors each, in the order of a float64 vector that has all of them."""
    by_dtype: dict[torch.dtype, dict[str, Tensor]] = {}
    for name, value in values.items():
        by_dtype.setdefault(value.dtype, {})[name] = value
    # A conversion for each dtype rather than for each number.
    vectors = [torch.stack([*each.values()]).to(torch.float64) for each in by_dtype.values()]
    names = list(itertools.chain.from_iterable(by_dtype.values()))
    return names, torch.cat(vectors) if vectors else torch.empty(0, dtype=torch.float64)


def counted_only(numbers: Mapping[str, float], counts: Mapping[str, Sequence[str]]) -> dict[str, float]:
    """Remove unreported counts and metrics that are gated by counts of 0; for the arguments see `Stats`."""
    empty = tuple(prefix for name, prefixes in counts.items() if not numbers[name] for prefix in prefixes)
    return {
        name: value
        for name, value in numbers.items()
        if not (empty and name.startswith(empty)) and not name.startswith("_")
    }


def pool(rows: Sequence[Mapping[str, float]], counts: Mapping[str, Sequence[str]]) -> Stats:
    """Pool the rows of several horizons or ranks into one, as if they were of one horizon.

    Minima and maxima are those of all rows, counts are summed, and means and standard deviations weighted by counts.

    Args:
        rows: The numbers of each row by name, including counts, as `Stats.counted` returns them.
        counts: Names of counts, each with the prefixes of the metrics that it gates.
    """
    pooled: dict[str, Number] = {}
    for name in dict.fromkeys(name for row in rows for name in row):
        gate = next((count for count, prefixes in counts.items() if name.startswith(tuple(prefixes))), None)
        if gate is None and name.startswith("episodes/") and name != keys.EPISODES_ENDED:
            gate = keys.EPISODES_ENDED
        having = [row for row in rows if name in row]
        if name in _SUMS or name.startswith(("_", "finite/")):
            pooled[name] = sum(row[name] for row in having)
            continue
        weighted = [(row, 1.0 if gate is None else row.get(gate, 0.0)) for row in having]
        counted = [(row, weight) for row, weight in weighted if weight]
        pooled[name] = _pooled(name, *zip(*counted, strict=True)) if counted else having[0][name]
    return Stats(pooled, {name: tuple(each) for name, each in counts.items() if name in pooled})


def _pooled(name: str, rows: Sequence[Mapping[str, float]], weights: Sequence[float]) -> float:
    """Pool one statistic of rows that all have it."""
    values, statistic = [row[name] for row in rows], name.rsplit("/", 1)[-1]
    if all(value == values[0] for value in values) and statistic != "std":
        return values[0]
    if any(value != value for value in values):
        return float("nan")
    if statistic in ("min", "max"):
        return min(values) if statistic == "min" else max(values)
    total = sum(weights)
    of = name.removesuffix("std") + "mean"
    if statistic == "std" and all(of in row for row in rows):
        mean = _pooled(of, rows, weights)
        squares = zip(weights, rows, values, strict=True)
        return math.sqrt(sum(w * (value**2 + (row[of] - mean) ** 2) for w, row, value in squares) / total)
    return sum(weight * value for weight, value in zip(weights, values, strict=True)) / total


def library_of(values: Any) -> Any:
    """Return the module whose functions take `values` `[*]`: `torch` or `numpy`."""
    return torch if isinstance(values, Tensor) else np


def _as_type(values: Any, dtype: Any) -> Any:
    return values.to(dtype) if isinstance(values, Tensor) else values.astype(dtype)


def _is_floating(values: Any) -> bool:
    return values.is_floating_point() if isinstance(values, Tensor) else values.dtype.kind == "f"


def _floats(values: Any) -> Any:
    return values if _is_floating(values) else _as_type(values, library_of(values).float32)


def _extremes(values: Any) -> tuple[Any, Any]:
    """Return minimum and maximum of all elements, 0-d; NaN if one is."""
    return torch.aminmax(values) if isinstance(values, Tensor) else (values.min(), values.max())


@torch.no_grad()
def summary(values: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return minimum, maximum, mean and standard deviation (over the count) of all elements, as 0-d tensors.

    Args:
        values: Numbers of any shape, at least one.
    """
    values = _floats(values)
    low, high = _extremes(values)
    mean = values.mean()
    # Two passes, ten times as fast as torch.var_mean on the CPU and as exact
    deviations = values - mean
    return low, high, mean, library_of(values).sqrt((deviations * deviations).mean())


@torch.no_grad()
def masked_summary(values: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return minimum, maximum, mean and standard deviation of the elements under a mask, `[...]` each.

    Args:
        values: Numbers, `[..., *mask.shape]`; masked elements have no effect, even if NaN.
        mask: True for elements that count, bool. If none does, all four results are NaN.
    """
    library, values = library_of(values), _floats(values)
    values, mask = values.reshape(*values.shape[: values.ndim - mask.ndim], -1), mask.reshape(-1)
    count = mask.sum()
    low = library.amin(library.where(mask, values, math.inf), -1)
    high = library.amax(library.where(mask, values, -math.inf), -1)
    mean = library.where(mask, values, 0.0).sum(-1) / count
    deviations = library.where(mask, values - mean[..., None], 0.0)
    std = library.sqrt((deviations * deviations).sum(-1) / count)
    return library.where(count > 0, low, math.nan), library.where(count > 0, high, math.nan), mean, std


def collect_stats(
    rewards: Tensor,
    ended: Tensor,
    episode_returns: Tensor,
    episode_lengths: Tensor,
    valid: Tensor | None = None,
    metrics: Mapping[str, Tensor] | None = None,
) -> Stats:
    """Summarise a horizon: returns over it, rewards, and the episodes that ended in it.

    Args:
        rewards: `[horizon, num_envs]`.
        ended: Where an episode ended, `[horizon, num_envs]`, bool.
        episode_returns: Return of the episode so far, `[horizon, num_envs]`; read where it ended.
        episode_lengths: Its length so far in steps, `[horizon, num_envs]`; read where it ended.
        valid: Which rows are experience, `[horizon, num_envs]`, bool; None is all. Masked steps have reward 0.
        metrics: The environment's own metrics of the episode so far, `[horizon, num_envs]` each; NaN where missing.
    """
    if valid is not None:
        ended = ended & valid
    values: dict[str, Number] = {}
    values.update(named("returns", summary(rewards.sum(0))))
    values.update(named("rewards", summary(rewards) if valid is None else masked_summary(rewards, valid)))
    both = (episode_returns, _as_type(episode_lengths, episode_returns.dtype))
    by_return, by_length = zip(*masked_summary(library_of(rewards).stack(both), ended), strict=True)
    values.update(named("episodes/returns", by_return) | named("episodes/lengths", by_length))
    values[keys.EPISODES_ENDED] = ended.sum()
    means, counts = info_means(metrics or {}, ended)
    if valid is not None:
        values["_count/rewards"], counts["_count/rewards"] = valid.sum(), ("rewards/",)
    return Stats(values | means, {keys.EPISODES_ENDED: ("episodes/returns/", "episodes/lengths/"), **counts})


def rollout_stats(rollout: Mapping[str, Tensor], horizon: int) -> Stats:
    """Summarise a rollout by `collect_stats`.

    Args:
        rollout: Its tensors by key, each `[horizon + 1, num_envs, ...]`.
        horizon: Slots that were written.
    """
    own = {name: tensor[:horizon] for name, tensor in rollout.items()}
    return collect_stats(
        own[keys.REWARDS],
        own[keys.TERMINATED] | own[keys.TRUNCATED],
        own[keys.EPISODE_RETURNS],
        own[keys.EPISODE_LENGTHS],
        own.get(keys.VALID),
        {name.removeprefix(f"{keys.METRICS}/"): each for name, each in own.items() if is_part(name, keys.METRICS)},
    )


def info_means(metrics: Mapping[str, Tensor], ended: Tensor) -> tuple[dict[str, Number], dict[str, tuple[str, ...]]]:
    """Average an environment's own metrics over ended episodes that have a value.

    Args:
        metrics: The metrics, each `[*]`, NaN where missing.
        ended: Where an episode ended, `[*]`, bool.

    Returns:
        Means, 0-d, and counts, as arguments of `Stats`.
    """
    values: dict[str, Number] = {}
    counts: dict[str, tuple[str, ...]] = {}
    for name, per_step in metrics.items():
        (metric,) = keys.info_metrics([name])
        library = library_of(per_step)
        counted = ended & ~library.isnan(per_step)
        count = counted.sum()
        values |= {metric: library.where(counted, per_step, 0.0).sum() / count, f"_count/{metric}": count}
        counts[f"_count/{metric}"] = (metric,)
    return values, counts


@torch.no_grad()
def parameter_stats(drawn: Mapping[str, Tensor], ranges: Mapping[str, tuple[Number, Number]]) -> dict[str, Number]:
    """Summarise randomised parameters, under the names of `keys.parameter_metrics`.

    Args:
        drawn: The copies' values by parameter name, `[num_envs]` each.
        ranges: Bounds of the present distributions of moving parameters, numbers or 0-d.
    """
    values: dict[str, Number] = {}
    for name, value in drawn.items():
        low, high = torch.aminmax(value)
        ends = ranges.get(name, ())
        values |= dict(zip(keys.parameter_metrics([name]), (value.mean(), low, high, *ends), strict=False))
    return values


def stacked_metrics(steps: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Stack metrics of steps, each `[num_envs]`, to `[horizon, num_envs]`; NaN in steps without a value."""
    latest = {name: value for step in steps for name, value in step.items()}
    return {
        name: torch.stack([step.get(name, torch.full_like(value, math.nan)) for step in steps])
        for name, value in latest.items()
    }


def named(group: str, values: Iterable[Tensor]) -> dict[str, Tensor]:
    """Pair the four values of a summary, 0-d, with their metric names."""
    return dict(zip(keys.summary(group), values, strict=True))


def any_not_finite(tensors: Iterable[Tensor]) -> Tensor:
    """Return whether any floating-point tensor, `[...]` each, contains a non-finite number; 0-d, bool."""
    tensors = list(tensors)
    numbers: list[Any] = [each for each in tensors if _is_floating(each) and 0 not in each.shape]
    if tensors and not isinstance(tensors[0], Tensor):
        # Torch's sum of many takes a third of the time; it may be non-finite though all numbers are finite.
        rest = (each for each in numbers if each.size < _FEW or not torch.from_numpy(each).sum().isfinite())
        return np.bool_(not all(np.isfinite(each).all() for each in rest))
    if not numbers:
        return torch.zeros((), dtype=torch.bool, device=tensors[0].device if tensors else None)
    extremes = [extreme.to(torch.float32) for each in numbers for extreme in _extremes(each)]
    return (~torch.isfinite(torch.stack(extremes))).any()


@torch.no_grad()
def gathered_not_finite(rollout: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return for each collected quantity, by the metric's name, whether it contains a non-finite number, 0-d, bool.

    Args:
        rollout: The rollout's tensors by key, each `[horizon + 1, num_envs, ...]`.
    """
    flags = {
        f"finite/{quantity}": any_not_finite([value for name, value in rollout.items() if is_part(name, *names)])
        for quantity, names in COLLECTED.items()
    }
    if keys.FINAL_VALUES in rollout:
        final = final_not_finite(rollout[keys.VALUES], rollout[keys.FINAL_VALUES]).any()
        flags["finite/observations"] = flags["finite/observations"] | final
    return flags


def final_not_finite(values: Tensor, final_values: Tensor) -> Tensor:
    """Return where the final observation of a truncated episode is non-finite, by its value, which is then NaN.

    Args:
        values: Values of the observations acted on, any shape. If they are NaN too, the weights are the cause.
        final_values: Values of the final observations, in the same shape.
    """
    library = library_of(values)
    is_wrong: Tensor = library.isnan(final_values) & library.isfinite(values)
    return is_wrong


def locate_non_finite(rollout: Mapping[str, Tensor]) -> dict[str, dict[str, Any]]:
    """Locate the first non-finite numbers of a rollout.

    Args:
        rollout: The rollout's tensors by key, each `[horizon + 1, num_envs, ...]`.

    Returns:
        Plain data for each non-finite quantity: `slot`, the first slot with a non-finite number; `environments`, the
        indices of at most 32 copies with one in that slot; `num_environments`, the number of such copies;
        `num_environments_in_rollout`, the number of copies with one in any slot; and `final`, whether it is in the
        final observation of a truncated episode.
    """
    places = {}
    for quantity, names in _LOCATED_BY.items():
        wrong = _slots_not_finite(rollout, names)
        final: Tensor | None = None
        if quantity == "observations" and keys.FINAL_VALUES in rollout:
            final = final_not_finite(rollout[keys.VALUES], rollout[keys.FINAL_VALUES])
            wrong.append(final)
        elif quantity == "observations" and (following := _slots_not_finite(rollout, (keys.NEXT_OBS,))):
            # If the episode continues, the next slot contains the same observation.
            final = torch.stack(following).any(0) & (rollout[keys.TERMINATED] | rollout[keys.TRUNCATED])
            wrong.append(final)
        bad = torch.stack(wrong).any(0) if wrong else torch.zeros(1, 1, dtype=torch.bool)
        if not bad.any():
            continue
        slot = int(bad.any(1).nonzero()[0])
        environments = bad[slot].nonzero().flatten().tolist()
        places[quantity] = {
            "slot": slot,
            "environments": environments[:_MAX_LISTED],
            "num_environments": len(environments),
            "num_environments_in_rollout": int(bad.any(0).sum()),
            "final": final is not None and bool((final[slot] & bad[slot]).any()),
        }
    return places


def _slots_not_finite(rollout: Mapping[str, Tensor], names: Sequence[str]) -> list[Tensor]:
    """Return for each tensor of some keys the slots and copies with a non-finite number, `[horizon + 1, num_envs]`."""
    floats = [value for name, value in rollout.items() if is_part(name, *names) and value.is_floating_point()]
    return [~torch.isfinite(value).reshape(*value.shape[:2], math.prod(value.shape[2:])).all(-1) for value in floats]
