"""How a run ended that nobody has ended: by the code that logged last."""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Iterator
from types import CodeType, FrameType
from typing import NamedTuple

from rl8x.tracking.protocol import Status, status_of


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
