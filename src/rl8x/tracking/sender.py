"""Send a spool to a store, in order, and acknowledge what has arrived: for the writer thread and for `rl8x sync`."""

from __future__ import annotations

import functools
import shutil
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from rl8x.tracking.attempts import TRIES, Attempts, NotNowError
from rl8x.tracking.database import Point
from rl8x.tracking.kept_files import check_kept, kept_path
from rl8x.tracking.left_behind import LeftBehind, left_behind
from rl8x.tracking.names import MAX_TAG_LENGTH, artifact_name, digest, fitted, legal_name, metric_step
from rl8x.tracking.protocol import TrackingError, check_status
from rl8x.tracking.rejected import name_of
from rl8x.tracking.secrets import logger
from rl8x.tracking.spool import Spool
from rl8x.tracking.spool_files import Op
from rl8x.tracking.store import MAX_PARAMS, MLflowStore
from rl8x.tracking.store_errors import StoreDownError, StoreRefusedError, in_words
from rl8x.tracking.stored_run import KnownPoints, StoredRun

_log = logger(__name__)

PARAM_CHANGE_TAG = "rl8x.param_change."
NAME_TAG = "mlflow.runName"
NOTE_TAG = "mlflow.note.content"  # what MLflow's page shows as the run's description
NOTE_DIGEST_TAG = "rl8x.description"
_WITH_FILE = ("artifact", "model")
_MOST_TOLD = 5  # times that a run went back, in its description
_ItemT = TypeVar("_ItemT")


