"""Kill a study with -9 at random instants, go on with it, and compare it with one that nobody killed.

    python benchmarks/study_kills.py --kills 20 --jobs 2

Two trainings and two seeds of a few steps, tracked in an sqlite database of a temporary folder. Each kill hits the
process that drives the study; what it has started must end by itself. Expected: one parent, four children, each once
and finished; every metric has as many points as in the study that was not killed, and the tables are equal.
"""

from __future__ import annotations

import argparse
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
study.run(jobs=int(sys.argv[1]))
print("failed:", study.failed)
"""


def start(folder: Path, jobs: int) -> subprocess.Popen[bytes]:
    """Start the study in a session of its own."""
    return subprocess.Popen(
        [sys.executable, "-c", STUDY, str(jobs)], cwd=folder, start_new_session=True, stdout=subprocess.PIPE
    )


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
    import json

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
    return {"runs": found, "table": rows}


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
    return found + ["the tables differ"] * (killed["table"] != whole["table"])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    draw = random.Random(options.seed)
    with tempfile.TemporaryDirectory() as name:
        whole, killed = Path(name) / "whole", Path(name) / "killed"
        whole.mkdir()
        killed.mkdir()
        begin = time.monotonic()
        assert start(whole, options.jobs).wait() == 0
        seconds = time.monotonic() - begin
        print(f"the whole study took {seconds:.1f} s", flush=True)
        kills = orphans = 0
        while kills < options.kills:
            process = start(killed, options.jobs)
            instant = draw.uniform(0.1, seconds)
            try:
                process.wait(instant)
            except subprocess.TimeoutExpired:
                os.kill(process.pid, signal.SIGKILL)
                process.wait()
                kills += 1
                orphans += wait_for_orphans(process.pid)
                print(f"kill {kills} after {instant:.1f} s", flush=True)
            else:  # it was done: from its beginning, once more
                problems = differences(contents(killed), contents(whole))
                print(f"done after {kills} kills: {problems or 'as the whole one'}", flush=True)
                if problems:
                    return 1
                subprocess.run(["rm", "-rf", str(killed)], check=True)
                killed.mkdir()
        assert start(killed, options.jobs).wait() == 0
        problems = differences(contents(killed), contents(whole))
        print(f"{kills} kills: {problems or 'every child once, nothing lost'}; {orphans} processes outlived a kill")
        return 1 if problems or orphans else 0


if __name__ == "__main__":
    sys.exit(main())
