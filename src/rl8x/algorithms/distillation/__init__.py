"""Distillation: a student learns a teacher's actions in the states that the student visits."""

from rl8x.algorithms.distillation.config import DistillationConfig
from rl8x.algorithms.distillation.distillation import Distillation, distill
from rl8x.algorithms.distillation.teacher import Teacher

__all__ = ["Distillation", "DistillationConfig", "Teacher", "distill"]
