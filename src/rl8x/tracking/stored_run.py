"""The run of a journal in its store, found or made once and ended once, and calls that may fail because of an entry."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from rl8x.tracking.journal import Op, SendingJournal
from rl8x.tracking.protocol import STATUSES, RunMissingError, StoreDownError, StoreRefusedError, in_words
from rl8x.tracking.store import DEFAULT_EXPERIMENT, SPOOL_TAG, MLflowStore, NewRun

TRIES = 3
STATUS_TAG = "rl8x.status"
RESUMED_TAG = "rl8x.resumed_from"
WRITER_TAG = "rl8x.journal"  # the journal that the run was gone on with last
_NAME_TRIES = 3
# An entry that is not as it should be raises these in our own code, today and tomorrow.
_MALFORMED = (KeyError, TypeError, ValueError, AttributeError, OverflowError)
_ItemT = TypeVar("_ItemT")


class StoredRun:
    """The run.

    Args:
        journal: The journal.
        store: The store.
        new_tags: Returns tags for a run that is made.
        fresh: The journal has just been made, so that the store cannot have a run for it.
        late: The process that wrote the journal is gone, so that another one may have gone on with the run since.

    Attributes:
        is_over: Whether another process has ended the run since: what that one wrote stays.
        is_resumed: Whether another process has gone on with it since, and may have logged the same rows.
    """

    def __init__(
        self,
        journal: SendingJournal,
        store: MLflowStore,
        *,
        new_tags: Callable[[], Mapping[str, str]],
        fresh: bool,
        late: bool,
    ) -> None:
        self.is_over = False
        self.is_resumed = False
        self.store = store
        self._journal = journal
        self._new_tags = new_tags
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
        assert self._journal.ack.run_id is not None
        return self._journal.ack.run_id

    @property
    def owned(self) -> bool:
        """Whether rl8x began the run, and not the user."""
        return bool(self._journal.header.get("owns", True))

    def ensure(self, set_aside: Callable[[Op, Exception], None]) -> None:
        """Find or make the run, and look up once what became of it since the journal was written.

        `set_aside` gets the op of a name or experiment that the store refuses.
        """
        if self._journal.ack.run_id is None:
            run_id = self._journal.header.get("run_id")
            if run_id is None:
                run_id = self._find_or_create(set_aside)
            else:
                self.store.check_run(run_id)
            self._journal.acknowledge(run_id=run_id, attempted=False)
        if self._late:
            self._look_for_others()
            self._late = False
        if self._journal.ack.run_name is None and self._name_tries < _NAME_TRIES:
            self._name_tries += 1
            with contextlib.suppress(StoreDownError, StoreRefusedError):  # only the last lines name it: no row waits
                name, is_free = self.store.run_name(self.id)
                self._journal.acknowledge(run_name=name, name_is_free=is_free)

    def _find_or_create(self, set_aside: Callable[[Op, Exception], None]) -> str:
        """Find or make the run. `create_run` is not idempotent: once one was asked for, look before asking again."""
        header = self._journal.header
        fields = (header.get("experiment"), header.get("experiment_id"), header.get("run_name"))
        spec = NewRun(header["spool_id"], *fields, start_time=header["t"])
        may_exist = self._journal.ack.attempted or not self._fresh
        run_ids = self.store.find_runs(spec) if may_exist else []
        if run_ids:
            run_id = run_ids[0]
        else:
            self._journal.acknowledge(attempted=True)
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
                    run_id = self.store.create_run(candidate, self._new_tags())
                except StoreRefusedError as error:
                    refused = refused or error
                    continue
                if refused is not None:
                    experiment = spec.experiment if candidate == plain else None
                    set_aside({"op": "open", "run_name": spec.run_name, "experiment": experiment}, refused)
                return run_id
        raise StoreDownError(str(refused))

    def _look_for_others(self) -> None:
        writer = self.store.tags(self.id).get(WRITER_TAG)
        self.is_resumed = writer not in (None, self._journal.header.get("writer"))
        if self.owned:
            status, end_time = self.store.status(self.id)
            self.is_over = status in STATUSES and (end_time is None or end_time >= self._journal.last_time())

    def begin_anew_where_gone(self) -> None:
        """Send all rows again to a store that does not have the run, such as a database in place of a deleted one.

        Raises `StoreDownError` where it does not work now, or the journal has not all rows of the run.
        """
        ack = self._journal.ack
        if ack.run_id is None:
            return
        try:
            self.store.check_run(ack.run_id)
        except StoreRefusedError as error:
            raise StoreDownError(str(error)) from error
        except RunMissingError:
            if ack.generation or self._journal.header.get("run_id"):
                raise
            self._journal.acknowledge(
                0, run_id=None, run_name=None, name_is_free=False, attempted=False, resumed=False, finished=False
            )

    # Whether the store works, whatever is sent.

    def check(self) -> None:
        """Raise unless the run is there and active."""
        self.store.check_run(self.id)

    def check_writes(self) -> None:
        """Write what is there already, by the same kind of request as metrics, params and tags."""
        self.check()
        spool_id = self.store.tags(self.id).get(SPOOL_TAG, str(self._journal.header["spool_id"]))
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
            self.finish("KILLED", self._journal.last_time())

    def _has_tag(self, name: str) -> bool:
        return name in self.store.tags(self.id)


class NotNowError(StoreDownError):
    """Nothing more can be sent now; `of_entry` where all else of the store works: it may be the entry's fault."""

    def __init__(self, text: str, *, of_entry: bool = False) -> None:
        super().__init__(text)
        self.of_entry = of_entry


