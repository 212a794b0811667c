"""How programs of tensors run: eagerly, compiled, or captured in CUDA graphs. Knows torch only."""

from rl8x.execution.execution import MODES, PRECISIONS, Execution, Mode, Precision
from rl8x.execution.programs import Program

__all__ = ["MODES", "PRECISIONS", "Execution", "Mode", "Precision", "Program"]
