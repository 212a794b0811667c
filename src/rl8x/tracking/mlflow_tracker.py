"""Keep a run in MLflow: rows go to a journal on the disk, which another process sends to MLflow."""

from __future__ import annotations

import math
import os
import time
import uuid
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from pathlib import Path

from rl8x.disk import check_writable
from rl8x.tracking.appending import Journal
from rl8x.tracking.artifacts import check_model_names, keep, model_about
from rl8x.tracking.journal import JOURNAL, Op
from rl8x.tracking.location import (
    Location,
    beside,
    is_users_own,
    locate,
    mlruns_dir,
    recorded_location,
    user_tracking_uri,
)
from rl8x.tracking.pages import Series, Thinning, interval, is_asked_for
from rl8x.tracking.protocol import (
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
from rl8x.tracking.secrets import logger
from rl8x.tracking.shipping import OpenRun
from rl8x.tracking.store import DEFAULT_EXPERIMENT

_log = logger(__name__)
_BUSY_WAIT_S = 30.0  # how long a run that is gone on with waits for `rl8x sync` to be through with its spool


@dataclass(eq=False, repr=False)
class MLflowTracker:
    """Keeps one run in MLflow; nothing that was logged is lost, and training never waits for the store.

    Each call writes a line to a journal on the disk, which another process reads and sends to MLflow, so that MLflow
    takes nothing from the training. While the store is away the lines wait, and `rl8x sync` sends what is left when
    the process has ended. `start()` begins the run: in the user's active run if there is one, else in the user's
    tracking URI, else in `mlruns/mlflow.db` in the working directory.

    Args:
        experiment_name: Experiment of a new run; default that of MLflow's environment variables, else "rl8x".
        run_name: Name of a new run; MLflow makes one up by default.
        tracking_uri: Store to use instead of the user's.
        spool_dir: Folder for spools, default `mlruns/spool` in the working directory.
        tags: Tags for each run that is started, such as `parent_tag(run_id)`.
        params: Params for each run that is started.
        run_key: The run's own key, such as `uuid.uuid4().hex`: a run that was begun under it, in whichever process, is
            gone on with instead of beginning another.
        system_metrics: Whether processors, memory and GPUs are sampled, as `system/...`; None is what MLflow's
            variable `MLFLOW_ENABLE_SYSTEM_METRICS_LOGGING` says.
        curves: Whether the run gets a picture of its learning curves.
        thinning: Which rows are sent, and where all are kept, as the artifact of that name; None sends all.
        finish_timeout_s: Seconds that `finish` waits at most until all has arrived; a minute more where the store has
            not answered yet, since MLflow is being imported and the database made.
        outage_timeout_s: Seconds that `finish` waits for a store that is down. It counts as down when a
            request has failed: at once if nothing listens, after `request_timeout_s` if a server is silent, and after
            5 s if the process that talks to MLflow has been stopped.
        request_timeout_s: Seconds after which an HTTP request has failed; `MLFLOW_HTTP_REQUEST_TIMEOUT` replaces it.
        interval_s: Seconds between two requests with what was logged in between.

    Raises:
        TypeError: If a name is not a text.
        ValueError: If a number of seconds is negative or infinite.

    Attributes:
        resumed_spool: Where the spool of the run to resume was last, if not in `spool_dir`.
        names_before: The `names` of the run to resume, as the process that began it had them.
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
        """Begin without a run; raise where a name is no text, or a number of seconds is none."""
        for name in ("experiment_name", "run_name", "tracking_uri", "run_key"):
            if not isinstance(text := getattr(self, name), str | None):
                raise TypeError(f"MLflowTracker: `{name}` must be a text or None; got {text!r}. Try str(...).")
        for name in ("finish_timeout_s", "outage_timeout_s", "request_timeout_s", "interval_s"):
            seconds = getattr(self, name)
            if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 <= seconds < math.inf:
                raise ValueError(f"MLflowTracker: `{name}` must be seconds, at least 0; got {seconds!r}.")
        self.resumed_spool: Path | None = None
        self._last: OpenRun | None = None  # the last run
        self._run: OpenRun | None = None  # that one, while it goes on
        self._repeats: JournalRepeats | None = None  # while rows may come again
        self._by_server = False  # where the store alone knows which
        self.names_before: Mapping[str, Mapping[str, str]] = {}
        self._names = _name_tables({})
        self._last_time = 0
        self._pid = os.getpid()

    @property
    def run_id(self) -> str | None:
        """The ID of the run in MLflow; None until the store has made it."""
        journal = self._journal
        return None if journal is None else journal.ack.run_id or journal.header.get("run_id")

    @property
    def resume_handle(self) -> str | None:
        """The value for `start(resume=...)`: the run's ID, or the journal's while the store has not made the run."""
        journal = self._journal
        return None if journal is None else self.run_id or f"{HANDLE_PREFIX}{journal.header['spool_id']}"

    @property
    def location(self) -> str:
        """The address of the store, without secrets."""
        return (locate(self.tracking_uri) if self._last is None else self._last.location).shown

    @property
    def database(self) -> Path | None:
        """The file that the last run is kept in; None where it is kept otherwise."""
        return None if self._last is None else self._last.location.database

    @property
    def spool_folder(self) -> Path | None:
        """The folder of the run's journal."""
        return None if self._journal is None else self._journal.folder

    @property
    def names(self) -> dict[str, dict[str, str]]:
        """The names that MLflow takes of those that it does not take, of metrics, params and tags, as plain data."""
        return {kind: table.state for kind, table in self._names.items()}

    def whereabouts(self) -> Whereabouts | None:
        """Describe where the last run is, and what of it has not arrived and why; None before the first run."""
        run = self._last
        return None if run is None else Whereabouts(run.location, run.journal, run.outage)

    def check(self) -> None:
        """Raise `TrackingError` where the store cannot be written; touches nothing."""
        location = locate(self.tracking_uri)
        for folder in () if location.database is None else (location.database.parent, self.spool_root):
            try:
                check_writable(folder)
            except OSError as error:
                raise TrackingError(
                    f"runs cannot be kept in {folder} ({error.strerror}): change to a folder that can be written, or "
                    "choose another store by tracking_uri or MLFLOW_TRACKING_URI"
                ) from None

    def start(
        self,
        *,
        params: Mapping[str, object],
        tags: Mapping[str, str],
        resume: str | None = None,
        repeats: bool = True,
        keeps_status: bool = False,
    ) -> None:
        """Begin a run, or go on with one.

        Raises:
            RuntimeError: A run has been started and not finished.
            TrackingError: The store cannot be used, or the run to resume is not there or still being written.
        """
        if self._run is not None:
            raise RuntimeError("this tracker has a run already; call finish() before the next start()")
        self._pid = os.getpid()
        if resume is None or self.names_before:
            self._names = _name_tables({} if resume is None else self.names_before)
            self.names_before = {}
        if resume is None and self.run_key is not None:
            resume = HANDLE_PREFIX + self.run_key  # a missing spool or run is made
        first = [
            self._texts("params", {**(self.params or {}), **params}),
            self._texts("tags", {**(self.tags or {}), **tags}),
        ]
        going_on = not repeats and resume is not None and self._is_last(resume)
        before = self._repeats if going_on else None  # what had not come again yet
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
            sample=interval() if is_asked_for(self.system_metrics, owns=journal.header["owns"]) else None,
        )
        if self.thinning is not None:
            self.thinning.begin(repeats=resume is not None and repeats)

    @property
    def _journal(self) -> Journal | None:
        return None if self._last is None else self._last.journal

    def _open(self, resume: str | None, before: OpenRun | None) -> tuple[Journal, Location]:
        """Make the journal of a new run, or open or make that of a run to resume, which may be this tracker's last."""
        header = self._new_header()
        active = user_run_id(self.tracking_uri) if resume is None else None
        if active is not None:
            run_id, uri = active
            return self._create({**header, "run_id": run_id, "owns": False}, locate(uri))
        if resume is None:
            return self._create(header, locate(self.tracking_uri))
        journal = self._reopened(resume)
        own = before.location if before is not None else None  # whatever the user has chosen since
        if journal is not None:
            try:
                return journal, own or self._location_of(journal)
            except TrackingError:
                journal.close()
                raise
        # It was sent and removed.
        location = own or locate(self.tracking_uri)
        if before is not None:
            header["owns"] = before.journal.header["owns"]
        if resume.startswith(HANDLE_PREFIX):
            return self._create({**header, "spool_id": resume.removeprefix(HANDLE_PREFIX)}, location)
        if location.database is not None and not has_run(location, resume):  # the shipper checks other stores
            raise TrackingError(
                f"there is no run {resume!r} in {location.shown} (any more): name the store that has it by "
                "tracking_uri or MLFLOW_TRACKING_URI, or go on untracked, by Trainer.resume(..., tracker=NullTracker())"
            )
        if self.run_key is not None and not (self.spool_root / self.run_key).exists():
            header["spool_id"] = self.run_key  # what a killed process leaves is then found by the key too
        return self._create({**header, "run_id": resume}, location)

    def _is_last(self, handle: str) -> bool:
        """Whether a handle is of this tracker's last run, which has another one once the store has made it."""
        journal = self._journal
        return journal is not None and handle in (self.run_id, f"{HANDLE_PREFIX}{journal.header['spool_id']}")

    def _new_header(self) -> Op:
        """Return the header of a journal that is made now, with the experiment that MLflow's variables name."""
        name = self.experiment_name or os.environ.get("MLFLOW_EXPERIMENT_NAME")
        chosen_store = self.tracking_uri or user_tracking_uri()
        experiment_id = os.environ.get("MLFLOW_EXPERIMENT_ID") if name is None and chosen_store else None
        return {
            "op": "open",
            "version": 1,
            "spool_id": uuid.uuid4().hex,
            "writer": uuid.uuid4().hex,
            "t": self._now(),
            "experiment": name or DEFAULT_EXPERIMENT,
            "experiment_id": experiment_id or None,
            "run_name": self.run_name,
            "owns": True,
        }

    def _create(self, header: Op, location: Location) -> tuple[Journal, Location]:
        database = beside(self.spool_root / str(header["spool_id"]), location.database)
        return Journal.create(self.spool_root, {**header, "uri": location.shown, "database": database}), location

    def _reopened(self, handle: str) -> Journal | None:
        """Open the journal of a run to resume, if there is one; wait where `rl8x sync` sends it just now."""
        last = self.spool_folder if self._is_last(handle) else None
        roots = [*(spool.parent for spool in (last, self.resumed_spool) if spool is not None), self.spool_root]
        folder = next((found for root in roots if (found := find_journal(root, handle)) is not None), None)
        if folder is None:
            return None
        try:
            return Journal.open(folder, _BUSY_WAIT_S)
        except TrackingError:
            if (folder / JOURNAL).exists():
                raise
            return None  # it was sent and removed meanwhile

    def _location_of(self, journal: Journal) -> Location:
        """Find the store for a journal that is there: the one that the user chose, else the one it was made for."""
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
        """The folder for spools."""
        return Path(self.spool_dir).absolute() if self.spool_dir is not None else mlruns_dir() / "spool"

    def finish(self, status: Status) -> None:
        """End the run: send the rest, but do not wait long for a store that is away; see `Tracker.finish`."""
        check_status(status)
        run = self._own_run
        if run is None:
            return
        if self.thinning is not None:  # what was held back, as far as the limits allow, and the file of all rows
            for step, time_ms, points in self.thinning.rest():
                self._log_row(step, time_ms, points)
            if self.thinning.path.exists():
                self.log_artifact(self.thinning.path)
        self._run = None
        run.end(status, self._now())
        run.finish()

    def flush(self, timeout_s: float = 30.0) -> bool:
        """Wait until all that was logged has arrived; False where it has not in time."""
        run = self._own_run
        if run is None:
            return True
        run.journal.sync_to_disk()
        return run.wait(run.journal.mark(), timeout_s, min(timeout_s, self.outage_timeout_s))

    def sync_to_disk(self) -> None:
        """Make what was logged survive a power cut; may be called by any thread."""
        run = self._own_run
        if run is not None:
            if self.thinning is not None:
                self.thinning.sync()
            run.journal.sync_to_disk()

    @property
    def _own_run(self) -> OpenRun | None:
        """The run; None in a forked child, which has a copy of this object, but the run is its parent's."""
        return self._run if os.getpid() == self._pid else None

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        """Log one row; a name that MLflow does not take is logged under one of its own that it takes, with a warning.

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
        """Append a row, without what comes again after a resume."""
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
        """Add hyperparameters. One that has another value already keeps it, and a tag has the new value."""
        if params:
            self._append(self._texts("params", params))

    def set_tags(self, tags: Mapping[str, str]) -> None:
        """Set tags; a tag set before is replaced."""
        if tags:
            self._append(self._texts("tags", tags))

    def _texts(self, kind: str, values: Mapping[str, object]) -> Op:
        """Make the op of params or tags."""
        named = self._names[kind.rstrip("s")].legal(values)
        return {"op": kind, kind: {name: _text(value) for name, value in named.items()}}

    def describe(self, text: str, folder: str | None = None) -> None:
        """Describe the run on its page, in Markdown; a description that the user gave or changed stays."""
        self._append({"op": "describe", "text": text, "folder": folder})

    def log_artifact(self, path: str | os.PathLike[str], artifact_path: str | None = None) -> None:
        """Keep a copy of a file or folder, as it is now, without the spools and the artifacts of runs in it.

        Raises:
            FileNotFoundError: It is not there.
            TrackingError: `artifact_path` leads out of the run's artifacts.
        """
        source = Path(path)
        to = None if artifact_path is None else artifact_name(artifact_path)
        if not source.exists():
            raise FileNotFoundError(f"no such file to log as an artifact: {source}")
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
        """Keep the file of a policy, as it is now, as a model of MLflow's.

        Args:
            path: The file that `Policy.save` wrote.
            description: The model's description by `artifacts.describe_model`.
            name: What the model is called, without `/ : . % " '`.
            step: The step of the clock at which the policy was as it is.
            metrics: What was measured then; the models of an experiment can be ranked by it.
            register: A name in the model registry of which it becomes a version.
            alias: What that version is called, such as `champion`, for `models:/NAME@champion`.

        Raises:
            RuntimeError: If no run goes on.
            ValueError: If MLflow would refuse one of the names.
        """
        check_model_names(name, register, alias)
        file = self._kept(Path(path))
        if file is None:
            return
        finite = {metric: float(value) for metric, value in metrics.items() if math.isfinite(value)}
        about = model_about(
            description,
            key=f"{self._running().header['spool_id']}/{file.split('/')[1]}",
            name=name,
            step=metric_step(step),
            metrics=dict(self._names["metric"].legal(finite)),
            register=register,
            alias=alias,
        )
        self._append({"op": "model", "file": file, "about": about})

    def _kept(self, source: Path) -> str | None:
        """Copy a file or folder to the journal and return its name there; None where the disk refuses, or in a fork."""
        self._running()
        run = self._own_run
        if run is None:
            return None
        try:
            artifacts = run.location.artifact_root
            return keep(run.journal.folder, source.absolute(), [] if artifacts is None else [artifacts])
        except OSError as error:
            _log.warning("tracking: the artifact %s is not logged, it cannot be copied to the spool: %s", source, error)
            return None

    def log_text(self, text: str, artifact_file: str) -> None:
        """Keep a text as an artifact; raises `TrackingError` where its name leads out of the run's artifacts."""
        self._append({"op": "text", "to": artifact_name(artifact_file), "text": text})

    def log_curves(self, series: Series, title: str, clock: str) -> None:
        """Have learning curves drawn and kept as an artifact.

        Args:
            series: (step, value) pairs by a curve's name; see `rl8x.tracking.pages`.
            title: Title of the picture.
            clock: Name of the counter that the steps are of.
        """
        if self.curves:
            self._append({"op": "curves", "series": series, "title": title, "clock": clock})

    def _running(self) -> Journal:
        run = self._run
        if run is None:
            raise RuntimeError("the tracker has no run; call start() first")
        return run.journal

    def _append(self, op: Op) -> None:
        self._running()
        if self._own_run is not None:
            self._own_run.append(op)

    def _now(self) -> int:
        """Return milliseconds since 1970, always more than before: of one step and time MLflow keeps a value once."""
        self._last_time = max(self._last_time + 1, time.time_ns() // 1_000_000)
        return self._last_time


def _text(value: object) -> str:
    """Write a param; one that cannot be written, such as an int of 5,000 digits, is no reason to end a run."""
    try:
        return str(value)
    except Exception as error:
        return f"{type(value).__name__} that cannot be written ({type(error).__name__})"


def _name_tables(before: Mapping[str, Mapping[str, str]]) -> dict[str, NameTable]:
    """Return a table for each kind of name; those of params and tags, of which there may be many, warn less."""
    return {kind: NameTable("metric" * (kind == "metric"), before.get(kind, {})) for kind in ("metric", "param", "tag")}
