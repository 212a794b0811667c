"""A condition on how long a run has taken."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Mapping
from typing import Any, Final

from rl8x.conditions.base import Condition, EvaluationName, Stats, Verdict
from rl8x.distributed import ranks

_SECONDS: Final = {"d": 86400.0, "h": 3600.0, "m": 60.0, "s": 1.0}
_DURATION: Final = re.compile(r"(\d+(?:\.\d+)?)\s*([dhms])\s*", re.ASCII)


def _seconds(duration: float | str) -> float:
    seconds = math.nan
    if isinstance(duration, str):
        text = duration.strip().lower()
        if text and not _DURATION.sub("", text):
            seconds = sum(float(number) * _SECONDS[unit] for number, unit in _DURATION.findall(text))
    elif isinstance(duration, int | float) and not isinstance(duration, bool):
        seconds = float(duration)
    if not 0 < seconds < math.inf:
        raise ValueError(
            f"WallTime needs a positive number of seconds or a text such as '90s', '1h30m', '2d'; got {duration!r}."
        )
    return seconds


class WallTime(Condition):
    """Met when the run has taken so long; a resumed run goes on counting from where it was saved.

    It is looked at once a row, and while a run waits for programs: a run ends with the first step that ends after it.

    Args:
        duration: Seconds, > 0, or a text such as "90s", "1h30m", "1.5h" or "2d".

    Attributes:
        seconds: The same in seconds.

    Raises:
        ValueError: If it is neither, or not positive.
    """

    def __init__(self, duration: float | str) -> None:
        self.duration = duration
        self.seconds = _seconds(duration)
        self._before = 0.0
        self._began: float | None = None

    @property
    def elapsed(self) -> float:
        """Seconds since the start, those before a resume among them."""
        return self._before + (0.0 if self._began is None else time.monotonic() - self._began)

    def start(self) -> None:
        """Begin to count."""
        self._before = 0.0
        self._began = time.monotonic()

    def judge(self, stats: Stats) -> Verdict:
        """Look at the clock, of several ranks that of rank 0, whatever the row."""
        if self._began is None:
            self._began = time.monotonic()
        return bool(ranks().first("the clock", self.elapsed >= self.seconds))

    def on_evaluation(self, evaluation_name: EvaluationName) -> Condition | None:
        """The condition itself: an evaluation does not change the time."""
        return self

    def own_state(self) -> dict[str, Any]:
        """The seconds elapsed."""
        return {"elapsed": self.elapsed}

    def load_own_state(self, state: Mapping[str, Any]) -> None:
        """Go on counting from there."""
        self._before = float(state["elapsed"])
        self._began = time.monotonic()

    def reason(self, stats: Stats) -> str:
        """Say how long the run took."""
        return f"{self!r}: {self.elapsed:.0f} s"
