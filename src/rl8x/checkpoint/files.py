"""The format of checkpoints: reads them, and writes each one atomically as a folder.

    000007-step-120/
        checkpoint.json   the description, `Metadata`
        state.pt          the state, `State`; loads with torch.load(weights_only=True)
        *.segment.pt      a segment of a large state, in the same format as state.pt
        SHA256SUMS        digests of all these files; `sha256sum -c SHA256SUMS` checks them

It is written under a hidden name, synced, and renamed. A segment that the previous checkpoint already has is a hard
link to its file. Only what `weights_only=True` admits is unpickled, and no path is taken from a file.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import io
import json
import os
import pickle
import platform
import re
import shutil
import types
import uuid
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypedDict, cast, get_args, get_origin, get_type_hints, is_typeddict

import torch
from torch import Tensor

from rl8x import __version__, keys
from rl8x.checkpoint.tree import CheckpointError, with_segments
from rl8x.config.files import one_line
from rl8x.config.spec import FIELDS, AlgorithmSpec, EnvSpec, RunSpec
from rl8x.disk import SUMS, link_or_copy, sums_of, sync_folder, write_synced, wrong_sums
from rl8x.replay.ring import Content, Segment, is_segment_name
from rl8x.tracking.secrets import hide_in_data

# -- its content

DESCRIPTION: Final = "checkpoint.json"
FORMAT: Final = "rl8x-checkpoint"
VERSION: Final = 1
STATE: Final = "state.pt"
_STATUSES: Final = ("RUNNING", "KILLED", "FINISHED")
_WORDS: Final = {
    str: "a text",
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    list: "a list",
    dict: "a dict",
    types.NoneType: "null",
}


class Tracked(TypedDict):
    """The tracked run; paths are relative to the run's folder of checkpoints."""

    key: str
    job: str | None
    tracker: str
    handle: str | None
    id: str | None
    location: str | None
    journal: str | None
    names: dict[str, dict[str, str]] | None
    database: str | None


class Resolved(TypedDict):
    """Resolved values of an algorithm that supplement its run's spec: all hyperparameters, a drawn seed, the spaces."""

    config: dict[str, Any]
    env_class: str | None
    spaces: list[dict[str, Any] | None]
    policy: dict[str, Any] | None
    algorithm: str
    state_reset_every: int
    clock: str


class Metadata(TypedDict):
    """The content of a checkpoint's description, checkpoint.json."""

    format: str
    version: int
    created: str
    versions: dict[str, str]
    status: str
    stop_reason: str | None
    counters: dict[str, int]
    run: Tracked
    spec: dict[str, Any]
    resolved: Resolved
    is_best: bool


class SavedCondition(TypedDict):
    """The state of a stop condition, and whether the last row met it."""

    repr: str
    state: dict[str, Any]
    met: bool


class SavedRun(TypedDict):
    """The progress of a `run()`; `callbacks` are names."""

    steps: int
    max_steps: int | None
    conditions: list[SavedCondition]
    callbacks: list[str]
    row: dict[str, float] | None
    stop_reason: str | None


class Best(TypedDict):
    """The best value of a metric so far, and the trainer's steps at it."""

    metric: str
    mode: str
    value: float
    steps: int


class State(TypedDict):
    """The state of a run, without the differences of ranks after the first."""

    trainer: dict[str, Any]
    run: SavedRun | None
    best: Best | None
    results: dict[str, Any]
    torch_generators: dict[str, Any]


def as_built(resolved: Resolved) -> RunSpec:
    """Return resolved values of an algorithm as a spec, to compare it with another's."""
    algorithm = AlgorithmSpec(algorithm=resolved["algorithm"], algorithm_config=resolved["config"])
    return RunSpec(env=EnvSpec(env=resolved["env_class"] or ""), algorithm=algorithm)


def checked_state(state: dict[str, Any]) -> State:
    """Return a checkpoint's state; raise `CheckpointError` if it is not the state of a run."""
    _check(state, State, "", STATE)
    return cast("State", state)


def checked(data: Any) -> Metadata:
    """Return the content of a checkpoint's description; raise `CheckpointError` if it is not valid."""
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise CheckpointError(f"{DESCRIPTION} is not that of an rl8x checkpoint")
    version = data.get("version")
    if type(version) is not int or version > VERSION:
        raise CheckpointError(f"its format has version {version!r}, and this rl8x reads up to {VERSION}: update rl8x")
    _check(data, Metadata, "", DESCRIPTION)
    metadata, odd = cast("Metadata", data), None
    if metadata["status"] not in _STATUSES:
        odd = f"`status` must be {' or '.join(map(repr, _STATUSES))}; got {metadata['status']!r:.80}"
    for counter in (keys.STEPS, metadata["resolved"]["clock"]):
        if counter not in metadata["counters"]:
            odd = f"`counters` have no {counter!r}"
    if len(metadata["resolved"]["spaces"]) != 2:
        odd = "`resolved.spaces` must be two, of observations and actions"
    if odd is not None:
        raise CheckpointError(f"{DESCRIPTION} is odd: {odd}")
    spec_of(metadata)
    return metadata


