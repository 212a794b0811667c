"""Finds checkpoints, and rebuilds a checkpoint's algorithm or policy from its spec and its resolved values."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import gymnasium

from rl8x import __version__, keys
from rl8x.algorithms.base import GenericAlgorithmBase
from rl8x.algorithms.hyperparameters import check_names
from rl8x.algorithms.memory_check import no_memory_checks
from rl8x.checkpoint import files
from rl8x.checkpoint.files import Checkpoint, Metadata, Resolved, as_built, spec_of
from rl8x.checkpoint.tree import CheckpointError
from rl8x.config.describe import plain_value
from rl8x.config.files import algorithm_config_class, restored_options, unwritable_in
from rl8x.config.spec import RunSpec, default_of
from rl8x.distributed import resolve_device
from rl8x.envs.simulator import StandIn
from rl8x.envs.team import Team
from rl8x.importing import UntrustedError, classes_in, is_dotted, texts
from rl8x.policy import Policy
from rl8x.portable import SUFFIX
from rl8x.replay.dataset import Dataset
from rl8x.spaces import space_from_plain, space_to_plain
from rl8x.tracking import TrackingError
from rl8x.tracking.journal import CHECKPOINTS_TAG as CHECKPOINTS_TAG
from rl8x.tracking.journal import JOURNAL, read_ack
from rl8x.tracking.location import mlruns_dir
from rl8x.tracking.locks import is_locked, was_left
from rl8x.tracking.runs import HANDLE_PREFIX, find_record
from rl8x.tracking.secrets import find_hidden, hide_in_data

# Beginnings of problems that do not matter for acting, for which the spaces are enough.
_STOOD_IN_FOR: Final = ("`dataset` is ", "the environment")


def resolve(algorithm: GenericAlgorithmBase[Any]) -> Resolved:
    """Return an algorithm's resolved values as plain data: every hyperparameter, the seed, the spaces, the policy."""
    config, policy = algorithm.config, algorithm.policy
    values = {field.name: plain_value(field.name, getattr(config, field.name)) for field in dataclasses.fields(config)}
    return {
        "config": values | {"seed": algorithm.seed},
        "env_class": None if algorithm.env is None else type(algorithm.env.unwrapped).__name__,
        "spaces": [_form(space_to_plain, space) for space in (policy.observation_space, policy.action_space)],
        "policy": _form(policy.describe),
        "algorithm": type(algorithm).__name__,
        "state_reset_every": algorithm.state_reset_every,
        "clock": algorithm.clock,
    }


def _form(describe: Callable[..., Any], *what: Any) -> Any:
    """Return a space or a policy as plain data; None if it has no such form."""
    try:
        return describe(*what)
    except (TypeError, ValueError):
        return None


def problems_of(spec: RunSpec, resolved: Resolved, *, only_acts: bool = False) -> list[str]:
    """List the reasons why the algorithm cannot be rebuilt, to learn or `only_acts`, which needs less."""
    known = _saved_config(spec, resolved)
    lost = [value for name, value in resolved["config"].items() if name not in known]
    problems = [*unwritable_in([lost, spec.algorithm.algorithm, spec.env.env])]
    if only_acts and None not in resolved["spaces"]:
        problems = [problem for problem in problems if not problem.startswith(_STOOD_IN_FOR)]
    hidden = find_hidden(resolved["config"], "config")
    hidden = hidden or (None if only_acts else find_hidden(spec.env.env_kwargs, "env_kwargs"))
    return problems if hidden is None else [*problems, f"no password is kept in a checkpoint, and `{hidden}` had one"]


def _saved_config(spec: RunSpec, resolved: Resolved) -> dict[str, Any]:
    """Return the hyperparameters that a file can hold; resolved values replace given ones."""
    both = (spec.algorithm.algorithm_config, resolved["config"])
    return {name: value for each in both for name, value in each.items() if not [*unwritable_in(value)]}


