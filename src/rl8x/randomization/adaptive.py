"""Automatic domain randomisation: ranges widen where a policy does well at their ends, and narrow where it fails."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from rl8x.randomization.curriculum import NO_SOURCE, RETURNS, Curriculum, Episodes, MovingDistribution
from rl8x.randomization.distributions import (
    ParameterDistribution,
    Uniform,
    finite_number,
    pair,
    two_numbers,
    whole_number,
)


class AdaptiveCurriculum(Curriculum):
    """The ranges of d parameters, with a buffer for each of their 2 d ends: the first's low and high, the second's, ...

    The state: `low` and `high`, float64 `[d]`; `count` int64 and `total` float64, `[2 d]`, number and sum of the scores
    in each buffer; `open`, bool `[2 d]`, whether episodes that begin count; `share`, 0-d, the probability that an
    episode is at a boundary.
    """

    def allocate_state(self, device: torch.device) -> None:
        """Allocate the state with the initial ranges."""
        names = ("start_low", "start_high", "lowest", "highest", "step")
        rows = [(*member.start, *member.support, member.step) for member in self.members.values()]
        columns = torch.tensor(rows, dtype=torch.float64, device=device).T
        self._limits = dict(zip(names, columns, strict=True))
        ends = 2 * len(self.members)
        self.state = {
            "low": self._limits["start_low"].clone(),
            "high": self._limits["start_high"].clone(),
            "count": torch.zeros(ends, dtype=torch.int64, device=device),
            "total": torch.zeros(ends, dtype=torch.float64, device=device),
            "open": torch.ones(ends, dtype=torch.bool, device=device),
            "share": torch.tensor(self.options.boundary_share, dtype=torch.float32, device=device),
        }

    def draw(self, noise: Tensor) -> tuple[dict[str, Tensor], Tensor | None]:
        """Draw each parameter from its range, and in a share of the copies fix one at an end, by the last noise column.

        The source of a copy at a boundary whose buffer is open is the boundary, in [0, 2 d), of others -1.
        """
        state, ends = self.state, 2 * len(self.members)
        uniform, boundary_prob = noise[:, -1], state["share"]
        at_boundary = uniform < boundary_prob
        # The probability is 0 in evaluations, where no copy is at a boundary.
        end = (uniform / boundary_prob.clamp(min=1e-6) * ends).to(torch.int64).clamp(max=ends - 1)
        low, high = state["low"].to(torch.float32), state["high"].to(torch.float32)
        values = {}
        for i, name in enumerate(self.members):
            value = (noise[:, i] * (high[i] - low[i]) + low[i]).clamp(low[i], high[i])
            value = torch.where(at_boundary & (end == 2 * i), low[i], value)
            values[name] = torch.where(at_boundary & (end == 2 * i + 1), high[i], value)
        return values, torch.where(at_boundary & state["open"][end], end, NO_SOURCE)

    @torch.no_grad()
    def update_from_episodes(self, episodes: Episodes, generator: torch.Generator) -> None:
        """Add a horizon's episodes to the buffers, and move the ends whose buffers are complete."""
        state, options = self.state, self.options
        ends = torch.arange(2 * len(self.members), device=episodes.ended.device)
        counted = episodes.counted
        scores = episodes.scores.to(torch.float64)
        at_end = (episodes.sources.unsqueeze(-1) == ends) & counted.unsqueeze(-1)  # [horizon, num_envs, 2 d]
        count = state["count"] + at_end.sum((0, 1))
        total = state["total"] + torch.where(at_end, scores.unsqueeze(-1), 0.0).sum((0, 1))
        pending = (episodes.pending.unsqueeze(-1) == ends).sum(0)
        decided = (count >= options.episodes) & (pending == 0)
        mean = total / count.clamp(min=1)
        self._move(decided & (mean >= options.thresholds[1]), decided & (mean <= options.thresholds[0]))
        state["count"].copy_(count.masked_fill(decided, 0))
        state["total"].copy_(total.masked_fill(decided, 0.0))
        # A reset ends pending episodes without counting them: a round that is not full then stays open.
        state["open"].copy_(decided | (count + pending < options.episodes))

    def _move(self, outward: Tensor, inward: Tensor) -> None:
        """Move the ends that are marked, bool `[2 d]` each."""
        state, limits = self.state, self._limits
        moves = (outward.double() - inward.double()).view(-1, 2)
        low, high = state["low"] - moves[:, 0] * limits["step"], state["high"] + moves[:, 1] * limits["step"]
        state["low"].copy_(torch.minimum(torch.maximum(low, limits["lowest"]), limits["start_low"]))
        state["high"].copy_(torch.minimum(torch.maximum(high, limits["start_high"]), limits["highest"]))

    def set_evaluating(self, is_evaluating: bool) -> None:
        """Play no episode at a boundary in evaluations, and the configured share of them in training."""
        super().set_evaluating(is_evaluating)
        self.state["share"].fill_(0.0 if is_evaluating else self.options.boundary_share)

    def ranges(self) -> dict[str, tuple[Any, Any]]:
        """Return the present ranges."""
        low, high = self.state["low"], self.state["high"]
        return {name: (low[i].clone(), high[i].clone()) for i, name in enumerate(self.members)}

    def present(self) -> dict[str, ParameterDistribution]:
        """Return the present ranges as distributions."""
        low, high = self.state["low"].tolist(), self.state["high"].tolist()
        return {name: Uniform(*ends) for name, ends in zip(self.members, zip(low, high, strict=True), strict=True)}


