"""Kill a study with -9 at random instants and at chosen ones, go on with it, and compare it with one nobody killed.

    python benchmarks/study_kills.py --kills 20 --jobs 2

Two trainings and two seeds of a few steps, tracked in an sqlite database of a temporary folder. Each kill hits the
process that drives the study; what it has started must end by itself. Expected: one parent, four children, each once
and finished; every metric has as many points as in the study that was not killed, no spool is left, and the tables are
equal. The answer goes to `benchmarks/results/study_kills.json`, one entry for each number of jobs.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

STUDY = """
import importlib
import os
import signal
import sys

from rl8x.randomization import Uniform
from rl8x.studies import Study

study = Study(
    train={"fixed": {"length": 0.5}, "wide": {"length": Uniform(0.25, 1.0)}},
    test={"length": [0.25, 0.5, 2.0]},
    seeds=2,
    env="CartPole",
    max_steps=30,
    evaluate_at=10,
    episodes=4,
    progress="none",
    checkpoints={"every_steps": 4},
    algorithm_config={"num_envs": 16, "horizon": 16, "device": "cpu", "model_config": {"hidden_sizes": [16]}},
)
if len(sys.argv) > 2:  # where to be killed: module:name, before or after its n-th call
    path, when, number = sys.argv[2:]
    module, _, name = path.partition(":")
    *owners, last = name.split(".")
    owner = importlib.import_module(module)
    for each in owners:
        owner = getattr(owner, each)
    whole, calls = getattr(owner, last), []

    def killed(*args, **kwargs):
        calls.append(name)
        is_now = len(calls) == int(number)
        if is_now and when == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        returned = whole(*args, **kwargs)
        if is_now:
            os.kill(os.getpid(), signal.SIGKILL)
        return returned

    setattr(owner, last, killed)
