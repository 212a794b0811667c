"""Access MLflow's internals, which may change: private names, and the tables of its sqlite databases.

Private names are looked up when needed. If one is missing or has changed, only speed or a convenience is lost, never a
row. The same holds for unknown tables, except that readers report the error.
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
import os
import re
import sqlite3
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from importlib import metadata
from pathlib import Path
from typing import Any, Final, NamedTuple
from urllib.parse import quote, unquote, urlsplit

from rl8x.disk import write_synced
from rl8x.tracking.repeats import LEFT, NOT_OF_A_COURSE, LeftBehind, Point
from rl8x.tracking.secrets import hide

# The tag of an experiment in which MLflow's page stores a saved view. If MLflow renames it, the view is not listed, and
# the page opens with its own order of charts.
VIEW_TAG_PREFIX: Final = "mlflow.sharedViewState."


@functools.cache
def decodes_paths() -> bool:
    """Whether MLflow's SQLAlchemy decodes the path of a database: from 2.1 on."""
    try:
        version = re.match(r"(\d+)\.(\d+)", metadata.version("sqlalchemy"))
    except metadata.PackageNotFoundError:
        return True
    return version is None or (int(version[1]), int(version[2])) >= (2, 1)


def sqlite_uri(database: Path) -> str:
    """Return the URI of a database for MLflow; the path may have a `?`, or a `%2F` as in Jenkins' folders."""
    path = str(database)
    encoded = (
        re.sub(r"%(?=[0-9A-Fa-f]{2})|[?]", lambda character: quote(character[0]), path) if decodes_paths() else path
    )
    # For `sqlite:///` MLflow would create the folder of the encoded path.
    return f"sqlite:///{path}" if encoded == path else f"sqlite+pysqlite:///{encoded}"


def reopen_database(uri: str) -> None:
    """Make MLflow reopen a database; otherwise the old file stays open after a replacement."""
    with contextlib.suppress(ImportError, AttributeError, TypeError):
        from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore

        stores: Any = SqlAlchemyStore
        if uri in stores._engine_map:
            stores._engine_map[uri].dispose()


def forget_artifacts(run_id: str) -> None:
    """Clear MLflow's cached artifact location of a run; otherwise a copied store writes to the original's folder."""
    with contextlib.suppress(ImportError, AttributeError, TypeError):
        from mlflow.tracking._tracking_service import utils

        cache: Any = utils
        cache._artifact_repos_cache.pop(run_id, None)


def is_set_in_process() -> bool:
    """Return whether `mlflow.set_tracking_uri()` was called; if MLflow renames it, commands show the variable's URI."""
    mlflows = sys.modules.get("mlflow.tracking._tracking_service.utils")
    return getattr(mlflows, "_tracking_uri", None) is not None


ROOT = "artifacts"  # folder next to the database, in the layout of `rl8x.tracking.location`
_MEMORY: Final = Path("/dev/shm")
_migrating = threading.Lock()  # Alembic keeps the migration in progress in a global


def create_database(database: Path, artifact_root: Path) -> None:
    """Create a database atomically: write it under another name in the same folder, then rename it."""
    new = database.with_name(f".{database.name}.new")
    for leftover in (new, *_logs(new)):
        leftover.unlink(missing_ok=True)
    write_synced(new, empty_tables())
    with closing(sqlite3.connect(new)) as connection:
        # MLflow inserts this path into its SQL without escapes, which breaks on some quotes, colons and backslashes.
        default = (artifact_root.absolute() / "0").as_uri()
        connection.execute("UPDATE experiments SET artifact_location = ? WHERE experiment_id = 0", (default,))
        connection.commit()
        # With WAL, readers (the UI) and one writer do not wait for each other; the mode is stored in the file.
        # In each session MLflow itself waits up to 20 s for a lock.
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    for leftover in _logs(database):  # logs of a deleted database: sqlite would apply them to the new one
        leftover.unlink(missing_ok=True)
    os.replace(new, database)


def _logs(database: Path) -> list[Path]:
    return [database.with_name(database.name + end) for end in ("-wal", "-shm", "-journal")]


def merge_log(database: Path) -> None:
    """Merge the write-ahead log into the database, so that a copy of its file alone is complete."""
    if not has_tables(database):
        return
    with contextlib.suppress(sqlite3.Error), closing(sqlite3.connect(database, timeout=0.5)) as connection:
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")


