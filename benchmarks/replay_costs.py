"""Measure the costs of a replay of a million transitions beside updates: prioritised sampling, checkpoints, the guard.

    python benchmarks/replay_costs.py               # the table, and its JSON
    python benchmarks/replay_costs.py --rows 20000  # does it run? (the times mean nothing)

Times are those of the training thread. Each is repeated; the median and the smallest are shown, as other work on the
machine only adds to them. A checkpoint's bytes are those of files that the one before did not have.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

import rl8x
from benchmarks.processes import machine, save
from rl8x import NullTracker, Trainer
from rl8x.algorithms import DQNConfig
from rl8x.checkpoint import Checkpoints
from rl8x.envs import CartPole
from rl8x.rollouts.finite import gathered_not_finite
from rl8x.trainers.non_finite import Guard

RESULTS = Path(__file__).parent / "results" / "replay_costs.json"
# What is to be reached, by the name of a row, in its unit.
GOALS = {
    "draw 256 by priorities, and write back": 0.3,
    "a checkpoint: training thread": 10.0,
    "a checkpoint: written": 20.0,
    "the guard, a step": 1.0,
}


def timed(function: Callable[[], Any], repeats: int) -> dict[str, float]:
    """Return the median and the smallest time of a call, in milliseconds."""
    for _ in range(3):
        function()
    took = []
    for _ in range(repeats):
        begin = time.perf_counter()
        function()
        took.append(1e3 * (time.perf_counter() - begin))
    return {"median": round(statistics.median(took), 4), "least": round(min(took), 4)}


def filled(rows: int, *, folder: Path) -> Trainer:
    """Return a trainer whose replay of `rows` transitions is full."""
    config = DQNConfig(
        num_envs=rows // 20,
        horizon=1,
        buffer_size=rows,
        batch_size=256,
        prioritized=True,
        warmup_steps=rows * 100,
        device="cpu",
        execution="eager",
        model_config={"hidden_sizes": [256, 256]},
    )
    checkpoints = Checkpoints(folder, every_steps=None, every_minutes=None)
    trainer = Trainer(config.build(CartPole), tracker=NullTracker(), checkpoints=checkpoints, eval_env=False)
    for _ in range(21):
        trainer.step()
    assert trainer.algorithm.replay.size == rows
    return trainer


def of_priorities(trainer: Trainer) -> dict[str, float]:
    """Time a draw of 256 rows with their importance weights, and what writes their errors back."""
    replay, generator = trainer.algorithm.replay, torch.Generator().manual_seed(0)
    errors = torch.rand(1, 256)

    def draw() -> None:
        index = replay.sample(1, 256, generator)
        replay.weights(index, 0.4)
        replay.update(index, errors)

    return timed(draw, 300)


def of_guard(trainer: Trainer) -> dict[str, float]:
    """Time what the guard does in a step that can be taken back: copies of what is learned, a look at what came."""
    guard, algorithm = Guard("rollback"), trainer.algorithm

    def guarded() -> None:
        guard.before_step(algorithm)
        flags = gathered_not_finite(algorithm.rollout.tensors)
        bool(torch.stack([*flags.values()]).any())
        guard.judge(algorithm, {})

    return timed(guarded, 100)


def of_checkpoints(trainer: Trainer, folder: Path) -> tuple[dict[str, float], dict[str, float]]:
    """Save after each further twentieth of the replay; return the thread's milliseconds and the megabytes written."""
    took, written, known = [], [], set[tuple[int, int]]()
    trainer.record.open(trains=False)
    trainer.checkpoints.begin()
    for i in range(8):
        trainer.step()
        begin = time.perf_counter()
        trainer.record.save(trainer.state_dict(), None)  # as a run does, which does not wait for the disk
        elapsed = 1e3 * (time.perf_counter() - begin)
        trainer.checkpoints.wait()
        found = [path.stat() for path in folder.rglob("*") if path.is_file()]
        files = {(each.st_ino, each.st_mtime_ns): each.st_size for each in found}  # links share both
        if i:  # the first has all of the replay to write
            took.append(elapsed)
            written.append(sum(size for file, size in files.items() if file not in known) / 1e6)
        known |= files.keys()
    trainer.checkpoints.end()
    return tuple(
        {"median": round(statistics.median(each), 3), "least": round(min(each), 3)} for each in (took, written)
    )


def main() -> int:
    """Measure, print the table, and write it down."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000, help="transitions of the replay")
    parser.add_argument("--out", type=Path, default=RESULTS, help="JSON to write")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "checkpoints"
        trainer = filled(options.rows, folder=folder)
        rows = {
            "draw 256 by priorities, and write back": of_priorities(trainer),
            "the guard, a step": of_guard(trainer),
        }
        rows["a checkpoint: training thread"], rows["a checkpoint: written"] = of_checkpoints(trainer, folder)
    print(f"{'':40}{'median':>10}{'least':>10}{'wanted':>10}")
    for label, row in rows.items():
        unit = "MB" if "written" in label else "ms"
        print(f"{label:40}{row['median']:>10.3f}{row['least']:>10.3f}{GOALS[label]:>10} {unit}")
    if options.out != RESULTS or options.rows == 1_000_000:
        versions = {"rl8x": rl8x.__version__, "torch": torch.__version__}
        settings = {"rows": options.rows, "new_rows": options.rows // 20, "threads": 1, "versions": versions}
        result = {"machine": machine(), "date": date.today().isoformat(), "settings": settings, "goals": GOALS}
        save(options.out, result | {"rows": rows})
    return 0


if __name__ == "__main__":
    sys.exit(main())
