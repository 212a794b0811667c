"""Sampling for learnability: episodes are played on the levels that a policy solves sometimes, and not always."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar, Final

import torch
from torch import Tensor

from rl8x.randomization.curriculum import NO_SOURCE, RETURNS, Curriculum, Episodes, MovingDistribution
from rl8x.randomization.distributions import ParameterDistribution, finite_number, from_dict, two_numbers, whole_number

# Successes are summed as whole multiples of 1 / _PARTS: sums in any order are equal, on an accelerator too.
_PARTS: Final = 2**20


class LearnableCurriculum(Curriculum):
    """A table of T levels of d parameters: K kept levels, then the candidates of the round.

    The state: `values` float32 `[T, d]`; the round's `count`, `total` and `squares` of successes, int64 `[T]`, the
    latter two in 1 / _PARTS; `scores` float64 `[T]`; `edges`, the end of each kept level's share of [0, 1), float32
    `[K]`; `open`, whether episodes that begin count, and `trains`, false in evaluations, 0-d bool.
    """

    def allocate_state(self, device: torch.device) -> None:
        """Allocate the state, with the medians of the bases as levels."""
        kept, size = self.options.levels, self.options.levels + self.options.candidates
        whole = {name: torch.zeros(size, dtype=torch.int64, device=device) for name in ("count", "total", "squares")}
        self.state = {
            "values": self._from_bases(torch.full((size, len(self.members)), 0.5, device=device)),
            **whole,
            "scores": torch.zeros(size, dtype=torch.float64, device=device),
            "edges": torch.arange(1, kept + 1, dtype=torch.float64, device=device).div(kept).float(),
            "open": torch.ones((), dtype=torch.bool, device=device),
            "trains": torch.ones((), dtype=torch.bool, device=device),
        }

    def begin(self, generator: torch.Generator) -> None:
        """Draw the first levels, once."""
        if not self.begun and not self.is_evaluating:
            self.begun = True
            values = self.state["values"]
            values.copy_(self._from_bases(torch.rand(values.shape, generator=generator, device=values.device)))

    def _from_bases(self, noise: Tensor) -> Tensor:
        """Draw levels `[n, d]` from noise of that shape."""
        return torch.stack([each.base.draw(noise[:, i]) for i, each in enumerate(self.members.values())], dim=1)

    def draw(self, noise: Tensor) -> tuple[dict[str, Tensor], Tensor | None]:
        """Draw a level for each copy by the last noise column; the others are for evaluations.

        The source is the level's row of the table if a round of the training is open, else -1.
        """
        state, options = self.state, self.options
        uniform, kept_prob = noise[:, -1], options.level_share
        # Each part of [0, 1) is stretched to [0, 1) again.
        stretched = (uniform / kept_prob if kept_prob else uniform).contiguous()
        among_kept = torch.searchsorted(state["edges"], stretched, right=True)
        among_new = ((uniform - kept_prob) / (1.0 - kept_prob) * options.candidates).to(torch.int64)
        kept, new = among_kept.clamp(max=options.levels - 1), among_new.clamp(0, options.candidates - 1)
        row = torch.where(uniform < kept_prob, kept, new + options.levels)
        values = {
            name: torch.where(state["trains"], state["values"][:, i][row], member.base.draw(noise[:, i]))
            for i, (name, member) in enumerate(self.members.items())
        }
        return values, torch.where(state["open"] & state["trains"], row, NO_SOURCE)

    @torch.no_grad()
    def update_from_episodes(self, episodes: Episodes, generator: torch.Generator) -> None:
        """Count a horizon's episodes; if the round is over, score all levels, keep the best and draw new candidates."""
        state, options = self.state, self.options
        self._count(episodes)
        kept, new = options.levels, options.candidates
        noise = torch.rand(new, len(self.members), generator=generator, device=state["values"].device)
        pending = episodes.pending
        begun = state["count"][kept:].sum() + (pending >= kept).sum()
        is_full = begun >= new * options.episodes
        decided = is_full & ~(pending != NO_SOURCE).any()
        scores = self.learnability()
        best = scores.argsort(descending=True, stable=True)[:kept]
        values = torch.cat([state["values"][best], self._from_bases(noise)])
        scores = torch.cat([scores[best], scores.new_zeros(new)])
        weights = scores[:kept]
        weights = torch.where(weights.sum() > 0, weights, torch.ones_like(weights))
        edges = weights.cumsum(0)
        state["values"].copy_(torch.where(decided, values, state["values"]))
        state["edges"].copy_(torch.where(decided, (edges / edges[-1]).float(), state["edges"]))
        state["scores"].copy_(torch.where(decided, scores, state["scores"]))
        for name in ("count", "total", "squares"):
            state[name].masked_fill_(decided, 0)
        state["open"].copy_(decided | ~is_full)

    def _count(self, episodes: Episodes) -> None:
        counted = episodes.counted.flatten()
        rows = torch.where(counted, episodes.sources.flatten(), 0)
        success = torch.where(counted, self.options.success(episodes.scores.flatten()), 0.0)
        parts = {"total": success, "squares": success.square()}
        added = {name: (value * _PARTS).round().to(torch.int64) for name, value in parts.items()}
        for name, value in ({"count": counted.to(torch.int64)} | added).items():
            self.state[name].index_add_(0, rows, value)

    def learnability(self) -> Tensor:
        """Estimate p (1 - p) of each level without bias, float64 `[T]`; below two episodes, keep the old score."""
        count = self.state["count"].to(torch.float64)
        mean, square = (
            self.state[name].to(torch.float64) / _PARTS / count.clamp(min=1) for name in ("total", "squares")
        )
        variance = (square - mean.square()).clamp(min=0) / (count - 1).clamp(min=1)  # that of the mean
        return torch.where(count > 1, mean * (1 - mean) + variance, self.state["scores"])

    def set_evaluating(self, is_evaluating: bool) -> None:
        """Draw from the bases in evaluations, and levels in training."""
        super().set_evaluating(is_evaluating)
        self.state["trains"].fill_(not is_evaluating)

    def ranges(self) -> dict[str, tuple[Any, Any]]:
        """Return the smallest and the largest value of the kept levels."""
        kept = self.state["values"][: self.options.levels]
        return dict(zip(self.members, zip(kept.amin(0), kept.amax(0), strict=True), strict=True))

    def present(self) -> dict[str, ParameterDistribution]:
        """Return the bases."""
        return {name: member.base for name, member in self.members.items()}


