"""Tell an entry that a store does not take from a store that is down, and find that entry among many."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from rl8x.tracking.store_errors import StoreDownError, StoreRefusedError, in_words

TRIES = 3
# An entry that is not as it should be raises these in our own code, today and tomorrow.
_MALFORMED = (KeyError, TypeError, ValueError, AttributeError, OverflowError)
_ItemT = TypeVar("_ItemT")


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
