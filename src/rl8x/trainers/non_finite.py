"""Handling of non-finite numbers: diagnose them, and stop, skip the update, or restore the last good weights.

A step's statistics include counts of non-finite values, under `finite/` and the quantity's name, which come to the host
with everything else. The tensors themselves are searched only if a count is not 0.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from typing import Any, Final, Literal

import torch
from torch import Tensor

from rl8x import keys
from rl8x.algorithms.base import GenericAlgorithmBase
from rl8x.checkpoint.manager import CheckpointManager
from rl8x.checkpoint.tree import clone
from rl8x.tracking import Tracker
from rl8x.trainers.ranks import from_first, one_diagnosis, take_over

OnNonFinite = Literal["stop", "skip", "rollback"]
CHOICES: Final = ("stop", "skip", "rollback")
PREFIX: Final = "finite/"
TAG: Final = "rl8x.non_finite"
# Causes before effects; of the gathered quantities the one that is earliest in the horizon comes first.
QUANTITIES: Final[tuple[str, ...]] = ("observations", "actions", "rewards", "losses", "gradients", "parameters")
GATHERED: Final[tuple[str, ...]] = ("observations", "actions", "rewards")
# Skipping for ever would hide that nothing is learned anymore.
MAX_IN_A_ROW: Final = 10


class NonFiniteError(ArithmeticError):
    """A quantity was not finite.

    Args:
        message: Which quantity, where and when.
        diagnosis: The quantities and places, as plain data; see `rl8x.trainers.non_finite.diagnose`.
    """

    def __init__(self, message: str, diagnosis: Mapping[str, Any]) -> None:
        super().__init__(message)
        self.diagnosis = dict(diagnosis)


def take_counts(row: dict[str, float]) -> dict[str, float]:
    """Take the counts out of a row of statistics, and return those that are not 0, by quantity."""
    counts = {name.removeprefix(PREFIX): row.pop(name) for name in list(row) if name.startswith(PREFIX)}
    return {quantity: count for quantity, count in counts.items() if count != 0}


def diagnose(algorithm: GenericAlgorithmBase[Any], counts: Mapping[str, float]) -> dict[str, Any]:
    """Search the last experience and the weights for what `counts` says is not finite; return plain data."""
    places = algorithm.locate_non_finite()
    quantity = min(counts, key=lambda name: _order(name, places.get(name)))
    place = places.get(quantity, {})
    parameters = dict(algorithm.policy.named_parameters())
    diagnosis = {
        "quantity": quantity,  # that was not finite first
        "also": [name for name in QUANTITIES if name in counts and name != quantity],
        "environments": place.get("environments", []),
        "num_environments": place.get("num_environments", 0),
        "slot": place.get("slot"),
        "final": place.get("final", False),  # in the last observation of an episode that was truncated in this slot
        "step": algorithm.counters[keys.STEPS],
        "counters": dict(algorithm.counters),
        "rollout": places,
        "parameters": [name for name, value in parameters.items() if not _finite(value)],
        "gradients": [name for name, value in parameters.items() if value.grad is not None and not _finite(value.grad)],
    }
    env = algorithm.env
    if env is None:
        return diagnosis
    return diagnosis | {"env": type(env.unwrapped).__name__, "env_config": env.config, "num_envs": env.num_envs}


def _order(quantity: str, place: Mapping[str, Any] | None) -> tuple[int, float, int]:
    rank = QUANTITIES.index(quantity) if quantity in QUANTITIES else len(QUANTITIES)
    if quantity not in GATHERED:
        return 1, 0.0, rank
    return 0, float("inf") if place is None else place["slot"], rank


def _finite(tensor: Tensor) -> bool:
    return bool(torch.isfinite(tensor.detach()).all())


def message(diagnosis: Mapping[str, Any]) -> str:
    """Put a diagnosis in one line."""
    where = "in no single environment"
    if diagnosis["environments"]:
        listed = ", ".join(map(str, diagnosis["environments"]))
        more = diagnosis["num_environments"] - len(diagnosis["environments"])
        where = (
            f"in environments {listed}{f' and {more} more' if more else ''}, slot {diagnosis['slot']} of the horizon"
        )
        where += ", in the final observation of an episode that was cut" if diagnosis["final"] else ""
    where += f" of rank {diagnosis['rank']}" if "rank" in diagnosis else ""
    also = f"; then {', '.join(diagnosis['also'])}" if diagnosis["also"] else ""
    return f"{diagnosis['quantity']} not finite at step {diagnosis['step']}, {where}{also}"


class Guard:
    """Applies the trainer's `on_non_finite` to the counts of each step, and counts such steps `in_a_row`."""

    def __init__(self, mode: OnNonFinite) -> None:
        if mode not in CHOICES:
            raise ValueError(f"`on_non_finite` must be one of {', '.join(map(repr, CHOICES))}; got {mode!r}.")
        self._mode = mode
        self._before: dict[str, Any] = {}
        self.in_a_row = 0

    def before_step(self, algorithm: GenericAlgorithmBase[Any]) -> None:
        """Keep a copy of what has been learned so far, if a step may be undone."""
        if self._mode != "stop":
            self._before = clone(algorithm.learned_state())

    def judge(
        self,
        algorithm: GenericAlgorithmBase[Any],
        counts: Mapping[str, float],
        tracker: Tracker,
        checkpoints: CheckpointManager,
    ) -> None:
        """Where there are counts, none of them 0, stop with the diagnosis, or restore earlier weights and warn."""
        if not counts:
            self.in_a_row = 0
            return
        diagnosis = one_diagnosis(diagnose(algorithm, counts))
        text = message(diagnosis)
        if self._mode == "stop" or self.in_a_row >= MAX_IN_A_ROW:
            tracker.set_tags({TAG: text})
            written = json.dumps(diagnosis, indent=1, default=str) + "\n"
            tracker.log_text(written, "diagnosis.json")
            tracker.log_text(text + "\n", "diagnosis.txt")
            path = checkpoints.write_text(f"diagnosis-step-{diagnosis['step']}.json", written)
            raise NonFiniteError(text if path is None else f"{text}; see {path}", diagnosis)
        self.in_a_row += 1
        where = self._restore(algorithm, checkpoints)
        # Counters stay, and so does the experience unless it was not finite itself.
        if diagnosis["quantity"] in GATHERED:
            algorithm.discard_experience()
        text = f"{text}; the weights are as they were {where}"
        tracker.set_tags({TAG: text})
        warnings.warn(text, RuntimeWarning, stacklevel=4)

    def _restore(self, algorithm: GenericAlgorithmBase[Any], checkpoints: CheckpointManager) -> str:
        """Restore the weights of the last good checkpoint, or those before the step; say which."""
        checkpoint = checkpoints.last_good() if self._mode == "rollback" else None
        learned = None
        if checkpoint is not None:  # a replay, which is each rank's own, stays
            state = checkpoint.state["trainer"]["algorithm"]
            learned = {name: state[name] for name in algorithm.learned_state() if name in state}
        saved = from_first(learned)
        if saved is None:
            algorithm.load_learned_state(self._before)
            return "before the step"
        take_over(algorithm, saved)
        return "in the last checkpoint" if checkpoint is None else f"in {checkpoint.path.name}"
