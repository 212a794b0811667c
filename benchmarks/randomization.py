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
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import torch

from rl8x import HitsUpperBound, NullTracker, PPOConfig, Trainer
from rl8x.envs import CartPole, Env, Pendulum
from rl8x.randomization import Adaptive, Learnable, ParameterDistribution, Uniform

METHODS = ("fixed", "uniform", "adaptive", "learnable")
WORST = 0.1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Randomized:
    """What is trained under physics that are drawn by a method, and on which it is tested.

    Attributes:
        env: The environment.
        method: How physics are drawn in training.
        ranges: The widest range of each parameter that is drawn.
        start: The range of each with which Adaptive begins.
        transitions: How many are trained on.
        thresholds: Adaptive's, of the returns.
        moves: How many of Adaptive's moves go from one end of a parameter's widest range to the other.
        boundary_share: Adaptive's share of episodes at a boundary.
        solved: Learnable's threshold of the returns.
        config: Hyperparameters of PPO.
        cells: Cells of the test grid along each parameter.
        episodes: Episodes in each cell.
        seeds: How many seeds are run.
    """

    env: type[Env]
    method: str = "fixed"
    ranges: Mapping[str, tuple[float, float]]
    start: Mapping[str, tuple[float, float]]
    transitions: int
    thresholds: tuple[float, float]
    moves: int
    boundary_share: float
    solved: float
    config: Mapping[str, Any]
    cells: int = 15
    episodes: int = 8
    seeds: int = 5
    missing: ClassVar[None] = None

    @property
    def env_config(self) -> dict[str, ParameterDistribution]:
        """The physics that are trained under."""
        return {} if self.method == "fixed" else {name: self._drawn(name) for name in self.ranges}

    def _drawn(self, name: str) -> ParameterDistribution:
        low, high = self.ranges[name]
        if self.method == "adaptive":
            options: Any = {"thresholds": self.thresholds, "step": (high - low) / self.moves, "limits": (low, high)}
            return Adaptive(self.start[name], **options, episodes=4, boundary_share=self.boundary_share)
        if self.method == "learnable":
            return Learnable(Uniform(low, high), threshold=self.solved, levels=32, candidates=96, episodes=3)
        return Uniform(low, high)

    @property
    def grid(self) -> dict[str, list[float]]:
        """The physics of each copy of the test environment, cell by cell."""
        axes = [torch.linspace(low, high, self.cells, dtype=torch.float64) for low, high in self.ranges.values()]
        cells = torch.cartesian_prod(*axes).repeat_interleave(self.episodes, 0)
        return dict(zip(self.ranges, cells.T.tolist(), strict=True))

    @property
    def described(self) -> dict[str, Any]:
        """The settings, as the file has them."""
        settings = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        drawn = {name: each.to_dict() for name, each in self.env_config.items()}
        return {**settings, "env": self.env.__name__, "algorithm": "PPO", "env_config": drawn}

    def passes(self, row: object, rows: object) -> bool:
        """Return True: nothing is asked."""
        return True

    @torch.no_grad()
    def tested(self, policy: Any, seed: int) -> torch.Tensor:
        """Return the mean return of each cell of the test grid, `[cells ** parameters]`."""
        grid = self.grid
        num_envs = len(next(iter(grid.values())))
        env = self.env(num_envs, seed=seed)
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

    def measure(self, name: str, seed: int, rows: object, checkpoints: Path | None) -> dict[str, Any]:
        """Train once, and test what came out."""
        wall, cpu = time.perf_counter(), time.process_time()
        schedule = {"kind": "interp", "points": [[0, self.config["lr"]], [self.transitions, 0]]}
        algorithm = PPOConfig.rl8(**self.config, lr_schedule=schedule, seed=seed).build(self.env)
        trainer = Trainer(algorithm, tracker=NullTracker(), eval_env=False)
        conditions = [HitsUpperBound("env/steps", self.transitions)]
        trainer.run(env_config=self.env_config, stop_conditions=conditions, progress="none")
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
        cells = self.tested(algorithm.policy, seed=10_000 + seed)
        fixed = torch.tensor([[self.env.parameters[key].default for key in self.ranges]], dtype=torch.float64)
        spans = torch.tensor([high - low for low, high in self.ranges.values()], dtype=torch.float64)
        physics = torch.tensor([*self.grid.values()], dtype=torch.float64).T[:: self.episodes]
        nearest = int(((physics - fixed) / spans).square().sum(1).argmin())
        others = torch.cat([cells[:nearest], cells[nearest + 1 :]])
        support = algorithm.env.parameter_support()
        return {
            "mean": round(float(cells.mean()), 2),
            "cvar": round(float(cells.sort().values[: math.ceil(WORST * len(cells))].mean()), 2),
            "outside": round(float(others.mean()), 2),
            "at_fixed": round(float(cells[nearest]), 2),
            "support": {key: [round(end, 4) for end in support[key]] for key in self.ranges},
            "env_steps": trainer.state["env/steps"],
            "wall_s": round(wall, 1),
            "cpu_s": round(cpu, 1),
            "load": round(os.getloadavg()[0], 1),
            "cells": [round(value, 1) for value in cells.tolist()],
        }


SHARED: dict[str, Any] = {
    "num_envs": 64,
    "horizon": 64,
    "sgd_minibatch_size": 512,
    "num_sgd_iters": 4,
    "max_grad_norm": 0.5,
    "model_config": {"hidden_sizes": [64, 64]},
    "device": "cpu",
    "num_threads": 1,
}
GRIDS = {
    "cartpole": Randomized(
        env=CartPole,
        ranges={"length": (0.1, 5.0), "force_mag": (1.0, 25.0)},
        start={"length": (0.3, 3.0), "force_mag": (5.0, 15.0)},
        transitions=614_400,
        thresholds=(50.0, 200.0),
        moves=2,
        boundary_share=0.3,
        solved=475.0,
        config={**SHARED, "gamma": 0.99, "gae_lambda": 0.95, "lr": 5e-3},
    ),
    "pendulum": Randomized(
        env=Pendulum,
        ranges={"m": (0.2, 1.2), "l": (0.2, 1.2)},
        start={"m": (0.2, 0.8), "l": (0.2, 0.8)},
        transitions=1_228_800,
        thresholds=(-1200.0, -300.0),
        moves=2,
        boundary_share=0.3,
        solved=-400.0,
        config={
            **SHARED,
            "num_envs": 256,
            "horizon": 32,
            "sgd_minibatch_size": 1024,
            "gamma": 0.98,
            "gae_lambda": 0.9,
            "lr": 4e-3,
            "distribution_config": {"std": "state", "initial_std": 1.5},
        },
    ),
}
RANDOMIZED = {
    f"{name} {method}": dataclasses.replace(task, method=method) for name, task in GRIDS.items() for method in METHODS
}
