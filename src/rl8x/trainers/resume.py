"""Resumes a run, on request or after a torchrun restart, and checks that its checkpoint fits."""

from __future__ import annotations

import functools
import json
import os
import platform
import warnings
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import psutil
import torch

from rl8x import keys
from rl8x.algorithms.base import GenericAlgorithmBase, check_algorithm
from rl8x.algorithms.hyperparameters import qualified_name
from rl8x.checkpoint import Checkpoint, CheckpointError, Checkpoints, find, listed
from rl8x.checkpoint.files import Resolved, SavedRun, Tracked
from rl8x.checkpoint.load import build_algorithm, changes, find_of_job
from rl8x.config.files import unwritable_in
from rl8x.config.spec import RunOptions
from rl8x.tracking import MemoryTracker, MLflowTracker, NullTracker, Tracker, TrackingError
from rl8x.tracking.location import is_users_own, locate, recorded_location, user_tracking_uri
from rl8x.tracking.runs import has_run
from rl8x.tracking.sender import RESUMED_TAG

# Options of a trainer that have the same names in its spec.
TRAINER_OPTIONS: Final = ("eval_env", "num_eval_envs", "on_non_finite", "log_models")
# Trackers of rl8x that a resume can make again if none is given.
REMADE: Final = ("MLflowTracker", "NullTracker")
# Folders of runs that this process has resumed; the script's next trainer resumes another one.
_TAKEN: Final[set[Path]] = set()


@dataclass(frozen=True, kw_only=True)
class Origin:
    """Where a trainer's next `run()` comes from: a spec, a checkpoint, or by default nothing."""

    planned: RunOptions = field(default_factory=RunOptions)  # defaults of options that are not given
    saved: SavedRun | None = None  # the state of the `run()` in the checkpoint, which it continues
    steps: int | None = None  # the trainer's steps at the checkpoint
    newest: Path | None = None  # the newest checkpoint in its folder when it was chosen
    tags: Mapping[str, str] = field(default_factory=dict)  # tags for the tracked run
    overrides: Mapping[str, Any] = field(default_factory=dict)  # hyperparameters that were changed
    named: bool = False  # whether this checkpoint was requested, rather than the newest of a run
    auto: bool = False  # whether the newest good checkpoint may replace a damaged one


def newest(directory: Path, algorithm: GenericAlgorithmBase[Any], origin: Origin) -> tuple[Checkpoint, Origin]:
    """Find the newest checkpoint of a run that another process has continued; return it and an updated origin."""
    known = listed(directory)
    checkpoint = find(directory, auto=origin.auto)
    tags, steps = _tags(checkpoint, algorithm, origin.overrides), checkpoint.metadata["counters"][keys.STEPS]
    return checkpoint, replace(origin, newest=known[-1] if known else None, tags=tags, steps=steps)


@functools.cache
def job() -> str | None:
    """Return an identifier of the torchrun that started this process; None without torchrun."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return None
    agent = psutil.Process(os.getppid())  # torchrun's own default name is the same for all jobs
    return f"{os.environ['TORCHELASTIC_RUN_ID']} on {platform.node()}, {agent.pid} since {agent.create_time():.2f}"


def unfinished(algorithm: GenericAlgorithmBase[Any], resolved: Resolved, root: Path | None) -> Path | None:
    """Return the folder of checkpoints in `root` of this torchrun job's earlier run of the algorithm; None if none."""
    name = job()
    if name is None or root is None:
        return None
    folder = find_of_job(name, resolved, root, any_seed=algorithm.config.seed is None, besides=_TAKEN)
    if folder is not None:
        _TAKEN.add(folder)
    return folder


def prepare(
    source: str | Path, *, auto: bool, trust: bool, overrides: Mapping[str, Any], **given: Any
) -> tuple[Checkpoint, Origin, dict[str, Any]]:
    """Find the checkpoint to resume from; return it, its origin and the trainer's arguments. See `Trainer.resume`."""
    # List the checkpoints before one is chosen, if the source is a path.
    known = listed(source) or listed(Path(source).parent)
    checkpoint = find(source, auto=auto)
    metadata, spec, folder = checkpoint.metadata, checkpoint.spec, checkpoint.path.parent
    try:
        options = {**{name: getattr(spec.trainer, name) for name in TRAINER_OPTIONS}, **given}
        if "tracker" not in given:
            options["tracker"] = _tracker(metadata["run"], folder.absolute(), trust=trust)
        _check_overrides(overrides, metadata["resolved"]["config"])
        if "algorithm" not in given:
            options["algorithm"] = build_algorithm(spec, metadata["resolved"], overrides, trust=trust)
        check_algorithm(options["algorithm"])
        tags = _tags(checkpoint, options["algorithm"], overrides)
        if "checkpoints" not in given:
            options["checkpoints"] = Checkpoints(**{**spec.trainer.checkpoints, "directory": folder})
        for lost in unwritable_in(options["eval_env"]):
            raise CheckpointError(f"{lost}: pass `eval_env=`")
    except (CheckpointError, TypeError) as error:
        raise CheckpointError(f"cannot resume from {checkpoint.path}: {error}") from error
    is_path = known and known[-1].parent.resolve() == folder.resolve()  # rather than a run's name or ID
    origin = Origin(
        steps=metadata["counters"][keys.STEPS],
        newest=known[-1] if is_path else None,
        tags=tags,
        overrides=overrides,
        named=checkpoint.is_at(source),
        auto=auto,
    )
    return checkpoint, origin, options


