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
import itertools
import logging
import multiprocessing
import os
import shutil
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")

import torch
from tests.faults import disk, journals, kills, servers
from tests.faults.tries import Try, end_with_parent

from rl8x.tracking.location import Location
from rl8x.tracking.store import MLflowStore, NewRun, Point, ensure_database

# What a kind of fault does in a try, which returns how many there were; and how often by default.
FAULTS: dict[str, tuple[Callable[[Try], int], int]] = {
    "kill": (kills.kill, 1000),
    "kill compiled": (functools.partial(kills.kill, compiled=True), 50),
    "ranks": (kills.kill_ranks, 10),
    "disk": (disk.disk, 200),
    "http": (servers.broken_http, 200),
    "restarts": (servers.restarts, 10),
    "secrets": (servers.secrets, 60),
    "journals": (journals.synced, 7),
}
WORKERS = 2
COLUMNS = ("lost", "doubled", "wrong", "second runs")


def one(name: str, seed: int, template: Path) -> Counter[str]:
    """Do one try in a folder of its own and say what is wrong; returns how many faults there were, and what of each."""
    end_with_parent()
    with tempfile.TemporaryDirectory(prefix="rl8x-faults-", ignore_cleanup_errors=True) as folder:
        attempt, number = Try(Path(folder), name, seed, template), 1
        try:
            number = FAULTS[name][0](attempt)
            attempt.finish()
        except Exception:  # of the instrument
            attempt.note("instrument", traceback.format_exc())
    for why in attempt.why:
        print(f"{attempt.title}: {why:.1500}", flush=True)
    found = Counter({"tries": number})
    for what, count in attempt.wrong.items():
        found["lost" if what == "stuck" else what if what in COLUMNS else "wrong"] += count
    return found


@contextlib.contextmanager
def made_template() -> Iterator[Path]:
    """Make an empty database here: what MLflow imports and prepares at its first use is there in every process."""
    logging.getLogger("mlflow.store.db.utils").setLevel(logging.WARNING)
    with tempfile.TemporaryDirectory(prefix="rl8x-faults-template-", ignore_cleanup_errors=True) as folder:
        template = Path(folder) / "mlruns" / "mlflow.db"
        ensure_database(Location(f"sqlite:///{template}", template, template.parent / "artifacts"))
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


def items(names: list[str], tries: int | None, seed: int, *, endless: bool) -> Iterator[tuple[str, int]]:
    """Yield kinds and seeds: as many of each as it has, or more and more of each in turn."""
    for turn in itertools.count() if endless else [0]:
        for name in names:
            number = max(1, FAULTS[name][1] // 100) if endless else tries or FAULTS[name][1]
            yield from ((name, seed + n) for n in range(turn * number, (turn + 1) * number))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, help="how long; else each kind has a number of tries")
    parser.add_argument("--tries", type=int, help="how many of each kind")
    parser.add_argument("--only", nargs="+", choices=FAULTS, default=list(FAULTS))
    parser.add_argument("--seed", type=int, default=0, help="of the first try")
    options = parser.parse_args()
    torch.set_num_threads(1)
    os.nice = lambda increment: 0  # on a busy machine a shipper would take minutes
    counts = {name: Counter({"tries": 0}) for name in options.only}
    slots, begin = threading.Semaphore(WORKERS), time.monotonic()

    def count(future: concurrent.futures.Future[Counter[str]]) -> None:
        slots.release()
        counts[names[future]].update(future.result())

    names: dict[concurrent.futures.Future[Counter[str]], str] = {}
    fork = multiprocessing.get_context("fork")
    with made_template() as template, concurrent.futures.ProcessPoolExecutor(WORKERS, fork) as pool:
        for name, seed in items(options.only, options.tries, options.seed, endless=options.minutes is not None):
            slots.acquire()
            if options.minutes is not None and time.monotonic() - begin > 60 * options.minutes:
                break
            names[future := pool.submit(one, name, seed, template)] = name
            future.add_done_callback(count)
    for name, found in counts.items():
        columns = ", ".join(f"{found[what]} {what}" for what in COLUMNS)
        print(f"{name}: {found['tries']} tries, {columns}", flush=True)
    return int(any(found[what] for found in counts.values() for what in COLUMNS))


if __name__ == "__main__":
    sys.exit(main())
