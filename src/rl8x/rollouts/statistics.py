"""Statistics of rollouts and updates, which stay on the device until they are read, by one copy of all of them."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rl8x import keys
from rl8x.envs.team import Team
from rl8x.rollouts.step import under

Number = float | int | Tensor
Array = Tensor | NDArray[Any]
"""Statistics take either: for a few numbers on the host, NumPy's operators take a fifth of torch's time."""

_FEW: Final = 2**17

# Statistics that are summed over horizons or ranks; others are averaged, weighted by their counts.
_SUMS = (keys.EPISODES_ENDED, "replay/size")
_EPISODE_COUNTS: Final = {keys.EPISODES_ENDED: ("episodes/returns/", "episodes/lengths/", keys.AGENTS_PREFIX)}


class Stats(Mapping[str, float]):
    """A read-only mapping from metric names to floats, copied from the device on first use.

    Each of the `counts` gates metrics by their prefixes: if it is 0 (no episode ended), they are omitted rather than
    NaN. A count whose name begins with an underscore is not reported itself.
    """

    def __init__(self, values: Mapping[str, Number], counts: Mapping[str, tuple[str, ...]] | None = None) -> None:
        self._values = values
        self._counts = counts or {}

    @classmethod
    def merge(cls, *parts: Mapping[str, Number]) -> Stats:
        """Join statistics, or numbers by name, without reading them; later ones win."""
        values: dict[str, Number] = {}
        counts: dict[str, tuple[str, ...]] = {}
        for part in parts:
            more, gates = part.unread() if type(part) is Stats else (part, {})  # an `isinstance` of a Mapping is slow
            values |= more
            counts |= gates
        return cls(values, counts)

    def unread(self) -> tuple[Mapping[str, Number], Mapping[str, tuple[str, ...]]]:
        """Return the values, 0-d tensors if not read yet, and the counts that gate them, without reading any."""
        return self._values, self._counts

    def counted(self) -> tuple[Mapping[str, float], Mapping[str, tuple[str, ...]]]:
        """Return all numbers, including those that are gated by counts of 0, and the counts that gate them."""
        return self._read, self._counts

    def read(self) -> dict[str, float]:
        """Return the reported numbers by name."""
        return dict(self._reported)

    @functools.cached_property
    def _read(self) -> dict[str, float]:
        """The values, which are copied to the host by one transfer, and kept in the tensors' place."""
        by_dtype: dict[torch.dtype, dict[str, Tensor]] = {}
        for name, value in self._values.items():
            if isinstance(value, Tensor):
                by_dtype.setdefault(value.dtype, {})[name] = value
        if by_dtype:
            # A conversion for each dtype rather than for each number.
            vectors = [torch.stack([*each.values()]).to(torch.float64) for each in by_dtype.values()]
            names = itertools.chain.from_iterable(by_dtype.values())
            self._values = {**self._values, **dict(zip(names, torch.cat(vectors).tolist(), strict=True))}
        self._values = read = {name: float(value) for name, value in self._values.items()}
        return read

    @functools.cached_property
    def _reported(self) -> dict[str, float]:
        """All numbers, except unreported counts and numbers that counts of 0 gate."""
        numbers, counts = self.counted()
        empty = tuple(prefix for name, prefixes in counts.items() if not numbers[name] for prefix in prefixes)
        return {name: value for name, value in numbers.items() if not name.startswith(("_", *empty))}

    def __getitem__(self, name: str) -> float:
        return self._reported[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._reported)

    def __len__(self) -> int:
        return len(self._reported)

    def __repr__(self) -> str:
        return f"Stats({self._reported!r})"


def pool(rows: Sequence[Mapping[str, float]], counts: Mapping[str, Sequence[str]]) -> Stats:
    """Pool the rows of several horizons or ranks, as `Stats.counted` returns them, as if they were of one horizon.

    Minima and maxima are those of all rows, counts are summed, and means and standard deviations weighted by counts.
    """
    pooled: dict[str, Number] = {}
    for name in dict.fromkeys(name for row in rows for name in row):
        having = [row for row in rows if name in row]
        if name in _SUMS or name.startswith(("_", "finite/")):
            pooled[name] = sum(row[name] for row in having)
            continue
        gate = next((count for count, prefixes in counts.items() if name.startswith(tuple(prefixes))), None)
        if gate is None and name.startswith("episodes/"):
            gate = keys.EPISODES_ENDED
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


def numpy_if_small(tensors: Mapping[str, Tensor]) -> Mapping[str, Array]:
    """Return CPU tensors, `[*]` each, as NumPy arrays if they have few numbers in all."""
    try:
        arrays = {name: tensor.numpy() for name, tensor in tensors.items()}
    except TypeError:  # NumPy does not know bfloat16
        return tensors
    return arrays if sum(each.size for each in arrays.values()) <= _FEW else tensors


