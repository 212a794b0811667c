"""The training's side of the shipper: it starts that process, tells it of journals, and learns from `ack.json`.

One thread looks once a second at all runs that are open: it tells of outages and of what was set aside, brings to the
disk what waits in memory, replaces a shipper that is gone or shows no beat, and ends runs whose tracker was collected.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import json
import os
import subprocess
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import CodeType, FrameType
from typing import IO, Final, cast

from rl8x.processes import python_process
from rl8x.tracking.appending import MAX_MEMORY_LINES, Journal
from rl8x.tracking.journal import REJECTED, name_of, read_rejected
from rl8x.tracking.location import Location, is_default
from rl8x.tracking.protocol import Status, status_of
from rl8x.tracking.runs import Whereabouts
from rl8x.tracking.secrets import logger

_log = logger(__name__)

FIRST_CONTACT_S: Final = 60.0  # importing mlflow and making a new database take this long on a slow, busy computer
SILENT_S: Final = 5  # without a beat: a store that is down
KILL_S: Final = 60  # without a beat: killed, and replaced
_END_S: Final = 1.0
_LOOK_S: Final = 1.0
# What the shipper is told of a run: seconds until an HTTP request counts as failed, between two looks at the journal
# and between two samples of the machine; whether the store cannot have the run yet.
TOLD: Final = {"timeout_s": 10, "interval_s": 1.0, "sample": None, "fresh": True}
_CODE: Final = "from rl8x.tracking.shipper import main; main"


class OpenRun:
    """A run that is being logged: its journal, and what the shipper says of it.

    One warning is logged for each outage, and one line when it is over; rows wait in the journal meanwhile. Where the
    tracker, `owner`, is collected, or the interpreter ends, before the run has been ended, it is ended here.
    `keeps_status` says that the run is over, and its status stays as it is; the shipper is `told` the rest.
    """

    def __init__(
        self,
        journal: Journal,
        location: Location,
        owner: object = None,
        *,
        keeps_status: bool = False,
        finish_timeout_s: float = 30.0,
        outage_timeout_s: float = 5.0,
        **told: object,
    ) -> None:
        """Tell the shipper of it."""
        self.journal, self.location = journal, location
        self.keeps_status = keeps_status
        self.finish_timeout_s, self.outage_timeout_s = finish_timeout_s, outage_timeout_s
        self._told = {**TOLD, **told}
        self._owner = None if owner is None else weakref.ref(owner)
        self._appending = threading.RLock()
        self.last_call = LastCall()
        self.outage = ""  # why the store takes nothing now
        self._ended = self._is_left = False
        self._answered_at = time.monotonic()
        self._progress = (0, 0)
        self._shipper: _Shipper | None = None
        self._beat, self._silent_s, self._sent_number = -1, 0, 0
        self._named: set[str] = set()
        self._num_rejected = journal.ack.rejected
        for other in list(_open):
            other.last_call.look()  # before another error takes the place of the one that ended that run
        _open.add(self)
        self._tell()
        _watch()

    def append(self, op: Mapping[str, object]) -> None:
        """Add an op to the journal; none of a thread that still runs when the run has been ended at exit."""
        with self._appending:
            if not self._ended:
                self.journal.append(op)
                if self.journal.num_waiting > MAX_MEMORY_LINES // 2:
                    self._send_lines()
        if op["op"] == "m":
            self.last_call.note()

    def end(self, status: Status | None, time_ms: int) -> None:
        """Write the end of the run to the journal, once; None, at Python's end, leaves the status to `LastCall`."""
        with self._appending:
            if self._ended:
                return
            self._ended = True
            status = status or self.last_call.status(at_exit=True)
            self.journal.end({"op": "finish", "status": None if self.keeps_status else status, "t": time_ms})
        self._say("hurry")

    def _tell(self) -> None:
        """Tell the shipper of the journal, and start it where it does not run."""
        try:
            self._shipper = _started(self.location.database)
        except (OSError, RuntimeError) as error:
            self._note(f"the process that talks to MLflow cannot be started: {error}")
            return
        self._beat, self._silent_s, self._sent_number = -1, 0, 0
        # The address of the store, with any password in it, goes through the pipe. MLflow takes the run's source from
        # the arguments, and credentials from the environment, as they are now.
        self._say(
            "send",
            folder=str(self.journal.folder),
            location=dataclasses.astuple(self.location),
            is_default=is_default(self.location),
            pid=os.getpid(),
            argv=sys.argv,
            env=dict(os.environ),
            **self._told,
        )

    def _say(self, do: str, **about: object) -> None:
        if self._shipper is not None:
            self._shipper.tell({"do": do, "journal": str(self.journal.header["spool_id"]), **about})

    def _send_lines(self) -> None:
        """Hand what the disk does not take to the shipper: the disk or MLflow has it then, whichever comes first."""
        lines = self.journal.waiting(self._sent_number)
        if lines and self._shipper is not None:
            self._sent_number = lines[-1][0]
            self._say("lines", lines=[(number, line.decode()) for number, line in lines])

    def look(self) -> None:
        """Do what is due once a second."""
        self.last_call.look()
        is_collected = self._owner is not None and self._owner() is None
        if is_collected:
            self.end(self.last_call.status(at_exit=False), time.time_ns() // 1_000_000)
        self.journal.look()
        if self.journal.num_waiting > (0 if self._ended else MAX_MEMORY_LINES // 2):
            self._send_lines()
        self._check_shipper()
        self._hear()
        if is_collected and (self.has_arrived or self._is_away(self.outage_timeout_s)):
            self._leave()

    def _check_shipper(self) -> None:
        """Tell where the shipper shows no beat, and replace it where it is gone or has shown none for long."""
        with self._appending:
            shipper = self._shipper
            if self._is_left:  # or a journal that is closed would be sent once more
                return
            if shipper is None or shipper.is_gone():
                if shipper is not None and not self.has_arrived:
                    self._note(f"the process that talks to MLflow is gone (exit status {shipper.popen.returncode})")
                self._tell()
                return
            shipper.pump()
            beat = self.journal.ack.beat
            if beat != self._beat:
                self._beat, self._silent_s = beat, 0
            # Counted in looks without a beat, not by the clock, which also runs while this process is stopped.
            elif self._silent_s < SILENT_S - 1 or not shipper.is_busy():
                self._silent_s += 1
                if self._silent_s >= KILL_S:
                    shipper.popen.kill()

    def _hear(self) -> None:
        """Read what has arrived; tell of an outage, its end, and what was set aside."""
        with self._appending:  # a thread that waits and the one that looks would both tell
            ack = self.journal.ack
            reason = ack.outage
            if self._shipper is None:  # it cannot be started, as `_tell` has noted
                reason = self.outage
            elif self._silent_s >= SILENT_S:
                pid = self._shipper.popen.pid
                reason = f"the process that talks to MLflow (process ID {pid}) does not answer: is it stopped?"
            progress = (ack.offset, ack.memory)
            if not reason or progress != self._progress:
                self._answered_at, self._progress = time.monotonic(), progress  # or would have, had it been asked
            self._note(reason)
            path = self.journal.folder / REJECTED
            for entry in read_rejected(path) if ack.rejected > self._num_rejected else ():
                name = name_of(entry["rejected"])
                if name not in self._named:
                    self._named.add(name)
                    where = f"it is in {path}, and `rl8x sync` tries it again"
                    why = entry.get("reason")
                    _log.warning("tracking: %s could not be logged (%s) and is set aside: %s", name, why, where)
            self._num_rejected = ack.rejected

    def _note(self, reason: str) -> None:
        if reason and not self.outage:
            rest = f"training goes on and rows wait in {self.journal.folder}"
            _log.warning("tracking: %s does not take rows (%s); %s", self.location.shown, reason, rest)
        elif self.outage and not reason:
            _log.info("tracking: %s takes rows again; what waited is being sent", self.location.shown)
        self.outage = reason

    @property
    def has_arrived(self) -> bool:
        """Whether the store has all of a run that has ended."""
        return self.journal.has_arrived and self.journal.ack.finished

    def wait(
        self,
        done: Callable[[], bool],
        timeout_s: float,
        outage_timeout_s: float,
        *,
        first_contact_s: float = 0.0,
        begin: float | None = None,
    ) -> bool:
        """Wait from `begin` on (by `time.monotonic()`) until `done`; False where that does not come in time.

        A store that is down is waited for from its last answer on, for `outage_timeout_s` and as long as a request is
        under way; one that has not been tried when this begins for `first_contact_s` more.
        """
        begin = time.monotonic() if begin is None else begin
        bound = timeout_s if self.journal.ack.tried else timeout_s + first_contact_s
        pause_s, hurried = 0.002, 0.0
        while not done():
            now = time.monotonic()
            self._hear()
            if now - begin >= bound or self._is_away(outage_timeout_s, begin):
                return done()
            if now - hurried > 0.2:  # what waits for its next try does not
                hurried = now
                self._say("hurry")
                if self._shipper is None or self._shipper.is_gone():
                    self._check_shipper()
            time.sleep(pause_s)
            pause_s = min(0.05, 1.5 * pause_s)
        return True

    def _is_away(self, timeout_s: float, begin: float = 0.0) -> bool:
        """Return whether the store has been down for so long, counted from `begin` at the earliest."""
        return self.outage != "" and time.monotonic() - max(begin, self._answered_at) >= timeout_s

    def finish(self, begin: float | None = None) -> None:
        """Wait until the shipper has sent the rest of a run that has ended, but not long for a store that is down."""
        try:
            if self.journal.num_waiting:
                self._send_lines()
            timeouts = (self.finish_timeout_s, self.outage_timeout_s)
            if not self.wait(lambda: self.has_arrived, *timeouts, first_contact_s=FIRST_CONTACT_S, begin=begin):
                self.outage = self.outage or f"it took longer than {self.finish_timeout_s:g} s"
        finally:  # a second Ctrl-C ends the waiting
            self._leave()

    def _leave(self) -> None:
        """Close the journal, tell what has not arrived, and let the shipper end where no run needs it.

        What the shipper has not sent it goes on to send. The run is open until it is told: Python's end waits for that.
        """
        with self._appending:
            if self._is_left:
                return
            self._is_left = True
            if self._silent_s >= SILENT_S and self._shipper is not None:
                self._shipper.popen.kill()  # or it would keep `rl8x sync` away
            self._say("close")
            self.journal.close()
            self._warn_of_rest()
        _open.discard(self)
        shipper = None if _keeps else _unused()
        if shipper is not None:
            shipper.end()

    def _warn_of_rest(self) -> None:
        where, store = Whereabouts(self.location, self.journal, self.outage), self.location.shown
        if where.unsent.lost:
            _log.warning("tracking: the run has lost %s: neither the disk nor %s took them", where.unsent.lost, store)
        elif where.unsent.num_rows or where.unsent.num_others:
            rest = f"it is in {self.journal.folder}, and `{where.sync_command}` sends it"
            _log.warning("tracking: not all of the run has reached %s%s; %s", store, where.why, rest)


class _Shipper:
    """The process, and the pipe to it, which is written without ever waiting: it may have been stopped."""

    def __init__(self, database: Path | None) -> None:
        words = f"{os.getpid()}, {database and str(database)!a}"
        self.popen = subprocess.Popen(
            # MLflow writes paths as text: in UTF-8, whatever the locale.
            **python_process("-X", "utf8", "-c", f"{_CODE}({words})"),
            bufsize=0,  # nothing that a fork would copy and write twice
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            # A Ctrl-C in the terminal is the training's business. No session of its own: Linux shares processors
            # between sessions first, whatever the niceness inside each.
            process_group=0,
        )
        self._stdin = cast("IO[bytes]", self.popen.stdin)
        os.set_blocking(self._stdin.fileno(), False)
        self._left = bytearray()
        self._guard = threading.RLock()

    def tell(self, message: Mapping[str, object]) -> None:
        """Send a message, as far as the pipe takes it; `pump` sends the rest."""
        with self._guard:
            if not (message["do"] == "hurry" and self._left):
                self._left += json.dumps(message, default=os.fspath).encode() + b"\n"
            self.pump()

    def pump(self) -> None:
        """Send on what the pipe did not take."""
        with self._guard, contextlib.suppress(OSError, ValueError):  # full, or gone, as `is_gone` finds out
            while self._left:
                del self._left[: os.write(self._stdin.fileno(), self._left)]

    def is_gone(self) -> bool:
        """Whether the process has ended."""
        with self._guard:
            return self.popen.poll() is not None

    def is_busy(self) -> bool:
        """Return whether it would run if it could, or reads a disk: its low priority may keep it for long."""
        with contextlib.suppress(OSError):
            for file in Path(f"/proc/{self.popen.pid}/task").glob("*/stat"):
                if file.read_text().rpartition(")")[2].split()[0] in "RD":
                    return True
        return False

    def end(self) -> None:
        """Let the process end once it has sent all that it was told of."""
        self.pump()
        self._stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.popen.wait(0.0)

    def leave_to_parent(self) -> None:
        """Close this process's copy of the pipe, in a child that was forked from the process that owns it."""
        self._guard = threading.RLock()
        self._stdin.close()
        self.popen.returncode = 0  # not this process's to wait for


_open: set[OpenRun] = set()  # runs that have not been ended, or whose tracker was collected and that have not arrived
_guard = threading.RLock()
_shared: _Shipper | None = None
_keeps = False
_watcher: threading.Thread | None = None


def _started(database: Path | None) -> _Shipper:
    global _shared
    with _guard:
        if _shared is None or _shared.is_gone():
            _shared = _Shipper(database)
        return _shared


def start_early(database: Path | None) -> None:
    """Start the shipper before a run needs it, so that MLflow is imported while this process imports torch."""
    with contextlib.suppress(OSError, RuntimeError):
        _started(database)


def keep_shipper() -> None:
    """Keep the shipper until this process ends: runs that follow each other then wait for one import of MLflow only."""
    global _keeps
    _keeps = True


def end_unused() -> None:
    """End the shipper where it was started early and nothing needs it."""
    shipper = _unused()
    if shipper is not None:
        shipper.popen.kill()  # at once: it has nothing open, and would first end an import
        with contextlib.suppress(subprocess.TimeoutExpired):
            shipper.popen.wait(_END_S)


def _unused() -> _Shipper | None:
    """Give the shipper away where no run needs it."""
    global _shared
    with _guard:
        shipper = None if _open else _shared
        _shared = _shared if _open else None
        return shipper


def _watch() -> None:
    """Have a thread look after the open runs, as long as there are some."""
    global _watcher
    with _guard:
        if _watcher is None:
            _watcher = threading.Thread(target=_look_after_all, name="rl8x-tracking", daemon=True)
            _watcher.start()


def _look_after_all() -> None:
    global _watcher
    while True:
        time.sleep(_LOOK_S)
        for run in list(_open):
            try:
                run.look()
            except Exception:  # a mistake of rl8x: training goes on all the same
                _log.debug("tracking: unexpected error", exc_info=True)
        with _guard:
            if not _open:
                _watcher = None
                return


def _end_at_exit() -> None:
    """End all runs that the script left open, together, so that a store which is down is waited for once."""
    begin, now = time.monotonic(), time.time_ns() // 1_000_000
    runs = list(_open)
    for run in runs:
        run.end(None, now)
    for run in runs:
        run.finish(begin)


def _leave_to_parent() -> None:
    """Close what a forked child has of the shipper and of journals: with its pipe held open, it would outlive both."""
    global _guard, _shared, _watcher
    _guard, _watcher = threading.RLock(), None
    if _shared is not None:
        _shared.leave_to_parent()
    for run in _open:
        run.journal.release_in_child()
    _open.clear()
    _shared = None


atexit.register(_end_at_exit)
os.register_at_fork(after_in_child=_leave_to_parent)


class LastCall:
    """Remembers the code that logged last; the run is FINISHED, unless that code was interrupted.

    - An exception came after the last row, out of the code that logged it: FAILED, or what `status_of` says. An older
      `sys.last_value`, or one of another cell, has nothing to do with this run. Of `sys.exit()` a script leaves none.
    - A daemon thread is still in that code when the interpreter ends, which cuts it off: KILLED.
    """

    def __init__(self) -> None:
        self.note()

    def note(self) -> None:
        """Remember the caller as the code that logged last."""
        self._code = _place(sys._getframe(1))
        self._thread = weakref.ref(threading.current_thread())
        self._error_before = id(getattr(sys, "last_value", None))
        self._status: Status | None = None

    def look(self) -> None:
        """Remember an exception that has interrupted the code which logged last, before another takes its place."""
        error: BaseException | None = getattr(sys, "last_value", None)
        if error is None or id(error) == self._error_before:
            return
        if self._code in [frame.f_code for frame, _ in traceback.walk_tb(error.__traceback__)]:
            self._status = status_of(error)

    def status(self, *, at_exit: bool) -> Status:
        """Return how the run ended; `at_exit` where the interpreter ends now, and with it its daemon threads."""
        self.look()
        thread = self._thread()
        if self._status is None and at_exit and thread is not None and thread.daemon and thread.ident is not None:
            is_cut_off = self._code in [frame.f_code for frame in _frames(sys._current_frames().get(thread.ident))]
            return "KILLED" if is_cut_off else "FINISHED"
        return self._status or "FINISHED"


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
