"""Measure the latency of exported policies for one observation, and their numerical error.

    python -m benchmarks.export            # latency by format and model, and its JSON
    python -m benchmarks.export --matrix   # every model, space and format, sampled and not, beside it: ten minutes

Latency is of one call with one observation on one thread, of what a program of one's own would call: the policy's
`decide`, the exported program's module, and ONNX Runtime's session.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tests.policies import ACTIONS, MODELS, policy_of

from benchmarks.results import RESULTS, machine, save, version
from benchmarks.tables import Row, table
from rl8x.export import FORMATS, DecisionProgram, export_policy
from rl8x.policy import Policy

_GOALS_MS = {"pt2": 1.0, "onnx": 0.2}


def matrix() -> Iterator[dict[str, Any]]:
    """Export all models for every space in every format, and say how near each is to its policy."""
    with tempfile.TemporaryDirectory() as folder:
        for model in MODELS:
            for actions in ACTIONS:
                policy = policy_of(model, actions)
                for format in FORMATS:
                    for sampled in (False, True)[: 1 if format == "safetensors" else 2]:
                        made = export_policy(policy, Path(folder) / f"policy.{format}", sampled=sampled)
                        row = {"model": model, "actions": actions, "format": format, "sampled": sampled}
                        yield row | {"difference": made.difference}


def callers(policy: Policy, folder: Path) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Yield what decides for one observation, by the name of the way."""
    example = DecisionProgram(policy, sampled=False).example(1)
    obs, state = example["obs"][0].numpy(), policy.memory(1)
    yield "decide", lambda: policy.decide(obs, state)
    program = torch.export.load(export_policy(policy, folder / "policy.pt2").path).module()

    def call_program() -> Any:
        with torch.no_grad():
            return program(example)

    yield "pt2", call_program
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    path = str(export_policy(policy, folder / "policy.onnx").path)
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    inputs = {name: part.numpy() for name, part in example.items()}
    yield "onnx", lambda: session.run(None, inputs)


def milliseconds(call: Callable[[], Any], repeats: int) -> dict[str, float]:
    """Return the median and the 99th percentile of a call, in milliseconds."""
    for _ in range(max(repeats // 10, 1)):
        call()
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        call()
        times.append((time.perf_counter() - begin) * 1e3)
    return {"median_ms": statistics.median(times), "p99_ms": float(np.percentile(times, 99))}


def latencies(repeats: int) -> Iterator[dict[str, Any]]:
    """Measure each model's ways to decide for one observation; a `Box` of actions."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        for model in MODELS:
            for way, call in callers(policy_of(model, "box"), Path(folder)):
                row = {"model": model, "way": way, **milliseconds(call, repeats)}
                yield row | ({"goal_ms": _GOALS_MS[way]} if way in _GOALS_MS else {})


def report(document: Row) -> str:
    """Lay the latencies out, a row for each model."""
    ways = ("decide", "pt2", "onnx")
    found = {(row["model"], row["way"]): f"{row['median_ms']:.3f}" for row in document["rows"]}
    lines = [[model, *(found.get((model, way), "-") for way in ways)] for model in MODELS]
    return table(["model", *(f"{way}, ms" for way in ways)], lines)


def main() -> int:
    """Measure or compare, print a row each, and write them down."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--matrix", action="store_true", help="compare every export with its policy")
    parser.add_argument("--repeats", type=int, default=2000, help="calls of which the median is taken")
    parser.add_argument("--out", type=Path, help="JSON to write")
    options = parser.parse_args()
    out = options.out or RESULTS / ("export-matrix.json" if options.matrix else "export.json")
    rows = []
    for row in matrix() if options.matrix else latencies(options.repeats):
        rows.append(row)
        print("  ".join(f"{value:.2e}" if isinstance(value, float) else f"{value!s:12}" for value in row.values()))
    names = ("rl8x", "torch", "onnx", "onnxscript", "onnxruntime", "safetensors")
    result = {
        "machine": machine(),
        "date": date.today().isoformat(),
        "versions": {name: version(name) for name in names},
    }
    if options.matrix:
        result["largest_difference"] = max(row["difference"] for row in rows)
    save(out, result | {"rows": rows})
    return 0


if __name__ == "__main__":
    sys.exit(main())
