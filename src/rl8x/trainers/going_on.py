"""How to go on with a run that has ended: as a command where one can say all that it takes, else as a call."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rl8x.checkpoint import listed
from rl8x.checkpoint.build import names_in
from rl8x.conditions.spec import kinds_in
from rl8x.importing import runs_code, texts
from rl8x.output import is_interactive
from rl8x.tracking import MLflowTracker, Tracker
from rl8x.tracking.protocol import Status
from rl8x.tracking.runs import Whereabouts, shown_path
from rl8x.trainers.resume import REMADE, kind_of
from rl8x.trainers.run_state import RunState


@dataclasses.dataclass(frozen=True, kw_only=True)
class GoingOn:
    """Knows of a run how it was made and kept, and says how to go on with it.

    Attributes:
        build: How its algorithm was built, as plain data.
        options: The trainer's options as plain data.
        run_file: The run file that made it, if one did.
        run: The last `run()`; None where there was none.
        tracker: What keeps it.
        directory: The folder of its checkpoints; None where it has none.
        steps: Steps of the trainer.
        steered: Whether a function gave its `env_config`, which no file holds.
        plays: Whether it has an environment to be watched in.
    """

    build: Mapping[str, Any]
    options: Mapping[str, Any]
    run_file: Mapping[str, Any] | None
    run: RunState | None
    tracker: Tracker
    directory: Path | None
    steps: int
    steered: bool
    plays: bool

    def lines(self, status: Status) -> list[str]:
        """Say where the run is, its tracked run too, and how to go on with it; a fact a line."""
        where, tracker, directory = self._whereabouts, self.tracker, self.directory
        if where is not None:
            lines = where.lines()
        else:
            lines = [] if tracker.resume_handle is None else [f"run {tracker.resume_handle} is in {tracker.location}"]
        saved = [] if directory is None else listed(directory)
        if directory is None or not saved or self.run is None:
            return lines
        if status == "KILLED" and is_interactive():
            lines.append("to go on in this session: call run() of this trainer again")
        word, step = None if where is None else where.resume_word, saved[-1].name.rpartition("-")[2]
        finished = status == "FINISHED" and int(step) == self.steps  # else the disk did not take the end
        limit = self.run.limit_reached if finished else None
        purpose = "to train on" if finished else f"to go on from step {step}"
        call = self._call(shown_path(directory.absolute()), word, finished=finished)
        lines.append(f"{purpose}: {call}" + ("" if limit is None else f", N above {max(limit, self.run.steps)}"))
        return lines

    def calls(self, *, finished: bool) -> dict[str, str]:
        """Say what can be done with the run, also where its store is not at hand; nothing where nothing is saved.

        Args:
            finished: Whether it has come to its end.
        """
        if self.directory is None or not (self.run is not None or listed(self.directory)):
            return {}
        folder = str(self.directory.absolute())
        calls = {"to train on" if finished else "to go on with it": self._call(folder, None, finished=finished)}
        names = [*names_in(self.build)]
        if not (self._missing("algorithm") or any(name.startswith("__main__.") for name in names)):
            run = f"{shlex.quote(folder)}{' --trust' * any(map(runs_code, names))}"
            calls["to take its policy elsewhere"] = f"rl8x export {run} --format pt2"
            if self.plays:
                calls["to watch it play"] = f"rl8x play {run}"
        return calls

    def _call(self, folder: str, word: str | None, *, finished: bool) -> str:
        """Write what goes on with the run: a command where one can, else a call; capitals stand for what to fill in.

        Args:
            folder: The folder of its checkpoints.
            word: What finds the run in its store; None where the folder is to be given.
            finished: Whether it has come to its end, so that it must be told when to stop.
        """
        limit = self.run.limit_reached if finished and self.run is not None else None
        met = finished and self.run is not None and (bool(self.run.met) or limit is None)
        if not self._needs_script:
            call = f"{self._command(in_store=word is not None)} {word or shlex.quote(folder)}"
            return call + " --max-steps N" * (limit is not None) + " --stop CONDITION" * met
        arguments = [repr(folder), *self._missing(), *["trust=True"] * (not self._is_found)]
        asks = self.run is not None and None in self.run.specs
        options = ["max_steps=N"] * (limit is not None) + ["stop_conditions=[...]"] * (met or asks)
        options += ["env_config=..."] * self.steered
        return f"Trainer.resume({', '.join(arguments)}).run({', '.join(options)})"

    @property
    def _needs_script(self) -> bool:
        """Whether going on needs what no command line can give."""
        asks = self.run is not None and None in self.run.specs
        by_hand = bool(self._missing()) or asks or self.steered
        return by_hand or any(name.startswith("__main__.") for name in self._names())

    def _command(self, *, in_store: bool) -> str:
        """Write the command but for the run's name; `--trust` runs code, or uses a store that only the folder names."""
        trust = any(map(runs_code, self._names())) or not (in_store or self._is_found)
        return "rl8x resume" + " --trust" * trust

    @property
    def _whereabouts(self) -> Whereabouts | None:
        return self.tracker.whereabouts() if isinstance(self.tracker, MLflowTracker) else None

    @property
    def _is_found(self) -> bool:
        """Whether a command that is given the folder may use the store without a further word."""
        where = self._whereabouts
        return where is None or self.directory is None or where.is_found_by(self.directory)

    def _names(self) -> list[str]:
        """List what going on imports by its name."""
        file = (self.run_file or {}) if self.build["problems"] else {}
        parts = [file.get(name) for name in ("env", "env_kwargs", "algorithm", "algorithm_config")]
        conditions = [] if self.run is None else self.run.specs
        return [*names_in(self.build), *texts(parts), *kinds_in(conditions)]

    def _missing(self, *parts: str) -> list[str]:
        """List the arguments of `Trainer.resume` that no checkpoint can give, of all parts or of some."""
        missing = {
            "algorithm": self.run_file is None and bool(self.build["problems"]),
            "tracker": kind_of(self.tracker) not in REMADE,
            "eval_env": self.options["eval_env"] == "given",
            "callbacks": self.run is not None and bool(self.run.callbacks),
        }
        return [f"{name}=[...]" if name == "callbacks" else f"{name}=..." for name in parts or missing if missing[name]]
