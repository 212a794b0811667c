"""Find the tracking store: the user's URI, `mlruns/` in the working directory, or the store that a run's folder names.

A run's folder may come from somebody else. So a database next to it takes precedence over an address in it, and such an
address is used only if the user has named it too, since requests carry the user's token.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from importlib.metadata import entry_points
from pathlib import Path
from urllib.parse import unquote, urlsplit

from rl8x.names import did_you_mean
from rl8x.tracking.private import decodes_paths, is_set_in_process, sqlite_uri
from rl8x.tracking.protocol import TrackingError
from rl8x.tracking.secrets import hide, hide_in_uris, is_hidden, learn, recall

_SQL = ("sqlite", "postgresql", "mysql", "mssql")
_REMOTE = ("http", "https", "databricks", "databricks-uc")
_BESIDE = re.compile(r"\.\./\.\./([^/\0]+)")
_typed: str | None = None


@dataclass(frozen=True)
class Location:
    """A tracking store.

    Attributes:
        uri: Its tracking URI, absolute.
        database: The file of an sqlite store, else None.
        artifact_root: Folder for the artifacts of a new experiment; None leaves it to MLflow.
        guarded: Whether artifacts may only go to the database's own folder, since the user has not named the store.
    """

    uri: str = field(repr=False)  # may have a password
    database: Path | None = None
    artifact_root: Path | None = None
    guarded: bool = False

    def __post_init__(self) -> None:
        """Register the secrets of the URI, so that they are hidden in all of MLflow's messages."""
        learn(self.uri)

    @property
    def remote(self) -> bool:
        """Whether the store is reached by HTTP."""
        return urlsplit(self.uri).scheme in ("http", "https") or self.uri.startswith("databricks")

    @property
    def shown(self) -> str:
        """The URI without its secrets, the same in every process."""
        return hide_in_uris(self.uri)


def mlruns_dir() -> Path:
    """Return `mlruns`, the default folder of runs and journals, as an absolute path if the working directory exists."""
    with contextlib.suppress(FileNotFoundError):
        return Path.cwd() / "mlruns"
    return Path("mlruns")  # the working directory was removed: nothing exists there or can be created


@contextlib.contextmanager
def typed_store(tracking_uri: str | None) -> Iterator[None]:
    """Use the tracking URI of a command as the user's within the context; None changes nothing."""
    global _typed
    before, _typed = _typed, tracking_uri or _typed
    try:
        yield
    finally:
        _typed = before


def user_tracking_uri() -> str | None:
    """Return the first URI set by this command, `mlflow.set_tracking_uri` or `MLFLOW_TRACKING_URI`; else None."""
    if _typed is not None:
        return _typed
    mlflow = sys.modules.get("mlflow")
    if mlflow is not None and hasattr(mlflow, "is_tracking_uri_set") and mlflow.is_tracking_uri_set():
        return str(mlflow.get_tracking_uri())
    return os.environ.get("MLFLOW_TRACKING_URI") or None


def shell_tracking_uri() -> str | None:
    """Return the tracking URI that a command started from this shell would use, if one is set."""
    if is_set_in_process():
        return None  # mlflow.set_tracking_uri() sets the variable too, but only in this process
    return os.environ.get("MLFLOW_TRACKING_URI") or None


def locate(tracking_uri: str | None = None) -> Location:
    """Return the store to use: `tracking_uri`, else the user's, else `mlruns/mlflow.db` in the working directory."""
    uri = tracking_uri or user_tracking_uri()
    if uri is None:
        return _default_location()
    uri = with_password(uri)
    try:
        scheme = uri if uri in _REMOTE else urlsplit(uri).scheme
    except ValueError:  # its text has the whole address
        raise _unreadable(uri) from None
    base = scheme.split("+")[0]
    if base == "sqlite":
        return _sqlite_location(uri)
    if base in ("", "file") or len(base) == 1:
        if os.environ.get("MLFLOW_ALLOW_FILE_STORE", "").lower() in ("true", "1"):
            return Location(uri)
        raise TrackingError(
            f"tracking_uri {hide(uri)!r} is MLflow's old file store, which MLflow 3 cannot write: "
            f"use a database, as in sqlite:///mlruns/mlflow.db (`mlflow migrate-filestore` moves old runs)"
        )
    known = {*_SQL, *_REMOTE, "uc", *(point.name for point in entry_points(group="mlflow.tracking_store"))}
    if base not in known:
        hint = did_you_mean(base, known, most=2, show=str)
        raise TrackingError(f"tracking_uri has the unknown scheme {base!r}; legal: {', '.join(sorted(known))}.{hint}")
    _check_password(uri, base)
    return Location(uri)


def is_default(location: Location) -> bool:
    """Return whether an rl8x command started in this folder uses this store by default, without its URI."""
    uri = shell_tracking_uri()
    with contextlib.suppress(TrackingError):
        return (locate(uri) if uri else _default_location()).uri == location.uri
    return False


def _default_location() -> Location:
    root = mlruns_dir()
    database = _checked(root / "mlflow.db")
    old = [file.parent.name for file in root.glob("[0-9]*/meta.yaml") if file.parent.name.isdigit()]
    if old and not database.exists():
        raise TrackingError(
            f"found MLflow's old file store in {root} ({min(old)}/meta.yaml), which MLflow 3 cannot write: "
            "run `mlflow migrate-filestore`, or choose another store by tracking_uri or MLFLOW_TRACKING_URI"
        )
    return Location(sqlite_uri(database), database, root / "artifacts")


