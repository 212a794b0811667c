"""What is wrong with a checkpoint, in one line."""

from __future__ import annotations


class CheckpointError(ValueError):
    """A checkpoint cannot be used as asked; the message says which one, why, and what can be used instead."""
