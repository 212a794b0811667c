"""The store that a spool or a checkpoint names, and whether it may be used without asking.

A folder of runs may have been moved or copied since, and may be somebody else's. So the database that lies beside it
counts more than an address, and an address only where the user has named it too: requests carry the user's token.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from rl8x.tracking.location import Location, locate, with_password
from rl8x.tracking.protocol import TrackingError

_BESIDE = re.compile(r"\.\./\.\./([^/\0]+)")


def beside(folder: Path, database: Path | None) -> str | None:
    """Return a database's path from a run's folder: `../../mlflow.db` for `<root>/spool/<id>` and `<root>/mlflow.db`.

    None where it lies elsewhere: the two do not move together then.
    """
    if database is None or Path(os.path.realpath(database.parent)) != _root(folder):
        return None
    return f"../../{database.name}"


def recorded_location(folder: Path, uri: str, record: Mapping[str, object]) -> Location:
    """Find the store that a record in a run's folder names.

    Args:
        folder: The spool, or the folder of checkpoints.
        uri: Address of the store when the record was made, without its password.
        record: Has `database`, the result of `beside` then.

    Returns:
        The database beside, unless only the one at the address is there; else the store at the address.

    Raises:
        TrackingError: The address is of no known kind, or a password is missing.
    """
    found = _BESIDE.fullmatch(str(record.get("database") or ""))
    if found is None or found[1] == "..":
        return locate(with_password(uri))
    database = _root(folder) / found[1]
    named = None
    with contextlib.suppress(TrackingError):
        named = locate(uri)
    if named is not None and named.database is not None and named.database.exists() and not database.exists():
        return named
    location = locate(f"sqlite:///{database}")
    own_layout = named is not None and named.artifact_root is not None  # the folder may have another name since
    return replace(location, artifact_root=database.with_name("artifacts") if own_layout else location.artifact_root)


def is_users_own(location: Location, folder: Path) -> bool:
    """Return whether a store that a run's folder names lies beside it, or is the one that training would use here."""
    if beside(folder, location.database) is not None:
        return True
    with contextlib.suppress(TrackingError):
        return locate().uri.rstrip("/") == location.uri.rstrip("/")
    return False


def _root(folder: Path) -> Path:
    return Path(os.path.realpath(folder.parent)).parent
