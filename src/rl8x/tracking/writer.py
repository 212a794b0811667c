"""The thread that sends a spool while training goes on, and ends a run that the user's code has not ended."""

from __future__ import annotations

import atexit
import os
import random
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import KW_ONLY, InitVar, dataclass
from types import CodeType, FrameType
from typing import NamedTuple

from rl8x.tracking.location import Location
from rl8x.tracking.protocol import Status, status_of
from rl8x.tracking.runs import Whereabouts
from rl8x.tracking.secrets import hide, logger
from rl8x.tracking.sender import Sender
from rl8x.tracking.store import quiet_thread
from rl8x.tracking.store_errors import StoreDownError, in_words
from rl8x.tracking.system_metrics import SystemSampler

_log = logger(__name__)

FIRST_WAIT_S = 0.5
LONGEST_WAIT_S = 30.0
FIRST_CONTACT_S = 60.0  # importing mlflow and making a new database take this long on a slow, busy computer


class _Call(NamedTuple):
    """A call that logged something.

    Attributes:
        code: What ran in this place: see `_place`.
        thread: Where it ran.
        error_id: The `id` of the exception that was known already; itself would keep all that its frames hold.
    """

    code: CodeType | None
    thread: weakref.ref[threading.Thread]
    error_id: int


class LastCall:
    """Remembers the code that logged last; the run is FINISHED, unless that code was interrupted.

    - An exception came after the last row, out of the code that logged it: FAILED, or what `status_of` says.
      `sys.last_value` is what ended a script, a cell of a notebook or a line of an interpreter, and stays for good: an
      earlier one, or one of another cell, has nothing to do with this run. Of `sys.exit()` a script leaves none.
    - A daemon thread is still in that code when the interpreter ends, which cuts it off: KILLED.
    """

    def __init__(self) -> None:
        self._error: tuple[_Call, Status] | None = None
        self.note()

    def note(self) -> None:
        """Remember the caller as the code that logged last."""
        thread = weakref.ref(threading.current_thread())
        self._call = _Call(_place(sys._getframe(1)), thread, id(getattr(sys, "last_value", None)))

    def look(self) -> None:
        """Remember an exception that has interrupted the code which logged last, before another takes its place."""
        call, error = self._call, getattr(sys, "last_value", None)
        if error is None or id(error) == call.error_id:
            return
        traceback = error.__traceback__
        while traceback is not None and traceback.tb_frame.f_code is not call.code:
            traceback = traceback.tb_next
        if traceback is not None:
            self._error = (call, status_of(error))

    def status(self, *, at_exit: bool) -> Status:
        """Return how the run ended; `at_exit` where the interpreter ends now, and with it its daemon threads."""
        self.look()
        call, thread = self._call, self._call.thread()
        if self._error is not None and self._error[0] is call:
            return self._error[1]
        if at_exit and thread is not None and thread.daemon and thread.ident is not None:
            stack = _frames(sys._current_frames().get(thread.ident))
            if any(frame.f_code is call.code for frame in stack):
                return "KILLED"
        return "FINISHED"


def _place(frame: FrameType) -> CodeType | None:
    """Name the code in which a call was made: the script, cell, or line, or the function that runs in a thread.

    That is the outermost code of the main module, and where it has no part in the call, the innermost that is not
    rl8x's. What stands around a cell, such as IPython's own code, is not of that module, and around all cells.
    """
    main = vars(sys.modules["__main__"])
    innermost = outermost = None
    for caller in _frames(frame):
        if caller.f_globals is main:
            outermost = caller.f_code
        elif innermost is None and not str(caller.f_globals.get("__name__")).startswith("rl8x."):
            innermost = caller.f_code
    return outermost or innermost


