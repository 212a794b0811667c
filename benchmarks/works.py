"""The works that are measured, the same for every library, and what a measured process is asked to do.

This runs in the virtual environments of all libraries, so it imports nothing but the standard library.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Sequence
from typing import Any, ClassVar

OBSERVATIONS = {"cartpole": 4, "pendulum": 3}
OUTPUTS = {"cartpole": 2, "pendulum": 1}
TARGETS = {"cartpole": 475.0, "pendulum": -200.0}
MAX_ITERATIONS = 1_000_000  # that a library is asked for; the recorder stops it


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Work:
    """What an iteration of any algorithm has, the same for every library."""

    told: ClassVar[tuple[str, ...]]  # what a result has of it besides the fields
    env: str  # `"cartpole"` (CartPole-v1, 500 steps) or `"pendulum"` (Pendulum-v1, 200 steps)
    num_envs: int  # copies of the environment
    horizon: int  # steps of each copy before the updates that are due for them
    hidden: int  # width of the two hidden layers of each network
    lr: float = 1e-3
    gamma: float = 0.99
    iterations: int = 8  # iterations that are timed, at least

    @property
    def widths(self) -> list[int]:
        """The widths of the hidden layers of each network."""
        return [self.hidden, self.hidden]

    def fields(self, *names: str) -> dict[str, Any]:
        """Return some fields, by names that a library shares."""
        return {name: getattr(self, name) for name in names}

    def described(self) -> dict[str, Any]:
        """Return the fields and what is computed of them, for the result."""
        return {**dataclasses.asdict(self), **self.fields(*self.told)}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Work(_Work):
    """PPO: a horizon of every copy, then passes over the data."""

    algorithm: ClassVar[str] = "ppo"
    told = ("flops", "activations")
    blocks: ClassVar[int] = 1  # times that an iteration collects and updates
    minibatches: int  # minibatches of a pass
    passes: int  # passes over the data of an iteration
    gae_lambda: float = 0.95
    clip: float = 0.2
    entropy_coeff: float = 0.0
    max_grad_norm: float = 0.5
    normalize_rewards: bool = False  # whether rewards are scaled, in the way that the library has

    @property
    def transitions(self) -> int:
        """Transitions of one iteration."""
        return self.num_envs * self.horizon

    @property
    def minibatch_size(self) -> int:
        """Transitions of one minibatch."""
        return self.transitions // self.minibatches

    @property
    def flops(self) -> float:
        """Floating-point operations of the matrix products of one transition: acting, values, and the passes over it.

        F = 2 P (1 + 1/T) + E (6 P - 4 d h),  P = 2 d h + 2 h^2 + h (a + 1)
        """
        d, h, a = OBSERVATIONS[self.env], self.hidden, OUTPUTS[self.env]
        products = 2 * d * h + 2 * h * h + h * (a + 1)
        return 2 * products * (1 + 1 / self.horizon) + self.passes * (6 * products - 4 * d * h)

    @property
    def activations(self) -> float:
        """Numbers of hidden layers that one transition moves to and from memory, where nothing stays in a cache.

        Two networks of two layers of h. Acting writes each layer and reads it once; a pass writes it, reads it for the
        next layer and for the gradient of that one's weights, and does the same with its gradient: six times.

        A = 4 h (2 (1 + 1/T) + 6 E)
        """
        return 4 * self.hidden * (2 * (1 + 1 / self.horizon) + 6 * self.passes)


Products = list[tuple[int, int, int]]


def products(batch_size: int, widths: Sequence[int]) -> tuple[Products, Products, Products]:
    """Return the matrix products of a perceptron on a batch, `[m, k] x [k, n]` as (m, k, n), a layer after the other.

    They are those of the outputs, of the gradients of the weights, and of the gradients of what goes into each layer.
    """
    layers = list(itertools.pairwise(widths))
    return (
        [(batch_size, inputs, outputs) for inputs, outputs in layers],
        [(outputs, batch_size, inputs) for inputs, outputs in layers],
        [(batch_size, outputs, inputs) for inputs, outputs in layers],
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReplayWork(_Work):
    """An algorithm with a replay."""

    told = ("products",)
    # `"dqn"`, without the options of later papers, or `"sac"`, with two critics and a learned temperature.
    algorithm: str
    batch_size: int  # transitions of an update
    updates_per_sample: float  # updates for each transition
    max_grad_norm: float = 10.0  # DQN's largest norm of a gradient; SAC clips none
    buffer_size: int = 100_000
    warmup_steps: int = 1024
    updates_per_target: int = 250
    tau: float = 0.005  # share of the way that SAC's targets go in each update
    epsilon: float = 0.05
    blocks: int = 32  # times that an iteration collects and updates

    @property
    def transitions(self) -> int:
        """Transitions of one iteration."""
        return self.num_envs * self.horizon * self.blocks

    @property
    def transitions_per_target(self) -> int:
        """Transitions from one renewal of DQN's target network to the next."""
        return round(self.updates_per_target / self.updates_per_sample)

    @property
    def products(self) -> Products:
        """The matrix products of one update.

        DQN's network goes forward and back on a batch, the target network forward once. SAC's targets take the policy
        and both target critics forward; both critics go forward and back for their loss, and for the policy's forward
        and back again, now for the gradient of the actions and not of the weights.
        """
        d, h, a = OBSERVATIONS[self.env], self.hidden, OUTPUTS[self.env]
        if self.algorithm == "dqn":
            forward, by_weights, by_inputs = products(self.batch_size, (d, h, h, a))
            return 2 * forward + by_weights + by_inputs[1:]
        forward, by_weights, by_inputs = products(self.batch_size, (d, h, h, 2 * a))
        critic, critic_weights, critic_inputs = products(self.batch_size, (d + a, h, h, 1))
        targets = forward + 2 * critic
        of_critics = 2 * (critic + critic_weights + critic_inputs[1:])
        of_policy = forward + by_weights + by_inputs[1:] + 2 * (critic + critic_inputs)
        return targets + of_critics + of_policy