def build_algorithm(
    spec: RunSpec,
    resolved: Resolved,
    overrides: Mapping[str, Any],
    *,
    trust: bool = False,
    only_acts: bool = False,
    env: Any = None,
) -> GenericAlgorithmBase[Any]:
    """Build the algorithm of a saved run with `overrides`; if it only acts, without data set or memory checks."""
    instead = "" if only_acts else "pass `algorithm=`"
    problems = problems_of(spec, resolved, only_acts=only_acts)
    if problems:
        hint = instead and f". P{instead[1:]}"
        raise CheckpointError(f"the algorithm cannot be built again from the checkpoint: {problems[0]}{hint}")
    try:
        config_class = algorithm_config_class(spec.algorithm.algorithm, trust)
        values = restored_options(config_class, _saved_config(spec, resolved), trust)
        maker = env_maker_of(spec, trust) if env is None else env
    except UntrustedError as error:
        raise CheckpointError(str(error)) from None
    except (TypeError, ValueError) as error:
        hint = instead and f" Or {instead}"
        raise CheckpointError(f"the algorithm cannot be built again: {error}{hint}") from None
    check_names(overrides, config_class)
    _check_known(values, config_class)
    if only_acts and resolved["env_class"] is None and hasattr(config_class, "dataset"):
        values["dataset"] = Dataset.stand_in(*_spaces_of(resolved))
    config: Any = config_class(**{**values, **restored_options(config_class, overrides, trust=True)})
    if not only_acts:
        return spec.build(config, maker)
    if maker is None and resolved["env_class"] is not None:
        episodic, device = not resolved["state_reset_every"], resolve_device(config.device)
        problem = next(unwritable_in(spec.env.env), "no password is kept in a checkpoint, and its arguments had one")
        spaces, arguments = _spaces_of(resolved), (resolved["policy"] or {}).get("arguments", {})
        agents = [str(i) for i in range((arguments.get("model_config") or {}).get("separate", 0))]  # separate weights
        team = Team(agents, "the environment") if agents else None
        maker = StandIn(config.num_envs, *spaces, episodic=episodic, problem=problem, device=device, team=team)
    with no_memory_checks(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".* has no effect: ", RuntimeWarning)  # they concern learning
        built: GenericAlgorithmBase[Any] = config.build(maker)
    return built


def env_maker_of(spec: RunSpec, trust: bool) -> Any:
    """Return the maker of a run's environment; None without one, or if the spec does not describe it fully."""
    if not spec.env.env or [*unwritable_in(spec.env.env)] or find_hidden(spec.env.env_kwargs, "env_kwargs"):
        return None
    return spec.env.maker(trust)


