"""Several agents in a copy of an environment: the observations of each, and their common return.

A row of a batch is an agent of a copy: row `agent * num_copies + copy`. So algorithms that learn from rows train one
policy for all agents, and only code that counts episodes has to know which rows belong together.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, Literal, TypeAlias

import gymnasium.spaces as spaces
import torch
from torch import Tensor

from rl8x import keys
from rl8x.envs.steps import Observation, by_part
from rl8x.names import did_you_mean
from rl8x.spaces import AsymmetricDict, check_supported, describe_space, in_tensor_types, map_spaces, without_parts
from rl8x.trees import first_tensor, tree_map

TeamReturn: TypeAlias = str | Callable[[Tensor], Tensor]
SharedState: TypeAlias = Literal["shared"] | None

AGENT_ID: Final = "agent_id"
"""The part of an observation that contains the agent's index."""
STATE: Final = "state"
"""The part of an observation that the critic alone sees, the same for all agents of a copy."""
_REDUCTIONS: Final[dict[str, Callable[..., Tensor]]] = {
    "mean": torch.mean,
    "sum": torch.sum,
    "min": torch.amin,
    "max": torch.amax,
}


class Team:
    """The agents of a copy.

    Args:
        names: The agents, in the order of their rows.
        owner: The environment's name in error messages.
        team_return: The return of a copy's episode: the "mean", "sum", "min" or "max" of those of its agents, or a
            function of them, `[copies, agents]` to `[copies]`.
        agent_id: Whether observations contain the agent's index, as the part "agent_id".
        state: "shared" adds the part "state", for the critic alone.

    Raises:
        TypeError: If `agent_id` is not a bool.
        ValueError: If `team_return` or `state` is none of these, or an agent's name cannot be part of a metric's name.
    """

    def __init__(
        self,
        names: Sequence[str],
        owner: str,
        *,
        team_return: TeamReturn = "mean",
        agent_id: bool = False,
        state: SharedState = None,
    ) -> None:
        self.names, self.owner, self.agent_id, self.state = tuple(names), owner, agent_id, state
        if not isinstance(agent_id, bool):
            raise TypeError(f"{owner}: agent_id must be true or false; got {agent_id!r}.")
        if state not in (None, "shared"):
            raise ValueError(f"{owner}: state must be 'shared' or None; got {state!r}.")
        for name in self.names:
            if not isinstance(name, str) or "/" in name:
                raise ValueError(f"{owner}: agents must have names without '/'; got {name!r}.")
        reduce: Any = team_return
        if isinstance(team_return, str) and team_return in _REDUCTIONS:
            reduce = functools.partial(_REDUCTIONS[team_return], dim=1)
        if not callable(reduce):
            raise ValueError(
                f"{owner}: team_return must be one of {', '.join(map(repr, _REDUCTIONS))}, or a function of returns "
                f"[copies, agents]; got {team_return!r}.{did_you_mean(team_return, _REDUCTIONS)}"
            )
        named = getattr(team_return, "__qualname__", type(team_return).__name__)
        self._reduce, self._name = reduce, team_return if isinstance(team_return, str) else named
        made = reduce(torch.zeros(2, len(self.names)))
        if not isinstance(made, Tensor) or made.shape != (2,):
            got = list(made.shape) if isinstance(made, Tensor) else type(made).__name__
            raise ValueError(
                f"{owner}: team_return must make [copies] of returns [copies, agents]; of [2, {len(self.names)}] it "
                f"made {got}."
            )

    @property
    def params(self) -> dict[str, Any]:
        """The params of a run that describe its team."""
        return {"agents": list(self.names), "team_return": self._name, "agent_id": self.agent_id, "state": self.state}

    # -- observations of an agent

    def common(self, *of_agents: Iterable[spaces.Space[Any]]) -> list[spaces.Space[Any]]:
        """Return the spaces of observations and actions that all agents share, from each agent's, `[agents]` each.

        Raises:
            ValueError: If two agents differ, or a space has no tensor form.
        """
        found = []
        for what, (first, *others) in zip(("observations", "actions"), of_agents, strict=True):
            check_supported(map_spaces(first, in_tensor_types), f"{self.owner}: {what} of {self.names[0]}")
            for name, space in zip(self.names[1:], others, strict=True):
                if space != first:
                    raise ValueError(
                        f"{self.owner}: agents share a policy, so that they need the same spaces; {what} of "
                        f"{self.names[0]} are {describe_space(first)}, of {name} {describe_space(space)}."
                    )
            found.append(first)
        return found

    def space(self, own: spaces.Space[Any], state: spaces.Space[Any] | None = None) -> spaces.Space[Any]:
        """Return the space of an agent's observation: its own space, with the added parts.

        Args:
            own: Space of its own observation.
            state: Space of the environment's state; None: all agents' observations take its place.

        Raises:
            ValueError: If the observation already has a part of an added name.
        """
        self._agent_space = own
        if not self.agent_id and self.state is None:
            return own
        parts = by_part(own, own)
        for name, is_added in ((AGENT_ID, self.agent_id), (STATE, self.state is not None)):
            if is_added and name in parts:
                raise ValueError(f"{self.owner}: observations have a part {name!r} already. Leave `{name}` out.")
        if self.agent_id:
            parts[AGENT_ID] = spaces.Discrete(len(self.names))  # which models encode as one-hot
        if self.state is None:
            return spaces.Dict(parts)
        seen = without_parts(own, [keys.ACTION_MASK])
        parts[STATE] = spaces.Dict(dict.fromkeys(self.names, seen)) if state is None else state
        return AsymmetricDict(parts, critic_only=[STATE])

    def see(self, own: Any, state: Any = None) -> Observation:
        """Return observations with the added parts, as in `space`.

        Args:
            own: The agents' own, `[num_envs, *own]`.
            state: The environment's state, `[copies, *state]`.
        """
        if not self.agent_id and self.state is None:
            return own  # type: ignore[no-any-return]
        parts = by_part(self._agent_space, own)
        agents, rows = len(self.names), first_tensor(own)
        if self.agent_id:
            parts[AGENT_ID] = torch.arange(agents, device=rows.device).repeat_interleave(len(rows) // agents)
        if self.state is not None and state is None:
            seen = {name: own[name] for name in own if name != keys.ACTION_MASK} if isinstance(own, dict) else own
            by_agent = tree_map(lambda part: part.chunk(agents), seen)
            state = {name: tree_map(lambda part, i=i: part[i], by_agent) for i, name in enumerate(self.names)}  # type: ignore[misc]
        if self.state is not None:
            parts[STATE] = tree_map(self.for_agents, state)
        return parts

    def for_agents(self, values: Tensor) -> Tensor:
        """Repeat values of copies for the rows of all their agents, `[num_envs, ...]`.

        Args:
            values: One for each copy, `[copies, ...]`.
        """
        return values.repeat(len(self.names), *(1,) * (values.ndim - 1))

    # -- returns and episodes

    def of_agents(self, values: Any) -> Tensor:
        """Return values of rows by agent, `[..., agents, copies]`.

        Args:
            values: A tensor or array, `[..., num_envs]`.
        """
        tensor = torch.as_tensor(values)
        return tensor.reshape(*tensor.shape[:-1], len(self.names), -1)

    def returns(self, returns: Any) -> Tensor:
        """Return the returns of the team, `[..., copies]`.

        Args:
            returns: Those of its agents, `[..., num_envs]`.
        """
        by_agent = self.of_agents(returns).transpose(-1, -2)
        team: Tensor = self._reduce(by_agent.reshape(-1, len(self.names)))
        return team.reshape(by_agent.shape[:-1])

    def episodes(self, rollout: Mapping[str, Any]) -> dict[str, Any]:
        """Return the tensors of a rollout that describe episodes, by copy, `[..., copies]`.

        The environment's own metrics are averaged over agents; the length is the copy's.

        Args:
            rollout: Its tensors by key, `[..., num_envs]`.
        """
        ended = rollout.get(keys.ENDED)
        if ended is None:
            ended = torch.as_tensor(rollout[keys.TERMINATED]) | torch.as_tensor(rollout[keys.TRUNCATED])
        by_copy = {keys.TERMINATED: ended, keys.TRUNCATED: ended, keys.EPISODE_LENGTHS: rollout[keys.EPISODE_LENGTHS]}
        by_copy |= {name: rollout[name] for name in rollout if name.startswith(f"{keys.SOURCES}/")}
        metrics = {name: rollout[name] for name in rollout if name.startswith(f"{keys.METRICS}/")}
        told = {name: self.of_agents(values)[..., 0, :] for name, values in by_copy.items()}
        told |= {name: self.of_agents(values).nanmean(-2) for name, values in metrics.items()}
        return told | {keys.EPISODE_RETURNS: self.returns(rollout[keys.EPISODE_RETURNS])}
