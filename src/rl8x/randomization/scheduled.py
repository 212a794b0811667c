"""Distributions whose numbers follow a counter, a metric, or a function of the user's."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Final

import torch
from torch import Tensor

from rl8x.randomization.curriculum import Curriculum, MovingDistribution
from rl8x.randomization.distributions import Constant, Grid, ParameterDistribution, finite_number, parsed_value

_POINTS: Final = (
    "must be a list of (metric, distribution) pairs, as in [(0, Uniform(0.4, 0.6)), (1e6, Uniform(0.1, 1.0))]"
)


@dataclasses.dataclass(frozen=True, repr=False)
class Scheduled(MovingDistribution):
    """Go from distribution to distribution as a counter or a metric of the trainer's row grows.

        env_config={"length": Scheduled([(0, Uniform(0.45, 0.55)), (1_000_000, Uniform(0.1, 1.0))])}
        env_config={"length": Scheduled([(100, 0.5), (450, 1.0)], by="eval/returns/mean", goes_back=False)}

    It moves before each collect. Until the metric is measured, it is the distribution of the first point.

    Args:
        points: (value of the metric, distribution) pairs with increasing values. All distributions are of one kind,
            each `Choice` with the same number of values; a number is a constant.
        by: The metric, such as `env/steps` or `eval/returns/mean`; its value before the collect counts.
        interpolation: `"interp"` interpolates each number of the distribution linearly between points, `"step"` holds
            each distribution until the next point. Before the first and after the last point both hold it.
        goes_back: Whether it goes back if the metric falls again; if not, the largest value so far counts.
    """

    kind: ClassVar[str] = "scheduled"
    points: tuple[tuple[float, ParameterDistribution], ...]
    by: str = "env/steps"
    interpolation: str = "interp"
    goes_back: bool = True

    def __post_init__(self) -> None:
        if self.interpolation not in ("interp", "step"):
            raise ValueError(f"Scheduled: `interpolation` must be 'interp' or 'step'; got {self.interpolation!r}.")
        if not isinstance(self.by, str) or not self.by:
            raise ValueError(f"Scheduled: `by` must be the name of a metric, such as 'env/steps'; got {self.by!r}.")
        if not isinstance(self.goes_back, bool):
            raise ValueError(f"Scheduled: `goes_back` must be true or false; got {self.goes_back!r}.")
        if not isinstance(self.points, Sequence) or isinstance(self.points, str) or not self.points:
            raise ValueError(f"Scheduled: `points` {_POINTS}; got {self.points!r}.")
        points = tuple(_point(point) for point in self.points)
        at = [x for x, _ in points]
        if any(later <= earlier for earlier, later in itertools.pairwise(at)):
            raise ValueError(f"Scheduled: the metric's values in `points` must increase; got {at}.")
        distributions = [distribution for _, distribution in points]
        shapes = {(type(drawn), len(drawn.values) if hasattr(drawn, "values") else 0) for drawn in distributions}
        if len(shapes) > 1:
            narrow = {"uniform": "Uniform(x, x)", "log_uniform": "LogUniform(x, x)", "normal": "Normal(x, 0)"}
            kinds = {kind.kind for kind, _ in shapes}
            forms = [narrow[kind] for kind in sorted(kinds & narrow.keys())] if Constant.kind in kinds else []
            raise ValueError(
                "Scheduled: the distributions of `points` must be of one kind, with as many values in each; got "
                f"{', '.join(map(repr, distributions))}."
                + (f" Among these, write a number x as {' or '.join(forms)}." if forms else "")
            )
        object.__setattr__(self, "points", points)

    @property
    def support(self) -> tuple[float, float]:
        """The smallest and the largest value that any point's distribution can draw."""
        lows, highs = zip(*(distribution.support for _, distribution in self.points), strict=True)
        return min(lows), max(highs)

    def at(self, metric: float | None) -> ParameterDistribution:
        """Return the distribution at a value of the metric.

        Args:
            metric: The metric `by`; None if it was never measured.
        """
        later = [i for i, (x, _) in enumerate(self.points) if metric is None or x > metric]
        i = later[0] if later else len(self.points)
        begin, here = self.points[max(i - 1, 0)]
        if metric is None or self.interpolation == "step" or i in (0, len(self.points)):
            return here
        end, there = self.points[i]
        fraction = (metric - begin) / (end - begin)
        numbers = [a * (1.0 - fraction) + b * fraction for a, b in zip(here.numbers, there.numbers, strict=True)]
        return here.of_numbers(numbers)

    def draw(self, noise: Tensor) -> Tensor:
        """Draw from the first point's distribution, `[num_envs]`."""
        return self.at(None).draw(noise)

    def clipped(self, low: float, high: float) -> Scheduled:
        """Return the same with all distributions limited to a parameter's bounds."""
        points = tuple((x, distribution.clipped(low, high)) for x, distribution in self.points)
        return dataclasses.replace(self, points=points)