def _spaces_of(resolved: Resolved) -> list[gymnasium.Space[Any]]:
    try:
        return [space_from_plain(space or {}) for space in resolved["spaces"]]
    except (ArithmeticError, AssertionError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise CheckpointError(f"it does not say what the spaces are ({error!r:.120})") from None


def _check_known(values: Mapping[str, Any], config_class: type) -> None:
    """Raise if there are hyperparameters of another version, as the run would differ without them."""
    known = {field.name for field in dataclasses.fields(config_class)}
    unknown = [name for name in values if name not in known]
    if unknown:
        listed = ", ".join(f"`{name}`" for name in unknown)
        raise CheckpointError(
            f"{config_class.__name__} of rl8x {__version__} does not have the hyperparameters {listed} of this "
            "checkpoint: resume it with the version that wrote it, which its checkpoint.json names"
        )


def names_in(spec: RunSpec, resolved: Resolved, *parts: str) -> Iterator[str]:
    """Yield the dotted names that rebuilding `parts`, `"env"` or `"policy"`, imports; by default the algorithm's."""
    if not parts:
        yield from classes_in(resolved["config"])
        yield from [spec.algorithm.algorithm] if is_dotted(str(spec.algorithm.algorithm)) else ()
    if not parts or "env" in parts:
        yield from classes_in(spec.env.env_kwargs)
        yield from (text for text in texts(spec.env.env_kwargs) if not is_dotted(text))
        yield from texts(spec.env.env if isinstance(spec.env.env, str) else "")
    if "policy" in parts:
        yield from classes_in(resolved["policy"] or {})
        yield from texts((resolved["policy"] or {}).get("class", ""))


def changes(before: Resolved, algorithm: GenericAlgorithmBase[Any]) -> dict[str, tuple[Any, Any]]:
    """Return the hyperparameters in which an algorithm differs from a saved run, as old and new values."""
    missing = {
        field.name: plain_value(field.name, default_of(field))
        for field in dataclasses.fields(algorithm.config)
        if field.name not in before["config"] and default_of(field) is not dataclasses.MISSING
    }
    now: Any = hide_in_data(resolve(algorithm))
    different = as_built({**before, "config": missing | before["config"]}).diff(as_built(now))
    for key, kind, was, is_now in (
        ("algorithm", "algorithm", before["algorithm"], now["algorithm"]),
        ("env", "environment", before["env_class"], now["env_class"]),
    ):
        if key in different:
            raise CheckpointError(f"the checkpoint's {kind} is {was}; the algorithm given has {is_now}")
    if missing:
        listed = ", ".join(f"{name}={value!r}" for name, value in missing.items())
        warnings.warn(
            f"the checkpoint is of another version, without these hyperparameters, which take their defaults: {listed}",
            RuntimeWarning,
            stacklevel=5,
        )
    _check_known(before["config"], type(algorithm.config))
    if algorithm.config.seed is None:  # the restored generators make it irrelevant
        different.pop("algorithm_config.seed", None)
    return {name.partition(".")[2]: values for name, values in sorted(different.items())}


# -- the trained algorithm or policy


def load_algorithm(
    source: str | Path | Checkpoint,
    *,
    device: str | None = None,
    auto: bool = False,
    trust: bool = False,
    env: Any = None,
) -> GenericAlgorithmBase[Any]:
    """Build the algorithm of a checkpoint with its learned weights, for acting with its `policy`.

    Its experience is not loaded, and the run is not continued; use `Trainer.resume` for that. If the checkpoint does
    not describe the environment, the algorithm gets a stand-in with the same spaces, which cannot be stepped.

    Args:
        source: A checkpoint, its path or that of a run's folder of them; or the run's name or ID in MLflow.
        device: The device of the algorithm; None is the saved one.
        auto: Take the run's newest good checkpoint if the requested one is damaged.
        trust: Whether modules that the checkpoint names may be imported.
        env: The environment, in any form that a config's `build` takes; None takes the checkpoint's.

    Raises:
        CheckpointError: If there is no such checkpoint, or it does not describe the algorithm fully.
    """
    checkpoint = source if isinstance(source, Checkpoint) else find(source, auto=auto)
    resolved, overrides = checkpoint.metadata["resolved"], {} if device is None else {"device": device}
    algorithm = build_algorithm(checkpoint.spec, resolved, overrides, trust=trust, only_acts=True, env=env)
    algorithm.load_learned_state(checkpoint.state["trainer"]["algorithm"])
    return algorithm


def load_policy(source: str | Path | Checkpoint, *, device: str | None = None, trust: bool = False) -> Policy:
    """Make the policy of a checkpoint with its weights, without environment or algorithm.

    Args:
        source: A checkpoint, or any other source that `load_algorithm` takes.
        device: The device of the policy; None is the CPU.
        trust: Whether modules that the checkpoint names for it may be imported.

    Raises:
        CheckpointError: If there is no such checkpoint, or it does not describe the policy fully.
    """
    checkpoint = source if isinstance(source, Checkpoint) else find(source)
    resolved = checkpoint.metadata["resolved"]
    described = resolved["policy"]
    if described is None:  # only its algorithm can make it
        return load_algorithm(checkpoint, device=device or "cpu", trust=trust).policy
    if hidden := find_hidden(described, "policy"):
        raise CheckpointError(f"the policy cannot be made again: `{hidden}` had a password, which no checkpoint keeps")
    try:
        spaces = dict(zip(("observation_space", "action_space"), resolved["spaces"], strict=True))
        weights = checkpoint.state["trainer"]["algorithm"]["policy"]
        name = f"the checkpoint {checkpoint.path}"
        about = {**described, **spaces, "state_reset_every": resolved["state_reset_every"]}
        policy = Policy.from_description(about, weights, name, trust=trust)
    except (KeyError, TypeError) as error:
        raise CheckpointError(f"{checkpoint.path} does not have the policy under `policy` ({error!r:.100})") from None
    except ValueError as error:
        raise CheckpointError(str(error)) from None
    return policy if device is None else policy.to(resolve_device(device))


# -- finding one


def find(source: str | Path, *, auto: bool = False, best: bool = False) -> Checkpoint:
    """Find and read a checkpoint.

    Args:
        source: Path of a checkpoint, or a run's folder, name or ID for its newest checkpoint.
        auto: Take the newest good checkpoint of the same run if the requested one cannot be used.
        best: Take the run's best checkpoint instead, by the metric `Checkpoints.best`.

    Raises:
        CheckpointError: If there is none, or it cannot be used; the message names the newest good one.
    """
    path = Path(source)
    if path.suffix == SUFFIX and os.path.isfile(path):
        raise CheckpointError(f"{path} is a policy alone, without the rest of its run: Policy.load reads it")
    if not files.is_place(path):
        path = _folder_of_run(str(source))
    newest = files.listed(path)[-1:]
    path = newest[0] if newest else path
    try:
        if not os.path.isdir(path):
            raise CheckpointError(f"there is no checkpoint {path}")
        checkpoint = files.read(path)
    except CheckpointError as error:
        if newest and not os.path.lexists(path):  # the run goes on, and has removed it
            return find(source, auto=auto, best=best)
        other = next(files.good(path.parent, besides=path), None)
        if other is None or not auto:
            hint = "there is no good one beside it" if other is None else f"the newest good one is {other.path}"
            raise CheckpointError(f"{error}; {hint}") from None
        checkpoint = other
    return _best(checkpoint.path.parent) if best else checkpoint


def _best(folder: Path) -> Checkpoint:
    """Read the best checkpoint of a run's folder; look again if the run, which may go on, has changed what is there."""
    paths = files.listed(folder)
    try:
        described = {path: files.describe(path) for path in paths}
        best = {about["counters"][keys.STEPS]: path for path, about in described.items() if about["is_best"]}
        # After a resume from an older checkpoint, later best checkpoints no longer belong to the run.
        known = files.read(paths[-1]).state["best"]
        if known is None or known["steps"] not in best:
            raise CheckpointError(
                f"no checkpoint in {folder} is the best of a metric: train with a metric to save by, such as "
                "checkpoints={'best': 'eval/returns/mean'}, or take the last"
            )
        return files.read(best[known["steps"]])
    except CheckpointError:
        if files.listed(folder) == paths:
            raise
        return _best(folder)


def _folder_of_run(run: str) -> Path:
    """Find a run's folder of checkpoints by its name, by its ID or handle in their metadata, or by MLflow's record."""
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
    # A short run's checkpoints were written before it had an ID, so its tag in MLflow locates them.
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
    """Find the folder of a spec's newest unfinished run that no process uses; None if there is none."""
    candidates, wanted = [], RunSpec.read(hide_in_data(spec.to_plain()))
    for folder, metadata in _runs(mlruns_dir() / "checkpoints" if root is None else root):
        is_wanted = not spec_of(metadata).diff(wanted)
        if is_wanted and not is_locked(folder):
            journal = journal_of(folder, metadata)
            arrived = journal is None or read_ack(journal).finished
            if metadata["status"] == "FINISHED" and arrived and not was_left(folder):
                continue
            candidates.append((metadata["created"], folder))
    return max(candidates)[1] if candidates else None


def find_of_job(
    job: str, resolved: Resolved, root: Path, *, any_seed: bool, besides: Collection[Path] = ()
) -> Path | None:
    """Find a torchrun job's first run of an algorithm, not in `besides`, in a folder of runs or a run's own folder."""
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


def journal_of(folder: Path, metadata: Metadata) -> Path | None:
    """Find a run's journal by its path relative to the folder of checkpoints, as both may have moved; None if gone."""
    saved = metadata["run"]["journal"]
    journal = None if saved is None else Path(os.path.normpath(folder.resolve() / saved))
    return journal if journal is not None and os.path.lexists(journal / JOURNAL) else None


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
