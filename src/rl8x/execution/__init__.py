"""Runs functions of tensors eagerly, compiled, or captured in CUDA graphs. Knows torch, but no RL."""

from rl8x.execution.execution import MODES, PRECISIONS, Execution, Mode, Precision
from rl8x.execution.programs import Program

__all__ = ["MODES", "PRECISIONS", "Execution", "Mode", "Precision", "Program"]
