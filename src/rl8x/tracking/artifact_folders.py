"""Where the artifacts of runs in a database go, also after the folder of both was moved or copied.

MLflow keeps the absolute path of each run's artifacts in the database, and makes that path anew where it is gone.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
from pathlib import Path
from urllib.parse import unquote, urlsplit

from rl8x.tracking.secrets import hide

ROOT = "artifacts"  # beside the database, in the layout that `rl8x.tracking.location` makes


class ArtifactFolders:
    """The folders of artifacts of the runs in one database.

    Args:
        database: The file.
        guarded: Whether artifacts may go to the database's own folder only.
    """

    def __init__(self, database: Path, *, guarded: bool = False) -> None:
        self._database = database
        self._guarded = guarded
        self._ready: set[str] = set()

    def prepare(self, run_id: str, uri: str) -> None:
        """Check, before anything is written, that a run's artifacts go to a folder of this store.

        Where they lay beside a database that was moved or copied since, the database gets their path beside it here:
        MLflow's page then finds those that were moved with it as well.

        Args:
            run_id: The run.
            uri: Where its artifacts are, as the database has it.

        Raises:
            OSError: The folder is not there, or not one that artifacts may go to.
        """
        from mlflow.tracking._tracking_service import utils

        # MLflow shall ask again where they are: another store of this process may be a copy.
        utils._artifact_repos_cache.pop(run_id, None)
        folder = _local(uri)
        if run_id in self._ready or (folder is None and not self._guarded):
            return
        here = self._database.parent
        if folder is not None and self._was_left_behind(folder, run_id):
            folder = here / ROOT / run_id / "artifacts"
            with contextlib.closing(sqlite3.connect(self._database, timeout=20)) as connection, connection:
                connection.execute("UPDATE runs SET artifact_uri = ? WHERE run_uuid = ?", (folder.as_uri(), run_id))
        if self._guarded and (folder is None or not _real(folder).is_relative_to(_real(here))):
            raise PermissionError(
                f"the run's artifacts belong in {hide(uri)}, outside of the database's own folder {here}, "
                f"and you have not named this store: `rl8x sync --to sqlite:///{self._database}` does"
            )
        if folder is not None and not any(parent.exists() for parent in folder.parents[1:4]):
            raise FileNotFoundError(f"the folder of the run's artifacts, {folder}, is not there, and none is made")
        self._ready.add(run_id)

    def _was_left_behind(self, folder: Path, run_id: str) -> bool:
        """Return whether a folder belongs to the place from which this database was moved or copied."""
        root = folder.parents[1]
        if folder.parts[-4:] != ("mlruns", ROOT, run_id, "artifacts"):
            return False
        with contextlib.suppress(OSError):
            if os.path.samefile(root.parent, self._database.parent):
                return False
        return not root.exists() or (root.parent / self._database.name).exists()


def _local(uri: str) -> Path | None:
    parts = urlsplit(uri)
    if parts.scheme not in ("", "file") or parts.netloc not in ("", "localhost"):
        return None
    path = Path(uri if parts.scheme == "" else unquote(parts.path))
    return path if path.is_absolute() else None


def _real(path: Path) -> Path:
    return Path(os.path.realpath(path))