@dataclasses.dataclass(frozen=True, repr=False)
class Learnable(MovingDistribution):
    """Draw levels, values of all `Learnable` parameters together, by how learnable they are: p (1 - p).

        env_config={
            "length": Learnable(LogUniform(0.1, 2.0), threshold=400),
            "masspole": Learnable(LogUniform(0.05, 1.0), threshold=400),
        }

    p is a level's probability of success, a return of at least `threshold`; or its mean success, where an episode's
    success is its return rescaled from `bounds` to [0, 1]. A table has `levels` kept levels and `candidates` drawn
    from the bases. A share rho of the episodes is played on kept levels, each in proportion to its learnability, the
    others on candidates. When the candidates have had `episodes` episodes each on average, all levels are scored, the
    best are kept, and new candidates are drawn.

    With n episodes, of which the share of successes is p' and its sample variance v, a level's score is

        p' (1 - p') + v / n,

    which is p (1 - p) on average, from two episodes on; with fewer, a level keeps the score it had, at first 0.

    In the paper p is estimated by rollouts of further copies before each phase of training. Here it is estimated from
    the episodes that are trained on: that costs no transitions, and kept levels are scored again with the policy as it
    has become. An episode counts if it began in the round, and the round waits for the last of these, as the first
    that end would be the short ones. The policy learns meanwhile. The paper draws kept levels uniformly.

    Args:
        base: What levels are drawn from: Uniform, LogUniform, Normal or Choice.
        metric: `"returns"`, or a metric of the environment's own, by which an episode is judged.
        threshold: An episode succeeds if the metric is at least this.
        bounds: (worst, best): the success of an episode is its metric, rescaled to [0, 1] and clipped. Give either
            `threshold` or `bounds`.
        levels: How many levels are kept.
        candidates: How many are drawn from the bases in each round.
        episodes: Episodes of a candidate in a round, on average; at least 2.
        level_share: rho, the share of episodes that is played on kept levels, in [0, 1).
        group: Parameters with the same text are the coordinates of one table, and share all options but `base`.

    Source: Rutherford et al. 2024, arXiv:2408.15099, section 4 and algorithm 1.
    """

    kind: ClassVar[str] = "learnable"
    curriculum = LearnableCurriculum
    own_fields: ClassVar[tuple[str, ...]] = ("base",)
    base: ParameterDistribution
    metric: str = RETURNS
    threshold: float | None = None
    bounds: tuple[float, float] | None = None
    levels: int = 64
    candidates: int = 192
    episodes: int = 4
    level_share: float = 0.5
    group: str = ""

    def __post_init__(self) -> None:
        if isinstance(self.base, Mapping):
            object.__setattr__(self, "base", from_dict(self.base))
        if not isinstance(self.base, ParameterDistribution) or self.base.moves or self.base.fixed:
            raise ValueError(f"Learnable: `base` must be Uniform, LogUniform, Normal or Choice; got {self.base!r}.")
        if (self.threshold is None) == (self.bounds is None):
            raise ValueError(
                "Learnable: give either `threshold`, from which on a return is a success, or `bounds`, between which "
                f"returns are a share of one; got {self.threshold!r} and {self.bounds!r}."
            )
        self._check(two_numbers, "bounds")
        self._check(whole_number(1), "levels", "candidates")
        self._check(whole_number(2), "episodes")
        self._check(finite_number, "threshold", "level_share")
        if not 0 <= self.level_share < 1:
            raise ValueError(f"Learnable: `level_share` must be in [0, 1); got {self.level_share}.")

    @property
    def support(self) -> tuple[float, float]:
        """The smallest and the largest value that the base can draw."""
        return self.base.support

    def clipped(self, low: float, high: float) -> Learnable:
        """Return the same with the base limited to a parameter's bounds."""
        return dataclasses.replace(self, base=self.base.clipped(low, high))

    def draw(self, noise: Tensor) -> Tensor:
        """Draw from the base, `[num_envs]`."""
        return self.base.draw(noise)

    def success(self, scores: Tensor) -> Tensor:
        """Map the metric of episodes to success in [0, 1], float64 `[...]`.

        Args:
            scores: `[...]`; NaN where an episode has none.
        """
        if self.bounds is None:
            assert self.threshold is not None
            return (scores >= self.threshold).to(torch.float64)
        worst, best = self.bounds
        return ((scores.to(torch.float64) - worst) / (best - worst)).clamp(0.0, 1.0)
