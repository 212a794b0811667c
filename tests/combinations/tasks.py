"""Small random tasks of tensors and of Gymnasium's, of which every transition can be counted from outside."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium import spaces
from tests.test_round_trip import ACTIONS, OBSERVATIONS, from_uniform

from rl8x import Env, Parameter, keys
from rl8x.spaces import named_parts
from rl8x.trees import flatten_tree

MASK = "action_mask"
BAD_CHANCE = 0.03
PARAMETERS = {
    "scale": Parameter(default=1.0, low=0.1, high=10.0, unit="", description="factor of the reward"),
    "drift": Parameter(default=0.0, low=-1.0, high=1.0, unit="", description="what is added to the reward"),
}


def mask_width(space: spaces.Space[Any]) -> int | None:
    """Flags of an action mask over a space; None where there is no such mask."""
    if isinstance(space, spaces.Discrete):
        return int(space.n)
    return int(space.nvec.sum()) if isinstance(space, spaces.MultiDiscrete) and space.nvec.ndim == 1 else None


def observation_space(observations: str, actions: str, *, masked: bool) -> spaces.Space[Any]:
    """The named observation space, with a mask over the named actions beside it where that is asked for."""
    space, width = OBSERVATIONS[observations], mask_width(ACTIONS[actions])
    return spaces.Dict({"seen": space, MASK: spaces.MultiBinary(width)}) if masked else space


def legal_actions(space: spaces.Space[Any], number: torch.Tensor) -> torch.Tensor:
    """Make masks `[num_envs, width]` of uniform numbers `[num_envs, 1]`; the first action of a choice is legal."""
    sizes = [int(space.n)] if isinstance(space, spaces.Discrete) else space.nvec.tolist()
    bits = (number * 2 ** torch.arange(1, 5, device=number.device)).floor().long() % 2
    parts = [torch.cat((torch.ones_like(bits[:, :1]), bits[:, : size - 1]), 1) for size in sizes]
    return torch.cat(parts, 1).to(torch.int8)


def illegal(space: spaces.Space[Any], mask: torch.Tensor, actions: torch.Tensor) -> torch.Tensor:
    """Say which copies took an action that their mask forbids, `[num_envs]`, bool."""
    if isinstance(space, spaces.Discrete):
        index = (actions - int(space.start)).unsqueeze(1)
    else:
        index = actions + torch.as_tensor(np.cumsum([0, *space.nvec[:-1]]) - space.start, device=actions.device)
    return (mask.gather(1, index.long()) == 0).any(1)


class Walk(Env):
    """Shows a random number; the reward is `scale` times the mean of the action's numbers, and `drift`.

    An illegal action gives NaN, and where `bad` is set a few others do.
    """

    parameters = PARAMETERS
    reset_noise = 1
    step_noise = 3
    metric_names = ("scale",)

    def __init__(self, num_envs, *, observations, actions, masked=False, end_chance=0.1, **kwargs):
        self.masked, self.end_chance, self.bad = masked, end_chance, False
        self.terminates = end_chance > 0
        self.single_observation_space = observation_space(observations, actions, masked=masked)
        self.single_action_space = ACTIONS[actions]
        super().__init__(num_envs, **kwargs)

    def initial_state(self, parameters, noise):
        return {"x": noise}

    def transition(self, state, actions, parameters, noise):
        parts = [part.flatten(1).float() if part.ndim > 1 else part[:, None].float() for part in leaves_of(actions)]
        rewards = parameters["scale"] * torch.cat(parts, 1).clamp(-10, 10).mean(1) + parameters["drift"]
        if self.masked:
            mask = legal_actions(self.single_action_space, state["x"])
            rewards = rewards.masked_fill(illegal(self.single_action_space, mask, actions), torch.nan)
        if self.bad:
            rewards = rewards.masked_fill(noise[:, 2] < BAD_CHANCE, torch.nan)
        return {"x": noise[:, :1]}, rewards, noise[:, 1] < self.end_chance

    def observe(self, state, parameters):
        if not self.masked:
            return from_uniform(self.single_observation_space, state["x"])
        seen = from_uniform(self.single_observation_space["seen"], state["x"])
        return {"seen": seen, MASK: legal_actions(self.single_action_space, state["x"])}

    def measure(self, state, parameters):
        return {"scale": parameters["scale"].expand(self.num_envs).float()}


def leaves_of(tree: Any) -> list[torch.Tensor]:
    return list(flatten_tree("", tree).values())


@dataclasses.dataclass
class Log:
    """What a simulator itself saw: transitions, the episodes that ended, and each step of all copies."""

    transitions: int = 0
    episodes: int = 0
    steps: list[dict[str, torch.Tensor]] = dataclasses.field(default_factory=list)


class LoggedWalk(Walk):
    """The same task as a simulator that counts what is done with it, which nothing can compile."""

    capturable = False

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.log, self.elapsed = Log(), torch.zeros(self.num_envs, device=self.device)

    def advance(self, carry, actions, noise):
        carry, step = super().advance(carry, actions, noise)
        self.log.transitions += self.num_envs
        self.log.episodes += int((step.terminated | step.truncated).sum())
        return carry, step

    def restart(self, noise):
        self.elapsed = torch.zeros(self.num_envs, device=self.device)
        return super().restart(noise)

    def transition(self, state, actions, parameters, noise):
        later, rewards, terminated = super().transition(state, actions, parameters, noise)
        self.elapsed = self.elapsed + 1
        truncated = self.elapsed >= (self.time_limit or math.inf)
        self.elapsed = self.elapsed.masked_fill(terminated | truncated, 0)
        self.log.steps.append(
            {
                **flatten_tree(keys.OBS, self.observe(state, parameters)),
                **flatten_tree(keys.ACTIONS, actions),
                keys.REWARDS: rewards,
                keys.TERMINATED: terminated,
                keys.TRUNCATED: truncated,
                **flatten_tree(keys.NEXT_OBS, self.observe(later, parameters)),
            }
        )
        return later, rewards, terminated


class Simulator(gymnasium.Env):
    def __init__(self, observations, actions, masked=False, end_chance=0.1, limit=None):
        self.limit, self.elapsed = limit, 0
        self.seen_space = OBSERVATIONS[observations]
        self.observation_space = observation_space(observations, actions, masked=masked)
        self.action_space = ACTIONS[actions]
        self.masked, self.end_chance = masked, end_chance
        self.log = Log()
        self.mask: np.ndarray | None = None
        self.running = False

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.running, self.elapsed = True, 0
        return self._observe(), {}

    def step(self, action):
        assert self.running, "stepped after the end of an episode"
        self.log.transitions += 1
        assert self.action_space.contains(action), (action, self.action_space)
        if self.mask is not None:
            wrong = illegal(
                self.action_space, torch.as_tensor(self.mask)[None], torch.as_tensor(np.asarray(action))[None]
            )
            assert not bool(wrong)
        terminated = bool(self.np_random.random() < self.end_chance)
        self.elapsed += 1
        if terminated or self.elapsed >= self.limit:
            self.log.episodes += 1
            self.running = False
        return self._observe(), float(self.np_random.normal()), terminated, False, {}

    def _observe(self):
        number = torch.full((1, 1), float(self.np_random.random()))
        seen = _as_numpy(from_uniform(self.seen_space, number), self.seen_space)
        if not self.masked:
            return seen
        self.mask = legal_actions(self.action_space, number)[0].numpy()
        return {"seen": seen, MASK: self.mask}


def _as_numpy(tree: Any, space: spaces.Space[Any]) -> Any:
    if isinstance(space, spaces.Dict | spaces.Tuple):
        parts = {key: _as_numpy(tree[key], part) for key, part in named_parts(space)}
        return parts if isinstance(space, spaces.Dict) else tuple(parts.values())
    array = tree[0].numpy().astype(space.dtype)
    return array if array.ndim else array[()]
