"""Parallel environments of PettingZoo, of several agents each, as an rl8x environment: one policy for all agents.

    PettingZooEnv("mpe2.simple_spread_v3:parallel_env", num_envs=16, N=3)   # 16 copies of 3 agents
    PettingZooEnv(simple_spread_v3.parallel_env, num_envs=16, state="shared")

Each agent of a copy is a row; see `envs/team.py`. Rows of an agent that has ended before its copy, or has not joined
yet, are not experience: their `Step.valid` is false. Needs the extra `pettingzoo`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import EllipsisType
from typing import Any, ClassVar

import gymnasium.spaces as spaces
import numpy as np
import torch
from gymnasium.vector.utils import batch_space, concatenate, create_empty_array, iterate
from torch import Tensor

from rl8x.envs.base import Carry, Observation, Step, apart
from rl8x.envs.bindings import Attribute, Function, Scale, bindings_of
from rl8x.envs.bound_parameters import BoundSimulator
from rl8x.envs.checks import refuse_observing, whole_number
from rl8x.envs.gymnasium_env import policy_space
from rl8x.envs.simulator import SimulatorEnv
from rl8x.envs.steps import Actions
from rl8x.envs.team import SharedState, Team, TeamReturn
from rl8x.envs.vectorised import copied
from rl8x.importing import Trust, import_class
from rl8x.keys import ACTION_MASK
from rl8x.plain import frozen, thawed
from rl8x.spaces import describe_space, element_of, in_tensor_types, map_spaces, tree_of


class PettingZooEnv(SimulatorEnv):
    """Copies of a parallel environment of PettingZoo, stepped one after the other, whose agents share a policy.

    All agents must have the same spaces. Row `agent * num_copies + copy` is an agent of a copy, in the order of
    their names. A copy is reset in the step in which its last agent ends. Float64 becomes float32. Arguments that
    are not listed here are those of `Env`.

    Args:
        make: A function that makes one parallel environment, or its name as `module:name`. An environment in which
            agents act in turn is converted by PettingZoo, if its metadata say `is_parallelizable`.
        seed: Seeds the copies at the first reset, copy i with seed + i.
        time_limit: By default only the environment's own limit.
        metrics: Values of the agents' `info` to average over episodes, as `EpisodeMetrics` takes them.
        parameters: Parameters of `env_config`: names to an attribute's path in the unwrapped environment,
            `Attribute`, `Scale`, a function `(environment, value) -> None`, or the plain forms of the first two.
        team_return: How the return of a copy's episode is computed from those of its agents; see `Team`.
        agent_id: Whether an agent's observation contains its index.
        state: "shared" gives the critic the environment's `state()`, or the observations of all agents if it
            has none.
        **kwargs: For `make`.

    Raises:
        RuntimeError: If PettingZoo is not installed.
        TypeError: If `make` makes no parallel environment.
        ValueError: If agents differ in their spaces, or an option is not legal.
    """

    team: Team
    takes_render_mode: ClassVar[bool] = True

    def __init__(
        self,
        make: str | Callable[..., Any],
        num_envs: int,
        *,
        device: torch.device | str = "cpu",
        seed: int | None = None,
        time_limit: int | EllipsisType | None = ...,
        metrics: Sequence[str] | Mapping[str, str] = (),
        parameters: Mapping[str, Any] | None = None,
        team_return: TeamReturn = "mean",
        agent_id: bool = False,
        state: SharedState = None,
        **kwargs: Any,
    ) -> None:
        refuse_observing(kwargs.pop("observe_parameters", "none"), "PettingZooEnv")
        seen: dict[str, Any] = {"team_return": team_return, "agent_id": agent_id, "state": state}
        self._kwargs = frozen(kwargs)
        self._make_from(make, metrics, {"parameters": parameters, **seen, **kwargs})
        self.copies = _copies(make, whole_number(num_envs, "PettingZooEnv", "num_envs"), kwargs)
        first = self.copies[0]
        self.team = Team(sorted(first.possible_agents), "PettingZooEnv", **seen)
        of_agents = (map(of, self.team.names) for of in (first.observation_space, first.action_space))
        self._agent_space, self._action_space = self.team.common(*of_agents)
        self._state_space = _state_space(first) if state else None
        shown = None if self._state_space is None else in_tensor_types(self._state_space)
        self.single_observation_space = self.team.space(map_spaces(self._agent_space, in_tensor_types), shown)
        self.single_action_space = map_spaces(self._action_space, policy_space)
        self._nobody = next(iter(iterate(batch_space(self._agent_space, 1), create_empty_array(self._agent_space, 1))))
        if isinstance(self._nobody, dict) and ACTION_MASK in self._nobody:
            self._nobody[ACTION_MASK] = np.ones_like(self._nobody[ACTION_MASK])
        bindings = bindings_of(parameters, (Attribute, Scale, Function), "PettingZooEnv")
        self._simulators = [BoundSimulator(copy.unwrapped, bindings) for copy in self.copies]
        self.parameters = self._simulators[0].parameters
        super().__init__(num_envs, device=device, seed=seed, time_limit=time_limit)
        self.render_mode = getattr(first, "render_mode", None)

    @property
    def params(self) -> dict[str, Any]:
        """The name of the function that makes a copy, and its arguments."""
        assert self.made_from is not None
        make, _ = self.made_from
        named = make if isinstance(make, str) else getattr(make, "__qualname__", type(make).__name__)
        return {"make": named, "kwargs": self._kwargs}

    def restart(self, noise: Tensor) -> tuple[Carry, Observation]:
        """Reset all copies, copy i with seed + i after `set_seed`; the first observation is `[num_envs, *]`."""
        parameters = self.starting_parameters(noise)
        obs, alive = [None] * self.num_envs, np.zeros(self.num_envs, np.bool_)
        seed, self.next_seed = self.next_seed, None
        for copy in range(self.num_copies):
            self._reset(copy, obs, alive, parameters, None if seed is None else seed + copy)
        return self.first_carry({}, parameters) | {"alive": self._tensor(alive)}, self._seen(obs)

    @apart
    def advance(self, carry: Carry, actions: Actions, noise: Tensor) -> tuple[Carry, Step]:
        """Step the copies by actions `[num_envs, *action]`; not pure, unlike the base class's, as it changes them."""
        arrays = element_of(self._action_space, actions, lambda space, part: part.cpu().numpy().astype(space.dtype))
        chosen = list(iterate(batch_space(self._action_space, self.num_envs), arrays))
        valid = carry["alive"].cpu().numpy()
        limit, elapsed = self.time_limit, carry["elapsed"][: self.num_copies].cpu().numpy() + 1
        ended = np.zeros(self.num_copies, np.bool_) if limit is None else elapsed >= limit
        obs, reports, alive = [None] * self.num_envs, [dict[str, Any]()] * self.num_envs, np.zeros_like(valid)
        rewards, flags = np.zeros(self.num_envs, np.float32), np.zeros((2, self.num_envs), np.bool_)
        for copy, env in enumerate(self.copies):
            acting = [(agent, row) for agent, row in self._rows(copy) if valid[row]]
            result = env.step({agent: chosen[row] for agent, row in acting})
            if not isinstance(result, tuple) or len(result) != 5:
                need = "(observations, rewards, terminations, truncations, infos)"
                raise ValueError(f"PettingZooEnv: step() of {env} must return {need}.")
            seen, gains, *ends, infos = result
            for agent, row in acting:
                rewards[row], report = gains.get(agent, 0.0), infos.get(agent) or {}
                reports[row] = {name: copied(report[name]) for name in self.metric_names if name in report}
                flags[:, row] = [end.get(agent, False) for end in ends]
            for agent, row in self._rows(copy):
                obs[row], alive[row] = copied(seen.get(agent)), agent in env.agents and not flags[:, row].any()
            ended[copy] |= not any(alive[row] for _, row in self._rows(copy))
        over = np.tile(ended, self.num_agents)
        told = {name for report in reports for name in report}
        info = {name: np.array([report.get(name, np.nan) for report in reports], np.float32) for name in told}
        # Rows of absent agents are truncated, so that an agent that joins begins an episode.
        flags[1] |= ~flags[0] & (over | ~alive | ~valid)
        final_obs = next_obs = self._seen(obs)
        fresh, parameters = self.starting_parameters(noise), carry["parameters"]
        if ended.any():
            parameters = self._redrawn(self._tensor(over), parameters, fresh)
            for copy in ended.nonzero()[0].tolist():
                self._reset(copy, obs, alive, parameters)
            next_obs = self._seen(obs)
        gain, terminated, truncated = (self._tensor(part) for part in (rewards, *flags))
        results = next_obs, gain, terminated, truncated, final_obs
        done = self._tensor(over)
        following, step = self.finish(carry, parameters, info, done, *results, valid=carry["alive"])
        return following | {"alive": self._tensor(alive)}, step._replace(ended=done)

    def _rows(self, copy: int) -> list[tuple[str, int]]:
        """Return the agents of a copy, each with its row."""
        return [(agent, i * self.num_copies + copy) for i, agent in enumerate(self.team.names)]

    def _reset(
        self, copy: int, obs: list[Any], alive: np.ndarray, parameters: Mapping[str, Tensor], seed: int | None = None
    ) -> None:
        """Reset a copy under its parameters; write its agents' observations and presence into their rows."""
        given, env, bound = self.parameter_state.current.config, self.copies[copy], self._simulators[copy]
        values = {name: float(value[copy]) if name in given else None for name, value in parameters.items()}
        seen, _ = bound.reset_under(values, lambda: env.reset(seed=seed))
        for agent, row in self._rows(copy):
            obs[row], alive[row] = copied(seen.get(agent)), agent in env.agents

    def _seen(self, rows: list[Any]) -> Observation:
        """Return copies of the agents' observations, `[num_envs, *]`, with placeholders for absent agents."""
        of_agents = [self._nobody if row is None else row for row in rows]
        empty: Any = create_empty_array(self._agent_space, self.num_envs)
        seen = tree_of(concatenate(self._agent_space, of_agents, empty), self._tensor)
        if self._state_space is None:
            return self.team.see(seen)
        states = [copied(copy.state()) for copy in self.copies]
        if np.shape(states[0]) != self._state_space.shape:
            raise ValueError(
                f"PettingZooEnv: state() must be of state_space, {describe_space(self._state_space)}; got an array "
                f"of shape {list(np.shape(states[0]))}."
            )
        return self.team.see(seen, self._tensor(np.stack(states)))

    def render(self) -> Any:
        """Render the copies, if they were made with a `render_mode`."""
        return tuple(copy.render() for copy in self.copies)

    def close_extras(self, **kwargs: Any) -> None:
        """Close the copies."""
        for copy in self.copies:
            copy.close()


