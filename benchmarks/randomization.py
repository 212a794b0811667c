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

    def judge(self, trainer: Trainer[Any], seed: int) -> dict[str, Any]:
        """Test the policy on a grid of the ranges."""
        grid = {name: {"linspace": [low, high, self.cells]} for name, (low, high) in self.ranges.items()}
        frame = trainer.evaluate_grid(grid, episodes=self.episodes, seed=10_000 + seed)
        fixed, returns = ENVS[self.run.env.env].parameters, frame["returns"]
        far = sum(
            ((frame[name] - fixed[name].default) / (high - low)) ** 2 for name, (low, high) in self.ranges.items()
        )
        return {
            "cvar": round(float(returns.nsmallest(math.ceil(WORST * len(frame))).mean()), 2),
            "outside": round(float(returns.drop(far.idxmin()).mean()), 2),
            "cells": returns.round(1).tolist(),
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
