"""A run's journal, `mlruns/spool/<id>`: what every process may read of it, and the side that sends.

    journal.jsonl   one JSON object a line: the header, then params, tags, metrics, artifacts, the final status
    ack.json        what has arrived, overwritten in place by the process that sends, which has the lock on this file
    files/          copies of artifacts that are still to be sent
    lock            held, with the folder, by the process that appends
    rejected.jsonl  entries that the store does not take

The process that appends reads `ack.json` and writes all else but `rejected.jsonl`. All files may be torn, edited, or
written by another version or program; none is trusted.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import shlex
import shutil
import stat
import threading
import zlib
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

from rl8x.disk import replace_synced, sync_folder
from rl8x.output import counted
from rl8x.tracking.locks import FileLock, FolderLock, is_locked
from rl8x.tracking.protocol import TrackingError, readable
from rl8x.tracking.secrets import hide, hide_in_data

JOURNAL: Final = "journal.jsonl"
ACK: Final = "ack.json"
FILES: Final = "files"
REJECTED: Final = "rejected.jsonl"
REMOVED: Final = ".sent"  # how the name of a journal ends that is being removed, after a dot at its beginning
CHECKPOINTS_TAG: Final = "rl8x.checkpoints"
NAME_TAG: Final = "mlflow.runName"
LOST_ROWS_TAG: Final = "rl8x.lost_rows"
ROW: Final = b'{"op":"m"'  # how the line of a row of metrics begins
_KEPT: Final = (ROW, b'{"op":"left"')  # what a resume needs of a journal
READ_BYTES: Final = 1 << 20
_READ_LINES: Final = 1000
_SLOT: Final = 3072  # of two, which take turns: a name of 250 letters, each of four bytes, and a reason
_COMPACT: Final = json.JSONEncoder(separators=(",", ":"))
_ODD_TEXT: Final = re.compile(rb"\\ud[89a-f]|\\u0000", re.IGNORECASE)

Op = dict[str, Any]


class JournalInUseError(TrackingError):
    """Another process appends to the journal, or sends it."""


@dataclass(frozen=True)
class Ack:
    """What of a journal has arrived, and how the store is."""

    offset: int = 0  # bytes of `journal.jsonl` that the store has
    generation: int = 0  # of `journal.jsonl`, that `offset` counts in
    memory: int = 0  # number of the last line that came past the disk and has arrived
    run_id: str | None = None
    run_name: str | None = None
    name_is_free: bool = False  # no other run of the store had this name
    attempted: bool = False  # a run was asked for; it may be there although no answer came
    resumed: int = 0  # when the run was resumed: later rows may repeat what the server had, and are compared with that
    finished: bool = False  # the run's status is what it is to be
    ending: Op | None = None  # how the run ended, where only memory had that: the op, with `lost_rows`
    rejected: int = 0  # entries that were set aside
    lost: Sequence[int] = (0, 0)  # rows and other entries that were, and could not be written down
    outage: str = ""  # why the store takes nothing now
    tried: bool = False  # this sender has asked the store for something
    beat: int = 0  # grows while the process that sends is well
    boot: str = ""  # the start of the computer in which this was written

    def name_word(self, is_default: bool) -> str | None:
        """Return the run's name as a command started in this folder takes it; None where it would not find the run."""
        name = self.run_name or ""
        is_odd = not name.isprintable() or name.startswith("-") or os.path.exists(name)  # taken for something else
        return shlex.quote(name) if name and self.name_is_free and is_default and not is_odd else None


@dataclass(frozen=True)
class Unsent:
    """The part of a journal that has not arrived."""

    num_rows: int = 0  # on the disk, which `rl8x sync` can send
    num_others: int = 0  # params, tags, artifacts and the status, on the disk too
    num_lost: int = 0  # rows that only the memory of this process has, or that were dropped from it
    num_others_lost: int = 0  # params, tags and artifacts that only the memory has
    num_rejected: int = 0  # entries that the store does not take, which were set aside

    @property
    def lost(self) -> str:
        """Write what is lost in words; empty where nothing is."""
        rows = counted(self.num_lost, "row") if self.num_lost else ""
        others = counted(self.num_others_lost, "other entry", "other entries") if self.num_others_lost else ""
        return " and ".join(filter(None, (rows, others)))


