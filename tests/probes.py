"""Probe environments: tiny tasks whose values and best actions are known exactly; and programs that are recorded.

Source of the idea: Jones 2021, "Debugging reinforcement learning systems"; used by rejax in its tests.
"""

from __future__ import annotations

import functools
from typing import ClassVar

import gymnasium
import numpy as np
import torch
from gymnasium.spaces import Box, Discrete

from rl8x.envs import Env
from rl8x.execution.compiler import CompiledProgram, load
from rl8x.execution.programs import Loop
from rl8x.execution.traces import trace

ONE = Box(-1.0, 1.0, (1,), dtype=np.float32)


class Probe(Env):
    single_observation_space = ONE
    single_action_space = Discrete(2)
    reset_noise = 1

    def initial_state(self, parameters, noise):
        return {"x": torch.zeros_like(noise)}

    def observe(self, state, parameters):
        return state["x"]


class OneStep(Probe):
    """Reward 1, the end: V = 1."""

    terminates = True

    def transition(self, state, actions, parameters, noise):
        return dict(state), torch.ones(self.num_envs), torch.ones(self.num_envs, dtype=torch.bool)


class ObservationDecides(Probe):
    """Reward is the observation, +1 or -1, then the end: V(x) = x."""

    terminates = True

    def initial_state(self, parameters, noise):
        return {"x": (noise < 0.5).float() * 2 - 1}

    def transition(self, state, actions, parameters, noise):
        return dict(state), state["x"].squeeze(1), torch.ones(self.num_envs, dtype=torch.bool)


class Delay(Probe):
    """Reward 0 at x = 0, then 1 at x = 1, then the end: V(0) = gamma, V(1) = 1."""

    terminates = True

    def transition(self, state, actions, parameters, noise):
        at_one = state["x"].squeeze(1) == 1
        return {"x": torch.ones_like(state["x"])}, at_one.float(), at_one


class ActionDecides(Probe):
    """Reward +1 for action 1, -1 for action 0, then the end."""

    terminates = True

    def transition(self, state, actions, parameters, noise):
        return dict(state), (actions * 2 - 1).float(), torch.ones(self.num_envs, dtype=torch.bool)


class ActionMatches(ObservationDecides):
    """Reward 1 where the action agrees with the observation's sign, else -1."""

    def transition(self, state, actions, parameters, noise):
        agrees = (actions == 1) == (state["x"].squeeze(1) > 0)
        return dict(state), agrees.float() * 2 - 1, torch.ones(self.num_envs, dtype=torch.bool)


class Target(ObservationDecides):
    """Reward 1 - (a - x / 2)^2, then the end: Q(x, a) is that, and the best action x / 2."""

    single_action_space = ONE

    def transition(self, state, actions, parameters, noise):
        rewards = 1 - (actions - state["x"] / 2).square().squeeze(1)
        return dict(state), rewards, torch.ones(self.num_envs, dtype=torch.bool)


class Forever(Probe):
    """Reward 1 a step and no end; the time limit only cuts: V = 1 / (1 - gamma) all the same."""

    default_time_limit = 3

    def transition(self, state, actions, parameters, noise):
        return dict(state), torch.ones(self.num_envs), torch.zeros(self.num_envs, dtype=torch.bool)


class Together(Probe):
    """Several probes at once: copies play them in turn, and see which, so that one training learns all their values.

    Subclass it with `probes`, of equal action spaces. An observation is one-hot: which, and x times which. The time
    limit is that of a probe that has one, and must be beyond the episodes of the others.
    """

    probes: ClassVar[tuple[type[Probe], ...]] = ()
    terminates = True

    def __init_subclass__(cls):
        limits = {probe.default_time_limit for probe in cls.probes} - {None}
        cls.default_time_limit = max(limits, default=None)
        cls.single_action_space = cls.probes[0].single_action_space
        cls.single_observation_space = Box(-1.0, 1.0, (2 * len(cls.probes),), dtype=np.float32)

    def __init__(self, num_envs, **options):
        super().__init__(num_envs, **options)
        self.played = [probe(num_envs) for probe in self.probes]
        self.which = torch.arange(num_envs) % len(self.probes)

    def initial_state(self, parameters, noise):
        return {"x": self._chosen([probe.initial_state(parameters, noise)["x"] for probe in self.played])}

    def transition(self, state, actions, parameters, noise):
        states, rewards, ends = zip(
            *[probe.transition(state, actions, parameters, noise) for probe in self.played], strict=True
        )
        return {"x": self._chosen([each["x"] for each in states])}, self._chosen(rewards), self._chosen(ends)

    def observe(self, state, parameters):
        one_hot = torch.nn.functional.one_hot(self.which, len(self.probes)).float()
        return torch.cat([one_hot, one_hot * state["x"]], -1)

    def _chosen(self, parts):
        """Take from the parts, `[num_envs, ...]` each, those of the probe that each copy plays."""
        return torch.stack(list(parts))[self.which, torch.arange(self.num_envs)]

    @classmethod
    def seen(cls, probe, x):
        """Return what a probe's copies see at x, `[1, 2 * num_probes]`."""
        one_hot = torch.tensor([[float(each is probe) for each in cls.probes]])
        return torch.cat([one_hot, one_hot * x], -1)


