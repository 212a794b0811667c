"""Progress of a run: a bar on a terminal and in a notebook, otherwise a line every ten seconds, or nothing."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
import warnings
from collections.abc import Iterator, Mapping
from typing import Any, Final, Literal

from tqdm import TqdmWarning, tqdm

from rl8x import keys
from rl8x.output import Unfailing, in_notebook, short

Progress = Literal["auto", "bar", "lines", "none"]
PROGRESS_CHOICES: Final = ("auto", "bar", "lines", "none")
_SECONDS_PER_LINE: Final = 10.0
_SECONDS_OF_SILENCE: Final = 2.0
# Metrics stand in a terminal's line as whole ones, the most important first, beside a bar where there is room for it.
_BAR: Final = "{l_bar}{bar}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}{postfix}]"
_WITHOUT_BAR: Final = "{percentage:3.0f}% {n_fmt}/{total_fmt} [{elapsed}<{remaining}{postfix}]"
_COUNT: Final = "{n_fmt} steps [{elapsed}{postfix}]"
_BAR_COLUMNS: Final = 10
_LEAST_METRICS: Final = 3  # that are worth more than a bar
_EPISODE_RETURN, _HORIZON_RETURN = keys.TRAINED_RETURNS


class ProgressReporter:
    """Shows the progress of a run beside the counter `clock`; errors in writing it are ignored."""

    def __init__(self, mode: Progress, total_steps: int | None = None, clock: str = keys.ENV_STEPS) -> None:
        if mode not in PROGRESS_CHOICES:
            raise ValueError(f"`progress` must be one of {', '.join(map(repr, PROGRESS_CHOICES))}; got {mode!r}.")
        self._stream = Unfailing(sys.stderr)
        if mode == "auto":
            mode = "bar" if self._stream.isatty() or in_notebook() else "lines"
        self.mode = mode
        self._clock = clock
        self._bar: Any = None
        if mode == "bar":
            form = _form(total_steps)
            options: Any = {"dynamic_ncols": True, "smoothing": 0.1, "file": self._stream}
            self._bar = _bar_class()(total=total_steps, bar_format=form, **options)
        self._last_line = time.monotonic()
        self._episode_return: float | None = None

    def update(self, stats: Mapping[str, float], total_steps: int | None = None) -> None:
        """Show one row, and the progress towards `total_steps` as estimated now; None if unbounded."""
        self._episode_return = stats.get(_EPISODE_RETURN, self._episode_return)
        if self._bar is not None:
            if self._bar.total != total_steps and hasattr(self._bar, "container"):  # a notebook's widget
                self._bar.container.children[1].max = total_steps or 1
            self._bar.total = total_steps
            self._fit(metric_texts(stats, self._episode_return, self._clock))
            self._bar.update()
        elif self.mode == "lines" and time.monotonic() - self._last_line >= _SECONDS_PER_LINE:
            self._last_line = time.monotonic()
            metrics = ", ".join(metric_texts(stats, self._episode_return, self._clock))
            self.say(f"step {stats[keys.STEPS]:,.0f}, {metrics}")

    def _fit(self, texts: list[str]) -> None:
        """Show as many metrics as the terminal has columns for, and a bar where it fits beside the first."""
        bar = self._bar
        bar.bar_format, bar.postfix = _form(bar.total), ", ".join(texts)
        if hasattr(bar, "container"):
            return
        shown = bar.format_dict
        if not shown["ncols"]:
            return
        bare = bar.bar_format if bar.total is None else _WITHOUT_BAR
        for count in range(len(texts), -1, -1):
            bar.postfix = ", ".join(texts[:count])
            room = shown["ncols"] - len(bar.format_meter(**{**shown, "bar_format": bare, "postfix": bar.postfix}))
            if room > (0 if bar.total is None or count <= _LEAST_METRICS else _BAR_COLUMNS):
                bar.bar_format = bar.bar_format if room > _BAR_COLUMNS else bare
                return

    def say(self, message: str) -> None:
        """Print a message above the bar."""
        if self._bar is not None:
            self._bar.write(message, file=self._stream)
        elif self.mode != "none":
            print(f"rl8x: {message}", file=self._stream, flush=True)

    @contextlib.contextmanager
    def waiting(self, message: str) -> Iterator[None]:
        """Print a message if the block takes longer than two seconds."""
        timer = threading.Timer(_SECONDS_OF_SILENCE, self.say, [message])
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def close(self) -> None:
        """Close the bar, which stays visible."""
        if self._bar is not None:
            self._bar.close()


def _bar_class() -> type[tqdm[Any]]:
    """Return the bar of a notebook (needs ipywidgets), or that of a terminal."""
    if not in_notebook():
        return tqdm
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", TqdmWarning)  # without ipywidgets it falls back to text
        from tqdm.auto import tqdm as shown
    return shown


def _form(total_steps: int | None) -> str:
    return _COUNT if total_steps is None else _BAR


def metric_texts(
    stats: Mapping[str, float], episode_return: float | None = None, clock: str = keys.ENV_STEPS
) -> list[str]:
    """Write the most important metrics of a run, the most important first; from the first episode on its return."""
    parts = []
    if "profiling/env_steps_per_s" in stats:
        parts.append(f"{short(stats['profiling/env_steps_per_s'])}/s")
    parts += [f"eval {stats[name]:.4g}" for name in keys.EVALUATED_RETURNS if name in stats]
    if episode_return is not None:
        parts.append(f"return {episode_return:.4g}")
    elif _HORIZON_RETURN in stats:
        parts.append(f"horizon return {stats[_HORIZON_RETURN]:.4g}")
    if clock in stats:
        parts.append(f"{counter_name(clock)} {short(stats[clock])}")
    for label, name in (("length", "episodes/lengths/mean"), ("kl", "monitors/kl_div")):
        text = f"{stats[name]:.3g}" if name in stats else ""
        if text and not (label == "length" and episode_return is not None and text == f"{episode_return:.3g}"):
            parts.append(f"{label} {text}")
    return parts


def counter_name(counter: str) -> str:
    """Return the short name of a counter, such as `transitions` or `updates`."""
    return "transitions" if counter == keys.ENV_STEPS else counter.rsplit("/", 1)[-1]
