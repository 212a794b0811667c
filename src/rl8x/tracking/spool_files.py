"""The files of a spool, which may be torn, edited, or written by another version or program.

A spool is a folder:

    ops.jsonl   one JSON object a line, in order: the header, then params, tags, metrics, artifacts, the final status
    ack.json    how far the store has it, and the run's ID there; written beside and renamed
    end.json    room for the final status and how many rows were lost, where the disk is full by then
    files/      copies of artifacts that are still to be sent
    lock        held by the process that writes or sends
    rejected.jsonl   entries that the store does not take
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rl8x.output import counted
from rl8x.tracking.locks import FolderLock, is_locked
from rl8x.tracking.names import NameTable, readable
from rl8x.tracking.protocol import TrackingError
from rl8x.tracking.secrets import hide, hide_in_data

OPS = "ops.jsonl"
ACK = "ack.json"
END = "end.json"
FILES = "files"
REJECTED = "rejected.jsonl"
REMOVED = ".sent"  # how the name of a spool ends that is being removed, after a dot at its beginning
_END_BYTES = 512
_ODD_TEXT = re.compile(rb"\\ud[89a-f]|\\u0000", re.IGNORECASE)

Op = dict[str, Any]


class SpoolInUseError(TrackingError):
    """Another process writes or sends the spool."""


@dataclass(frozen=True)
class Ack:
    """The progress of a spool: how far it has been sent, and to which run.

    Attributes:
        offset: Bytes of `ops.jsonl` that the store has.
        generation: The generation of `ops.jsonl` that `offset` counts in.
        run_id: The run in the store.
        run_name: Its name there.
        name_is_free: No other run of the store had this name.
        attempted: A run was asked for; it may be there although no answer came.
        resumed: Rows from here on may repeat what the run already has.
        finished: The run's status is what it is to be.
    """

    offset: int = 0
    generation: int = 0
    run_id: str | None = None
    run_name: str | None = None
    name_is_free: bool = False
    attempted: bool = False
    resumed: bool = False
    finished: bool = False


@dataclass(frozen=True)
class Unsent:
    """The part of a spool that has not arrived.

    Attributes:
        num_rows: Rows on the disk, which `rl8x sync` can send.
        num_others: Params, tags, artifacts and the status, on the disk too.
        num_lost: Rows that only the memory of this process has, or that were dropped from it.
        num_others_lost: Params, tags and artifacts that only the memory has.
        num_rejected: Entries that the store does not take, which were set aside.
    """

    num_rows: int = 0
    num_others: int = 0
    num_lost: int = 0
    num_others_lost: int = 0
    num_rejected: int = 0

    @property
    def lost(self) -> str:
        """Write what is lost in words; empty where nothing is."""
        rows = counted(self.num_lost, "row", "rows") if self.num_lost else ""
        others = counted(self.num_others_lost, "other entry", "other entries") if self.num_others_lost else ""
        return " and ".join(filter(None, (rows, others)))


def params_op(params: Mapping[str, object], names: NameTable) -> Op:
    """Make the op of hyperparameters."""
    return {"op": "params", "params": {name: _text(value) for name, value in names.legal(params).items()}}


def _text(value: object) -> str:
    """Write a param; one that cannot be written, such as an int of 5,000 digits, is no reason to end a run."""
    try:
        return str(value)
    except Exception as error:
        return f"{type(value).__name__} that cannot be written ({type(error).__name__})"


def tags_op(tags: Mapping[str, str], names: NameTable) -> Op:
    """Make the op of tags."""
    return {"op": "tags", "tags": {name: _text(value) for name, value in names.legal(tags).items()}}


def encode(op: Mapping[str, object]) -> bytes:
    """Write an op as one line; text that no store takes is escaped, so that it can be read there."""
    line = json.dumps(op, separators=(",", ":")).encode()
    if _ODD_TEXT.search(line):
        line = json.dumps(_readable(op), separators=(",", ":")).encode()
    return line + b"\n"


def decode(line: bytes) -> Op:
    """Read an op; a line that is none becomes an op `unreadable`."""
    try:
        op = json.loads(line)
        if _ODD_TEXT.search(line):
            op = _readable(op)
    except (ValueError, RecursionError):
        op = None
    if isinstance(op, dict) and isinstance(op.get("op"), str):
        return op
    return {"op": "unreadable", "line": repr(line)[:500]}


def _readable(data: Any) -> Any:
    if isinstance(data, str):
        return readable(data)
    if isinstance(data, Mapping):
        return {readable(name): _readable(value) for name, value in data.items()}
    return [_readable(value) for value in data] if isinstance(data, list | tuple) else data


def without_secrets(op: Mapping[str, Any]) -> Op:
    """Return an op without secrets. Rows are names and numbers, which are not looked at; files keep their names."""
    kind = op["op"]
    if kind in ("m", "artifact"):
        return dict(op)
    if kind in ("describe", "text") and isinstance(op.get("text"), str):
        return {**op, "text": hide(op["text"])}
    return dict(hide_in_data(op))


def open_regular(path: Path, flags: int = os.O_RDONLY) -> int:
    """Open a plain file of a spool; `OSError` for a pipe, which would never end, or a link, which may lead anywhere."""
    fd = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(22, f"{path.name} is no file")
    return fd


def check_plain(folder: Path) -> None:
    """Refuse a spool that is a link, or holds anything but plain files; nothing is opened.

    It may be somebody else's.
    """
    try:
        if folder.is_symlink():
            raise TrackingError(f"the spool {folder} is a link, which is not followed")
        with os.scandir(folder) as entries:
            for entry in entries:
                kind = entry.is_dir if entry.name == FILES else entry.is_file
                if not kind(follow_symlinks=False):
                    raise TrackingError(f"the spool {folder} has {entry.name!r}, which is no plain file")
    except OSError as error:
        raise TrackingError(f"cannot open the spool {folder}: {error}") from error


def check_is_no_copy(folder: Path, header: Op) -> None:
    """Refuse the copy of a spool that a process still writes: what it sends would be sent twice, and end the run."""
    original = Path(str(header.get("folder", folder)))
    with contextlib.suppress(OSError):
        if not os.path.samefile(original, folder) and is_locked(original):
            raise SpoolInUseError(
                f"the spool {folder} is a copy of {original}, which is in use by {FolderLock(original).owner()}; "
                "try again when that has ended"
            )


_HEADER: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(("spool_id", "uri"), (str,)),
    **dict.fromkeys(("experiment", "experiment_id", "run_name", "run_id"), (str, type(None))),
    **dict.fromkeys(("t", "generation"), (int,)),
    "owns": (bool,),
}


def read_header(folder: Path) -> Op:
    """Read the first line of a spool, or raise `TrackingError` where this version cannot read it."""
    check_plain(folder)
    try:
        with os.fdopen(open_regular(folder / OPS), "rb") as file:
            header = decode(file.readline())
    except OSError as error:
        raise TrackingError(f"{folder} is not a spool: it has no readable {OPS} ({error})") from error
    if header["op"] != "open":
        raise TrackingError(f"{folder} is not a spool: it has no readable {OPS}, which begins with a header")
    if header.get("version") != 1:
        raise TrackingError(f"the spool {folder} has version {header.get('version')!r}; this rl8x reads version 1")
    for name, types in _HEADER.items():
        required = name in ("spool_id", "t")
        if (required or name in header) and type(header.get(name)) not in types:
            raise TrackingError(f"the spool {folder} cannot be sent: its header has {name}={header.get(name)!r:.80}")
    if not re.fullmatch(r"\w[\w.-]*", header["spool_id"]) or not 0 <= header["t"] < 2**63:
        odd = f"spool_id={header['spool_id']!r:.80} and t={header['t']!r:.80}"
        raise TrackingError(f"the spool {folder} cannot be sent: its header has {odd}")
    return header


def read_ack(folder: Path) -> Ack:
    """Read how far a spool has been sent; an unreadable file means not at all, as sending twice does no harm."""
    try:
        check_plain(folder)
        with os.fdopen(open_regular(folder / ACK), "rb") as file:
            ack = Ack(**json.loads(file.read()))
    except (OSError, ValueError, TypeError, RecursionError):  # a TrackingError is a ValueError
        return Ack()
    numbers = all(type(number) is int and number >= 0 for number in (ack.offset, ack.generation))
    texts = all(text is None or isinstance(text, str) for text in (ack.run_id, ack.run_name))
    flags = all(isinstance(flag, bool) for flag in (ack.name_is_free, ack.attempted, ack.resumed, ack.finished))
    return ack if numbers and texts and flags and ack.run_id != "" else Ack()


def write_end(folder: Path, op: Mapping[str, object] | None) -> None:
    """Write how the run ended over the room that was reserved for it; None reserves it, or takes the end away."""
    data = b"" if op is None else encode(op)
    fd = open_regular(folder / END, os.O_RDWR | os.O_CREAT)
    try:
        if os.pwrite(fd, data.ljust(_END_BYTES), 0) != _END_BYTES:
            raise OSError(28, "No space left on device")
        os.fsync(fd)
    finally:
        os.close(fd)


def read_end(folder: Path) -> Op | None:
    """Read how the run ended, where that is not among its ops since the disk was full; else None."""
    try:
        with os.fdopen(open_regular(folder / END), "rb") as file:
            op = decode(file.read(_END_BYTES))
    except OSError:
        return None
    return op if op["op"] == "finish" and type(op.get("lost_rows")) is int else None


def remove(folder: Path) -> None:
    """Remove a spool, whose lock the caller has: under its name it is gone at once, or all there.

    Were its files removed one by one, another process could take a lock of its own when the lock's file has gone, and
    would write to a file that goes next.
    """
    gone = folder.with_name(f".{folder.name}{REMOVED}")
    with contextlib.suppress(OSError):
        shutil.rmtree(gone, ignore_errors=True)  # of a process that was killed here
        folder.rename(gone)
        folder = gone
    shutil.rmtree(folder, ignore_errors=True)


def replace_file(path: Path, data: bytes) -> None:
    """Write a file beside its place, which only its owner can read, and rename it into that; else raise `OSError`."""
    beside = path.with_name(path.name + ".new")
    with open(beside, "wb", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
        file.write(data)
    os.replace(beside, path)
