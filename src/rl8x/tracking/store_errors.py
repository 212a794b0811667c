"""The errors of a store: it is down, it refuses a call, or it does not have the run."""

from __future__ import annotations

from rl8x.output import described
from rl8x.tracking.protocol import TrackingError


class StoreDownError(Exception):
    """The store cannot be reached, does not answer or does not work now; the same call may succeed later."""


class StoreRefusedError(Exception):
    """The store answered and will never take this call."""


class RunGoneError(StoreDownError):
    """The run is deleted or not there; it may be restored."""


class RunMissingError(RunGoneError):
    """The store never had the run, or no longer has it."""


def in_words(error: BaseException) -> str:
    """Return what an error of tracking says, and of any other error its type as well."""
    ours = isinstance(error, TrackingError | StoreDownError | StoreRefusedError)
    return str(error) if ours else described(error)
