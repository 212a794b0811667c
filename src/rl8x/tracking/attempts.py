"""Tell an entry that a store does not take from a store that takes nothing now, and find the one among many."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from rl8x.tracking.store import StoreDownError, StoreRefusedError

TRIES = 3
# An entry that is not as it should be raises these in our own code, today and tomorrow.
_MALFORMED = (KeyError, TypeError, ValueError, AttributeError, OverflowError)
_ItemT = TypeVar("_ItemT")


class NotNowError(StoreDownError):
    """Nothing more can be sent now.

    Attributes:
        of_entry: Whether everything else of the store works, so that it may be the entry's fault.
    """

    def __init__(self, text: str, *, of_entry: bool = False) -> None:
        super().__init__(text)
        self.of_entry = of_entry


class Attempts:
    """Makes calls of a store that may fail because of what is sent.

    A call that the store refuses is made with half of the items, and so on, until those that it means have been found.
    One that fails although the store works otherwise is made again later; after `TRIES` times items are looked for in
    the same way. One item alone is tried `TRIES` times before it is given up.

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
        """Make a call with all items, except those that it cannot be made with.

        Args:
            items: What to send.
            call: Sends some of them, all or none.
            give_up: Called with each item that cannot be sent, and why.
            check: Raises where the store does not work, whatever is sent.

        Raises:
            NotNowError: The store does not work now, or it is too soon to blame an item.
        """
        given_up: list[tuple[_ItemT, Exception]] = []
        self._checked = False
        self._send(items, call, given_up, check)
        if given_up:
            _check(check)  # that it was not the store which went away among these calls
        for item, error in given_up:
            give_up(item, error)

    def _send(
        self,
        items: Sequence[_ItemT],
        call: Callable[[Sequence[_ItemT]], None],
        given_up: list[tuple[_ItemT, Exception]],
        check: Callable[[], None],
    ) -> None:
        if not items:
            return
        for tries in range(1, TRIES + 1):
            error = self._error_of(call, items, check)
            if error is None:
                return
            if len(items) > 1:
                break
            if tries == TRIES or isinstance(error, _MALFORMED):
                given_up.append((items[0], error))
                return
        half = len(items) // 2
        self._send(items[:half], call, given_up, check)
        self._send(items[half:], call, given_up, check)

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
        except Exception as error:  # whatever it is, also a mistake of our own
            _check(check)
            if self.failures < TRIES - 1:
                text = str(error) if isinstance(error, StoreDownError) else f"{type(error).__name__}: {error}"
                raise NotNowError(text, of_entry=True) from error
            return error
        return None


def _check(check: Callable[[], None]) -> None:
    try:
        check()
    except Exception as error:
        raise NotNowError(str(error)) from error