class Sender:
    """Sends one spool.

    Replaying is safe: a store keeps one row for the same name, step, timestamp and value, so that what was sent but not
    acknowledged may be sent again. An entry that the store does not take, whatever its kind, is set aside after some
    tries, and all others go on. `on_arrival` is called whenever something has arrived; `name_word` returns the run's
    name as commands take it, if they do.

    Args:
        spool: What to send.
        store: Where to.
        fresh: As for `StoredRun`.
        late: As for `StoredRun`; what another process wrote stays, and rows that it logged are not logged again.

    Attributes:
        run: The run in the store.
        known: What the run had when it was resumed; None where it was not, or nothing has been compared yet. A sender
            that goes on with the run of another one of this process may be given that one's.
        num_rows: Rows that were sent.
    """

    def __init__(self, spool: Spool, store: MLflowStore, *, fresh: bool = False, late: bool = False) -> None:
        self.spool = spool
        self.store = store
        self.run = StoredRun(spool, store, fresh=fresh, late=late)
        self.on_arrival: Callable[[], None] = lambda: None
        self.name_word: Callable[[], str | None] = lambda: None
        self.num_rows = 0
        self.known: KnownPoints | None = None
        self._points: list[Point] = []
        self._upto: int | None = None
        self._lines = 0
        self._rows = 0
        self._attempts = Attempts()
        self._aside: list[tuple[Op, str]] = []
        self._named: set[str] = set()
        self._handlers: dict[str, Callable[[Op], dict[str, Any] | None]] = {
            "open": lambda op: None,  # the run that the header describes has been made
            "params": self._apply_params,
            "tags": self._apply_tags,
            "describe": self._apply_describe,
            "text": self._apply_text,
            "curves": self._apply_curves,
            "system": self._apply_system,
            "artifact": self._apply_artifact,
            "model": self._apply_model,
            "resume": self._apply_resume,
            "finish": self._apply_finish,
        }

    def send_some(self) -> None:
        """Make sure that there is a run, then send and acknowledge about a megabyte of the spool.

        Raises `StoreDownError` where the store does not work now; call again later.
        """
        try:
            self._aside = []
            self.run.ensure(self._set_aside)
            self._points, self._lines, self._rows = [], 0, 0
            if self.known is not None:
                self.known.put_back()
            for op, offset in self.spool.read():
                if op["op"] == "m":
                    self._gather(op, offset)
                else:
                    self._send_points()
                    changes = self._apply(op)
                    sent = self._sent_copies([op])
                    self.spool.rejected.replaced_by(op)
                    self._done(offset, 1, **changes)
                    self._discard_copies(sent)
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
        """Send the whole spool, and try again what was set aside; raises as `send_some`."""
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
            elif op["op"] == "open":
                self._attempt(op, functools.partial(self._rename, op))
            else:
                self._apply(op)
        self._log_points(points)
        self._attempts.failures = 0
        self._discard_copies(self._sent_copies(ops))
        self.spool.rejected.replace(self._aside)
        self._aside = []

    def _sent_copies(self, ops: Sequence[Op]) -> list[Op]:
        """List those artifacts among ops that have not been set aside just now."""
        return [op for op in ops if op["op"] in _WITH_FILE and not any(other is op for other, _ in self._aside)]

    def _discard_copies(self, ops: Sequence[Op]) -> None:
        for op in ops:
            shutil.rmtree(kept_path(self.spool.folder, op["file"]).parent, ignore_errors=True)

    def _done(self, offset: int | None, lines: int, **changes: Any) -> None:
        for op, reason in self._aside:
            self.spool.rejected.add(op, reason)
            name = name_of(op)
            if name not in self._named:
                self._named.add(name)
                where = f"it is in {self.spool.rejected.path}, and `rl8x sync` tries it again"
                _log.warning("tracking: %s could not be logged (%s) and is set aside: %s", name, reason, where)
        self._aside = []
        self._attempts.failures = 0
        self.spool.acknowledge(offset, lines=lines if offset is None else 0, **changes)
        self.on_arrival()

    def _set_aside(self, op: Op, error: Exception) -> None:
        words = str(error) if isinstance(error, ValueError | TypeError) else in_words(error)
        self._aside.append((op, f"it has no {error}" if isinstance(error, KeyError) else words))

    def _attempt(self, op: Op, call: Callable[[], None], check: Callable[[], None] | None = None) -> None:
        """Make the calls of an op, which is set aside where they alone fail."""
        self._attempts.send([op], lambda _: call(), self._set_aside, check or self.run.check_writes)

    def _send_parts(
        self,
        items: Sequence[_ItemT],
        size: int,
        call: Callable[[Sequence[_ItemT]], None],
        op_of: Callable[[_ItemT], Op],
    ) -> None:
        """Send items, at most `size` in a call; those that are not taken are set aside, each as an op of its own."""
        for begin in range(0, len(items), size):
            batch, check = items[begin : begin + size], self.run.check_writes
            self._attempts.send(batch, call, lambda item, error: self._set_aside(op_of(item), error), check)

    # Metrics.

    def _gather(self, op: Op, offset: int | None) -> None:
        points = self._parsed(op)
        if self._points and len(self._points) + len(points) > self.store.most_points:
            self._send_points()
        self._points += self._not_repeated(op, points)
        self._upto = offset
        self._lines += 1
        self._rows += bool(points)

    def _not_repeated(self, op: Op, points: list[Point]) -> list[Point]:
        """Return those points of a row that the run did not have when it was resumed."""
        repeats = self.spool.ack.resumed or self.run.is_resumed or self.run.is_over
        if not points or (self.known is None and not repeats):
            return points
        new: list[Point] = []

        def compare() -> None:
            self.known = self.known or KnownPoints(self.run.id, self.store)
            if self.known.differ(points):
                self._leave_behind(points[0].step, points[0].timestamp)
            new.extend(self.known.new(points))

        self._attempt(op, compare)
        return new

    def _leave_behind(self, step: int, before: int) -> None:
        """Have the run leave behind its points from a step on that are older than a time, and say so on its page."""
        assert self.known is not None
        sentence = self.store.leave_behind(self.run.id, step, before)
        self.known.leave(LeftBehind(step, before))
        self._describe(lambda present: f"{present}\n\n{sentence}" if present else sentence)

    def _parsed(self, op: Op) -> list[Point]:
        """Read a row; what is not a point in it is set aside."""
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
        self._send_parts(
            points,
            self.store.most_points,
            lambda batch: self.store.log_points(self.run.id, batch),
            lambda point: {"op": "m", "t": point.timestamp, "s": point.step, "m": {point.name: point.value}},
        )

    # Everything else.

    def _apply(self, op: Op) -> dict[str, Any]:
        """Make the calls of an op other than a row; returns what it changes in the acknowledgement."""
        handler = self._handlers.get(op["op"])
        if handler is None:
            unreadable = op["op"] == "unreadable"
            self._set_aside(op, TrackingError("not readable" if unreadable else "unknown to this version of rl8x"))
            return {}
        changes: dict[str, Any] = {}
        check = self.run.check if op["op"] in ("text", "curves", *_WITH_FILE) else None
        self._attempt(op, lambda: changes.update(handler(op) or {}), check)
        return changes

    def _rename(self, op: Op) -> None:
        """Give the run the name that was refused when it was made."""
        if op.get("experiment") is not None:
            raise StoreRefusedError(f"the run cannot be moved to the experiment {op['experiment']!r} any more")
        self.store.set_tags(self.run.id, {NAME_TAG: op["run_name"]})

    def _apply_params(self, op: Op) -> None:
        present = self.store.params(self.run.id)
        tags = self.store.tags(self.run.id) if present.keys() & op["params"].keys() else {}
        new, changed, texts = {}, {}, []
        for name, param in op["params"].items():
            value, file = fitted(name, str(param))
            if file is not None:
                texts.append({"op": "text", "to": file, "text": str(param)})
            if name not in present:
                new[name] = value
            # MLflow raises on a changed value; a resumed run may well have one, or be back at the first one.
            elif tags.get(tag := legal_name(PARAM_CHANGE_TAG + name), present[name]) != value:
                changed[tag] = value
        self._send_parts(
            list(new),
            MAX_PARAMS,
            lambda names: self.store.log_params(self.run.id, {name: new[name] for name in names}),
            lambda name: {"op": "params", "params": {name: op["params"][name]}},
        )
        self._apply_tags({"op": "tags", "tags": changed})
        for text in texts:
            self._apply(text)

    def _apply_tags(self, op: Op) -> None:
        present = self.store.tags(self.run.id) if self.run.is_over else {}
        tags = {name: str(text)[:MAX_TAG_LENGTH] for name, text in op["tags"].items() if name not in present}
        self._send_parts(
            list(tags),
            MAX_PARAMS,
            lambda names: self.store.set_tags(self.run.id, {name: tags[name] for name in names}),
            lambda name: {"op": "tags", "tags": {name: op["tags"][name]}},
        )

    def _apply_describe(self, op: Op) -> None:
        """Renew the description, unless what is there is not what was last written here.

        Its commands name the run, where its name finds it, in place of the folder of its checkpoints.
        """
        if not self.run.is_over:
            left = "".join(f"\n\n{each}" for each in left_behind(self.store.tags(self.run.id))[-_MOST_TOLD:])
            text, name, folder = op["text"], self.name_word(), op.get("folder")
            text = text.replace(f" {folder}", f" {name}") if name and folder else text
            self._describe(lambda _: text[: MAX_TAG_LENGTH - len(left)] + left)

    def _describe(self, text_after: Callable[[str], str]) -> None:
        """Renew the description by what makes it of the present one, unless that is not what was last written here."""
        present = self.store.tags(self.run.id)
        if present.get(NOTE_TAG) and digest(present[NOTE_TAG]) != present.get(NOTE_DIGEST_TAG):
            return
        text = text_after(present.get(NOTE_TAG, ""))[:MAX_TAG_LENGTH]
        self.store.set_tags(self.run.id, {NOTE_TAG: text, NOTE_DIGEST_TAG: digest(text)})

    def _apply_text(self, op: Op) -> None:
        if not isinstance(op["text"], str) or not isinstance(op["to"], str):
            raise TypeError("a text and its name must be str")
        self.store.log_text(self.run.id, op["text"], artifact_name(op["to"]))

    def _apply_curves(self, op: Op) -> None:
        if not self.run.is_over:  # what is there may have more of them
            self.store.log_curves(self.run.id, dict(op["series"]), str(op["title"]), str(op["clock"]))

    def _apply_system(self, op: Op) -> None:
        """Log a sample of the machine, at the seconds since the run began: MLflow's page draws them over time."""
        time = metric_step(op["t"], "time")
        step = max(0, time - self.run.start_time) // 1000
        self.store.log_points(self.run.id, [Point(str(name), float(op["m"][name]), time, step) for name in op["m"]])

    def _apply_artifact(self, op: Op) -> None:
        to = None if op["to"] is None else artifact_name(op["to"])
        path = kept_path(self.spool.folder, op["file"])
        check_kept(path, self.spool.folder)
        self.store.log_artifact(self.run.id, path, to)

    def _apply_model(self, op: Op) -> None:
        path = kept_path(self.spool.folder, op["file"])
        check_kept(path, self.spool.folder)
        self.store.log_model(self.run.id, path, op["about"])

    def _apply_resume(self, op: Op) -> dict[str, Any]:
        repeats, keeps_status = bool(op["repeats"]), bool(op["keeps_status"])
        resumed = repeats or self.spool.ack.resumed or self.known is not None
        if repeats:
            self.known = None
        if self.run.owned and not keeps_status and not self.run.is_over:
            self._attempt(op, lambda: self.store.set_status(self.run.id, "RUNNING", None))
        return {"resumed": resumed, "finished": keeps_status}

    def _apply_finish(self, op: Op) -> dict[str, Any]:
        status = op["status"]
        if status is not None:
            end_time = metric_step(op["t"], "time")
            check_status(status)
            if not self.run.is_over:  # where only this fails, the spool counts as finished
                self._attempt(op, lambda: self.run.finish(status, end_time))
        return {"finished": True}
