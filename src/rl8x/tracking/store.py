"""The calls to MLflow that a run needs, with two kinds of errors. Nothing here retries; the caller decides."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import sqlite3
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

from rl8x.tracking.artifacts import log_model
from rl8x.tracking.location import Location, make_mlruns
from rl8x.tracking.locks import FileLock
from rl8x.tracking.pages import CURVES_FILE, Series, draw_curves
from rl8x.tracking.private import (
    add_past_points,
    create_database,
    has_tables,
    prepare_artifacts,
    rename_left,
    reopen_database,
    stored_number,
)
from rl8x.tracking.protocol import RunMissingError, StoreDownError, StoreRefusedError
from rl8x.tracking.repeats import LeftBehind, Point, left_behind, left_tag
from rl8x.tracking.secrets import hide, showable

DEFAULT_EXPERIMENT = "rl8x"
JOURNAL_TAG = "rl8x.journal_id"
MAX_METRICS = 1000  # points per call of MLflow
# Points per transaction of a local database, where only the newest points go through MLflow. A point costs half as much
# as in calls of 1000.
_MAX_POINTS = 4000
MAX_PARAMS = 100
_LOOK_AGAIN_S = (0.0, 0.2, 1.0)  # seconds; a server may read from a replica that lags behind
_QUERY = r"\n\[SQL: |\n\(Background on this error at: "  # what SQLAlchemy adds to an error
_DAMAGED = "file is not a database|database disk image is malformed"
_ReturnT = TypeVar("_ReturnT")

_NOISY = ("mlflow.store.db.utils", "mlflow.utils.rest_utils", "urllib3.connectionpool")
_guard = threading.Lock()
_users = 0
_set_here: set[str] = set()
_silenced: list[logging.Logger] = []


class NewRun(NamedTuple):
    """The fields of a new run; `start_time` is in milliseconds since 1970."""

    journal_id: str
    experiment: str | None
    experiment_id: str | None
    run_name: str | None
    start_time: int


def ensure_database(location: Location) -> None:
    """Create the database of an sqlite location, unless it exists."""
    database = location.database
    assert database is not None
    if has_tables(database):
        return
    make_mlruns(database.parent)
    with FileLock(database.with_name(f".{database.name}.lock")) as lock:
        try:
            if not has_tables(database):
                create_database(database, location.artifact_root or Path("mlruns"))
        finally:
            lock.path.unlink(missing_ok=True)  # the folder may be the user's own, under version control


def source_tags() -> dict[str, str]:
    """Return the tags from which MLflow's UI shows a run's source: script, user, git commit. Imports mlflow."""
    from mlflow.tracking.context.registry import resolve_tags

    return {str(name): str(value) for name, value in resolve_tags().items()}


class MLflowStore:
    """The runs of one MLflow store. Every call raises `StoreDownError` or `StoreRefusedError` and nothing else."""

    def __init__(self, location: Location, *, request_timeout_s: int = 10) -> None:
        self._location = location
        self._timeout_s = request_timeout_s
        self.most_points = MAX_METRICS if location.database is None else _MAX_POINTS  # in one call of `log_points`
        self._file: tuple[int, int] | None = None  # device and inode of the database
        self._client: Any = self._tried(self._connect)

    def _connect(self) -> Any:
        from mlflow import MlflowClient

        database = self._location.database
        if database is not None:
            ensure_database(self._location)
            self._file = _identity(database)
            reopen_database(self._location.uri)
        return MlflowClient(tracking_uri=self._location.uri)

    def _call(self, function: Callable[..., _ReturnT], *args: Any, extra_time_s: int = 0, **kwargs: Any) -> _ReturnT:
        """Make a call; raise `StoreDownError` if the database has been replaced since this store was created."""
        self._check_file()
        try:
            return self._tried(function, *args, extra_time_s=extra_time_s, **kwargs)
        finally:  # even after success, since a deleted file accepts rows until it is closed
            self._check_file()

    def _check_file(self) -> None:
        database = self._location.database
        if database is not None and _identity(database) != self._file:
            raise StoreDownError(
                f"{database} was deleted, moved or replaced in mid-run: put it back, "
                "or let `rl8x ui` make one; `rl8x sync` then sends what it lacks"
            )

    def _tried(self, function: Callable[..., _ReturnT], *args: Any, extra_time_s: int = 0, **kwargs: Any) -> _ReturnT:
        """Make a call and turn any exception into one of the two errors of a store."""
        from mlflow.exceptions import MlflowException

        try:
            with short_requests(self._timeout_s + extra_time_s):
                return function(*args, **kwargs)
        except Exception as error:  # of sqlite, requests, the OS or a plugin: none must stop training
            kind: type[Exception] = StoreDownError
            text = _short(error)
            if not isinstance(error, MlflowException):
                text = f"{type(error).__name__}: {text}"
            elif _refuses(error):
                kind = StoreRefusedError
            elif error.error_code == "RESOURCE_DOES_NOT_EXIST":
                kind = RunMissingError
            raise kind(self._explained(error) or text) from showable(error)

    def _explained(self, error: Exception) -> str | None:
        """Return a one-line explanation of a database error and its remedy; None for any other error."""
        schemas = re.search(r"schema \(found version (\w+), but expected (\w+)\)", str(error))
        if schemas is not None:
            return (
                f"its tables are those of another version of MLflow (schema {schemas[1]}, here {schemas[2]}): use that "
                f"version, or back the database up and run `mlflow db upgrade {self._location.shown}`"
            )
        if self._location.database is not None and re.search(_DAMAGED, str(error)):
            return f"{self._location.database} is damaged or no database: move it away, and `rl8x ui` makes a new one"
        return None

    def entity(self, run_id: str) -> Any:
        """Return a run, an `mlflow.entities.Run`."""
        return self._call(self._client.get_run, run_id)

    def find_runs(self, journal_id: str) -> list[str]:
        """Return the IDs of the runs created for a journal, in any experiment, the oldest first."""
        runs = self.search(None, f"tags.`{JOURNAL_TAG}` = '{journal_id}'")
        return [run.info.run_id for run in sorted(runs, key=lambda run: (run.info.start_time, run.info.run_id))]

    def create_run(self, spec: NewRun, tags: Mapping[str, str] = MappingProxyType({})) -> str:
        """Create a run with these tags and return its ID."""
        about = (self._experiment_id(spec), spec.start_time, {**tags, JOURNAL_TAG: spec.journal_id}, spec.run_name)
        return str(self._call(self._client.create_run, *about).info.run_id)

    def _experiment_id(self, spec: NewRun) -> str:
        if spec.experiment_id is not None:
            return spec.experiment_id
        experiment = self._call(self._client.get_experiment_by_name, spec.experiment)
        if experiment is None:
            root = self._location.artifact_root
            where = None if root is None else root.as_uri()
            try:
                return str(self._call(self._client.create_experiment, spec.experiment, where))
            except StoreRefusedError:  # another process was first
                experiment = self._call(self._client.get_experiment_by_name, spec.experiment)
                if experiment is None:
                    raise
        if experiment.lifecycle_stage != "active":
            hint = "restore it or use another experiment_name"
            raise StoreDownError(f"experiment {spec.experiment!r} is deleted; {hint}")
        return str(experiment.experiment_id)

    def delete_run(self, run_id: str) -> None:
        """Delete a run."""
        self._call(self._client.delete_run, run_id)

    def check_run(self, run_id: str) -> None:
        """Raise `StoreDownError` unless the run exists and is active."""
        if self.entity(run_id).info.lifecycle_stage != "active":
            raise StoreDownError(f"run {run_id} is deleted; `mlflow runs restore --run-id {run_id}` brings it back")

    def run_name(self, run_id: str) -> tuple[str, bool]:
        """Return a run's name, and whether it is unique in the store."""
        name = str(self.entity(run_id).info.run_name or "")
        return name, name != "" and len(self.search_by_name(name)) == 1

    def log_points(self, run_id: str, points: Sequence[Point]) -> None:
        """Log at most `most_points`; a failure never leaves a metric's newest point without its earlier ones."""
        if self._location.database is not None:
            points = self._call(add_past_points, self._location.database, run_id, [Point(*point) for point in points])
        for begin in range(0, len(points), MAX_METRICS):
            self._log_batch(run_id, points[begin : begin + MAX_METRICS], {}, {})

    def log_params(self, run_id: str, params: Mapping[str, str]) -> None:
        """Log at most 100 new params."""
        self._log_batch(run_id, [], params, {})

    def set_tags(self, run_id: str, tags: Mapping[str, str]) -> None:
        """Set at most 100 tags."""
        self._log_batch(run_id, [], {}, tags)

    def _log_batch(
        self, run_id: str, points: Sequence[Point], params: Mapping[str, str], tags: Mapping[str, str]
    ) -> None:
        from mlflow.entities import Metric, Param, RunTag

        metrics = [Metric(*point) for point in points]
        texts = [Param(*item) for item in params.items()], [RunTag(*item) for item in tags.items()]
        self._call(self._client.log_batch, run_id, metrics, *texts)

        def has_all(run: Any) -> bool:
            last = _last_steps(run)
            has_points = all(metric.key in last and last[metric.key] >= metric.step for metric in metrics)
            return has_points and params.keys() <= run.data.params.keys() and tags.items() <= run.data.tags.items()

        self._check_taken(run_id, has_all)

    def _check_taken(self, run_id: str, is_there: Callable[[Any], bool]) -> None:
        """Check that a server has the data sent to it: MLflow's client takes a proxy's empty answer for success."""
        if not self._location.uri.startswith(("http://", "https://")):
            return
        for wait_s in _LOOK_AGAIN_S:
            time.sleep(wait_s)
            if is_there(self.entity(run_id)):
                return
        raise StoreDownError("what was sent was answered as if it had been taken, and is not there")

    def log_artifact(self, run_id: str, path: str | Path, to: str | None) -> None:
        """Log a file or folder to the folder `to` of the run's artifacts; None is the top folder."""
        self._find_artifacts(run_id)
        path = Path(path)
        if path.is_dir():
            folder = path.name if to is None else f"{to}/{path.name}"
            self._call(self._client.log_artifacts, run_id, str(path), folder, extra_time_s=120)
        else:
            extra_time_s = path.stat().st_size >> 20  # a second for each megabyte
            self._call(self._client.log_artifact, run_id, str(path), to, extra_time_s=extra_time_s)

    def log_text(self, run_id: str, text: str, name: str) -> None:
        """Log a text as an artifact of the run."""
        self._find_artifacts(run_id)
        self._call(self._client.log_text, run_id, text, name)

    def log_model(self, run_id: str, path: str | Path, about: Mapping[str, Any]) -> str:
        """Log a policy's file as a model of a run by `artifacts.log_model`; return the model's ID."""
        self._find_artifacts(run_id)
        run = self.entity(run_id)
        return self._call(log_model, self._client, run, Path(path), about, extra_time_s=120)

    def log_curves(self, run_id: str, series: Series, title: str, clock: str) -> None:
        """Draw learning curves by `draw_curves`, and log them as an artifact of the run."""
        picture = draw_curves(series, title, clock)
        if picture is not None:
            with tempfile.TemporaryDirectory() as folder:
                path = Path(folder) / CURVES_FILE
                path.write_bytes(picture)
                self.log_artifact(run_id, path, None)

    def _find_artifacts(self, run_id: str) -> None:
        """Raise `StoreDownError` if `prepare_artifacts` refuses the folder of a run's artifacts."""
        if self._location.database is not None:
            uri = str(self.entity(run_id).info.artifact_uri)
            try:
                prepare_artifacts(self._location.database, run_id, uri, guarded=self._location.guarded)
            except (OSError, sqlite3.Error) as error:
                raise StoreDownError(str(error)) from error

    def set_status(self, run_id: str, status: str, end_time: int | None) -> None:
        """Set a run's status."""
        if status == "RUNNING":
            self._call(self._client.update_run, run_id, status=status)
        else:
            self._call(self._client.set_terminated, run_id, status, end_time)
        self._check_taken(run_id, lambda run: run.info.status == status)

    def last_steps(self, run_id: str) -> dict[str, int]:
        """Return the last step of each metric of a run."""
        return _last_steps(self.entity(run_id))

    def points(self, run_id: str, name: str) -> list[Point]:
        """Return all points of a run's metric, in the order of steps, then of time."""
        points = self._call(self._client.get_metric_history, run_id, name)
        points.sort(key=lambda point: (point.step, point.timestamp, point.value))
        return [Point(name, stored_number(point.value), int(point.timestamp), int(point.step)) for point in points]

    def leave_behind(self, run_id: str, new: LeftBehind) -> None:
        """Mark points of a run as superseded by a resume, and rename them in a local database."""
        known = [left for left in left_behind(self.entity(run_id).data.tags) if left != new]
        self.set_tags(run_id, left_tag([*known, new]))
        if self._location.database is not None:
            self._call(rename_left, self._location.database, run_id, new)

    def download(self, run_id: str, name: str, folder: Path) -> Path | None:
        """Copy an artifact, a file in the top folder, into `folder` and return its path; None if there is none."""
        self._find_artifacts(run_id)
        if name not in {entry.path for entry in self._call(self._client.list_artifacts, run_id)}:
            return None
        return Path(self._call(self._client.download_artifacts, run_id, name, str(folder), extra_time_s=120))

    def experiments(self) -> list[Any]:
        """Return the active experiments."""
        return list(self._call(self._client.search_experiments, max_results=1000))

    def search(self, experiment_ids: list[str] | None, query: str, *, most: int | None = None) -> list[Any]:
        """Return the runs that match a query, the newest first; None searches all experiments."""
        if experiment_ids is None:
            experiment_ids = [experiment.experiment_id for experiment in self.experiments()]
        runs, token = [], None
        while True:
            options: dict[str, Any] = {"max_results": min(most or 1000, 1000), "page_token": token}
            page = self._call(self._client.search_runs, experiment_ids, query, **options)
            runs += page
            token = page.token
            if not token or (most is not None and len(runs) >= most):
                return runs

    def search_by_name(self, name: str) -> list[Any]:
        """Return the runs with a name, in all experiments.

        Strings in MLflow's queries have no escapes, yet its parser reads a backslash before a quote as one.
        """
        quote = '"' if "'" in name else "'"
        if quote in name or name.endswith("\\"):
            return [run for run in self.search(None, "") if run.info.run_name == name]
        return self.search(None, f"attributes.run_name = {quote}{name}{quote}")

    def set_experiment_tag(self, experiment_id: str, name: str, value: str) -> None:
        """Set a tag of an experiment."""
        self._call(self._client.set_experiment_tag, experiment_id, name, value)


