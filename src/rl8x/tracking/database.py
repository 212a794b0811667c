"""Make MLflow's sqlite database once, whole or not at all, and ready for several writers."""

from __future__ import annotations

import contextlib
import os
import sqlite3
from pathlib import Path
from typing import Any, ClassVar

from rl8x.tracking.location import Location, make_mlruns
from rl8x.tracking.locks import FileLock


def ensure_database(location: Location) -> None:
    """Create the database of an sqlite location, unless it is there.

    It is made beside its place and renamed into it, under a lock: MLflow needs seconds for its migrations, does not
    guard them against a second process, and cannot go on with a database whose creation was killed.
    """
    database = location.database
    assert database is not None
    if has_tables(database):
        return
    make_mlruns(database.parent)
    with FileLock(database.with_name(f".{database.name}.lock")):
        if has_tables(database):
            return
        beside = database.with_name(f".{database.name}.new")
        for leftover in (beside, *_logs(beside)):
            leftover.unlink(missing_ok=True)
        _make(beside, location.artifact_root or Path("mlruns"))
        for leftover in _logs(database):  # of one that was deleted: sqlite would write it into the new one
            leftover.unlink(missing_ok=True)
        os.replace(beside, database)


def _logs(database: Path) -> list[Path]:
    return [database.with_name(database.name + end) for end in ("-wal", "-shm", "-journal")]


def merge_log(database: Path) -> None:
    """Move what is still in the write-ahead log into a database, so that its file alone is complete where it is copied.

    Where another process is writing, the log stays until that one is done.
    """
    if not has_tables(database):
        return
    with contextlib.suppress(sqlite3.Error), contextlib.closing(sqlite3.connect(database, timeout=0.5)) as connection:
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")


class DatabaseFile:
    """The file of a database, distinguished from another one that has taken its place.

    A process that has a file open goes on writing to it after it was deleted, and MLflow keeps files open.

    Args:
        database: Its path.
        uri: What MLflow calls it.
    """

    # By URI, what MLflow may have open in this process
    _opened: ClassVar[dict[str, DatabaseFile]] = {}

    def __init__(self, database: Path, uri: str) -> None:
        self._path = database
        self._identity = _identity(database)
        for other, file in list(self._opened.items()):
            if not file.is_there():
                engine = _store_class()._engine_map.get(other)
                if engine is not None:
                    engine.dispose()
                del self._opened[other]
        self._opened[uri] = self

    def is_there(self) -> bool:
        """Return whether its path still leads to it."""
        return _identity(self._path) == self._identity


def _identity(path: Path) -> tuple[int, int] | None:
    with contextlib.suppress(OSError):
        stat = path.stat()
        return stat.st_dev, stat.st_ino
    return None


def _store_class() -> Any:
    from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore

    return SqlAlchemyStore


def has_tables(database: Path) -> bool:
    """Return whether a file has anything in it; an empty one is what an interrupted `touch` or connect leaves."""
    with contextlib.suppress(OSError):
        return database.stat().st_size > 0
    return False


def _make(database: Path, artifact_root: Path) -> None:
    make_store = _store_class()
    uri = f"sqlite:///{database}"
    make_store(uri, str(artifact_root)).engine.dispose()
    make_store._engine_map.pop(uri, None)  # the file is about to have another name
    with contextlib.closing(sqlite3.connect(database)) as connection:
        # Readers (the UI) and one writer then do not wait for each other; the mode stays with the file.
        # MLflow itself waits 20 s for a lock, in each session.
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        connection.commit()
