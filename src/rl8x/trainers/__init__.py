"""The trainer and what it returns."""

from rl8x.checkpoint import CheckpointError, Checkpoints
from rl8x.trainers.bad_numbers import NonFiniteError
from rl8x.trainers.base import GenericTrainerBase, Trainer, TrainerState
from rl8x.trainers.stats import EvalStats, TrainStats

__all__ = [
    "CheckpointError",
    "Checkpoints",
    "EvalStats",
    "GenericTrainerBase",
    "NonFiniteError",
    "TrainStats",
    "Trainer",
    "TrainerState",
]
