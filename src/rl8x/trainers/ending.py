"""What a user is told when a run ends: where it is, what of it has not arrived, and how to go on with it."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rl8x.checkpoint import listed
from rl8x.importing import runs_code
from rl8x.tracking import MLflowTracker
from rl8x.tracking.whereabouts import shown_path
from rl8x.trainers.resume import TRACKERS

if TYPE_CHECKING:
    from rl8x.trainers.trainer import GenericTrainerBase


def ending(
    trainer: GenericTrainerBase[Any], *, max_steps: int | None, met: bool, conditions: Sequence[Any]
) -> list[str]:
    """Say where a run is that has just ended, its tracked run too, and how to go on with it; a fact a line.

    Args:
        trainer: What was run.
        max_steps: The limit that the run has come to; None where it has come to none.
        met: Whether a stop condition ended it.
        conditions: Its stop conditions as plain data; None for those that have no such form.
    """
    tracker = trainer.tracker
    told = tracker.whereabouts() if isinstance(tracker, MLflowTracker) else None
    if told is not None:
        lines = told.lines()
    else:
        lines = [] if tracker.resume_handle is None else [f"run {tracker.resume_handle} is in {tracker.location}"]
    directory = trainer.saving.directory
    saved = [] if directory is None else listed(directory)
    if directory is not None and saved:
        what = "to train on" if met or max_steps is not None else f"to go on from step {saved[-1].name.split('-')[-1]}"
        folder = shown_path(directory.absolute())
        to_give, callables = _to_give(trainer), None in conditions
        if to_give or callables or _is_of_a_script(trainer.saving.names(conditions)):
            to_give += ["trust=True"] * (not _is_found(trainer, directory))
            command = _in_a_script(folder, to_give, max_steps is not None, met or callables)
        else:
            word = None if told is None else told.resume_word
            where = None if word else directory
            command = f"{resume_command(trainer, conditions, where)} {word or shlex.quote(folder)}"
            command += " --max-steps N" * (max_steps is not None) + " --stop CONDITION" * met
        lines.append(f"{what}: {command}" + ("" if max_steps is None else f", N above {max_steps}"))
    return lines


def resume_command(trainer: GenericTrainerBase[Any], conditions: Sequence[Any], directory: Path | None) -> str:
    """Write the command that goes on with a run but for the run's name.

    It has `--trust` where it has to run code, or to use a store that it finds in the run's folder of checkpoints only.

    Args:
        trainer: What was run.
        conditions: As `ending` takes them.
        directory: The folder that it is given; None where it finds the run in the store.
    """
    trust = any(map(runs_code, trainer.saving.names(conditions)))
    return "rl8x resume" + " --trust" * (trust or not (directory is None or _is_found(trainer, directory)))


def _is_found(trainer: GenericTrainerBase[Any], directory: Path) -> bool:
    """Whether the store may be used by a command that is told this folder, without a further word."""
    told = trainer.tracker.whereabouts() if isinstance(trainer.tracker, MLflowTracker) else None
    return told is None or told.is_found_by(directory)


def _is_of_a_script(names: Sequence[str]) -> bool:
    """Whether something is defined in the script itself, which no other process can import."""
    return any(name.startswith("__main__.") for name in names)


def _to_give(trainer: GenericTrainerBase[Any]) -> list[str]:
    """List what a resume cannot take from a checkpoint."""
    to_give = []
    if trainer.saving.needs_algorithm:
        to_give.append("algorithm=...")
    if type(trainer.tracker).__name__ not in TRACKERS:
        to_give.append("tracker=...")
    if trainer.options["eval_env"] == "given":
        to_give.append("eval_env=...")
    return to_give


def _in_a_script(folder: str, to_give: Sequence[str], more: bool, conditions: bool) -> str:
    options = ["max_steps=N"] * more + ["stop_conditions=[...]"] * conditions
    return f"Trainer.resume({', '.join([repr(folder), *to_give])}).run({', '.join(options)})"
