"""Entries of a spool that were set aside because the store did not take them, in a file of their own."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from rl8x.tracking.secrets import hide
from rl8x.tracking.spool_files import REJECTED, Op, decode, encode, open_regular, replace_file, without_secrets


class Rejected:
    """The file `rejected.jsonl` of a spool: a line for each entry, with the reason.

    An entry that a later one replaces (a tag by the same tag, a status by another) goes when that one arrives, or
    comes after it: sent again, it would undo it.

    Attributes:
        path: The file.
        num_rows_lost: Rows that could not be written down.
        num_others_lost: Other entries that could not.
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
