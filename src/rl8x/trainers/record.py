"""The record of a run: what its checkpoints hold beside its state, and how to go on with it, in words for a user."""

from __future__ import annotations

import functools
import os
import shlex
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rl8x import keys
from rl8x.algorithms.base import GenericAlgorithmBase
from rl8x.checkpoint import CheckpointManager, CheckpointsLike, listed
from rl8x.checkpoint.build import describe_algorithm, names_in
from rl8x.conditions.spec import kinds_in
from rl8x.importing import runs_code, texts
from rl8x.tracking import MLflowTracker, Tracker
from rl8x.tracking.location import beside
from rl8x.tracking.protocol import Status
from rl8x.tracking.runs import Whereabouts, shown_path
from rl8x.tracking.secrets import hide_in_data
from rl8x.trainers.description import run_file
from rl8x.trainers.resume import REMADE, kind_of, torch_generators
from rl8x.trainers.run_state import RunState


class Record:
    """Writes a run's checkpoints and last lines, from what is known of the run.

    Args:
        algorithm: What is trained.
        tracker: What keeps the run.
        checkpoints: As the trainer documents it.
        options: The trainer's options as plain data.

    Attributes:
        tracker: What keeps the run; may be another before the run begins.
        checkpoints: The manager of the run's checkpoints.
        run_file: The run file that made the run, if one did.
        run: The run in progress, or the last one; None where there was none.
    """

    def __init__(
        self,
        algorithm: GenericAlgorithmBase[Any],
        tracker: Tracker,
        checkpoints: CheckpointsLike,
        options: Mapping[str, Any],
    ) -> None:
        self.algorithm = algorithm
        self.tracker = tracker
        self.options = options
        self.run_file: dict[str, Any] | None = None
        self.run: RunState | None = None
        self.checkpoints = CheckpointManager(
            checkpoints,
            spool=lambda: getattr(self.tracker, "spool_folder", None),
            spool_root=lambda: getattr(self.tracker, "spool_root", None),
            # A run that goes on from a checkpoint does not log again what came before it: that must not be lost later.
            before_write=lambda: getattr(self.tracker, "sync_to_disk", lambda: None)(),
        )

    @functools.cached_property
    def build(self) -> dict[str, Any]:
        """How the algorithm was built, as plain data."""
        return describe_algorithm(self.algorithm)

    def save(
        self, state: Mapping[str, Any], run: RunState | None, status: str = "RUNNING", *, is_best: bool = False
    ) -> None:
        """Write a checkpoint in the background, where checkpoints are written.

        Args:
            state: The trainer's state.
            run: The run in progress; None in a loop over `step()`.
            status: How far the run has come: `"RUNNING"`, `"KILLED"` or `"FINISHED"`.
            is_best: Whether this is the best so far.
        """
        manager, counters = self.checkpoints, self.algorithm.counters
        if not manager.is_open:
            return
        try:
            run_state = None if run is None else run.state_dict()
        except TypeError as error:  # a condition remembers by now what it did not at first
            manager.skip(counters[keys.STEPS], error)
            return
        metadata = {
            "status": status,
            "stop_reason": run.last.stop_reason if run is not None and run.last is not None else None,
            "counters": dict(counters),
            "run": {"key": manager.key, **self._tracked_run()},
            "build": self.build,
            "trainer": self.options,
            "run_file": self.run_file,
        }
        all_state = {
            "trainer": state,
            "run": run_state,
            "best": manager.best,
            "torch_generators": torch_generators(self.algorithm.device),
        }
        manager.save(counters[keys.STEPS], metadata, all_state, is_best=is_best)

    def _tracked_run(self) -> dict[str, Any]:
        """Say which tracked run it is; what may be moved together with the checkpoints, relative to their folder."""
        tracker, directory = self.tracker, self.checkpoints.directory
        spool: Path | None = getattr(tracker, "spool_folder", None)
        relative = None
        if spool is not None and directory is not None:
            relative = os.path.relpath(spool.resolve(), directory.resolve())
        return {
            "tracker": kind_of(tracker),
            "handle": tracker.resume_handle,
            "id": tracker.run_id,
            "location": tracker.location,
            "spool": relative,
            "database": None if directory is None else beside(directory, getattr(tracker, "database", None)),
        }

    def file(self, *, callbacks: bool) -> dict[str, Any] | None:
        """Return the run file that the run was made from, or that makes it again; None where no file can say it.

        Args:
            callbacks: Whether there are callbacks, which no file has.
        """
        if self.run_file is not None:
            return dict(hide_in_data(self.run_file))
        if callbacks or self.run is None:
            return None
        options = {**self.options, **self.run.plain, "stop_conditions": self.run.specs}
        return run_file(self.algorithm, self.build, options)

    # -- how to go on

    def report(self, status: Status, stop_reason: str | None, say: Callable[[str], None]) -> list[str]:
        """Say how the run ended and how to go on, and return the latter; a fact a line."""
        verb, reason = "failed" if status == "FAILED" else "stopped", " ".join(str(stop_reason).split())
        lines = self.ending(status)
        for line in (f"{verb} after {self.algorithm.counters[keys.STEPS]:,} steps: {reason:.300}", *lines):
            say(line)
        return lines

    @property
    def command(self) -> str | None:
        """The command that goes on with the run, also where its store is not at hand; None where nothing is saved."""
        directory = self.checkpoints.directory
        return None if directory is None else f"{self._command()} {shlex.quote(str(directory.absolute()))}"

    def ending(self, status: Status) -> list[str]:
        """Say where the run is, its tracked run too, and how to go on with it; a fact a line.

        Args:
            status: How it ended.
        """
        where, tracker, directory = self._whereabouts(), self.tracker, self.checkpoints.directory
        if where is not None:
            lines = where.lines()
        else:
            lines = [] if tracker.resume_handle is None else [f"run {tracker.resume_handle} is in {tracker.location}"]
        saved = [] if directory is None else listed(directory)
        if directory is None or not saved or self.run is None:
            return lines
        finished = status == "FINISHED"
        limit = self.run.limit_reached if finished else None
        met = finished and (bool(self.run.met) or limit is None)
        what = "to train on" if finished else f"to go on from step {saved[-1].name.split('-')[-1]}"
        folder, callables = shown_path(directory.absolute()), None in self.run.specs
        to_give = self._to_give()
        if to_give or callables or any(name.startswith("__main__.") for name in self._names()):
            to_give += ["trust=True"] * (not self._is_found())
            options = ["max_steps=N"] * (limit is not None) + ["stop_conditions=[...]"] * (met or callables)
            command = f"Trainer.resume({', '.join([repr(folder), *to_give])}).run({', '.join(options)})"
        else:
            word = None if where is None else where.resume_word
            command = f"{self._command(in_store=word is not None)} {word or shlex.quote(folder)}"
            command += " --max-steps N" * (limit is not None) + " --stop CONDITION" * met
        lines.append(f"{what}: {command}" + ("" if limit is None else f", N above {limit}"))
        return lines

    def _command(self, *, in_store: bool = False) -> str:
        """Write the command but for the run's name.

        It has `--trust` where it has to run code, or to use a store that it finds in the run's folder of checkpoints
        only.
        """
        trust = any(map(runs_code, self._names()))
        return "rl8x resume" + " --trust" * (trust or not (in_store or self._is_found()))

    def _whereabouts(self) -> Whereabouts | None:
        return self.tracker.whereabouts() if isinstance(self.tracker, MLflowTracker) else None

    def _is_found(self) -> bool:
        """Whether a command that is given the folder may use the store without a further word."""
        where, directory = self._whereabouts(), self.checkpoints.directory
        return where is None or directory is None or where.is_found_by(directory)

    def _names(self) -> list[str]:
        """List what going on imports by its name."""
        file = (self.run_file or {}) if self.build["problems"] else {}
        parts = [file.get(name) for name in ("env", "env_kwargs", "algorithm", "algorithm_config")]
        conditions = [] if self.run is None else self.run.specs
        return [*names_in(self.build), *texts(parts), *kinds_in(conditions)]

    def _to_give(self) -> list[str]:
        """List what a resume cannot take from a checkpoint."""
        missing = {
            "algorithm": self.run_file is None and bool(self.build["problems"]),
            "tracker": kind_of(self.tracker) not in REMADE,
            "eval_env": self.options["eval_env"] == "given",
        }
        return [f"{name}=..." for name, is_missing in missing.items() if is_missing]
