"""The offline tasks of the learning benchmark: algorithm, data set and required score of each."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Mapping
from typing import Any

from benchmarks.learning_tasks import SMALL
from benchmarks.learning_tasks import TASKS as ONLINE
from benchmarks.offline_data import RECIPES, make_data
from rl8x import HitsUpperBound, NullTracker, Trainer
from rl8x.algorithms import BCConfig, DQNConfig, IQLConfig, SACConfig, TD3Config
from rl8x.algorithms.off_policy.config import LearnerConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class OfflineTask:
    """What learns from which data, for how long, and what is asked of the result.

    Attributes:
        data: The data set, of `offline_data.RECIPES`.
        algorithm: The class of the hyperparameters.
        updates: Updates to make.
        lr: Learning rate at the start; it falls to 0 in a straight line.
        config: The other hyperparameters, where they are not the defaults.
        near: Share of the data's mean return within which every seed must end; None: any.
        above: The task whose return with the same seed must be reached at least; None: any.
        seeds: How many seeds are run, 0, 1, ...
        episodes: Fresh episodes that the final policy is judged by, deterministically.
    """

    data: str
    algorithm: type[LearnerConfig]
    updates: int
    lr: float
    config: dict[str, Any] = dataclasses.field(default_factory=dict)
    near: float | None = None
    above: str | None = None
    seeds: int = 3
    episodes: int = 1024

    @property
    def settings(self) -> dict[str, Any]:
        """The arguments of `algorithm` but for the seed."""
        schedule = {"kind": "interp", "points": [[0, self.lr], [self.updates, 0.0]]}
        common = {"lr_schedule": schedule, "model_config": SMALL, "device": "cpu", "num_threads": 1}
        return {**common, **self.config}

    @property
    def described(self) -> dict[str, Any]:
        """All of the task, as the JSON file has it."""
        algorithm = self.algorithm.__name__.removesuffix("Config")
        recipe = dataclasses.asdict(RECIPES[self.data])
        return {**dataclasses.asdict(self), "recipe": recipe, "algorithm": algorithm, "config": self.settings}

    @property
    def asked(self) -> str:
        """What is asked of every seed, in words."""
        if self.near is not None:
            return f"within {self.near:.0%} of the data"
        return "" if self.above is None else f"≥ {self.above}"

    def passes(self, mean: float, data_mean: float, reference: float | None = None) -> bool:
        """Whether a mean return at the end is what is asked, beside the data's and that of the task `above`."""
        is_near = self.near is None or abs(mean - data_mean) <= self.near * abs(data_mean)
        return is_near and (reference is None or mean >= reference)


