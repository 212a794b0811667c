"""Weak scaling: how fast a rank is beside others, each with as many copies as one alone.

    python -m benchmarks.scaling                          # two gloo ranks, one thread each, on the CPU
    python -m benchmarks.scaling --ranks 1 2 4 8 --device cuda --num-envs 8192 --output scaling.json

Launches take turns, so that all share what else the machine does; each takes the median of its steps. Efficiency is the
env steps a second of a rank among others over those of a rank alone. The first number of ranks is the measure.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

MODULE = "benchmarks.scaling"


def train(options: argparse.Namespace) -> None:
    """Train as one rank; rank 0 writes the seconds of each step."""
    import torch

    from rl8x import NullTracker, PPOConfig, Trainer
    from rl8x.distributed import ranks
    from rl8x.envs import CartPole

    config = PPOConfig(
        num_envs=options.num_envs,
        horizon=options.horizon,
        num_sgd_iters=4,
        sgd_minibatch_size=options.num_envs * options.horizon // 4,
        model_config={"hidden_sizes": [options.hidden, options.hidden]},
        device=options.device,
        execution=options.execution,
        num_threads=1 if options.device == "cpu" else None,
        seed=0,
    )
    trainer = Trainer(config.build(CartPole), tracker=NullTracker(), eval_env=False, checkpoints=False)
    rates = []
    for step in range(options.warm_up + options.steps):
        row = trainer.step()
        if step >= options.warm_up:
            rates.append(row["profiling/env_steps_per_s"])
    if ranks().is_first:
        device = torch.cuda.get_device_name() if options.device == "cuda" else platform.processor() or "CPU"
        found = {"rates": rates, "device": device, "torch": torch.__version__}
        Path(options.child).write_text(json.dumps(found))


def launch(count: int, options: argparse.Namespace, given: list[str]) -> dict[str, Any]:
    """Return what rank 0 of a launch of so many ranks wrote."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rank0.json"
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={count}"]
        environment = {"OMP_NUM_THREADS": "1", **os.environ}
        subprocess.run([*command, "-m", MODULE, *given, "--child", str(path)], check=True, env=environment)
        found: dict[str, Any] = json.loads(path.read_text())
    return found


def summarised(rates: dict[int, list[float]]) -> list[dict[str, float]]:
    """Return a row for each number of ranks: medians of all launches, and the efficiency against the first."""
    medians = {count: statistics.median(found) for count, found in rates.items()}
    first = next(iter(medians))
    return [
        {"ranks": count, "env_steps_per_s": rate, "efficiency": rate / count / (medians[first] / first)}
        for count, rate in medians.items()
    ]


def main(arguments: list[str] | None = None) -> None:
    """Measure, print a table, and write JSON where asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--execution", default="eager", choices=["eager", "compile", "graph", "auto"])
    parser.add_argument("--num-envs", type=int, default=256)
    parser.add_argument("--horizon", type=int, default=32)
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--steps", type=int, default=20, help="Steps that are timed in a launch.")
    parser.add_argument("--warm-up", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=3, help="Launches of each number of ranks, in turns.")
    parser.add_argument("--output", help="Where the results go as JSON.")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    given = sys.argv[1:] if arguments is None else arguments
    options = parser.parse_args(given)
    if options.child:
        train(options)
        return
    rates: dict[int, list[float]] = {count: [] for count in options.ranks}
    found: dict[str, Any] = {}
    for _ in range(options.rounds):
        for count in options.ranks:
            found = launch(count, options, given)
            rates[count].append(statistics.median(found["rates"]))
    rows = summarised(rates)
    print("ranks  env steps/s  efficiency")
    for row in rows:
        print(f"{row['ranks']:5.0f}  {row['env_steps_per_s']:11,.0f}  {row['efficiency']:9.1%}")
    if options.output:
        machine = {"device": found["device"], "cpus": os.cpu_count(), "system": platform.platform()}
        settings = {name: value for name, value in vars(options).items() if name not in ("output", "child")}
        versions = {"torch": found["torch"], "python": platform.python_version()}
        written = {"machine": machine, "versions": versions, "settings": settings, "medians": rates, "rows": rows}
        Path(options.output).write_text(json.dumps(written, indent=1) + "\n")


if __name__ == "__main__":
    main()