def _checked(database: Path) -> Path:
    """Refuse a path that is not UTF-8, as MLflow would put the artifacts into a folder of another name."""
    try:
        os.fsencode(database).decode()  # independent of the locale
    except UnicodeDecodeError:
        raise TrackingError(
            f"MLflow cannot keep runs in {str(database.parent)!r}, whose name is not UTF-8: work in another folder, or "
            "choose a store elsewhere by tracking_uri or MLFLOW_TRACKING_URI"
        ) from None
    return database


def _check_password(uri: str, scheme: str) -> None:
    """Refuse a password that splits the URI in the wrong place, as error texts would then show a part of it."""
    if scheme in ("http", "https"):
        try:
            readable = urlsplit(uri).port != 0
        except ValueError:
            readable = False
    else:  # SQLAlchemy takes the first `@` after the first `:`
        readable = uri.partition("://")[2].partition(":")[2].partition("?")[0].count("@") <= 1
    if not readable:
        raise _unreadable(uri)


def _unreadable(uri: str) -> TrackingError:
    return TrackingError(
        f"tracking_uri {hide(uri)} cannot be read: percent-encode its password ('/' is %2F, '?' %3F, '#' %23, '@' %40) "
        "and give a port as a number"
    )


def _sqlite_location(uri: str) -> Location:
    driver, _, rest = uri.partition("://")
    driver, (path, _, query) = driver.lower(), rest.partition("?")
    name = path[1:]
    if not path.startswith("/") or name in ("", ":memory:"):
        example = "sqlite:///mlruns/mlflow.db"
        raise TrackingError(f"an sqlite tracking_uri must name a file, as in {example}; got {hide(uri)!r}")
    database = _checked(Path(unquote(name) if decodes_paths() else name).absolute())
    plain_uri = sqlite_uri(database)
    own_uri = plain_uri if driver == "sqlite" else driver + plain_uri[plain_uri.index(":") :]
    absolute = own_uri + (f"?{query}" if query else "")
    # Next to the database in rl8x's own layout, otherwise MLflow's default, which users know.
    root = database.parent / "artifacts" if database.parent.name == "mlruns" else None
    return Location(absolute, database, root)


def make_mlruns(folder: Path) -> None:
    """Create a folder for runs that git ignores, or raise `OSError`; an existing folder stays unchanged."""
    if not folder.exists():
        folder.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError), open(folder / ".gitignore", "x") as file:
            file.write("*\n!.gitignore\n")


def with_password(uri: str) -> str:
    """Restore the hidden password of a URI that the user set or this process has seen, or raise `TrackingError`."""
    if not is_hidden(uri):
        return uri
    mine = user_tracking_uri()
    known = mine if mine is not None and not is_hidden(mine) and hide_in_uris(mine) == uri else recall(uri)
    if known is not None:
        return known
    raise TrackingError(f"the password of {uri} is needed: set MLFLOW_TRACKING_URI to the whole URI")


def database_beside(folder: Path, database: Path | None) -> str | None:
    """Return a database's path from a run's folder, `../../NAME`; None if it lies elsewhere and may not move along."""
    if database is None or Path(os.path.realpath(database.parent)) != _root(folder):
        return None
    return f"../../{database.name}"


def store_of(folder: Path, tracking_uri: str | None = None, mlruns: object = None) -> dict[str, str | None]:
    """Return the tracker's options for runs of a folder such as `mlruns/studies/NAME`.

    If no store is named, the database two folders above takes precedence over that of the folder `mlruns` in which the
    runs began, if it is remembered, and that over the working directory's.
    """
    if (tracking_uri or user_tracking_uri()) is None:
        for root in (_root(folder), *([Path(mlruns)] if isinstance(mlruns, str) and mlruns else [])):
            if root != mlruns_dir() and (root / "mlflow.db").exists():
                return {"tracking_uri": sqlite_uri(root / "mlflow.db"), "spool_dir": str(root / "spool")}
    return {"tracking_uri": tracking_uri, "spool_dir": None}


def recorded_location(folder: Path, uri: str, record: Mapping[str, object]) -> Location:
    """Return the store that a record in a run's folder names by its URI and by `database`, from `database_beside`."""
    database_name = _BESIDE.fullmatch(str(record.get("database") or ""))
    if database_name is None or database_name[1] == "..":
        return locate(uri)
    database = _root(folder) / database_name[1]
    named = None
    with contextlib.suppress(TrackingError):
        named = locate(uri)
    if named is not None and named.database is not None and named.database.exists() and not database.exists():
        return named
    location = locate(sqlite_uri(database))
    own_layout = named is not None and named.artifact_root is not None  # the folder may have been renamed since
    return replace(location, artifact_root=database.with_name("artifacts") if own_layout else location.artifact_root)


def is_users_own(location: Location, folder: Path) -> bool:
    """Return whether a store named by a run's folder lies next to it, or is the one that training would use here."""
    if database_beside(folder, location.database) is not None:
        return True
    with contextlib.suppress(TrackingError):
        return locate().uri.rstrip("/") == location.uri.rstrip("/")
    return False


def _root(folder: Path) -> Path:
    return Path(os.path.realpath(folder.parent)).parent