def encode(op: Mapping[str, object]) -> bytes:
    """Write an op as one line; text that no store takes is escaped, so that it can be read there."""
    line = _COMPACT.encode(op).encode()
    if _ODD_TEXT.search(line):
        line = _COMPACT.encode(_readable(op)).encode()
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
    """Refuse a journal, maybe somebody else's, that is a link or holds anything but plain files; nothing is opened."""
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
    odd = ""
    for name, types in _HEADER.items():
        if (name in ("spool_id", "t") or name in header) and type(header.get(name)) not in types:
            odd = odd or f"{name}={header.get(name)!r:.80}"
    if not odd and not (re.fullmatch(r"\w[\w.-]*", header["spool_id"]) and 0 <= header["t"] < 2**63):
        odd = f"spool_id={header['spool_id']!r:.80} and t={header['t']!r:.80}"
    if odd:
        raise TrackingError(f"the journal {folder} cannot be sent: its header has {odd}")
    return header


# A new `ack.json` has its full size, so that a full disk stops nothing that comes later.
EMPTY_ACK: Final = bytes(2 * _SLOT)


def parse_ack(data: bytes) -> tuple[Ack, int]:
    """Read the newer slot that is whole, and its number; (`Ack()`, 0) where neither is: sending twice does no harm."""
    newest = (Ack(), 0)
    for slot in (data[:_SLOT], data[_SLOT : 2 * _SLOT]):
        with contextlib.suppress(ValueError, TypeError, RecursionError):
            checksum, number, text = slot.rstrip(b"\0").split(b" ", 2)
            if int(checksum, 16) == zlib.crc32(number + b" " + text) and int(number) > newest[1]:
                newest = Ack(**json.loads(text)), int(number)
    return newest


def read_ack(folder: Path) -> Ack:
    """Read what has arrived of a journal."""
    with contextlib.suppress(OSError, TrackingError):
        check_plain(folder)
        with os.fdopen(open_regular(folder / ACK), "rb") as file:
            return parse_ack(file.read(2 * _SLOT))[0]
    return Ack()


@functools.cache
def boot_id() -> str:
    """Return what tells this start of the computer from the last, which may have ended by a power cut; or nothing."""
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return ""


def whole_lines(fd: int, end: int) -> int:
    """Return the length of the first `end` bytes of a file up to the last newline."""
    while end > 0:
        start = max(0, end - 65536)
        newline = os.pread(fd, end - start, start).rfind(b"\n")
        if newline >= 0:
            return start + newline + 1
        end = start
    return 0


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


