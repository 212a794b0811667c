"""Distillation: a student learns what a teacher would do where the student goes."""

from rl8x.algorithms.distillation.config import DistillationConfig
from rl8x.algorithms.distillation.distillation import Distillation, distill
from rl8x.algorithms.distillation.teacher import Teacher

__all__ = ["Distillation", "DistillationConfig", "Teacher", "distill"]
