"""Checkpoints: the full state of a run on disk, with digests, readable without executing code from the file."""

from rl8x.checkpoint.files import Checkpoint, describe, listed, read
from rl8x.checkpoint.load import find, load_algorithm, load_policy
from rl8x.checkpoint.tree import CheckpointError
from rl8x.config.spec import Checkpoints, CheckpointsLike

__all__ = [
    "Checkpoint",
    "CheckpointError",
    "Checkpoints",
    "CheckpointsLike",
    "describe",
    "find",
    "listed",
    "load_algorithm",
    "load_policy",
    "read",
]
