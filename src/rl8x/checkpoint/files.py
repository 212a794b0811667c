"""Reads and writes checkpoints: folders that are written atomically.

    000007-step-120/
        checkpoint.json   what it is
        state.pt          the state; loads with torch.load(weights_only=True)
        *.segment.pt      segments of large states by name, each such a file
        SHA256SUMS        digests of all of them, as `sha256sum -c SHA256SUMS` checks them

The folder is written under a hidden name, synced, and renamed. A segment that the checkpoint before has is a hard link
to its file, so that each folder is whole and costs what is new. Nothing in it is ever unpickled beyond what
`weights_only=True` admits, and no path is ever taken from it. docs/checkpoints.md describes the format.
"""

from __future__ import annotations

import contextlib
import functools
import io
import json
import os
import pickle
import re
import shutil
import uuid
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from rl8x.checkpoint.metadata import DESCRIPTION, FORMAT, STATE, VERSION, Metadata, checked, spec_of
from rl8x.checkpoint.tree import CheckpointError, with_segments
from rl8x.config.spec import RunSpec
from rl8x.disk import SUMS, link_or_copy, sums_of, sync_folder, write_synced, wrong_sums
from rl8x.replay.ring import Content, Segment, is_segment_name
from rl8x.tracking.secrets import hide_in_data

_SEGMENT: Final = ".segment.pt"
_NAME: Final = re.compile(r"(\d{6,})-step-(\d+)")
_UNFINISHED: Final = ".unfinished-"
_REMOVED: Final = ".removed-"
# What torch's reader raises for files that are none of its own, or name what `weights_only=True` does not admit.
_ODD: Final = (pickle.UnpicklingError, RuntimeError, ValueError, EOFError, LookupError, TypeError, AttributeError)


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that was read and verified.

    Attributes:
        path: Its folder.
        metadata: What it is: versions, run, counters, how the algorithm is built.
        state: The state, tensors in it, on the CPU; segments are loaded where their content is asked for.
    """

    path: Path
    metadata: Metadata
    state: dict[str, Any]

    @functools.cached_property
    def spec(self) -> RunSpec:
        """How its run was made."""
        return spec_of(self.metadata)


class KeptSegment(NamedTuple):
    """A segment of a checkpoint, which later ones may share: its file, and the digest that was written."""

    path: Path
    digest: str


def kept_segments(path: Path) -> dict[str, KeptSegment]:
    """Return the segments of a verified checkpoint by name; none if the checkpoint has been removed."""
    with contextlib.suppress(OSError, UnicodeDecodeError):
        present = {entry.name for entry in os.scandir(path) if entry.is_file(follow_symlinks=False)}
        kept = ((name, f"{name}{_SEGMENT}", digest) for name, digest in _segment_digests(path).items())
        return {name: KeptSegment(path / file, digest) for name, file, digest in kept if file in present}
    return {}


def _segment_digests(path: Path) -> dict[str, str]:
    """Return the digests that a checkpoint lists of its segments, by name."""
    entries = [line.partition("  ") for line in (path / SUMS).read_text(encoding="ascii").splitlines()]
    found = {file.removesuffix(_SEGMENT): digest for digest, _, file in entries if file.endswith(_SEGMENT)}
    return {name: digest for name, digest in found.items() if is_segment_name(name)}


def write(
    directory: Path,
    steps: int,
    metadata: Mapping[str, Any],
    state: Any,
    segments: Mapping[str, KeptSegment | Content] | None = None,
) -> Path:
    """Write a checkpoint of what `tree.copied` returned to a run's folder atomically; return its own folder."""
    number = max((_number(path) for path in listed(directory)), default=0) + 1
    target = directory / f"{number:06d}-step-{steps}"
    unfinished = directory / f"{_UNFINISHED}{uuid.uuid4().hex}"
    unfinished.mkdir()
    try:
        description = checked({"format": FORMAT, "version": VERSION, **hide_in_data(metadata)})
        _write(unfinished / STATE, state)
        write_synced(unfinished / DESCRIPTION, json.dumps(description, indent=1, allow_nan=False).encode(), mode=0o600)
        known = _write_segments(unfinished, segments or {})
        write_synced(unfinished / SUMS, _sums(unfinished, segments or (), known).encode())
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


