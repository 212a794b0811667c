"""How well policies generalise by how the physics that they train under is drawn: fixed, Uniform, Adaptive, Learnable.

Every method has the same algorithm, hyperparameters and transitions. What is measured is the final policy,
deterministic, on a grid of physics that is the whole range of Uniform and of what the other two may come to: the mean
return of each cell, and of the cells the mean of the worst tenth (CVaR at 10%). `outside` is the mean over the cells
that are not those of the fixed physics. Ranges and Adaptive's settings were chosen on seeds from 10 on, which are not
reported; Learnable's table on narrower ranges.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import torch

from benchmarks.learning_runs import Task
from benchmarks.learning_tasks import ON_ONE_THREAD, SMALL, run_of
from rl8x import Trainer
from rl8x.envs import CartPole, Env, Pendulum
from rl8x.randomization import Adaptive, Learnable, ParameterDistribution, Uniform

METHODS = ("fixed", "uniform", "adaptive", "learnable")
ENVS: dict[str, type[Env]] = {"CartPole": CartPole, "Pendulum": Pendulum}
WORST = 0.1
Ranges = Mapping[str, tuple[float, float]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Randomized(Task):
    """What is trained under physics that are drawn in some way, and on which it is tested."""

    ranges: Ranges  # the widest range of each parameter that is drawn
    cells: int = 15  # cells of the test grid along each parameter
    episodes: int = 8  # episodes in each cell

    @property
    def grid(self) -> dict[str, list[float]]:
        """The physics of each copy of the test environment, cell by cell."""
        axes = [torch.linspace(low, high, self.cells, dtype=torch.float64) for low, high in self.ranges.values()]
        cells = torch.cartesian_prod(*axes).repeat_interleave(self.episodes, 0)
        return dict(zip(self.ranges, cells.T.tolist(), strict=True))

    @torch.no_grad()
    def tested(self, policy: Any, seed: int) -> torch.Tensor:
        """Return the mean return of each cell of the test grid, `[cells ** parameters]`."""
        grid = self.grid
        num_envs = len(next(iter(grid.values())))
        env = self.make_env(num_envs, seed=seed)
        obs, _ = env.reset(config=grid)
        running, returns = torch.ones(num_envs, dtype=torch.bool), torch.zeros(num_envs)
        state, starts = policy.initial_state(num_envs), torch.ones(num_envs, dtype=torch.bool)
        while running.any():
            act = policy.act(obs, state, starts, None)
            obs, _, terminated, truncated, info = env.step(policy.env_actions(act.actions))
            returns = torch.where(running, info["episode"]["r"], returns)
            starts, state = terminated | truncated, act.state
            running = running & ~starts
        return returns.view(-1, self.episodes).mean(1)

    def judge(self, trainer: Trainer[Any], seed: int) -> dict[str, Any]:
        """Test the policy on the grid."""
        cells, parameters = self.tested(trainer.algorithm.policy, 10_000 + seed), ENVS[self.run.env.env].parameters
        fixed = torch.tensor([[parameters[key].default for key in self.ranges]], dtype=torch.float64)
        spans = torch.tensor([high - low for low, high in self.ranges.values()], dtype=torch.float64)
        physics = torch.tensor([*self.grid.values()], dtype=torch.float64).T[:: self.episodes]
        nearest = int(((physics - fixed) / spans).square().sum(1).argmin())
        others = torch.cat([cells[:nearest], cells[nearest + 1 :]])
        return {
            "cvar": round(float(cells.sort().values[: math.ceil(WORST * len(cells))].mean()), 2),
            "outside": round(float(others.mean()), 2),
            "cells": [round(value, 1) for value in cells.tolist()],
        }


def by_methods(
    env: str, transitions: int, lr: float, ranges: Ranges, start: Ranges, thresholds: Any, solved: float, **config: Any
) -> dict[str, Randomized]:
    """Return the task of an environment for each method, by `PPOConfig.rl8`; the learning rate falls to 0.

    Parameters are drawn from `ranges` at the widest; Adaptive begins with `start`, has `thresholds` of the returns, and
    goes from one end of a widest range to the other in two moves; Learnable's threshold is `solved`.
    """

    def drawn(method: str, name: str) -> ParameterDistribution:
        low, high = ranges[name]
        if method == "adaptive":
            options: Any = {"thresholds": thresholds, "step": (high - low) / 2, "limits": (low, high)}
            return Adaptive(start[name], **options, episodes=4, boundary_share=0.3)
        if method == "learnable":
            return Learnable(Uniform(low, high), threshold=solved, levels=32, candidates=96, episodes=3)
        return Uniform(low, high)

    drawings = {
        method: {} if method == "fixed" else {name: drawn(method, name).to_dict() for name in ranges}
        for method in METHODS
    }
    runs = {
        method: run_of(env, transitions, lr, {**SHARED, **config}, preset="rl8", env_config=drawing)
        for method, drawing in drawings.items()
    }
    return {f"{env.lower()} {method}": Randomized(run=run, ranges=ranges) for method, run in runs.items()}


SHARED: dict[str, Any] = {"num_envs": 64, "horizon": 64, "sgd_minibatch_size": 512, "num_sgd_iters": 4}
SHARED |= {"max_grad_norm": 0.5, "model_config": SMALL, **ON_ONE_THREAD}
CARTPOLE: dict[str, Any] = {"thresholds": (50.0, 200.0), "solved": 475.0, "gamma": 0.99, "gae_lambda": 0.95}
CARTPOLE |= {"ranges": {"length": (0.1, 5.0), "force_mag": (1.0, 25.0)}}
CARTPOLE |= {"start": {"length": (0.3, 3.0), "force_mag": (5.0, 15.0)}}
PENDULUM: dict[str, Any] = {"thresholds": (-1200.0, -300.0), "solved": -400.0, "gamma": 0.98, "gae_lambda": 0.9}
PENDULUM |= {"ranges": {"m": (0.2, 1.2), "l": (0.2, 1.2)}, "start": {"m": (0.2, 0.8), "l": (0.2, 0.8)}}
PENDULUM |= {"num_envs": 256, "horizon": 32, "sgd_minibatch_size": 1024}
PENDULUM |= {"distribution_config": {"std": "state", "initial_std": 1.5}}
RANDOMIZED = {
    **by_methods("CartPole", 614_400, 5e-3, **CARTPOLE),
    **by_methods("Pendulum", 1_228_800, 4e-3, **PENDULUM),
}
