"""Parallel environments for tests: agents that end early, come late, must not take some actions."""

from __future__ import annotations

import functools
from typing import ClassVar

import numpy as np
from gymnasium import spaces
from pettingzoo import AECEnv, ParallelEnv

LAST = 6
"""The step after which a `Shift` is truncated."""


class Shift(ParallelEnv):
    """Workers of a shift: the first ends after `early` steps, the last comes after `late`; both draw where they stand.

    An agent sees the time, its place and what was drawn at the reset; its reward is its action plus `bonus` times its
    place.
    """

    metadata = {"name": "shift_v0"}  # noqa: RUF012
    possible_agents = ["first", "full", "last"]  # noqa: RUF012
    render_mode = None

    def __init__(self, early=2, late=3, masked=False, with_state=True, bonus=10.0):
        self.early, self.late, self.masked, self.bonus = early, late, masked, bonus
        seen = spaces.Box(-np.inf, np.inf, (3,), np.float64)
        mask = spaces.Box(0, 1, (4,), np.int8)
        self.seen = spaces.Dict({"observation": seen, "action_mask": mask}) if masked else seen
        self.acts = spaces.Discrete(4)
        self.rng = np.random.default_rng()
        if with_state:
            self.state_space = spaces.Box(-np.inf, np.inf, (2,), np.float64)
            self.state = lambda: np.array([self.time, self.drawn])

    @functools.cache  # noqa: B019
    def observation_space(self, agent):
        return self.seen

    @functools.cache  # noqa: B019
    def action_space(self, agent):
        return self.acts

    def reset(self, seed=None, options=None):
        if seed is not None:
            self.rng = np.random.default_rng(seed)
        self.time, self.drawn = 0, self.rng.normal()
        self.agents = ["first", "full"]
        return {agent: self.look(agent) for agent in self.agents}, {agent: {} for agent in self.agents}

    def look(self, agent):
        place = self.possible_agents.index(agent)
        obs = np.array([self.time, place, self.drawn])
        return {"observation": obs, "action_mask": np.array([1, 0, 1, place == 1], np.int8)} if self.masked else obs

    def step(self, actions):
        assert set(actions) == set(self.agents)
        assert not self.masked or all(self.look(a)["action_mask"][action] for a, action in actions.items())
        self.time += 1
        acted = list(self.agents)
        rewards = {a: float(actions[a]) + self.bonus * self.possible_agents.index(a) for a in acted}
        terminated = {a: a == "first" and self.time == self.early for a in acted}
        truncated = dict.fromkeys(acted, self.time == LAST)
        self.agents = [a for a in acted if not (terminated[a] or truncated[a])]
        came = ["last"] if self.time == self.late else []
        self.agents += came
        seen = [*acted, *came]
        terminated |= dict.fromkeys(came, False)
        truncated |= dict.fromkeys(came, False)
        rewards |= dict.fromkeys(came, 0.0)
        infos = {a: {"score": self.time * 1.0} for a in seen}
        return {a: self.look(a) for a in seen}, rewards, terminated, truncated, infos

    def render(self):
        return None


class OneForAll(Shift):
    """Says all in dicts and arrays that all of its copies keep, and empties them in a reset."""

    infos: ClassVar = {agent: {} for agent in Shift.possible_agents}
    arrays: ClassVar = {agent: np.zeros(3) for agent in Shift.possible_agents}
    shared_state: ClassVar = np.zeros(2)

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.state = self.shared

    def shared(self):
        self.shared_state[:] = [self.time, self.drawn]
        return self.shared_state

    def kept(self, seen, infos):
        for agent, info in self.infos.items():
            info["score"] = infos.get(agent, {}).get("score", 0.0)
            self.arrays[agent][:] = seen.get(agent, 0.0)
        return {agent: self.arrays[agent] for agent in seen}

    def reset(self, seed=None, options=None):
        return self.kept(*super().reset(seed, options)), self.infos

    def step(self, actions):
        seen, *results, infos = super().step(actions)
        return self.kept(seen, infos), *results, {agent: self.infos[agent] for agent in infos}


class Unlike(Shift):
    """Agents that see different things."""

    metadata = {"name": "unlike_v0"}  # noqa: RUF012

    def observation_space(self, agent):
        return spaces.Box(0, 1, (2 if agent == "full" else 3,), np.float32)


class Old(Shift):
    """Steps as PettingZoo's API had it once."""

    def step(self, actions):
        obs, rewards, terminated, _, infos = super().step(actions)
        return obs, rewards, terminated, infos


class Turns(AECEnv):
    """Agents that act in turn."""

    metadata = {"name": "turns_v0"}  # noqa: RUF012


ONE = Shift()


def same():
    """Return the same environment each time."""
    return ONE
