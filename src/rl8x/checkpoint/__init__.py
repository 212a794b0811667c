"""Checkpoints: all that a run's future depends on, on the disk, checked, and readable without running anything."""

from rl8x.checkpoint.errors import CheckpointError
from rl8x.checkpoint.files import Checkpoint, describe, listed, read
from rl8x.checkpoint.find import find
from rl8x.checkpoint.saver import Checkpoints, Saver

__all__ = ["Checkpoint", "CheckpointError", "Checkpoints", "Saver", "describe", "find", "listed", "read"]
