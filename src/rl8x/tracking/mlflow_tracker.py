"""Track a run in MLflow: rows go to a journal on the disk, which another process sends to MLflow."""

from __future__ import annotations

import contextlib
import functools
import math
import numbers
import os
import re
import time
import uuid
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any, Final

from rl8x.disk import check_writable
from rl8x.output import shown
from rl8x.tracking.appending import Journal
from rl8x.tracking.artifacts import check_model_names, keep, model_about
from rl8x.tracking.journal import JOURNAL, Op
from rl8x.tracking.location import (
    Location,
    database_beside,
    is_users_own,
    locate,
    mlruns_dir,
    recorded_location,
    user_tracking_uri,
)
from rl8x.tracking.pages import Series, Thinning, sampling_interval
from rl8x.tracking.protocol import (
    HAS_A_RUN,
    NameTable,
    Status,
    TrackingError,
    artifact_name,
    check_status,
    metric_step,
    metric_value,
)
from rl8x.tracking.repeats import JournalRepeats
from rl8x.tracking.runs import HANDLE_PREFIX, Whereabouts, find_journal, has_run, user_run_id
from rl8x.tracking.secrets import hide, logger
from rl8x.tracking.shipping import OpenRun
from rl8x.tracking.store import DEFAULT_EXPERIMENT

_log = logger(__name__)
_ARGUMENTS: Final[dict[str, tuple[Any, str]]] = {
    **dict.fromkeys(("experiment_name", "run_name", "tracking_uri", "run_key"), (str, "a text")),
    "spool_dir": (str | os.PathLike, "a path"),
    **dict.fromkeys(("tags", "params"), (Mapping, "a mapping of names to values")),
    **dict.fromkeys(("system_metrics", "curves"), (bool, "True, False")),
    "thinning": (Thinning, "a Thinning"),
}
_BUSY_WAIT_S = 30.0  # how long a resumed run waits for `rl8x sync` to finish sending its journal


