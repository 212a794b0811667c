"""Options: when checkpoints are written, and which are kept."""

from __future__ import annotations

import dataclasses
import math
import os
from pathlib import Path
from typing import Literal


@dataclasses.dataclass(frozen=True)
class Checkpoints:
    """When to save and what to keep. A run is also saved at its end and on a signal.

    Args:
        directory: The run's own folder of checkpoints; None is one beside the tracked run, in `mlruns/checkpoints`. A
            relative path is taken from the working directory of now, whatever that is later.
        every_steps: Save whenever the trainer's steps are a multiple of this; None does not.
        every_minutes: Save when so many minutes have passed since the last; None does not.
        keep: How many of the last checkpoints to keep.
        best: A metric, such as "eval/returns/mean": whenever it is better than ever, the run is saved, and the best
            checkpoint is kept beside the last ones.
        mode: Whether the largest ("max") or the smallest ("min") value of `best` is best.

    Raises:
        TypeError: If the directory is not a path.
        ValueError: If a number is not positive, or the mode is none.
    """

    directory: str | os.PathLike[str] | None = None
    every_steps: int | None = None
    every_minutes: float | None = 5.0
    keep: int = 3
    best: str | None = None
    mode: Literal["max", "min"] = "max"

    def __post_init__(self) -> None:
        if self.directory is not None:
            if not isinstance(self.directory, str | os.PathLike):
                raise TypeError(f"Checkpoints: `directory` must be a path or None; got {self.directory!r}.")
            object.__setattr__(self, "directory", Path(self.directory).absolute())
        for name in ("every_steps", "keep"):
            value = getattr(self, name)
            if (value is not None or name == "keep") and (type(value) is not int or value < 1):
                raise ValueError(f"Checkpoints: `{name}` must be a whole number, at least 1; got {value!r}.")
        minutes = self.every_minutes
        if minutes is not None and not (isinstance(minutes, int | float) and 0 < minutes < math.inf):
            raise ValueError(f"Checkpoints: `every_minutes` must be a positive number or None; got {minutes!r}.")
        if self.mode not in ("max", "min"):
            raise ValueError(f"Checkpoints: `mode` must be 'max' or 'min'; got {self.mode!r}.")


CheckpointsLike = Checkpoints | str | os.PathLike[str] | bool | None
