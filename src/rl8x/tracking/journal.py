"""A run's journal: what every process may read of it, and the side that sends.

A journal is a folder, `mlruns/spool/<id>`:

    journal.jsonl   one JSON object a line: the header, then params, tags, metrics, artifacts, the final status
    ack.json        what has arrived, overwritten in place by the process that sends, which has the lock on this file
    files/          copies of artifacts that are still to be sent
    lock            held, with the folder, by the process that appends
    rejected.jsonl  entries that the store does not take
    known.json      last steps on the server, of a run that is resumed where its journal is not

The process that appends reads `ack.json` and writes all else but `rejected.jsonl`. All files may be torn, edited, or
written by another version or program; none is trusted.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import re
import shutil
import stat
import threading
import zlib
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

from rl8x.disk import sync_folder
from rl8x.output import counted
from rl8x.tracking.locks import FileLock, FolderLock, is_locked
from rl8x.tracking.protocol import NameTable, TrackingError, readable
from rl8x.tracking.secrets import hide, hide_in_data

JOURNAL: Final = "journal.jsonl"
ACK: Final = "ack.json"
FILES: Final = "files"
REJECTED: Final = "rejected.jsonl"
KNOWN: Final = "known.json"
REMOVED: Final = ".sent"  # how the name of a journal ends that is being removed, after a dot at its beginning
CHECKPOINTS_TAG: Final = "rl8x.checkpoints"
LOST_ROWS_TAG: Final = "rl8x.lost_rows"
ROW: Final = b'{"op":"m"'  # how the line of a row of metrics begins
_KEPT: Final = (ROW, b'{"op":"left"')  # what a resume needs of a journal
READ_BYTES: Final = 1 << 20
_SLOT: Final = 3072  # of two, which take turns: a name of 250 letters, each of four bytes, and a reason
_ODD_TEXT: Final = re.compile(rb"\\ud[89a-f]|\\u0000", re.IGNORECASE)

Op = dict[str, Any]


class JournalInUseError(TrackingError):
    """Another process appends to the journal, or sends it."""


@dataclass(frozen=True)
class Ack:
    """What of a journal has arrived, and how the store is.

    Attributes:
        offset: Bytes of `journal.jsonl` that the store has.
        generation: The generation of `journal.jsonl` that `offset` counts in.
        memory: Number of the last line that came past the disk and has arrived.
        run_id: The run in the store.
        run_name: Its name there.
        name_is_free: No other run of the store had this name.
        attempted: A run was asked for; it may be there although no answer came.
        resumed: Rows from here on may repeat what the server has, and are compared with that.
        finished: The run's status is what it is to be.
        ending: How the run ended, where only memory had that: the op, with `lost_rows`.
        rejected: Entries that were set aside.
        lost: Rows and other entries that were, and could not be written down.
        outage: Why the store takes nothing now; empty if it does.
        tried: Whether this sender has asked the store for anything.
        beat: A number that grows while the process that sends is well.
    """

    offset: int = 0
    generation: int = 0
    memory: int = 0
    run_id: str | None = None
    run_name: str | None = None
    name_is_free: bool = False
    attempted: bool = False
    resumed: bool = False
    finished: bool = False
    ending: Op | None = None
    rejected: int = 0
    lost: Sequence[int] = (0, 0)
    outage: str = ""
    tried: bool = False
    beat: int = 0


@dataclass(frozen=True)
class Unsent:
    """The part of a journal that has not arrived.

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
    """Open a plain file of a journal; `OSError` for a pipe, which never ends, or a link, which may lead anywhere."""
    fd = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(22, f"{path.name} is no file")
    return fd


def check_plain(folder: Path) -> None:
    """Refuse a journal that is a link, or holds anything but plain files; nothing is opened.

    It may be somebody else's.
    """
    try:
        if folder.is_symlink():
            raise TrackingError(f"the journal {folder} is a link, which is not followed")
        with os.scandir(folder) as entries:
            for entry in entries:
                kind = entry.is_dir if entry.name == FILES else entry.is_file
                if not kind(follow_symlinks=False):
                    raise TrackingError(f"the journal {folder} has {entry.name!r}, which is no plain file")
    except OSError as error:
        raise TrackingError(f"cannot open the journal {folder}: {error}") from error


def check_is_no_copy(folder: Path, header: Op) -> None:
    """Refuse the copy of a journal that a process still writes: what it sends would be sent twice, and end the run."""
    original = Path(str(header.get("folder", folder)))
    with contextlib.suppress(OSError):
        if not os.path.samefile(original, folder) and is_locked(original):
            raise JournalInUseError(
                f"the journal {folder} is a copy of {original}, which is in use by {FolderLock(original).owner()}; "
                "try again when that has ended"
            )