def add_past_points(database: Path, run_id: str, points: Sequence[Point]) -> list[Point]:
    """Insert the points of a run that are not the newest of their metric; return the others, which MLflow must log.

    MLflow needs 0.1 ms per point, although a point with a newer successor is only a row of one table. Left to MLflow
    are points that it might refuse (of a deleted run, with a new name, with a negative time) or store differently
    (non-finite values), and all points if the tables are not as expected.
    """
    # In the order in which MLflow finds the newest point.
    newest = {
        point.name: point for point in sorted(points, key=lambda point: (point.step, point.timestamp, point.value))
    }
    # Exclude duplicates of the newest point: MLflow would find it present and not update the metric's last value.
    past = [point for point in points if newest[point.name] != point]
    past = [each for each in past if math.isfinite(each.value) and 0 <= each.timestamp < 2**63 > abs(each.step)]
    if not past:
        return list(points)
    try:
        with _written(database) as connection:
            where = "runs.run_uuid = ? AND runs.lifecycle_stage = 'active'"
            query = f"SELECT key FROM latest_metrics JOIN runs USING (run_uuid) WHERE {where}"
            known = {key for (key,) in connection.execute(query, (run_id,))}
            past = [point for point in past if point.name in known]
            rows = [(point.name, point.value, point.timestamp, point.step, run_id) for point in past]
            # Existing points are skipped; an unknown column without a default is an error.
            insert = f"INSERT INTO metrics ({_COLUMNS}) VALUES (?, ?, ?, ?, 0, ?) ON CONFLICT DO NOTHING"
            connection.executemany(insert, rows)
    except sqlite3.Error:
        return list(points)
    added = {id(point) for point in past}
    return [point for point in points if id(point) not in added]


_COLUMNS: Final = "key, value, timestamp, step, is_nan, run_uuid"


@contextlib.contextmanager
def _written(database: Path) -> Iterator[sqlite3.Connection]:
    """Open an existing database for one transaction; a missing one is an error."""
    uri = f"{database.resolve().as_uri()}?mode=rw"
    with closing(sqlite3.connect(uri, uri=True, timeout=20)) as connection, connection:
        yield connection


def has_tables(database: Path) -> bool:
    """Return whether a database file has content; an interrupted `touch` or connect leaves an empty file."""
    with contextlib.suppress(OSError):
        return database.stat().st_size > 0
    return False


def empty_tables() -> bytes:
    """Return the bytes of a database with MLflow's tables and no rows, which MLflow creates once per process."""
    with _migrating:
        return _migrated()


# In memory: MLflow creates a database in about a hundred transactions, each of which would wait for the disk.
@functools.cache
def _migrated() -> bytes:
    from mlflow.store.tracking import sqlalchemy_store

    stores: Any = sqlalchemy_store
    place = _MEMORY if os.access(_MEMORY, os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=place) as folder:
        database = Path(folder) / "mlflow.db"
        stores.SqlAlchemyStore(sqlite_uri(database), "/").engine.dispose()
        return database.read_bytes()


def prepare_artifacts(database: Path, run_id: str, uri: str, *, guarded: bool) -> None:
    """Check before a write that a run's artifacts go to a folder of this store; raise `OSError` if they do not.

    MLflow stores their absolute path `uri` and recreates the folder if it is gone. If that folder belongs to the old
    place of a database that was moved or copied, the database gets the path next to its new place instead, so that
    MLflow's page also finds artifacts moved with it. `guarded` allows only artifacts in the database's folder.
    """
    forget_artifacts(run_id)  # this process may also use a store of which this one is a copy
    folder, here = _local(uri), database.parent
    if folder is not None and _was_left_behind(folder, run_id, database):
        folder = here / ROOT / run_id / "artifacts"
        with _written(database) as connection:
            connection.execute("UPDATE runs SET artifact_uri = ? WHERE run_uuid = ?", (folder.as_uri(), run_id))
    inside = folder is not None and Path(os.path.realpath(folder)).is_relative_to(os.path.realpath(here))
    if guarded and not inside:
        raise PermissionError(
            f"the run's artifacts belong in {hide(uri)}, outside of the database's own folder {here}, "
            f"and you have not named this store: `rl8x sync --to {sqlite_uri(database)}` does"
        )
    if folder is not None and not any(parent.exists() for parent in folder.parents[1:4]):
        raise FileNotFoundError(f"the folder of the run's artifacts, {folder}, is not there, and none is made")


def _was_left_behind(folder: Path, run_id: str, database: Path) -> bool:
    """Return whether an artifact folder belongs to the old place of a database that was moved or copied."""
    root = folder.parents[1]
    if folder.parts[-4:] != ("mlruns", ROOT, run_id, "artifacts"):
        return False
    with contextlib.suppress(OSError):
        if os.path.samefile(root.parent, database.parent):
            return False
    return not root.exists() or (root.parent / database.name).exists()


def _local(uri: str) -> Path | None:
    parts = urlsplit(uri)
    if parts.scheme not in ("", "file") or parts.netloc not in ("", "localhost"):
        return None
    path = Path(uri if parts.scheme == "" else unquote(parts.path))
    return path if path.is_absolute() else None


