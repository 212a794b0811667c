"""Send a journal to a store in order, and acknowledge entries that arrived; for the shipper and `rl8x sync`."""

from __future__ import annotations

import contextlib
import functools
import re
import shutil
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeVar

from rl8x.tracking.artifacts import checked_copy, kept_path
from rl8x.tracking.journal import LOST_ROWS_TAG, NAME_TAG, Op, SendingJournal
from rl8x.tracking.protocol import (
    MAX_NAME_LENGTH,
    MAX_TAG_LENGTH,
    STATUSES,
    RunMissingError,
    StoreDownError,
    StoreRefusedError,
    TrackingError,
    artifact_name,
    check_status,
    digest,
    fitted,
    in_words,
    legal_name,
    metric_step,
)
from rl8x.tracking.repeats import LeftBehind, LoggedRow, Point, ServerRepeats, left_behind
from rl8x.tracking.store import DEFAULT_EXPERIMENT, JOURNAL_TAG, MAX_PARAMS, MLflowStore, NewRun

PARAM_CHANGE_TAG = "rl8x.param_change."
NOTE_TAG = "mlflow.note.content"  # the run's description on MLflow's page
NOTE_DIGEST_TAG = "rl8x.description"
_MAX_MENTIONED = 5  # superseded courses that the run's description mentions
_MAX_SAMPLES: Final = 10_000  # samples of the machine that wait while the store is down
TRIES = 3
_FULL = "database or disk is full|could not extend file"  # messages of sqlite and PostgreSQL
STATUS_TAG = "rl8x.status"
RESUMED_TAG = "rl8x.resumed_from"
WRITER_TAG = "rl8x.journal"  # the journal that last continued the run
# Errors of rl8x's own code for a malformed entry, which would fail again at each try.
_MALFORMED = (KeyError, TypeError, ValueError, AttributeError, OverflowError)
_ItemT = TypeVar("_ItemT")


class NotNowError(StoreDownError):
    """Nothing more can be sent now; `of_entry` if the store works otherwise, so that the entry may be at fault."""

    def __init__(self, text: str, *, of_entry: bool = False) -> None:
        super().__init__(text)
        self.of_entry = of_entry