def _copies(make: str | Callable[..., Any], num_envs: int, kwargs: Mapping[str, Any]) -> list[Any]:
    """Make the copies of a parallel environment; raise an error if `make` does not make new ones."""
    try:
        from pettingzoo import AECEnv, ParallelEnv
        from pettingzoo.utils.conversions import aec_to_parallel
    except ImportError as error:
        raise RuntimeError("PettingZooEnv needs PettingZoo. Install it with: pip install 'rl8x[pettingzoo]'") from error
    make_one = named_maker(make) if isinstance(make, str) else make
    if not callable(make_one):
        raise TypeError(f"PettingZooEnv: make must be a function that makes a parallel environment; got {make!r}.")
    copies: list[Any] = []
    for _ in range(max(1, num_envs)):
        made: Any = make_one(**thawed(dict(kwargs)))
        if isinstance(made, AECEnv) and not made.metadata.get("is_parallelizable", False):
            raise ValueError(
                f"PettingZooEnv: in {made} agents act in turn, and its metadata do not say `is_parallelizable`."
            )
        made = aec_to_parallel(made) if isinstance(made, AECEnv) else made
        if not isinstance(made, ParallelEnv):
            raise TypeError(f"PettingZooEnv: make must make a pettingzoo.ParallelEnv; it made {type(made).__name__}.")
        if not getattr(made, "possible_agents", None):
            raise ValueError(f"PettingZooEnv: {made} must say in `possible_agents` which agents it may have.")
        copies.append(made)
    if len({id(copy) for copy in copies}) < len(copies):
        raise ValueError("PettingZooEnv: make must make a new environment each time; it returned the same one again.")
    return copies


def named_maker(name: str, trust: Trust = True) -> Any:
    """Import `module:name`: a subclass of `ParallelEnv`, or anything if the name is trusted."""
    import pettingzoo

    module, _, attribute = name.partition(":")
    if not module or not attribute:
        raise ValueError(
            f"PettingZooEnv: make looks like module:name, such as 'mpe2.simple_spread_v3:parallel_env'; got {name!r}."
        )
    trusted = trust if isinstance(trust, bool) else name in trust
    return import_class(f"{module}.{attribute}", (pettingzoo.ParallelEnv,), trust=trusted)


def _state_space(env: Any) -> Any:
    """Return the space of an environment's `state()`; None if it has none."""
    try:
        env.reset()
        env.state()
    except (NotImplementedError, AttributeError):
        return None
    return env.state_space if isinstance(getattr(env, "state_space", None), spaces.Box) else None
