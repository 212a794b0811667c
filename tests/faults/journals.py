"""Journals as no run of rl8x leaves them: damaged, foreign, edited, half copied; what `rl8x sync` has to cope with.

Most begin with a header and three rows that are as they should be, so that it can be counted what became of those.
"""

import contextlib
import json
import os
import re
import shutil
import sqlite3
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.faults.tries import Try, obey_permissions

from rl8x.tracking.journal import JOURNAL

START = 1_700_000_000_000  # milliseconds since 1970
_STEP = re.compile(rb'"op": ?"m".*?"s": ?(-?\d+)')


@dataclass(frozen=True)
class OddJournal:
    """One odd journal: `steps` are those of its good rows, where row `s` has the metric `a` with the value `s`."""

    name: str  # what is odd about it; also the name of its folder
    folder: Path
    steps: tuple[int, ...]
    sendable: bool  # whether `rl8x sync` has to bring these rows into the store; else they may also stay in the folder

    def steps_left(self) -> set[int]:
        left: set[int] = set()
        try:
            for path in (self.folder / JOURNAL, self.folder / "rejected.jsonl"):
                if path.is_file():
                    left |= {int(step) for step in _STEP.findall(path.read_bytes())}
        except PermissionError:
            return set(self.steps)  # what cannot be read cannot have been deleted
        return left

    def lost(self, in_store: set[int]) -> set[int]:
        """Return the steps of the rows that are nowhere, or not among those of the store where they have to be."""
        return set(self.steps) - in_store - (set() if self.sendable else self.steps_left())


def row(step: Any, time: Any = None, **metrics: Any) -> dict[str, Any]:
    """Return a row as rl8x writes it, where the arguments are as they should be."""
    return {"op": "m", "t": START + step if time is None else time, "s": step, "m": metrics or {"a": float(step)}}


ROWS = [row(step) for step in range(3)]
FINISH = {"op": "finish", "status": "FINISHED", "t": START + 10}
RESUME = {"op": "resume", "t": START + 5, "repeats": True, "keeps_status": False}
_MISSING = object()
GOOD = ("0-good", "m-good", "zz-good")  # the first, one in the middle, and the last
CHOSEN = 20  # of a try


def synced(attempt: Try) -> int:
    """Sync a folder of odd journals, with good ones among them, twice."""
    folder, uri = attempt.work / "mlruns" / "spool", f"sqlite:///{attempt.database}"
    made = odd_journals(folder, uri)
    chosen = attempt.random.sample(made, CHOSEN)
    for journal in made:
        if journal not in chosen:
            journal.folder.chmod(0o700)
            shutil.rmtree(journal.folder)
    for name in GOOD:
        (folder / name).mkdir()
        (folder / name / JOURNAL).write_bytes(_lines(header(name, uri), *ROWS, FINISH))
    attempt.prepare = obey_permissions
    for _ in range(2):
        ended = attempt.command("sync")
        if ended.code not in (0, 1):
            attempt.note("exit code", f"sync exits with {ended.code}: {ended.said[-600:]}")
    steps: dict[str, list[int]] = {name: [] for name in (*GOOD, *(journal.name for journal in chosen))}
    with contextlib.closing(sqlite3.connect(attempt.database)) as connection:
        query = (
            "SELECT tags.value, metrics.step FROM metrics JOIN tags USING (run_uuid) "
            "WHERE tags.key = 'rl8x.journal_id' AND metrics.key = 'a'"
        )
        for name, step in connection.execute(query):
            steps.setdefault(name, []).append(step)
    for journal in chosen:
        if journal.folder.is_dir():
            journal.folder.chmod(0o700)
        if lost := journal.lost(set(steps[journal.name])):
            attempt.note("lost", f"{journal.name}: rows {sorted(lost)} are nowhere, or not in the store", len(lost))
        if more := [step for step in journal.steps if steps[journal.name].count(step) > 1]:
            attempt.note("doubled", f"{journal.name}: rows {more}", len(more))
    for name in GOOD:
        if sorted(steps[name]) != [0, 1, 2]:
            attempt.note("lost", f"{name} is stopped by others: {steps[name]}")
    return CHOSEN