AnyWork = Work | ReplayWork
_LARGE: dict[str, Any] = {"num_envs": 4096, "horizon": 32, "minibatches": 8, "passes": 4}
_RL8 = _LARGE | {"num_envs": 8192, "minibatches": 1, "gamma": 0.95, "max_grad_norm": 5.0, "normalize_rewards": True}
_SMALL: dict[str, Any] = {"num_envs": 16, "horizon": 128, "minibatches": 32, "passes": 10, "lr": 3e-4}
WORKS = {
    "pendulum-64": Work(env="pendulum", hidden=64, **_LARGE),
    "cartpole-64": Work(env="cartpole", hidden=64, **_LARGE),
    "pendulum-256": Work(env="pendulum", hidden=256, **_LARGE, iterations=3),
    "rl8-defaults": Work(env="cartpole", hidden=256, **_RL8, iterations=2),
    "small": Work(env="cartpole", hidden=64, **_SMALL, iterations=12),
}
_DQN = {"algorithm": "dqn", "env": "cartpole", "num_envs": 64, "horizon": 2, "batch_size": 64}
_SAC = {"algorithm": "sac", "env": "pendulum", "num_envs": 16, "horizon": 4, "batch_size": 256, "blocks": 2}
REPLAY_WORKS = {
    "dqn-64": ReplayWork(**_DQN, hidden=64, updates_per_sample=0.25),
    "dqn-256": ReplayWork(**_DQN, hidden=256, updates_per_sample=0.25),
    "sac-256": ReplayWork(**_SAC, hidden=256, updates_per_sample=1.0),
}
CUDA_WORKS = {name: WORKS[name] for name in ("rl8-defaults", "pendulum-64", "pendulum-256", "small")}
CUDA_WORKS["rl8-defaults-65536"] = dataclasses.replace(WORKS["rl8-defaults"], num_envs=65536)
ALL_WORKS: dict[str, AnyWork] = {**WORKS, **CUDA_WORKS, **REPLAY_WORKS}


def quick(work: AnyWork) -> AnyWork:
    """Shrink a work to a second or two, to see that a library runs at all; the rates mean nothing."""
    if isinstance(work, ReplayWork):
        return dataclasses.replace(work, num_envs=8, hidden=32, warmup_steps=32, blocks=2, iterations=2)
    sizes = {"num_envs": min(work.num_envs, 64), "horizon": min(work.horizon, 16)}
    minibatches = min(work.minibatches, 4)
    return dataclasses.replace(work, **sizes, minibatches=minibatches, hidden=32, passes=2, iterations=2)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
    """What one process is asked to do."""

    work: AnyWork  # the work of an iteration
    threads: int = 2  # CPU threads
    device: str = "cpu"  # where torch libraries put everything
    seed: int = 0  # seed of the run
    # Stop when a deterministic evaluation reaches this return; None times `work.iterations` iterations.
    target: float | None = None
    budget_s: float = 30.0  # with a target: give up after so many seconds of training
    transitions: int | None = None  # stop after so many, and tell the seconds of all of them
    # Without a target: iterations of so many seconds after the first, which never counts, do not count, so that what a
    # library does in the background when it starts (creating a database, say) is over.
    warmup_s: float = 5.0
    timed_s: float = 4.0  # without a target: time for at least so many seconds
    # Without a target: so many times during the last hundred iterations, pause and have a fresh process time the same
    # work, which tells how fast the machine is then.
    fresh: int = 0
    execution: str = "eager"  # rl8x only: how it executes
    precision: str = "fp32"  # rl8x only: the numbers it multiplies
    tracks: bool = True  # rl8x only: whether it tracks to MLflow, as it does by itself

    def to_json(self) -> str:
        """Return the job as one line."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def of(cls, fields: dict[str, Any]) -> Job:
        """Return what `to_json` wrote, read as JSON."""
        kind = ReplayWork if "algorithm" in fields["work"] else Work
        return cls(**{**fields, "work": kind(**fields["work"])})
