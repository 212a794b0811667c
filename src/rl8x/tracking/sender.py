"""Send a spool to a store, in order, and acknowledge what has arrived: for the writer thread and for `rl8x sync`."""

from __future__ import annotations

import contextlib
import hashlib
import shutil
from collections import Counter
from collections.abc import Callable, Mapping
from itertools import islice
from pathlib import Path, PurePosixPath
from typing import Any

from rl8x.tracking.names import MAX_PARAM_LENGTH, MAX_TAG_LENGTH, artifact_name, legal_name
from rl8x.tracking.protocol import STATUSES, TrackingError
from rl8x.tracking.secrets import logger
from rl8x.tracking.spool import FILES, REJECTED, Op, Spool
from rl8x.tracking.store import (
    MAX_METRICS,
    MAX_PARAMS,
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
NOTE_TAG = "mlflow.note.content"  # what MLflow's page shows as the run's description
NOTE_DIGEST_TAG = "rl8x.description"
ARTIFACT_TRIES = 3
NAME_TRIES = 3
_CUT = " ... (the whole value is the artifact {})"


class Sender:
    """Sends one spool.

    Replaying is safe: a store keeps one row for the same name, step, timestamp and value, so that what was sent but not
    acknowledged may be sent again. `on_arrival` is called whenever something has arrived.

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
        self._artifact_tries = 0
        self._rejected: Op | None = None
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
            self._ensure_run()
            self._look_for_others()
            self._learn_name()
            self._points, self._lines = [], 0
            if self.known is not None:
                self.known.forget_unsent()
            for op, offset in self.spool.read().ops:
                if op["op"] == "m":
                    self._gather(op, offset)
                else:
                    self._send_points()
                    changes = self._apply(op)
                    self._done(offset, 1, **changes)
                    self._discard_file(op)
            self._send_points()
        except StoreRefusedError as error:
            raise StoreDownError(str(error)) from error
        finally:
            self.spool.give_back()
        self.spool.compact()

    def _done(self, offset: int | None, lines: int, **changes: Any) -> None:
        self.spool.acknowledge(offset, lines=lines if offset is None else 0, **changes)
        self.on_arrival()

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
                run_id = self.store.create_run(self._spec())
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
        try:
            step, time = int(op["s"]), int(op["t"])
            points = [Point(name, float(value), time, step) for name, value in op["m"].items()]
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            self._reject(op, f"not a row: {error!r}")
            points = []
        if self.known is None and (self.spool.ack.resumed or self._repeats or self._is_over):
            self.known = KnownPoints(self.run_id, self.store.last_steps(self.run_id))
        if self._points and len(self._points) + len(points) > MAX_METRICS:
            self._send_points()
        if self.known is not None:
            points = [point for point in points if not self.known.take(point, self.store)]
        self._points += points
        self._upto = offset
        self._lines += 1

    def _send_points(self) -> None:
        if not self._lines:
            return
        for begin in range(0, len(self._points), MAX_METRICS):
            self._log_points(self._points[begin : begin + MAX_METRICS])
        self._done(self._upto, self._lines)
        if self.known is not None:
            self.known.confirm()
        self.num_rows += self._lines
        self._points, self._lines = [], 0

    def _log_points(self, points: list[Point]) -> None:
        """Log points; where the store refuses them, find the ones that it means by halving."""
        try:
            self.store.log_points(self.run_id, points)
        except StoreRefusedError as error:
            self.store.check_run(self.run_id)
            if len(points) == 1:
                point = points[0]
                self._reject({"op": "m", "t": point.timestamp, "s": point.step, "m": {point.name: point.value}}, error)
                return
            half = len(points) // 2
            self._log_points(points[:half])
            self._log_points(points[half:])

    # Everything else.

    def _apply(self, op: Op) -> dict[str, Any]:
        """Do what an op says; returns what it changes in the acknowledgement."""
        try:
            action = getattr(self, f"_apply_{op['op']}", None)
            if action is None:
                self._reject(op, "unknown to this version")
                return {}
            return action(op) or {}
        except StoreRefusedError as error:
            self.store.check_run(self.run_id)
            self._reject(op, error)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            self._reject(op, repr(error))
        return {}

    def _apply_open(self, op: Op) -> None:
        """Pass the header by."""

    def _apply_params(self, op: Op) -> None:
        present = self.store.params(self.run_id)
        new, changed = {}, {}
        for name, text in op["params"].items():
            value = self._fitted(name, text)
            if name not in present:
                new[name] = value
            elif present[name] != value:  # MLflow raises on a changed value; a resumed run may well have one
                changed[legal_name(PARAM_CHANGE_TAG + name)] = value
        for some in _pieces(new, MAX_PARAMS):
            self.store.log_params(self.run_id, some)
        self._apply_tags({"tags": changed})

    def _fitted(self, name: str, text: str) -> str:
        if len(text) <= MAX_PARAM_LENGTH:
            return text
        file = f"params/{name.replace(':', '_')}.txt"
        self.store.log_text(self.run_id, text, artifact_name(file))
        note = _CUT.format(file)
        return text[: MAX_PARAM_LENGTH - len(note)] + note

    def _apply_tags(self, op: Op) -> None:
        present = self.store.tags(self.run_id) if self._is_over else {}
        tags = {name: text[:MAX_TAG_LENGTH] for name, text in op["tags"].items() if name not in present}
        for some in _pieces(tags, MAX_PARAMS):
            self.store.set_tags(self.run_id, some)

    def _apply_describe(self, op: Op) -> None:
        """Renew the description, unless what is there is not what was last written here."""
        if self._is_over:
            return
        present = self.store.tags(self.run_id)
        if present.get(NOTE_TAG) and _digest(present[NOTE_TAG]) != present.get(NOTE_DIGEST_TAG):
            return
        text = op["text"][:MAX_TAG_LENGTH]
        self.store.set_tags(self.run_id, {NOTE_TAG: text, NOTE_DIGEST_TAG: _digest(text)})

    def _apply_text(self, op: Op) -> None:
        self._try_artifact(op, lambda: self.store.log_text(self.run_id, op["text"], artifact_name(op["to"])))

    def _apply_artifact(self, op: Op) -> None:
        to = None if op["to"] is None else artifact_name(op["to"])
        path = self._file(op)
        if path.exists():
            self._try_artifact(op, lambda: self.store.log_artifact(self.run_id, path, to))
        else:
            self._reject(op, "its file is not in the spool")

    def _try_artifact(self, op: Op, send: Callable[[], None]) -> None:
        """Send an artifact; where only the artifact store fails, give up after some tries, so that rows go on."""
        try:
            send()
        except StoreDownError as error:
            self.store.check_run(self.run_id)  # raises where the whole store is down
            self._artifact_tries += 1
            if self._artifact_tries < ARTIFACT_TRIES:
                raise
            self._reject(op, error)
        self._artifact_tries = 0

    def _file(self, op: Op) -> Path:
        """Return the path of a kept file, which cannot lie outside the spool whatever the op says."""
        name = PurePosixPath(artifact_name(op["file"]))
        if name.parts[0] != FILES or len(name.parts) != 3:
            raise TrackingError(f"not a file of this spool: {name}")
        return self.spool.folder / name

    def _discard_file(self, op: Op) -> None:
        if op["op"] == "artifact" and op is not self._rejected:
            shutil.rmtree(self._file(op).parent, ignore_errors=True)

    def _apply_resume(self, op: Op) -> dict[str, Any]:
        repeats, keeps_status = op["repeats"], op["keeps_status"]
        resumed = repeats or self.spool.ack.resumed or self.known is not None
        if repeats:
            self.known = None
        if self._owns and not keeps_status and not self._is_over:
            self.store.set_status(self.run_id, "RUNNING", None)
        return {"resumed": resumed, "finished": keeps_status}

    def _apply_finish(self, op: Op) -> dict[str, Any]:
        if op["status"] is not None and not self._is_over:
            self.finish(str(op["status"]), int(op["t"]))
        return {"finished": True}

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

    def _reject(self, op: Op, reason: object) -> None:
        if self._rejected is None:
            file = self.spool.folder / REJECTED
            _log.warning("tracking: the store refused an entry (%s); such entries are kept in %s", reason, file)
        self.spool.reject(op, str(reason))
        self._rejected = op


class KnownPoints:
    """What a run had when it was resumed, each point once: a run that goes on from a checkpoint repeats what followed.

    A point beyond those that the run had, such as a further evaluation at the same step, is new.

    Args:
        run_id: The run.
        last_steps: The last step of each metric that it has.
    """

    def __init__(self, run_id: str, last_steps: Mapping[str, int]) -> None:
        self.run_id = run_id
        self._last = last_steps
        self._left: dict[str, Counter[int]] = {}
        self._unsent: list[Point] = []

    def take(self, point: Point, store: Store) -> bool:
        """Say whether the run had this point, which counts as repeated then.

        A metric's history is read only where it may matter.
        """
        if point.name not in self._last or point.step > self._last[point.name]:
            return False
        if point.name not in self._left:
            self._left[point.name] = Counter(store.logged_steps(self.run_id, point.name))
        known = self._left[point.name][point.step] > 0
        if known:
            self._left[point.name][point.step] -= 1
            self._unsent.append(point)
        return known

    def confirm(self) -> None:
        """Note that the rows which were compared have been acknowledged: they will not be compared again."""
        self._unsent = []

    def forget_unsent(self) -> None:
        """Put back what was taken for rows that have not been acknowledged, and are read again."""
        for point in self._unsent:
            self._left[point.name][point.step] += 1
        self._unsent = []


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _pieces(items: Mapping[str, str], size: int) -> list[dict[str, str]]:
    iterator = iter(items.items())
    pieces = []
    while piece := dict(islice(iterator, size)):
        pieces.append(piece)
    return pieces