# What a field of the header is, and whether the rows can be sent all the same.
_HEADERS: dict[str, list[tuple[Any, bool]]] = {
    "op": [("close", False), (None, False), (_MISSING, False)],
    "version": [(2, False), ("1", False), (None, False), (_MISSING, False), (float("nan"), False)],
    "journal_id": [(None, False), (7, False), ([], False), ("../up", False), ("it's", False), (_MISSING, False)],
    "t": [("x", False), (None, False), (float("nan"), False), (2**70, False), (-1, False), (_MISSING, False)],
    "experiment": [(5, False), ([], False), (_MISSING, False), ("", False), ("caf\udce9 \0", True)],
    "experiment_id": [([], False), ("999999", False), (5, False)],
    "run_name": [(5, False), ({}, False), ("caf\udce9", True), ("null\0byte", True), ("\U0001f600", True)],
    "owns": [("no", False), (None, False), (_MISSING, True)],
    "uri": [(5, False), (None, False), (_MISSING, False), ("", False), ("nonsense://x", False), ("http://[", False)],
    "run_id": [(5, False), ("notthere", False), ([], False)],
    "generation": [("x", False), (-1, False), (2**70, True), (float("nan"), False), ([], False)],
    "pid": [([], True)],
    "from_the_future": [({"a": 1}, True)],
}

# What stands between the rows, or after them.
_OPS: dict[str, list[Any]] = {
    "finish first": [FINISH, *ROWS],
    "finish twice": [*ROWS, FINISH, {**FINISH, "status": "FAILED"}],
    "finish of unknown status": [*ROWS, {**FINISH, "status": "EXPLODED"}],
    "finish without a time": [*ROWS, {"op": "finish", "status": "FINISHED"}],
    "finish at a huge time": [*ROWS, {**FINISH, "t": 10**400}],
    "finish with a status of another type": [*ROWS, {**FINISH, "status": ["FINISHED"]}],
    "unknown ops": [{"op": "teleport"}, *ROWS, {"op": "spec"}, {"op": ["m"]}, {"op": None}, {"op": "__init__"}],
    "resume of other types": [{"op": "resume", "repeats": "x", "keeps_status": []}, *ROWS],
    "resume without anything": [{"op": "resume"}, *ROWS],
    "resume again and again": [*ROWS, RESUME, *ROWS, RESUME, *ROWS],
    "steps": [row(0, time=1), *(row(0) | {"s": s} for s in (None, "x", 1.5, 2**70, -(2**70))), row(1), row(2)],
    "steps that are infinite": [*ROWS, *(row(0) | {"s": s} for s in (float("nan"), float("inf"), 10**400))],
    "steps below zero": [*ROWS, row(-5)],
    "times": [*ROWS, *(row(9) | {"t": t} for t in (None, "x", float("inf"), 2**70, -1, 10**400))],
    "values": [*ROWS, row(3, a=3.0, n=float("nan"), i=float("-inf"), h=10**400, t="x", l=[1], z=None)],
    "metrics of other types": [*ROWS, *(row(9) | {"m": m} for m in (None, 3, [], "x", {}))],
    "illegal names of metrics": [*ROWS, row(3, **{"a": 3.0, "": 1.0, "a\nb": 1.0, "../x": 1.0, "x" * 5000: 1.0})],
    "text that is not UTF-8": [
        {"op": "tags", "tags": {"k\udce9": "caf\udce9"}},
        *ROWS,
        row(3, **{"a": 3.0, "\ud800": 1}),
    ],
    "null bytes": [{"op": "params", "params": {"a": "x\0y", "b\0": "z"}}, *ROWS],
    "params of other types": [{"op": "params", "params": p} for p in (None, [], {"a": 5}, {"b": None}, {"": "x"})]
    + ROWS,
    "params that are huge": [{"op": "params", "params": {"p" * 9000: "v" * 9000, "q": "w" * 10**6}}, *ROWS],
    "tags of other types": [{"op": "tags", "tags": t} for t in (None, "x", {"a": 5}, {"b": []}, {"": ""})] + ROWS,
    "descriptions": [{"op": "describe"}, {"op": "describe", "text": 5}, {"op": "describe", "text": "\ud800"}, *ROWS],
    "texts": [{"op": "text", "to": t, "text": x} for t, x in ((None, "x"), ("../x", "x"), ("a", 5), ("b/", ""))] + ROWS,
    "artifacts": [{"op": "artifact", "file": f, "to": None} for f in (None, "../../x", "files/1/x", "/etc/passwd", 7)]
    + ROWS,
    "another header in the middle": [*ROWS[:1], {"op": "open", "version": 1, "journal_id": "other", "t": 1}, *ROWS[1:]],
    "a row of 3,000 metrics": [*ROWS, row(3, a=3.0, **{f"m{i}": 1.0 for i in range(3000)})],
    "a line of 50 MB": [*ROWS[:2], {"op": "text", "to": "big.txt", "text": "x" * 50_000_000}, ROWS[2]],
}