_HEADER: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(("spool_id", "uri"), (str,)),
    **dict.fromkeys(("experiment", "experiment_id", "run_name", "run_id"), (str, type(None))),
    **dict.fromkeys(("t", "generation"), (int,)),
    "owns": (bool,),
}


def read_header(folder: Path) -> Op:
    """Read the first line of a journal, or raise `TrackingError` where this version cannot read it."""
    check_plain(folder)
    try:
        with os.fdopen(open_regular(folder / JOURNAL), "rb") as file:
            header = decode(file.readline())
    except OSError as error:
        raise TrackingError(f"{folder} is not a journal: it has no readable {JOURNAL} ({error})") from error
    if header["op"] != "open":
        raise TrackingError(f"{folder} is not a journal: it has no readable {JOURNAL}, which begins with a header")
    if header.get("version") != 1:
        raise TrackingError(f"the journal {folder} has version {header.get('version')!r}; this rl8x reads version 1")
    for name, types in _HEADER.items():
        required = name in ("spool_id", "t")
        if (required or name in header) and type(header.get(name)) not in types:
            raise TrackingError(f"the journal {folder} cannot be sent: its header has {name}={header.get(name)!r:.80}")
    if not re.fullmatch(r"\w[\w.-]*", header["spool_id"]) or not 0 <= header["t"] < 2**63:
        odd = f"spool_id={header['spool_id']!r:.80} and t={header['t']!r:.80}"
        raise TrackingError(f"the journal {folder} cannot be sent: its header has {odd}")
    return header


# What has arrived.


def empty_ack() -> bytes:
    """Return the content of a new `ack.json`: its full size, so that a full disk stops nothing that comes later."""
    return bytes(2 * _SLOT)


def parse_ack(data: bytes) -> tuple[Ack, int]:
    """Read the newer slot that is whole, and its number; (`Ack()`, 0) where neither is: sending twice does no harm."""
    newest = (Ack(), 0)
    for slot in (data[:_SLOT], data[_SLOT : 2 * _SLOT]):
        with contextlib.suppress(ValueError, TypeError, RecursionError):
            checksum, number, text = slot.rstrip(b"\0").split(b" ", 2)
            if int(checksum, 16) == zlib.crc32(number + b" " + text) and int(number) > newest[1]:
                newest = _checked(Ack(**json.loads(text))), int(number)
    return newest


def _checked(ack: Ack) -> Ack:
    """Return an acknowledgement, or raise `TypeError` where it has values of other types."""
    default = Ack(run_id="", run_name="", ending={})
    for name, value in asdict(ack).items():
        kind = list if name == "lost" else type(getattr(default, name))
        optional = name in ("run_id", "run_name", "ending") and value is None
        if not optional and (type(value) is not kind or (isinstance(value, int) and value < 0)):
            raise TypeError(name)
    if ack.run_id == "":
        raise TypeError("run_id")
    return ack


def read_ack(folder: Path) -> Ack:
    """Read what has arrived of a journal."""
    try:
        check_plain(folder)
        return read_ack_file(folder / ACK)
    except TrackingError:
        return Ack()


def read_ack_file(path: Path) -> Ack:
    """Read an `ack.json`."""
    with contextlib.suppress(OSError), os.fdopen(open_regular(path), "rb") as file:
        return parse_ack(file.read(2 * _SLOT))[0]
    return Ack()


def _shortest_json(data: Mapping[str, Any]) -> bytes:
    return json.dumps(data, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "backslashreplace")


class AckFile:
    """An `ack.json` that this process writes, which has the lock on it. Any thread may write."""

    def __init__(self, lock: FileLock) -> None:
        self._lock = lock
        self._guard = threading.Lock()
        self.ack, self._number = parse_ack(os.pread(lock.fd, 2 * _SLOT, 0))

    @classmethod
    def open(cls, path: Path, timeout_s: float = 0.0) -> AckFile | None:
        """Open and lock it, making one where there is none; None where another process has it, or the disk refuses."""
        lock = FileLock(path, signs=False)
        try:
            return cls(lock) if lock.acquire(timeout_s) else None
        except OSError:
            return None

    def write(self, **changes: Any) -> None:
        """Change some of it, in the older slot. What the disk refuses is sent twice, which adds nothing."""
        with self._guard:
            self.ack = replace(self.ack, **changes)
            self._number += 1
            text = b"%d %s" % (self._number, _shortest_json(asdict(self.ack)))
            slot = b"%08x %s" % (zlib.crc32(text), text)
            if self._lock.is_held and len(slot) <= _SLOT:
                with contextlib.suppress(OSError):
                    os.pwrite(self._lock.fd, slot.ljust(_SLOT, b"\0"), (self._number % 2) * _SLOT)

    def close(self) -> None:
        """Close the file and give the lock back."""
        with self._guard:
            self._lock.release()


