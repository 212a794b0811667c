"""The trainer and what it returns."""

from rl8x.checkpoint import CheckpointError, Checkpoints
from rl8x.trainers.grid import plot_grid
from rl8x.trainers.rows import EvalStats, TrainStats
from rl8x.trainers.train_step import NonFiniteError
from rl8x.trainers.trainer import GenericTrainerBase, Trainer, TrainerState

__all__ = [
    "CheckpointError",
    "Checkpoints",
    "EvalStats",
    "GenericTrainerBase",
    "NonFiniteError",
    "TrainStats",
    "Trainer",
    "TrainerState",
    "plot_grid",
]
