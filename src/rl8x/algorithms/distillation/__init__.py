"""Distillation: a student learns a teacher's actions in the states that the student visits."""

from rl8x.algorithms.distillation.config import DistillationConfig
from rl8x.algorithms.distillation.distillation import Distillation, distill

__all__ = ["Distillation", "DistillationConfig", "distill"]
