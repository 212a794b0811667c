"""Finds checkpoints by path, by the path of a run's folder, or by the run's name or ID."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Iterator
from pathlib import Path

from rl8x.checkpoint import files
from rl8x.checkpoint.files import Checkpoint
from rl8x.checkpoint.metadata import Metadata, Resolved, as_built, spec_of
from rl8x.checkpoint.tree import CheckpointError
from rl8x.config.spec import RunSpec
from rl8x.portable import SUFFIX
from rl8x.tracking import TrackingError
from rl8x.tracking.journal import CHECKPOINTS_TAG as CHECKPOINTS_TAG
from rl8x.tracking.journal import read_ack
from rl8x.tracking.location import mlruns_dir
from rl8x.tracking.locks import is_locked, was_left
from rl8x.tracking.runs import HANDLE_PREFIX, find_record
from rl8x.tracking.secrets import hide_in_data


def find(source: str | Path, *, auto: bool = False) -> Checkpoint:
    """Find and read a checkpoint.

    Args:
        source: Path of a checkpoint, or of a run's folder of them, whose newest is meant; or a run's name or ID.
        auto: Take the newest good checkpoint of the same run where the one that is meant cannot be used.

    Raises:
        CheckpointError: If there is none, or it cannot be used; the message names the newest good one.
    """
    path = Path(source)
    if path.suffix == SUFFIX and os.path.isfile(path):
        raise CheckpointError(f"{path} is a policy alone, without the rest of its run: Policy.load reads it")
    if not files.is_place(path):
        path = _folder_of_run(str(source))
    path = (files.listed(path) or [path])[-1]
    try:
        if not os.path.isdir(path):
            raise CheckpointError(f"there is no checkpoint {path}")
        return files.read(path)
    except CheckpointError as error:
        other = next(files.good(path.parent, besides=path), None)
        if other is not None and auto:
            return other
        hint = "there is no good one beside it" if other is None else f"the newest good one is {other.path}"
        raise CheckpointError(f"{error}; {hint}") from None


def _folder_of_run(run: str) -> Path:
    """Find a run's folder of checkpoints by its name, which may read like a path, its metadata, or its ID in MLflow."""
    root = mlruns_dir() / "checkpoints"
    names = {run, run.removeprefix(HANDLE_PREFIX)}
    for folder, metadata in _runs(root):
        if folder.name in names or run in (metadata["run"]["id"], metadata["run"]["handle"]):
            return folder
    try:
        stored_run = find_record(run)
    except TrackingError as error:
        path = Path(run)
        where = f"in {path}" if os.path.isdir(path) else path
        there = f"there is no checkpoint {where}, and " if os.path.isdir(path) or len(path.parts) > 1 else ""
        raise CheckpointError(
            f"{there}{error}; and no folder of checkpoints in {root} is of this name. To look in another store set "
            "MLFLOW_TRACKING_URI; the path of its checkpoints finds any run"
        ) from None
    # The checkpoints of a short run were written before it had an ID, so ask the run for them.
    tagged = Path(stored_run.tags.get(CHECKPOINTS_TAG, "none"))
    for folder, metadata in _runs(root):
        if metadata["run"]["id"] == stored_run.id or folder.name == tagged.name:
            return folder
    if tagged.is_absolute() and files.listed(tagged):
        return tagged
    raise CheckpointError(
        f"the run {run!r} ({stored_run.id}) has no checkpoints in {root}: give the path of one. A loop over "
        "step() has those that trainer.save() makes"
    )


def find_unfinished(spec: RunSpec, root: Path | None = None) -> Path | None:
    """Find the newest run of a spec among the runs' folders that no process uses and that has not finished.

    One that was killed after its last checkpoint, before its store had all of it, has not finished either.
    """
    candidates, wanted = [], RunSpec.read(hide_in_data(spec.to_plain()))
    for folder, metadata in _runs(mlruns_dir() / "checkpoints" if root is None else root):
        is_wanted = not spec_of(metadata).diff(wanted)
        if is_wanted and not is_locked(folder):
            spool = spool_of(folder, metadata)
            arrived = spool is None or read_ack(spool).finished
            if metadata["status"] == "FINISHED" and arrived and not was_left(folder):
                continue
            candidates.append((metadata["created"], folder))
    return max(candidates)[1] if candidates else None


def find_of_job(
    job: str, resolved: Resolved, root: Path, *, any_seed: bool, besides: Collection[Path] = ()
) -> Path | None:
    """Find a torchrun job's first run of an algorithm, but for `besides`, in a folder of runs, or in a run's own."""
    own, now = _newest(root), as_built(hide_in_data(resolved))
    may_differ = {"algorithm_config.seed"} if any_seed else set()
    candidates = [
        (metadata["created"], folder)
        for folder, metadata in (_runs(root) if own is None else [(root, own)])
        if metadata["run"]["job"] == job
        and folder not in besides
        and now.diff(as_built(metadata["resolved"])).keys() <= may_differ
    ]
    return min(candidates)[1] if candidates else None


def spool_of(folder: Path, metadata: Metadata) -> Path | None:
    """Find a run's spool, named relative to its folder of checkpoints, as both may have moved; None if it is gone."""
    saved = metadata["run"]["spool"]
    spool = None if saved is None else Path(os.path.normpath(folder.resolve() / saved))
    return spool if spool is not None and spool.is_dir() else None


def _runs(root: Path) -> Iterator[tuple[Path, Metadata]]:
    """Yield each run's folder of checkpoints with the metadata of its newest readable checkpoint."""
    folders = sorted(path for path in root.iterdir() if path.is_dir()) if root.is_dir() else []
    for folder in folders:
        metadata = _newest(folder)
        if metadata is not None:
            yield folder, metadata


def _newest(folder: Path) -> Metadata | None:
    """Read the metadata of the newest readable checkpoint of a run's folder; None if there is none."""
    for path in reversed(files.listed(folder)):
        with contextlib.suppress(CheckpointError):
            return files.describe(path)
    return None
