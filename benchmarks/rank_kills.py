"""Kill random ranks of jobs of torchrun with -9 at random instants, and compare each job with one nobody killed.

    python -m benchmarks.rank_kills --kills 50

Two gloo ranks train PPO for some steps, tracked in an sqlite database of a temporary folder, under
`torchrun --max-restarts`. Whenever all ranks are there, one of them is killed at an instant drawn from as long as a
whole job takes, until the job ends by itself; then the next job begins. Expected: torchrun has ended or started all
ranks anew within the time-out, and in the end one run that is finished, with every metric's points, each once and with
the same values, and the same weights to the bit. The answer goes to `benchmarks/results/rank_kills.json`.
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
from typing import Any, Final

import psutil

from rl8x.tracking.journal import REMOVED, is_sent

JOB: Final = """
import hashlib
import sys

import torch

from rl8x.algorithms import PPOConfig
from rl8x.checkpoint import Checkpoints
from rl8x.distributed import ranks
from rl8x.envs import CartPole
from rl8x.tracking import MLflowTracker
from rl8x.trainers import Trainer

config = PPOConfig(
    num_envs=8,
    horizon=16,
    sgd_minibatch_size=64,
    num_sgd_iters=2,
    device="cpu",
    execution="eager",
    num_threads=1,
    normalize_observations=True,
    seed=5,
    model_config={"hidden_sizes": [16]},
)
trainer = Trainer(config.build(CartPole), tracker=MLflowTracker(), checkpoints=Checkpoints(every_steps=5))
trainer.run(max_steps=int(sys.argv[1]), steps_per_eval=20, progress="none")
if ranks().is_first:
    weights = torch.cat([tensor.double().reshape(-1) for tensor in trainer.algorithm.policy.state_dict().values()])
    with open("digest", "w") as file:
        file.write(hashlib.sha256(weights.numpy().tobytes()).hexdigest())
