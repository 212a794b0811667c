"""What happens when a number is not finite: name it, and stop, skip the update, or go back to the last good weights.

An algorithm puts the counts of values that are not finite among a step's statistics, under `finite/` and the quantity's
name; they come to the host with everything else. Where one is not 0 there is time to look closely.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final, Literal, NoReturn

import torch
from torch import Tensor

from rl8x import keys
from rl8x.algorithms.base import GenericAlgorithmBase
from rl8x.checkpoint.tree import clone
from rl8x.rollouts.statistics import final_not_finite

if TYPE_CHECKING:
    from rl8x.trainers.trainer import GenericTrainerBase

OnNonFinite = Literal["stop", "skip", "rollback"]
CHOICES: Final = ("stop", "skip", "rollback")
PREFIX: Final = "finite/"
TAG: Final = "rl8x.non_finite"
# Causes before effects; among those that were gathered the earliest in the horizon comes first.
QUANTITIES: Final[tuple[str, ...]] = ("observations", "actions", "rewards", "losses", "gradients", "parameters")
GATHERED: Final[tuple[str, ...]] = ("observations", "actions", "rewards")
# Skipping for ever would hide that nothing is learned any more.
MAX_IN_A_ROW: Final = 10
_BUFFER_KEYS: Final = {
    "observations": (keys.OBS,),
    "actions": (keys.ACTIONS, keys.LOGP),
    "rewards": (keys.REWARDS,),
    "losses": (keys.VALUES, keys.FINAL_VALUES),
}
_MAX_LISTED: Final = 32
# What an algorithm's state has that is not learned: where the environments stand, and how far the run has come.
_GOES_ON: Final[tuple[str, ...]] = ("collector", "counters")


class NonFiniteError(ArithmeticError):
    """A number was not finite.

    Attributes:
        diagnosis: What was found, as plain data.
    """

    def __init__(self, message: str, diagnosis: Mapping[str, Any]) -> None:
        super().__init__(message)
        self.diagnosis = dict(diagnosis)


def take_counts(row: dict[str, float]) -> dict[str, float]:
    """Take the counts out of a row of statistics, and return those that are not 0, by quantity."""
    counts = {name.removeprefix(PREFIX): row.pop(name) for name in list(row) if name.startswith(PREFIX)}
    return {quantity: count for quantity, count in counts.items() if count != 0}


def diagnose(algorithm: GenericAlgorithmBase[Any], bad: Mapping[str, float]) -> dict[str, Any]:
    """Look for what is not finite, and say what, where and since when.

    Args:
        algorithm: What was trained; its last rollout is still in its buffer.
        bad: Counts by quantity.

    Returns:
        Plain data: the `quantity` that came first, the `environments` and the `slot` of the horizon where it did,
        whether it is `final` (in what an episode that was cut in this slot ended with), the counters, and which
        parameters and gradients are affected.
    """
    found: dict[str, Any] = {
        quantity: _look(algorithm, quantity) for quantity in QUANTITIES if quantity in _BUFFER_KEYS
    }
    quantity = min(bad, key=lambda name: _order(name, found.get(name)))
    place = found.get(quantity)
    parameters = dict(algorithm.policy.named_parameters())
    return {
        "quantity": quantity,
        "also": [name for name in QUANTITIES if name in bad and name != quantity],
        "environments": [] if place is None else place["environments"],
        "num_environments": 0 if place is None else place["num_environments"],
        "slot": None if place is None else place["slot"],
        "final": place is not None and place["final"],
        "step": algorithm.counters[keys.STEPS],
        "counters": dict(algorithm.counters),
        "rollout": {name: value for name, value in found.items() if value is not None},
        "parameters": [name for name, value in parameters.items() if not _finite(value)],
        "gradients": [name for name, value in parameters.items() if value.grad is not None and not _finite(value.grad)],
        "env": type(algorithm.env).__name__,
        "env_config": algorithm.env.config,
        "num_envs": algorithm.env.num_envs,
    }


def _order(quantity: str, place: Mapping[str, Any] | None) -> tuple[int, float, int]:
    rank = QUANTITIES.index(quantity) if quantity in QUANTITIES else len(QUANTITIES)
    if quantity not in GATHERED:
        return 1, 0.0, rank
    return 0, float("inf") if place is None else place["slot"], rank


def _finite(tensor: Tensor) -> bool:
    return bool(torch.isfinite(tensor.detach()).all())


def _look(algorithm: GenericAlgorithmBase[Any], quantity: str) -> dict[str, Any] | None:
    """Find the first slot of the last rollout in which a quantity is not finite, and in which copies it ever is not."""
    buffer = getattr(algorithm, "buffer", None)
    if buffer is None:
        return None
    bad: Tensor | None = None
    names = [name for name in buffer.keys() if name.split("/")[0] in _BUFFER_KEYS[quantity]]  # noqa: SIM118
    for value in (buffer[name] for name in names if buffer[name].is_floating_point()):
        wrong = ~torch.isfinite(value).reshape(*value.shape[:2], -1).all(-1)
        bad = wrong if bad is None else bad | wrong
    final: Tensor | None = None
    if quantity == "observations" and keys.FINAL_VALUES in buffer.keys():  # noqa: SIM118
        final = final_not_finite(buffer[keys.VALUES], buffer[keys.FINAL_VALUES])
        bad = final if bad is None else bad | final
    if bad is None or not bool(bad.any()):
        return None
    slot = int(bad.any(0).nonzero()[0])
    environments = bad[:, slot].nonzero().flatten().tolist()
    return {
        "slot": slot,
        "environments": environments[:_MAX_LISTED],
        "num_environments": len(environments),
        "num_environments_in_rollout": int(bad.any(1).sum()),
        "final": final is not None and bool((final[:, slot] & bad[:, slot]).any()),
    }


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
    also = f"; then {', '.join(diagnosis['also'])}" if diagnosis["also"] else ""
    return f"{diagnosis['quantity']} not finite at step {diagnosis['step']}, {where}{also}"


def to_json(diagnosis: Mapping[str, Any]) -> str:
    """Write a diagnosis as a file."""
    return json.dumps(diagnosis, indent=1, default=str) + "\n"


class Guard:
    """Looks at each step's counts, and does what the trainer was asked to do about non-finite numbers.

    Args:
        trainer: The trainer.
        mode: Its `on_non_finite`.

    Raises:
        ValueError: If there is no such mode.
    """

    def __init__(self, trainer: GenericTrainerBase[Any], mode: OnNonFinite) -> None:
        if mode not in CHOICES:
            raise ValueError(f"`on_non_finite` must be one of {', '.join(map(repr, CHOICES))}; got {mode!r}.")
        self._trainer = trainer
        self._mode = mode
        self._before: dict[str, Any] = {}
        self._in_a_row = 0

    def before_step(self) -> None:
        """Keep what has been learned so far, where it may be wanted back."""
        if self._mode != "stop":
            state = self._trainer.algorithm.state_dict()
            self._before = {name: clone(value) for name, value in state.items() if name not in _GOES_ON}

    def after_step(self, bad: Mapping[str, float]) -> None:
        """Do nothing where all numbers are finite; else stop, or take the update back.

        Args:
            bad: Counts by quantity, of those that are not 0.

        Raises:
            NonFiniteError: If the run is to stop.
        """
        if not bad:
            self._in_a_row = 0
            return
        diagnosis = diagnose(self._trainer.algorithm, bad)
        if self._mode == "stop" or self._in_a_row >= MAX_IN_A_ROW:
            self._stop(diagnosis)
        self._in_a_row += 1
        checkpoint = self._trainer.saving.last_good() if self._mode == "rollback" else None
        learned = self._before if checkpoint is None else checkpoint.state["trainer"]["algorithm"]
        self._go_back(learned, restart=diagnosis["quantity"] in GATHERED)
        to = "before the step" if checkpoint is None else f"in {checkpoint.path.name}"
        text = f"{message(diagnosis)}; the weights are as they were {to}"
        self._trainer.tracker.set_tags({TAG: text})
        warnings.warn(text, RuntimeWarning, stacklevel=4)

    def _stop(self, diagnosis: Mapping[str, Any]) -> NoReturn:
        text, tracker = message(diagnosis), self._trainer.tracker
        tracker.set_tags({TAG: text})
        tracker.log_text(to_json(diagnosis), "diagnosis.json")
        tracker.log_text(text + "\n", "diagnosis.txt")
        path = self._trainer.saving.write_text(f"diagnosis-step-{diagnosis['step']}.json", to_json(diagnosis))
        raise NonFiniteError(text if path is None else f"{text}; see {path}", diagnosis)

    def _go_back(self, learned: Mapping[str, Any], *, restart: bool) -> None:
        """Put back what was learned; what was gathered goes on, in new episodes where it may not be finite either."""
        algorithm = self._trainer.algorithm
        now = algorithm.state_dict()
        going_on = {name: clone(now[name]) for name in _GOES_ON if name in now}
        if restart and "collector" in going_on:
            going_on["collector"]["cursor"] = None
        algorithm.load_state_dict({**learned, **going_on})
