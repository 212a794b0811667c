"""Loads the trained algorithm of a saved run, to act or to teach another."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rl8x.algorithms.base import GenericAlgorithmBase
from rl8x.checkpoint.build import build_algorithm
from rl8x.checkpoint.find import find


def load_algorithm(
    source: str | Path, *, device: str | None = None, auto: bool = False, trust: bool = False
) -> GenericAlgorithmBase[Any]:
    """Build the algorithm of a checkpoint with its learned weights, for acting with its `policy`.

    Nothing of its experience is read, and no run is gone on with: `Trainer.resume` does that.

    Args:
        source: Path of a checkpoint, or of a run's folder of them; or the run's name or ID in MLflow.
        device: Where it is to live; None is where it lived.
        auto: Take the run's newest good checkpoint where the one that is meant is damaged.
        trust: Whether modules that the checkpoint names may be imported.

    Raises:
        CheckpointError: If there is no such checkpoint, or it does not say how to build the algorithm.
    """
    checkpoint = find(source, auto=auto)
    overrides = {} if device is None else {"device": device}
    algorithm = build_algorithm(checkpoint.metadata["build"], overrides, trust=trust, only_acts=True)
    algorithm.load_learned_state(checkpoint.state["trainer"]["algorithm"])
    return algorithm
