"""Send a spool to a store, in order, and acknowledge what has arrived: for the writer thread and for `rl8x sync`."""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from rl8x.tracking.attempts import TRIES, Attempts, NotNowError
from rl8x.tracking.entries import digest, fitted, name_of
from rl8x.tracking.known_points import KnownPoints
from rl8x.tracking.names import MAX_TAG_LENGTH, artifact_name, legal_name, metric_step
from rl8x.tracking.protocol import STATUSES, TrackingError
from rl8x.tracking.secrets import logger
from rl8x.tracking.spool import Spool
from rl8x.tracking.spool_files import FILES, Op
from rl8x.tracking.store import (
    DEFAULT_EXPERIMENT,
    MAX_METRICS,
    MAX_PARAMS,
    SPOOL_TAG,
    Point,
    RunSpec,
    Store,
    StoreDownError,
    StoreRefusedError,
)

_log = logger(__name__)

PARAM_CHANGE_TAG = "rl8x.param_change."
STATUS_TAG = "rl8x.status"
RESUMED_TAG = "rl8x.resumed_from"
NAME_TAG = "mlflow.runName"
NOTE_TAG = "mlflow.note.content"  # what MLflow's page shows as the run's description
NOTE_DIGEST_TAG = "rl8x.description"
NAME_TRIES = 3


