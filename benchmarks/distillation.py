"""A student with memory that was taught by a teacher, beside the same network trained by PPO from scratch.

CartPole whose pole's length and motor's force are drawn anew for each episode, and whose velocities are hidden: a
policy that sees the positions alone has to infer both from what it remembers. The teacher sees everything (PPO, no
memory). The students, with memory and without, see the positions and learn from it; from scratch the same network with
memory is trained by PPO, on as many transitions as the student, and on as many as teacher and student together. All are
judged by 256 fresh episodes of the same physics, deterministically, at the end of training. Settings were chosen on
seeds from 10 on. One core, under 10 minutes.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import time
from pathlib import Path
from typing import Any, ClassVar

from benchmarks.learning_envs import PartlySeenCartPole
from rl8x import HitsUpperBound, NullTracker, PPOConfig, Trainer, distill
from rl8x.algorithms import DistillationConfig
from rl8x.randomization import LogUniform

PHYSICS = {"length": LogUniform(0.1, 2.0), "force_mag": LogUniform(4.0, 25.0)}
EPISODES, TRANSITIONS = 256, 100_000
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Distilled:
    """A policy that is trained, by the teacher or from scratch.

    Attributes:
        model: The network's options.
        sees: `"all"`, physics included, or `"positions"` alone.
        taught: Whether the teacher of the same seed teaches it; else PPO trains it.
        transitions: Transitions to train on.
        seeds: How many seeds are run.
    """

    model: dict[str, Any]
    sees: str = "positions"
    taught: bool = False
    transitions: int = TRANSITIONS
    seeds: int = 5
    missing: ClassVar[None] = None

    @property
    def config(self) -> dict[str, Any]:
        """The hyperparameters but for the seed; the learning rate falls to 0 over the transitions."""
        own, lr = (DISTILLATION, 2e-3) if self.taught else (PPO, 3e-3)
        schedule = {"kind": "interp", "points": [[0, lr], [self.transitions, 0.0]]}
        return {**COMMON, **self.model, **own, "lr_schedule": schedule}

    @property
    def described(self) -> dict[str, Any]:
        """All of the task, as the JSON file has it."""
        physics = {name: distribution.to_dict() for name, distribution in PHYSICS.items()}
        return {"physics": physics, "sees": self.sees, "taught": self.taught, "config": self.config}

    def passes(self, row: object, rows: object) -> bool:
        """Return True: nothing is asked."""
        return True

    def trained(self, seed: int) -> Trainer[Any]:
        """Return the trainer at the end of training."""
        if self.taught:
            hidden = ["velocities", "parameters"]
            student = DistillationConfig(seed=seed, **self.config, teacher_obs=hidden)
            algorithm = distill(teacher(seed), student)
        else:
            config = PPOConfig.rl8(seed=seed, **self.config)
            seen: dict[str, Any] = {"observe_parameters": "all"} if self.sees == "all" else {"blind": True}
            algorithm = config.build(PartlySeenCartPole, **seen)
        trainer = Trainer(algorithm, tracker=NullTracker(), eval_env=True, num_eval_envs=EPISODES)
        conditions = [HitsUpperBound("env/steps", self.transitions)]
        trainer.run(env_config=PHYSICS, stop_conditions=conditions, progress="none")
        return trainer

    def measure(self, name: str, seed: int, rows: object, checkpoints: Path | None) -> dict[str, Any]:
        """Train once, and evaluate what came out."""
        if self.taught:
            teacher(seed)  # whose time is no part of the student's
        cpu = time.process_time()
        trainer = self.trained(seed)
        cpu = time.process_time() - cpu
        result = trainer.eval(env_config=PHYSICS, deterministic=True)
        return {
            "return_mean": round(result["eval/returns/mean"], 2),
            "return_min": round(result["eval/returns/min"], 2),
            "env_steps": trainer.state["env/steps"],
            "cpu_s": round(cpu, 1),
            "load": round(os.getloadavg()[0], 1),
        }


@functools.cache
def teacher(seed: int) -> Trainer[Any]:
    """Train the teacher of a seed; the second call returns the first's."""
    return DISTILLED["teacher"].trained(seed)


DISTILLED = {
    "teacher": Distilled(model=MLP, sees="all"),
    "student-gru": Distilled(model=GRU, taught=True),
    "student-mlp": Distilled(model=MLP, taught=True),
    "ppo-gru": Distilled(model=GRU),
    "ppo-gru-both": Distilled(model=GRU, transitions=2 * TRANSITIONS),
}