def _write_segments(folder: Path, segments: Mapping[str, KeptSegment | Content]) -> dict[str, str]:
    """Link or write segments into a folder; return the digests of those that were linked, by file name."""
    known = {}
    for name, segment in segments.items():
        file = f"{name}{_SEGMENT}"
        if isinstance(segment, KeptSegment):
            link_or_copy(segment.path, folder / file)
            known[file] = segment.digest
        else:
            _write(folder / file, dict(segment))
    return known


def read(path: str | os.PathLike[str]) -> Checkpoint:
    """Read and verify a checkpoint, digests first.

    Args:
        path: Its folder.

    Raises:
        CheckpointError: If it is damaged, foreign, or of a newer format.
    """
    folder = Path(path)
    with _named(folder):
        metadata = _description(folder)
        segments = _segment_digests(folder)
        if (wrong := wrong_sums(folder, _sums(folder, segments))) is not None:
            raise CheckpointError(wrong)
        return Checkpoint(folder, metadata, _state(folder, segments))


@contextlib.contextmanager
def _named(path: str | os.PathLike[str]) -> Iterator[None]:
    """Say of whatever is wrong which checkpoint cannot be used."""
    try:
        yield
    except (OSError, UnicodeDecodeError, CheckpointError) as error:
        missing = Path(error.filename).name if isinstance(error, FileNotFoundError) else None
        why = _one_line(error) if missing is None else f"{missing} is missing"
        raise CheckpointError(f"the checkpoint {path} cannot be used: {why}") from None


def describe(path: str | os.PathLike[str]) -> Metadata:
    """Read a checkpoint's metadata, without its tensors and without verifying their digests.

    Args:
        path: Its folder.

    Raises:
        CheckpointError: If its description cannot be read.
    """
    with _named(path):
        return _description(Path(path))


def _description(path: Path) -> Metadata:
    try:
        data = json.loads((path / DESCRIPTION).read_bytes())
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{DESCRIPTION} is damaged ({_one_line(error)})") from None
    return checked(data)


def _load(path: Path) -> dict[str, Any]:
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except _ODD as error:
        reason = _one_line(str(error).rpartition("WeightsUnpickler error: ")[2])
        raise CheckpointError(f"{path.name} holds something other than tensors ({reason:.120})") from None
    if not isinstance(content, dict):
        raise CheckpointError(f"{path.name} holds something other than tensors by name")
    return content


def _state(folder: Path, segments: Collection[str]) -> dict[str, Any]:
    def segment(name: str) -> Segment:
        if name not in segments:
            raise CheckpointError(f"{name}{_SEGMENT} is missing")
        return Segment(name, functools.partial(_content, folder, name))

    try:
        state: dict[str, Any] = with_segments(_load(folder / STATE), segment)
    except (TypeError, RecursionError) as error:
        raise CheckpointError(f"{STATE} holds something other than tensors ({_one_line(error):.120})") from None
    return state


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
        directory: The folder; where there is none, there are none.
    """
    directory = Path(directory)
    if not os.path.isdir(directory):  # not Path.is_dir(), which raises at a name that is too long
        return []
    return sorted((path for path in directory.iterdir() if _NAME.fullmatch(path.name)), key=_number)


def is_place(path: Path) -> bool:
    """Return whether a path leads to a checkpoint, to one that is missing among others, or to a run's folder."""
    missing = _NAME.fullmatch(path.name) is not None and bool(listed(path.parent))
    return missing or os.path.isfile(path / DESCRIPTION) or bool(listed(path))


def good(directory: Path, besides: Path | None = None) -> Iterator[Checkpoint]:
    """Read the good checkpoints of a folder, the newest first, but for one `besides` them."""
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


def _number(path: Path) -> int:
    return int(path.name.split("-")[0])


def _sums(folder: Path, segments: Iterable[str] = (), known: Mapping[str, str] | None = None) -> str:
    """Return the digests of a checkpoint's files; those that are known are not computed."""
    files = (DESCRIPTION, STATE, *sorted(f"{segment}{_SEGMENT}" for segment in segments))
    return sums_of(folder, files, known)


def _one_line(error: object) -> str:
    return " ".join(str(error).split())
