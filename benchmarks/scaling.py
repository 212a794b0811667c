"""Weak scaling: what a rank costs beside others, each with as many copies as one alone.

    python -m benchmarks.scaling                          # two gloo ranks, one thread each, on the CPU
    python -m benchmarks.scaling --ranks 1 2 4 8 --device cuda --num-envs 8192 --output scaling.json

One process without torchrun and launches of each number of ranks are there from the beginning, and take turns of a
few steps, so that all share what else the machine does. In each round the median step of a launch is compared with that
of the process without torchrun; the cost is the median of that over rounds. Efficiency is the env steps a second of a
rank over those of that process. Seconds of the processor are rank 0's own: they say what it does, also where it waits.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).parent.parent
DEFAULT_OUT: Final = ROOT / "benchmarks" / "results" / "scaling.json"
PAGE: Final = ROOT / "docs" / "scaling.md"
MODULE: Final = "benchmarks.scaling"
ALONE: Final = 0  # the number of ranks of a process that torchrun has not started


def train(options: argparse.Namespace) -> None:
    """Train as one rank, so many steps at each turn; rank 0 is told of turns, and tells how long steps took."""
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
    turns, answers = Path(f"{options.child}.turns"), Path(f"{options.child}.answers")
    while count := ranks().first("a turn", int(turns.read_text()) if ranks().is_first else 0):
        seconds, own = [], []
        for _ in range(count):
            begin, processor = time.perf_counter(), time.process_time()
            trainer.step()
            seconds.append(time.perf_counter() - begin)
            own.append(time.process_time() - processor)
        if ranks().is_first:
            answers.write_text(json.dumps([statistics.median(seconds), statistics.median(own)]))


class Launch:
    """Ranks that wait for their turn, made of pipes with names in a folder."""

    def __init__(self, count: int, folder: Path, given: list[str]) -> None:
        self.path = folder / str(count)
        for kind in ("turns", "answers"):
            os.mkfifo(f"{self.path}.{kind}")
        python = [sys.executable]
        if count != ALONE:
            python += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={count}"]
        # Those that are not at turn wait for their first.
        environment = {"OMP_NUM_THREADS": "1", **os.environ, "RL8X_RANK_TIMEOUT_S": "3600"}
        self.process = subprocess.Popen([*python, "-m", MODULE, *given, "--child", str(self.path)], env=environment)

    def turn(self, steps: int) -> tuple[float, float]:
        """Have some steps made; returns the median seconds of one, and those of the processor."""
        Path(f"{self.path}.turns").write_text(str(steps))
        seconds, own = json.loads(Path(f"{self.path}.answers").read_text())
        return seconds, own

    def end(self) -> None:
        """End the ranks."""
        Path(f"{self.path}.turns").write_text("0")
        self.process.wait()


@contextlib.contextmanager
def launches(counts: list[int], given: list[str]) -> Iterator[dict[int, Launch]]:
    """Have launches of so many ranks for as long as the block takes."""
    with tempfile.TemporaryDirectory() as folder:
        made = {count: Launch(count, Path(folder), given) for count in counts}
        try:
            yield made
            for launch in made.values():
                launch.end()
        finally:
            for launch in made.values():
                launch.process.terminate()
                launch.process.wait()


def measure(counts: list[int], steps: int, rounds: int, given: list[str]) -> dict[int, list[tuple[float, float]]]:
    """Return what each launch measured in each round."""
    found: dict[int, list[tuple[float, float]]] = {count: [] for count in counts}
    with launches(counts, given) as made:
        for launch in made.values():  # warm: programs are compiled, memory is taken
            launch.turn(steps)
        for number in range(rounds):
            # Each comes first as often as the others.
            for count in counts[number % len(counts) :] + counts[: number % len(counts)]:
                found[count].append(made[count].turn(steps))
    return found


def summarised(found: dict[int, list[tuple[float, float]]], env_steps: int) -> list[dict[str, float]]:
    """Return a row for each number of ranks.

    Args:
        found: Seconds of a step, and those of the processor, of each round.
        env_steps: Those of a rank in a step.
    """
    rows = []
    for count, rounds in found.items():
        pairs = list(zip(rounds, found[ALONE], strict=True))
        cost, own = (statistics.median(its[i] / alone[i] for its, alone in pairs) for i in (0, 1))
        seconds, processor = (statistics.median(each[i] for each in rounds) for i in (0, 1))
        rows.append(
            {
                "ranks": count,
                "step_ms": round(1e3 * seconds, 3),
                "processor_ms": round(1e3 * processor, 3),
                "env_steps_per_s": round(max(count, 1) * env_steps / seconds),
                "cost": round(cost - 1.0, 4),
                "processor_cost": round(own - 1.0, 4),
                "efficiency": round(1.0 / cost, 4),
            }
        )
    return rows


def table(document: dict[str, Any]) -> str:
    """Return a measurement as the page shows it."""
    lines = [
        "| ranks | a step, ms | env steps/s, all | cost | of the processor's time | efficiency |",
        "|---|---|---|---|---|---|",
    ]
    for row in document["rows"]:
        name = row["ranks"] or "without torchrun"
        costs = "| | |" if row["ranks"] == ALONE else f"| {row['cost']:+.1%} | {row['processor_cost']:+.1%} |"
        efficiency = "" if row["ranks"] == ALONE else f" {row['efficiency']:.0%} "
        lines.append(f"| {name} | {row['step_ms']:.1f} | {row['env_steps_per_s']:,} {costs}{efficiency}|")
    return "\n".join(lines)


def publish(document: dict[str, Any]) -> None:
    """Put a measurement into the page."""
    before, rest = PAGE.read_text().split("<!-- scaling -->\n")
    after = rest.split("<!-- /scaling -->")[1]
    PAGE.write_text(f"{before}<!-- scaling -->\n{table(document)}\n<!-- /scaling -->{after}")


def main(arguments: list[str] | None = None) -> None:
    """Measure, print a table, and write JSON where asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--execution", default="eager", choices=["eager", "compile", "graph", "auto"])
    parser.add_argument("--num-envs", type=int, default=256)
    parser.add_argument("--horizon", type=int, default=32)
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--steps", type=int, default=5, help="Steps of a turn.")
    parser.add_argument("--rounds", type=int, default=20, help="Turns of each number of ranks.")
    parser.add_argument("--output", help="Where the results go as JSON.")
    parser.add_argument("--publish", action="store_true", help="Write the committed results, and the page's table.")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    given = sys.argv[1:] if arguments is None else arguments
    options = parser.parse_args(given)
    if options.child:
        train(options)
        return
    found = measure([ALONE, *options.ranks], options.steps, options.rounds, given)
    import torch

    device = torch.cuda.get_device_name() if options.device == "cuda" else platform.processor() or "CPU"
    machine = {"device": device, "cpus": os.cpu_count(), "load": os.getloadavg()[0], "system": platform.system()}
    hidden = ("output", "child", "publish")
    document = {
        "machine": machine,
        "versions": {"torch": torch.__version__, "python": platform.python_version()},
        "settings": {name: value for name, value in vars(options).items() if name not in hidden},
        "rows": summarised(found, options.num_envs * options.horizon),
        "rounds": {str(count): rounds for count, rounds in found.items()},
    }
    print(table(document))
    for path in [*filter(None, [options.output]), *[DEFAULT_OUT] * options.publish]:
        Path(path).write_text(json.dumps(document, indent=1) + "\n")
    if options.publish:
        publish(document)


if __name__ == "__main__":
    main()
