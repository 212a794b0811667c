"""Measure what single parts cost: steps of environments, decisions of exported policies, checkpoints of a replay.

    python -m benchmarks.costs envs            # transitions a second, beside Gymnasium's of the same name
    python -m benchmarks.costs export          # latency of exported policies for one observation
    python -m benchmarks.costs export-matrix   # their numerical error: every model, space and format; ten minutes
    python -m benchmarks.costs replay_costs    # checkpoints of a replay of a million transitions
    python -m benchmarks.costs envs --quick    # does it run? (the numbers mean nothing, and no file is written)

All on one thread. Each writes benchmarks/results/NAME.json.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tests.policies import ACTIONS, MODELS, policy_of

from benchmarks.results import RESULTS, Row, about, save, table
from rl8x import NullTracker, Trainer
from rl8x.algorithms import DQNConfig
from rl8x.checkpoint import Checkpoints
from rl8x.envs import Acrobot, CartPole, Env, GymnasiumEnv, MountainCar, Pendulum
from rl8x.export import FORMATS, DecisionProgram, export_policy
from rl8x.policy import Policy

PACKAGES = ("rl8x", "torch", "gymnasium", "onnx", "onnxscript", "onnxruntime", "safetensors")


def milliseconds(call: Callable[[], Any], repeats: int, warm_ups: int) -> list[float]:
    """Return the milliseconds of each of some calls, after others that do not count."""
    times = []
    for _ in range(warm_ups + repeats):
        begin = time.perf_counter()
        call()
        times.append((time.perf_counter() - begin) * 1e3)
    return times[warm_ups:]


# -- environments

BUILTIN: dict[str, type[Env]] = {"CartPole-v1": CartPole, "Pendulum-v1": Pendulum}
BUILTIN |= {"MountainCar-v0": MountainCar, "Acrobot-v1": Acrobot}
# Steps of a round: about as long for each kind, so that a disturbance weighs the same.
STEPS = {"built-in": 50, "sync": 2, "vector": 20}


class Stepper:
    """Steps an environment as in collecting, with as many actions as a round has, drawn once."""

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


def envs(quick: bool) -> Iterator[Row]:
    """Time built-in environments, and Gymnasium's through the adapter: `sync`, and `vector` in numpy where it has that.

    Each round times every kind once, in turn, so that what else the machine does meets all of them; the rates are
    medians over the rounds.
    """
    num_envs, rounds = (16, 2) if quick else (4096, 7)
    for name, kind_of_own in BUILTIN.items():
        steppers = {"built-in": Stepper(kind_of_own(num_envs), STEPS["built-in"])}
        for kind in ("sync", "vector") if name == "CartPole-v1" else ("sync",):
            steppers[kind] = Stepper(GymnasiumEnv(name, num_envs, vectorization=kind), STEPS[kind])
        # The first round makes tensors that later ones find.
        _, *each_round = [{kind: stepper.rate() for kind, stepper in steppers.items()} for _ in range(1 + rounds)]
        for stepper in steppers.values():
            stepper.env.close()
        rates = {kind: [round(found[kind]) for found in each_round] for kind in steppers}
        medians = {kind: round(statistics.median(values)) for kind, values in rates.items()}
        ratio = round(medians["built-in"] / medians["sync"], 1)
        worst = round(min(found["built-in"] / found["sync"] for found in each_round), 1)
        told = {"env": name, "num_envs": num_envs, "transitions_per_s": medians, "ratio": ratio, "worst_ratio": worst}
        yield told | {"rounds": rates}


def envs_table(document: Row) -> str:
    """Lay the medians out."""
    lines = []
    for row in document["rows"]:
        rates = {kind: f"{rate:,}" for kind, rate in row["transitions_per_s"].items()}
        ratios = [f"{row['ratio']:.0f}", f"{row['worst_ratio']:.0f}"]
        lines.append([row["env"], rates["built-in"], rates["sync"], *ratios, rates.get("vector", "")])
    header = "environment | built-in, steps/s | Gymnasium's, through the adapter | ratio | worst round | its numpy form"
    return table(header, lines)


# -- exported policies


def export(quick: bool) -> Iterator[Row]:
    """Time one observation on the ways of what a program of one's own would call; a `Box` of actions."""
    repeats = 10 if quick else 2000
    with tempfile.TemporaryDirectory() as folder:
        for model in MODELS:
            for way, call in callers(policy_of(model, "box"), Path(folder)):
                times = milliseconds(call, repeats, max(repeats // 10, 1))
                p99 = float(np.percentile(times, 99))
                yield {"model": model, "way": way, "median_ms": statistics.median(times), "p99_ms": p99}


def callers(policy: Policy, folder: Path) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Yield what decides for one observation, by the name of the way."""
    example = DecisionProgram(policy, sampled=False).example(1)
    obs, state = example["obs"][0].numpy(), policy.memory(1)
    yield "decide", lambda: policy.decide(obs, state)
    program = torch.export.load(export_policy(policy, folder / "policy.pt2").path).module()
    yield "pt2", torch.no_grad()(lambda: program(example))
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    path = str(export_policy(policy, folder / "policy.onnx").path)
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    inputs = {name: part.numpy() for name, part in example.items()}
    yield "onnx", lambda: session.run(None, inputs)


def export_table(document: Row) -> str:
    """Lay the latencies out, a row for each model."""
    ways = ("decide", "pt2", "onnx")
    found = {(row["model"], row["way"]): f"{row['median_ms']:.3f}" for row in document["rows"]}
    lines = [[model, *(found.get((model, way), "-") for way in ways)] for model in MODELS]
    return table(["model", *(f"{way}, ms" for way in ways)], lines)


def export_matrix(quick: bool) -> Iterator[Row]:
    """Export all models for every space in every format, and say how near each is to its policy."""
    with tempfile.TemporaryDirectory() as folder:
        for model in ("mlp",) if quick else MODELS:
            for actions in ACTIONS:
                policy = policy_of(model, actions)
                for format in FORMATS:
                    for sampled in (False, True)[: 1 if format == "safetensors" else 2]:
                        made = export_policy(policy, Path(folder) / f"policy.{format}", sampled=sampled)
                        row = {"model": model, "actions": actions, "format": format, "sampled": sampled}
                        yield row | {"difference": made.difference}


# -- checkpoints of a replay


def replay_costs(quick: bool) -> Iterator[Row]:
    """Save a full replay after each further twentieth of it: milliseconds of the training thread, megabytes written.

    The median and the smallest count, as other work on the machine only adds. The bytes are those of files that the
    checkpoint before did not have.
    """
    took, written, known = [], [], set[tuple[int, int]]()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "checkpoints"
        trainer = filled(20_000 if quick else 1_000_000, folder=folder)
        trainer.record.open(trains=False)
        trainer.checkpoints.begin()
        for i in range(8):
            trainer.step()
            begin = time.perf_counter()
            trainer.record.save(trainer.state_dict(), None)  # as a run does, which does not wait for the disk
            elapsed = 1e3 * (time.perf_counter() - begin)
            trainer.checkpoints.wait()
            found = [path.stat() for path in folder.rglob("*") if path.is_file()]
            files = {(each.st_ino, each.st_mtime_ns): each.st_size for each in found}  # links share both
            if i:  # the first has all of the replay to write
                took.append(elapsed)
                written.append(sum(size for file, size in files.items() if file not in known) / 1e6)
            known |= files.keys()
        trainer.checkpoints.end()
    for what, values in {"training thread, ms": took, "written, MB": written}.items():
        yield {"checkpoint": what, "median": round(statistics.median(values), 3), "least": round(min(values), 3)}


def filled(rows: int, *, folder: Path) -> Trainer:
    """Return a trainer whose replay of `rows` transitions is full."""
    sizes = {"num_envs": rows // 20, "horizon": 1, "buffer_size": rows, "batch_size": 256, "warmup_steps": rows * 100}
    model = {"model_config": {"hidden_sizes": [256, 256]}}
    config = DQNConfig(**sizes, **model, prioritized=True, device="cpu", execution="eager")
    checkpoints = Checkpoints(folder, every_steps=None, every_minutes=None)
    trainer = Trainer(config.build(CartPole), tracker=NullTracker(), checkpoints=checkpoints, eval_env=False)
    while trainer.algorithm.replay.size < rows:
        trainer.step()
    return trainer


def main(argv: list[str] | None = None) -> None:
    """Measure one thing, print its rows, and write them down."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    costs = {"envs": envs, "export": export, "export-matrix": export_matrix, "replay_costs": replay_costs}
    parser.add_argument("cost", choices=costs)
    parser.add_argument("--quick", action="store_true", help="tiny sizes, to see that it runs; writes no file")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    begun, rows = about(*PACKAGES), []  # with the load before it adds its own
    for row in costs[options.cost](options.quick):
        rows.append(row)
        print(*(f"{value:.2e}" if isinstance(value, float) else value for value in row.values()), flush=True)
    if not options.quick:
        save(RESULTS / f"{options.cost}.json", {**begun, "rows": rows})


if __name__ == "__main__":
    main()
