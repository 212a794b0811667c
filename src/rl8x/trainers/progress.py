"""What a user sees while a run goes on: a bar on a terminal, a line now and then elsewhere, nothing on request."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from typing import Any, Final, Literal

from tqdm import tqdm

from rl8x import keys

Progress = Literal["auto", "bar", "lines", "none"]
PROGRESS_CHOICES: Final = ("auto", "bar", "lines", "none")
_SECONDS_PER_LINE: Final = 10.0
_SHOWN: Final = (
    ("return", ("episodes/returns/mean", "returns/mean")),
    ("length", ("episodes/lengths/mean",)),
    ("eval", ("eval/episodes/returns/mean", "eval/returns/mean")),
    ("kl", ("monitors/kl_div",)),
)


class ProgressReporter:
    """Shows the state of a run.

    Args:
        mode: `"auto"` is a bar where standard error is a terminal and lines elsewhere.
        total_steps: Steps after which the run ends at the latest; None where nothing says so.

    Raises:
        ValueError: If there is no such mode.
    """

    def __init__(self, mode: Progress, total_steps: int | None = None) -> None:
        if mode not in PROGRESS_CHOICES:
            raise ValueError(f"`progress` must be one of {', '.join(map(repr, PROGRESS_CHOICES))}; got {mode!r}.")
        if mode == "auto":
            mode = "bar" if sys.stderr.isatty() else "lines"
        self.mode = mode
        self._bar: Any = None
        if mode == "bar":
            self._bar = tqdm(total=total_steps, unit="step", dynamic_ncols=True, smoothing=0.1, file=sys.stderr)
        self._last_line = time.monotonic()

    def update(self, stats: Mapping[str, float]) -> None:
        """Show one row."""
        if self._bar is not None:
            self._bar.set_postfix_str(describe(stats), refresh=False)
            self._bar.update()
        elif self.mode == "lines" and time.monotonic() - self._last_line >= _SECONDS_PER_LINE:
            self._last_line = time.monotonic()
            self.say(f"step {stats[keys.STEPS]:,.0f}, {describe(stats)}")

    def say(self, message: str) -> None:
        """Print a message without tearing the bar."""
        if self._bar is not None:
            self._bar.write(message, file=sys.stderr)
        elif self.mode != "none":
            print(f"rl8x: {message}", file=sys.stderr, flush=True)

    def close(self) -> None:
        """Leave the bar as it stands."""
        if self._bar is not None:
            self._bar.close()


def describe(stats: Mapping[str, float]) -> str:
    """Put the figures that say most about a run in one line."""
    parts = [f"env steps {stats[keys.ENV_STEPS]:,.0f}"] if keys.ENV_STEPS in stats else []
    for label, names in _SHOWN:
        for name in names:
            if name in stats:
                parts.append(f"{label} {stats[name]:.4g}")
                break
    if "profiling/env_steps_per_s" in stats:
        parts.append(f"{stats['profiling/env_steps_per_s']:,.0f}/s")
    return ", ".join(parts)
