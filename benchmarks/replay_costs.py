"""Measure what checkpoints of a replay of a million transitions cost.

    python -m benchmarks.replay_costs               # the table, and its JSON
    python -m benchmarks.replay_costs --rows 20000  # does it run? (the times mean nothing)

Times are those of the training thread. Each is repeated; the median and the smallest are shown, as other work on the
machine only adds to them. A checkpoint's bytes are those of files that the one before did not have.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from datetime import date
from pathlib import Path

import torch

import rl8x
from benchmarks.results import RESULTS, machine, save
from benchmarks.tables import table
from rl8x import NullTracker, Trainer
from rl8x.algorithms import DQNConfig
from rl8x.checkpoint import Checkpoints
from rl8x.envs import CartPole

OUT = RESULTS / "replay_costs.json"
# What is to be reached: milliseconds of the training thread, megabytes.
GOALS = {"a checkpoint: training thread": 10.0, "a checkpoint: written": 20.0}


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
    parser.add_argument("--out", type=Path, default=OUT, help="JSON to write")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "checkpoints"
        trainer = filled(options.rows, folder=folder)
        rows = dict(zip(GOALS, of_checkpoints(trainer, folder), strict=True))
    print(
        table(
            ["", "median", "least", "wanted"],
            [[name, *map(str, (*row.values(), GOALS[name]))] for name, row in rows.items()],
        )
    )
    if options.out != OUT or options.rows == 1_000_000:
        versions = {"rl8x": rl8x.__version__, "torch": torch.__version__}
        settings = {"rows": options.rows, "new_rows": options.rows // 20, "threads": 1, "versions": versions}
        result = {"machine": machine(), "date": date.today().isoformat(), "settings": settings, "goals": GOALS}
        save(options.out, result | {"rows": rows})
    return 0


if __name__ == "__main__":
    sys.exit(main())
