"""Making the trainer of an interrupted run again, from a checkpoint."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import EllipsisType
from typing import TYPE_CHECKING, Any, Final, TypeVar

from rl8x import keys
from rl8x.algorithms.base import GenericAlgorithmBase
from rl8x.checkpoint import Checkpoint, CheckpointError, Checkpoints, find, listed
from rl8x.checkpoint.build import build_algorithm, changes
from rl8x.checkpoint.find import spool_of
from rl8x.checkpoint.manager import CheckpointsLike
from rl8x.tracking import MemoryTracker, MLflowTracker, NullTracker, Tracker, TrackingError
from rl8x.tracking.address import is_users_own, recorded_location
from rl8x.tracking.location import locate, user_tracking_uri
from rl8x.tracking.runs import has_run
from rl8x.tracking.stored_run import RESUMED_TAG

if TYPE_CHECKING:
    from rl8x.trainers.trainer import GenericTrainerBase

# Trackers that can be made again where no other is given
TRACKERS: Final = ("MLflowTracker", "NullTracker")
TrainerT = TypeVar("TrainerT", bound="GenericTrainerBase[Any]")


def resume(
    cls: type[TrainerT],
    source: str | Path,
    *,
    auto: bool,
    algorithm: GenericAlgorithmBase[Any] | None,
    overrides: Mapping[str, Any] | None,
    tracker: Tracker | None,
    eval_env: Any,
    callbacks: Sequence[Any],
    checkpoints: CheckpointsLike | EllipsisType,
    trust: bool,
) -> TrainerT:
    """Make a trainer that goes on where a checkpoint was taken; `GenericTrainerBase.resume` documents it."""
    listed_before = _listed(source)
    checkpoint = find(source, auto=auto)
    about, overrides = checkpoint.about, dict(overrides or {})
    try:
        options, run = dict(about["trainer"]), about["run"]
        own_tracker = _tracker(run, checkpoint.path.parent.absolute(), trust=trust) if tracker is None else tracker
        if algorithm is None:
            algorithm = build_algorithm(about["build"], overrides, trust=trust)
        changed = _changed(about["build"], algorithm, overrides)
        if checkpoints is ...:
            checkpoints = _saved_options(checkpoint)
        options["eval_env"] = _eval_env(options, eval_env)
    except CheckpointError as error:
        raise CheckpointError(f"cannot resume from {checkpoint.path}: {error}") from error
    except (KeyError, TypeError) as error:
        raise CheckpointError(f"cannot resume from {checkpoint.path}: it does not say {error}") from None
    trainer = cls(algorithm, tracker=own_tracker, callbacks=callbacks, checkpoints=checkpoints, **options)
    known = listed_before
    if not known or known[0].parent.resolve() != checkpoint.path.parent.resolve():  # a run's name or ID
        known = [path for path in listed(checkpoint.path.parent) if path.name <= checkpoint.path.name]
    trainer.saving.trust = trust
    _restore(trainer, checkpoint, known, changed)
    named = Path(source).resolve() == checkpoint.path.resolve()
    trainer.origin = Origin(named, auto, overrides, about["counters"][keys.STEPS])
    return trainer


@dataclass(frozen=True)
class Origin:
    """How a trainer came to go on from a checkpoint.

    Attributes:
        named: It was this checkpoint that was asked for, rather than the newest of a run.
        auto: As `GenericTrainerBase.resume` takes it.
        overrides: As `GenericTrainerBase.resume` takes them.
        steps: The trainer's steps there.
    """

    named: bool
    auto: bool
    overrides: Mapping[str, Any]
    steps: int


def catch_up(trainer: GenericTrainerBase[Any]) -> None:
    """Go on from the newest checkpoint, which another process has written since this trainer read the one before.

    Raises:
        CheckpointError: If that is not what was asked for, or the trainer has stepped already.
    """
    origin, directory = trainer.origin, trainer.saving.directory
    if origin is None or directory is None or origin.named or trainer.state[keys.STEPS] != origin.steps:
        raise trainer.saving.outrun_error()
    known = listed(directory)
    checkpoint = find(directory, auto=origin.auto)
    changed = _changed(checkpoint.about["build"], trainer.algorithm, origin.overrides)
    _restore(trainer, checkpoint, known, changed)


def _restore(
    trainer: GenericTrainerBase[Any], checkpoint: Checkpoint, known: Sequence[Path], changed: Mapping[str, Any]
) -> None:
    about, tracker = checkpoint.about, trainer.tracker
    trainer.saving.restore(checkpoint, known)
    trainer.saving.run_file = about.get("run_file")
    trainer.algorithm.seed = about["build"]["config"].get("seed", trainer.algorithm.seed)
    if trainer.saving.restored is not None:
        trainer.evaluations.env_config = trainer.saving.restored["options"]["eval_env_config"]
    tags = {RESUMED_TAG: checkpoint.path.name}
    if changed:
        tags["rl8x.resumed_with"] = json.dumps(changed, default=str)
    if isinstance(tracker, MLflowTracker):
        tracker.resumed_spool = spool_of(checkpoint.path.parent, about)
    trainer.tracked_run.resume(_handle(about["run"], tracker), tags)


def _listed(source: str | Path) -> list[Path]:
    """List the checkpoints that are there before one is chosen, where a path says in which folder that is."""
    return listed(Path(source)) or listed(Path(source).parent)


def _changed(
    build: Mapping[str, Any], algorithm: GenericAlgorithmBase[Any], overrides: Mapping[str, Any]
) -> dict[str, Any]:
    """Return what is to be different from now on, and refuse what is different without having been asked for."""
    different = changes(build, algorithm)
    for name, (before, now) in different.items():
        if name not in overrides:
            raise CheckpointError(
                f"`{name}` was {before!r} and is {now!r} in the algorithm given; "
                f"pass overrides={{{name!r}: {now!r}}} to change it"
            )
    return {name: {"before": before, "now": now} for name, (before, now) in different.items()}


def _saved_options(checkpoint: Checkpoint) -> Checkpoints:
    saved = checkpoint.about["checkpoints"]
    return Checkpoints(checkpoint.path.parent, **({} if saved is None else saved))


def _eval_env(options: Mapping[str, Any], given: Any) -> Any:
    if given is not ...:
        return given
    if options["eval_env"] == "given":
        raise CheckpointError("the evaluation environment was an instance or a factory: pass `eval_env=`")
    return options["eval_env"]


def _tracker(run: Mapping[str, Any], folder: Path, *, trust: bool) -> Tracker:
    """Make a tracker of the same kind, to the store where the run is unless the user has set another one.

    Args:
        run: What the checkpoint says of the tracked run.
        folder: The run's folder of checkpoints.
        trust: Whether any store that the checkpoint names may be used.
    """
    if run["tracker"] == "NullTracker":
        return NullTracker()
    if run["tracker"] == "MemoryTracker":
        raise CheckpointError(
            "the run was kept by a MemoryTracker, in memory that may be gone: pass `tracker=`, the same one to go on "
            "in it or another to begin a tracked run there"
        )
    if run["tracker"] not in TRACKERS:
        raise CheckpointError(
            f"the run was kept by a {run['tracker']} ({run['location']}), which rl8x cannot make: pass `tracker=`"
        )
    if user_tracking_uri() is not None:
        return MLflowTracker()
    return MLflowTracker(tracking_uri=_recorded_uri(run, folder, trust=trust))


def _recorded_uri(run: Mapping[str, Any], folder: Path, *, trust: bool) -> str | None:
    """Decide which store a checkpoint's run goes on in; None is the one that training uses here.

    Raises:
        CheckpointError: It is one that the checkpoint alone names.
    """
    try:
        location = recorded_location(folder, str(run["location"]), run)
    except TrackingError as error:
        raise CheckpointError(str(error)) from error
    if is_users_own(location, folder):
        return location.uri
    if has_run(locate(), str(run.get("handle"))) or (location.database is not None and not location.database.exists()):
        return None  # the folder was moved or copied: the store is where it would be made now
    if not trust:
        raise CheckpointError(
            f"it names the store {location.shown}, which you have not: `--trust` on the command line (`trust=True` in "
            "Python) uses it, MLFLOW_TRACKING_URI or `tracker=` another one"
        )
    return location.uri


def _handle(run: Mapping[str, Any], tracker: Tracker) -> str | None:
    """Return the handle of the tracked run, if this tracker can go on with it."""
    handle: str | None = run.get("handle")
    if type(tracker).__name__ != run["tracker"]:
        return None
    if isinstance(tracker, MemoryTracker) and tracker.run_id != handle:
        return None  # the memory that it was kept in is gone
    return handle