def rename_left(database: Path, run_id: str, left: LeftBehind) -> None:
    """Rename the superseded points of a run to `left/NAME` in a local database."""
    skipped = "".join(f" AND key NOT LIKE '{prefix}%'" for prefix in NOT_OF_A_COURSE)
    where, values = f"run_uuid = ? AND step >= ? AND timestamp < ?{skipped}", (run_id, left.step, left.before)
    newest = (
        f"INSERT INTO latest_metrics ({_COLUMNS}) SELECT {_COLUMNS} FROM metrics WHERE run_uuid = ? AND key = ? "
        "ORDER BY step DESC, timestamp DESC, value DESC LIMIT 1"
    )
    with contextlib.suppress(sqlite3.Error), _written(database) as connection:
        names = [name for (name,) in connection.execute(f"SELECT DISTINCT key FROM metrics WHERE {where}", values)]
        connection.execute(f"UPDATE OR IGNORE metrics SET key = '{LEFT}' || key WHERE {where}", values)
        for name in (prefix + name for name in names for prefix in ("", LEFT)):
            connection.execute("DELETE FROM latest_metrics WHERE run_uuid = ? AND key = ?", (run_id, name))
            connection.execute(newest, (run_id, name))


_VALUE = "CASE WHEN is_nan THEN NULL ELSE value END"
_THESE = "run_uuid IN (SELECT value FROM json_each(?))"  # one JSON value, since sqlite limits their number
_FOUND_BY: Final = {
    "id": "run_uuid = ?",
    "name": "name = ?",
    "tag": "run_uuid IN (SELECT run_uuid FROM tags WHERE key = ? AND value = ?)",
    "experiment": "experiment_id = CAST(? AS INTEGER)",
}


class RunRecord(NamedTuple):
    """A run as read from its store; `start_time` is in milliseconds since 1970."""

    id: str
    name: str
    status: str
    start_time: int
    params: Mapping[str, str]
    metrics: Mapping[str, float]
    tags: Mapping[str, str]


class DatabaseRuns:
    """Reads the active runs of a database, without MLflow, whose import would take longer.

    Every call raises `sqlite3.Error` if the database cannot be read.
    """

    def __init__(self, database: Path) -> None:
        self._uri = f"{database.as_uri()}?mode=ro"

    def _query(self, query: str, *values: str) -> list[Any]:
        with closing(sqlite3.connect(self._uri, uri=True, timeout=5)) as connection:
            return connection.execute(query, values).fetchall()

    def has(self, run_id: str, tag: str, value: str) -> bool:
        """Whether there is a run, maybe deleted, with this ID or this value of a tag."""
        query = "SELECT 1 FROM runs WHERE run_uuid = ? UNION SELECT 1 FROM tags WHERE key = ? AND value = ?"
        return bool(self._query(query, run_id, tag, value))

    def names(self) -> set[str]:
        """Return the names of all runs."""
        return {name for (name,) in self._query("SELECT name FROM runs WHERE lifecycle_stage = 'active'") if name}

    def experiments(self) -> dict[str, str]:
        """Return the names of the experiments by their IDs."""
        query = "SELECT experiment_id, name FROM experiments WHERE lifecycle_stage = 'active'"
        return {str(experiment_id): name for experiment_id, name in self._query(query)}

    def points(self, run_ids: Sequence[str], names: Sequence[str]) -> Iterator[tuple[str, Point]]:
        """Yield (run ID, point) for metrics of runs, in the order of steps, then of time."""
        columns = f"run_uuid, key, {_VALUE}, timestamp, step"
        where = f"{_THESE} AND key IN (SELECT value FROM json_each(?)) ORDER BY step, timestamp, value"
        for run_id, name, value, timestamp, step in self._query(
            f"SELECT {columns} FROM metrics WHERE {where}", json.dumps(list(run_ids)), json.dumps(list(names))
        ):
            yield run_id, Point(name, stored_number(value), timestamp, step)

    def find(self, by: str, *values: str) -> list[RunRecord]:
        """Return the runs with an ID, a name, a value of a tag or an experiment (`by`), with one query per table."""
        columns, where = "run_uuid, name, status, start_time", f"lifecycle_stage = 'active' AND {_FOUND_BY[by]}"
        rows = self._query(f"SELECT {columns} FROM runs WHERE {where}", *values)
        ids = [row[0] for row in rows]
        params, tags = (self._pairs(f"key, value FROM {table}", ids) for table in ("params", "tags"))
        metrics = self._pairs(f"key, {_VALUE} FROM latest_metrics", ids)
        return [
            RunRecord(
                run_id,
                name or run_id,
                status,
                start_time or 0,
                params[run_id],
                {key: stored_number(value) for key, value in metrics[run_id].items()},
                tags[run_id],
            )
            for run_id, name, status, start_time in rows
        ]

    def _pairs(self, what: str, run_ids: Sequence[str]) -> dict[str, dict[str, Any]]:
        """Return values by run and name."""
        by_run: dict[str, dict[str, Any]] = {run_id: {} for run_id in run_ids}
        query = f"SELECT run_uuid, {what} WHERE {_THESE} ORDER BY rowid"
        for run_id, key, value in self._query(query, json.dumps(list(run_ids))):
            by_run[run_id][key] = value
        return by_run


def stored_number(value: str | float | None) -> float:
    """Return the number of a value in a store: None is NaN, and databases keep infinities as the largest numbers."""
    number = math.nan if value is None else float(value)
    return math.copysign(math.inf, number) if abs(number) >= sys.float_info.max else number
