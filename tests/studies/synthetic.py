"""Tables of evaluations of studies that nobody trained, with known returns."""

import itertools
import json

import numpy as np
import pandas as pd

SUPPORTS = {
    "fixed": {"length": [0.5, 0.5], "mass": [0.1, 0.1], "force": [10, 10]},
    "uniform": {"length": [0.3, 1.0], "mass": [0.05, 0.3], "force": [10, 10]},
}


def evaluations(*, trainings=("fixed", "uniform"), seeds=3, vary=(None,), points=(), grid=None, sample=0):
    """Make a table: cells on a grid, or at random in its bounds; returns fall with the distance from the support."""
    grid = grid or {"length": np.linspace(0.1, 2.0, 5), "mass": np.linspace(0.02, 0.8, 4)}
    generator = np.random.default_rng(0)
    cells = list(itertools.product(*grid.values()))
    if sample:
        bounds = [(min(values), max(values)) for values in grid.values()]
        cells = [tuple(generator.uniform(*ends) for ends in bounds) for _ in range(sample)]
    rows = []
    for training, value, seed in itertools.product(trainings, vary, range(seeds)):
        offset = generator.normal(0, 20)
        for steps, final in [*((point, False) for point in points), (10_000, True)]:
            for cell in cells:
                ends = [SUPPORTS[training][name] for name in grid]
                outside = [max(0.0, low - at, at - high) for at, (low, high) in zip(cell, ends, strict=True)]
                returns = 400 * np.exp(-sum(outside)) * (1 + 0.1 * (value or 0)) * steps / 10_000 + offset
                row = {"training": training, "seed": seed, "run_id": "", "env_steps": steps, "updates": 2 * steps}
                row |= {"final": final, "cell": cells.index(cell)}
                row |= {"inside": max(outside) == 0, "episodes": 4, "returns": returns + generator.normal(0, 5)}
                row |= {"returns_std": 1.0, "returns_min": returns - 1, "lengths": 25.0}
                row |= {f"test.{name}": at for name, at in zip(grid, cell, strict=True)}
                rows.append(row | ({} if value is None else {"vary.lr": value}))
    return pd.DataFrame(rows)


def write_study(folder, table, supports=SUPPORTS, **definition):
    """Write a study's folder as `rl8x study` leaves it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "evaluations.json").write_text(table.to_json(orient="split", index=False, double_precision=15))
    stored = {"definition": definition, "supports": supports, "run_key": "0" * 32, "rl8x": "1.0"}
    (folder / "study.json").write_text(json.dumps(stored))
    return folder
