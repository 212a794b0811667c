"""Points that a run has left behind: it went back to a checkpoint, and came to other values from there.

MLflow's client deletes no point, so a tag of the run says which ones they are, and all that reads a history leaves them
out. In a local database they get another name too, `left/NAME`: MLflow's page then draws what the run has come to as
one curve, and what it left as another.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import math
import sqlite3
import sys
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Final, NamedTuple

LEFT_TAG: Final = "rl8x.left_behind"
LEFT: Final = "left/"
# Samples of the machine, at seconds since the run began: they are of a time, not of a course.
NOT_OF_A_COURSE: Final = (LEFT, "system/")
# What the same course gives to the bit; times and memory are others each time.
_TELLING: Final = ("losses/", "returns/", "episodes/returns/", "eval/returns/", "eval/horizon_returns/")
_MOST: Final = 100  # of one tag, which has room for 8000 letters


class LeftBehind(NamedTuple):
    """The points from a step on, that one included, which are older than `before`, in milliseconds since 1970."""

    step: int
    before: int

    def has(self, name: str, step: int, timestamp: int) -> bool:
        """Whether a point is one of them."""
        return step >= self.step and timestamp < self.before and not name.startswith(NOT_OF_A_COURSE)

    def __str__(self) -> str:
        when = datetime.datetime.fromtimestamp(self.before / 1000, datetime.UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
        return (
            f"Went back on {when}: points from step {self.step:,} on that are older are of a course that was left, "
            f"`{LEFT}...` in a local database."
        )


def left_behind(tags: Mapping[str, str]) -> list[LeftBehind]:
    """Read from a run's tags what it has left behind."""
    try:
        return [LeftBehind(int(step), int(before)) for step, before in json.loads(tags.get(LEFT_TAG, "[]"))]
    except (ValueError, TypeError):  # a user has changed the tag
        return []


def left_tag(left: Sequence[LeftBehind]) -> dict[str, str]:
    """Write the tag of what a run has left behind."""
    return {LEFT_TAG: json.dumps(left[-_MOST:])}


def are_of_one_course(name: str, value: float, other: float) -> bool:
    """Whether two values of a metric at one step can be of the same course, which goes on to the same bits."""
    alike = value == other or (math.isnan(value) and math.isnan(other))
    # MLflow's databases keep infinities as the largest numbers.
    return not name.startswith(_TELLING) or alike or min(abs(value), abs(other)) >= sys.float_info.max


def rename_left(database: Path, run_id: str, left: LeftBehind) -> None:
    """Call those points of a run `left/NAME` that it has left behind, where MLflow's tables are a local file.

    Args:
        database: MLflow's.
        run_id: The run.
        left: Which points.

    A database that does not take it keeps their names: the tag says which they are.
    """
    skipped = "".join(f" AND key NOT LIKE '{prefix}%'" for prefix in NOT_OF_A_COURSE)
    where, values = f"run_uuid = ? AND step >= ? AND timestamp < ?{skipped}", (run_id, left.step, left.before)
    columns = "key, value, timestamp, step, is_nan, run_uuid"
    newest = (
        f"INSERT INTO latest_metrics ({columns}) SELECT {columns} FROM metrics WHERE run_uuid = ? AND key = ? "
        "ORDER BY step DESC, timestamp DESC, value DESC LIMIT 1"
    )
    open_file = f"{database.resolve().as_uri()}?mode=rw"  # else one that is not there would be made
    with (
        contextlib.suppress(sqlite3.Error),
        closing(sqlite3.connect(open_file, uri=True, timeout=20)) as connection,
        connection,
    ):
        names = [name for (name,) in connection.execute(f"SELECT DISTINCT key FROM metrics WHERE {where}", values)]
        connection.execute(f"UPDATE OR IGNORE metrics SET key = '{LEFT}' || key WHERE {where}", values)
        for name in (prefix + name for name in names for prefix in ("", LEFT)):
            connection.execute("DELETE FROM latest_metrics WHERE run_uuid = ? AND key = ?", (run_id, name))
            connection.execute(newest, (run_id, name))