def spec_of(metadata: Metadata) -> RunSpec:
    """Return the spec of a checkpoint's run."""
    unknown = [name for name in metadata["spec"] if name not in FIELDS]
    if unknown:
        raise CheckpointError(f"{DESCRIPTION} is odd: `spec` has {unknown[0]!r:.80}, which this rl8x does not know")
    try:
        return RunSpec.read(metadata["spec"])
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"{DESCRIPTION} is odd: `spec`: {error}") from None


def _check(value: Any, hint: Any, name: str, file: str) -> None:
    """Raise `CheckpointError` unless a value matches a type hint."""
    hints = get_args(hint) if get_origin(hint) is types.UnionType else (hint,)
    kinds = [dict if is_typeddict(each) else get_origin(each) or each for each in hints]
    if Any in kinds or (type(value) is int and float in kinds):  # JSON writes some floats as whole numbers
        return
    if type(value) not in kinds:
        legal = " or ".join(_WORDS[kind] for kind in kinds)
        raise CheckpointError(f"{file} is odd: `{name}` must be {legal}; got {value!r:.80}")
    hint = hints[kinds.index(type(value))]
    if is_typeddict(hint):
        for key, each in get_type_hints(hint).items():
            dotted = f"{name}.{key}".removeprefix(".")
            if key not in value:
                raise CheckpointError(f"{file} is odd: `{dotted}` is missing")
            _check(value[key], each, dotted, file)
    elif isinstance(value, dict | list):
        for place, item in value.items() if isinstance(value, dict) else enumerate(value):
            _check(item, get_args(hint)[-1], f"{name}[{place!r}]", file)


# -- its files

_SEGMENT: Final = ".segment.pt"
_NAME: Final = re.compile(r"(\d{6,})-step-(\d+)")
_UNFINISHED: Final = ".unfinished-"
_REMOVED: Final = ".removed-"
# Errors of torch's reader for files of another format, or with objects that `weights_only=True` does not admit.
_ODD: Final = (pickle.UnpicklingError, RuntimeError, ValueError, EOFError, LookupError, TypeError, AttributeError)


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that was read and verified.

    Attributes:
        path: Its folder.
        metadata: Its description: versions, run, counters, and how to build the algorithm.
        state: Its state, with tensors on the CPU; segments are loaded when their content is asked for.
    """

    path: Path
    metadata: Metadata
    state: dict[str, Any]

    @functools.cached_property
    def spec(self) -> RunSpec:
        """The spec of its run."""
        return spec_of(self.metadata)

    def is_at(self, source: str | Path) -> bool:
        """Whether a source names its own folder, rather than its run.

        Args:
            source: A path, or a run's name or ID.
        """
        return os.path.isdir(source) and os.path.samefile(source, self.path)


def write(
    directory: Path,
    steps: int,
    metadata: Mapping[str, Any],
    state: Any,
    segments: Mapping[str, Content | None] = types.MappingProxyType({}),
    shared: Path | None = None,
) -> Path:
    """Write a state from `tree.copied` atomically; segments without content are those of the checkpoint `shared`."""
    number = max((_number(path) for path in listed(directory)), default=0) + 1
    target = directory / f"{number:06d}-step-{steps}"
    unfinished = directory / f"{_UNFINISHED}{uuid.uuid4().hex}"
    unfinished.mkdir()
    try:
        versions = {"rl8x": __version__, "torch": torch.__version__, "python": platform.python_version()}
        created = datetime.datetime.now(datetime.UTC).isoformat(timespec="microseconds")
        own = {"format": FORMAT, "version": VERSION, "created": created, "versions": versions}
        description = checked(hide_in_data({**own, **metadata}))
        _write(unfinished / STATE, state)
        write_synced(unfinished / DESCRIPTION, json.dumps(description, indent=1, allow_nan=False).encode(), mode=0o600)
        known = {}
        for name, content in segments.items():
            file = f"{name}{_SEGMENT}"
            if content is None:
                assert shared is not None
                link_or_copy(shared / file, unfinished / file)
                known[file] = _segment_digests(shared)[name]
            else:
                _write(unfinished / file, dict(content))
        write_synced(unfinished / SUMS, _sums(unfinished, segments, known).encode())
        sync_folder(unfinished)
        os.rename(unfinished, target)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise
    sync_folder(directory)
    return target


def _write(path: Path, content: Any) -> None:
    buffer = io.BytesIO()
    torch.save(content, buffer)
    write_synced(path, buffer.getbuffer(), mode=0o600)


def kept_segments(path: Path) -> frozenset[str]:
    """Return the names of a verified checkpoint's segments, which later ones may share; empty if it was removed."""
    with contextlib.suppress(OSError, UnicodeDecodeError):
        present = {entry.name for entry in os.scandir(path) if entry.is_file(follow_symlinks=False)}
        return frozenset(name for name in _segment_digests(path) if f"{name}{_SEGMENT}" in present)
    return frozenset()


