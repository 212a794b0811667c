"""Compare a student with memory that was taught by a teacher with the same network trained by PPO from scratch.

    python benchmarks/distillation.py [--seeds 5] [--transitions 100000] [--out ...]

CartPole whose pole's length and motor's force are drawn anew for each episode, and whose velocities are hidden: a
policy that sees the positions alone has to infer both from what it remembers. The teacher sees everything (PPO, no
memory). The students, with memory and without, see the positions and learn from it; from scratch the same network with
memory is trained by PPO, on as many transitions as the student, and on as many as teacher and student together. All are
judged by 256 fresh episodes of the same physics, deterministically, at the end of training. Settings were chosen on
seeds from 10 on. One core, under 10 minutes.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import gymnasium.spaces as spaces
import numpy as np
from torch import Tensor

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.learning import ROOT, machine
from rl8x import HitsUpperBound, NullTracker, PPOConfig, Trainer, distill
from rl8x.algorithms import DistillationConfig
from rl8x.envs import CartPole
from rl8x.envs.base import Parameters, State
from rl8x.randomization import LogUniform

PHYSICS = {"length": LogUniform(0.1, 2.0), "force_mag": LogUniform(4.0, 25.0)}
EPISODES = 256
DEFAULT_OUT = ROOT / "benchmarks" / "results" / "distillation.json"
COMMON: dict[str, Any] = {"num_envs": 32, "horizon": 64, "device": "cpu", "num_threads": 1, "execution": "eager"}
MLP: dict[str, Any] = {"model": "mlp", "model_config": {"hidden_sizes": [64, 64], "activation": "tanh"}}
GRU: dict[str, Any] = {"model": "gru", "model_config": {"hidden_size": 64, "encoder_sizes": [64]}, "seq_len": 16}
PPO: dict[str, Any] = {
    "gamma": 0.99,
    "max_grad_norm": 0.5,
    "vf_clip_param": None,
    "normalize_rewards": True,
    "sgd_minibatch_size": 256,
}
DISTILLATION: dict[str, Any] = {"max_grad_norm": 0.5, "sgd_minibatch_size": 512}
PPO_LR, DISTILLATION_LR = 3e-3, 2e-3  # they fall to 0
ROWS = {
    "teacher": "teacher: PPO, sees velocities and physics",
    "student-gru": "GRU, distilled",
    "student-mlp": "no memory, distilled",
    "ppo-gru": "GRU, PPO from scratch, the student's transitions",
    "ppo-gru-both": "GRU, PPO from scratch, the teacher's and the student's transitions",
}


class PartlySeenCartPole(CartPole):
    """CartPole that shows positions and, unless `blind`, velocities as parts of their own."""

    def __init__(self, num_envs: int, *, blind: bool = False, **options: Any) -> None:
        self.blind = blind
        parts = {name: spaces.Box(-np.inf, np.inf, (2,), np.float32) for name in ("positions", "velocities")}
        if blind:
            del parts["velocities"]
        self.single_observation_space = spaces.Dict(parts)
        super().__init__(num_envs, **options)

    def observe(self, state: State, parameters: Parameters) -> dict[str, Tensor]:
        """Return position and angle, `[num_envs, 2]`, and their velocities, likewise."""
        obs = super().observe(state, parameters)
        assert isinstance(obs, Tensor)
        seen = {"positions": obs[:, 0::2]}
        return seen if self.blind else {**seen, "velocities": obs[:, 1::2]}


def falling(lr: float, transitions: int) -> dict[str, Any]:
    """Return a learning rate that falls to 0 over the transitions."""
    return {"kind": "interp", "points": [[0, lr], [transitions, 0.0]]}


def trained(algorithm: Any, transitions: int) -> tuple[Trainer, dict[str, Any]]:
    """Train for so many transitions; return the trainer and what its policy reaches."""
    cpu = time.process_time()
    trainer = Trainer(algorithm, tracker=NullTracker(), eval_env=True, num_eval_envs=EPISODES)
    trainer.run(env_config=PHYSICS, stop_conditions=[HitsUpperBound("env/steps", transitions)], progress="none")
    cpu = time.process_time() - cpu
    result = trainer.eval(env_config=PHYSICS, deterministic=True)
    row = {"return_mean": round(result["eval/returns/mean"], 2), "return_min": round(result["eval/returns/min"], 2)}
    return trainer, {**row, "env_steps": trainer.state["env/steps"], "cpu_s": round(cpu, 1)}


def rows_of(seed: int, transitions: int) -> list[dict[str, Any]]:
    """Train the teacher, its students and their rivals with one seed."""
    config = PPOConfig.rl8(seed=seed, **COMMON, **MLP, **PPO, lr_schedule=falling(PPO_LR, transitions))
    teacher, row = trained(config.build(PartlySeenCartPole, observe_parameters="all"), transitions)
    found = {"teacher": row}
    for name, model in (("student-gru", GRU), ("student-mlp", MLP)):
        student = DistillationConfig(
            seed=seed,
            **COMMON,
            **model,
            **DISTILLATION,
            lr_schedule=falling(DISTILLATION_LR, transitions),
            teacher_obs=["velocities", "parameters"],
        )
        found[name] = trained(distill(teacher, student), transitions)[1]
    for name, count in (("ppo-gru", transitions), ("ppo-gru-both", 2 * transitions)):
        config = PPOConfig.rl8(seed=seed, **COMMON, **GRU, **PPO, lr_schedule=falling(PPO_LR, count))
        found[name] = trained(config.build(PartlySeenCartPole, blind=True), count)[1]
    load = round(os.getloadavg()[0], 1)
    return [{"policy": name, "seed": seed, **row, "load": load} for name, row in found.items()]


def report(rows: Sequence[Mapping[str, Any]]) -> str:
    """Lay the returns out as a Markdown table, in the order of `ROWS`."""
    lines = [
        "| policy | transitions | mean return, median of seeds | worst seed | best seed | CPU s | seeds |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, title in ROWS.items():
        mine = [row for row in rows if row["policy"] == name]
        if mine:
            returns = [row["return_mean"] for row in mine]
            cpu = statistics.median(row["cpu_s"] for row in mine)
            lines.append(
                f"| {title} | {mine[0]['env_steps']:,} | {statistics.median(returns):.1f} | {min(returns):.1f} "
                f"| {max(returns):.1f} | {cpu:.0f} | {len(mine)} |"
            )
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    """Measure, print, and write the JSON file after every seed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=5, help="how many")
    parser.add_argument("--transitions", type=int, default=100_000, help="of the teacher, and of each student")
    parser.add_argument("--out", type=Path, default=DEFAULT_OUT)
    options = parser.parse_args(argv)
    settings = {"common": COMMON, "mlp": MLP, "gru": GRU, "ppo": PPO, "distillation": DISTILLATION}
    settings["first_lr"] = {"ppo": PPO_LR, "distillation": DISTILLATION_LR}
    physics = {name: distribution.to_dict() for name, distribution in PHYSICS.items()}
    rows: list[dict[str, Any]] = []
    for seed in range(options.seeds):
        rows += rows_of(seed, options.transitions)
        options.out.parent.mkdir(parents=True, exist_ok=True)
        lines = ",\n".join(json.dumps(row) for row in rows)
        head = json.dumps({"settings": settings, "physics": physics, "machine": machine()})[1:-1]
        options.out.write_text(f'{{{head},\n"rows": [\n{lines}\n]}}\n')
        print(report(rows[-len(ROWS) :]), flush=True)
    print("\n" + report(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