# Lines.


def whole_lines(fd: int, end: int) -> int:
    """Return the length of the first `end` bytes of a file up to the last newline."""
    while end > 0:
        start = max(0, end - 65536)
        newline = os.pread(fd, end - start, start).rfind(b"\n")
        if newline >= 0:
            return start + newline + 1
        end = start
    return 0


def boot_id() -> str:
    """Return what tells this start of the computer from the last, which may have ended by a power cut; or nothing."""
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return ""


def last_boot(fd: int, end: int) -> str:
    """Return the `boot_id` of the process that began or resumed a journal last."""
    if end <= 0:
        return ""
    with mmap.mmap(fd, end, access=mmap.ACCESS_READ) as data:
        at = data.rfind(b'"boot":"')
        return data[at + 8 : data.find(b'"', at + 8)].decode(errors="replace") if at >= 0 else ""


def read_lines(fd: int, start: int, end: int) -> Iterator[tuple[bytes, int]]:
    """Read whole lines between two offsets, each with the offset after it."""
    rest = b""
    while start < end:
        data = os.pread(fd, min(READ_BYTES, end - start), start)
        if not data:
            return
        lines = (rest + data).split(b"\n")
        at, rest = start - len(rest), lines.pop()
        start += len(data)
        for line in lines:
            at += len(line) + 1
            yield line + b"\n", at


def count_lines(fd: int, start: int, end: int) -> tuple[int, int]:
    """Count the rows and the other lines between two offsets."""
    num_rows = num_others = 0
    for line, _ in read_lines(fd, start, end):
        is_row = line.startswith(ROW)
        num_rows, num_others = num_rows + is_row, num_others + (not is_row)
    return num_rows, num_others


