"""Columns of a study's table of evaluations: a row for each trained policy, point of its training, and test cell.

A policy is one training (its name), one set of varied hyperparameters (columns `vary.NAME`), and one seed. A test cell
is one value for each test parameter (columns `test.NAME`).
"""

from __future__ import annotations

from typing import Final

TRAINING: Final = "training"
"""Name of the training configuration, such as `wide`."""
SEED: Final = "seed"
RUN: Final = "run_id"
"""MLflow's id of the child run; empty where nothing is tracked."""
ENV_STEPS: Final = "env_steps"
"""Transitions that the policy had been trained on when it was evaluated; 0 where it learns from a data set."""
UPDATES: Final = "updates"
"""Updates that the policy had been trained by when it was evaluated."""
FINAL: Final = "final"
"""Whether the policy is the last of its training."""
INSIDE: Final = "inside"
"""Whether the cell lies in the support of what was trained on."""
CELL: Final = "cell"
"""Number of the cell, from 0: two cells of a sample may have the same values."""
EPISODES: Final = "episodes"
"""Episodes that were played in the cell."""
RETURNS: Final = "returns"
"""Mean of their undiscounted returns."""
RETURNS_STD: Final = "returns_std"
"""Standard deviation of their returns."""
RETURNS_MIN: Final = "returns_min"
LENGTHS: Final = "lengths"
"""Mean of their lengths, in steps."""

VARY: Final = "vary."
TEST: Final = "test."
