"""The trainer and what it returns."""

from rl8x.trainers.base import GenericTrainerBase, Trainer, TrainerState
from rl8x.trainers.stats import EvalStats, TrainStats

__all__ = ["EvalStats", "GenericTrainerBase", "TrainStats", "Trainer", "TrainerState"]
