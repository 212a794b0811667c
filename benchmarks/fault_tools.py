"""The run that benchmarks/faults.py breaks, the children that it runs in, and what its database has in the end."""

from __future__ import annotations

import atexit
import contextlib
import functools
import hashlib
import json
import logging
import os
import shutil
import sqlite3
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")

from rl8x.algorithms import PPOConfig
from rl8x.checkpoint import CheckpointError
from rl8x.checkpoint.tree import tensors_in
from rl8x.conditions import HitsUpperBound, Plateau
from rl8x.envs import CartPole
from rl8x.tracking import MLflowTracker, NullTracker
from rl8x.tracking.location import Location
from rl8x.tracking.store import MLflowStore, NewRun, Point
from rl8x.trainers import Checkpoints, Trainer

STEPS = 60


def config(**options: Any) -> PPOConfig:
    """Return a small problem whose steps take milliseconds."""
    small = {"num_envs": 8, "horizon": 4, "seed": 3, "device": "cpu", "num_threads": 1}
    return PPOConfig.rl8(**(small | {"model_config": {"hidden_sizes": [16]}, "num_sgd_iters": 2} | options))


def tracker(root: Path) -> MLflowTracker:
    """Return a tracker to the database of a folder."""
    store = f"sqlite:///{root / 'mlruns' / 'mlflow.db'}"
    return MLflowTracker(tracking_uri=store, spool_dir=root / "mlruns" / "spool", interval_s=0.1)


def train(root: Path, *, tracked: bool, steps: int = STEPS, **options: Any) -> None:
    """Begin a run, with further options of its config, or go on with one; write down what came out."""
    made = tracker(root) if tracked else NullTracker()
    folder = root / "checkpoints"
    try:
        trainer = Trainer.resume(folder, auto=True, tracker=made)
        trainer.run(progress="none")
    except CheckpointError:
        trainer = begin(folder, made, steps, **options)
    (root / "result.json").write_text(json.dumps({"digest": digest(trainer), "counters": trainer.state}))


def begin(folder: Path, made: Any, steps: int = STEPS, **options: Any) -> Trainer:
    """Train from the beginning."""
    checkpoints = Checkpoints(folder, every_steps=7, best="eval/returns/mean")
    trainer = Trainer(config(**options).build(CartPole), tracker=made, num_eval_envs=2, checkpoints=checkpoints)
    conditions = [HitsUpperBound("algorithm/steps", steps), Plateau("returns/mean", patience=10_000)]
    trainer.run(steps_per_eval=10, stop_conditions=conditions, progress="none")
    return trainer


def digest(trainer: Trainer) -> str:
    """Return a digest of the weights and the optimizer's moments."""
    state = trainer.algorithm.state_dict()
    tensors = tensors_in([state["policy"], state["optimizer"]])
    return hashlib.sha256(b"".join(tensor.numpy().tobytes() for tensor in tensors.values())).hexdigest()


def child(function: Callable[[], None]) -> int:
    """Fork a child that does something and ends; return its process ID."""
    sys.stdout.flush()
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        warnings.simplefilter("ignore")
        function()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def ended(pid: int) -> int:
    """Wait for a child; return its exit code, negative for a signal."""
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def rows(root: Path) -> tuple[dict[tuple[str, int], float], int]:
    """Return what the database has of all runs by name and step, and how many rows are there twice."""
    with contextlib.closing(sqlite3.connect(root / "mlruns" / "mlflow.db")) as database:
        found = database.execute("SELECT key, step, value FROM metrics").fetchall()
    unique = {(key, step): value for key, step, value in found}
    return unique, len(found) - len(unique)


def statuses(root: Path) -> list[str]:
    """Return the status of each run that has rows."""
    with contextlib.closing(sqlite3.connect(root / "mlruns" / "mlflow.db")) as database:
        query = "SELECT status FROM runs WHERE run_uuid IN (SELECT DISTINCT run_uuid FROM metrics)"
        return [status for (status,) in database.execute(query)]


@contextlib.contextmanager
def scratch(template: Path | None = None) -> Iterator[Path]:
    """Make a folder for one try, with a fresh database if there is a template, and remove it."""
    with tempfile.TemporaryDirectory(prefix="rl8x-faults-") as name:
        root = Path(name)
        if template is not None:
            (root / "mlruns").mkdir()
            shutil.copy(template, root / "mlruns" / "mlflow.db")
        yield root


@contextlib.contextmanager
def database_template() -> Iterator[Path]:
    """Give an empty database, which is made once: MLflow needs seconds for that."""
    yield _made_template()


@functools.cache
def _made_template() -> Path:
    """Make it in this process, so that what MLflow imports and prepares at its first use is there in every child."""
    folder = tempfile.mkdtemp(prefix="rl8x-faults-template-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    database = Path(folder) / "mlruns" / "mlflow.db"
    database.parent.mkdir()
    logging.getLogger("mlflow.store.db.utils").setLevel(logging.WARNING)
    store = MLflowStore(Location(f"sqlite:///{database}", database, database.parent / "artifacts"))
    run_id = store.create_run(NewRun("template", "rl8x", None, None, 1))
    store.set_tags(run_id, {"tag": "value"})
    store.log_params(run_id, {"param": "value"})
    store.log_points(run_id, [Point("metric", 1.0, 1, 1)])
    store.set_status(run_id, "RUNNING", None)
    store.run_name(run_id)
    store.log_text(run_id, "text", "text.txt")
    with contextlib.closing(sqlite3.connect(database)) as connection:
        for table in ("metrics", "latest_metrics", "params", "tags", "runs"):
            connection.execute(f"DELETE FROM {table}")
        connection.execute("DELETE FROM experiments WHERE name = 'rl8x'")  # its artifacts have a place of their own
        connection.commit()
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    return database