@dataclasses.dataclass(frozen=True, repr=False)
class Adaptive(MovingDistribution):
    """Draw uniformly from a range [low, high] whose two ends move with the policy's performance there.

        env_config={"length": Adaptive((0.4, 0.6), thresholds=(200, 400), step=0.05, limits=(0.1, 2.0))}

    A share p_b of the episodes is played at a boundary: one end of one parameter, drawn among all ends of all
    `Adaptive` parameters, is then fixed, while the others are drawn from their ranges, as in all other episodes. The
    returns at an end are gathered until there are m; then, with their mean p,

        p >= t_H: the end moves outward by Delta,    p <= t_L: it moves inward by Delta,

    and its buffer is emptied.

    Three things differ from the paper. Episodes at the boundaries are trained on too, as there are no other copies to
    train in. A buffer counts the episodes that began while it was open, and waits for the last of them: the first m
    that end would be the short ones. It closes at the end of the horizon in which m have begun, so that with many
    copies it holds more of them. A range never gets narrower than it began.

    Args:
        start: The range at the beginning, (low, high) or one number; also the narrowest.
        thresholds: t_L and t_H, in the units of the metric, t_L < t_H.
        step: Delta, in the parameter's unit, > 0.
        limits: The widest range, (low, high), which includes `start`; None is the parameter's legal range.
        metric: `"returns"`, or a metric of the environment's own, by which an episode is judged.
        episodes: m, the episodes that decide.
        boundary_share: p_b, the share of episodes at a boundary, in (0, 1].
        group: Parameters with the same text are drawn together, and share options but for `start`, `step` and `limits`.

    Source: Akkaya et al. 2019, arXiv:1910.07113, section 5.2 and algorithm 1.
    """

    kind: ClassVar[str] = "adaptive"
    curriculum = AdaptiveCurriculum
    own_fields: ClassVar[tuple[str, ...]] = ("start", "step", "limits")
    start: tuple[float, float]
    thresholds: tuple[float, float]
    step: float
    limits: tuple[float, float] | None = None
    metric: str = RETURNS
    episodes: int = 32
    boundary_share: float = 0.5
    group: str = ""

    def __post_init__(self) -> None:
        if not isinstance(self.start, Sequence | Tensor):
            object.__setattr__(self, "start", (finite_number(self.start, "Adaptive", "start"),) * 2)
        self._check(pair, "start", "limits")
        self._check(two_numbers, "thresholds")
        self._check(finite_number, "step", "boundary_share")
        self._check(whole_number(1), "episodes")
        if self.step <= 0:
            raise ValueError(f"Adaptive: `step` must be more than 0; got {self.step}.")
        if not 0 < self.boundary_share <= 1:
            raise ValueError(f"Adaptive: `boundary_share` must be in (0, 1]; got {self.boundary_share}.")
        if self.limits is not None and not self.limits[0] <= self.start[0] <= self.start[1] <= self.limits[1]:
            raise ValueError(f"Adaptive: `start` must lie in `limits`; got {list(self.start)} and {list(self.limits)}.")

    @property
    def support(self) -> tuple[float, float]:
        """The widest range that it can reach."""
        return self.start if self.limits is None else self.limits

    def clipped(self, low: float, high: float) -> Adaptive:
        """Return it with the parameter's bounds as missing limits; raise `ValueError` if `start` exceeds them."""
        if self.limits is not None:
            return self
        if not low <= self.start[0] <= self.start[1] <= high:
            raise ValueError(f"{self!r}: its start lies outside of the parameter's bounds [{low:g}, {high:g}].")
        limited = dataclasses.replace(self)
        object.__setattr__(limited, "limits", (low, high))  # infinite if the parameter has no bound
        return limited

    def draw(self, noise: Tensor) -> Tensor:
        """Draw from the initial range, `[num_envs]`."""
        return Uniform(*self.start).draw(noise)
