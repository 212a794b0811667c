"""What was logged, compared with what MLflow and the journals have, and with what the last lines say of it."""

import base64
import contextlib
import dataclasses
import json
import re
import shlex
import sqlite3
import urllib.parse
from collections.abc import Iterable, Sequence
from pathlib import Path

from rl8x.tracking.journal import JOURNAL, REJECTED, read_ack

Key = tuple[str, int]  # a metric and its step
Points = dict[Key, set[float | None]]  # what a point may be; None is any value
OWN = ("profiling/", "memory/", "system/")  # times and memory, which no two trainings have alike

_NUMBER = r"([\d,]+|the last|one|a) (?:rows?|entry|entries|lines?)"
_WAIT = re.compile(rf"{_NUMBER}\b[^\n]* did not reach")
_LOST = re.compile(rf"(?:lost {_NUMBER}|{_NUMBER}\b[^\n]*(?:not safe|are lost|is lost|lost for good))")
_IN_STORE = re.compile(r"^run .* is in ", re.MULTILINE)
_COMMAND = re.compile(r"(?:waits? in|it is in) (.+?)(?::|, and) `?(rl8x sync[^\n`]*)")
# Words that own up to a store or a journal that is not what it was
_OWNED_UP = re.compile(
    r"replaced|deleted|removed|was moved|has gone|is gone|another file|damaged|not there any more|no longer there"
)


@dataclasses.dataclass
class Held:
    """What a database has: of each run that is not deleted its status, and the values of each point."""

    statuses: dict[str, str]
    runs: dict[str, dict[Key, list[float | None]]]

    @classmethod
    def read(cls, database: Path, experiment: str | None = None) -> "Held":
        """Read a database, or an experiment of it; one that is none has nothing."""
        held = cls({}, {})
        of = "WHERE" if experiment is None else "JOIN experiments USING (experiment_id) WHERE experiments.name = ? AND"
        query = f"SELECT run_uuid, status FROM runs {of} runs.lifecycle_stage = 'active'"
        # Opened as a URI so that no file is made where there is none.
        address = f"{database.as_uri()}?mode=ro"
        with (
            contextlib.suppress(sqlite3.Error),
            contextlib.closing(sqlite3.connect(address, uri=True, timeout=20)) as connection,
        ):
            held.statuses = dict(connection.execute(query, () if experiment is None else (experiment,)).fetchall())
            for run in held.statuses:
                found = held.runs[run] = {}
                rows = "SELECT key, step, CASE WHEN is_nan THEN NULL ELSE value END FROM metrics WHERE run_uuid = ?"
                for key, step, value in connection.execute(rows, (run,)):
                    found.setdefault((key, step), []).append(value)
        return held

    @property
    def tracked(self) -> list[str]:
        """List the statuses of the runs that have points."""
        return [status for run, status in self.statuses.items() if self.runs.get(run)]

    def missing(self, points: Iterable[Key]) -> set[Key]:
        return {key for key in points if not any(key in run for run in self.runs.values())}

    def compared(self, points: Points) -> dict[str, set[Key]]:
        """Compare with what was logged: the points that are lost, doubled, and wrong."""
        items = [item for run in self.runs.values() for item in run.items()]
        wrong = {
            key
            for key, values in items
            if not key[0].startswith(OWN) and None not in points.get(key, {None}) and not points[key].issuperset(values)
        }
        return {"lost": self.missing(points), "doubled": {key for key, values in items if values[1:]}, "wrong": wrong}


def journals(folder: Path) -> list[Path]:
    return sorted(path.parent for path in folder.rglob(JOURNAL))


def waiting(journal: Path) -> list[list[Key]]:
    """List the points of each row of a journal that has not been acknowledged, or that was set aside."""
    lines: list[bytes] = []
    with contextlib.suppress(OSError, ValueError):
        data = (journal / JOURNAL).read_bytes()
        ack = read_ack(journal)
        begin = ack.offset if ack.generation == json.loads(data.splitlines()[0]).get("generation", 0) else 0
        lines = data[begin:].splitlines()
    with contextlib.suppress(OSError):
        lines += (journal / REJECTED).read_bytes().splitlines()
    found = []
    for line in lines:
        with contextlib.suppress(ValueError, KeyError, TypeError):
            op = json.loads(line)
            op = op.get("rejected", op)
            if op["op"] == "m":
                found.append([(name, op["s"]) for name in op["m"]])
    return found


class LastLines:
    """What a run's last lines say, read by a process in a folder, which relative paths are meant from.

    Rows that are said to wait (None where nothing is said to), entries that are said to be lost, whether all is said to
    be in the store, whether a file is said to be another, the journal with the rest, and the command that sends it.
    """

    def __init__(self, said: str, folder: Path) -> None:
        waits, lost = _WAIT.findall(said), [a or b for a, b in _LOST.findall(said)]
        self.waiting = _number(waits[-1]) if waits else None
        self.lost = _number(lost[-1]) if lost else 0
        self.in_store, self.owned_up = bool(_IN_STORE.search(said)), bool(_OWNED_UP.search(said))
        self.journal: Path | None = None
        self.command: list[str] | None = None
        for place, command in _COMMAND.findall(said)[-1:]:
            self.journal, self.command = folder / place.strip("'\""), shlex.split(command.rstrip(". "))[1:]

    def untrue(self, rows: Sequence[Points], held: Held) -> list[str]:
        """Say what is not true of them as the run ends, compared with its rows and with what its store has."""
        missing = sum(bool(held.missing(row)) for row in rows)
        wrong = []
        if self.waiting is not None:
            there = -1 if self.journal is None else len(waiting(self.journal))
            # The shipper goes on after the last lines, until the rest is sent or the store is down.
            if self.journal is not None and not self.journal.is_dir() and missing and not self.owned_up:
                wrong.append(f"the journal {self.journal.name} is said to have rows, and is not there")
            elif there > self.waiting:
                wrong.append(f"{self.waiting} rows are said to wait, and {there} do")
            if missing > self.waiting + self.lost and not self.owned_up:
                wrong.append(f"{missing} rows are missing, {self.waiting} said to wait and {self.lost} to be lost")
        elif missing > self.lost and not self.owned_up and (self.in_store or not self.lost):
            where = "all is said to be in" if self.in_store else "nothing is said of"
            wrong.append(f"{where} the store, which lacks {missing} of {len(rows)} rows")
        return wrong


def _number(text: str) -> int:
    if text == "the last":
        return 0  # "the last entry": no row
    return int(text.replace(",", "")) if text[0].isdigit() else 1


def found_secrets(folder: Path, texts: Iterable[str], secrets: Iterable[str]) -> list[str]:
    """Search files, their names and texts for passwords, also as URLs and headers write them; say where they are."""
    needles = [form.encode() for secret in secrets for form in _forms(secret)]
    found = [f"said: {text[:80]}" for text in texts if any(needle in text.encode() for needle in needles)]
    for path in folder.rglob("*") if needles else ():
        name = str(path.relative_to(folder))
        with contextlib.suppress(OSError):
            data = path.read_bytes() if path.is_file() and not path.is_symlink() else b""
            found += [name for needle in needles if needle in data or needle in name.encode()][:1]
    return found


def _forms(secret: str) -> set[str]:
    quoted = {secret, urllib.parse.quote(secret, safe=""), urllib.parse.quote(secret), urllib.parse.unquote(secret)}
    return quoted | {json.dumps(secret)[1:-1], base64.b64encode(f"user:{secret}".encode()).decode()}
