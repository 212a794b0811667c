"""One run of the learning benchmark: a seed of a task, noted step by step, from which its row is made.

A run longer than a session is saved beside its notes, and goes on from its last checkpoint: to the same bits, but where
the environment is a simulator whose state cannot be saved, so that its copies begin new episodes.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.learning_tasks import Task
from rl8x import Checkpoints, HitsUpperBound, NullTracker, Trainer
from rl8x.checkpoint import listed

if TYPE_CHECKING:
    from rl8x.algorithms.base import GenericAlgorithmBase

INVALID = "episodes/info/invalid/mean"
SAVED_EVERY = 5.0  # minutes


class Notes:
    """What the rows of a run say, a line for each step, kept in a file where a run may be cut off.

    Attributes:
        lines: Transitions and seconds so far, and the step's training returns, evaluation, and invalid actions.
    """

    def __init__(self, path: Path | None, about: Mapping[str, Any]) -> None:
        """Read what the file has, or begin it.

        Args:
            path: The file, a line of JSON for what it is about and for each step; None keeps all in memory.
            about: The seed and the task's settings.

        Raises:
            ValueError: If the file is about others.
        """
        self._path, self._about = path, json.dumps(about)
        self.lines: list[dict[str, float]] = []
        self._began = (time.perf_counter(), time.process_time())
        if path is None or not path.exists():
            return
        first, *lines = path.read_text().split("\n")
        if first != self._about:
            raise ValueError(f"{path} is of another seed or other settings: remove it, with the folder beside it")
        self.lines = [json.loads(line) for line in lines[:-1]]  # without what a kill left of a last one

    def go_on(self, transitions: int) -> None:
        """Forget what came after a checkpoint, and count seconds from there."""
        self.lines = [line for line in self.lines if line["env_steps"] <= transitions]
        last = self.lines[-1] if self.lines else {"wall_s": 0.0, "cpu_s": 0.0}
        self._began = (time.perf_counter() - last["wall_s"], time.process_time() - last["cpu_s"])
        if self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._path.write_text("".join(f"{line}\n" for line in (self._about, *map(json.dumps, self.lines))))

    @property
    def spent(self) -> dict[str, float]:
        """Seconds of all the processes that the run has had, but what they did after their last checkpoints."""
        wall, cpu = self._began
        return {"wall_s": round(time.perf_counter() - wall, 2), "cpu_s": round(time.process_time() - cpu, 2)}

    def __call__(self, trainer: object, stats: Mapping[str, float]) -> None:
        """Note a row."""
        line = {"env_steps": int(stats["env/steps"]), **self.spent}
        if "episodes/returns/mean" in stats:
            line["return"] = round(stats["episodes/returns/mean"], 2)
        if "eval/returns/mean" in stats:
            line["evaluation"] = stats["eval/returns/mean"]
        if INVALID in stats:
            line["invalid"] = stats[INVALID] * stats["episodes/ended"]
        self.lines.append(line)
        if self._path is not None:
            with self._path.open("a") as file:
                file.write(json.dumps(line) + "\n")

    def first_at(self, bound: float) -> int | None:
        """Return the transitions at which an evaluation first reached a bound; None if none did."""
        return next((int(line["env_steps"]) for line in self.lines if line.get("evaluation", -math.inf) >= bound), None)

    @property
    def best(self) -> dict[str, float]:
        """The best evaluation on the way, and the transitions at which it was first as good; empty without any."""
        best = max((line["evaluation"] for line in self.lines if "evaluation" in line), default=None)
        return {} if best is None else {"best": round(best, 2), "best_at": self.first_at(best) or 0}

    @property
    def curve(self) -> list[list[float]]:
        """Returns of the episodes that ended in training, by transitions."""
        return [[line["env_steps"], line["return"]] for line in self.lines if "return" in line]


def measure(name: str, task: Task, seed: int, checkpoints: Path | None = None) -> dict[str, Any]:
    """Train once, or go on, and evaluate what came out.

    Args:
        name: The task's name.
        task: The task.
        seed: The seed.
        checkpoints: A folder of folders where runs are saved on their way; None saves nothing.
    """
    folder = None if checkpoints is None else checkpoints / f"{name}-{seed}"
    notes = Notes(None if folder is None else folder.with_suffix(".jsonl"), {"seed": seed, **task.described})
    trainer = _trainer(task, seed, folder, notes)
    notes.go_on(int(trainer.state["env/steps"]))
    conditions = [HitsUpperBound("env/steps", task.transitions)]
    trainer.run(stop_conditions=conditions, steps_per_eval=task.steps_per_eval, progress="none")
    spent = notes.spent
    result = _final(trainer.algorithm, task.episodes)
    first_at = None if task.bound is None else notes.first_at(task.bound)
    row = {
        "task": name,
        "seed": seed,
        "return_mean": round(result["eval/returns/mean"], 2),
        "return_min": round(result["eval/returns/min"], 2),
        "return_std": round(result["eval/returns/std"], 2),
        "episodes": int(result["eval/episodes/ended"]),
        **notes.best,
        "passed": task.passes(result["eval/returns/mean"], first_at),
        **spent,
        "env_steps": trainer.state["env/steps"],
        "updates": trainer.state["algorithm/updates"],
        "load": round(os.getloadavg()[0], 1),
        "curve": thinned(notes.curve),
    }
    if task.first_within is not None:
        row["first_at"] = first_at
    invalid = [line["invalid"] for line in notes.lines if "invalid" in line]
    if invalid:
        evaluated = result[f"eval/{INVALID}"] * result["eval/episodes/ended"]
        row["invalid_actions"] = round(sum(invalid) + evaluated)
        row["passed"] = row["passed"] and row["invalid_actions"] == 0
    trainer.close()
    return row


def _trainer(task: Task, seed: int, folder: Path | None, notes: Notes) -> Trainer[Any]:
    """Make the trainer of a run, or that which goes on where the run was cut off."""
    options: dict[str, Any] = {"tracker": NullTracker(), "callbacks": [notes]}
    if folder is None:
        options["checkpoints"] = False
    elif listed(folder):
        return Trainer.resume(folder, auto=True, trust=True, **options)
    else:
        options["checkpoints"] = Checkpoints(folder, every_minutes=SAVED_EVERY, keep=2)
    # The evaluation environment has seeds of its own: it starts from states that training never saw.
    return Trainer(task.make_algorithm(seed), eval_env=True, num_eval_envs=task.num_eval_envs, **options)


def _final(algorithm: GenericAlgorithmBase[Any], episodes: int) -> Mapping[str, float]:
    """Evaluate the policy at the end, deterministic, in fresh episodes."""
    judge = Trainer(algorithm, tracker=NullTracker(), eval_env=True, num_eval_envs=episodes, checkpoints=False)
    return judge.eval(deterministic=True)


def forget(checkpoints: Path, name: str, seed: int) -> None:
    """Remove what a run was saved in, once its row is written."""
    shutil.rmtree(checkpoints / f"{name}-{seed}", ignore_errors=True)
    (checkpoints / f"{name}-{seed}.jsonl").unlink(missing_ok=True)


def thinned(curve: list[list[float]], most: int = 128) -> list[list[float]]:
    """Keep some of a curve's points, evenly spaced, the last among them."""
    step = -(-len(curve) // most)
    return curve[::-1][:: max(1, step)][::-1]