class Sender:
    """Sends one journal: finds or creates its run, applies its entries in order, and ends the run.

    A store keeps one point per name, step, timestamp and value, so that unacknowledged points can be sent again. An
    entry of any kind that the store refuses is set aside after some tries, and sending continues with the others.
    """

    def __init__(
        self,
        journal: SendingJournal,
        store: MLflowStore,
        *,
        new_tags: Callable[[], Mapping[str, str]] = dict,
        fresh: bool = False,
        late: bool = False,
        is_default: bool = False,
    ) -> None:
        """Keep the arguments: the run cannot exist yet (`fresh`), or may have continued elsewhere (`late`)."""
        self.journal, self.store = journal, store
        self.is_over = self.is_resumed = False  # whether another process has ended or resumed the run
        self.owned = bool(journal.header.get("owns", True))  # whether rl8x began the run, not the user
        self.samples: deque[tuple[int, dict[str, float]]] = deque(maxlen=_MAX_SAMPLES)
        self.num_rows = 0
        self._new_tags, self._fresh, self._late, self._is_default = new_tags, fresh, late, is_default
        self._name_tries = 0
        self._aside: list[tuple[Op, str]] = []
        self._repeats: ServerRepeats | None = None
        self._compared: dict[tuple[int | None, int], list[LoggedRow]] = {}  # new points of rows not sent yet
        self._left: LeftBehind | None = None  # the superseded points that the run's tag has
        self._failures = 0  # consecutive failures of the next entry while the store worked

    @property
    def run_id(self) -> str:
        """The ID of the run, which must exist."""
        assert self.journal.ack.run_id is not None
        return self.journal.ack.run_id

    def ensure(self) -> None:
        """Find or create the run, and check once whether another process has continued or ended it since."""
        if self.journal.ack.run_id is None:
            run_id = self.journal.header.get("run_id")
            if run_id is None:
                run_id = self._find_or_create()
            else:
                self.store.check_run(run_id)
            self.journal.acknowledge(run_id=run_id, attempted=False)
        if self._late:
            run = self.store.entity(self.run_id)
            self.is_resumed = run.data.tags.get(WRITER_TAG) not in (None, self.journal.header.get("writer"))
            ended = run.info.end_time
            is_later = run.info.status in STATUSES and (ended is None or ended >= self.journal.last_time())
            self.is_over = self.owned and is_later
            self._late = False
        if self.journal.ack.run_name is None and self._name_tries < TRIES:
            self._name_tries += 1
            with contextlib.suppress(StoreDownError, StoreRefusedError):  # no row waits for the name
                name, is_free = self.store.run_name(self.run_id)
                kept = name if len(name) <= MAX_NAME_LENGTH else ""  # longer ones exceed a slot of `ack.json`
                self.journal.acknowledge(run_name=kept, name_is_free=is_free)

    def _find_or_create(self) -> str:
        """Find or create the run. `create_run` is not idempotent, so after an attempt, search before creating."""
        header = self.journal.header
        fields = (header.get("experiment"), header.get("experiment_id"), header.get("run_name"))
        spec = NewRun(header["journal_id"], *fields, start_time=header["t"])
        may_exist = self.journal.ack.attempted or not self._fresh
        run_ids = self.store.find_runs(spec.journal_id) if may_exist else []
        if run_ids:
            run_id = run_ids[0]
        else:
            self.journal.acknowledge(attempted=True)
            run_id = self._create(spec)
        if may_exist:  # a request without an answer may have created an empty run
            for other in self.store.find_runs(spec.journal_id):
                if other != run_id and not self.store.last_steps(other):
                    self.store.delete_run(other)
        return run_id

    def _create(self, spec: NewRun) -> str:
        """Create the run; if the store refuses its name or experiment, without them, so that its rows arrive."""
        default = spec._replace(experiment=DEFAULT_EXPERIMENT, experiment_id=None)
        refused = StoreRefusedError()
        candidates = (spec, spec._replace(run_name=None), default, default._replace(run_name=None))
        for candidate in (each for each in candidates for _ in range(TRIES)):
            try:
                run_id = self.store.create_run(candidate, self._new_tags())
            except StoreRefusedError as error:
                refused = error
                continue
            if candidate[1:3] != spec[1:3]:
                self._set_aside({"op": "open", "experiment": spec.experiment}, refused)
            if candidate.run_name != spec.run_name:
                self._set_aside({"op": "tags", "tags": {NAME_TAG: spec.run_name}}, refused)
            return run_id
        raise StoreDownError(str(refused))

    def restart_if_gone(self) -> None:
        """Restart from the first row if the store lacks the run, such as a database in place of a deleted one."""
        ack = self.journal.ack
        if ack.run_id is None:
            return
        try:
            self.store.check_run(self.run_id)
        except StoreRefusedError as error:
            raise StoreDownError(str(error)) from error
        except RunMissingError:
            if ack.generation or self.journal.header.get("run_id"):
                raise
            flags = dict.fromkeys(("name_is_free", "attempted", "finished"), False)
            self.journal.acknowledge(0, run_id=None, run_name=None, resumed=0, **flags)

    def _set_aside(self, op: Op, error: Exception) -> None:
        words = str(error) if isinstance(error, ValueError | TypeError) else in_words(error)
        self._aside.append((op, f"it has no {error}" if isinstance(error, KeyError) else words))

    def _check_writes(self) -> None:
        """Check that the store works: write an existing tag by the kind of request for metrics, params and tags."""
        self.store.check_run(self.run_id)
        journal_id = self._tags().get(JOURNAL_TAG, str(self.journal.header["journal_id"]))
        self.store.set_tags(self.run_id, {JOURNAL_TAG: journal_id})

    def _finish(self, status: str, end_time: int) -> None:
        """Set the final status, or only a tag for a run that the user started."""
        if self.owned:
            self.store.set_status(self.run_id, status, end_time)
        else:
            self.store.set_tags(self.run_id, {STATUS_TAG: status})

    def _tags(self) -> Mapping[str, str]:
        tags: Mapping[str, str] = self.store.entity(self.run_id).data.tags
        return tags

    def send_some(self) -> None:
        """Ensure that the run exists, then send and acknowledge about a megabyte of the journal."""
        try:
            self._aside = []
            self.ensure()
            since = self.journal.ack.resumed
            if self._repeats is None and (since or self.is_over or self.is_resumed):
                self._read_repeats(since or None, has_newer=since > 0)
            rows: list[tuple[list[Point], int | None, int]] = []
            num_points = 0
            for op, offset, number in self.journal.read():
                if op["op"] == "m":
                    size = len(op["m"]) if isinstance(op.get("m"), dict) else 0
                    if num_points + size > self.store.most_points:
                        self._send_rows(rows)
                        num_points = 0
                    points = self._not_repeated(op, (offset, number))
                    num_points += len(points)
                    rows.append((points, offset, number))
                    continue
                self._send_rows(rows)
                num_points = 0
                changes = self._apply(op)
                aside = [other for other, _ in self._aside]
                self.journal.rejected.replaced_by(op)
                self._done(offset, number, **changes)
                self._discard_copies([op], aside)
            self._send_rows(rows)
            self._send_samples()
        except NotNowError as error:
            self._failures += error.of_entry
            raise
        except StoreRefusedError as error:
            raise StoreDownError(str(error)) from error

    def send_all(self) -> None:
        """Send the whole journal, and retry entries that were set aside; raises as `send_some` does."""
        while True:
            try:
                self.send_some()
            except NotNowError as error:
                if not error.of_entry:
                    raise
                continue
            if not self.journal.pending:
                break
        self._retry()

    def end_killed(self) -> None:
        """End the run of a killed process, after its whole journal has been sent."""
        ending = self.journal.ack.ending
        if ending is not None:  # the disk refused it
            self._apply_finish(ending)
        elif not self.journal.ack.finished:
            ended = (
                self.store.entity(self.run_id).info.status != "RUNNING" if self.owned else STATUS_TAG in self._tags()
            )
            if not ended:  # no other process ended the run
                self._finish("KILLED", self.journal.last_time())
        self.journal.acknowledge(finished=True, ending=None)

    def _note_lost_rows(self, ending: Op | None) -> None:
        if ending is not None and ending.get("lost_rows"):
            self.store.set_tags(self.run_id, {LOST_ROWS_TAG: str(ending["lost_rows"])})

    def _retry(self) -> None:
        """Retry the entries that were set aside, and keep those that are refused again."""
        ops = self.journal.rejected.entries
        if not ops:
            return
        self._aside = []
        self._failures = TRIES
        points: list[Point] = []
        for op in ops:
            if op["op"] == "m":
                points += [point for point in self._parsed(op) if not self._is_there(point)]
            else:
                self._apply(op)
        self._log_points(points)
        self._failures = 0
        self._discard_copies(ops, [other for other, _ in self._aside])
        self.journal.rejected.replace(self._aside)
        self.journal.note_rejected()
        self._aside = []

    def _discard_copies(self, ops: Sequence[Op], aside: Sequence[Op]) -> None:
        """Remove the local copies of artifacts and models among `ops`, except those set aside."""
        for op in ops:
            if op["op"] in ("artifact", "model") and not any(other is op for other in aside):
                shutil.rmtree(kept_path(self.journal.place, op["file"]).parent, ignore_errors=True)

    def _write_aside(self) -> None:
        if self._aside:
            for op, reason in self._aside:
                self.journal.rejected.add(op, reason)
            self.journal.note_rejected()
            self._aside = []

    def _done(self, offset: int | None, number: int, **changes: Any) -> None:
        self._write_aside()
        self._failures = 0
        self._compared.clear()
        self.journal.acknowledge(offset, number, outage="", tried=True, **changes)

    def _send(self, items: Sequence[_ItemT], call: Callable[[Sequence[_ItemT]], object], size: int = 1) -> None:
        """Send ops or points, at most `size` per call; set aside those that the store refuses."""
        for begin in range(0, len(items), size):
            self._send_batch(items[begin : begin + size], call)

    def _send_batch(self, items: Sequence[_ItemT], call: Callable[[Sequence[_ItemT]], object]) -> None:
        """Make a call with some items; if it fails although the store works, bisect to set aside those at fault.

        The bisection starts at once if the store refuses the call, else after the call has failed in `TRIES` passes of
        `send_some`.
        """
        for _ in range(TRIES if len(items) == 1 else 1):
            try:
                call(items)
                return
            except NotNowError:
                raise
            except Exception as caught:  # even a bug in rl8x
                error = caught
            if isinstance(error, _MALFORMED):
                break
            if re.search(_FULL, str(error)):  # no entry's fault, although writes without new space work
                raise NotNowError(str(error)) from error
            try:
                self._check_writes()  # a deleted run refuses everything
            except Exception as down:
                raise NotNowError(str(down)) from down
            if not isinstance(error, StoreRefusedError) and self._failures < TRIES - 1:
                raise NotNowError(in_words(error), of_entry=True) from error
        if len(items) == 1:
            item: Any = items[0]
            is_point = isinstance(item, Point)
            op = {"op": "m", "t": item.timestamp, "s": item.step, "m": {item.name: item.value}} if is_point else item
            self._set_aside(op, error)
            return
        half = len(items) // 2
        for part in (items[:half], items[half:]):
            self._send_batch(part, call)

    def _send_rows(self, rows: list[tuple[list[Point], int | None, int]]) -> None:
        """Send the points of rows, and acknowledge them."""
        if rows:
            self._log_points([point for points, _, _ in rows for point in points])
            self._done(*rows[-1][1:])
            self.num_rows += len(rows)
            rows.clear()

    def _not_repeated(self, op: Op, at: tuple[int | None, int]) -> list[Point]:
        """Return the points of a row that the server did not have when the run was resumed.

        A row is compared only once, even if it is sent several times, since each row on the server matches one row.
        """
        points, repeats = self._parsed(op), self._repeats
        if not points or repeats is None:
            return points

        def compare() -> None:
            if at not in self._compared:
                row = {point.name: point.value for point in points}
                self._compared[at] = repeats.new_rows((points[0].step, points[0].timestamp, row))
            if repeats.left is not None and repeats.left != self._left:
                self._leave_behind(repeats.left)
                self._left = repeats.left

        self._send([op], lambda _: compare())
        rows = self._compared.get(at, [])
        return [Point(name, value, time, step) for step, time, row in rows for name, value in row.items()]

    def _is_there(self, point: Point) -> bool:
        """Whether another process that continued the run has logged this rejected point's metric at its step."""
        if not (self.is_over or self.is_resumed):
            return False
        return any(other.step == point.step for other in self.store.points(self.run_id, point.name))

    def _read_repeats(self, since: int | None, *, has_newer: bool) -> None:
        """Compare rows from now on with the points that the server has, which they may repeat."""
        history = functools.partial(self.store.points, self.run_id)
        last, tags = self.store.last_steps(self.run_id), self._tags()
        self._repeats = ServerRepeats(since, last, history, tags, has_newer=has_newer)
        self._left = self._repeats.left

    def _leave_behind(self, left: LeftBehind) -> None:
        """Mark points of the run as superseded, and mention it in the description."""
        self.store.leave_behind(self.run_id, left)
        self._describe(lambda present: f"{present}\n\n{left}" if present else str(left))

    def _parsed(self, op: Op) -> list[Point]:
        """Return the points of a row; set aside invalid entries."""
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

    def _send_samples(self) -> None:
        """Log samples of the machine, with the seconds since the start of the run as step, as MLflow's page expects."""
        began = (self.store.entity(self.run_id).info.start_time or 0) if self.samples else 0
        for _ in range(len(self.samples)):  # later samples, which may come faster than they are sent, wait
            time, row = self.samples[0]
            self._log_points([Point(name, value, time, max(0, time - began) // 1000) for name, value in row.items()])
            self._write_aside()
            self.samples.popleft()

    def _log_points(self, points: Sequence[Point]) -> None:
        self._send(points, lambda batch: self.store.log_points(self.run_id, batch), size=self.store.most_points)

    def _apply(self, op: Op) -> dict[str, Any]:
        """Make the calls for an op other than a row; return its changes of the acknowledgement."""
        handler = getattr(self, f"_apply_{op['op']}", None)
        if handler is None:
            unreadable = op["op"] == "unreadable"
            self._set_aside(op, TrackingError("not readable" if unreadable else "unknown to this version of rl8x"))
            return {}
        changes: dict[str, Any] = {}
        self._send([op], lambda _: changes.update(handler(op) or {}))
        return changes

    def _apply_open(self, op: Op) -> None:
        """Do nothing for a header, as the run exists; refuse an entry with an experiment that was set aside."""
        if "version" not in op:
            raise StoreRefusedError(f"the run cannot be moved to the experiment {op['experiment']!r} any more")

    def _apply_params(self, op: Op) -> None:
        present, new, changed, texts = self.store.entity(self.run_id).data, {}, {}, []
        for name, param in op["params"].items():
            value, file = fitted(name, str(param))
            if file is not None:
                texts.append({"op": "text", "to": file, "text": str(param)})
            if name not in present.params:
                new[name] = value
            # MLflow raises on a changed value; a resumed run may have one, or return to the first one.
            elif present.tags.get(tag := legal_name(PARAM_CHANGE_TAG + name), present.params[name]) != value:
                changed[tag] = value
        self._send_texts("params", op["params"], new, self.store.log_params)
        self._apply_tags({"op": "tags", "tags": changed})
        for text in texts:
            self._apply(text)

    def _send_texts(
        self, kind: str, given: Mapping[str, Any], texts: Mapping[str, str], call: Callable[[str, dict[str, str]], None]
    ) -> None:
        """Send params or tags; set aside those that the store refuses, with their given values."""
        self._send(
            [{"op": kind, kind: {name: given[name]}} for name in texts],
            lambda ops: call(self.run_id, {name: texts[name] for op in ops for name in op[kind]}),
            size=MAX_PARAMS,
        )

    def _apply_tags(self, op: Op) -> None:
        present = self._tags() if self.is_over else {}
        tags = {name: str(text)[:MAX_TAG_LENGTH] for name, text in op["tags"].items() if name not in present}
        self._send_texts("tags", op["tags"], tags, self.store.set_tags)

    def _apply_describe(self, op: Op) -> None:
        """Replace the description, unless the user has changed it."""
        if not self.is_over:
            left = "".join(f"\n\n{each}" for each in left_behind(self._tags())[-_MAX_MENTIONED:])
            text, folder = op["text"], op.get("folder")
            name = self.journal.ack.name_word(self._is_default)
            text = text.replace(f" {folder}", f" {name}") if name and folder else text
            self._describe(lambda _: text[: MAX_TAG_LENGTH - len(left)] + left)

    def _describe(self, text_after: Callable[[str], str]) -> None:
        """Replace the description by `text_after(present)`, unless the present one was not written by rl8x."""
        tags = self._tags()
        present = tags.get(NOTE_TAG, "")
        if not present or digest(present) == tags.get(NOTE_DIGEST_TAG):
            text = text_after(present)[:MAX_TAG_LENGTH]
            self.store.set_tags(self.run_id, {NOTE_TAG: text, NOTE_DIGEST_TAG: digest(text)})

    def _apply_text(self, op: Op) -> None:
        if not isinstance(op["text"], str) or not isinstance(op["to"], str):
            raise TypeError("a text and its name must be str")
        self.store.log_text(self.run_id, op["text"], artifact_name(op["to"]))

    def _apply_curves(self, op: Op) -> None:
        if not self.is_over:  # the existing picture may have more points
            self.store.log_curves(self.run_id, dict(op["series"]), str(op["title"]), str(op["clock"]))

    def _apply_artifact(self, op: Op) -> None:
        to = None if op["to"] is None else artifact_name(op["to"])
        self.store.log_artifact(self.run_id, checked_copy(self.journal.place, op["file"]), to)

    def _apply_model(self, op: Op) -> None:
        self.store.log_model(self.run_id, checked_copy(self.journal.place, op["file"]), op["about"])

    def _apply_resume(self, op: Op) -> dict[str, Any]:
        repeats, keeps_status, since = bool(op["repeats"]), bool(op["keeps_status"]), self.journal.ack.resumed
        self._note_lost_rows(self.journal.ack.ending)  # of the previous process, whose disk refused it
        if repeats:
            since = metric_step(op["t"], "time")
            self._read_repeats(since, has_newer=False)
        if "writer" in self.journal.header and not self.is_over:
            self.store.set_tags(self.run_id, {WRITER_TAG: str(self.journal.header["writer"])})
        if self.owned and not keeps_status and not self.is_over:
            self._send([op], lambda _: self.store.set_status(self.run_id, "RUNNING", None))
        return {"resumed": since, "finished": keeps_status, "ending": None}

    def _apply_left(self, op: Op) -> None:
        self._leave_behind(LeftBehind(metric_step(op["s"]), metric_step(op["t"], "time")))

    def _apply_finish(self, op: Op) -> dict[str, Any]:
        status = op["status"]
        self._note_lost_rows(op)
        if status is not None:
            end_time = metric_step(op["t"], "time")
            check_status(status)
            if not self.is_over:  # if only this fails, the journal counts as finished
                self._send([op], lambda _: self._finish(status, end_time))
        return {"finished": True, "ending": None}