def _frames(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


@dataclass(eq=False)
class Writer:
    """Sends a spool from a daemon thread, every `interval_s` where there is something to send.

    One warning is logged for each outage, and one line when it is over. Rows wait in the spool meanwhile. Where the
    tracker is collected, or the interpreter ends, before the run has been ended, the writer ends it.

    Args:
        sender: What to send with.
        location: The store, for messages.
        owner: The tracker, which the thread does not keep alive; None where someone else ends the run for sure.
        keeps_status: Whether the run is over, and its status stays as it is.
        finish_timeout_s: Seconds that `finish` waits at most; a minute more where the store has not been tried yet.
        outage_timeout_s: Seconds that `finish` waits for a store that is down.
        interval_s: Seconds between two looks at the spool: rows are gathered into few requests.
        sampler: Measures the machine, while the run goes on; None does not.
        prepare: Called once in the thread before anything is sent, for slow work such as importing mlflow.
        release: Called in the thread when all is over.
    """

    sender: Sender
    location: Location
    owner: InitVar[object] = None
    _: KW_ONLY
    keeps_status: bool = False
    finish_timeout_s: float = 30.0
    outage_timeout_s: float = 5.0
    interval_s: float = 1.0
    sampler: SystemSampler | None = None
    prepare: Callable[[], None] | None = None
    release: Callable[[], None] = lambda: None

    def __post_init__(self, owner: object) -> None:
        """Start the thread."""
        self._spool = self.sender.spool
        self._owner = None if owner is None else weakref.ref(owner)
        self._wake = threading.Event()
        self._progress = threading.Condition()
        self._appending = threading.Lock()
        self.last_call = LastCall()
        self._ended = False
        self._stopping = False
        self._failures = 0
        self._reason = ""
        self._settled = False
        self._answered_at = time.monotonic()
        self.sender.on_arrival = self._arrived
        self._thread = threading.Thread(target=self._run, name="rl8x-tracking", daemon=True)
        for other in list(_working):
            other.last_call.look()  # before another error takes the place of the one that ended that run
        if owner is not None:
            _working.add(self)
        self._thread.start()

    def append(self, op: Mapping[str, object]) -> None:
        """Add an op to the spool; none of a thread that still runs when the run has been ended at exit."""
        with self._appending:
            if not self._ended:
                self._spool.append(op)
        if op["op"] == "m":
            self.last_call.note()

    def end(self, status: Status | None, time_ms: int) -> None:
        """Write the end of the run to the spool, once; None, at the end of Python, leaves the status to `LastCall`."""
        with self._appending:
            if self._ended:
                return
            self._ended = True
            status = status or self.last_call.status(at_exit=True)
            self._spool.end({"op": "finish", "status": None if self.keeps_status else status, "t": time_ms})
        self._wake.set()

    @property
    def reason(self) -> str:
        """Why the last try failed; empty where it has not."""
        return self._reason if self._failures else ""

    def wait(
        self,
        done: Callable[[], bool],
        timeout_s: float,
        outage_timeout_s: float,
        *,
        first_contact_s: float = 0.0,
        begin: float | None = None,
    ) -> bool:
        """Send without delay until `done`; False where that does not come in time.

        A store that is down is waited for from its last answer on, for `outage_timeout_s` and as long as a request is
        under way; one that has not been tried yet for `first_contact_s` more. `begin` is of `time.monotonic()`.
        """
        begin = time.monotonic() if begin is None else begin
        with self._progress:
            while not done():
                bound = timeout_s if self._settled else timeout_s + first_contact_s
                away = self._is_away(outage_timeout_s, begin)
                if time.monotonic() - begin >= bound or away or not self._thread.is_alive():
                    return False
                self._wake.set()
                self._progress.wait(0.2 if self._failures else 0.05)
        return True

    def _is_away(self, timeout_s: float, begin: float = 0.0) -> bool:
        """Return whether the store has been down for so long, counted from `begin` at the earliest."""
        return self._failures > 0 and time.monotonic() - max(begin, self._answered_at) >= timeout_s

    def finish(self, begin: float | None = None) -> None:
        """Send the rest of a run that has ended, without waiting long for a store that is down, and end the thread."""
        try:
            timeouts = (self.finish_timeout_s, self.outage_timeout_s)
            self.wait(self._all_arrived, *timeouts, first_contact_s=FIRST_CONTACT_S, begin=begin)
        finally:  # a second Ctrl-C ends the waiting, but the thread still gives the spool back
            _working.discard(self)
            self.stop()
            self._spool.look_after()  # where the thread hangs in a request
            self._spool.note_end()
        self._warn_of_rest()

    def _all_arrived(self) -> bool:
        return not self._spool.pending

    def _warn_of_rest(self) -> None:
        where, store = Whereabouts(self.location, self._spool, self.reason), self.location.shown
        if where.unsent.lost:
            _log.warning("tracking: the run has lost %s: neither the disk nor %s took them", where.unsent.lost, store)
        elif not self._all_arrived():
            rest = f"it is in {self._spool.folder}, and `{where.sync_command}` sends it"
            _log.warning("tracking: not all of the run has reached %s%s; %s", store, where.why, rest)

    def stop(self, timeout_s: float = 1.0) -> None:
        """End the thread. One that hangs in a request is left to itself; it gives the spool back when it is through."""
        self._stopping = True
        self._wake.set()
        self._thread.join(timeout_s)

    def _run(self) -> None:
        with quiet_thread():
            wait_s = 0.0
            while not self._stopping:
                self._pause(wait_s)
                self._wake.clear()
                self.last_call.look()
                collected = self._owner is not None and self._owner() is None
                if collected:
                    self.end(self.last_call.status(at_exit=False), time.time_ns() // 1_000_000)
                wait_s = self._send()
                self._settled = True
                with self._progress:
                    self._progress.notify_all()
                if collected and (self._all_arrived() or self._is_away(self.outage_timeout_s)):
                    self._warn_of_rest()
                    break
            self._spool.look_after()
            self._spool.close(remove=self._spool.ack.finished and not self._spool.pending)
            self.release()
            _working.discard(self)

    def _pause(self, wait_s: float) -> None:
        """Wait until it is time to send, or something cannot wait; look after the spool meanwhile."""
        end = time.monotonic() + wait_s
        while True:
            self._spool.look_after()
            self._sample()
            left = end - time.monotonic()
            if left <= 0 or self._wake.wait(min(left, self.interval_s)):
                return

    def _sample(self) -> None:
        """Add a sample of the machine to the spool, where one is due."""
        if self.sampler is None or self._ended:
            return
        try:
            measured = self.sampler.sample()
        except Exception:  # a system that does not say all: training goes on, without samples
            _log.debug("tracking: no system metrics", exc_info=True)
            self.sampler = None
            return
        if measured:
            self.append({"op": "system", "t": time.time_ns() // 1_000_000, "m": measured})

    def _send(self) -> float:
        """Send all that is pending; returns how long to wait before the next look."""
        if not self._failures:
            self._answered_at = time.monotonic()  # or would have, had it been asked
        try:
            if self.prepare is not None:
                self.prepare()
                self.prepare = None
            while not self._stopping:
                self.sender.send_some()
                self._arrived()  # also where there was nothing to send: the store has answered
                if not self._spool.pending:
                    break
        except Exception as error:
            if not isinstance(error, StoreDownError):  # a mistake of rl8x: training goes on all the same
                _log.debug("tracking: unexpected error", exc_info=True)
            return self._failed(in_words(error))
        return self.interval_s

    def _arrived(self) -> None:
        if self._failures:
            self._failures = 0
            _log.info("tracking: %s takes rows again; what waited is being sent", self.location.shown)
        self._settled = True
        self._answered_at = time.monotonic()
        with self._progress:
            self._progress.notify_all()

    def _failed(self, reason: str) -> float:
        reason = hide(reason)
        if not self._failures:
            rest = f"training goes on and rows wait in {self._spool.folder}"
            _log.warning("tracking: %s does not take rows (%s); %s", self.location.shown, reason, rest)
        self._failures += 1
        self._reason = reason
        longest = min(LONGEST_WAIT_S, FIRST_WAIT_S * 2.0 ** min(self._failures - 1, 10))
        return longest * random.uniform(0.5, 1.0)


_working: set[Writer] = set()  # those whose run has not been ended, or not arrived yet after its tracker was collected


def _end_at_exit() -> None:
    """End all runs that the script left open, together, so that a store which is down is waited for once."""
    begin, now = time.monotonic(), time.time_ns() // 1_000_000
    writers = list(_working)
    for writer in writers:
        writer.end(None, now)
    for writer in writers:
        writer.finish(begin)


atexit.register(_end_at_exit)
os.register_at_fork(after_in_child=_working.clear)  # they are the parent's
