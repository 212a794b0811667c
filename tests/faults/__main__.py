"""Breaks runs at random until the time is over, and counts what was lost, there twice, or wrong.

    make faults MINUTES=60                                  # all kinds in turn
    python -m tests.faults --only kill --tries 100          # so many of one kind
    python -m tests.faults --only disk --tries 1 --seed 17  # one again, which was told of

What is wrong is printed as it comes, with its seed; a line of counts for each kind at the end. The exit status is 1 if
anything was wrong.
"""

import argparse
import concurrent.futures
import contextlib
import functools
import logging
import multiprocessing
import os
import shutil
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")

import torch
from tests.faults import disk, journals, kills, secrets, servers
from tests.faults.tries import Try, end_with_parent

from rl8x.tracking.location import Location
from rl8x.tracking.store import MLflowStore, NewRun, Point

# What a kind of fault does in a try, which returns how many there were; and how often by default.
FAULTS: dict[str, tuple[Callable[[Try], int], int]] = {
    "kill": (kills.kill, 1000),
    "kill compiled": (functools.partial(kills.kill, compiled=True), 50),
    "ranks": (kills.kill_ranks, 10),
    "disk": (disk.disk, 200),
    "http": (servers.broken_http, 200),
    "restarts": (servers.restarts, 10),
    "secrets": (secrets.secrets, 60),
    "journals": (journals.synced, 7),
}
COLUMNS = ("lost", "doubled", "wrong", "second run")


def one(name: str, seed: int, template: Path) -> dict[str, Any]:
    """Do one try in a folder of its own; returns how many faults there were, and all that is wrong."""
    with tempfile.TemporaryDirectory(prefix="rl8x-faults-", ignore_cleanup_errors=True) as folder:
        attempt = Try(Path(folder), name, seed, template)
        try:
            number = FAULTS[name][0](attempt)
            attempt.finish()
        except Exception:  # of the instrument
            number = 1
            attempt.note("instrument", traceback.format_exc())
    wrong = Counter({what if what in COLUMNS else "wrong": 0 for what in attempt.wrong})
    for what, count in attempt.wrong.items():
        wrong["lost" if what == "stuck" else what if what in COLUMNS else "wrong"] += count
    return {"kind": name, "tries": number, **wrong, "why": [f"{attempt.title}: {why:.1500}" for why in attempt.why]}


@contextlib.contextmanager
def made_template() -> Iterator[Path]:
    """Make an empty database here: what MLflow imports and prepares at its first use is there in every process."""
    logging.getLogger("mlflow.store.db.utils").setLevel(logging.WARNING)
    with tempfile.TemporaryDirectory(prefix="rl8x-faults-template-", ignore_cleanup_errors=True) as folder:
        template = Path(folder) / "mlruns" / "mlflow.db"
        store = MLflowStore(Location(f"sqlite:///{template}", template, template.parent / "artifacts"))
        used = template.with_name("used.db")
        shutil.copy(template, used)
        store = MLflowStore(Location(f"sqlite:///{used}", used, template.parent / "artifacts"))
        run_id = store.create_run(NewRun("template", "rl8x", None, None, 1))
        store.set_tags(run_id, {"tag": "value"})
        store.log_params(run_id, {"param": "value"})
        store.log_points(run_id, [Point("metric", 1.0, 1, 1)])
        store.log_text(run_id, "text", "text.txt")
        store.set_status(run_id, "FINISHED", 2)
        yield template


def campaign(names: list[str], tries: int | None, minutes: float | None, seed: int, workers: int) -> list[Counter[str]]:
    """Do tries of kinds, in turn while there is time, or as many as each has; returns the counts of each kind."""
    counts = [Counter({"tries": 0}) for _ in names]
    end = None if minutes is None else time.monotonic() + 60 * minutes
    if end is None:
        todo = ((name, seed + n) for name in names for n in range(FAULTS[name][1] if tries is None else tries))
    else:
        # Kills of one run follow each other.
        todo = (
            (name, seed + n)
            for begin in range(0, 10**9, kills.KILLS)
            for name in names
            for n in range(begin, begin + kills.KILLS)
        )
    fork = multiprocessing.get_context("fork")
    with (
        made_template() as template,
        concurrent.futures.ProcessPoolExecutor(workers, mp_context=fork, initializer=end_with_parent) as pool,
    ):
        pending: set[concurrent.futures.Future[dict[str, Any]]] = set()
        while pending or todo:
            while todo and len(pending) < workers:
                item = next(todo, None) if end is None or time.monotonic() < end else None
                if item is None:
                    todo = None
                    break
                pending.add(pool.submit(one, *item, template))
            done, pending = concurrent.futures.wait(pending, return_when=concurrent.futures.FIRST_COMPLETED)
            for result in (future.result() for future in done):
                for why in result.pop("why"):
                    print(why, flush=True)
                counts[names.index(result.pop("kind"))].update(result)
    return counts


def main() -> int:
    """Break runs, and print the counts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, help="how long; else each kind has a number of tries")
    parser.add_argument("--tries", type=int, help="how many of each kind")
    parser.add_argument("--only", nargs="+", choices=FAULTS, default=list(FAULTS))
    parser.add_argument("--seed", type=int, default=0, help="of the first try")
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(1)
    os.nice = lambda increment: 0  # on a busy machine a shipper would take minutes
    began = time.monotonic()
    counts = campaign(options.only, options.tries, options.minutes, options.seed, options.workers)
    for name, count in zip(options.only, counts, strict=True):
        rest = ", ".join(
            f"{count[what]} {what}s" if what == "second run" else f"{count[what]} {what}" for what in COLUMNS
        )
        print(f"{name}: {count['tries']} tries, {rest}", flush=True)
    print(f"{time.monotonic() - began:.0f} s", file=sys.stderr)
    return int(any(count[what] for count in counts for what in COLUMNS))


if __name__ == "__main__":
    sys.exit(main())
