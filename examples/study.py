"""A study of generalisation: two trainings, two seeds, tested in a grid of environments that neither has seen whole.

    python examples/study.py

expected: within two minutes a line for each training, and that `wide`, which is trained with poles of any length from
0.25 to 1 m, loses less than `fixed` outside of what it was trained on. Started again, it goes on where it was stopped.
"""

from __future__ import annotations

from typing import Any

from rl8x.randomization import Uniform
from rl8x.studies import Study


def main(jobs: int = 2, **options: Any) -> Study:
    study = Study(
        train={"fixed": {"length": 0.5}, "wide": {"length": Uniform(0.25, 1.0)}},
        test={"length": {"linspace": [0.1, 2.0, 11]}, "gravity": {"linspace": [2.0, 20.0, 11]}},
        **{"seeds": 2, "env": "CartPole", "max_steps": 60, "episodes": 16, "name": "example", **options},
    )
    table = study.run(jobs=jobs)
    for (training, inside), cells in table.groupby(["training", "inside"]):
        print(f"{training}, {'inside' if inside else 'outside'}: return {cells.returns.mean():.0f}")
    return study


if __name__ == "__main__":
    main()
