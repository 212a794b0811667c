"""A run's journal, `mlruns/spool/<id>`: its format, reading it, and the process that sends it.

    journal.jsonl   one JSON object per line: the header, then params, tags, metrics, artifacts, the final status
    ack.json        how much has arrived; the sending process locks this file and overwrites it in place
    files/          copies of artifacts that are still to be sent
    lock            locked, together with the folder, by the appending process
    rejected.jsonl  entries that the store refuses

The appending process reads `ack.json` and writes all other files except `rejected.jsonl`. Any file may be torn, edited,
or written by another version or program; none is trusted.
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

from rl8x.disk import moved_to, replace_synced, sync_folder
from rl8x.output import counted
from rl8x.tracking.locks import FileLock, FolderLock, is_locked
from rl8x.tracking.protocol import TrackingError, readable
from rl8x.tracking.secrets import hide, hide_in_data

JOURNAL: Final = "journal.jsonl"
ACK: Final = "ack.json"
FILES: Final = "files"
REJECTED: Final = "rejected.jsonl"
REMOVED: Final = ".sent"  # suffix of the folder of a journal that is being removed; its prefix is a dot
CHECKPOINTS_TAG: Final = "rl8x.checkpoints"
NAME_TAG: Final = "mlflow.runName"
LOST_ROWS_TAG: Final = "rl8x.lost_rows"
ROW: Final = b'{"op":"m"'  # beginning of each line with a row of metrics
_KEPT: Final = (ROW, b'{"op":"left"')  # lines that a resume needs
READ_BYTES: Final = 1 << 20
_READ_LINES: Final = 1000
_SLOT: Final = 3072  # bytes of each of two alternating slots: a name of 250 characters of four bytes, and a reason
_COMPACT: Final = json.JSONEncoder(separators=(",", ":"))
_ODD_TEXT: Final = re.compile(rb"\\ud[89a-f]|\\u0000", re.IGNORECASE)

Op = dict[str, Any]


class JournalInUseError(TrackingError):
    """Another process appends to the journal, or sends it."""


@dataclass(frozen=True)
class Ack:
    """How much of a journal has arrived, and the state of the store."""

    offset: int = 0  # bytes of `journal.jsonl` that the store has
    generation: int = 0  # generation of `journal.jsonl` that `offset` refers to
    memory: int = 0  # number of the last line that arrived from memory, without the disk
    run_id: str | None = None
    run_name: str | None = None
    name_is_free: bool = False  # no other run of the store had this name
    attempted: bool = False  # creation of a run was requested; it may exist even without an answer
    resumed: int = 0  # time of the resume, ms since 1970: later rows may repeat the server's and are compared with them
    finished: bool = False  # the run has its final status
    ending: Op | None = None  # the `finish` op with `lost_rows`, if only memory had it
    rejected: int = 0  # number of entries set aside
    rejected_lost: Sequence[int] = (0, 0)  # rejected rows and other entries that could not be written to the disk
    outage: str = ""  # why the store is down; empty if it works
    tried: bool = False  # this sender has made a request to the store
    beat: int = 0  # heartbeat counter of the sending process
    boot: str = ""  # boot ID of the computer at the time of writing

    def name_word(self, is_default: bool) -> str | None:
        """Return the run's name, quoted for a command started in this folder; None if it would not find the run."""
        name = self.run_name or ""
        is_odd = not name.isprintable() or name.startswith("-") or os.path.exists(name)  # read as an option or a path
        return shlex.quote(name) if name and self.name_is_free and is_default and not is_odd else None


@dataclass(frozen=True)
class Unsent:
    """The part of a journal that has not arrived."""

    num_rows: int = 0  # rows on the disk, which `rl8x sync` can send
    num_others: int = 0  # params, tags, artifacts and the status on the disk
    num_lost: int = 0  # rows that are only in the memory of this process, or were dropped from it
    num_others_lost: int = 0  # params, tags and artifacts that are only in memory
    num_rejected: int = 0  # entries that the store refused and that were set aside

    @property
    def lost_words(self) -> str:
        """The numbers of lost rows and entries, in words; empty if nothing is lost."""
        rows = counted(self.num_lost, "row") if self.num_lost else ""
        others = counted(self.num_others_lost, "other entry", "other entries") if self.num_others_lost else ""
        return " and ".join(filter(None, (rows, others)))


def encode(op: Mapping[str, object]) -> bytes:
    """Encode an op as one line; escape text that no store accepts, so that it stays readable."""
    line = _COMPACT.encode(op).encode()
    if _ODD_TEXT.search(line):
        line = _COMPACT.encode(_readable(op)).encode()
    return line + b"\n"


