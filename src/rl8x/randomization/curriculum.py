"""The base classes of distributions that move while a policy trains, and of the state that moves: a curriculum.

A moving distribution is an immutable value, as the others are. The state that moves is in a `Curriculum`: parameters
that are drawn together, with tensors that programs read at each call and that change in place, between two horizons.

If returns decide, a draw also gives a `source` for each episode, a whole number, or -1 if its return does not count;
the environment carries it until the episode ends. A policy's failures, or its successes, end episodes sooner, so
counting the episodes that have ended by some moment would favour short ones. Instead a round counts the episodes that
begin while it is open. It closes at the end of the horizon in which there are enough, and is decided when the last of
them has ended.
"""

from __future__ import annotations

import dataclasses
import json
from abc import ABC, abstractmethod
from collections.abc import Hashable, Mapping
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from rl8x.distributed import ranks
from rl8x.randomization.distributions import ParameterDistribution

RETURNS = "returns"
"""The metric that is an episode's return; other metrics are the environment's own."""
NO_SOURCE = -1


class Episodes(NamedTuple):
    """The episodes of a horizon, with the metric and the sources that one curriculum learns from."""

    scores: Tensor  # the metric of each episode up to each step, `[horizon, num_envs]`; may be NaN
    ended: Tensor  # where an episode ended, `[horizon, num_envs]`, bool
    sources: Tensor  # how its parameters were drawn, see `Curriculum.draw`, `[horizon, num_envs]`, int64
    pending: Tensor  # the sources of episodes that go on after the horizon, -1 where none does, `[num_envs]`, int64

    @property
    def counted(self) -> Tensor:
        """Where an episode ended that has a source and a finite score, `[horizon, num_envs]`, bool."""
        return self.ended & (self.sources != NO_SOURCE) & self.scores.isfinite()

    def of_all_ranks(self) -> Episodes:
        """Return the episodes of all ranks, side by side in the order of ranks."""
        if ranks().size == 1:
            return self
        sources = torch.where(self.ended, self.sources, NO_SOURCE)
        # One message in float64, which represents every float32 and every source.
        parts = [self.scores, sources, self.pending.unsqueeze(0)]
        gathered = torch.cat(ranks().gather(torch.cat([part.to(torch.float64) for part in parts])), 1)
        horizon = len(self.ended)
        scores, sources = gathered[:horizon].to(self.scores.dtype), gathered[horizon:-1].to(torch.int64)
        return Episodes(scores, sources != NO_SOURCE, sources, gathered[-1].to(torch.int64))


@dataclasses.dataclass(frozen=True, repr=False)
class MovingDistribution(ParameterDistribution):
    """A distribution that moves; `draw` draws from its initial form.

    If a class has a field `group`, the distributions of an `env_config` with the same group share a curriculum; else
    each has its own.
    """

    moves: ClassVar[bool] = True
    own_fields: ClassVar[tuple[str, ...]] = ()
    """Fields that parameters of one curriculum need not have in common."""
    curriculum: ClassVar[Any]
    """The `Curriculum` class of such parameters; it takes their distributions by name."""

    def _given(self) -> dict[str, object]:
        """Return the fields that differ from their defaults, by name."""
        values = {field: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {field.name: value for field, value in values.items() if value != field.default}

    def to_dict(self) -> dict[str, object]:
        """Return the plain JSON form, with those arguments by name that differ from their defaults."""

        def plain(value: Any) -> Any:
            if isinstance(value, ParameterDistribution):
                return value.to_dict()
            return list(map(plain, value)) if isinstance(value, tuple) else value

        return {self.kind: {name: plain(value) for name, value in self._given().items()}}

    def __repr__(self) -> str:
        """Return the call that makes it, with those arguments that differ from their defaults."""
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in self._given().items())})"


class Curriculum(ABC):
    """Parameters of an environment that are drawn together and move together."""

    def __init__(self, members: Mapping[str, Any], label: str | None = None) -> None:
        self.members, self.names = dict(members), tuple(members)  # in the order of their noise
        self.options = self.members[self.names[0]]  # for the options that they share
        self.label = label or f"{self.options.kind}:{self.options.group}"
        # The metric of an episode by which it moves; None if episodes do not decide.
        self.metric: str | None = getattr(self.options, "metric", None)
        forms = {name: member.to_dict() for name, member in self.members.items()}
        self.key = json.dumps([self.label, forms], sort_keys=True)  # curricula with the same key share one state
        # Uniform numbers that the draw of one copy needs; one decides where it is played.
        self.width = len(self.members) + (self.metric is not None)
        self.state: dict[str, Tensor] = {}  # which a program reads; changed in place
        self.begun = False
        self.is_evaluating = False

    @abstractmethod
    def allocate_state(self, device: torch.device) -> None:
        """Allocate the tensors of the state on a device with their initial values, once."""

    def begin(self, generator: torch.Generator) -> None:  # noqa: B027 - most have nothing to draw
        """Draw the initial state, before the first episode."""

    def update_from_config(self, configured: Curriculum) -> None:  # noqa: B027
        """Adopt the distributions of a new curriculum with the same key; most kinds have them in the key."""

    @abstractmethod
    def draw(self, noise: Tensor) -> tuple[dict[str, Tensor], Tensor | None]:
        """Draw the parameters of episodes that start now: a pure function of the noise and the state."""

    def update_from_episodes(self, episodes: Episodes, generator: torch.Generator) -> None:  # noqa: B027
        """Move by the outcomes of a horizon's episodes, on the device."""

    def update_from_metrics(self, row: Mapping[str, float]) -> None:  # noqa: B027
        """Move by the trainer's row of counters and metrics."""

    def set_evaluating(self, is_evaluating: bool) -> None:
        """Begin or end drawing for evaluations: from the present distribution, with episodes that do not count."""
        self.is_evaluating = is_evaluating

    def ranges(self) -> dict[str, tuple[Any, Any]]:
        """Return the smallest and the largest value drawn now, by name: numbers, or 0-d tensors on the device."""
        return {name: now.support for name, now in self.present().items()}

    @abstractmethod
    def present(self) -> dict[str, ParameterDistribution]:
        """Return the fixed distributions that evaluations draw from now, by name; copies values to the host."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state, with copies of its tensors."""
        return {"begun": self.begun, **{name: tensor.clone() for name, tensor in self.state.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a `state_dict`, in place."""
        self.begun = bool(state["begun"])
        for name, tensor in self.state.items():
            tensor.copy_(state[name])


def make_curricula(moving: Mapping[str, ParameterDistribution]) -> tuple[Curriculum, ...]:
    """Make the curricula of an `env_config`'s moving distributions; raise `ValueError` if members' options differ."""
    joined: dict[Hashable, dict[str, MovingDistribution]] = {}
    for name, member in moving.items():
        assert isinstance(member, MovingDistribution)
        members = joined.setdefault((type(member), member.group) if hasattr(member, "group") else name, {})
        members[name] = member
        first, leader = next(iter(members.items()))
        for field in dataclasses.fields(leader):
            ours, theirs = getattr(leader, field.name), getattr(member, field.name)
            if ours != theirs and field.name not in leader.own_fields:
                raise ValueError(
                    f"{first!r} and {name!r} are drawn together by one {type(leader).__name__}, so that both need the "
                    f"same `{field.name}`; got {ours!r} and {theirs!r}. Those with another `group` are drawn apart."
                )
    return tuple(type(next(iter(members.values()))).curriculum(members) for members in joined.values())