class Rejected:
    """The file `rejected.jsonl` of a journal: a line for each entry, with the reason.

    An entry that a later one replaces (a tag by the same tag, a status by another) goes when that one arrives, or
    comes after it: sent again, it would undo it.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / REJECTED
        self.num_rows_lost = self.num_others_lost = 0
        self._entries = self._read()
        self._lines = set(map(encode, self._entries))

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def entries(self) -> list[Op]:
        """The ops that were set aside, in order."""
        return [entry["rejected"] for entry in self._entries]

    @property
    def reason(self) -> str:
        """Why the first one was not taken; empty if there is none."""
        return str(self._entries[0]["reason"]) if self._entries else ""

    def _read(self) -> list[Op]:
        try:
            with os.fdopen(open_regular(self.path), "rb") as file:
                lines = file.read().splitlines()
        except (FileNotFoundError, NotADirectoryError):
            return []
        except OSError as error:
            reason = f"{REJECTED} cannot be read: {error}"
            return [{"op": "rejected", "reason": reason, "rejected": {"op": "unreadable"}}]
        return [_entry(line) for line in dict.fromkeys(lines)]  # a kill may have left one twice

    def add(self, op: Op, reason: str) -> None:
        """Set aside an op that the store does not take, so that the others can go on."""
        self.replaced_by(op)
        entry = {"op": "rejected", "reason": hide(reason), "rejected": without_secrets(op)}
        line = encode(entry)
        if line in self._lines:
            return
        try:
            with os.fdopen(open_regular(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), "ab") as file:
                file.write(line)
            self._entries.append(entry)
            self._lines.add(line)
        except OSError:
            self.num_rows_lost += op["op"] == "m"
            self.num_others_lost += op["op"] != "m"

    def replaced_by(self, op: Op) -> None:
        """Drop what an op, which has arrived now, replaces."""
        keys = _keys(op)
        if self._entries and keys:  # a row replaces nothing, and there may be thousands of them
            self._keep([entry for entry in self._entries if not _keys(entry["rejected"]) & keys])

    def replace(self, kept: list[tuple[Op, str]]) -> None:
        """Keep these ops and reasons alone."""
        self._keep([{"op": "rejected", "reason": reason, "rejected": op} for op, reason in kept])

    def _keep(self, entries: list[Op]) -> None:
        if entries == self._entries:
            return
        self._entries = entries
        self._lines = set(map(encode, entries))
        with contextlib.suppress(OSError):
            if entries:
                replace_file(self.path, b"".join(map(encode, entries)))
            else:
                self.path.unlink()


def _entry(line: bytes) -> Op:
    entry = decode(line + b"\n")
    inner = entry.get("rejected")
    if isinstance(inner, dict) and isinstance(inner.get("op"), str):
        return entry
    return {"op": "rejected", "reason": "unreadable", "rejected": {"op": "unreadable", "line": repr(line)[:500]}}


def _keys(op: Op) -> set[tuple[str, str]]:
    """List what an op sets, where another op would set it anew."""
    match op["op"]:
        case "finish" | "resume":
            return {("status", "")}
        case "describe":
            return {("describe", "")}
        case "text":
            return {("text", str(op.get("to")))}
        case "tags" if isinstance(op.get("tags"), dict):
            return {("tag", name) for name in op["tags"]}
    return set()


def name_of(op: Op) -> str:
    """Return what an entry is called in a message."""
    match op:
        case {"op": "m", "m": {**metrics}} if len(metrics) == 1:
            return f"the metric {next(iter(metrics))!r}"
        case {"op": "params" | "tags" as kind} if isinstance(op.get(kind), dict) and len(op[kind]) == 1:
            return f"the {kind[:-1]} {next(iter(op[kind]))!r:.100}"
        case {"op": "text", "to": to}:
            return f"the text {to!r:.100}"
        case {"op": "artifact", "file": file}:
            return f"the artifact {file!r:.100}"
        case {"op": "model", "about": {"name": name}}:
            return f"the model {name!r:.100}"
        case {"op": "open", "experiment": experiment, "run_name": name}:
            return f"the run's name {name!r:.100}" if experiment is None else f"the experiment {experiment!r:.100}"
    return f"an entry of the kind {op['op']!r:.100}"


def last_time(fd: int, end: int, header: Op) -> int:
    """Return the latest time among the last lines, about half a megabyte of them, in milliseconds since 1970."""
    lines = read_lines(fd, whole_lines(fd, max(0, end - READ_BYTES // 2)), end) if fd >= 0 else ()
    times = [op["t"] for op in (decode(line) for line, _ in lines) if type(op.get("t")) is int]
    return max(times, default=int(header["t"]))


class SendingJournal:
    """A journal as the process that sends it has it: it reads lines, and notes what has arrived."""

    def __init__(self, folder: Path, ack_file: AckFile, header: Op | None = None) -> None:
        self.folder = self.place = folder
        self.header = read_header(folder) if header is None else header
        self._ack_file = ack_file
        self.lines: deque[tuple[int, bytes]] = deque()
        self._fd = self._folder_fd = -1
        self.reopen(folder, ack_file)
        self.rejected = Rejected(self.place)
        self.acknowledge(rejected=len(self.rejected), outage="", tried=False)

    def reopen(self, folder: Path, ack_file: AckFile) -> None:
        """Open the files, which a disk that was full may take now."""
        if ack_file is not self._ack_file:
            ack_file.write(**{**asdict(self._ack_file.ack), "offset": 0, "lost": self._ack_file.ack.lost})
            self._ack_file.close()
            self._ack_file = ack_file
        with contextlib.suppress(OSError):
            self._fd = open_regular(folder / JOURNAL)
            self._folder_fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
            place = Path(f"/proc/self/fd/{self._folder_fd}")
            self.folder, self.place = folder, place if place.is_dir() else folder
            with os.fdopen(os.dup(self._fd), "rb", buffering=0) as file:
                self.header = {**self.header, **decode(os.pread(file.fileno(), READ_BYTES, 0).split(b"\n")[0])}
            generation = self.header.get("generation", 0)
            offset = self.ack.offset if self.ack.generation == generation else 0
            # Another generation: killed between the two steps of compacting. An offset without a line: a power cut, or
            # an edited file. Sending all again adds nothing.
            if offset > self.end or whole_lines(self._fd, offset) != offset:
                offset = 0
            self.acknowledge(offset=offset, generation=generation)

    @property
    def ack(self) -> Ack:
        """What has arrived."""
        return self._ack_file.ack

    @property
    def end(self) -> int:
        """The length of the file up to the end of its last whole line."""
        return 0 if self._fd < 0 else whole_lines(self._fd, os.fstat(self._fd).st_size)

    @property
    def pending(self) -> bool:
        """Whether anything has not arrived."""
        return bool(self.lines) or self.ack.offset < self.end

    def read(self) -> list[tuple[Op, int | None, int]]:
        """Read about a megabyte of ops that have not arrived: each with the offset after it, or its number."""
        ops: list[tuple[Op, int | None, int]] = []
        start, size = self.ack.offset, 0
        for line, offset in read_lines(self._fd, start, self.end) if self._fd >= 0 else ():
            ops.append((decode(line), offset, 0))
            size += len(line)
            if size >= READ_BYTES:
                break
        return ops or [(decode(line), None, number) for number, line in list(self.lines)[:1000]]

    def last_time(self) -> int:
        """Return when its process last wrote something, in milliseconds since 1970."""
        return last_time(self._fd, self.end, self.header)

    def acknowledge(self, offset: int | None = None, number: int = 0, **changes: Any) -> None:
        """Note how far the store has the journal: to `offset`, or the line of a number that no disk took."""
        if offset is not None:
            changes["offset"] = offset
        if number:
            changes["memory"] = number
            while self.lines and self.lines[0][0] <= number:
                self.lines.popleft()
        self._ack_file.write(**changes)

    def set_aside(self, op: Op, reason: str) -> None:
        """Write down an entry that the store does not take."""
        self.rejected.add(op, reason)
        self.note_rejected()

    def note_rejected(self) -> None:
        """Tell how many entries are set aside."""
        rejected = self.rejected
        self.acknowledge(rejected=len(rejected), lost=[rejected.num_rows_lost, rejected.num_others_lost])

    def beat(self) -> None:
        """Tell that this process is well; any thread may."""
        self._ack_file.write(beat=self.ack.beat + 1)

    def close(self) -> None:
        """Close the files, and give the lock on sending back."""
        for fd in (self._fd, self._folder_fd):
            if fd >= 0:
                os.close(fd)
        self._fd = self._folder_fd = -1
        self._ack_file.close()


# The end of a journal, by whoever has the lock on appending.


def is_sent(folder: Path) -> bool:
    """Return whether all of a journal has arrived, its run has ended, and it stays for a resume alone."""
    ack = read_ack(folder)
    with contextlib.suppress(OSError):
        size = (folder / JOURNAL).lstat().st_size
        # An offset beyond it is of a longer file, before it was compact or a power cut: what came since is not sent.
        return ack.finished and not ack.rejected and ack.offset == size > 0 and ack.ending is None
    return False


def conclude(folder: Path) -> None:
    """Remove a journal that has been sent, or keep its rows alone where its run has checkpoints."""
    with contextlib.suppress(OSError, TrackingError):
        header = read_header(folder)
        checkpoints, is_compact = header.get("checkpoints"), True
        with os.fdopen(open_regular(folder / JOURNAL), "rb") as file:
            file.readline()
            for line in file:
                is_compact = is_compact and line.startswith(_KEPT)
                if not line.startswith(ROW) and CHECKPOINTS_TAG.encode() in line:
                    checkpoints = decode(line).get("tags", {}).get(CHECKPOINTS_TAG, checkpoints)
        if not _has_checkpoints(folder, checkpoints):
            remove(folder)
        elif not is_compact:
            if os.path.isabs(str(checkpoints)):
                checkpoints = os.path.relpath(str(checkpoints), os.path.realpath(folder))
            generation = header.get("generation", 0) + 1
            _compact(folder, {**header, "generation": generation, "checkpoints": checkpoints})


def _compact(folder: Path, header: Op) -> None:
    """Write a journal anew with a header and its rows; killed in between, all of them are sent again, in vain."""
    ack_file = AckFile.open(folder / ACK, 5.0)
    if ack_file is None:
        return
    try:
        beside = folder / f"{JOURNAL}.new"
        with (
            os.fdopen(open_regular(folder / JOURNAL), "rb") as whole,
            os.fdopen(open_regular(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), "wb") as file,
        ):
            whole.readline()
            file.write(encode(header))
            file.writelines(line for line in whole if line.startswith(_KEPT))
            file.flush()
            os.fsync(file.fileno())
            size = file.tell()
        os.replace(beside, folder / JOURNAL)
        sync_folder(folder)
        ack_file.write(offset=size, generation=header["generation"])
        shutil.rmtree(folder / FILES, ignore_errors=True)
    finally:
        ack_file.close()


def _has_checkpoints(folder: Path, checkpoints: object) -> bool:
    """Return whether there is a folder of checkpoints at a path, which may be one from the journal's folder."""
    return isinstance(checkpoints, str) and (Path(os.path.realpath(folder)) / checkpoints).is_dir()


def remove(folder: Path) -> None:
    """Remove a journal, whose lock the caller has: under its name it is gone at once, or all there.

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
