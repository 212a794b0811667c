"""Where runs are kept: the user's tracking URI, or `mlruns/` in the working directory, or what a run's folder names.

Such a folder may be somebody else's. So the database that lies beside it counts more than an address, and an address
only where the user has named it too: requests carry the user's token.
"""

from __future__ import annotations

import contextlib
import difflib
import os
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from importlib.metadata import entry_points
from pathlib import Path
from urllib.parse import unquote, urlsplit

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
        database: The file, where it is an sqlite store.
        artifact_root: Folder for the artifacts of a new experiment; None leaves it to MLflow.
        guarded: Whether artifacts may go to the database's own folder only, as the user has not named the store.
    """

    uri: str = field(repr=False)  # may have a password
    database: Path | None = None
    artifact_root: Path | None = None
    guarded: bool = False

    def __post_init__(self) -> None:
        """Make the secrets of the URI known, so that they are hidden in all messages of MLflow."""
        learn(self.uri)

    @property
    def remote(self) -> bool:
        """Whether it is reached by HTTP."""
        return urlsplit(self.uri).scheme in ("http", "https") or self.uri.startswith("databricks")

    @property
    def shown(self) -> str:
        """The URI without its secrets; in every process the same."""
        return hide_in_uris(self.uri)


def mlruns_dir() -> Path:
    """Return the default folder of runs and spools, as an absolute path if there is one."""
    with contextlib.suppress(FileNotFoundError):
        return Path.cwd() / "mlruns"
    return Path("mlruns")  # the working directory was removed: nothing is there, and nothing can be made


@contextlib.contextmanager
def typed_store(tracking_uri: str | None) -> Iterator[None]:
    """Let the tracking URI of a command be the one that the user set; None changes nothing."""
    global _typed
    before, _typed = _typed, tracking_uri or _typed
    try:
        yield
    finally:
        _typed = before


def user_tracking_uri() -> str | None:
    """Return the tracking URI that the user set, for this command, in this process or by `MLFLOW_TRACKING_URI`."""
    if _typed is not None:
        return _typed
    mlflow = sys.modules.get("mlflow")
    if mlflow is not None and hasattr(mlflow, "is_tracking_uri_set") and mlflow.is_tracking_uri_set():
        return str(mlflow.get_tracking_uri())
    return os.environ.get("MLFLOW_TRACKING_URI") or None


def shell_tracking_uri() -> str | None:
    """Return the tracking URI that is set for a command which is started in this shell."""
    if is_set_in_process():
        return None  # by mlflow.set_tracking_uri(), which sets the variable too, in this process alone
    return os.environ.get("MLFLOW_TRACKING_URI") or None


def locate(tracking_uri: str | None = None) -> Location:
    """Find the store to use: `tracking_uri`, else the user's, else `mlruns/mlflow.db` in the working directory."""
    uri = tracking_uri or user_tracking_uri()
    if uri is None:
        return _default_location()
    uri = with_password(uri)
    try:
        scheme = uri if uri in _REMOTE else urlsplit(uri).scheme
    except ValueError:  # it names the whole address
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
        near = difflib.get_close_matches(base, known, n=2)
        hint = f"; did you mean {' or '.join(near)}" if near else ""
        raise TrackingError(f"tracking_uri has the unknown scheme {base!r}; legal: {', '.join(sorted(known))}{hint}")
    _check_password(uri, base)
    return Location(uri)


def is_default(location: Location) -> bool:
    """Return whether a command of rl8x that is started in this folder finds a store without its URI."""
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
    """Refuse a path beside which MLflow would put the files of runs into a folder of another name."""
    try:
        os.fsencode(database).decode()  # whatever the locale
    except UnicodeDecodeError:
        raise TrackingError(
            f"MLflow cannot keep runs in {str(database.parent)!r}, whose name is not UTF-8: work in another folder, or "
            "choose a store elsewhere by tracking_uri or MLFLOW_TRACKING_URI"
        ) from None
    return database


def _check_password(uri: str, scheme: str) -> None:
    """Refuse a password whose characters make another address of the URI, which error texts would then show."""
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
    # Beside the database in our own layout; elsewhere MLflow's default, which users know.
    root = database.parent / "artifacts" if database.parent.name == "mlruns" else None
    return Location(absolute, database, root)


def make_mlruns(folder: Path) -> None:
    """Make a folder for runs that git ignores, or raise `OSError`; an existing one is left as it is."""
    if not folder.exists():
        folder.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError), open(folder / ".gitignore", "x") as file:
            file.write("*\n!.gitignore\n")


def with_password(uri: str) -> str:
    """Put the password back into a URI in which it is hidden, if the user set that URI or this process has seen it."""
    if not is_hidden(uri):
        return uri
    mine = user_tracking_uri()
    known = mine if mine is not None and not is_hidden(mine) and hide_in_uris(mine) == uri else recall(uri)
    if known is not None:
        return known
    raise TrackingError(f"the password of {uri} is needed: set MLFLOW_TRACKING_URI to the whole URI")


def beside(folder: Path, database: Path | None) -> str | None:
    """Return a database's path from a run's folder, `../../mlflow.db`; None where the two do not move together."""
    if database is None or Path(os.path.realpath(database.parent)) != _root(folder):
        return None
    return f"../../{database.name}"


def store_of(folder: Path, tracking_uri: str | None = None) -> dict[str, str | None]:
    """Return the tracker's options for what is kept in a folder such as `mlruns/studies/NAME`.

    Where nobody names a store, the database beside it counts before that of the working directory.
    """
    root = _root(folder)
    if (tracking_uri or user_tracking_uri()) is None and root != mlruns_dir() and (root / "mlflow.db").exists():
        return {"tracking_uri": sqlite_uri(root / "mlflow.db"), "spool_dir": str(root / "spool")}
    return {"tracking_uri": tracking_uri, "spool_dir": None}


def recorded_location(folder: Path, uri: str, record: Mapping[str, object]) -> Location:
    """Find the store that a record in a run's folder names by its address and by `database`, the result of `beside`."""
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