@dataclass(eq=False, repr=False)
class MLflowTracker:
    """Tracks one run in MLflow without losing logged data; training never waits for the store.

    Each call writes a line to a journal on the disk, which another process reads and sends to MLflow, so that MLflow
    does not slow the training. Lines wait while the store is down, and `rl8x sync` sends the rest after the process has
    ended. `start()` begins the run: in the user's active run if there is one, else in the user's tracking URI, else in
    `mlruns/mlflow.db` in the working directory.

    Args:
        experiment_name: Experiment of a new run; default that of MLflow's environment variables, else "rl8x".
        run_name: Name of a new run; MLflow generates one by default.
        tracking_uri: Store to use instead of the user's.
        spool_dir: Folder for journals, default `mlruns/spool` in the working directory.
        tags: Tags for each run that is started, such as `parent_tag(run_id)`.
        params: Params for each run that is started.
        run_key: The run's own key of letters and digits, such as `uuid.uuid4().hex`: a run that any process began
            under this key is resumed instead of beginning another.
        system_metrics: Whether to sample processors, memory and GPUs, as `system/...`; None follows MLflow's variable
            `MLFLOW_ENABLE_SYSTEM_METRICS_LOGGING`.
        curves: Whether the run gets a picture of its learning curves.
        thinning: Selects the rows to send, and keeps all in a file that becomes an artifact; None sends all rows.
        finish_timeout_s: Longest time in seconds that `finish` waits for all data to arrive; a minute more if the
            store has not answered yet, to allow for importing MLflow and creating the database.
        outage_timeout_s: Seconds that `finish` waits for a store that is down. It counts as down when a
            request has failed: at once if nothing listens, after `request_timeout_s` if a server is silent, and after
            5 s if the process that talks to MLflow has been stopped.
        request_timeout_s: Seconds after which an HTTP request has failed; `MLFLOW_HTTP_REQUEST_TIMEOUT` replaces it.
        interval_s: Seconds between two requests, each with the data logged in between.

    Raises:
        TypeError: If an argument has a wrong type.
        ValueError: If a number of seconds is no finite number, or negative, or `run_key` is illegal.

    Attributes:
        resumed_journal: The last folder of the journal of the run to resume, if not in `spool_dir`.
        names_before: The `names` of the run to resume, from the process that began it.
    """

    experiment_name: str | None = None
    run_name: str | None = None
    tracking_uri: str | None = None
    spool_dir: str | os.PathLike[str] | None = None
    tags: Mapping[str, str] | None = None
    _: KW_ONLY
    params: Mapping[str, object] | None = None
    run_key: str | None = None
    system_metrics: bool | None = None
    curves: bool = True
    thinning: Thinning | None = None
    finish_timeout_s: float = 30.0
    outage_timeout_s: float = 5.0
    request_timeout_s: int = 10
    interval_s: float = 1.0

    def __post_init__(self) -> None:
        """Check the arguments; no run begins yet."""
        for name, (kind, legal) in _ARGUMENTS.items():
            value = getattr(self, name)
            if not isinstance(value, kind | None):
                hint = ". Try str(...)" if kind is str else ""
                raise TypeError(f"MLflowTracker: `{name}` must be {legal} or None; got {hide(shown(value))}{hint}.")
        if self.run_key is not None and not re.fullmatch(r"[0-9A-Za-z]{1,100}", self.run_key):
            key = hide(shown(self.run_key))
            raise ValueError(f"MLflowTracker: `run_key` must be 1 to 100 letters of a to z and digits; got {key}.")
        for name in ("finish_timeout_s", "outage_timeout_s", "request_timeout_s", "interval_s"):
            setattr(self, name, _seconds(name, getattr(self, name)))
        self.resumed_journal: Path | None = None
        self._last: OpenRun | None = None  # the last run
        self._run: OpenRun | None = None  # the same run until it is finished
        self._repeats: JournalRepeats | None = None  # set while rows may repeat after a resume
        self._by_server = False  # whether only the store knows the rows that may repeat
        self.names_before: Mapping[str, Mapping[str, str]] = {}
        self._last_time = 0
        self._pid = os.getpid()

    @functools.cached_property
    def _names(self) -> dict[str, NameTable]:
        return _name_tables({})

    @property
    def run_id(self) -> str | None:
        """The ID of the run in MLflow; None until the store has created it."""
        journal = self._journal
        return None if journal is None else journal.ack.run_id or journal.header.get("run_id")

    @property
    def resume_handle(self) -> str | None:
        """The value for `start(resume=...)`: the run's ID, or the journal's until the store has created the run."""
        journal = self._journal
        return None if journal is None else self.run_id or f"{HANDLE_PREFIX}{journal.header['journal_id']}"

    @property
    def location(self) -> str:
        """The address of the store, without secrets."""
        return (locate(self.tracking_uri) if self._last is None else self._last.location).shown

    @property
    def database(self) -> Path | None:
        """The sqlite file of the last run's store; None if there is no run or another kind of store."""
        return None if self._last is None else self._last.location.database

    @property
    def journal_folder(self) -> Path | None:
        """The folder of the run's journal."""
        return None if self._journal is None else self._journal.folder

    @property
    def names(self) -> dict[str, dict[str, str]]:
        """Legal names by the given names that MLflow would refuse, for metrics, params and tags, as plain data."""
        return {kind: table.state for kind, table in self._names.items()}

    def whereabouts(self) -> Whereabouts | None:
        """Return the place of the last run, its unsent part and the reason; None before the first run."""
        run = self._last
        return None if run is None else Whereabouts(run.location, run.journal, run.outage)

    def check(self) -> None:
        """Raise `TrackingError` if the store's address is invalid or its folders cannot be written; changes nothing."""
        location = locate(self.tracking_uri)
        for folder in () if location.database is None else (location.database.parent, self.spool_root):
            try:
                check_writable(folder)
            except OSError as error:
                raise TrackingError(
                    f"runs cannot be kept in {folder} ({error.strerror}): change to a folder that can be written, or "
                    "choose another store by tracking_uri or MLFLOW_TRACKING_URI"
                ) from None
        if location.database is not None and location.database.is_dir():
            raise TrackingError(
                f"runs cannot be kept in {location.database}, a folder: move it, or choose another store"
            )

    def start(
        self,
        *,
        params: Mapping[str, object],
        tags: Mapping[str, str],
        resume: str | None = None,
        repeats: bool = True,
        keeps_status: bool = False,
    ) -> None:
        """Begin a run, or resume one.

        Raises:
            RuntimeError: A run has been started and not finished.
            TrackingError: The store cannot be used, or the run to resume does not exist or is still being written.
        """
        if self._run is not None:
            raise RuntimeError(HAS_A_RUN)
        self._pid = os.getpid()
        if resume is None or self.names_before:
            self._names = _name_tables({} if resume is None else self.names_before)
            self.names_before = {}
        if resume is None and self.run_key is not None:
            resume = HANDLE_PREFIX + self.run_key  # a missing journal or run is created
        if self.thinning is not None:
            self.thinning.begin(new=resume is None, repeats=resume is not None and repeats)
        first = [
            self._texts("params", {**(self.params or {}), **params}),
            self._texts("tags", {**(self.tags or {}), **tags}),
        ]
        going_on = not repeats and resume is not None and self._is_last(resume)
        before = self._repeats if going_on else None  # rows that may still repeat
        journal, location = self._open(resume, self._last if going_on else None)
        self._repeats = before
        if resume is not None:
            self._last_time = max(self._last_time, journal.last_time())  # another clock may have been ahead
            now = self._now()
            self._by_server = (repeats or (going_on and self._by_server)) and (journal.is_new or journal.lacks_rows)
            by_server = self._by_server and (repeats or journal.is_new)
            if repeats and not by_server:
                self._repeats = journal.repeats(now)
            resumes = {"op": "resume", "t": now, "repeats": by_server, "keeps_status": keeps_status}
            first.insert(0, resumes)
        for op in first:
            journal.append(op)
        self._last = self._run = OpenRun(
            journal,
            location,
            owner=self,
            keeps_status=keeps_status,
            finish_timeout_s=self.finish_timeout_s,
            outage_timeout_s=self.outage_timeout_s,
            timeout_s=self.request_timeout_s,
            interval_s=self.interval_s,
            fresh=resume is None,
            sample=sampling_interval(self.system_metrics, owns=journal.header["owns"]),
        )

    @property
    def _journal(self) -> Journal | None:
        return None if self._last is None else self._last.journal

    def _open(self, resume: str | None, before: OpenRun | None) -> tuple[Journal, Location]:
        """Create a new run's journal, or open or create that of a resumed run, maybe this tracker's last (`before`)."""
        header = self._new_header()
        active = user_run_id(self.tracking_uri) if resume is None else None
        if active is not None:
            run_id, uri = active
            return self._create({**header, "run_id": run_id, "owns": False}, locate(uri))
        if resume is None:
            return self._create(header, locate(self.tracking_uri))
        journal = self._reopened(resume)
        own = before.location if before is not None else None  # even if the user has chosen another store since
        if journal is not None:
            try:
                return journal, own or self._location_of(journal)
            except TrackingError:
                journal.close()
                raise
        # The journal was sent and removed.
        location = own or locate(self.tracking_uri)
        if before is not None:
            header["owns"] = before.journal.header["owns"]
        if resume.startswith(HANDLE_PREFIX):
            return self._create({**header, "journal_id": resume.removeprefix(HANDLE_PREFIX)}, location)
        if location.database is not None and not has_run(location, resume):  # the shipper checks other stores
            raise TrackingError(
                f"there is no run {resume!r} in {location.shown} (any more): name the store that has it by "
                "tracking_uri or MLFLOW_TRACKING_URI, or go on untracked, by Trainer.resume(..., tracker=NullTracker())"
            )
        if self.run_key is not None and not (self.spool_root / self.run_key).exists():
            header["journal_id"] = self.run_key  # so that a journal left by a killed process is found by the key too
        return self._create({**header, "run_id": resume}, location)

    def _is_last(self, handle: str) -> bool:
        """Whether a handle names this tracker's last run, by the run's ID or by the journal's."""
        journal = self._journal
        return journal is not None and handle in (self.run_id, f"{HANDLE_PREFIX}{journal.header['journal_id']}")

    def _new_header(self) -> Op:
        """Return the header of a new journal; the experiment defaults to the one that MLflow's variables name."""
        name = self.experiment_name or os.environ.get("MLFLOW_EXPERIMENT_NAME")
        chosen_store = self.tracking_uri or user_tracking_uri()
        experiment_id = os.environ.get("MLFLOW_EXPERIMENT_ID") if name is None and chosen_store else None
        return {
            "op": "open",
            "version": 1,
            "journal_id": uuid.uuid4().hex,
            "writer": uuid.uuid4().hex,
            "t": self._now(),
            "experiment": name or DEFAULT_EXPERIMENT,
            "experiment_id": experiment_id or None,
            "run_name": self.run_name,
            "owns": True,
        }

    def _create(self, header: Op, location: Location) -> tuple[Journal, Location]:
        database = database_beside(self.spool_root / str(header["journal_id"]), location.database)
        return Journal.create(self.spool_root, {**header, "uri": location.shown, "database": database}), location

    def _reopened(self, handle: str) -> Journal | None:
        """Open the journal of a run to resume; None if there is none. Waits while `rl8x sync` is sending it."""
        last = self.journal_folder if self._is_last(handle) else None
        roots = [*(journal.parent for journal in (last, self.resumed_journal) if journal is not None), self.spool_root]
        folder = next((found for root in roots if (found := find_journal(root, handle)) is not None), None)
        if folder is None:
            return None
        try:
            return Journal.open(folder, _BUSY_WAIT_S)
        except TrackingError:
            if (folder / JOURNAL).exists():
                raise
            return None  # sent and removed in the meantime

    def _location_of(self, journal: Journal) -> Location:
        """Return the store of an existing journal: the one that the user chose, else the one recorded in it."""
        chosen = self.tracking_uri or user_tracking_uri()
        if chosen is not None:
            return locate(chosen)
        location = recorded_location(journal.folder, str(journal.header["uri"]), journal.header)
        if not is_users_own(location, journal.folder):
            shown = location.shown
            raise TrackingError(f"the run was kept in {shown}: to go on with it there, name it by tracking_uri")
        return location

    @property
    def spool_root(self) -> Path:
        """The folder for journals."""
        return Path(self.spool_dir).absolute() if self.spool_dir is not None else mlruns_dir() / "spool"

    def finish(self, status: Status) -> None:
        """End the run and send the rest, without waiting long for a store that is down; see `Tracker.finish`."""
        check_status(status)
        run = self._own_run
        if run is None:
            return
        if self.thinning is not None:  # log held-back points within the limits, and the file of all rows
            for step, time_ms, points in self.thinning.rest():
                self._log_row(step, time_ms, points)
            if self.thinning.path.exists():
                self.log_artifact(self.thinning.path)
        self._run = None
        run.end(status, self._now())
        run.finish()

    def flush(self, timeout_s: float = 30.0) -> bool:
        """Wait until everything that was logged has arrived; return False if it does not in time."""
        run = self._own_run
        if run is None:
            return True
        run.journal.sync_to_disk()
        return run.wait(run.journal.mark(), timeout_s, min(timeout_s, self.outage_timeout_s))

    def sync_to_disk(self) -> None:
        """Make logged data survive a power cut; any thread may call this."""
        run = self._own_run
        if run is not None:
            if self.thinning is not None:
                self.thinning.sync()
            run.journal.sync_to_disk()

    @property
    def _own_run(self) -> OpenRun | None:
        """The run; None in a forked child, which has a copy of this object while the run belongs to its parent."""
        return self._run if os.getpid() == self._pid else None

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        """Log one row; a name that MLflow would refuse is replaced by a unique legal name, with a warning.

        Raises:
            TypeError: A value is not a number, a name not a string, or the step not an integer.
            ValueError: A name has nothing but slashes, or the step does not fit into 64 bits.
        """
        metrics = self._names["metric"].legal(metrics)
        # `type(...) is float` spares most values the call
        row = {name: value if type(value) is float else metric_value(name, value) for name, value in metrics.items()}
        time_ms, at = self._now(), metric_step(step)
        if self.thinning is not None and self._own_run is not None:
            row = self.thinning.take(at, time_ms, row)
        if row:
            self._log_row(at, time_ms, row)

    def _log_row(self, step: int, time_ms: int, row: dict[str, float]) -> None:
        """Append a row, without points that repeat after a resume."""
        repeats = self._repeats
        if repeats is None:
            self._append({"op": "m", "t": time_ms, "s": step, "m": row})
            return
        left = repeats.left
        rows = repeats.new_rows((step, time_ms, row))
        if repeats.left is not None and repeats.left != left:
            self._append({"op": "left", "s": repeats.left.step, "t": repeats.left.before})
        for at, when, points in rows:
            self._append({"op": "m", "t": when, "s": at, "m": points})

    def log_params(self, params: Mapping[str, object]) -> None:
        """Add hyperparameters. A param with a different value keeps it, and a tag records the new value."""
        if params:
            self._append(self._texts("params", params))

    def set_tags(self, tags: Mapping[str, str]) -> None:
        """Set tags; a tag set before is replaced."""
        if tags:
            self._append(self._texts("tags", tags))

    def _texts(self, kind: str, values: Mapping[str, object]) -> Op:
        """Return the op that logs params or tags."""
        named = self._names[kind.rstrip("s")].legal(values)
        return {"op": kind, kind: {name: _text(value) for name, value in named.items()}}

    def describe(self, text: str, folder: str | None = None) -> None:
        """Describe the run on its page, in Markdown; a description that the user wrote or changed stays."""
        self._append({"op": "describe", "text": text, "folder": folder})

    def log_artifact(self, path: str | os.PathLike[str], artifact_path: str | None = None) -> None:
        """Log a copy of the current file or folder, without journals and artifacts of runs inside it.

        Raises:
            FileNotFoundError: The file or folder does not exist.
            TrackingError: `artifact_path` leads out of the run's artifacts.
        """
        source = Path(path)
        to = None if artifact_path is None else artifact_name(artifact_path)
        if not os.fspath(path) or not source.exists():
            raise FileNotFoundError(f"no such file to log as an artifact: {os.fspath(path)!r}")
        artifact_name(source.absolute().name)
        file = self._kept(source)
        if file is not None:
            self._append({"op": "artifact", "file": file, "to": to})

    def log_model(
        self,
        path: str | os.PathLike[str],
        description: Mapping[str, object],
        *,
        name: str,
        step: int,
        metrics: Mapping[str, float],
        register: str | None = None,
        alias: str | None = None,
    ) -> None:
        """Log the current file of a policy as an MLflow model.

        Args:
            path: The file that `Policy.save` wrote.
            description: The model's description by `artifacts.describe_model`.
            name: Name of the model, without `/ : . % " '`.
            step: The step of the clock at which the policy was saved.
            metrics: Metrics at that step; MLflow can rank the models of an experiment by them.
            register: Name of a registered model that gets this model as a new version.
            alias: Alias of that version, such as `champion`, for `models:/NAME@champion`.

        Raises:
            RuntimeError: If no run is active.
            ValueError: If MLflow would refuse one of the names.
        """
        check_model_names(name, register, alias)
        file = self._kept(Path(path))
        if file is None:
            return
        finite = {metric: float(value) for metric, value in metrics.items() if math.isfinite(value)}
        about = model_about(
            description,
            key=f"{self._running().journal.header['journal_id']}/{file.split('/')[1]}",
            name=name,
            step=metric_step(step),
            metrics=dict(self._names["metric"].legal(finite)),
            register=register,
            alias=alias,
        )
        self._append({"op": "model", "file": file, "about": about})

    def _kept(self, source: Path) -> str | None:
        """Copy a file or folder to the journal and return its path there; None if the disk refuses, or in a fork."""
        run = self._running()
        if run is not self._own_run:
            return None
        try:
            artifacts = run.location.artifact_root
            return keep(run.journal.folder, source.absolute(), [] if artifacts is None else [artifacts])
        except OSError as error:
            _log.warning("tracking: the artifact %s is not logged, as it cannot be copied (%s)", source, error)
            return None

    def log_text(self, text: str, artifact_file: str) -> None:
        """Log a text as an artifact; raise `TrackingError` if its name leads out of the run's artifacts."""
        self._append({"op": "text", "to": artifact_name(artifact_file), "text": text})

    def log_curves(self, series: Series, title: str, clock: str) -> None:
        """Have the shipper draw learning curves and log them as an artifact.

        Args:
            series: (step, value) pairs by the curve's name; see `rl8x.tracking.pages`.
            title: Title of the picture.
            clock: Name of the counter that gives the steps.
        """
        if self.curves:
            self._append({"op": "curves", "series": series, "title": title, "clock": clock})

    def _running(self) -> OpenRun:
        if self._run is None:
            raise RuntimeError("the tracker has no run; call start() first")
        return self._run

    def _append(self, op: Op) -> None:
        run = self._running()
        if run is self._own_run:
            run.append(op)

    def _now(self) -> int:
        """Return milliseconds since 1970, strictly increasing: MLflow merges equal values of one step and time."""
        self._last_time = max(self._last_time + 1, time.time_ns() // 1_000_000)
        return self._last_time


def _seconds(name: str, value: Any) -> float:
    """Return an argument, which may be NumPy's number, as a Python number; `rl8x.plain` would import torch for it."""
    with contextlib.suppress(OverflowError):
        if isinstance(value, numbers.Real) and not isinstance(value, bool) and 0 <= float(value) < math.inf:
            return int(value) if isinstance(value, numbers.Integral) else float(value)
    raise ValueError(f"MLflowTracker: `{name}` must be a finite number, at least 0; got {shown(value)}.")


def _text(value: object) -> str:
    """Return a param as text; one without a text, such as an int of 5,000 digits, does not end the run."""
    try:
        return str(value)
    except Exception as error:
        return f"{type(value).__name__} that cannot be written ({type(error).__name__})"


def _name_tables(before: Mapping[str, Mapping[str, str]]) -> dict[str, NameTable]:
    """Return a table for each kind of name; only that of metrics warns of each change, as others may be many."""
    return {kind: NameTable("metric" * (kind == "metric"), before.get(kind, {})) for kind in ("metric", "param", "tag")}
