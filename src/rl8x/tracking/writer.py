"""The one thread that sends a spool while training goes on, and outlasts the store's absence."""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable

from rl8x.tracking.sender import Sender
from rl8x.tracking.spool import Spool
from rl8x.tracking.store import StoreDownError, quiet_thread

_log = logging.getLogger(__name__)

FIRST_WAIT_S = 0.5
LONGEST_WAIT_S = 30.0
FIRST_CONTACT_S = 60.0  # importing mlflow and making a new database take this long on a slow, busy computer


class Writer:
    """Sends a spool from a daemon thread, every `interval_s` where there is something to send.

    One warning is logged for each outage, and one line when it is over. Rows wait in the spool meanwhile.

    Args:
        sender: What to send with.
        location: The store, for messages.
        interval_s: Seconds between two looks at the spool: rows are gathered into few requests.
        prepare: Called once in the thread before anything is sent, for slow work such as importing mlflow.
        release: Called in the thread when all is over.
    """

    def __init__(
        self,
        sender: Sender,
        location: str,
        *,
        interval_s: float = 1.0,
        prepare: Callable[[], None] | None = None,
        release: Callable[[], None] = lambda: None,
    ) -> None:
        self._sender = sender
        self._spool: Spool = sender.spool
        self._location = location
        self._interval_s = interval_s
        self._prepare = prepare
        self._release = release
        self._wake = threading.Event()
        self._progress = threading.Condition()
        self._stopping = False
        self._failures = 0
        self._reason = ""
        self._settled = False
        sender.on_arrival = self._arrived
        self._thread = threading.Thread(target=self._run, name="rl8x-tracking", daemon=True)
        self._thread.start()

    @property
    def down(self) -> bool:
        """Say whether the last try failed."""
        return self._failures > 0

    @property
    def reason(self) -> str:
        """Say why the last try failed; empty where it has not."""
        return self._reason if self.down else ""

    def wait(
        self, done: Callable[[], bool], timeout_s: float, outage_timeout_s: float, first_contact_s: float = 0.0
    ) -> bool:
        """Send without delay until `done`, but no longer than `outage_timeout_s` where the store is down.

        Until the store has been tried for the first time, `timeout_s` is longer by `first_contact_s`.
        """
        begin = time.monotonic()
        down_at: float | None = None
        with self._progress:
            while not done():
                now = time.monotonic()
                down_at = None if not self.down else down_at if down_at is not None else now
                bound = timeout_s if self._settled else timeout_s + first_contact_s
                over = now - begin >= bound or (down_at is not None and now - down_at >= outage_timeout_s)
                if over or not self._thread.is_alive():
                    return False
                self._wake.set()
                self._progress.wait(0.2 if self.down else 0.05)
        return True

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
                wait_s = self._send()
                self._settled = True
                with self._progress:
                    self._progress.notify_all()
            self._spool.write_anew_where_deleted()
            self._spool.close(remove=self._spool.ack.finished and not self._spool.pending)
            self._release()

    def _pause(self, wait_s: float) -> None:
        """Wait until it is time to send, or something cannot wait; look after the spool meanwhile."""
        end = time.monotonic() + wait_s
        while True:
            self._spool.write_anew_where_deleted()
            left = end - time.monotonic()
            if left <= 0 or self._wake.wait(min(left, self._interval_s)):
                return

    def _send(self) -> float:
        """Send all that is pending; returns how long to wait before the next look."""
        try:
            if self._prepare is not None:
                self._prepare()
                self._prepare = None
            while not self._stopping:
                self._sender.send_some()
                self._arrived()  # also where there was nothing to send: the store has answered
                if not self._spool.pending:
                    break
        except StoreDownError as error:
            return self._failed(str(error))
        except Exception as error:  # ours, or one that the store should have turned: training goes on all the same
            _log.debug("tracking: unexpected error", exc_info=True)
            return self._failed(f"{type(error).__name__}: {error}")
        return self._interval_s

    def _arrived(self) -> None:
        if self._failures:
            self._failures = 0
            _log.info("tracking: %s takes rows again; what waited is being sent", self._location)
        self._settled = True
        with self._progress:
            self._progress.notify_all()

    def _failed(self, reason: str) -> float:
        if not self._failures:
            _log.warning(
                "tracking: %s does not take rows (%s); training goes on and rows wait in %s",
                self._location,
                reason,
                self._spool.folder,
            )
        self._failures += 1
        self._reason = reason
        longest = min(LONGEST_WAIT_S, FIRST_WAIT_S * 2.0 ** min(self._failures - 1, 10))
        return longest * random.uniform(0.5, 1.0)
