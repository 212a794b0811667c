"""Manages the checkpoints of one run: their folder and its lock, when to save, and the thread that writes them."""

from __future__ import annotations

import contextlib
import math
import os
import shlex
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from rl8x import keys
from rl8x.checkpoint import files
from rl8x.checkpoint.files import Best, Checkpoint, listed
from rl8x.checkpoint.tree import CheckpointError, copied, segments_in
from rl8x.config.spec import Checkpoints, CheckpointsLike
from rl8x.disk import check_writable, replace_synced, sync_folder
from rl8x.output import shown
from rl8x.tracking import Tracker
from rl8x.tracking.location import make_mlruns, mlruns_dir
from rl8x.tracking.locks import FolderLock
from rl8x.tracking.runs import shown_path
from rl8x.tracking.secrets import logger

_log = logger(__name__)

# Seconds that a resumed run waits for the previous process, which may still be saving after a signal.
_BUSY_WAIT_S: Final = 10.0


class CheckpointManager:
    """Writes the checkpoints of one run into one folder, by default beside its journal, locked from `take` to `end`."""

    def __init__(self, checkpoints: CheckpointsLike, tracker: Tracker) -> None:
        if isinstance(checkpoints, str | os.PathLike):
            checkpoints = Checkpoints(checkpoints)
        if checkpoints is not None and not isinstance(checkpoints, bool | Checkpoints):
            raise TypeError(f"`checkpoints` must be a Checkpoints, a path, a bool or None; got {shown(checkpoints)}.")
        self.key = uuid.uuid4().hex  # identifies the run in its checkpoints
        # The best value so far of `Checkpoints.best`, the value of the best checkpoint, and that checkpoint's path.
        self.best: Best | None = None
        self._written_best: Best | None = None
        self.best_path: Path | None = None
        # None saves only if the run is stored on disk, so that a MemoryTracker's run leaves no files.
        self._where_tracked = checkpoints is None
        self.options = Checkpoints() if checkpoints is None or checkpoints is True else checkpoints or None
        self._directory = None if not self.options or self.options.directory is None else Path(self.options.directory)
        self._tracker = tracker
        self._newest: str | None = None  # the newest checkpoint in the folder that this trainer knows of
        self.left: frozenset[str] = frozenset()  # newer checkpoints than the one that the run was resumed from
        self._lock: FolderLock | None = None
        self._thread: threading.Thread | None = None
        self._written: Path | None = None
        # The last checkpoint that was written or resumed from: it is valid, and later ones share its segments.
        self._shared: Path | None = None
        self._last_save = time.monotonic()

    @property
    def directory(self) -> Path | None:
        """The run's folder of checkpoints; None if nothing is saved, or the folder is not known yet."""
        if self.options is None or self._directory is not None:
            return self._directory
        journal: Path | None = getattr(self._tracker, "journal_folder", None)
        if journal is not None:
            return journal.parent.parent / "checkpoints" / journal.name
        return None if self._where_tracked else mlruns_dir() / "checkpoints" / self.key

    @property
    def root(self) -> Path | None:
        """The parent of this run's folder, or the folder itself if one was given; None if nothing is saved."""
        if self.options is None:
            return None
        root: Path | None = getattr(self._tracker, "spool_root", None)
        tracked = None if root is None else root.parent / "checkpoints"
        return self._directory or tracked or (None if self._where_tracked else mlruns_dir() / "checkpoints")

    @property
    def best_metric(self) -> str | None:
        """The metric that selects the best checkpoint; None if there is none."""
        return None if self.options is None else self.options.best

    # -- the folder and its lock

    def check(self) -> bool:
        """Return whether checkpoints will be written; raise if the folder cannot be used. Changes nothing."""
        directory = self.directory or self.root
        if directory is not None:
            with _for_checkpoints(directory):
                check_writable(directory)
        return directory is not None

    @property
    def is_open(self) -> bool:
        """Whether this process holds the folder's lock."""
        return self._lock is not None and self._lock.is_held

    def take(self) -> None:
        """Lock the folder, if it is known, and remove leftovers of killed processes; raise if it is another run's."""
        if self.options is None or self._directory is None or self.is_open:
            return
        self._directory = self._directory.absolute()  # a script may change its working directory
        self._lock, self._written = self._locked(self._directory, _BUSY_WAIT_S), None
        self._last_save = time.monotonic()

    def _locked(self, directory: Path, wait_s: float) -> FolderLock:
        """Make and lock a folder for this run, and remove leftovers in it; raise as `take` does."""
        lock = FolderLock(directory)
        with _for_checkpoints(directory):
            directory.mkdir(parents=True, exist_ok=True)
            if not lock.acquire(wait_s):
                raise CheckpointError(f"{directory} is in use by {lock.owner()}; wait for it or end it")
        try:
            self._look_around(directory)
        except CheckpointError:
            lock.release()
            raise
        files.tidy(directory)
        for folder in directory.parents[:2]:  # these may be new, too
            sync_folder(folder)
        return lock

    def is_ready(self, steps: int) -> bool:
        """Return whether a checkpoint can be written now; make a deleted folder again, with a warning."""
        self.wait()
        if self._directory is not None and self._lock is not None and self._lock.is_deleted:
            try:
                lock = self._locked(self._directory, 0.0)
            except CheckpointError as error:
                self.skip(steps, error)
                return False
            self._lock.release()
            self._lock, self._shared = lock, None
            _log.warning("rl8x: %s was deleted with its checkpoints, and is made anew", self._directory)
        return self.is_open

    def _look_around(self, directory: Path) -> None:
        """Find the best checkpoint in the run's folder; raise if the folder belongs to another run."""
        best = dict[int, Path]()
        for path in listed(directory):
            try:
                metadata = files.describe(path)
            except CheckpointError:
                continue
            if metadata["run"]["key"] != self.key:
                raise CheckpointError(
                    f"{directory} has checkpoints of another run: give this run a directory of its own, or resume that "
                    f"by `rl8x resume {shlex.quote(str(directory))}`, in a script Trainer.resume({str(directory)!r})"
                )
            if metadata["is_best"]:
                best[metadata["counters"][keys.STEPS]] = path
        # Best checkpoints after the one that the run was resumed from do not count.
        self.best_path = None if self.best is None else best.get(self.best["steps"])

    @property
    def superseded(self) -> bool:
        """Whether another process has continued the run: the folder has newer checkpoints than this trainer knows."""
        if self._newest is None or self._directory is None:
            return False
        return any(path.name > self._newest for path in listed(self._directory))

    def superseded_error(self) -> CheckpointError:
        """Return the error for a trainer whose run another process has continued."""
        return CheckpointError(
            f"another process has gone on with this run meanwhile: {self._directory} has newer checkpoints than this "
            f"trainer knows; resume from the newest by Trainer.resume({str(self._directory)!r})"
        )

    def begin(self) -> Path | None:
        """Lock and return the folder, or return None if nothing is saved; a tracked run must have begun."""
        directory = self.directory
        if self.options is None or directory is None:
            return None
        if self.options.directory is None and directory.parent.parent.name == "mlruns":
            with contextlib.suppress(OSError):  # `take` reports the error
                make_mlruns(directory.parent.parent)
        self._directory = directory
        self.take()
        if self.superseded:
            self.end()
            raise self.superseded_error()
        return directory

    def end(self) -> Path | None:
        """Wait until the last checkpoint is written, unlock the folder, and return that checkpoint."""
        if self._lock is None or self._directory is None:
            return None
        try:
            self.wait()
        finally:
            lock, self._lock = self._lock, None
            lock.release()
        return self._written

    def go_on_from(self, checkpoint: Checkpoint, newest: Path) -> None:
        """Continue the run of a checkpoint, in its folder, in which `newest` is known, unless another was given."""
        self.best = self._written_best = checkpoint.state["best"]
        self.key = checkpoint.metadata["run"]["key"]
        folder, self._shared = checkpoint.path.parent, checkpoint.path.absolute()
        if self.options is not None and self._directory is None:
            self._directory = folder.absolute()
        same = self._directory is not None and self._directory.resolve() == folder.resolve()
        self._newest = newest.name if same else None
        later = (path.name for path in listed(folder) if checkpoint.path.name < path.name <= newest.name)
        self.left = frozenset(later) if same else frozenset()

    # -- writing and reading

    def due(self, steps: int) -> bool:
        """Return whether a checkpoint is due after `steps` steps of the trainer."""
        if not self.is_open or self.options is None:
            return False
        every, minutes = self.options.every_steps, self.options.every_minutes
        by_time = minutes is not None and time.monotonic() - self._last_save >= minutes * 60
        return by_time or (every is not None and steps % every == 0)

    def improved(self, stats: Mapping[str, float], fresh: frozenset[str], steps: int) -> bool:
        """Return whether the `fresh` metrics of a row have a new best value of `Checkpoints.best`."""
        metric, options, best = self.best_metric, self.options, self.best
        if not self.is_open or options is None or metric not in fresh or not math.isfinite(stats[metric]):
            return False
        value, sign = stats[metric], 1 if options.mode == "max" else -1
        comparable = best is not None and (best["metric"], best["mode"]) == (metric, options.mode)
        if best is not None and comparable and sign * value <= sign * best["value"]:
            return False
        self.best = {"metric": metric, "mode": options.mode, "value": value, "steps": steps}
        return True

    def forget_best(self, is_other: Callable[[str], bool]) -> None:
        """Reset the best value if `is_other` holds for its metric, which is measured differently from here on."""
        if self.best is not None and is_other(self.best["metric"]):
            self.best = self._written_best = None

    def save(self, steps: int, metadata: Mapping[str, Any], state: Any) -> None:
        """Copy a state, and write the copy in a thread, after the previous one."""
        kept = self.kept_segments
        if self.options is None or self._directory is None or not self.is_open:
            return
        try:
            saved = copied(state)
            segments = {each.name: None if each.name in kept else each.content() for each in segments_in(state)}
        except TypeError as error:
            self.skip(steps, error)
            return
        arguments = (steps, metadata, saved, segments, self.best)
        self._thread = threading.Thread(target=self._write, args=arguments, name="rl8x-checkpoint")
        self._thread.start()
        self._last_save = time.monotonic()

    @property
    def kept_segments(self) -> frozenset[str]:
        """The segments of all ranks that the next checkpoint can share, once nothing is being written."""
        self.wait()
        return frozenset() if self._shared is None else files.kept_segments(self._shared)

    def skip(self, steps: int, reason: object) -> None:
        """Warn that a step has no checkpoint, and reset the best value to that of the last written best."""
        self.best = self._written_best
        _log.warning("rl8x: no checkpoint at step %d: %s", steps, reason)

    def _write(self, steps: int, metadata: Mapping[str, Any], state: Any, segments: Any, best: Best | None) -> None:
        """Write a checkpoint by paths that stay valid if the folder is moved meanwhile; `best` is the value so far."""
        assert self.options is not None
        assert self._directory is not None
        assert self._lock is not None
        directory, place, shared = self._directory, self._lock.place, self._shared
        if shared is not None and shared.parent == directory:
            shared = place / shared.name
        try:
            # A resumed run does not log earlier rows again, so they must be on disk before the checkpoint is.
            getattr(self._tracker, "sync_to_disk", lambda: None)()
            path = directory / files.write(place, steps, metadata, state, segments, shared).name
        except (OSError, ValueError, TypeError) as error:
            why = str(error).replace(str(place), str(directory))
            _log.warning("rl8x: no checkpoint at step %d, those before are kept: %s", steps, why)
            if metadata["is_best"] and self.best is best:
                self.best = self._written_best  # the next row that is better than the written best is saved
            return
        self._written, self._shared, self._newest = path, path, path.name
        if metadata["is_best"]:
            self.best_path, self._written_best = path, best
        kept = {path.name for path in listed(place)[-self.options.keep :]} | {self.best_path and self.best_path.name}
        for old in listed(place):
            if old.name not in kept:
                files.remove(old)

    def wait(self) -> Path | None:
        """Wait until nothing is being written; return the current path of the last written checkpoint."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        before, lock = self._directory, self._lock
        if lock is not None and before is not None and lock.follow():
            self._directory = now = lock.folder
            self._written, self._shared, self.best_path = (
                now / path.name if path is not None and path.parent == before else path
                for path in (self._written, self._shared, self.best_path)
            )
            _log.warning("rl8x: the checkpoints in %s were moved to %s, where the next ones go", before, now)
        return self._written if self.is_open else None

    def last_good(self) -> Checkpoint | None:
        """Read the newest valid checkpoint of this run, without those that it left by a resume; None if none."""
        self.wait()
        for checkpoint in () if self.directory is None else files.good(self.directory):
            if checkpoint.metadata["run"]["key"] == self.key and checkpoint.path.name not in self.left:
                self._shared = checkpoint.path
                return checkpoint
        return None

    def write_text(self, name: str, text: str) -> Path | None:
        """Write a text file beside the checkpoints; return its path, or None if nothing is saved or writing fails."""
        self.wait()
        if self.options is not None and self.directory is not None:
            with contextlib.suppress(OSError):
                self.directory.mkdir(parents=True, exist_ok=True)
                path = self.directory / name
                replace_synced(path, text.encode())
                return path
        return None


@contextlib.contextmanager
def _for_checkpoints(directory: Path) -> Iterator[None]:
    """Turn an `OSError` in the block into a `CheckpointError` that says what to do."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(
            f"{shown_path(directory)} cannot hold checkpoints ({error.strerror}): give another folder by "
            "checkpoints.directory=FOLDER, in a script Checkpoints(directory=...), or change to one that can be written"
        ) from None