def _point(point: object) -> tuple[float, ParameterDistribution]:
    if not isinstance(point, Sequence) or isinstance(point, str) or len(point) != 2:
        raise ValueError(f"Scheduled: `points` {_POINTS}; got {point!r}.")
    x, value = point
    if not isinstance(value, ParameterDistribution | Mapping):
        value = Constant((finite_number(value, "Scheduled", "points"),))
    value = parsed_value(value)
    if value.moves or isinstance(value, Grid):
        raise ValueError(f"Scheduled: {value!r} cannot be one of `points`: give Uniform, LogUniform, Normal or Choice.")
    return finite_number(x, "Scheduled", "points"), value


class NumbersCurriculum(Curriculum):
    """One parameter that is drawn by numbers in a tensor: of a schedule, or those that a function returned last."""

    def __init__(self, members: Mapping[str, ParameterDistribution]) -> None:
        ((self._name, member),) = members.items()
        self._schedule = member if isinstance(member, Scheduled) else None
        self._at: float | None = None  # the value of a schedule's metric that counts
        self.now = self._schedule.at(None) if self._schedule else member
        super().__init__(members, f"{'scheduled' if self._schedule else 'steered'}:{self._name}")
        if self._schedule is None:
            self.key = json.dumps([self.label, self.now.kind, len(self.now.drawn_by)])

    def allocate_state(self, device: torch.device) -> None:
        """Allocate the tensor of numbers."""
        self.state["numbers"] = torch.tensor(self.now.drawn_by, dtype=torch.float32, device=device)

    def _move(self, now: ParameterDistribution) -> None:
        """Make a distribution the present one and write its numbers to the tensor that programs read."""
        self.now = now
        self.state["numbers"].copy_(torch.tensor(now.drawn_by, dtype=torch.float32))

    def draw(self, noise: Tensor) -> tuple[dict[str, Tensor], Tensor | None]:
        """Draw from the present numbers, `[num_envs]`, from noise `[num_envs, 1]`."""
        return {self._name: self.now.draw_by(noise[:, 0], self.state["numbers"])}, None

    def update_from_metrics(self, row: Mapping[str, float]) -> None:
        """Move a schedule to the row's value of its metric, if that is finite."""
        schedule = self._schedule
        if self.is_evaluating or schedule is None:
            return
        metric = row.get(schedule.by)
        if metric is None or not math.isfinite(metric) or metric == self._at:
            return
        if self._at is None or schedule.goes_back or metric > self._at:
            self._at = float(metric)
            self._move(schedule.at(self._at))

    def update_from_config(self, configured: Curriculum) -> None:
        """From now on, draw from the distribution that a function returned."""
        (member,) = configured.members.values()
        if self._schedule is None and member != self.now:
            self._move(member)

    def present(self) -> dict[str, ParameterDistribution]:
        """Return the present distribution."""
        return {self._name: self.now}

    def state_dict(self) -> dict[str, Any]:
        """Return a schedule's value of the metric; a function's distributions are in the configuration."""
        return {"begun": self.begun, "at": self._at}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state of `state_dict`."""
        self.begun, self._at = bool(state["begun"]), state["at"]
        self._move(self._schedule.at(self._at) if self._schedule else self.now)


Scheduled.curriculum = NumbersCurriculum