def measure_offline(name: str, task: OfflineTask, seed: int, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Train once and evaluate what came out.

    Args:
        name: The task's name.
        task: The task.
        seed: Seeds the learner and its evaluation.
        rows: What was measured before; that of the task `above` with the same seed must be among them.
    """
    found = [row["return_mean"] for row in rows if (row["task"], row["seed"]) == (task.above, seed)]
    if task.above is not None and not found:
        raise SystemExit(f"{name} is compared with {task.above}: measure that with seed {seed} first.")
    data = make_data(task.data)
    make_env = ONLINE[RECIPES[task.data].task].make_env
    wall, cpu = time.perf_counter(), time.process_time()
    algorithm = task.algorithm(seed=seed, **task.settings).build(dataset=data.dataset)
    trainer = Trainer(algorithm, tracker=NullTracker(), eval_env=make_env, num_eval_envs=task.episodes)
    trainer.run(stop_conditions=[HitsUpperBound("algorithm/updates", task.updates)], progress="none")
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    result = trainer.eval(deterministic=True)
    trainer.close()
    mean = result["eval/returns/mean"]
    return {
        "task": name,
        "seed": seed,
        "return_mean": round(mean, 2),
        "return_min": round(result["eval/returns/min"], 2),
        "return_std": round(result["eval/returns/std"], 2),
        "episodes": int(result["eval/episodes/ended"]),
        "score": round(data.score(mean), 1),
        "data_mean": round(data.mean, 2),
        "data_score": round(data.score(data.mean), 1),
        "data_digest": data.dataset.digest,
        "passed": task.passes(mean, data.mean, *found),
        "wall_s": round(wall, 2),
        "cpu_s": round(cpu, 2),
        "env_steps": 0,
        "updates": trainer.state["algorithm/updates"],
        "load": round(os.getloadavg()[0], 1),
    }


def report_offline(rows: list[dict[str, Any]], tasks: Mapping[str, OfflineTask]) -> str:
    """Lay the returns of each task's seeds, and the score of the worst, out as a Markdown table."""
    lines = [
        "| task | asked of every seed | mean of the data | returns by seed | worst score | updates | CPU s |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, task in tasks.items():
        mine = sorted((row for row in rows if row["task"] == name), key=lambda row: row["seed"])
        if not mine:
            continue
        returns = ", ".join(f"{row['return_mean']:.1f}" for row in mine)
        cpu = sorted(row["cpu_s"] for row in mine)[len(mine) // 2]
        lines.append(
            f"| {name} | {task.asked} | {mine[0]['data_mean']:.1f} | {returns} "
            f"| {min(row['score'] for row in mine):.0f} | {mine[0]['updates']:,} | {cpu:.1f} |"
        )
    return "\n".join(lines)


CRITICS = {"critic_hidden_sizes": [64, 64], "batch_size": 128}

# A few thousand updates: values have to travel quickly.
FAST = {"gamma": 0.97, "tau": 0.02}

OFFLINE = {
    "cartpole-medium-bc": OfflineTask(
        data="cartpole-medium",
        algorithm=BCConfig,
        updates=5_000,
        lr=3e-3,
        # Without it the pole's angle, a tenth of the position, is hardly seen, and where the policy turns is not exact.
        config={"normalize_observations": True},
        near=0.05,
    ),
    "cartpole-mixed-bc": OfflineTask(data="cartpole-mixed", algorithm=BCConfig, updates=3_000, lr=1e-3),
    "cartpole-mixed-cql": OfflineTask(
        data="cartpole-mixed",
        algorithm=DQNConfig,
        updates=4_000,
        lr=1e-3,
        config={
            "cql_coeff": 1.0,
            "batch_size": 128,
            "target_interval": 200,
            "model_config": {"hidden_sizes": [64, 64], "layer_norm": False},
        },
        above="cartpole-mixed-bc",
    ),
    "cartpole-mixed-iql": OfflineTask(
        data="cartpole-mixed", algorithm=IQLConfig, updates=4_000, lr=1e-3, config=CRITICS, above="cartpole-mixed-bc"
    ),
    "pendulum-mixed-bc": OfflineTask(data="pendulum-mixed", algorithm=BCConfig, updates=3_000, lr=1e-3),
    "pendulum-mixed-iql": OfflineTask(
        data="pendulum-mixed", algorithm=IQLConfig, updates=4_000, lr=1e-3, config=CRITICS, above="pendulum-mixed-bc"
    ),
    "pendulum-mixed-cql": OfflineTask(
        data="pendulum-mixed",
        algorithm=SACConfig,
        updates=3_000,
        lr=1e-3,
        config={**CRITICS, **FAST, "cql_coeff": 1.0, "cql_samples": 4, "critic_layer_norm": True},
        above="pendulum-mixed-bc",
    ),
    "pendulum-mixed-td3-bc": OfflineTask(
        data="pendulum-mixed",
        algorithm=TD3Config,
        updates=4_000,
        lr=1e-3,
        config={**CRITICS, **FAST, "actor_bc_coeff": 0.4},  # the paper's alpha of 2.5
        above="pendulum-mixed-bc",
    ),
    "pendulum-mixed-rebrac": OfflineTask(
        data="pendulum-mixed",
        algorithm=TD3Config,
        updates=4_000,
        lr=1e-3,
        config={**CRITICS, **FAST, "actor_bc_coeff": 0.01, "critic_bc_coeff": 0.01, "critic_layer_norm": True},
        above="pendulum-mixed-td3-bc",
    ),
}
