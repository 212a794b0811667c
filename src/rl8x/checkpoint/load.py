"""Loads what a saved run has trained: its policy alone, or its algorithm."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rl8x.algorithms.base import GenericAlgorithmBase
from rl8x.checkpoint.build import build_algorithm
from rl8x.checkpoint.files import Checkpoint
from rl8x.checkpoint.find import find
from rl8x.checkpoint.tree import CheckpointError
from rl8x.policy import Policy
from rl8x.tracking.secrets import find_hidden


def load_algorithm(
    source: str | Path, *, device: str | None = None, auto: bool = False, trust: bool = False, env: Any = None
) -> GenericAlgorithmBase[Any]:
    """Build the algorithm of a checkpoint with its learned weights, for acting with its `policy`.

    Nothing of its experience is read, and no run is gone on with: `Trainer.resume` does that. Where the checkpoint does
    not say how the environment is made, something stands for it that has its spaces and cannot be stepped.

    Args:
        source: Path of a checkpoint, or of a run's folder of them; or the run's name or ID in MLflow.
        device: Where it is to live; None is where it lived.
        auto: Take the run's newest good checkpoint where the one that is meant is damaged.
        trust: Whether modules that the checkpoint names may be imported.
        env: The environment, in any form that a config's `build` takes; None: as the checkpoint says.

    Raises:
        CheckpointError: If there is no such checkpoint, or it does not say how to build the algorithm.
    """
    return _algorithm_of(find(source, auto=auto), device=device, trust=trust, env=env)


def _algorithm_of(
    checkpoint: Checkpoint, *, device: str | None, trust: bool, env: Any = None
) -> GenericAlgorithmBase[Any]:
    overrides = {} if device is None else {"device": device}
    algorithm = build_algorithm(
        checkpoint.spec, checkpoint.metadata["resolved"], overrides, trust=trust, only_acts=True, env=env
    )
    algorithm.load_learned_state(checkpoint.state["trainer"]["algorithm"])
    return algorithm


def load_policy(source: str | Path | Checkpoint, *, device: str | None = None, trust: bool = False) -> Policy:
    """Make the policy of a checkpoint, with its weights; neither environment nor algorithm is made or imported.

    Args:
        source: A checkpoint, or what `load_algorithm` takes.
        device: Where it is to be; None is the CPU.
        trust: Whether modules that the checkpoint names for it may be imported.

    Raises:
        CheckpointError: If there is no such checkpoint, or it does not say how to make the policy.
    """
    checkpoint = source if isinstance(source, Checkpoint) else find(source)
    resolved = checkpoint.metadata["resolved"]
    described = resolved["policy"]
    if described is None:  # only its algorithm knows how it is made
        return _algorithm_of(checkpoint, device=device or "cpu", trust=trust).policy
    if hidden := find_hidden(described, "policy"):
        raise CheckpointError(f"the policy cannot be made again: `{hidden}` had a password, which no checkpoint keeps")
    try:
        spaces = dict(zip(("observation_space", "action_space"), resolved["spaces"], strict=True))
        weights = checkpoint.state["trainer"]["algorithm"]["policy"]
        name = f"the checkpoint {checkpoint.path}"
        policy = Policy.from_description({**described, **spaces}, weights, name, trust=trust)
    except (KeyError, TypeError) as error:
        raise CheckpointError(f"{checkpoint.path} does not have the policy under `policy` ({error!r:.100})") from None
    except ValueError as error:
        raise CheckpointError(str(error)) from None
    return policy if device is None else policy.to(device)
