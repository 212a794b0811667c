"""Signals that end or save a run: noted when they come, and acted on between two steps."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from types import FrameType
from typing import Any, Final

_SIGNALS: Final = ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1")


def interruption(error: BaseException) -> str:
    """Return the stop reason of a run that a KeyboardInterrupt or SystemExit has ended."""
    return f"sys.exit({error.code!r:.100})" if isinstance(error, SystemExit) else "interrupted"


class SignalGuard:
    """Notes signals within a block: SIGINT, SIGTERM and SIGHUP end the run, SIGUSR1 saves it.

    Handlers are installed in the main thread only, as Python requires. A signal that the process ignores stays ignored,
    such as SIGINT in a background job of a shell script, or SIGHUP under `nohup`.
    """

    def __init__(self, *, quiet: bool = False) -> None:
        self.stop: signal.Signals | None = None  # the first that asked the run to end
        self.save = False  # whether a checkpoint was asked for; whoever writes it resets this
        self.quiet = quiet
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> SignalGuard:
        if threading.current_thread() is threading.main_thread():
            for name in _SIGNALS:
                number = getattr(signal, name, None)
                # A handler that is None was not installed by Python, and could not be put back.
                if number is not None and signal.getsignal(number) not in (signal.SIG_IGN, None):
                    self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}

    def _note(self, number: int, frame: FrameType | None) -> None:
        received = signal.Signals(number)
        if received.name == "SIGUSR1":
            self.save = True
            return
        if received == signal.SIGINT and self.stop is not None:
            raise KeyboardInterrupt
        if self.stop is None:
            self.stop = received
            # If the process was started without standard error, descriptor 2 may be any file that was opened later.
            if not self.quiet and sys.__stderr__ is not None:
                # Not print(): the signal may have come in the middle of one.
                with contextlib.suppress(OSError):
                    os.write(2, f"rl8x: {received.name}: ending after this step; Ctrl-C ends at once\n".encode())

    def exception(self) -> BaseException:
        """Return the exception with the signal's exit code: KeyboardInterrupt, or SystemExit(128 + n)."""
        assert self.stop is not None
        return KeyboardInterrupt() if self.stop == signal.SIGINT else SystemExit(128 + self.stop)