# Lines that are no ops, between good ones.
_LINES: dict[str, bytes] = {
    "binary garbage": bytes(range(256)).replace(b"\n", b"") * 20,
    "nested 100,000 deep": b"[" * 100_000,
    "an object nested 100,000 deep": b'{"op":' * 100_000,
    "an empty line": b"",
    "a carriage return in a line": b'{"op":\r"tags","tags":{}}',
    "a number of 10,000 digits": b"1" * 10_000,
    "lists and strings": b'["op"]\n"op"\n5\nnull',
    "text in Latin-1": '{"op":"tags","tags":{"k":"caf\xe9"}}'.encode("latin-1"),
    "a torn line in the middle": b'{"op":"m","t":17',
}

# What ack.json has; rows that it says were sent, and were not, cannot be known.
_OFFSETS = (b"-5", b"0.5", b'"0"', b"NaN", b"123456789", b"9" * 40, b"5", b"null")
_OTHERS = (b'"colour":"red"', b'"generation":"x"', b'"generation":' + b"9" * 40, b'"run_id":5', b'"run_id":"notthere"')
_OTHERS += (b'"attempted":"x","resumed":[],"finished":{}', b'"run_name":5,"name_is_free":"x"')
_ACKS = (b"", b"[]", bytes(range(256)), b"[" * 100_000, *(b'{"offset":%b}' % offset for offset in _OFFSETS))
_ACKS += tuple(b'{"offset":0,%b}' % other for other in _OTHERS)

# What of a folder is something else, and whether the rows can be sent all the same.
_FOLDERS: dict[str, tuple[Callable[[Path], Any], bool]] = {
    "ops a folder": (lambda folder: _replaced(folder / JOURNAL, os.mkdir), False),
    "ops a pipe": (lambda folder: _replaced(folder / JOURNAL, os.mkfifo), False),
    "ops a link to itself": (lambda folder: _replaced(folder / JOURNAL, lambda p: os.symlink(p, p)), False),
    "ops a link to nothing": (lambda folder: _replaced(folder / JOURNAL, lambda p: os.symlink("x", p)), False),
    "ops missing": (lambda folder: (folder / JOURNAL).unlink(), False),
    "ops unreadable": (lambda folder: (folder / JOURNAL).chmod(0), False),
    "folder unreadable": (lambda folder: folder.chmod(0), False),
    "folder read-only": (lambda folder: folder.chmod(0o500), False),
    "lock missing": (lambda folder: (folder / "lock").unlink(), True),
    "lock a folder": (lambda folder: _replaced(folder / "lock", os.mkdir), False),
    "lock a pipe": (lambda folder: _replaced(folder / "lock", os.mkfifo), False),
    "ack a folder": (lambda folder: (folder / "ack.json").mkdir(), False),
    "ack a pipe": (lambda folder: os.mkfifo(folder / "ack.json"), False),
    "files a file": (lambda folder: (folder / "files").touch(), False),
    "files with odd names": (
        lambda folder: [(folder / "files" / name).mkdir(parents=True) for name in ("x", "-1", "9" * 200, "\u0663")],
        True,
    ),
    "rejected a folder": (lambda folder: (folder / "rejected.jsonl").mkdir(), False),
    "rejected garbage": (lambda folder: (folder / "rejected.jsonl").write_bytes(b"\xff\n[1]\n"), True),
}


def _replaced(path: Path, make: Callable[[Path], Any]) -> None:
    path.unlink()
    make(path)