study.run(jobs=int(sys.argv[1]))
print("failed:", study.failed)
"""
# Where a study is killed on purpose: a training that is over and has not said so, and the parent's end.
IN_TRAINING = (
    ("rl8x.studies.training:_TrainingJob._conclude", "before", 1),
    ("rl8x.studies.training:_TrainingJob._conclude", "after", 2),
    ("rl8x.studies.training:log_table", "after", 3),
)
IN_DRIVER = (
    ("rl8x.studies.study:Study._collect", "before", 1),
    ("rl8x.studies.table:write", "after", 2),
    ("rl8x.studies.parent:log_table", "before", 1),
    ("rl8x.studies.parent:ParentRun.log_results", "after", 1),
    ("rl8x.studies.parent:ParentRun.finish", "after", 1),
)
OUT = Path(__file__).parent / "results" / "study_kills.json"


def start(folder: Path, jobs: int, *at: object) -> subprocess.Popen[bytes]:
    """Start the study in a session of its own; `at` is where it is to be killed."""
    folder.mkdir(exist_ok=True)
    command = [sys.executable, "-c", STUDY, str(jobs), *map(str, at)]
    return subprocess.Popen(command, cwd=folder, start_new_session=True, stdout=subprocess.DEVNULL)


def wait_for_orphans(session: int, patience_s: float = 30.0) -> int:
    """Wait until what a killed study has started is gone; returns how many processes were left in the end."""
    deadline = time.monotonic() + patience_s
    while True:
        left = []
        for process in psutil.process_iter():
            try:
                if os.getsid(process.pid) == session and process.status() != psutil.STATUS_ZOMBIE:
                    left.append(process)
            except (OSError, psutil.Error):
                continue
        if not left or time.monotonic() > deadline:
            for process in left:
                process.kill()
            return len(left)
        time.sleep(0.1)


def contents(folder: Path) -> dict[str, Any]:
    """Read all that a study came to: its runs, their points, and its table."""
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{folder}/mlruns/mlflow.db")
    found: dict[str, Any] = {}
    runs = client.search_runs([each.experiment_id for each in client.search_experiments()])
    for run in runs:
        name = str(run.info.run_name)
        points = {key: len(client.get_metric_history(run.info.run_id, key)) for key in run.data.metrics}
        found.setdefault(name, []).append((run.info.status, points))
    table = json.loads((folder / "mlruns/studies/study/evaluations.json").read_text())
    column = table["columns"].index("run_id")
    rows = [[value for index, value in enumerate(row) if index != column] for row in table["data"]]
    from rl8x.tracking.journal import is_sent

    left = [path.name for path in (folder / "mlruns/spool").iterdir() if not is_sent(path)]
    return {"runs": found, "table": rows, "spools": left}


def differences(killed: dict[str, Any], whole: dict[str, Any]) -> list[str]:
    """List in what a killed study differs from one that was not."""
    found = []
    for name in killed["runs"].keys() | whole["runs"].keys():
        mine, theirs = killed["runs"].get(name, []), whole["runs"].get(name, [])
        if len(mine) != len(theirs):
            found.append(f"{name}: {len(mine)} runs, not {len(theirs)}")
        elif mine[0][0] != theirs[0][0]:
            found.append(f"{name}: {mine[0][0]}, not {theirs[0][0]}")
        else:
            points, expected = mine[0][1], theirs[0][1]
            wrong = [key for key in points.keys() | expected.keys() if points.get(key) != expected.get(key)]
            found += [f"{name}: {key}: {points.get(key)} points, not {expected.get(key)}" for key in sorted(wrong)[:5]]
    found += [f"the spool {name} is left" for name in killed["spools"]]
    return found + ["the tables differ"] * (killed["table"] != whole["table"])


def kill_at_points(folder: Path, jobs: int) -> tuple[int, int]:
    """Kill one study at all chosen points, one after the other; returns how often it was killed, and the orphans."""
    kills = orphans = 0
    for at in IN_TRAINING * (jobs == 1) + IN_DRIVER:
        process = start(folder, jobs, *at)
        assert process.wait() == -signal.SIGKILL, f"{at} was not reached"
        orphans += wait_for_orphans(process.pid)
        kills += 1
        print(f"killed {at[1]} call {at[2]} of {at[0]}", flush=True)
    return kills, orphans


def kill_at_random(folder: Path, jobs: int, seconds: float, left: int, draw: random.Random) -> tuple[int, int]:
    """Kill one study at random instants until it is done, or as often as is left to do."""
    kills = orphans = 0
    while kills < left:
        process = start(folder, jobs)
        try:
            process.wait(instant := draw.uniform(0.1, seconds))
            break
        except subprocess.TimeoutExpired:
            os.kill(process.pid, signal.SIGKILL)
            process.wait()
            kills += 1
            orphans += wait_for_orphans(process.pid)
            print(f"killed after {instant:.1f} s", flush=True)
    return kills, orphans


def measure(jobs: int, num_kills: int, seed: int) -> dict[str, Any]:
    """Kill studies, each until it is done, and compare each with one that was not killed."""
    draw, problems, at_random, orphans, studies = random.Random(seed), [], 0, 0, 1
    with tempfile.TemporaryDirectory() as name:
        begin = time.monotonic()
        assert start(Path(name) / "whole", jobs).wait() == 0
        seconds = time.monotonic() - begin
        print(f"the whole study took {seconds:.1f} s", flush=True)
        whole = contents(Path(name) / "whole")
        at_points, orphans = kill_at_points(Path(name) / "study0", jobs)
        while True:
            folder = Path(name) / f"study{studies - 1}"
            process = start(folder, jobs)
            assert process.wait() == 0
            found = differences(contents(folder), whole)
            print(f"study {studies}: {found or 'as the whole one'}", flush=True)
            problems += found
            if at_random >= num_kills:
                break
            studies += 1
            more = kill_at_random(Path(name) / f"study{studies - 1}", jobs, seconds, num_kills - at_random, draw)
            at_random, orphans = at_random + more[0], orphans + more[1]
    return {
        "jobs": jobs,
        "random_kills": at_random,
        "kills_at_points": at_points,
        "studies": studies,
        "processes_that_outlived_a_kill": orphans,
        "differences": problems,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=OUT)
    options = parser.parse_args()
    row = measure(options.jobs, options.kills, options.seed)
    print(json.dumps(row))
    rows = json.loads(options.out.read_text()) if options.out.exists() else []
    rows = sorted([each for each in rows if each["jobs"] != options.jobs] + [row], key=lambda each: each["jobs"])
    options.out.write_text("[\n" + ",\n".join(map(json.dumps, rows)) + "\n]\n")
    return 1 if row["differences"] or row["processes_that_outlived_a_kill"] else 0


if __name__ == "__main__":
    sys.exit(main())
