"""Check that a run's messages agree with the data in its stores and spools."""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import json
import re
import shlex
import sqlite3
import urllib.parse
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from rl8x.tracking.journal import read_ack

Row = dict[str, Any]  # {"s": step, "m": names}
Key = tuple[str, int]

# The files of a spool, as its module describes them
OPS, REJECTED = "journal.jsonl", "rejected.jsonl"

_NUMBER = r"([\d,]+|the last|one|a) (?:rows?|entry|entries|lines?)"
_WAIT = re.compile(rf"{_NUMBER}\b[^\n]* did not reach")
_LOST = re.compile(rf"(?:lost {_NUMBER}|{_NUMBER}\b[^\n]*(?:not safe|are lost|is lost|lost for good))")
_IN_STORE = re.compile(r"^run .* is in ", re.MULTILINE)
_COMMAND = re.compile(r"(?:waits? in|it is in) (.+?)(?::|, and) `?(rl8x sync[^\n`]*)")
# Words that own up to a store or a spool that is not what it was
_OWNED_UP = re.compile(
    r"replaced|deleted|removed|was moved|has gone|is gone|another file|damaged|not there any more|no longer there"
)


@dataclasses.dataclass
class Told:
    """What a run's last lines say.

    Attributes:
        waiting: Rows that are said to wait; None where nothing is said to.
        lost: Entries that are said to be lost, or not safe.
        in_store: Whether all is said to be in the store.
        owned_up: Whether they say that a file is not what it was.
        spool: The folder that is said to have the rest.
        command: The words of the command that is said to send it, after `rl8x`.
    """

    waiting: int | None
    lost: int
    in_store: bool
    owned_up: bool
    spool: Path | None
    command: list[str] | None


def told(said: str, folder: Path) -> Told:
    """Read a run's last lines.

    Args:
        said: What the process said.
        folder: Its working directory, which relative paths are meant from.
    """
    waiting, lost = _WAIT.findall(said), [a or b for a, b in _LOST.findall(said)]
    commands = _COMMAND.findall(said)
    spool, command = None, None
    if commands:
        spool = folder / commands[-1][0].strip("'\"")
        command = shlex.split(commands[-1][1].rstrip(". "))[1:]
    return Told(
        _number(waiting[-1]) if waiting else None,
        _number(lost[-1]) if lost else 0,
        bool(_IN_STORE.search(said)),
        bool(_OWNED_UP.search(said)),
        spool,
        command,
    )


def _number(text: str) -> int:
    if text == "the last":
        return 0  # "the last entry": no row
    return int(text.replace(",", "")) if text[0].isdigit() else 1


@dataclasses.dataclass
class Kept:
    """What is in a database: points and status by run."""

    points: dict[str, Counter[Key]]
    statuses: dict[str, str]

    @classmethod
    def read(cls, database: Path, experiment: str | None = None) -> Kept:
        """Read a database; one that is none has nothing."""
        points: dict[str, Counter[Key]] = {}
        statuses: dict[str, str] = {}
        of = "" if experiment is None else " JOIN experiments USING (experiment_id) WHERE experiments.name = ? AND"
        where = " WHERE" if experiment is None else of
        values = () if experiment is None else (experiment,)
        # Opened as a URI so that no file is made where there is none.
        address = f"{database.as_uri()}?mode=ro"
        with (
            contextlib.suppress(sqlite3.Error),
            contextlib.closing(sqlite3.connect(address, uri=True, timeout=20)) as connection,
        ):
            query = f"SELECT run_uuid, status FROM runs{where} runs.lifecycle_stage = 'active'"
            statuses = dict(connection.execute(query, values).fetchall())
            for run in statuses:
                found = connection.execute("SELECT key, step FROM metrics WHERE run_uuid = ?", (run,))
                points[run] = Counter((key, step) for key, step in found)
        return cls(points, statuses)

    def has(self, row: Row) -> bool:
        """Say whether one of the runs has a row."""
        return any(all(points[name, row["s"]] for name in row["m"]) for points in self.points.values())

    @property
    def doubled(self) -> int:
        """Count points that a run has twice."""
        return sum(count - 1 for points in self.points.values() for count in points.values())

    @property
    def tracked(self) -> list[str]:
        """List the statuses of the runs that have points."""
        return [status for run, status in self.statuses.items() if self.points.get(run)]