def _segment_digests(path: Path) -> dict[str, str]:
    """Return the digests of a checkpoint's segments by name, as its SHA256SUMS lists them."""
    entries = [line.partition("  ") for line in (path / SUMS).read_text(encoding="ascii").splitlines()]
    found = {file.removesuffix(_SEGMENT): digest for digest, _, file in entries if file.endswith(_SEGMENT)}
    return {name: digest for name, digest in found.items() if is_segment_name(name)}


def _sums(folder: Path, segments: Iterable[str] = (), known: Mapping[str, str] | None = None) -> str:
    """Return the digests of a checkpoint's files; `known` ones are not computed."""
    return sums_of(folder, (DESCRIPTION, STATE, *sorted(f"{segment}{_SEGMENT}" for segment in segments)), known)


def read(path: str | os.PathLike[str]) -> Checkpoint:
    """Verify the digests of a checkpoint and read it.

    Args:
        path: Its folder.

    Raises:
        CheckpointError: If it is damaged, foreign, or of a newer format.
    """
    folder, metadata = Path(path), describe(path)
    with _named(folder):
        segments = _segment_digests(folder)
        if (wrong := wrong_sums(folder, _sums(folder, segments))) is not None:
            raise CheckpointError(wrong)

        def segment(name: str) -> Segment:
            if name not in segments:
                raise CheckpointError(f"{name}{_SEGMENT} is missing")
            return Segment(name, functools.partial(_content, folder, name))

        try:
            state = with_segments(_load(folder / STATE), segment)
        except (TypeError, RecursionError) as error:
            raise CheckpointError(f"{STATE} holds something other than tensors ({one_line(error):.120})") from None
        return Checkpoint(folder, metadata, state)


@contextlib.contextmanager
def _named(path: str | os.PathLike[str]) -> Iterator[None]:
    """Turn errors in the block into a `CheckpointError` that names the checkpoint."""
    try:
        yield
    except (OSError, UnicodeDecodeError, CheckpointError) as error:
        missing = Path(error.filename).name if isinstance(error, FileNotFoundError) else None
        why = one_line(error) if missing is None else f"{missing} is missing"
        raise CheckpointError(f"the checkpoint {path} cannot be used: {why}") from None


def describe(path: str | os.PathLike[str]) -> Metadata:
    """Read a checkpoint's metadata, without its tensors and without verifying their digests.

    Args:
        path: Its folder.

    Raises:
        CheckpointError: If its description cannot be read.
    """
    with _named(path):
        try:
            data = json.loads((Path(path) / DESCRIPTION).read_bytes())
        except (ValueError, RecursionError) as error:
            raise CheckpointError(f"{DESCRIPTION} is damaged ({one_line(error)})") from None
        return checked(data)


def _load(path: Path) -> dict[str, Any]:
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except _ODD as error:
        reason = one_line(str(error).rpartition("WeightsUnpickler error: ")[2])
        raise CheckpointError(f"{path.name} holds something other than tensors ({reason:.120})") from None
    if not isinstance(content, dict):
        raise CheckpointError(f"{path.name} holds something other than tensors by name")
    return content


def _content(path: Path, name: str) -> Content:
    """Load a segment of a checkpoint whose digests have been verified."""
    with _named(path):
        content = _load(path / f"{name}{_SEGMENT}")
        if not all(isinstance(tensor, Tensor) for tensor in content.values()):
            raise CheckpointError(f"{name}{_SEGMENT} holds something other than tensors by name")
        return content


def listed(directory: str | os.PathLike[str]) -> list[Path]:
    """List the checkpoints of a run's folder, valid or not, in the order of writing.

    Args:
        directory: The folder; the list is empty if it does not exist.
    """
    directory = Path(directory)
    if not os.path.isdir(directory):  # not Path.is_dir(), which raises if a name is too long
        return []
    return sorted((path for path in directory.iterdir() if _NAME.fullmatch(path.name)), key=_number)


def _number(path: Path) -> int:
    return int(path.name.split("-")[0])


def is_place(path: Path) -> bool:
    """Return whether a path is a checkpoint, a missing checkpoint in a run's folder, or a run's folder."""
    missing = _NAME.fullmatch(path.name) is not None and bool(listed(path.parent))
    return missing or os.path.isfile(path / DESCRIPTION) or bool(listed(path))


def good(directory: Path, besides: Path | None = None) -> Iterator[Checkpoint]:
    """Yield the valid checkpoints of a folder, the newest first, without the one named like `besides`."""
    for path in reversed(listed(directory)):
        if besides is None or path.name != besides.name:
            with contextlib.suppress(CheckpointError):
                yield read(path)


def remove(path: Path) -> None:
    """Remove a checkpoint: rename it first and then delete it, so that no partial checkpoint is ever found."""
    hidden = path.with_name(f"{_REMOVED}{uuid.uuid4().hex}")
    with contextlib.suppress(OSError):
        os.rename(path, hidden)
        shutil.rmtree(hidden)


def tidy(directory: Path) -> None:
    """Remove leftovers of killed processes; call only while holding the folder's lock."""
    for path in directory.glob(".*"):
        if path.name.startswith((_UNFINISHED, _REMOVED)):
            shutil.rmtree(path, ignore_errors=True)