"""
NUM_RANKS: Final = 2
TIMEOUT_S: Final = 60
OWN: Final = ("profiling/", "memory/", "system/")  # times and memory, which no two runs have alike
OUT = Path(__file__).parent / "results" / "rank_kills.json"


def start(folder: Path, steps: int) -> subprocess.Popen[bytes]:
    """Start a job in a folder; what it prints goes to `output` there."""
    folder.mkdir()
    (folder / "job.py").write_text(JOB)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={NUM_RANKS}"]
    with (folder / "output").open("wb") as output:
        return subprocess.Popen(
            [*command, "--max-restarts=999", "job.py", str(steps)],
            cwd=folder,
            env={
                **os.environ,
                "OMP_NUM_THREADS": "1",
                "GLOO_SOCKET_IFNAME": "lo",
                "RL8X_RANK_TIMEOUT_S": f"{TIMEOUT_S}",
            },
            stdout=output,
            stderr=subprocess.STDOUT,
        )


def ranks_of(torchrun: int) -> dict[int, int]:
    """Return the process IDs of the ranks that torchrun has, by rank, without those that have ended."""
    found = {}
    for child in psutil.Process(torchrun).children():
        try:
            rank = child.environ().get("RANK")
            if rank is not None and child.status() != psutil.STATUS_ZOMBIE:
                found[int(rank)] = child.pid
        except psutil.Error:  # it ended meanwhile
            continue
    return found


def wait_for_ranks(job: subprocess.Popen[bytes], before: set[int], patience_s: float) -> dict[int, int]:
    """Wait until the job has ended or has all ranks, none of which it had before; returns them.

    Raises:
        TimeoutError: If that takes longer than the patience.
    """
    deadline = time.monotonic() + patience_s
    while job.poll() is None:
        found = ranks_of(job.pid)
        if len(found) == NUM_RANKS and not before & {*found.values()}:
            return found
        if time.monotonic() > deadline:
            raise TimeoutError
        time.sleep(0.05)
    return {}


def kill_until_done(folder: Path, steps: int, seconds: float, left: int, draw: random.Random) -> list[dict[str, Any]]:
    """Kill ranks of a job until it ends, or as often as is left to do; returns what each kill led to."""
    job, kills, before = start(folder, steps), [], set[int]()
    found = wait_for_ranks(job, before, 120)
    while found and len(kills) < left:
        instant, rank = draw.uniform(0.0, seconds), draw.randrange(NUM_RANKS)
        try:
            job.wait(instant)
            break
        except subprocess.TimeoutExpired:
            if ranks_of(job.pid) != found:  # one of them has come to its end
                break
        os.kill(found[rank], signal.SIGKILL)
        began = time.monotonic()
        kill: dict[str, Any] = {"rank": rank, "after_s": round(instant, 1)}
        try:
            found = wait_for_ranks(job, {*found.values()}, TIMEOUT_S)
            kill["led_to"] = "restart" if found else f"end with {job.returncode}"
        except TimeoutError:
            kill["led_to"] = "hang"
        kill["within_s"] = round(time.monotonic() - began, 1)
        kills.append(kill)
        print(kill, flush=True)
        if kill["led_to"] == "hang":
            break
    try:
        job.wait(10 * seconds + TIMEOUT_S)
    except subprocess.TimeoutExpired:
        job.terminate()
        job.wait()
    return kills


def contents(folder: Path) -> dict[str, Any]:
    """Read all that a job came to: its runs with every point, its weights, and what it left."""
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{folder}/mlruns/mlflow.db")
    runs = []
    for run in client.search_runs([each.experiment_id for each in client.search_experiments()]):
        points = {
            name: [(point.step, None if name.startswith(OWN) else point.value) for point in history]
            for name in run.data.metrics
            if (history := client.get_metric_history(run.info.run_id, name))
        }
        runs.append((run.info.status, points))
    digest = folder / "digest"
    # What is left of removing one that had arrived is no spool; `rl8x sync` removes it.
    there = [path.name for path in (folder / "mlruns/spool").iterdir() if not is_sent(path)]
    spools = [name for name in there if not (name.startswith(".") and name.endswith(REMOVED))]
    return {"runs": runs, "digest": digest.read_text() if digest.exists() else "none", "spools": spools}


def differences(killed: dict[str, Any], whole: dict[str, Any]) -> list[str]:
    """List in what a job whose ranks were killed differs from one that nobody killed."""
    found = [f"the spool {name} is left" for name in killed["spools"]]
    found += ["the weights differ"] * (killed["digest"] != whole["digest"])
    if len(killed["runs"]) != 1:
        return [*found, f"{len(killed['runs'])} runs: {[(status, len(points)) for status, points in killed['runs']]}"]
    ((status, points),), ((_, expected),) = killed["runs"], whole["runs"]
    found += [f"the run is {status}"] * (status != "FINISHED")
    for name in sorted(points.keys() | expected.keys()):
        mine, theirs = points.get(name, []), expected.get(name, [])
        if mine != theirs:
            steps = [step for step, _ in mine]
            how = "other values" if steps == [step for step, _ in theirs] else f"steps {steps}"
            found.append(f"{name}: {how}")
    return found


def measure(num_kills: int, steps: int, seed: int) -> dict[str, Any]:
    """Kill ranks of one job after the other, and compare each job with one that nobody killed."""
    draw, kills, problems, jobs = random.Random(seed), list[dict[str, Any]](), list[str](), 0
    with tempfile.TemporaryDirectory() as name:
        begin = time.monotonic()
        assert start(Path(name) / "whole", steps).wait() == 0, (Path(name) / "whole/output").read_text()
        seconds = time.monotonic() - begin
        print(f"the whole job took {seconds:.1f} s", flush=True)
        whole = contents(Path(name) / "whole")
        while len(kills) < num_kills:
            folder, begin = Path(name) / f"job{jobs}", time.monotonic()
            more = kill_until_done(folder, steps, seconds, num_kills - len(kills), draw)
            if not more:  # the machine has become faster
                seconds = min(seconds, time.monotonic() - begin)
            found = differences(contents(folder), whole)
            print(f"job {jobs}, {len(more)} kills: {found or 'as the whole one'}", flush=True)
            if found:
                print((folder / "output").read_text()[-4000:], flush=True)
            problems += [f"job {jobs}: {each}" for each in found]
            kills, jobs = kills + more, jobs + 1
    led_to = [kill["led_to"] for kill in kills]
    return {
        "ranks": NUM_RANKS,
        "time_out_s": TIMEOUT_S,
        "kills": len(kills),
        "kills_of_rank_0": sum(kill["rank"] == 0 for kill in kills),
        "jobs": jobs,
        "restarts": led_to.count("restart"),
        "clean_ends": sum(each.startswith("end") for each in led_to),
        "hangs": led_to.count("hang"),
        "longest_until_restart_s": max(kill["within_s"] for kill in kills),
        "rows_of_a_job": steps,
        "differences": problems,
    }


def sentence(found: dict[str, Any]) -> str:
    """Return an answer as the page shows it."""
    kills, longest = found["kills"], found["longest_until_restart_s"]
    return (
        "Measured (`benchmarks/rank_kills.py`, [results](../benchmarks/results/rank_kills.json)): of "
        f"{kills} kills with -9\nof one of {found['ranks']} ranks at random instants {found['restarts']} led to a "
        f"restart and {found['clean_ends']} to an end, all within {longest:.0f} s, and {found['hangs']} to a hang.\n"
        f"Of the {found['jobs']} jobs {len(found['differences'])} had another row, point or weight than one that "
        "nobody killed."
    )


def main() -> int:
    """Kill, print and write the answer; 1 where something is not as expected."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=OUT)
    options = parser.parse_args()
    found = measure(options.kills, options.steps, options.seed)
    print(json.dumps(found))
    options.out.write_text(json.dumps(found, indent=1) + "\n")
    return 1 if found["differences"] or found["hangs"] else 0


if __name__ == "__main__":
    sys.exit(main())