def waiting(spool: Path) -> list[Row]:
    """List the rows of a spool that have not been acknowledged; those that were set aside are among them."""
    rows: list[bytes] = []
    with contextlib.suppress(OSError, ValueError):
        data = (spool / OPS).read_bytes()
        ack = read_ack(spool)
        begin = ack.offset if ack.generation == json.loads(data.splitlines()[0]).get("generation", 0) else 0
        rows = data[begin:].splitlines()
    with contextlib.suppress(OSError):
        rows += (spool / REJECTED).read_bytes().splitlines()
    found = []
    for line in rows:
        with contextlib.suppress(ValueError, KeyError, TypeError):
            op = json.loads(line)
            op = op.get("rejected", op)
            if op["op"] == "m":
                found.append({"s": op["s"], "m": list(op["m"])})
    return found


def spools(folder: Path) -> list[Path]:
    """List the spools anywhere below a folder."""
    return sorted(path.parent for path in folder.rglob(OPS))


def lost(rows: Iterable[Row], kept: Sequence[Kept], folders: Iterable[Path]) -> list[Row]:
    """List the rows that are neither in a store nor in a spool."""
    missing = [row for row in rows if not any(store.has(row) for store in kept)]
    if not missing:
        return []
    left = {(row["s"], name) for folder in folders for row in waiting(folder) for name in row["m"]}
    return [row for row in missing if not all((row["s"], name) in left for name in row["m"])]


def untrue(words: Told, rows: Sequence[Row], kept: Kept) -> list[str]:
    """Say what is not true of a run's last lines, compared with what there is as it ends.

    Args:
        words: What it said.
        rows: What it had logged.
        kept: What its store has of it.
    """
    missing = [row for row in rows if not kept.has(row)]
    wrong = []
    if words.waiting is not None:
        there = -1 if words.spool is None else len(waiting(words.spool))
        # The shipper goes on after the last lines, until the rest is sent or the store is down.
        if words.spool is not None and not words.spool.is_dir() and missing and not words.owned_up:
            wrong.append(f"the spool {words.spool.name} is said to have rows, and is not there")
        elif there > words.waiting:
            wrong.append(f"{words.waiting} rows are said to wait, and {there} do")
    elif words.in_store and missing and len(missing) > words.lost and not words.owned_up:
        wrong.append(f"all is said to be in the store, which lacks {len(missing)} of {len(rows)} rows")
    elif not words.in_store and not words.lost and not words.owned_up and missing:
        wrong.append(f"nothing is said of {len(missing)} rows that the store lacks")
    if words.waiting is not None and len(missing) > words.waiting + words.lost and not words.owned_up:
        wrong.append(f"{len(missing)} rows are missing, {words.waiting} said to wait and {words.lost} to be lost")
    return wrong


def found_secrets(folder: Path, texts: Iterable[str], secrets: Iterable[str]) -> list[str]:
    """Search files, their names and texts for passwords, also as URLs and headers write them; say where they are."""
    needles = [form.encode() for secret in secrets for form in _forms(secret)]
    found = [f"said: {text[:80]}" for text in texts if any(needle in text.encode() for needle in needles)]
    for path in folder.rglob("*"):
        name = str(path.relative_to(folder))
        with contextlib.suppress(OSError):
            data = path.read_bytes() if path.is_file() and not path.is_symlink() else b""
            found += [name for needle in needles if needle in data or needle in name.encode()][:1]
    return found


def _forms(secret: str) -> set[str]:
    quoted = {secret, urllib.parse.quote(secret, safe=""), urllib.parse.quote(secret), urllib.parse.unquote(secret)}
    quoted.add(json.dumps(secret)[1:-1])
    return quoted | {base64.b64encode(f"user:{secret}".encode()).decode()}
