"""Spread: agents on a plane that cover landmarks together without bumping into each other."""

from __future__ import annotations

from types import EllipsisType

import gymnasium.spaces as spaces
import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from rl8x.envs.base import Env, Observation, Outcome, Parameter, Parameters, State
from rl8x.envs.canvas import BLUE, GREY, ORANGE, Canvas, CopyParameters, CopyState, Past
from rl8x.envs.checks import whole_number
from rl8x.envs.team import SharedState, Team, TeamReturn

DT = 0.1
CONTACT_FORCE, CONTACT_MARGIN = 100.0, 1e-3
COVERED = 0.1
"""A landmark is covered if its nearest agent is closer than this."""


class Spread(Env):
    """Cover as many landmarks as there are agents, each by one, without bumping; 25 steps.

    Actions, `[num_envs]` int64: 0 does nothing, 1 and 2 push to the left and the right, 3 and 4 down and up.
    Observations, `[num_envs, 4 num_agents + 2]`: the agent's velocity and position, then the landmarks and the other
    agents relative to it. An agent's reward is minus half the sum of the distances from each landmark to its nearest
    agent, minus half the number of agents that it touches itself. The metric `covered` is the number of landmarks that
    have an agent closer than 0.1.

    Arguments that are not listed here are those of `Env` and `Team`.

    Args:
        num_agents: Agents of a copy.
        team_return: How the return of a copy's episode is computed from those of its agents.
        agent_id: Whether an agent's observation contains its index.
        state: "shared" gives the critic the observations of all agents.

    Source: the equations are those of simple_spread_v3 of mpe2 1.1 (Lowe et al. 2017, arXiv:1706.02275), whose
    observations end with signals that are always 0.
    """

    single_action_space = spaces.Discrete(5)
    parameters = {  # noqa: RUF012 - a class variable by the base class
        "size": Parameter(default=0.15, low=0.01, high=0.5, unit="m", description="radius of an agent"),
        "accel": Parameter(default=5.0, low=0.5, high=20.0, unit="N", description="force of a push"),
        "mass": Parameter(default=1.0, low=0.1, high=10.0, unit="kg", description="mass of an agent"),
        "damping": Parameter(default=0.25, low=0.0, high=0.9, unit="", description="share of speed lost in a step"),
    }
    default_time_limit = 25
    reset_noise = 4
    metric_names = ("covered",)
    render_fps = 10.0
    team: Team

    def __init__(
        self,
        num_envs: int,
        *,
        num_agents: int = 3,
        device: torch.device | str = "cpu",
        seed: int | None = None,
        time_limit: int | EllipsisType | None = ...,
        observe_parameters: str = "none",
        team_return: TeamReturn = "mean",
        agent_id: bool = False,
        state: SharedState = None,
    ) -> None:
        names = [f"agent_{i}" for i in range(whole_number(num_agents, "Spread", "num_agents"))]
        if not names:
            raise ValueError(f"Spread: num_agents must be at least 1; got {num_agents}.")
        self.team = Team(names, "Spread", team_return=team_return, agent_id=agent_id, state=state)
        own = spaces.Box(-np.inf, np.inf, (4 * num_agents + 2,), np.float32)
        self.single_observation_space = self.team.space(own)
        super().__init__(
            num_envs, device=device, seed=seed, time_limit=time_limit, observe_parameters=observe_parameters
        )

    def initial_state(self, parameters: Parameters, noise: Tensor) -> State:
        """Place agents at rest and landmarks anywhere in [-1, 1], `[num_envs, 2]`: a landmark for each agent."""
        position, landmark = (noise * 2 - 1).chunk(2, -1)
        return {"position": position, "velocity": torch.zeros_like(position), "landmark": landmark}

    def transition(self, state: State, actions: Tensor, parameters: Parameters, noise: Tensor) -> Outcome:
        """Push agents by actions `[num_envs]`; touching agents repel each other; positions are updated first.

        x' = x + v dt
        v' = (1 - damping) v + F / m dt,   F_ij = 100 (x_i - x_j) / d_ij  1e-3 log(1 + exp((2 size - d_ij) / 1e-3))
        """
        pushes = torch.stack(((actions == 2).float() - (actions == 1).float(),
                              (actions == 4).float() - (actions == 3).float()), -1)  # fmt: skip
        position, size = state["position"], self._agents(parameters["size"])
        apart, distance = self._between(position, position)
        touched = F.softplus((2 * size - distance) / CONTACT_MARGIN) * CONTACT_MARGIN
        force = CONTACT_FORCE * apart / distance.clamp(min=1e-12).unsqueeze(-1) * touched.unsqueeze(-1)
        push = pushes * parameters["accel"].unsqueeze(-1) + force.sum(1).flatten(0, 1)
        damping, mass = parameters["damping"].unsqueeze(-1), parameters["mass"].unsqueeze(-1)
        position = position + state["velocity"] * DT
        velocity = state["velocity"] * (1 - damping) + push / mass * DT
        state = {"position": position, "velocity": velocity, "landmark": state["landmark"]}
        _, distance = self._between(position, position)
        bumps = (distance < 2 * size).float().sum(1) - 1  # it touches itself
        together = -self._nearest(state).sum(0)
        rewards = (0.5 * together - 0.5 * bumps).flatten()
        return state, rewards, torch.zeros_like(rewards, dtype=torch.bool)

    def observe(self, state: State, parameters: Parameters) -> Observation:
        """Return each agent's observation, `[num_envs, *]`."""
        position, agents = state["position"], self.num_agents
        to_landmarks, _ = self._between(state["landmark"], position)  # [landmarks, agents, copies, 2]
        to_agents, _ = self._between(position, position)
        landmarks = to_landmarks.movedim(0, 2).flatten(0, 1).flatten(1)
        others = [torch.cat([to_agents[j, i] for j in range(agents) if j != i] or [position[:0]], -1)
                  for i in range(agents)]  # fmt: skip
        parts = [state["velocity"], position, landmarks, *([torch.cat(others)] if agents > 1 else [])]
        return self.team.see(torch.cat(parts, -1))

    def measure(self, state: State, parameters: Parameters) -> dict[str, Tensor]:
        """Return how many landmarks are covered, `[num_envs]`."""
        return {"covered": self.team.for_agents((self._nearest(state) < COVERED).float().sum(0))}

    def _agents(self, rows: Tensor) -> Tensor:
        """Return rows `[num_envs, ...]` by agent, `[agents, copies, ...]`."""
        return rows.reshape(self.num_agents, -1, *rows.shape[1:])

    def _between(self, to: Tensor, of: Tensor) -> tuple[Tensor, Tensor]:
        """Return the vectors from points `of` to points `to`, `[to, of, copies, 2]`, and their lengths."""
        ways = self._agents(to).unsqueeze(1) - self._agents(of).unsqueeze(0)
        return ways, ways.square().sum(-1).sqrt()

    def _nearest(self, state: State) -> Tensor:
        """Return the distance from each landmark to the nearest agent, `[landmarks, copies]`."""
        return self._between(state["landmark"], state["position"])[1].amin(1)

    def draw(self, canvas: Canvas, state: CopyState, parameters: CopyParameters, past: Past) -> None:
        """Draw agents, with their trails, and landmarks."""
        far = max(1.2, 1.1 * float(np.abs(state["position"]).max()))
        canvas.view((-far, far), (-far, far))
        for x, y in state["landmark"].tolist():
            canvas.circle((x, y), 0.05, ORANGE)
        for age, before in enumerate(reversed(past[-8:]), start=1):
            for x, y in before["position"].tolist():
                canvas.circle((x, y), 0.03, GREY, strength=round(0.8 * 0.8**age, 3))
        for x, y in state["position"].tolist():
            canvas.circle((x, y), parameters["size"], BLUE, strength=0.7)
