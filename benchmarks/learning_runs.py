"""A task of the learning benchmark and a run of it: a seed, noted step by step, from which its row is made.

A run longer than a session is saved beside its notes, and goes on from its last checkpoint: to the same bits, but where
the environment is a simulator whose state cannot be saved, so that its copies begin new episodes.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import math
import os
import shutil
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import gymnasium

from rl8x import Checkpoints, HitsUpperBound, NullTracker, Trainer
from rl8x.checkpoint import listed
from rl8x.config import RunSpec
from rl8x.envs import Env

INVALID = "episodes/info/invalid/mean"
SAVED_EVERY = 5.0  # minutes
# What Gymnasium's environments are made with, by the part of their entry point that tells.
SIMULATORS = {"mujoco": "mujoco", "box2d": "Box2D"}
# How a run is watched is no part of what is trained.
WATCHING = ("steps_per_eval", "num_eval_envs")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Task:
    """What is trained, and what is asked of the result."""

    run: RunSpec  # environment, algorithm, hyperparameters, and the transitions to train on
    bound: float | None = None  # the return that every seed must reach; with `fails`, that no seed may reach. None: any
    # Transitions within which every seed must reach the bound for the first time; None: any.
    first_within: int | None = None
    # Steps of the trainer from one evaluation to the next, which say when that was; None: none.
    steps_per_eval: int | None = None
    fails: bool = False  # whether this is a control that must not learn the task
    seeds: int = 5  # how many seeds are run
    episodes: int = 256  # fresh episodes that the final policy is judged by
    eval_episodes: int | None = None  # episodes of an evaluation on the way; None: as many
    best_bound: float | None = None  # what the best evaluation on the way must be, in the mean over seeds; None: any
    ends_at: float | None = None  # an evaluation on the way that ends the training; None: only its transitions do

    @property
    def transitions(self) -> int:
        """Transitions to train on."""
        (stop,) = self.run.run.stop_conditions
        return int(stop["hits_upper_bound"][1])

    @property
    def described(self) -> dict[str, Any]:
        """All of the task, as the JSON file has it."""
        trained = {name: value for name, value in self.run.to_plain().items() if name not in WATCHING}
        asked = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        del asked["run"], asked["ends_at"]  # what a row was ended by, its transitions say
        return {"run": {**trained, "algorithm": self.run.algorithm.algorithm}, **asked}

    @property
    def missing(self) -> str | None:
        """The package that the simulator needs and that is not installed."""
        if self.run.env.env not in gymnasium.registry:
            return None
        entry_point = str(gymnasium.spec(self.run.env.env).entry_point)
        needed = (module for part, module in SIMULATORS.items() if part in entry_point)
        return next((module for module in needed if importlib.util.find_spec(module) is None), None)

    @property
    def asked(self) -> str:
        """What is asked of every seed, in words."""
        return "" if self.bound is None else f"{'<' if self.fails else '≥'} {self.bound:g}"

    def worst(self, means: Sequence[float]) -> float:
        """Return the mean return that is the farthest from what is asked."""
        return max(means) if self.fails else min(means)

    def passes(self, row: Mapping[str, Any], rows: object = ()) -> bool:
        """Whether the mean return at the end is what is asked, and the transitions when the bound was first reached."""
        first_at, mean = row.get("first_at"), row.get("return_mean", math.nan)
        in_time = self.first_within is None or (first_at is not None and first_at <= self.first_within)
        return (
            in_time
            and row.get("invalid_actions", 0) == 0
            and (self.bound is None or (mean < self.bound if self.fails else mean >= self.bound))
        )

    def changed(self, **hyperparameters: Any) -> Task:
        """Return the task with other hyperparameters."""
        config = {**self.run.algorithm.algorithm_config, **hyperparameters}
        return dataclasses.replace(self, run=self.run.replace(algorithm_config=config))

    def make_algorithm(self, seed: int) -> Any:
        """Build environment and algorithm."""
        return self.changed(seed=seed).run.make_algorithm()

    def make_env(self, num_envs: int, **kwargs: Any) -> Env:
        """Make the environment with so many copies."""
        return self.run.env.maker(self.run.trust)(num_envs, **kwargs)

    def measure(self, name: str, seed: int, rows: object, checkpoints: Path | None) -> dict[str, Any]:
        """Train once, or go on with what is saved in a folder of `checkpoints`, and evaluate what came out."""
        folder = None if checkpoints is None else checkpoints / f"{name}-{seed}"
        notes = Notes(None if folder is None else folder.with_suffix(".jsonl"), {"seed": seed, **self.described})
        trainer = self.train(seed, notes, folder)
        spent = notes.ended(trainer)
        row = {**self.judge(trainer, seed), **notes.best, **spent, "curve": thinned(notes.curve)}
        if self.first_within is not None:
            row["first_at"] = None if self.bound is None else notes.first_at(self.bound)
        if notes.invalid is not None:
            row["invalid_actions"] = round(notes.invalid + row.get("invalid_actions", 0.0))
        trainer.close()
        return row

    def train(self, seed: int, notes: Notes, folder: Path | None = None) -> Trainer[Any]:
        """Train to the end, or go on where the run was cut off; returns the trainer."""
        options: dict[str, Any] = {"tracker": NullTracker(), "callbacks": [notes]}
        if folder is not None and listed(folder):
            trainer: Trainer[Any] = Trainer.resume(folder, auto=True, trust=True, **options)
        else:
            saved = False if folder is None else Checkpoints(folder, every_minutes=SAVED_EVERY, keep=2)
            # The evaluation environment has seeds of its own: it starts from states that training never saw.
            options |= {"eval_env": True, "num_eval_envs": self.eval_episodes or self.episodes, "checkpoints": saved}
            trainer = Trainer(self.make_algorithm(seed), **options)
        notes.go_on(int(trainer.state["env/steps"]))
        asked = {"env_config": self.run.run.env_config, "steps_per_eval": self.steps_per_eval, "progress": "none"}
        enough = [] if self.ends_at is None else [HitsUpperBound("eval/returns/mean", self.ends_at)]
        trainer.run(stop_conditions=[HitsUpperBound("env/steps", self.transitions), *enough], **asked)
        return trainer

    def judge(self, trainer: Trainer[Any], seed: int) -> dict[str, Any]:
        """Evaluate the policy at the end, deterministic, in fresh episodes."""
        options: dict[str, Any] = {"tracker": NullTracker(), "eval_env": True, "checkpoints": False}
        fresh = Trainer(trainer.algorithm, num_eval_envs=self.episodes, **options)
        result = fresh.eval(env_config=self.run.run.env_config, deterministic=True)
        return judged(result)


def judged(result: Mapping[str, float]) -> dict[str, Any]:
    """Return what a row has of an evaluation."""
    row = {f"return_{name}": round(result[f"eval/returns/{name}"], 2) for name in ("mean", "min", "std")}
    row["episodes"] = int(result["eval/episodes/ended"])
    if f"eval/{INVALID}" in result:
        row["invalid_actions"] = result[f"eval/{INVALID}"] * row["episodes"]
    return row


class Notes:
    """What the rows of a run say, kept in a file where a run may be cut off: a line for each step.

    It has transitions and seconds so far, and the step's training returns, evaluation, and invalid actions.
    """

    def __init__(self, path: Path | None, about: Mapping[str, Any]) -> None:
        """Read what the file has, which must be about the same seed and settings; None keeps all in memory."""
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

    def ended(self, trainer: Trainer[Any]) -> dict[str, float]:
        """Return what a row has of the training that has ended now."""
        counts = {"env_steps": trainer.state["env/steps"], "updates": trainer.state["algorithm/updates"]}
        return {**self.spent, **counts, "load": round(os.getloadavg()[0], 1)}

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
    def invalid(self) -> float | None:
        """Actions that a mask forbids, of the whole training; None where the environment counts none."""
        counts = [line["invalid"] for line in self.lines if "invalid" in line]
        return sum(counts) if counts else None

    @property
    def best(self) -> dict[str, float]:
        """The best evaluation on the way, and the transitions at which it was first as good; empty without any."""
        best = max((line["evaluation"] for line in self.lines if "evaluation" in line), default=None)
        return {} if best is None else {"best": round(best, 2), "best_at": self.first_at(best) or 0}

    @property
    def curve(self) -> list[list[float]]:
        """Returns of the episodes that ended in training, by transitions."""
        return [[line["env_steps"], line["return"]] for line in self.lines if "return" in line]


def forget(checkpoints: Path, name: str, seed: int) -> None:
    """Remove what a run was saved in, once its row is written."""
    shutil.rmtree(checkpoints / f"{name}-{seed}", ignore_errors=True)
    (checkpoints / f"{name}-{seed}.jsonl").unlink(missing_ok=True)


def thinned(curve: list[list[float]], most: int = 128) -> list[list[float]]:
    """Keep some of a curve's points, evenly spaced, the last among them."""
    step = -(-len(curve) // most)
    return curve[::-1][:: max(1, step)][::-1]
