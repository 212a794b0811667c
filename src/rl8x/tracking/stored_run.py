"""The run of a spool in its store: found or made once, ended once, and what it had when it was resumed."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence

from rl8x.tracking.attempts import TRIES
from rl8x.tracking.database import Point
from rl8x.tracking.left_behind import LeftBehind, are_of_one_course, left_behind
from rl8x.tracking.protocol import STATUSES
from rl8x.tracking.spool import Spool
from rl8x.tracking.spool_files import Op
from rl8x.tracking.store import DEFAULT_EXPERIMENT, SPOOL_TAG, MLflowStore, NewRun
from rl8x.tracking.store_errors import RunMissingError, StoreDownError, StoreRefusedError

STATUS_TAG = "rl8x.status"
RESUMED_TAG = "rl8x.resumed_from"
_NAME_TRIES = 3


class StoredRun:
    """The run.

    Args:
        spool: The spool.
        store: The store.
        fresh: The spool has just been made, so that the store cannot have a run for it.
        late: The process that wrote the spool is gone, so that another one may have gone on with the run since.

    Attributes:
        is_over: Whether another process has ended the run since: what that one wrote stays.
        is_resumed: Whether another process has gone on with it since, and may have logged the same rows.
    """

    def __init__(self, spool: Spool, store: MLflowStore, *, fresh: bool, late: bool) -> None:
        self.is_over = False
        self.is_resumed = False
        self.store = store
        self._spool = spool
        self._fresh = fresh
        self._late = late
        self._name_tries = 0
        self._start_time: int | None = None

    @property
    def start_time(self) -> int:
        """When the run began, in milliseconds since 1970; asks the store once."""
        if self._start_time is None:
            self._start_time = self.store.start_time(self.id)
        return self._start_time

    @property
    def id(self) -> str:
        """The ID of the run, once there is one."""
        assert self._spool.ack.run_id is not None
        return self._spool.ack.run_id

    @property
    def owned(self) -> bool:
        """Whether rl8x began the run, and not the user."""
        return bool(self._spool.header.get("owns", True))

    def ensure(self, set_aside: Callable[[Op, Exception], None]) -> None:
        """Find or make the run, and look up once what became of it since the spool was written.

        `set_aside` gets the op of a name or experiment that the store refuses.
        """
        if self._spool.ack.run_id is None:
            run_id = self._spool.header.get("run_id")
            if run_id is None:
                run_id = self._find_or_create(set_aside)
            else:
                self.store.check_run(run_id)
            self._spool.acknowledge(run_id=run_id, attempted=False)
        if self._late:
            self._look_for_others()
            self._late = False
        if self._spool.ack.run_name is None and self._name_tries < _NAME_TRIES:
            self._name_tries += 1
            with contextlib.suppress(StoreDownError, StoreRefusedError):  # only the last lines name it: no row waits
                name, is_free = self.store.run_name(self.id)
                self._spool.acknowledge(run_name=name, name_is_free=is_free)

    def _find_or_create(self, set_aside: Callable[[Op, Exception], None]) -> str:
        """Find or make the run. `create_run` is not idempotent: once one was asked for, look before asking again."""
        header = self._spool.header
        fields = (header.get("experiment"), header.get("experiment_id"), header.get("run_name"))
        spec = NewRun(header["spool_id"], *fields, start_time=header["t"])
        may_exist = self._spool.ack.attempted or not self._fresh
        run_ids = self.store.find_runs(spec) if may_exist else []
        if run_ids:
            run_id = run_ids[0]
        else:
            self._spool.acknowledge(attempted=True)
            run_id = self._create(spec, set_aside)
        if may_exist:  # a create that seemed lost may have made an empty run
            for other in self.store.find_runs(spec):
                if other != run_id and not self.store.last_steps(other):
                    self.store.delete_run(other)
        return run_id

    def _create(self, spec: NewRun, set_aside: Callable[[Op, Exception], None]) -> str:
        """Make the run; where the store refuses its name or its experiment, without them, so that its rows arrive."""
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
                    experiment = spec.experiment if candidate == plain else None
                    set_aside({"op": "open", "run_name": spec.run_name, "experiment": experiment}, refused)
                return run_id
        raise StoreDownError(str(refused))

    def _look_for_others(self) -> None:
        self.is_resumed = self._has_tag(RESUMED_TAG)
        if self.owned:
            status, end_time = self.store.status(self.id)
            self.is_over = status in STATUSES and (end_time is None or end_time >= self._spool.last_time())

    def begin_anew_where_gone(self) -> None:
        """Send all rows again to a store that does not have the run, such as a database in place of a deleted one.

        Raises `StoreDownError` where it does not work now, or the spool has not all rows of the run.
        """
        ack = self._spool.ack
        if ack.run_id is None:
            return
        try:
            self.store.check_run(ack.run_id)
        except StoreRefusedError as error:
            raise StoreDownError(str(error)) from error
        except RunMissingError:
            if ack.generation or self._spool.header.get("run_id"):
                raise
            self._spool.acknowledge(
                0, run_id=None, run_name=None, name_is_free=False, attempted=False, resumed=False, finished=False
            )

    # Whether the store works, whatever is sent.

    def check(self) -> None:
        """Raise unless the run is there and active."""
        self.store.check_run(self.id)

    def check_writes(self) -> None:
        """Write what is there already, by the same kind of request as metrics, params and tags."""
        self.check()
        spool_id = self.store.tags(self.id).get(SPOOL_TAG, str(self._spool.header["spool_id"]))
        self.store.set_tags(self.id, {SPOOL_TAG: spool_id})

    # Its end.

    def finish(self, status: str, end_time: int) -> None:
        """Set the final status; of a run that the user started, only a tag."""
        if self.owned:
            self.store.set_status(self.id, status, end_time)
        else:
            self.store.set_tags(self.id, {STATUS_TAG: status})

    def finish_killed(self) -> None:
        """Set the status of a run whose process was killed, unless it has ended in another one."""
        runs_still = self.store.status(self.id)[0] == "RUNNING" if self.owned else not self._has_tag(STATUS_TAG)
        if runs_still:
            self.finish("KILLED", self._spool.last_time())

    def _has_tag(self, name: str) -> bool:
        return name in self.store.tags(self.id)


class KnownPoints:
    """The points that a run had when it was resumed, each once: a run that goes on from a checkpoint repeats some.

    A point beyond those that the run had, such as a further evaluation at the same step, is new. What the run has left
    behind does not count.
    """

    def __init__(self, run_id: str, store: MLflowStore) -> None:
        self._run_id = run_id
        self._store = store
        self._last = store.last_steps(run_id)
        self._left_behind = left_behind(store.tags(run_id))
        self._unmatched: dict[str, dict[int, list[Point]]] = {}
        self._taken: list[Point] = []  # known points of rows that have not been acknowledged
        # Points of the last step that came again: where the run turns out to leave that step behind, they are new.
        self._repeated: list[Point] = []
        self._owed: list[Point] = []
        self._paid: list[Point] = []

    def new(self, points: Sequence[Point]) -> list[Point]:
        """Return those points that the run did not have; each of the others counts as repeated from now on.

        A metric's history is read only where it may matter. Where one cannot be read, no point counts as repeated.
        """
        self._read_where_repeated(points)
        new, self._owed = self._owed, []
        self._paid = [*self._paid, *new]
        for point in points:
            known = self._at(point)
            if known:
                same = [other for other in known if are_of_one_course(point.name, point.value, other.value)]
                repeated = (same or known)[0]
                known.remove(repeated)
                self._taken.append(repeated)
                self._repeated = [*(other for other in self._repeated if other.step == point.step), point]
            else:
                new.append(point)
        return new

    def differ(self, points: Sequence[Point]) -> bool:
        """Whether points of a row show that the run has come to other values since, at a step that it had already."""
        self._read_where_repeated(points)
        for point in points:
            known = self._at(point)
            same = any(are_of_one_course(point.name, point.value, other.value) for other in known)
            if known and not same and known[-1].timestamp < point.timestamp:
                return True
        return False

    def leave(self, left: LeftBehind) -> None:
        """Forget the points that the run has left behind."""
        self._left_behind.append(left)
        self._owed += [point for point in self._repeated if point.step >= left.step]
        self._repeated = []
        self._taken = [point for point in self._taken if self._counts(point)]
        for steps in self._unmatched.values():
            for step, points in steps.items():
                steps[step] = [point for point in points if self._counts(point)]

    def confirm(self) -> None:
        """Note that the rows which were compared have been acknowledged: they will not be compared again."""
        self._taken, self._paid = [], []

    def put_back(self) -> None:
        """Put back what was taken for rows that have not been acknowledged, and are read again."""
        for point in self._taken:
            self._at(point).append(point)
        self._owed = self._paid + self._owed
        self._taken, self._paid = [], []

    def _at(self, point: Point) -> list[Point]:
        return self._unmatched.get(point.name, {}).setdefault(point.step, [])

    def _read_where_repeated(self, points: Sequence[Point]) -> None:
        for point in points:
            if point.step <= self._last.get(point.name, point.step - 1):
                self._read(point.name)

    def _read(self, name: str) -> None:
        if name not in self._unmatched:
            steps: dict[int, list[Point]] = {}
            for point in (Point(*values) for values in self._store.points(self._run_id, name)):
                if self._counts(point):
                    steps.setdefault(point.step, []).append(point)
            self._unmatched[name] = steps

    def _counts(self, point: Point) -> bool:
        return not any(left.has(point.name, point.step, point.timestamp) for left in self._left_behind)