def _files(first: bytes) -> dict[str, tuple[bytes, tuple[int, ...], bool]]:
    """Return what all of journal.jsonl is, and which of its rows are good, given the line of a header."""
    rows = _lines(*ROWS)
    good = first + rows
    return {
        "empty": (b"", (), False),
        "a newline alone": (b"\n", (), False),
        "header without a newline": (first[:-1], (), False),
        "header alone": (first, (), True),
        "last row without a newline": (good[:-1], (0, 1), True),
        "rows without a header": (rows, (0, 1, 2), False),
        "header at the end": (rows + first, (0, 1, 2), False),
        "a byte order mark": (b"\xef\xbb\xbf" + good, (0, 1, 2), False),
        "carriage returns": (good.replace(b"\n", b"\r\n"), (0, 1, 2), True),
        "carriage returns alone": (good.replace(b"\n", b"\r"), (0, 1, 2), False),
        "UTF-16": (good.decode().encode("utf-16"), (), False),
        "binary": (bytes(range(256)) * 100, (), False),
        "zeros": (bytes(100_000), (), False),
        "zeros after the rows, as after a power cut": (good + bytes(4096), (0, 1, 2), True),
        "two headers": (first + good, (0, 1, 2), True),
        "a header nested 100,000 deep": (b"[" * 100_000 + b"\n" + rows, (0, 1, 2), False),
    }


def odd_journals(root: Path, uri: str) -> list[OddJournal]:
    """Make the odd journals in a folder, such as `mlruns/spool`, for the store of an address."""
    root.mkdir(parents=True, exist_ok=True)
    made = []

    def add(name: str, data: bytes, *, steps: tuple[int, ...] = (0, 1, 2), sendable: bool = True) -> Path:
        folder = root / name
        folder.mkdir()
        (folder / JOURNAL).write_bytes(data)
        (folder / "lock").touch()
        made.append(OddJournal(name, folder, steps, sendable))
        return folder

    for field, values in _HEADERS.items():
        for number, (value, sendable) in enumerate(values):
            fields = {**header(name := _named("header", field, number), uri), field: value}
            fields = {key: each for key, each in fields.items() if each is not _MISSING}
            add(name, _lines(fields, *ROWS), sendable=sendable)
    for what, ops in _OPS.items():
        good = tuple(sorted({op["s"] for op in ops if _is_good(op)}))
        add(name := _named("ops", what), _lines(header(name, uri), *ops), steps=good)
    for what, line in _LINES.items():
        name = _named("line", what)
        add(name, _lines(header(name, uri), *ROWS[:2]) + line + b"\n" + _lines(ROWS[2], FINISH))
    for number, data in enumerate(_ACKS):
        name = _named("ack", number)
        folder = add(name, _lines(header(name, uri), *ROWS), sendable=b"notthere" not in data)
        (folder / "ack.json").write_bytes(data)
    for what in _files(b""):
        name = _named("file", what)
        data, steps, sendable = _files(_lines(header(name, uri)))[what]
        add(name, data, steps=steps, sendable=sendable)
    for what, (make, sendable) in _FOLDERS.items():
        name = _named("folder", what)
        has_rows = not what.startswith("ops") or what == "ops unreadable"
        make(add(name, _lines(header(name, uri), *ROWS, FINISH), steps=(0, 1, 2)[: 3 * has_rows], sendable=sendable))
    return made


def header(name: str, uri: str) -> dict[str, Any]:
    """Return a header as rl8x writes it."""
    fields = {"t": START, "experiment": "odd", "experiment_id": None, "run_name": name, "owns": True, "uri": uri}
    return {"op": "open", "version": 1, "journal_id": name, **fields, "host": "here", "pid": 1}


def _lines(*ops: Any) -> bytes:
    return b"".join(json.dumps(op, separators=(",", ":")).encode() + b"\n" for op in ops)


def _named(*parts: object) -> str:
    return re.sub(r"\W+", "-", "-".join(map(str, parts)), flags=re.ASCII).strip("-").lower()


def _is_good(op: dict[str, Any]) -> bool:
    """Say whether an op is a row whose metric `a` has to arrive."""
    if op["op"] != "m" or type(op["s"]) is not int or abs(op["s"]) >= 2**63 or not isinstance(op["m"], dict):
        return False
    return type(op["t"]) is int and 0 <= op["t"] < 2**63 and op["m"].get("a") == float(op["s"])