def _check_overrides(overrides: Mapping[str, Any], saved: Mapping[str, Any]) -> None:
    """Raise `CheckpointError` if `seed` or `num_envs` changes, which stay the same in a resumed run."""
    if overrides.get("seed", saved.get("seed")) != saved.get("seed"):
        raise CheckpointError(
            f"a run goes on with its random numbers, and another `seed` ({overrides['seed']!r}) would change nothing: "
            "begin a run with it"
        )
    if overrides.get("num_envs", saved.get("num_envs")) != saved.get("num_envs"):
        raise CheckpointError(f"`num_envs` stays {saved['num_envs']} as the run goes on; got {overrides['num_envs']}")


def _tags(checkpoint: Checkpoint, algorithm: GenericAlgorithmBase[Any], overrides: Mapping[str, Any]) -> dict[str, str]:
    """Return the tags of a resume; raise if a hyperparameter differs without an override, or is fixed."""
    different = changes(checkpoint.metadata["resolved"], algorithm)
    _check_overrides({name: now for name, (_, now) in different.items()}, checkpoint.metadata["resolved"]["config"])
    for name, (before, now) in different.items():
        if name in algorithm.config.fixed:
            raise CheckpointError(
                f"`{name}` was {before!r} and is {now!r}, but decides what the outputs of the networks mean, and these "
                "were trained as it was: leave it as it was, or begin a run with it"
            )
        if name not in overrides:
            raise CheckpointError(
                f"`{name}` was {before!r} and is {now!r} in the algorithm given; "
                f"pass overrides={{{name!r}: {now!r}}} to change it"
            )
    tags = {RESUMED_TAG: checkpoint.path.name}
    if different:
        changed = {name: {"before": before, "now": now} for name, (before, now) in different.items()}
        tags["rl8x.resumed_with"] = json.dumps(changed, default=str)
    return tags


def _tracker(run: Tracked, folder: Path, *, trust: bool) -> Tracker:
    """Make a tracker of the same kind for the store that the user has set, else the run's, which may need `trust`."""
    if run["tracker"] == "NullTracker":
        return NullTracker()
    if run["tracker"] == "MemoryTracker":
        raise CheckpointError(
            "the run was kept by a MemoryTracker, in memory that may be gone: pass `tracker=`, the same one to go on "
            "in it or another to begin a tracked run there"
        )
    if run["tracker"] not in REMADE:
        name = run["tracker"] if _class_name(run["tracker"]) in REMADE else _class_name(run["tracker"])
        raise CheckpointError(f"the run was kept by a {name} ({run['location']}), which is not rl8x's: pass `tracker=`")
    if user_tracking_uri() is not None:
        return MLflowTracker()
    try:
        location = recorded_location(folder, str(run["location"]), run)
    except TrackingError as error:
        raise CheckpointError(str(error)) from error
    if is_users_own(location, folder):
        return MLflowTracker(tracking_uri=location.uri)
    if has_run(locate(), str(run["handle"])) or (location.database is not None and not location.database.exists()):
        return MLflowTracker()  # the folder was moved or copied: the store has the default location
    if not trust:
        raise CheckpointError(
            f"it names the store {location.shown}, which you have not: `--trust` on the command line (`trust=True` in "
            "Python) uses it, MLFLOW_TRACKING_URI or `tracker=` another one"
        )
    return MLflowTracker(tracking_uri=location.uri)


def handle_for(run: Tracked, tracker: Tracker) -> str | None:
    """Return the handle of a checkpoint's tracked run if this tracker can continue it, else None."""
    handle: str | None = run["handle"]
    saved, now = str(run["tracker"]), qualified_name(type(tracker))
    # A class of the user's script is in module `__main__` in one process, and in another module in the next.
    if saved != now and ("." not in saved or "." not in now or _class_name(saved) != _class_name(now)):
        return None
    if isinstance(tracker, MemoryTracker) and tracker.run_id != handle:
        return None  # the tracker that kept the run in memory is gone
    return handle


def _class_name(path: str) -> str:
    return path.rsplit(".", 1)[-1]


def torch_generators(device: torch.device) -> dict[str, Any]:
    """Return the states of torch's global generators; rl8x does not use them, but a model may (for dropout)."""
    generators = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        generators["cuda"] = torch.cuda.get_rng_state(device)
    return generators


def set_torch_generators(generators: Mapping[str, Any], device: torch.device) -> None:
    """Restore the states that `torch_generators` returned."""
    torch.set_rng_state(generators["cpu"])
    if device.type == "cuda" and "cuda" in generators:
        torch.cuda.set_rng_state(generators["cuda"], device)


def with_generators_of(device: torch.device, state: Mapping[str, Any], before: Mapping[str, Any]) -> Mapping[str, Any]:
    """Replace the state's generators by ones of `device` if `before` is of another kind, as after a move off a GPU."""
    kind = next((name for name in before if name != "cpu"), "cpu")
    if kind == device.type:
        return state
    warnings.warn(
        f"the run was on {kind!r} and goes on on {device.type!r}, whose random numbers are others: it will not be, to "
        "the bit, the run that it would have been.",
        RuntimeWarning,
        stacklevel=2,
    )

    # Each new generator is seeded by a hash of the old one's state.
    def moved(part: Any, name: str = "") -> Any:
        if isinstance(part, Mapping):
            return {key: moved(each, str(key)) for key, each in part.items()}
        if name == "generator_device":
            return device.type
        if name.endswith("generator") and isinstance(part, torch.Tensor):
            return torch.Generator(device).manual_seed(zlib.crc32(part.numpy().tobytes())).get_state()
        return part

    return dict(moved(state))
