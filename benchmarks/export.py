"""Measure the latency of exported policies for one observation, and their numerical error.

    python benchmarks/export.py            # latency by format and model, and its JSON
    python benchmarks/export.py --matrix   # every model, space and format, sampled and not, beside it: ten minutes

Latency is of one call with one observation on one thread, of what a program of one's own would call: the policy's
`decide`, the exported program's module, and ONNX Runtime's session.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gymnasium import spaces

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.common import version
from benchmarks.processes import machine, save
from rl8x.export import FORMATS, DecisionProgram, export_policy
from rl8x.policy import Policy

RESULTS = Path(__file__).parent / "results"
MODELS: dict[str, dict[str, Any]] = {
    "mlp": {"hidden_sizes": [64, 64]},
    "cnn": {"hidden_sizes": [64]},
    "lstm": {"hidden_size": 64},
    "gru": {"hidden_size": 64},
    "attention": {"width": 32, "window": 8},
}
_STEERING = spaces.Box(-2.0, 2.0, (2,), np.float32)
ACTIONS: dict[str, spaces.Space[Any]] = {
    "box": _STEERING,
    "discrete": spaces.Discrete(5, start=2),
    "multidiscrete": spaces.MultiDiscrete([3, 20]),
    "multibinary": spaces.MultiBinary(4),
    "dict": spaces.Dict({"gear": spaces.Discrete(4), "steer": _STEERING}),
    "masked": spaces.Discrete(6),
    "masked-dict": spaces.Dict({"gear": spaces.Discrete(4), "steer": _STEERING}),
}
_GOALS_MS = {"pt2": 1.0, "onnx": 0.2}


def observations(model: str, actions: str) -> spaces.Space[Any]:
    """Return a space of observations for a model: an image for `cnn`, with a mask for masked actions."""
    image = spaces.Box(0, 255, (3, 12, 12), np.uint8)
    sensed = image if model == "cnn" else spaces.Box(-np.inf, np.inf, (4,), np.float32)
    parts = {"sensed": sensed, "lane": spaces.Discrete(3, start=1), "wheels": spaces.MultiDiscrete([2, 3])}
    if actions == "masked":
        return spaces.Dict({"sensed": sensed, "action_mask": spaces.MultiBinary(6)})
    if actions == "masked-dict":
        mask = spaces.Dict({"gear": spaces.MultiBinary(4)})
        return spaces.Dict({**parts, "action_mask": mask})
    return spaces.Dict(parts) if actions == "dict" else sensed


def policy_of(model: str, actions: str, **options: Any) -> Policy:
    """Make a policy that has seen observations of some spread, and whose actions differ with what it sees."""
    torch.manual_seed(0)
    model_config = {**MODELS[model], "policy_gain": 1.0, **options.pop("model_config", {})}
    space = observations(model, actions)
    policy = Policy(
        space, ACTIONS[actions], model=model, model_config=model_config, normalize_observations=True, **options
    )
    for moments in () if policy.obs_moments is None else policy.obs_moments.values():
        moments.update(3.0 + 2.0 * torch.randn(100, *moments.shape))
    return policy


def matrix(models: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Export models for every space in every format, and say how near each is to its policy."""
    with tempfile.TemporaryDirectory() as folder:
        for model in models:
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


def table(document: dict[str, Any]) -> str:
    """Write the latencies of a document as a Markdown table, a row for each model."""
    ways = ("decide", "pt2", "onnx")
    found = {(row["model"], row["way"]): row for row in document["rows"]}
    lines = ["| model | " + " | ".join(f"{way}, ms" for way in ways) + " |", "|---" * (len(ways) + 1) + "|"]
    for model in MODELS:
        cells = [found.get((model, way)) for way in ways]
        shown = ["-" if row is None else f"{row['median_ms']:.3f}" for row in cells]
        lines.append(f"| {model} | " + " | ".join(shown) + " |")
    return "\n".join(lines)


def main() -> int:
    """Measure or compare, print a row each, and write them down."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--matrix", action="store_true", help="compare every export with its policy")
    parser.add_argument(
        "--only", nargs="*", choices=MODELS, help="with --matrix: the others stay as they are in the file"
    )
    parser.add_argument("--repeats", type=int, default=2000, help="calls of which the median is taken")
    parser.add_argument("--out", type=Path, help="JSON to write")
    options = parser.parse_args()
    out = options.out or RESULTS / ("export-matrix.json" if options.matrix else "export.json")
    rows = []
    if options.matrix and options.only and out.exists():
        rows = [row for row in json.loads(out.read_text())["rows"] if row["model"] not in options.only]
    for row in matrix(options.only or [*MODELS]) if options.matrix else latencies(options.repeats):
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
