"""A run's policies as models in its tracker: the last, the best, or the current one on request."""

from __future__ import annotations

import copy
import math
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from rl8x import keys
from rl8x.checkpoint import Checkpoint
from rl8x.checkpoint.tree import CheckpointError
from rl8x.policy import Policy
from rl8x.tracking import Tracker

LAST: Final = "last"
BEST: Final = "best"
_GROUPS: Final = (keys.EVAL_PREFIX, "episodes/", "returns/")
_FILE: Final = "policy.safetensors"


def check_models(policy: Policy, tracker: Tracker) -> None:
    """Check that a policy can be logged as a model.

    Raises:
        TypeError: If the policy cannot be saved, or the tracker keeps no models.
        ImportError: If a package is missing.
    """
    if not hasattr(tracker, "log_model"):
        raise TypeError(f"log_models: {type(tracker).__name__} keeps no models; it has no method `log_model`.")
    policy.to_bytes()


def log_policy(tracker: Tracker, policy: Policy, **about: Any) -> None:
    """Log a policy as a model; `about` are further arguments of `MLflowTracker.log_model`."""
    from rl8x.tracking.policy_model import describe_model

    policy = copy.deepcopy(policy).cpu()
    with tempfile.TemporaryDirectory() as folder:
        path = policy.save(Path(folder) / _FILE)
        tracker.log_model(path, describe_model(policy), **about)  # type: ignore[attr-defined]


def policy_at(checkpoint: Checkpoint, policy: Policy) -> Policy:
    """Return a copy of a run's policy as a checkpoint of the run has it.

    Raises:
        CheckpointError: If the checkpoint does not have the policy where built-in algorithms keep it.
    """
    policy = copy.deepcopy(policy)
    try:
        policy.load_state_dict(checkpoint.state["trainer"]["algorithm"]["policy"])
    except (KeyError, TypeError, RuntimeError) as error:
        raise CheckpointError(f"{checkpoint.path} does not have the policy under `policy` ({error!r:.100})") from None
    return policy


def about_policy(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return step and metrics of the policy in a checkpoint, as arguments of `log_policy`."""
    saved, best, metadata = checkpoint.state["trainer"], checkpoint.state["best"], checkpoint.metadata
    # A condition may have evaluated after the row was made.
    metrics = model_metrics({**saved["row"], **saved["eval_row"]}, None if best is None else best["metric"])
    return {"step": metadata["counters"][metadata["resolved"]["clock"]], "metrics": metrics}


def model_metrics(row: Mapping[str, float], best: str | None = None) -> dict[str, float]:
    """Return the metrics of a row that say how good a policy is: mean returns, those of evaluations, and `best`."""
    return {
        name: value
        for name, value in row.items()
        if math.isfinite(value) and (name == best or (name.startswith(_GROUPS) and name.endswith("/mean")))
    }