class Discretes(Together):
    probes = (OneStep, ObservationDecides, Delay, ActionDecides, ActionMatches, Forever)


class Boxes(Together):
    """Those of which no action decides, with continuous ones, and `Target`."""

    probes = (
        *(type(each.__name__, (each,), {"single_action_space": ONE}) for each in Discretes.probes[:3]),
        type("Forever", (Forever,), {"single_action_space": ONE}),
        Target,
    )


class Steps(gymnasium.Env):
    """A simulator of one copy that observes how many steps were taken since its reset, each worth 1.

    An episode terminates after `length` of them. No state of it could be saved.
    """

    observation_space = Box(0.0, np.inf, (1,), dtype=np.float32)
    action_space = Discrete(2)
    length = None

    def observation(self):
        return np.full(self.observation_space.shape, self.time, np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.time = 0
        return self.observation(), {}

    def step(self, action):
        self.time += 1
        return self.observation(), 1.0, self.time == self.length, False, {}


# Values of the two actions of its probes at x, with gamma 0.75.
KNOWN = {
    (OneStep, 0): [1, 1],
    (ObservationDecides, 1): [1, 1],
    (ObservationDecides, -1): [-1, -1],
    (Delay, 0): [0.75, 0.75],
    (Delay, 1): [1, 1],
    (ActionDecides, 0): [-1, 1],
    (ActionMatches, 1): [-1, 1],
    (ActionMatches, -1): [1, -1],
    (Forever, 0): [4, 4],
}


class Remember(Probe):
    """Shows +1 or -1 once and blanks it; after two blank steps the action must repeat it: only memory solves it."""

    default_time_limit = 3

    def initial_state(self, parameters, noise):
        sign = (noise < 0.5).float() * 2 - 1
        return {"x": sign, "sign": sign, "t": torch.zeros_like(noise)}

    def transition(self, state, actions, parameters, noise):
        t = state["t"] + 1
        right = ((actions * 2 - 1).float() == state["sign"].squeeze(1)).float() * 2 - 1
        rewards = torch.where(t.squeeze(1) == 3, right, 0.0)
        return (
            {"x": torch.zeros_like(t), "sign": state["sign"], "t": t},
            rewards,
            torch.zeros(self.num_envs, dtype=torch.bool),
        )


def noise_of(distribution, shape, generator=None, device="cpu"):
    """Draw what sampling `shape` actions needs, `[*shape, num_noise]`."""
    return distribution.draw((*shape, distribution.num_noise), generator=generator, device=device)


def weights_of(algorithm):
    """All weights of its policy, as one vector."""
    return torch.cat([weight.detach().flatten() for weight in algorithm.policy.parameters()])


def everything(trainer):
    """All that its next step depends on, by its place, tensors as their bytes; not times, nor names of segments."""
    found = {}

    def note(place, part):
        if isinstance(part, dict):
            for name, each in part.items():
                if not name.startswith(("profiling/", "memory/", "segments")):
                    note(f"{place}.{name}", each)
        elif isinstance(part, torch.Tensor):
            found[place] = (part.dtype, part.shape, part.detach().cpu().numpy().tobytes())
        else:
            found[place] = repr(part)

    note("", trainer.state_dict())
    return found


def described(function, *tensors):
    """Return what is compiled of a function, or of a loop: its description as JSON, and what loads its library."""
    loop = function if isinstance(function, Loop) else Loop(function, 0, num_items=0)
    traced = trace(loop.function, loop.first(tensors))
    return traced.text, functools.partial(load, traced=traced, loop=loop, like=tensors)


def traced_only(monkeypatch):
    """Run traced graphs as they are: what compiled programs compute, without the seconds that compiling takes."""
    monkeypatch.setattr(CompiledProgram, "_compile", lambda self, tensors: self._interpret(tensors))
    monkeypatch.setattr(CompiledProgram, "prepare", lambda self, *tensors: None)


def record_once(function):
    """Stand in for CUDA's capture: the kernels are recorded once and replayed, with their memory, without the host.

    As with a CUDA graph, nothing of Python runs in a replay, arguments are read where they lay at the capture, and
    results are always in the same place.
    """
    for _ in range(3):
        function()
    graph, read, *_ = trace(function, [])
    results = [result.clone() for result in graph(*read)]

    def replay():
        for place, result in zip(results, graph(*read), strict=True):
            place.copy_(result)

    return replay, results
