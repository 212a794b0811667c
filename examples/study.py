"""A study of generalisation: two trainings, two seeds, tested in a grid of environments that neither has seen whole.

    python examples/study.py

expected: a line for each training as it begins and ends, and a mean return inside and outside of what each was trained
on. `wide` is trained with poles of 0.25 to 1 m and a gravity of 5 to 15 m/s^2, and is good in more cells than `fixed`.
Started again, it goes on where it was stopped.
"""

from __future__ import annotations

from typing import Any

from rl8x.randomization import Uniform
from rl8x.studies import Study

SMALL = {"num_envs": 64, "horizon": 32, "lr": 3e-3, "gamma": 0.99, "sgd_minibatch_size": 512}


def main(jobs: int = 2, **options: Any) -> Study:
    study = Study(
        train={"fixed": {"length": 0.5}, "wide": {"length": Uniform(0.25, 1.0), "gravity": Uniform(5, 15)}},
        test={"length": {"linspace": [0.1, 2.0, 20]}, "gravity": [2, 5, 9.8, 15, 20]},
        **{"seeds": 2, "env": "CartPole", "max_steps": 60, "episodes": 16, "name": "example"}
        | {"algorithm_config": SMALL}
        | options,
    )
    table = study.run(jobs=jobs)
    for (training, inside), cells in table.groupby(["training", "inside"]):
        print(f"{training}, {'inside' if inside else 'outside'}: return {cells.returns.mean():.0f}")
    return study


if __name__ == "__main__":
    main()
