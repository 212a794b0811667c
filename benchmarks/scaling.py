"""Measure weak scaling: the overhead of several ranks, each with as many copies as one process alone.

    python -m benchmarks.scaling                          # two gloo ranks, one thread each, on the CPU
    python -m benchmarks.scaling --ranks 1 2 4 8 --device cuda --work 8192 256 --output scaling.json

One process without torchrun, as many as ranks that know nothing of each other, and launches of each number of ranks
are there from the beginning, and take turns of a few steps, so that all share what else the machine does. In each round
the median step of each is compared with that of the process without torchrun, and with that of as many processes at the
same time, which is what being ranks costs; what is shown is the median over rounds.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, Self

from benchmarks.results import RESULTS, Row, about, save, table

WORKS: Final = ((256, 64), (1024, 256))  # copies of the environment, units of a layer
ALONE: Final = 0  # the number of ranks of a process that torchrun has not started


def train(path: str, num_envs: int, width: int, settings: Mapping[str, Any]) -> None:
    """Train as one rank, so many steps at each turn; rank 0 is told of turns, and tells how long steps took."""
    from rl8x import NullTracker, PPOConfig, Trainer
    from rl8x.distributed import ranks
    from rl8x.envs import CartPole

    device, rows = settings["device"], num_envs * settings["horizon"]
    sizes = {"num_envs": num_envs, "sgd_minibatch_size": rows // 4, "model_config": {"hidden_sizes": [width, width]}}
    given = {name: settings[name] for name in ("horizon", "device", "execution")}
    config = PPOConfig.rl8(**sizes, **given, num_sgd_iters=4, num_threads=1 if device == "cpu" else None, seed=0)
    trainer = Trainer(config.build(CartPole), tracker=NullTracker(), eval_env=False, checkpoints=False)
    turns, answers = Path(f"{path}.turns"), Path(f"{path}.answers")
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
    """Ranks that wait for their turn, told by pipes with names in a folder."""

    def __init__(self, count: int, path: Path, asked: str) -> None:
        self.path = path
        for kind in ("turns", "answers"):
            os.mkfifo(f"{self.path}.{kind}")
        python = [sys.executable]
        if count != ALONE:
            python += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={count}"]
        # Those that are not at turn wait for their first.
        environment = {"OMP_NUM_THREADS": "1", **os.environ, "RL8X_RANK_TIMEOUT_S": "3600"}
        command = [*python, "-m", "benchmarks.scaling", "--child", str(self.path), asked]
        self.process = subprocess.Popen(command, env=environment)

    def begin(self, steps: int) -> None:
        """Have some steps made."""
        Path(f"{self.path}.turns").write_text(str(steps))

    def answer(self) -> list[float]:
        """Return the median seconds of one of the steps, and those of the processor."""
        return json.loads(Path(f"{self.path}.answers").read_text())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        """Let the ranks end, or end them where something failed."""
        if kind is None:
            self.begin(0)
        else:
            self.process.terminate()
        self.process.wait()


def measure(counts: list[int], steps: int, rounds: int, asked: str) -> dict[str, list[tuple[float, float]]]:
    """Return what each measured in each round, by its name; of several processes the slower, at whose pace ranks go.

    Turns are taken by a process alone, and for each number of ranks by a launch, and by as many processes that know
    nothing of each other.
    """
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:

        def launched(count: int, name: str) -> Launch:
            return stack.enter_context(Launch(count, Path(folder) / name, asked))

        alone = [launched(ALONE, f"alone{i}") for i in range(max(counts))]
        made = {"1 process": alone[:1]}
        for count in counts:
            if count > 1:
                made[f"{count} processes"] = alone[:count]
            made[f"{count} rank{'s' * (count > 1)}"] = [launched(count, f"ranks{count}")]
        found: dict[str, list[tuple[float, float]]] = {name: [] for name in made}
        names = list(made)
        for number in range(-1, rounds):  # the first to warm up: programs are compiled, memory is taken
            # Each comes first as often as the others.
            for name in names[number % len(names) :] + names[: number % len(names)]:
                for launch in made[name]:
                    launch.begin(steps)
                seconds, own = zip(*[launch.answer() for launch in made[name]], strict=True)
                found[name] += [(max(seconds), statistics.mean(own))] * (number >= 0)
    return found


def summarised(found: dict[str, list[tuple[float, float]]]) -> list[Row]:
    """Return a row for each that took turns, given the seconds of a step, and those of the processor, of each round."""
    rows, alone = [], found["1 process"]
    for name, rounds in found.items():
        beside = found.get(f"{name.split()[0]} processes", alone)
        step_ms, processor_ms = (round(1e3 * statistics.median(each), 2) for each in zip(*rounds, strict=True))
        costs = (
            statistics.median(its[0] / other[0] for its, other in zip(rounds, others, strict=True)) - 1.0
            for others in (alone, beside)
        )
        cost, cost_beside = (round(cost, 4) for cost in costs)
        times = {"what": name, "step_ms": step_ms, "processor_ms": processor_ms}
        rows.append({**times, "cost": cost, "cost_beside_as_many_processes": cost_beside})
    return rows


def report(document: Row) -> str:
    """Lay a measurement out."""
    lines = []
    for work in document["works"]:
        num_envs, width = work["work"]
        for row in work["rows"]:
            costs = [f"{row['cost']:+.1%}", f"{row['cost_beside_as_many_processes']:+.1%}"]
            costs = [cost if float(cost.strip("%+")) or "rank" in row["what"] else "" for cost in costs]
            times = [f"{row['step_ms']:.1f}", f"{row['processor_ms']:.1f}"]
            lines.append([f"{num_envs:,} copies, {width} units: {row['what']}", *times, *costs])
    return table(["", "a step, ms", "of the processor, ms", "over one process", "over as many processes"], lines)


def main(arguments: list[str] | None = None) -> None:
    """Measure, print a table, and write JSON where asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--ranks", type=int, nargs="+", default=[1, 2])
    add("--device", default="cpu", choices=["cpu", "cuda"])
    add("--execution", default="eager", choices=["eager", "compile", "graph", "auto"])
    units = "copies of the environment of each rank, and units of its two layers; may be given several times"
    add("--work", type=int, nargs=2, action="append", metavar=("COPIES", "UNITS"), help=units)
    add("--horizon", type=int, default=32)
    add("--steps", type=int, default=5, help="steps of a turn (default: %(default)s)")
    add("--rounds", type=int, default=20, help="turns of each number of ranks (default: %(default)s)")
    add("--output", type=Path, default=RESULTS / "scaling.json", help="where the results go as JSON")
    add("--child", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.child:
        path, asked = options.child
        train(path, *json.loads(asked))
        return
    settings = {name: value for name, value in vars(options).items() if name not in ("output", "child", "work")}
    works = []
    for work in options.work or WORKS:
        found = measure(options.ranks, options.steps, options.rounds, json.dumps([*work, settings]))
        works.append({"work": work, "rows": summarised(found), "rounds": found})
    document = {**about("rl8x", "torch"), "settings": settings, "works": works}
    print(report(document))
    save(options.output, document)


if __name__ == "__main__":
    main()
