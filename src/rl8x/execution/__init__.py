"""Execution of programs of tensors: eager, compiled, or captured in CUDA graphs. It imports nothing but torch."""

from rl8x.execution.execution import MODES, PRECISIONS, Execution, Mode, Precision
from rl8x.execution.programs import Program

__all__ = ["MODES", "PRECISIONS", "Execution", "Mode", "Precision", "Program"]