def summary(values: Any, mask: Any = None) -> tuple[Any, Any, Any, Any]:
    """Return minimum, maximum, mean and population standard deviation of `values`, `[*]`, at least one; 0-d.

    A `mask`, `[...]`, covers the last dimensions of `values`: they are reduced over its true elements; NaN without any.
    """
    values = _floats(values)
    if mask is not None:
        values, mask = values.reshape(*values.shape[: values.ndim - mask.ndim], -1), mask.reshape(-1)
    if not isinstance(values, Tensor):
        values = values.reshape(-1) if mask is None else values[..., mask]
        count = values.shape[-1]
        if not count:
            return (math.nan,) * 4
        if count == 1:  # the operators take longer than all else that is done with one transition
            only = values[..., 0]
            return only, only, only + 0.0, only - only  # of -0.0 a sum is 0.0
        mean = values.sum(-1) / count
        deviations = values - mean[..., None]
        return values.min(-1), values.max(-1), mean, np.sqrt((deviations * deviations).sum(-1) / count)
    if mask is None:
        low, high = torch.aminmax(values)
        mean = values.mean()
        # Two passes, ten times as fast as torch.var_mean on the CPU and as exact
        deviations = values - mean
        return low, high, mean, (deviations * deviations).mean().sqrt()
    count = mask.sum()
    low = torch.where(mask, values, math.inf).amin(-1)
    high = torch.where(mask, values, -math.inf).amax(-1)
    mean = torch.where(mask, values, 0.0).sum(-1) / count
    deviations = torch.where(mask, values - mean[..., None], 0.0)
    std = ((deviations * deviations).sum(-1) / count).sqrt()
    return torch.where(count > 0, low, math.nan), torch.where(count > 0, high, math.nan), mean, std


def _floats(values: Any) -> Any:
    if isinstance(values, Tensor):
        return values if values.is_floating_point() else values.to(torch.float32)
    return values if values.dtype.kind == "f" else values.astype(np.float32)


@np.errstate(all="ignore")  # torch does not warn either
def rollout_stats(rollout: Mapping[str, Array], horizon: int, team: Team | None = None) -> Stats:
    """Summarise the first `horizon` slots of a rollout, `[horizon or more, num_envs, ...]`; of a `team`, by copies."""
    rewards: Any = rollout[keys.REWARDS][:horizon]
    valid: Any = rollout[keys.VALID][:horizon] if keys.VALID in rollout else None
    rows = rollout
    if team is not None:
        rollout = team.episodes(rollout)
    ended: Any = (rollout[keys.TERMINATED] | rollout[keys.TRUNCATED])[:horizon]
    ended = ended if valid is None or team is not None else ended & valid
    by_episode: dict[str, Any] = {}
    if isinstance(ended, Tensor) or ended.any():  # else they are not reported
        returns, lengths = (_floats(rollout[name][:horizon]) for name in (keys.EPISODE_RETURNS, keys.EPISODE_LENGTHS))
        both = torch.stack((returns, lengths)) if isinstance(ended, Tensor) else np.stack((returns, lengths))
        by_return, by_length = zip(*summary(both, ended), strict=True)
        by_episode = {**named("episodes/returns", by_return), **named("episodes/lengths", by_length)}
    means, counts = info_means(under(keys.METRICS, rollout, horizon), ended)
    if valid is not None:
        means["_count/rewards"], counts["_count/rewards"] = valid.sum(), ("rewards/",)
    by_reward = summary(rewards, valid)
    if team is None:
        of_horizon = by_reward if horizon == 1 and valid is None else summary(rewards.sum(0))
    else:
        of_horizon = summary(team.returns(rewards.sum(0)))
        means |= agent_means(team, rows[keys.EPISODE_RETURNS][:horizon], ended)
    values = {
        **named("returns", of_horizon),
        **named("rewards", by_reward),
        **by_episode,
        keys.EPISODES_ENDED: ended.sum(),
    }
    return Stats(values | means, _EPISODE_COUNTS | counts)


def agent_means(team: Team, returns: Array, ended: Any) -> dict[str, Number]:
    """Average each agent's return, `[..., num_envs]`, over the episodes of copies that ended, `[..., copies]`."""
    counted = torch.as_tensor(ended).unsqueeze(-2)
    own = torch.where(counted, team.of_agents(returns), 0.0).transpose(-1, -2).flatten(0, -2)
    return dict(zip(keys.agent_metrics(team.names), (own.sum(0) / counted.sum()).unbind(0), strict=True))


def info_means(metrics: Mapping[str, Any], ended: Any) -> tuple[dict[str, Number], dict[str, tuple[str, ...]]]:
    """Average an environment's own metrics, `[*]` each, over ended episodes that have one; return values and counts."""
    values: dict[str, Number] = {}
    counts: dict[str, tuple[str, ...]] = {}
    for name, per_step in metrics.items():
        (metric,) = keys.info_metrics([name])
        counted = ended & (per_step == per_step)  # it is NaN where a step has none
        count = counted.sum()
        total = (torch if isinstance(counted, Tensor) else np).where(counted, per_step, 0.0).sum()
        values |= {metric: total / count, f"_count/{metric}": count}
        counts[f"_count/{metric}"] = (metric,)
    return values, counts


def named(group: str, values: Iterable[Any]) -> dict[str, Any]:
    """Pair the four values of a summary, 0-d, with their metric names."""
    return dict(zip(keys.summary(group), values, strict=True))