def decode(line: bytes) -> Op:
    """Decode an op; an invalid line becomes an op `unreadable`."""
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
    """Return an op without secrets. Rows and artifacts are returned unchanged: names, numbers and file names."""
    kind = op["op"]
    if kind in ("m", "artifact"):
        return dict(op)
    if kind in ("describe", "text") and isinstance(op.get("text"), str):
        return {**op, "text": hide(op["text"])}
    return dict(hide_in_data(op))


def open_regular(path: Path, flags: int = os.O_RDONLY) -> int:
    """Open a regular file of a journal; raise `OSError` for a pipe, which never ends, or a link to anywhere."""
    fd = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(22, f"{path.name} is no file")
    return fd


def check_plain(folder: Path) -> None:
    """Raise `TrackingError` if a journal is a link or holds anything but regular files and `files/`; opens no file."""
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
    """Refuse a copy of a journal that is still being written: sending it would send rows twice and end the run."""
    original = Path(str(header.get("folder", folder)))
    with contextlib.suppress(OSError):
        if not os.path.samefile(original, folder) and is_locked(original):
            raise JournalInUseError(
                f"the journal {folder} is a copy of {original}, which is in use by {FolderLock(original).owner()}; "
                "try again when that has ended"
            )


_HEADER: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(("journal_id", "uri"), (str,)),
    **dict.fromkeys(("experiment", "experiment_id", "run_name", "run_id"), (str, type(None))),
    **dict.fromkeys(("t", "generation"), (int,)),
    "owns": (bool,),
}


def read_header(folder: Path) -> Op:
    """Read the header, the first line of a journal; raise `TrackingError` if this version cannot read it."""
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
        if (name in ("journal_id", "t") or name in header) and type(header.get(name)) not in types:
            odd = odd or f"{name}={header.get(name)!r:.80}"
    if not odd and not (re.fullmatch(r"\w[\w.-]*", header["journal_id"]) and 0 <= header["t"] < 2**63):
        odd = f"journal_id={header['journal_id']!r:.80} and t={header['t']!r:.80}"
    if odd:
        raise TrackingError(f"the journal {folder} cannot be sent: its header has {odd}")
    return header


# A new `ack.json` has its full size, so that a disk that becomes full later cannot stop writes to it.
EMPTY_ACK: Final = bytes(2 * _SLOT)


def parse_ack(data: bytes) -> tuple[Ack, int]:
    """Return the newer valid slot and its number; (`Ack()`, 0) if neither is valid, as sending twice does no harm."""
    newest = (Ack(), 0)
    for slot in (data[:_SLOT], data[_SLOT : 2 * _SLOT]):
        with contextlib.suppress(ValueError, TypeError, RecursionError):
            checksum, number, text = slot.rstrip(b"\0").split(b" ", 2)
            if int(checksum, 16) == zlib.crc32(number + b" " + text) and int(number) > newest[1]:
                newest = Ack(**json.loads(text)), int(number)
    return newest


def read_ack(folder: Path) -> Ack:
    """Read the `ack.json` of a journal; `Ack()` if it cannot be read."""
    with contextlib.suppress(OSError, TrackingError):
        check_plain(folder)
        with os.fdopen(open_regular(folder / ACK), "rb") as file:
            return parse_ack(file.read(2 * _SLOT))[0]
    return Ack()


@functools.cache
def boot_id() -> str:
    """Return Linux's boot ID, which changes with each start of the computer (e.g. after a power cut); "" if unknown."""
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return ""


def whole_lines(fd: int, end: int) -> int:
    """Return the offset after the last newline in the first `end` bytes of a file; 0 if there is none."""
    while end > 0:
        start = max(0, end - 65536)
        newline = os.pread(fd, end - start, start).rfind(b"\n")
        if newline >= 0:
            return start + newline + 1
        end = start
    return 0