class Rejected:
    """The file `rejected.jsonl` of a journal: a line for each entry, with the reason.

    An entry that a later one replaces (a tag by the same tag, a status by another) goes when that one arrives, or
    comes after it: sent again, it would undo it.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / REJECTED
        self.lost = [0, 0]  # rows and other entries that the disk did not take
        self._entries = {encode(entry): entry for entry in read_rejected(self.path)}

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def entries(self) -> list[Op]:
        """The ops that were set aside, in order."""
        return [entry["rejected"] for entry in self._entries.values()]

    @property
    def reason(self) -> str:
        """Why the first one was not taken; empty if there is none."""
        return next((str(entry["reason"]) for entry in self._entries.values()), "")

    def add(self, op: Op, reason: str) -> None:
        """Set aside an op that the store does not take, so that the others can go on."""
        self.replaced_by(op)
        entry = {"op": "rejected", "reason": hide(reason), "rejected": without_secrets(op)}
        line = encode(entry)
        if line in self._entries:
            return
        try:
            with os.fdopen(open_regular(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), "ab") as file:
                file.write(line)
            self._entries[line] = entry
        except OSError:
            self.lost[op["op"] != "m"] += 1

    def replaced_by(self, op: Op) -> None:
        """Drop what an op, which has arrived now, replaces."""
        keys = _keys(op)
        if self._entries and keys:  # a row replaces nothing, and there may be thousands of them
            self._keep([entry for entry in self._entries.values() if not _keys(entry["rejected"]) & keys])

    def replace(self, kept: list[tuple[Op, str]]) -> None:
        """Keep these ops and reasons alone."""
        self._keep([{"op": "rejected", "reason": reason, "rejected": op} for op, reason in kept])

    def _keep(self, entries: list[Op]) -> None:
        kept = {encode(entry): entry for entry in entries}
        if kept.keys() == self._entries.keys():
            return
        self._entries = kept
        with contextlib.suppress(OSError):
            if kept:
                replace_synced(self.path, b"".join(kept), mode=0o600)
            else:
                self.path.unlink()


def read_rejected(path: Path) -> list[Op]:
    """Read the entries that were set aside: each an op `rejected`, with that of the entry and the reason."""
    try:
        with os.fdopen(open_regular(path), "rb") as file:
            entries = [decode(line) for line in file.read().splitlines()]
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        entries = [{"op": "unreadable", "line": f"{REJECTED} cannot be read: {error}"}]
    return [
        entry
        if isinstance(entry.get("rejected"), dict) and isinstance(entry["rejected"].get("op"), str)
        else {"op": "rejected", "reason": "unreadable", "rejected": {**entry, "op": "unreadable"}}
        for entry in entries
    ]


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
        case {"op": "tags", "tags": {"mlflow.runName": name}}:
            return f"the run's name {name!r:.100}"
        case {"op": "params" | "tags" as kind} if isinstance(op.get(kind), dict) and len(op[kind]) == 1:
            return f"the {kind[:-1]} {next(iter(op[kind]))!r:.100}"
        case {"op": "text", "to": to}:
            return f"the text {to!r:.100}"
        case {"op": "artifact", "file": file}:
            return f"the artifact {file!r:.100}"
        case {"op": "model", "about": {"name": name}}:
            return f"the model {name!r:.100}"
        case {"op": "open", "experiment": experiment}:
            return f"the experiment {experiment!r:.100}"
    return f"an entry of the kind {op['op']!r:.100}"


def last_time(fd: int, end: int, header: Op) -> int:
    """Return the latest time among the last lines, about half a megabyte of them, in milliseconds since 1970."""
    lines = read_lines(fd, whole_lines(fd, max(0, end - READ_BYTES // 2)), end)
    times = [op["t"] for op in (decode(line) for line, _ in lines) if type(op.get("t")) is int]
    return max(times, default=int(header["t"]))


class SendingJournal:
    """A journal as the process that sends it has it: it reads lines, and notes what has arrived."""

    def __init__(self, folder: Path, lock: FileLock) -> None:
        """Open the files of a journal whose lock on sending, that on `ack.json`, is held."""
        self.folder = folder
        self.header = read_header(folder)
        self._lock = lock
        self._guard = threading.Lock()
        self.ack, self._number = parse_ack(os.pread(lock.fd, 2 * _SLOT, 0))
        self.lines: deque[tuple[int, bytes]] = deque()  # that no disk took
        self._fds = [open_regular(folder / JOURNAL), os.open(folder, os.O_RDONLY | os.O_DIRECTORY)]
        self._fd = self._fds[0]
        place = Path(f"/proc/self/fd/{self._fds[1]}")
        self.place = place if place.is_dir() else folder  # wherever the folder is moved
        self.rejected = Rejected(self.place)
        generation = self.header.get("generation", 0)
        offset = self.ack.offset if self.ack.generation == generation else 0
        # Another generation: killed between the two steps of compacting. An offset without a line: a power cut, or an
        # edited file. Sending all again adds nothing.
        if offset > self.end or whole_lines(self._fd, offset) != offset:
            offset = 0
        rejected = len(self.rejected)
        self.acknowledge(offset, generation=generation, rejected=rejected, outage="", tried=False)

    @classmethod
    def open(cls, folder: Path, timeout_s: float = 0.0) -> SendingJournal | None:
        """Open a journal; None where another process sends it, or the disk refuses."""
        lock = FileLock(folder / ACK, signs=False)
        with contextlib.ExitStack() as unless_opened, contextlib.suppress(OSError):
            unless_opened.callback(lock.release)
            journal = cls(folder, lock) if lock.acquire(timeout_s) else None
            unless_opened.pop_all()
            return journal
        return None

    @property
    def end(self) -> int:
        """The length of the file up to the end of its last whole line."""
        return whole_lines(self._fd, os.fstat(self._fd).st_size)

    @property
    def pending(self) -> bool:
        """Whether anything has not arrived."""
        return bool(self.lines) or self.ack.offset < self.end

    @property
    def is_behind(self) -> bool:
        """Whether more has not arrived than `read` returns."""
        return len(self.lines) > _READ_LINES or self.end - self.ack.offset > READ_BYTES

    def read(self) -> list[tuple[Op, int | None, int]]:
        """Read about a megabyte of ops that have not arrived: each with the offset after it, or its number."""
        ops: list[tuple[Op, int | None, int]] = []
        start, size = self.ack.offset, 0
        for line, offset in read_lines(self._fd, start, self.end):
            ops.append((decode(line), offset, 0))
            size += len(line)
            if size >= READ_BYTES:
                break
        return ops or [(decode(line), None, number) for number, line in list(self.lines)[:_READ_LINES]]

    def last_time(self) -> int:
        """Return when its process last wrote something, in milliseconds since 1970."""
        return last_time(self._fd, self.end, self.header)

    def acknowledge(self, offset: int | None = None, number: int = 0, **changes: Any) -> None:
        """Write in the older slot how far the store has the journal, to `offset` or the line `number`, or what else.

        What the disk refuses is sent twice, which adds nothing. Any thread may call.
        """
        with self._guard:
            if offset is not None:
                changes["offset"] = offset
            if number:
                changes["memory"] = number
                while self.lines and self.lines[0][0] <= number:
                    self.lines.popleft()
            self.ack = replace(self.ack, **{**changes, "boot": boot_id()})
            self._number += 1
            shortest = json.dumps(asdict(self.ack), ensure_ascii=False, separators=(",", ":"))
            text = b"%d %s" % (self._number, shortest.encode("utf-8", "backslashreplace"))
            slot = b"%08x %s" % (zlib.crc32(text), text)
            if self._lock.is_held and len(slot) <= _SLOT:
                with contextlib.suppress(OSError):
                    os.pwrite(self._lock.fd, slot.ljust(_SLOT, b"\0"), (self._number % 2) * _SLOT)

    def note_rejected(self) -> None:
        """Tell how many entries are set aside."""
        self.acknowledge(rejected=len(self.rejected), lost=list(self.rejected.lost))

    def close(self) -> None:
        """Close the files, and give the lock on sending back."""
        while self._fds:
            os.close(self._fds.pop())
        with self._guard:
            self._lock.release()


def is_sent(folder: Path) -> bool:
    """Return whether all of a journal has arrived, its run has ended, and it stays for a resume alone."""
    ack = read_ack(folder)
    with contextlib.suppress(OSError, TrackingError):
        size = (folder / JOURNAL).lstat().st_size
        # An offset beyond it is of a longer file, before it was compact or a power cut: what came since is not sent.
        is_whole = ack.finished and not ack.rejected and ack.offset == size > 0 and ack.ending is None
        return is_whole and read_header(folder).get("generation", 0) == ack.generation
    return False


def conclude(folder: Path) -> None:
    """Remove a journal that has been sent and is locked; keep its rows alone where its run has checkpoints."""
    with contextlib.suppress(OSError, TrackingError):
        header = read_header(folder)
        checkpoints, is_compact = header.get("checkpoints"), True
        with os.fdopen(open_regular(folder / JOURNAL), "rb") as file:
            file.readline()
            for line in file:
                is_compact = is_compact and line.startswith(_KEPT)
                if not line.startswith(ROW) and CHECKPOINTS_TAG.encode() in line:
                    checkpoints = decode(line).get("tags", {}).get(CHECKPOINTS_TAG, checkpoints)
        # Their path may be one from the journal's folder.
        if not (isinstance(checkpoints, str) and (Path(os.path.realpath(folder)) / checkpoints).is_dir()):
            remove(folder)
        elif not is_compact:
            if os.path.isabs(checkpoints):
                checkpoints = os.path.relpath(checkpoints, os.path.realpath(folder))
            generation = header.get("generation", 0) + 1
            _compact(folder, {**header, "generation": generation, "checkpoints": checkpoints})


def _compact(folder: Path, header: Op) -> None:
    """Write a journal anew with a header and its rows; killed in between, all of them are sent again, in vain."""
    journal = SendingJournal.open(folder, 5.0)
    if journal is None:
        return
    try:
        beside = folder / f"{JOURNAL}.new"
        with (
            os.fdopen(open_regular(folder / JOURNAL), "rb") as whole,
            os.fdopen(open_regular(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), "wb") as file,
        ):
            file.write(encode(header))
            file.writelines(line for line in whole if line.startswith(_KEPT))  # which may be many: none is kept here
            file.flush()
            os.fsync(file.fileno())
            size = file.tell()
        os.replace(beside, folder / JOURNAL)
        sync_folder(folder)
        journal.acknowledge(size, generation=header["generation"])
        shutil.rmtree(folder / FILES, ignore_errors=True)
    finally:
        journal.close()


def remove(folder: Path) -> None:
    """Remove a journal, whose lock the caller has, at once under its name: nobody takes its lock halfway and writes."""
    gone = folder.with_name(f".{folder.name}{REMOVED}")
    with contextlib.suppress(OSError):
        shutil.rmtree(gone, ignore_errors=True)  # of a process that was killed here
        folder.rename(gone)
        folder = gone
    shutil.rmtree(folder, ignore_errors=True)
