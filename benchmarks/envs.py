"""Compare the speed of built-in environments with Gymnasium's of the same name, stepped as in collecting.

    python -m benchmarks.envs [--num-envs 4096] [--rounds 7] [--out envs.json]

Each round times every kind once, in turn, so that what else the machine does meets all of them; the rates are medians
over the rounds. `sync` is Gymnasium's environment through the adapter, a copy at a time; `vector` is its form in numpy
for many copies, which only CartPole has. The exit code is 1 if a built-in environment is less than ten times as fast as
`sync`.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.results import RESULTS, machine, save
from benchmarks.tables import Row, table
from rl8x.envs import Acrobot, CartPole, Env, GymnasiumEnv, MountainCar, Pendulum

BOUND = 10.0
BUILTIN: dict[str, type[Env]] = {
    "CartPole-v1": CartPole,
    "Pendulum-v1": Pendulum,
    "MountainCar-v0": MountainCar,
    "Acrobot-v1": Acrobot,
}
VECTORISED = ("CartPole-v1",)
# Steps of a round: about as long for each kind, so that a disturbance weighs the same.
STEPS = {"built-in": 50, "sync": 2, "vector": 20}


class Stepper:
    """Steps an environment, which is reset here, with as many actions as a round has, drawn once."""

    def __init__(self, env: Env, steps: int) -> None:
        self.env, self.steps = env, steps
        env.reset(seed=0)
        self.carry = env.carry
        self.actions = [torch.as_tensor(env.action_space.sample()) for _ in range(steps)]

    def rate(self) -> float:
        """Run a round and return transitions a second."""
        begin, valid = time.perf_counter(), []
        noise = self.env.noise(self.steps)
        assert self.carry is not None
        for action, drawn in zip(self.actions, noise, strict=True):
            self.carry, step = self.env.advance(self.carry, action, drawn)
            valid.append(step.valid)
        seconds = time.perf_counter() - begin
        # A copy that only resets in a step takes none.
        return sum(self.env.num_envs if rows is None else int(rows.sum()) for rows in valid) / seconds


def measure(name: str, num_envs: int, rounds: int) -> dict[str, Any]:
    """Time an environment's kinds in turn."""
    steppers = {"built-in": Stepper(BUILTIN[name](num_envs), STEPS["built-in"])}
    for kind in ("sync", *(("vector",) if name in VECTORISED else ())):
        steppers[kind] = Stepper(GymnasiumEnv(name, num_envs, vectorization=kind), STEPS[kind])
    for stepper in steppers.values():
        stepper.rate()  # the first one makes tensors that later ones find
    rates: dict[str, list[float]] = {kind: [] for kind in steppers}
    for _ in range(rounds):
        for kind, stepper in steppers.items():
            rates[kind].append(stepper.rate())
    for stepper in steppers.values():
        stepper.env.close()
    medians = {kind: statistics.median(values) for kind, values in rates.items()}
    ratios = [mine / theirs for mine, theirs in zip(rates["built-in"], rates["sync"], strict=True)]
    return {
        "env": name,
        "num_envs": num_envs,
        "transitions_per_s": {kind: round(rate) for kind, rate in medians.items()},
        "ratio": round(medians["built-in"] / medians["sync"], 1),
        "worst_ratio": round(min(ratios), 1),
        "rounds": {kind: [round(rate) for rate in values] for kind, values in rates.items()},
    }


def report(document: Row) -> str:
    """Lay the medians out."""
    lines = []
    for row in document["rows"]:
        rates = {kind: f"{rate:,}" for kind, rate in row["transitions_per_s"].items()}
        ratios = [f"{row['ratio']:.0f}", f"{row['worst_ratio']:.0f}"]
        lines.append([row["env"], rates["built-in"], rates["sync"], *ratios, rates.get("vector", "")])
    header = "environment | built-in, steps/s | Gymnasium's, through the adapter | ratio | worst round | its numpy form"
    return table(header.split(" | "), lines)


def main(argv: list[str] | None = None) -> int:
    """Measure, print, and write the JSON file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-envs", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out", type=Path, default=RESULTS / "envs.json")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    load = round(os.getloadavg()[0], 1)  # before it adds its own
    rows = [measure(name, options.num_envs, options.rounds) for name in BUILTIN]
    document = {"machine": machine(), "load": load, "threads": 1, "bound": BOUND, "rows": rows}
    print(report(document))
    save(options.out, document)
    return 0 if all(row["ratio"] >= BOUND for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