def _last_steps(run: Any) -> dict[str, int]:
    return {metric.key: metric.step for metric in run.data.to_proto().metrics}


def _identity(path: Path) -> tuple[int, int] | None:
    """Return a file's device and inode, by which a replacement is detected; None if there is no file."""
    with contextlib.suppress(OSError):
        stat = path.stat()
        return stat.st_dev, stat.st_ino
    return None


def _refuses(error: Any) -> bool:
    """Return whether MLflow itself refuses the call for good, since its client raises similar errors for a proxy."""
    answer = getattr(error, "json", None)  # the server's answer
    code = answer.get("error_code") if isinstance(answer, dict) else error.error_code
    return code in ("INVALID_PARAMETER_VALUE", "RESOURCE_ALREADY_EXISTS")


def _short(error: Exception) -> str:
    """Return an error in one line of at most 200 characters; the end of a long text has the root cause."""
    text = re.split(_QUERY, hide(str(error)), maxsplit=1)[0]  # hide first, as the cut may split a password
    text = " ".join(text.split())
    return text if len(text) <= 200 else f"{text[:60]} ... {text[-135:]}"


@contextlib.contextmanager
def short_requests(timeout_s: int) -> Iterator[None]:
    """Limit MLflow's calls to one HTTP try of `timeout_s`, without logs, unless the user has set other values.

    MLflow reads these settings from the environment at each call and has no argument for them; it also logs a traceback
    per failure, which rl8x reports in one line. Simultaneous calls of other threads get the same settings.
    """
    global _users
    settings = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0", "MLFLOW_HTTP_REQUEST_TIMEOUT": str(timeout_s)}
    settings["MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT"] = "true"  # the URI may have a password in it
    settings["MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR"] = "false"  # there is one per file
    with _guard:
        _users += 1
        _set_here.update(settings.keys() - os.environ.keys())
        os.environ.update({name: value for name, value in settings.items() if name not in os.environ})
        for log in filter(lambda log: not log.disabled, map(logging.getLogger, _NOISY)):
            log.disabled = True
            _silenced.append(log)
    try:
        yield
    finally:
        with _guard:
            _users -= 1
            while not _users and _set_here:
                os.environ.pop(_set_here.pop(), None)
            while not _users and _silenced:
                _silenced.pop().disabled = False
