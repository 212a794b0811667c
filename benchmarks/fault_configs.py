"""Test random run files: each must be accepted, or rejected with one clear line."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import random
import sys
import tempfile
from pathlib import Path
from typing import Any

from rl8x.algorithms import PPOConfig
from rl8x.cli.main import main
from rl8x.config import RunSpec
from rl8x.envs import BUILTIN

KEYS = [field.name for field in dataclasses.fields(RunSpec)]
OPTIONS = [field.name for field in dataclasses.fields(PPOConfig)]
ODD: list[Any] = [
    None,
    True,
    -1,
    0,
    1,
    2,
    3,
    7,
    0.5,
    1e9,
    -1e-3,
    float("nan"),
    float("inf"),
    "",
    "no",
    "3e-4",
    "os.system",
]
ODD += [
    "rl8x.envs.CartPole",
    "lstm",
    "categorical",
    "cpu",
    "gpu",
    [],
    [1],
    [[0, 1e-3]],
    {},
    {"a": 1},
    {"uniform": [1, 0]},
]
ODD += [{"hidden_sizes": [8]}, {"kind": "interp", "points": [[0, 1], [8, 0]]}, {"plateau": {"name": "returns/mean"}}]
ODD += [
    [{"hits_upper_bound": ["env/steps", 1]}],
    {"length": {"uniform": [0.1, 0.5]}},
    {"length": 1e9},
    "\x00",
    "é" * 50,
]
# A module that lies beside the run file, as in a downloaded folder: nobody said that its code may run.
FOREIGN = "rl8x_foreign"
ODD += [f"{FOREIGN}.Thing", {"$class": f"{FOREIGN}.Thing"}, [{f"{FOREIGN}.Thing": {}}]]


def random_run(source: random.Random) -> dict[str, Any]:
    """Make a run that is small and right, then change some of it into something odd."""
    run: dict[str, Any] = {
        "env": source.choice([*BUILTIN, "CartPole", "CartPole", "Cartpole", "CartPole-v1", 3, f"{FOREIGN}.Thing"]),
        "algorithm_config": {"num_envs": source.choice([2, 4]), "horizon": source.choice([2, 4]), "device": "cpu"},
        "tracking": False,
    }
    for _ in range(source.randrange(4)):
        inner = run["algorithm_config"]
        if source.random() < 0.6 and isinstance(inner, dict):
            inner[source.choice([*OPTIONS, "num_env", "Lr"])] = source.choice(ODD)
        else:
            run[source.choice([*KEYS, "enviroment", "stop"])] = source.choice(ODD)
    if isinstance(run.get("algorithm_config"), dict):
        # Large ones are legal, and would only take the machine's memory.
        for name in ("num_envs", "horizon", "num_threads"):
            value = run["algorithm_config"].get(name)
            if isinstance(value, int | float) and value > 64:
                run["algorithm_config"][name] = 64
    return run


def configs(tries: int) -> dict[str, Any]:
    """Hand random run files to the command line, which checks all of each and trains nothing."""
    source = random.Random(4)
    taken = refused = 0
    wrong: list[str] = []
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        path, imported = Path(folder) / "run.json", Path(folder) / "imported"
        Path(folder, f"{FOREIGN}.py").write_text(f"open({str(imported)!r}, 'a').write('x')\n")
        for _ in range(tries):
            text = json.dumps(random_run(source))
            if source.random() < 0.1:
                cut = source.randrange(len(text))
                text = text[:cut] + source.choice(["", "}", "\x07", "[["]) + text[cut + 1 :]
            path.write_text(text)
            code, lines = _checked(path)
            if code == 0:
                taken += 1
            elif code == 2 and len(lines) == 1 and lines[0].startswith("rl8x: error: "):
                refused += 1
            else:
                wrong.append(f"{text} -> {code}: {lines[-1] if lines else ''}")
            sys.modules.pop(FOREIGN, None)
        num_imported = len(imported.read_bytes()) if imported.exists() else 0
    good = not wrong and taken > 0 and refused > 0 and num_imported == 0
    row = {"fault": "random run files and configs", "tries": tries, "ok": good, "taken": taken}
    return row | {"refused_in_one_line": refused, "foreign_imported": num_imported, "wrong": wrong[:5]}


def _checked(path: Path) -> tuple[int, list[str]]:
    errors = io.StringIO()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(errors):
        try:
            code = main(["train", "-f", str(path), "--dry-run"])
        except SystemExit as stop:
            code = stop.code if isinstance(stop.code, int) else 1
    return code, errors.getvalue().splitlines()