def read_lines(fd: int, start: int, end: int) -> Iterator[tuple[bytes, int]]:
    """Yield the whole lines between two offsets, each with the offset after it."""
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
    """The file `rejected.jsonl` of a journal: a line for each refused entry, with the reason.

    An entry is dropped when a later one that replaces it (the same tag, another status) arrives or is rejected too:
    sent again, it would undo the later one.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / REJECTED
        self.lost = [0, 0]  # rows and other entries that could not be written to the disk
        self._entries = {encode(entry): entry for entry in read_rejected(self.path)}

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def entries(self) -> list[Op]:
        """The ops that were set aside, in order."""
        return [entry["rejected"] for entry in self._entries.values()]

    @property
    def reason(self) -> str:
        """Why the store refused the first entry; empty if there is none."""
        return next((str(entry["reason"]) for entry in self._entries.values()), "")

    def add(self, op: Op, reason: str) -> None:
        """Set aside an op that the store refuses, so that sending can continue with the others."""
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
        """Drop the entries that a newer op replaces."""
        keys = _keys(op)
        if self._entries and keys:  # rows, of which there may be thousands, replace nothing
            self._keep([entry for entry in self._entries.values() if not _keys(entry["rejected"]) & keys])

    def replace(self, kept: list[tuple[Op, str]]) -> None:
        """Replace all entries with these ops and reasons."""
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
    """Read the entries that were set aside, each as an op `rejected` with the original op and the reason."""
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
    """Return the keys that an op sets and that a later op can overwrite."""
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
    """Return a description of an entry for messages."""
    match op:
        case {"op": "m", "m": {**metrics}} if len(metrics) == 1:
            return f"the metric {next(iter(metrics))!r}"
        case {"op": "tags", "tags": {"mlflow.runName": name}}:
            return f"the run's name {name!r:.100}"
        case {"op": "params" | "tags" as kind} if isinstance(op.get(kind), dict) and len(op[kind]) == 1:
            return f"the {kind[:-1]} {next(iter(op[kind]))!r:.100}"
        case {"op": "text" as kind, "to": name} | {"op": "artifact" as kind, "file": name}:
            return f"the {kind} {name!r:.100}"
        case {"op": "model", "about": {"name": name}}:
            return f"the model {name!r:.100}"
        case {"op": "open", "experiment": experiment}:
            return f"the experiment {experiment!r:.100}"
    return f"an entry of the kind {op['op']!r:.100}"


def last_time(fd: int, end: int, header: Op) -> int:
    """Return the latest time in the last half megabyte of lines, in milliseconds since 1970; default the header's."""
    lines = read_lines(fd, whole_lines(fd, max(0, end - READ_BYTES // 2)), end)
    times = [op["t"] for op in (decode(line) for line, _ in lines) if type(op.get("t")) is int]
    return max(times, default=int(header["t"]))


class SendingJournal:
    """A journal opened by the sending process, which reads lines and records how much has arrived."""

    def __init__(self, folder: Path, lock: FileLock) -> None:
        """Open the files of a journal; `lock` is the sender's lock on `ack.json`, which the caller holds."""
        self.folder = folder
        self.header = read_header(folder)
        self._lock = lock
        self._guard = threading.RLock()
        self.ack, self._number = parse_ack(os.pread(lock.fd, 2 * _SLOT, 0))
        self.lines: deque[tuple[int, bytes]] = deque()  # lines that the disk refused
        self._fds = [open_regular(folder / JOURNAL), os.open(folder, os.O_RDONLY | os.O_DIRECTORY)]
        self._fd = self._fds[0]
        place = Path(f"/proc/self/fd/{self._fds[1]}")
        self.place = place if place.is_dir() else folder  # valid even after the folder is moved
        self.rejected = Rejected(self.place)
        generation = self.header.get("generation", 0)
        offset = self.ack.offset if self.ack.generation == generation else 0
        # The generation differs after a kill between the two steps of compacting. The offset is within a line after a
        # power cut or an edit. Sending everything again is harmless, as it adds nothing.
        if offset > self.end or whole_lines(self._fd, offset) != offset:
            offset = 0
        rejected = len(self.rejected)
        self.acknowledge(offset, generation=generation, rejected=rejected, outage="", tried=False)

    @classmethod
    def open(cls, folder: Path, timeout_s: float = 0.0) -> SendingJournal | None:
        """Open a journal; None if another process is sending it, or the disk refuses."""
        lock = FileLock(folder / ACK, signs=False)
        with contextlib.ExitStack() as unless_opened, contextlib.suppress(OSError):
            unless_opened.callback(lock.release)
            journal = cls(folder, lock) if lock.acquire(timeout_s) else None
            unless_opened.pop_all()
            return journal
        return None

    @property
    def end(self) -> int:
        """The offset after the last whole line of the file."""
        return whole_lines(self._fd, os.fstat(self._fd).st_size)

    @property
    def pending(self) -> bool:
        """Whether some lines have not arrived."""
        return bool(self.lines) or self.ack.offset < self.end

    @property
    def is_behind(self) -> bool:
        """Whether more lines are pending than one call of `read` returns."""
        return len(self.lines) > _READ_LINES or self.end - self.ack.offset > READ_BYTES

    def read(self) -> list[tuple[Op, int | None, int]]:
        """Read about a megabyte of pending ops as (op, offset after it, 0), or from memory as (op, None, number)."""
        ops: list[tuple[Op, int | None, int]] = []
        start, size = self.ack.offset, 0
        for line, offset in read_lines(self._fd, start, self.end):
            ops.append((decode(line), offset, 0))
            size += len(line)
            if size >= READ_BYTES:
                break
        return ops or [(decode(line), None, number) for number, line in list(self.lines)[:_READ_LINES]]

    def last_time(self) -> int:
        """Return the time of the last append by the training process, in milliseconds since 1970."""
        return last_time(self._fd, self.end, self.header)

    def acknowledge(self, offset: int | None = None, number: int = 0, **changes: Any) -> None:
        """Record in the older slot that the store has the journal up to `offset` or line `number`, and other `changes`.

        If the disk refuses, lines are sent twice, which adds nothing. Any thread may call this.
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
        """Record the number of entries that are set aside."""
        self.acknowledge(rejected=len(self.rejected), rejected_lost=list(self.rejected.lost))

    def note_ending(self) -> None:
        """Record the end of the run during an outage if it waits among the lines that the disk refused."""
        with self._guard:
            op = decode(self.lines[-1][1]) if self.lines else {}
            if op.get("op") == "finish" and self.ack.outage:
                lost = op.get("lost_rows", 0) + sum(line.startswith(ROW) for _, line in self.lines)
                self.acknowledge(ending={**op, "lost_rows": lost})

    def is_moved(self, folder: Path) -> bool:
        """Whether the journal was moved away from a folder, not deleted."""
        return moved_to(self._fds[1], folder) is not None

    def close(self) -> None:
        """Close the files and release the sender's lock."""
        while self._fds:
            os.close(self._fds.pop())
        with self._guard:
            self._lock.release()


def is_sent(folder: Path) -> bool:
    """Return whether the whole journal has arrived and its run has ended, so that it is kept only for a resume."""
    ack = read_ack(folder)
    with contextlib.suppress(OSError, TrackingError):
        size = (folder / JOURNAL).lstat().st_size
        # An offset beyond the size counts in a longer file, before compacting or a power cut: newer lines are not sent.
        is_whole = ack.finished and not ack.rejected and ack.offset == size > 0 and ack.ending is None
        return is_whole and read_header(folder).get("generation", 0) == ack.generation
    return False


def conclude(folder: Path) -> None:
    """Remove a locked journal that has been sent, or compact it to its rows if the run has checkpoints."""
    with contextlib.suppress(OSError, TrackingError):
        header = read_header(folder)
        checkpoints, is_compact = header.get("checkpoints"), True
        with os.fdopen(open_regular(folder / JOURNAL), "rb") as file:
            file.readline()
            for line in file:
                is_compact = is_compact and line.startswith(_KEPT)
                if not line.startswith(ROW) and CHECKPOINTS_TAG.encode() in line:
                    checkpoints = decode(line).get("tags", {}).get(CHECKPOINTS_TAG, checkpoints)
        # The path of the checkpoints may be relative to the journal's folder.
        if not (isinstance(checkpoints, str) and (Path(os.path.realpath(folder)) / checkpoints).is_dir()):
            remove(folder)
        elif not is_compact:
            if os.path.isabs(checkpoints):
                checkpoints = os.path.relpath(checkpoints, os.path.realpath(folder))
            generation = header.get("generation", 0) + 1
            _compact(folder, {**header, "generation": generation, "checkpoints": checkpoints})


def _compact(folder: Path, header: Op) -> None:
    """Rewrite a journal with a new header and only its rows; a kill halfway merely makes all rows be sent again."""
    journal = SendingJournal.open(folder, 5.0)
    if journal is None:
        return
    try:
        new = folder / f"{JOURNAL}.new"
        with (
            os.fdopen(open_regular(folder / JOURNAL), "rb") as whole,
            os.fdopen(open_regular(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), "wb") as file,
        ):
            file.write(encode(header))
            file.writelines(line for line in whole if line.startswith(_KEPT))  # streamed, as there may be many
            file.flush()
            os.fsync(file.fileno())
            size = file.tell()
        os.replace(new, folder / JOURNAL)
        sync_folder(folder)
        journal.acknowledge(size, generation=header["generation"])
        shutil.rmtree(folder / FILES, ignore_errors=True)
    finally:
        journal.close()


def remove(folder: Path) -> None:
    """Remove a journal that the caller has locked; rename it first, so that nobody locks and writes a partial one."""
    gone = folder.with_name(f".{folder.name}{REMOVED}")
    with contextlib.suppress(OSError):
        shutil.rmtree(gone, ignore_errors=True)  # left by a process that was killed here
        folder.rename(gone)
        folder = gone
    shutil.rmtree(folder, ignore_errors=True)