class Attempts:
    """Makes calls of a store that may fail because of what is sent.

    A refused call is repeated with each half of its items, and so on, until the items at fault are found.
    A call that fails although the store works otherwise is repeated later; after `TRIES` failures the items at fault
    are searched for in the same way. A single item is tried `TRIES` times before it is given up.

    Attributes:
        failures: How often in a row the entry that is next failed while the store worked.
    """

    def __init__(self) -> None:
        self.failures = 0
        self._checked = False

    def send(
        self,
        items: Sequence[_ItemT],
        call: Callable[[Sequence[_ItemT]], None],
        give_up: Callable[[_ItemT, Exception], None],
        check: Callable[[], None],
    ) -> None:
        """Make a call with all items, except those that it cannot be made with: `give_up` gets each, and why.

        A call takes all that it is made with or none. `check` raises where the store does not work, whatever is sent;
        then this raises `NotNowError`, as where it is too soon to blame an item.
        """
        self._checked = False
        given_up: list[tuple[_ItemT, Exception]] = []
        parts = [items] if items else []
        while parts:
            part = parts.pop()
            error = self._error_of(call, part, check)
            if len(part) > 1 and error is not None:
                half = len(part) // 2
                parts += [part[half:], part[:half]]
                continue
            for _ in range(TRIES - 1):
                if error is None or isinstance(error, _MALFORMED):
                    break
                error = self._error_of(call, part, check)
            if error is not None:
                given_up.append((part[0], error))
        if given_up:
            _check(check)  # the store may have gone down during these calls
        for item, error in given_up:
            give_up(item, error)

    def _error_of(
        self, call: Callable[[Sequence[_ItemT]], None], items: Sequence[_ItemT], check: Callable[[], None]
    ) -> Exception | None:
        """Make a call; returns the error where it is the fault of the items."""
        try:
            call(items)
        except NotNowError:
            raise
        except StoreRefusedError as error:
            if not self._checked:  # a run that is deleted refuses all, and is not asked a thousand times
                _check(check)
                self._checked = True
            return error
        except _MALFORMED as error:
            return error
        except Exception as error:  # also a mistake of rl8x
            _check(check)
            if self.failures < TRIES - 1:
                raise NotNowError(in_words(error), of_entry=True) from error
            return error
        return None


def _check(check: Callable[[], None]) -> None:
    try:
        check()
    except Exception as error:
        raise NotNowError(str(error)) from error
