"""VMAS, a simulator of agents on a plane, as an rl8x environment: one policy for all agents.

    VmasEnv("balance", num_envs=256)                       # 256 worlds of 3 agents

Each world is a copy, and each of its agents a row; see `envs/team.py`. The episodes of all agents end with their world,
which is reset in the same step; the observation before the reset is kept. Needs the extra `vmas`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from types import EllipsisType
from typing import Any, ClassVar

import torch
from torch import Tensor

from rl8x.envs.base import Carry, Env, Observation, Step
from rl8x.envs.bindings import Attribute, Function, Scale, bindings_of
from rl8x.envs.bound_parameters import BoundBatch
from rl8x.envs.checks import refuse_observing
from rl8x.envs.simulator import SimulatorEnv, as_gymnasium
from rl8x.envs.team import SharedState, Team, TeamReturn


class VmasEnv(SimulatorEnv):
    """Agents of VMAS worlds that share a policy.

    All agents must have the same spaces. Row `agent * num_copies + world` is an agent of a world. Arguments that are
    not listed here are those of `Env`.

    Args:
        scenario: Name of a VMAS scenario, or one of your own.
        num_envs: Number of worlds.
        seed: Seeds VMAS; None draws one.
        metrics: Values of the agents' `info` to average over episodes, as `EpisodeMetrics` takes them.
        parameters: Parameters of `env_config`: names to the path of an attribute of VMAS's environment, such as
            `agents[0].mass`, `Attribute`, `Scale`, a function `(environment, values [num_worlds]) -> None`, or
            the plain forms of the first two.
        team_return: How the return of a world's episode is computed from those of its agents; see `Team`.
        agent_id: Whether an agent's observation contains its index.
        state: "shared" gives the critic the observations of all agents.
        **kwargs: For `vmas.make_env`, and through it for the scenario. Its `max_steps` truncates, as `time_limit` does.

    Raises:
        RuntimeError: If VMAS is not installed.
        TypeError: If `scenario` is neither a name nor a scenario.
        ValueError: If there is no such scenario, agents differ in their spaces, or an option is not legal.
    """

    team: Team
    default_time_limit: ClassVar[int | None] = 200

    def __init__(
        self,
        scenario: Any,
        num_envs: int,
        *,
        device: torch.device | str = "cpu",
        seed: int | None = None,
        time_limit: int | EllipsisType | None = ...,
        metrics: Sequence[str] = (),
        parameters: Mapping[str, Any] | None = None,
        team_return: TeamReturn = "mean",
        agent_id: bool = False,
        state: SharedState = None,
        **kwargs: Any,
    ) -> None:
        refuse_observing(kwargs.pop("observe_parameters", "none"), "VmasEnv")
        try:
            from vmas import make_env
        except ImportError as error:
            raise RuntimeError("VmasEnv needs VMAS. Install it with: pip install 'rl8x[vmas]'") from error
        if not isinstance(scenario, str) and not hasattr(scenario, "env_make_world"):
            raise TypeError(f"VmasEnv: scenario must be a name or a scenario of VMAS; got {scenario!r}.")
        try:
            probe = make_env(scenario, num_envs=1, device="cpu", **kwargs)
        except AssertionError as error:  # VMAS's error for an unknown name
            raise ValueError(f"VmasEnv: {error}") from error
        seen: dict[str, Any] = {"team_return": team_return, "agent_id": agent_id, "state": state}
        self.team = Team([agent.name for agent in probe.agents], "VmasEnv", **seen)
        own, self.single_action_space = self.team.common(
            map(as_gymnasium, probe.observation_space), map(as_gymnasium, probe.action_space)
        )
        self.single_observation_space = self.team.space(own)
        self._make_from(scenario, metrics, {"parameters": parameters, **seen, **kwargs})
        self.worlds = make_env(scenario, num_envs=num_envs, device=str(device), terminated_truncated=True, **kwargs)
        self._random_state = list(self.worlds.vmas_random_state)
        bindings = bindings_of(parameters, (Attribute, Scale, Function), "VmasEnv")
        advice = "Set it by a function of all values, or an attribute with a row for each world (per_copy=True)."
        self._bound = BoundBatch(bindings, self.worlds, resets_itself=False, advice=advice)
        self.parameters = self._bound.parameters
        super().__init__(num_envs, device=device, seed=seed, time_limit=time_limit)

    def restart(self, noise: Tensor) -> tuple[Carry, Observation]:
        """Reset all worlds; the first observation is `[num_envs, *]`."""
        parameters = self.starting_parameters(noise)
        self._put(parameters)
        with self._separate_random():
            obs = self.worlds.reset(seed=self.next_seed)
        self.next_seed = None
        return self.first_carry({}, parameters), self.team.see(self._joined(obs))

    def advance(self, carry: Carry, actions: Any, noise: Tensor) -> tuple[Carry, Step]:
        """Step the worlds by actions `[num_envs, *]`; not pure, unlike the base class's, as it changes them."""
        agents = list(actions.unflatten(0, (self.num_agents, -1)).unbind(0))
        with self._separate_random():
            obs, raw_rewards, ended, cut, infos = self.worlds.step(agents)
        rewards = self._joined(raw_rewards)
        terminated, truncated = self.team.for_agents(ended), self.team.for_agents(cut)
        if self.time_limit is not None:
            truncated = truncated | (carry["elapsed"] + 1 >= self.time_limit)
        # Agents of a world begin and end together.
        done = terminated | truncated
        info = {}
        for name in (name for name in self.metric_names if any(name in own for own in infos)):
            none = torch.full((self.num_copies, 1), torch.nan, device=self.device)  # of agents that do not report it
            info[name] = self._joined([own.get(name, none).reshape(len(none), -1)[:, 0] for own in infos])
        final_obs = next_obs = self.team.see(self._joined(obs))
        over = done[: self.num_copies].nonzero().squeeze(1).tolist()
        parameters = self._redrawn(done, carry["parameters"], self.starting_parameters(noise))
        self._put(parameters)
        with self._separate_random():
            for world in over:
                self.worlds.reset_at(world, return_observations=False)
            if over:
                next_obs = self.team.see(self._joined(self.worlds.get_from_scenario(True, False, False, False)[0]))
        return self.finish(carry, parameters, info, done, next_obs, rewards, terminated, truncated, final_obs)

    @contextlib.contextmanager
    def _separate_random(self) -> Iterator[None]:
        """Give VMAS these worlds' own random state within the context: it shares one among all worlds of a process."""
        drawn_by_all = self.worlds.vmas_random_state
        others, drawn_by_all[:] = list(drawn_by_all), self._random_state
        try:
            yield
        finally:
            self._random_state, drawn_by_all[:] = list(drawn_by_all), others

    def another(self, num_envs: int | None = None, *, seed: int | None = None, **kwargs: Any) -> Env | None:
        """Make new worlds, at most 128 by default; None if the scenario is an object, which keeps its world."""
        assert self.made_from is not None
        named = isinstance(self.made_from[0], str)
        return super().another(num_envs, seed=seed, **kwargs) if named else None

    def _joined(self, parts: Sequence[Tensor]) -> Tensor:
        """Concatenate the agents' rows, as a float32 copy `[num_envs, ...]`."""
        return torch.cat([part.to(torch.float32) for part in parts])