class Sender:
    """Sends one spool.

    Replaying is safe: a store keeps one row for the same name, step, timestamp and value, so that what was sent but not
    acknowledged may be sent again. An entry that the store does not take, whatever its kind, is set aside after some
    tries, and all others go on. `on_arrival` is called whenever something has arrived.

    Args:
        spool: What to send.
        connect: Makes the store, when it is first needed.
        fresh: The spool has just been made, so that the store cannot have a run for it.
        known: What the run had when it was resumed, where another spool of this process began with that.
        late: The process that wrote the spool is gone, so that another one may have gone on with the run since, and
            ended it: what that one said stays, and rows that it logged too are not logged again.

    Attributes:
        known: What the run had when it was resumed; None where it was not, or nothing has been compared yet.
    """

    def __init__(
        self,
        spool: Spool,
        connect: Callable[[], Store],
        *,
        fresh: bool = False,
        known: KnownPoints | None = None,
        late: bool = False,
    ) -> None:
        self.spool = spool
        self.on_arrival: Callable[[], None] = lambda: None
        self.num_rows = 0
        self._connect = connect
        self._store: Store | None = None
        self._fresh = fresh
        self.known = known
        self._late = late
        self._is_over = False
        self._repeats = False
        self._points: list[Point] = []
        self._upto: int | None = None
        self._lines = 0
        self._rows = 0
        self._attempts = Attempts()
        self._aside: list[tuple[Op, str]] = []
        self._named: set[str] = set()
        self._name_tries = 0

    @property
    def store(self) -> Store:
        """The store; reached for at the first use."""
        if self._store is None:
            self._store = self._connect()
        return self._store

    @property
    def run_id(self) -> str:
        """The run in the store, once there is one."""
        assert self.spool.ack.run_id is not None
        return self.spool.ack.run_id

    def send_some(self) -> None:
        """Make sure that there is a run, then send and acknowledge about a megabyte of the spool.

        Raises:
            StoreDownError: The store does not work now; call again later.
        """
        try:
            self._aside = []
            self._ensure_run()
            self._look_for_others()
            self._learn_name()
            self._points, self._lines, self._rows = [], 0, 0
            if self.known is not None:
                self.known.forget_unsent()
            for op, offset in self.spool.read().ops:
                if op["op"] == "m":
                    self._gather(op, offset)
                else:
                    self._send_points()
                    changes = self._apply(op)
                    discard = op["op"] == "artifact" and not self._is_aside(op)
                    self.spool.rejected.replaced_by(op)
                    self._done(offset, 1, **changes)
                    if discard:
                        self._discard_file(op)
            self._send_points()
        except NotNowError as error:
            self._attempts.failures += error.of_entry
            raise
        except StoreRefusedError as error:
            raise StoreDownError(str(error)) from error
        finally:
            self.spool.give_back()
        self.spool.compact()

    def send_all(self) -> None:
        """Send the whole spool, and try again what was set aside.

        Raises:
            StoreDownError: The store does not work now.
        """
        while True:
            try:
                self.send_some()
            except NotNowError as error:
                if not error.of_entry:
                    raise
                continue
            if not self.spool.pending:
                break
        self._retry()

    def _retry(self) -> None:
        """Try once more what was set aside, and keep what is refused again."""
        ops = self.spool.rejected.entries
        if not ops:
            return
        self._aside = []
        self._attempts.failures = TRIES
        points: list[Point] = []
        # Anew, as the run may have got in a repeated row what was set aside of the first.
        self.known = None
        for op in ops:
            if op["op"] == "m":
                points += self._not_repeated(op, self._parsed(op))
            else:
                self._apply({**op, "op": "rename"} if op["op"] == "open" else op)
        self._log_points(points)
        self._attempts.failures = 0
        kept = [(op if op["op"] != "rename" else {**op, "op": "open"}, reason) for op, reason in self._aside]
        for op in ops:
            if op["op"] == "artifact" and not self._is_aside(op):
                self._discard_file(op)
        self.spool.rejected.replace(kept)
        self._aside = []

    def _is_aside(self, op: Op) -> bool:
        return any(other is op for other, _ in self._aside)

    def _done(self, offset: int | None, lines: int, **changes: Any) -> None:
        for op, reason in self._aside:
            self.spool.reject(op, reason)
            what = name_of(op)
            if what not in self._named:
                self._named.add(what)
                where = f"it is in {self.spool.rejected.path}, and `rl8x sync` tries it again"
                _log.warning("tracking: %s could not be logged (%s) and is set aside: %s", what, reason, where)
        self._aside = []
        self._attempts.failures = 0
        self.spool.acknowledge(offset, lines=lines if offset is None else 0, **changes)
        self.on_arrival()

    def _set_aside(self, op: Op, error: Exception) -> None:
        if isinstance(error, KeyError):
            reason = f"it has no {error}"
        elif isinstance(error, StoreDownError | StoreRefusedError | ValueError | TypeError):
            reason = str(error)
        else:
            reason = f"{type(error).__name__}: {error}"
        self._aside.append((op, reason))

    # Whether the store works.

    def _check_run(self) -> None:
        self.store.check_run(self.run_id)

    def _check_writes(self) -> None:
        """Write what is there already, by the same kind of request as metrics, params and tags."""
        self._check_run()
        spool_id = self.store.tags(self.run_id).get(SPOOL_TAG, str(self.spool.header["spool_id"]))
        self.store.set_tags(self.run_id, {SPOOL_TAG: spool_id})

    # The run.

    def _spec(self) -> RunSpec:
        header = self.spool.header
        return RunSpec(
            spool_id=header["spool_id"],
            experiment=header.get("experiment"),
            experiment_id=header.get("experiment_id"),
            run_name=header.get("run_name"),
            start_time=header["t"],
        )

    def _ensure_run(self) -> None:
        """Find or make the run. `create_run` is not idempotent: once one was asked for, look before asking again."""
        if self.spool.ack.run_id is not None:
            return
        run_id = self.spool.header.get("run_id")
        if run_id is None:
            may_exist = self.spool.ack.attempted or not self._fresh
            found = self.store.find_runs(self._spec()) if may_exist else []
            if found:
                run_id = found[0]
            else:
                self.spool.acknowledge(attempted=True)
                run_id = self._create_run()
            if may_exist:
                self._delete_ghosts(run_id)
        else:
            self.store.check_run(run_id)
        self.spool.acknowledge(run_id=run_id, attempted=False)

    def _look_for_others(self) -> None:
        """See once what became of the run since the spool was written."""
        if not self._late:
            return
        self._repeats = RESUMED_TAG in self.store.tags(self.run_id)
        if self._owns:
            status, end_time = self.store.status(self.run_id)
            ended_later = end_time is None or end_time >= self.spool.last_time()
            self._is_over = status in STATUSES and ended_later
        self._late = False

    def _create_run(self) -> str:
        """Make the run; where the store refuses its name or its experiment, without them, so that its rows arrive."""
        spec = self._spec()
        unnamed = spec._replace(run_name=None)
        plain = unnamed._replace(experiment=DEFAULT_EXPERIMENT, experiment_id=None)
        refused: StoreRefusedError | None = None
        for candidate in (spec, unnamed, plain):
            for _ in range(TRIES):
                try:
                    run_id = self.store.create_run(candidate)
                except StoreRefusedError as error:
                    refused = refused or error
                    continue
                if refused is not None:
                    of_run = {"run_name": spec.run_name, "experiment": spec.experiment if candidate == plain else None}
                    self._set_aside({"op": "open", **of_run}, refused)
                return run_id
        raise StoreDownError(str(refused))

    def _apply_rename(self, op: Op) -> None:
        """Give the run the name that was refused when it was made."""
        if op.get("experiment") is not None:
            raise StoreRefusedError(f"the run cannot be moved to the experiment {op['experiment']!r} any more")
        self.store.set_tags(self.run_id, {NAME_TAG: op["run_name"]})

    def _learn_name(self) -> None:
        """Ask how the store calls the run: it is told to the user at the end, and no row waits for it."""
        if self.spool.ack.run_name is None and self._name_tries < NAME_TRIES:
            self._name_tries += 1
            with contextlib.suppress(StoreDownError, StoreRefusedError):
                name = self.store.run_name(self.run_id)
                self.spool.acknowledge(run_name=name.text, name_is_free=name.is_free)

    def _delete_ghosts(self, run_id: str) -> None:
        """Delete empty runs of this spool: a create that seemed lost may have been answered too late."""
        for other in self.store.find_runs(self._spec()):
            if other != run_id and not self.store.last_steps(other):
                self.store.delete_run(other)

    # Metrics.

    def _gather(self, op: Op, offset: int | None) -> None:
        points = self._parsed(op)
        is_row = bool(points)
        if self._points and len(self._points) + len(points) > MAX_METRICS:
            self._send_points()
        self._points += self._not_repeated(op, points)
        self._upto = offset
        self._lines += 1
        self._rows += is_row

    def _not_repeated(self, op: Op, points: list[Point]) -> list[Point]:
        """Return those points of a row that the run did not have when it was resumed."""
        if not points or (self.known is None and not (self.spool.ack.resumed or self._repeats or self._is_over)):
            return points
        new: list[Point] = []
        self._attempts.send([op], lambda _: new.extend(self._new(points)), self._set_aside, self._check_writes)
        return new

    def _parsed(self, op: Op) -> list[Point]:
        """Read a row; what is no point in it is set aside."""
        try:
            step, time, metrics = metric_step(op["s"]), metric_step(op["t"], "time"), dict(op["m"])
        except (KeyError, TypeError, ValueError) as error:
            self._set_aside(op, error)
            return []
        points = []
        for name, value in metrics.items():
            try:
                points.append(Point(name, float(value), time, step))
            except (TypeError, ValueError, OverflowError) as error:
                self._set_aside({**op, "m": {name: value}}, error)
        return points

    def _new(self, points: Sequence[Point]) -> list[Point]:
        if self.known is None:
            self.known = KnownPoints(self.run_id, self.store.last_steps(self.run_id))
        return self.known.new(points, self.store)

    def _send_points(self) -> None:
        if not self._lines:
            return
        self._log_points(self._points)
        self._done(self._upto, self._lines)
        if self.known is not None:
            self.known.confirm()
        self.num_rows += self._rows
        self._points, self._lines, self._rows = [], 0, 0

    def _log_points(self, points: Sequence[Point]) -> None:
        def give_up(point: Point, error: Exception) -> None:
            self._set_aside({"op": "m", "t": point.timestamp, "s": point.step, "m": {point.name: point.value}}, error)

        for begin in range(0, len(points), MAX_METRICS):
            some = points[begin : begin + MAX_METRICS]
            self._attempts.send(
                some, lambda part: self.store.log_points(self.run_id, part), give_up, self._check_writes
            )

    # Everything else.

    def _apply(self, op: Op) -> dict[str, Any]:
        """Do what an op says; returns what it changes in the acknowledgement."""
        action = getattr(self, f"_apply_{op['op']}", None)
        if action is None:
            unreadable = op["op"] == "unreadable"
            self._set_aside(op, TrackingError("not readable" if unreadable else "unknown to this version of rl8x"))
            return {}
        changes: dict[str, Any] = {}
        check = self._check_run if op["op"] in ("text", "artifact") else self._check_writes
        self._attempts.send([op], lambda _: changes.update(action(op) or {}), self._set_aside, check)
        return changes

    def _apply_open(self, op: Op) -> None:
        """Pass the header by."""

    def _apply_params(self, op: Op) -> None:
        present = self.store.params(self.run_id)
        new, changed, texts = {}, {}, []
        for name, given in op["params"].items():
            value, text = fitted(name, str(given))
            if text is not None:
                texts.append(text)
            if name not in present:
                new[name] = value
            elif present[name] != value:  # MLflow raises on a changed value; a resumed run may well have one
                changed[legal_name(PARAM_CHANGE_TAG + name)] = value
        self._send_items("params", new, op, lambda some: self.store.log_params(self.run_id, some))
        self._apply_tags({"op": "tags", "tags": changed})
        for text in texts:
            self._apply(text)

    def _apply_tags(self, op: Op) -> None:
        present = self.store.tags(self.run_id) if self._is_over else {}
        tags = {name: str(text)[:MAX_TAG_LENGTH] for name, text in op["tags"].items() if name not in present}
        self._send_items("tags", tags, op, lambda some: self.store.set_tags(self.run_id, some))

    def _send_items(
        self, kind: str, items: Mapping[str, str], op: Op, call: Callable[[Mapping[str, str]], None]
    ) -> None:
        """Log params or tags, in pieces; those that are not taken are set aside one by one."""

        def give_up(name: str, error: Exception) -> None:
            self._set_aside({"op": kind, kind: {name: op[kind][name]}}, error)

        names = list(items)
        for begin in range(0, len(names), MAX_PARAMS):
            some = names[begin : begin + MAX_PARAMS]
            self._attempts.send(
                some, lambda part: call({name: items[name] for name in part}), give_up, self._check_writes
            )

    def _apply_describe(self, op: Op) -> None:
        """Renew the description, unless what is there is not what was last written here."""
        if self._is_over:
            return
        present = self.store.tags(self.run_id)
        if present.get(NOTE_TAG) and digest(present[NOTE_TAG]) != present.get(NOTE_DIGEST_TAG):
            return
        text = op["text"][:MAX_TAG_LENGTH]
        self.store.set_tags(self.run_id, {NOTE_TAG: text, NOTE_DIGEST_TAG: digest(text)})

    def _apply_text(self, op: Op) -> None:
        if not isinstance(op["text"], str) or not isinstance(op["to"], str):
            raise TypeError("a text and its name must be str")
        self.store.log_text(self.run_id, op["text"], artifact_name(op["to"]))

    def _apply_artifact(self, op: Op) -> None:
        to = None if op["to"] is None else artifact_name(op["to"])
        path = self._file(op)
        if not os.path.lexists(path):
            raise TrackingError("its file is not in the spool")
        check_artifact(path, self.spool.folder)
        self.store.log_artifact(self.run_id, path, to)

    def _file(self, op: Op) -> Path:
        """Return the path of a kept file, which cannot lie outside the spool whatever the op says."""
        name = PurePosixPath(artifact_name(op["file"]))
        if name.parts[0] != FILES or len(name.parts) != 3:
            raise TrackingError(f"not a file of this spool: {name}")
        return self.spool.folder / name

    def _discard_file(self, op: Op) -> None:
        shutil.rmtree(self._file(op).parent, ignore_errors=True)

    def _apply_resume(self, op: Op) -> dict[str, Any]:
        repeats, keeps_status = bool(op["repeats"]), bool(op["keeps_status"])
        resumed = repeats or self.spool.ack.resumed or self.known is not None
        if repeats:
            self.known = None
        if self._owns and not keeps_status and not self._is_over:
            self._send_status(op, lambda: self.store.set_status(self.run_id, "RUNNING", None))
        return {"resumed": resumed, "finished": keeps_status}

    def _apply_finish(self, op: Op) -> dict[str, Any]:
        status = op["status"]
        if status is not None:
            end_time = metric_step(op["t"], "time")
            if status not in STATUSES:
                raise ValueError(f"unknown status {status!r}")
            if not self._is_over:
                self._send_status(op, lambda: self.finish(status, end_time))
        return {"finished": True}

    def _send_status(self, op: Op, call: Callable[[], None]) -> None:
        """Set a status; where only that fails, what the op says of the spool holds all the same."""
        self._attempts.send([op], lambda _: call(), self._set_aside, self._check_writes)

    @property
    def _owns(self) -> bool:
        return bool(self.spool.header.get("owns", True))

    def finish_killed(self) -> None:
        """Set the status of a run whose process ended without a word, unless it has ended in another one."""
        if self._owns:
            ended = self.store.status(self.run_id).text != "RUNNING"
        else:
            ended = STATUS_TAG in self.store.tags(self.run_id)
        if not ended:
            self.finish("KILLED", self.spool.last_time())

    def finish(self, status: str, end_time: int) -> None:
        """Set the final status; of a run that the user started, only a tag."""
        if self._owns:
            self.store.set_status(self.run_id, status, end_time)
        else:
            self.store.set_tags(self.run_id, {STATUS_TAG: status})


def check_artifact(path: Path, spool: Path) -> None:
    """Refuse what no spool of ours has: a link on the way to a kept file or in a kept folder, a device, a pipe.

    Nothing is opened.

    Raises:
        TrackingError: There is one.
    """
    for folder in path.relative_to(spool).parents:
        _check_mode(spool / folder)
    left = [path]
    while left:
        each = left.pop()
        if stat.S_ISDIR(_check_mode(each)):
            left += each.iterdir()


def _check_mode(path: Path) -> int:
    mode = path.lstat().st_mode
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        raise TrackingError(f"{path.name} is no plain file: links are not followed, devices and pipes not read")
    return mode
