"""A trainer's checkpoints: what goes into one, when one is written, and going back to one."""

from __future__ import annotations

import contextlib
import datetime
import functools
import os
import platform
import uuid
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from rl8x import keys
from rl8x._version import __version__
from rl8x.checkpoint import Checkpoint, CheckpointError, Checkpoints, Saver
from rl8x.checkpoint.build import describe_algorithm, names_in
from rl8x.checkpoint.files import good, listed
from rl8x.checkpoint.find import CHECKPOINTS_TAG
from rl8x.conditions.spec import kinds_in
from rl8x.importing import texts
from rl8x.output import described
from rl8x.tracking import Tracker
from rl8x.tracking.address import beside
from rl8x.tracking.location import check_writable, make_mlruns, mlruns_dir
from rl8x.tracking.secrets import logger
from rl8x.tracking.whereabouts import shown_path
from rl8x.trainers.statistics import TrainStats

if TYPE_CHECKING:
    from rl8x.conditions import Condition
    from rl8x.trainers.run_state import Run
    from rl8x.trainers.trainer import GenericTrainerBase

_log = logger(__name__)

CheckpointsLike = Checkpoints | str | os.PathLike[str] | bool | None


class Saving:
    """Writes a trainer's checkpoints while it runs.

    Args:
        trainer: What is saved.
        checkpoints: As the trainer documents it.

    Attributes:
        key: The run's own key, by which its checkpoints are told from other runs'.
        restored: The interrupted run that the next `run()` goes on with, as its checkpoint has it.
        run_file: The run file that made the trainer, if one did, for the checkpoints to keep.
        trust: Whether what `restored` names may import any module.
    """

    def __init__(self, trainer: GenericTrainerBase[Any], checkpoints: CheckpointsLike) -> None:
        if isinstance(checkpoints, str | os.PathLike):
            checkpoints = Checkpoints(checkpoints)
        if checkpoints is not None and not isinstance(checkpoints, bool | Checkpoints):
            raise TypeError(f"`checkpoints` must be a Checkpoints, a path, a bool or None; got {checkpoints!r}.")
        self.key = uuid.uuid4().hex
        self.restored: dict[str, Any] | None = None
        self.run_file: dict[str, Any] | None = None
        self.trust = False
        self._trainer = trainer
        # None saves where the run is kept on a disk, so that a MemoryTracker's leaves nothing behind.
        self._where_tracked = checkpoints is None
        self.options = Checkpoints() if checkpoints is None or checkpoints is True else checkpoints or None
        self._directory = None if not self.options or self.options.directory is None else Path(self.options.directory)
        self._saver: Saver | None = None
        self._run: Run | None = None
        self._best: dict[str, Any] | None = None
        self._known: frozenset[str] | None = None
        self._has_begun = False
        if self.options and self.options.best is not None and self.options.best not in trainer.metric_names:
            raise ValueError(f"Checkpoints: `best` must be a metric of this trainer; got {self.options.best!r}.")

    @property
    def directory(self) -> Path | None:
        """The run's folder of checkpoints; None where nothing is saved, or not yet known where."""
        if self.options is None or self._directory is not None:
            return self._directory
        spool: Path | None = getattr(self._trainer.tracker, "spool_folder", None)
        if spool is not None:
            return spool.parent.parent / "checkpoints" / spool.name
        return None if self._where_tracked else mlruns_dir() / "checkpoints" / self.key

    @property
    def needs_algorithm(self) -> bool:
        """Whether neither checkpoints nor a run file say how the algorithm is built."""
        return self.run_file is None and bool(self.build["problems"])

    @functools.cached_property
    def build(self) -> dict[str, Any]:
        """How the algorithm is built, as plain data."""
        return describe_algorithm(self._trainer.algorithm)

    def names(self, conditions: Iterable[Any]) -> list[str]:
        """List what going on imports by its name.

        Args:
            conditions: The run's stop conditions as plain data.
        """
        file = self.run_file if self.build["problems"] else None
        parts = [(file or {}).get(name) for name in ("env", "env_kwargs", "algorithm", "algorithm_config")]
        return [*names_in(self.build), *texts(parts), *kinds_in(list(conditions))]

    # -- while it runs

    def check(self, conditions: Iterable[Condition]) -> None:
        """Refuse now a folder that could not be written, and conditions that could not be saved; touches nothing.

        Raises:
            CheckpointError: If the folder could not be written.
            TypeError: If a condition remembers what a checkpoint cannot hold.
        """
        directory = self.directory
        if directory is None and self.options is not None:
            root: Path | None = getattr(self._trainer.tracker, "spool_root", None)
            directory = None if root is None else root.parent / "checkpoints"
        if directory is not None:
            try:
                check_writable(directory)
            except OSError as error:
                raise CheckpointError(
                    f"{shown_path(directory)} cannot hold checkpoints ({error.strerror}): give another folder by "
                    "Checkpoints(directory=...), or change to one that can be written"
                ) from None
            for condition in conditions:
                condition.state_dict()

    def take(self) -> None:
        """Take the folder, where it is known before the tracked run has begun.

        Raises:
            CheckpointError: If another process has it, or another run, or it cannot be made.
        """
        if self.options is None or self._directory is None or self._saver is not None:
            return
        # A run that goes on from a checkpoint does not log again what came before it: that must not be lost later.
        sync: Callable[[], None] = getattr(self._trainer.tracker, "sync_to_disk", lambda: None)
        saver = Saver(self.options, self._directory, before_write=sync)
        saver.open(self.key)
        self._saver = saver

    @property
    def outrun(self) -> bool:
        """Whether another process has gone on with the run: the folder has checkpoints that are not known here."""
        directory = self._directory
        return self._known is not None and directory is not None and not _names(directory) <= self._known

    def begin(self, run: Run | None) -> None:
        """Take the folder, where checkpoints are wanted; a tracked run must have begun.

        Raises:
            CheckpointError: As `take` does, or if another process has gone on with the run.
        """
        self._run = run
        directory = self.directory
        if self.options is None or directory is None:
            return
        if self.options.directory is None and directory.parent.parent.name == "mlruns":
            with contextlib.suppress(OSError):  # the saver says what is in its way
                make_mlruns(directory.parent.parent)
        self._directory = directory
        self.take()
        if self.outrun:
            self.end()
            raise self.outrun_error()
        assert self._saver is not None
        self._saver.best, self._has_begun = self._best, True
        if run is not None:
            self._trainer.tracker.set_tags({CHECKPOINTS_TAG: str(directory.absolute())})

    def outrun_error(self) -> CheckpointError:
        """Return what a trainer is refused with whose run another process has gone on with."""
        return CheckpointError(
            f"another process has gone on with this run meanwhile: {self._directory} has newer checkpoints than this "
            f"trainer knows; resume from the newest by Trainer.resume({str(self._directory)!r})"
        )

    def due(self) -> bool:
        """Whether a checkpoint is to be written after this step."""
        return self._saver is not None and self._saver.due(self._trainer.state[keys.STEPS])

    def improved(self, stats: TrainStats) -> bool:
        """Whether a row has the best value so far of the metric to save the best of."""
        if self._saver is None or not self._saver.improved(stats, stats.fresh, self._trainer.state[keys.STEPS]):
            return False
        self._best = self._saver.best
        return True

    def save(self, *, status: str = "RUNNING", is_best: bool = False) -> None:
        """Write a checkpoint of the state after this step, in the background."""
        if self._saver is None:
            return
        steps = self._trainer.state[keys.STEPS]
        try:
            run = None if self._run is None else self._run.state_dict()
        except TypeError as error:  # a condition remembers by now what it did not at first
            _log.warning("rl8x: no checkpoint at step %d: %s", steps, error)
            return
        about, state = self._snapshot(status, run)
        self._saver.save(steps, about, state, is_best=is_best)

    def wait(self) -> Path | None:
        """Wait until nothing is being written; returns the last checkpoint that was."""
        return None if self._saver is None else self._saver.wait()

    def told(self) -> str:
        """Say where the last checkpoint is, once it is written."""
        path = self.wait()
        return f"saved {shown_path(path)}" if path is not None else "nothing saved: this run has no checkpoints"

    def end(self) -> Path | None:
        """Wait until the last checkpoint is written, and give the folder back."""
        saver, self._saver, self._run = self._saver, None, None
        if saver is None:
            return None
        try:
            saver.wait()
            if self._has_begun:
                self._known, self._has_begun = _names(saver.directory), False
        finally:
            path = saver.close()
        return path

    def last_good(self) -> Checkpoint | None:
        """Read the newest good checkpoint of this run."""
        self.wait()
        return None if self.directory is None else next(good(self.directory), None)

    def write_text(self, name: str, text: str) -> Path | None:
        """Write a file beside the checkpoints, for a person to read; None where there are none."""
        directory = self.directory
        if self.options is None or directory is None:
            return None
        with contextlib.suppress(OSError):
            directory.mkdir(parents=True, exist_ok=True)
            path = directory / name
            path.write_text(text)
            return path
        return None

    # -- what goes in and comes out

    def _snapshot(self, status: str, run: dict[str, Any] | None) -> tuple[dict[str, Any], dict[str, Any]]:
        trainer, tracker, options = self._trainer, self._trainer.tracker, self.options
        spool: Path | None = getattr(tracker, "spool_folder", None)
        about = {
            "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="microseconds"),
            "versions": {"rl8x": __version__, "torch": torch.__version__, "python": platform.python_version()},
            "status": status,
            "stop_reason": trainer.stop_reason if status == "FINISHED" else None,
            "counters": dict(trainer.state),
            "run": {
                "key": self.key,
                "tracker": type(tracker).__name__,
                "handle": tracker.resume_handle,
                "id": tracker.run_id,
                "location": tracker.location,
                "spool": _relative(spool, self._directory),
                "database": None if self._directory is None else beside(self._directory, _database_of(tracker)),
            },
            "build": self.build,
            "trainer": trainer.options,
            "checkpoints": None if options is None else options.to_dict(),
            "run_file": self.run_file,
        }
        state = {
            "trainer": trainer.state_dict(),
            "run": run,
            "best": self._best,
            # rl8x draws from generators of its own; a user's model may use torch's (dropout does).
            "torch_generators": _torch_generators(trainer.algorithm.device),
        }
        return about, state

    def restore(self, checkpoint: Checkpoint, known: Iterable[Path]) -> None:
        """Go on from a checkpoint: its state, its run, and its folder.

        Args:
            checkpoint: What to go on from.
            known: The checkpoints of its folder when it was chosen.

        Raises:
            CheckpointError: If it does not fit the trainer.
        """
        state, about = checkpoint.state, checkpoint.about
        try:
            self._trainer.load_state_dict(state["trainer"])
            _set_torch_generators(state["torch_generators"], self._trainer.algorithm.device)
            self.restored, self._best = state["run"], state["best"]
            self.key = about["run"]["key"]
        except (KeyError, TypeError, AttributeError, RuntimeError, ValueError) as error:
            reason = " ".join(described(error).split())
            raise CheckpointError(
                f"the checkpoint {checkpoint.path} does not fit this trainer: {reason:.300}"
            ) from error
        if self.options is not None and self._directory is None:
            self._directory = checkpoint.path.parent.absolute()
        same = self._directory is not None and self._directory.resolve() == checkpoint.path.parent.resolve()
        self._known = frozenset(path.name for path in known) if same else None


def _names(directory: Path) -> frozenset[str]:
    return frozenset(path.name for path in listed(directory))


def _database_of(tracker: Tracker) -> Path | None:
    database: Path | None = getattr(tracker, "database", None)
    return database


def _relative(spool: Path | None, directory: Path | None) -> str | None:
    """Name a spool relative to the checkpoints: the two may be moved or copied together."""
    return None if spool is None or directory is None else os.path.relpath(spool.resolve(), directory.resolve())


def _torch_generators(device: torch.device) -> dict[str, Any]:
    generators = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        generators["cuda"] = torch.cuda.get_rng_state(device)
    return generators


def _set_torch_generators(generators: Mapping[str, Any], device: torch.device) -> None:
    torch.set_rng_state(generators["cpu"])
    if device.type == "cuda" and "cuda" in generators:
        torch.cuda.set_rng_state(generators["cuda"], device)
