"""Rows of metrics, which `step()`, `eval()` and `run()` return; their history over a run, and their display."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, Literal, NoReturn, get_args

import torch
from tqdm import TqdmWarning, tqdm

from rl8x import keys
from rl8x.distributed import ranks
from rl8x.output import Unfailing, in_notebook, measured, short, shown
from rl8x.rollouts.statistics import Stats, pool

MAX_POINTS: Final = 512
_RETURNS: Final = (keys.EVALUATED_RETURNS, keys.TRAINED_RETURNS)


class TrainStats(dict[str, float]):
    """One row of metrics by name: the step's own, and those of the latest evaluation. It is read-only.

    Args:
        values: The metrics by name.
        fresh: Names that this step measured; None is all of them.
        before_step: Names that an evaluation before the step measured and no row contains yet.

    Attributes:
        fresh: Names that were measured by this step or by an evaluation right after it, and `before_step`. The others
            come from older evaluations.
        before_step: Names in `fresh` that were measured before the step, with the policy of then.
        stop_reason: Why `run()` stopped or a loop should stop; None while it goes on.
    """

    def __init__(
        self,
        values: Mapping[str, float],
        fresh: frozenset[str] | None = None,
        before_step: frozenset[str] = frozenset(),
    ) -> None:
        super().__init__(values)
        self.before_step = frozenset() if fresh is None else before_step - fresh
        self.fresh = frozenset(values) if fresh is None else fresh | before_step
        self.stop_reason: str | None = None

    def add(self, values: Mapping[str, float]) -> None:
        """Add metrics that were measured after the step.

        Args:
            values: Metrics by name.
        """
        dict.update(self, values)
        self.fresh |= values.keys()
        self.before_step -= values.keys()

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        """Raise `TypeError`: other callbacks, conditions and the next step read the same row."""
        raise TypeError(
            "a row of metrics is read-only: change a copy, dict(row); what a callback returns for its `metric_names` "
            "is added."
        )

    __setitem__ = __delitem__ = __ior__ = clear = pop = popitem = setdefault = update = _refuse

    def __reduce__(self) -> tuple[Any, ...]:
        """Return how to copy and to pickle a row, which would set each of its items."""
        return type(self), (dict(self),), vars(self)


class EvalStats(dict[str, float]):
    """The metrics of one evaluation, under `eval/`, or under `eval/<name>/` if it has a name."""


@dataclasses.dataclass
class Timer:
    """Measures the duration of a block; on CUDA with events, because the host runs ahead of the device."""

    device: torch.device

    def _now(self) -> Any:
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def __enter__(self) -> Timer:
        self._begin = self._now()
        return self

    def __exit__(self, *exception: object) -> None:
        self._end = self._now()

    @property
    def elapsed_ms(self) -> float:
        """Milliseconds between entering and leaving the block; waits for the device, as the copy of a row does."""
        if self.device.type != "cuda":
            return float(self._end - self._begin) * 1e3
        self._end.synchronize()
        return float(self._begin.elapsed_time(self._end))


@dataclasses.dataclass
class Course:
    """One metric's last and best finite value, and at most `MAX_POINTS` of its points: every k-th, k a power of two."""

    last: float = math.nan
    last_step: int = 0
    measured_at: int = 0  # the step of the last value, finite or not
    best: float = -math.inf
    best_step: int = 0
    count: int = 0
    every: int = 1
    kept: list[list[float]] = dataclasses.field(default_factory=list)

    def add(self, step: int, value: float) -> None:
        """Take a value at a step of the clock; one that is not finite is no result."""
        self.measured_at = step
        if not math.isfinite(value):
            return
        self.last, self.last_step = value, step
        if value > self.best:
            self.best, self.best_step = value, step
        if self.count % self.every == 0:
            self.kept.append([step, value])
        self.count += 1
        if len(self.kept) > MAX_POINTS:
            self.kept = self.kept[::2]
            self.every *= 2

    @property
    def points(self) -> list[list[float]]:
        """The kept points and the last one, each `[step, value]`."""
        end = [self.last_step, self.last]
        return self.kept if self.kept[-1:] == [end] else [*self.kept, end]


@dataclasses.dataclass
class Results:
    """The history of a run's mean returns so far, in evaluations and in training."""

    _courses: dict[str, Course] = dataclasses.field(default_factory=dict)

    def take(self, row: Mapping[str, float], step: int) -> None:
        """Add the returns in a row."""
        for name in (name for name in itertools.chain(*_RETURNS) if name in row):
            self._courses.setdefault(name, Course()).add(step, float(row[name]))

    def measured_at(self, name: str) -> int | None:
        """Return the step at which a return was last measured, finite or not; None if it never was."""
        return self._courses[name].measured_at if name in self._courses else None

    @property
    def courses(self) -> dict[str, Course]:
        """The courses to show by metric, evaluations first."""
        # Of each kind only the first measured metric: returns of whole episodes say more than sums over horizons.
        measured = [[name for name in kind if name in self._courses and self._courses[name].count] for kind in _RETURNS]
        return {names[0]: self._courses[names[0]] for names in measured if names}

    @property
    def headline(self) -> tuple[str, Course] | None:
        """The main metric of the run, and its course; None if no return was measured."""
        return next(iter(self._judged.items()), None)

    @property
    def _judged(self) -> dict[str, Course]:
        return {name: course for name, course in self.courses.items() if math.isfinite(course.best)}

    def forget_best(self, is_other: Callable[[str], bool]) -> None:
        """Reset the best of metrics for which `is_other` holds, as they are measured differently from here on."""
        for course in (course for name, course in self._courses.items() if is_other(name)):
            course.best = -math.inf

    @property
    def row(self) -> dict[str, float]:
        """The metrics `final/NAME`, `best/NAME` and `best_step/NAME` of each course."""
        return {
            f"{what}/{name}": value
            for name, course in self._judged.items()
            for what, value in (("final", course.last), ("best", course.best), ("best_step", course.best_step))
        }

    def __str__(self) -> str:
        if self.headline is None:
            return ""
        name, course = self.headline
        return f"{measured(course.last)}, best {measured(course.best)} ({name.removesuffix('/mean')})"

    def state_dict(self) -> dict[str, Any]:
        """Return the courses as plain data."""
        return {name: dataclasses.asdict(course) for name, course in self._courses.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a `state_dict`."""
        self._courses = {name: Course(**course) for name, course in state.items()}


# -- how they are shown

Progress = Literal["auto", "bar", "lines", "none"]
PROGRESS_CHOICES: Final[tuple[Progress, ...]] = get_args(Progress)
_SECONDS_PER_LINE: Final = 10.0
_SECONDS_OF_SILENCE: Final = 2.0
# A terminal's line shows the most important metrics first, none of them cut, and a bar if there is room for it.
_BAR: Final = "{l_bar}{bar}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}{postfix}]"
_WITHOUT_BAR: Final = "{percentage:3.0f}% {n_fmt}/{total_fmt} [{elapsed}<{remaining}{postfix}]"
_COUNT: Final = "{n_fmt} steps [{elapsed}{postfix}]"
_BAR_COLUMNS: Final = 10
_LEAST_METRICS: Final = 3  # up to so many metrics take precedence over a bar
_EPISODE_RETURN, _HORIZON_RETURN = keys.TRAINED_RETURNS


def check_progress(mode: Progress) -> None:
    """Raise `ValueError` unless `mode` is one of `PROGRESS_CHOICES`."""
    if not isinstance(mode, str) or mode not in PROGRESS_CHOICES:
        raise ValueError(f"`progress` must be one of {', '.join(map(repr, PROGRESS_CHOICES))}; got {shown(mode)}.")


class ProgressReporter:
    """Shows the progress of a run beside the counter `clock`; errors in writing it are ignored."""

    def __init__(self, mode: Progress, total_steps: int | None = None, clock: str = keys.ENV_STEPS) -> None:
        self._stream = Unfailing(sys.stderr)
        if mode == "auto":
            mode = "bar" if self._stream.isatty() or in_notebook() else "lines"
        self.mode = mode
        self._clock = clock
        self._bar: Any = None
        if mode == "bar":
            form = _COUNT if total_steps is None else _BAR
            options: Any = {"dynamic_ncols": True, "smoothing": 0.1, "file": self._stream}
            self._bar = _bar_class()(total=total_steps, bar_format=form, **options)
        self._last_line = time.monotonic()
        self._episode_return: float | None = None

    def update(self, stats: Mapping[str, float], total_steps: int | None = None) -> None:
        """Show one row, and the progress towards `total_steps` as estimated now, None if unbounded."""
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
        """Show as many metrics as fit into the terminal's columns, and a bar if it fits beside the first ones."""
        bar = self._bar
        full, bare = (_COUNT, _COUNT) if bar.total is None else (_BAR, _WITHOUT_BAR)
        bar.bar_format, bar.postfix = full, ", ".join(texts)
        shown = bar.format_dict if not hasattr(bar, "container") else {}
        if not shown.get("ncols"):
            return
        for count in range(len(texts), -1, -1):
            bar.postfix = ", ".join(texts[:count])
            room = shown["ncols"] - len(bar.format_meter(**{**shown, "bar_format": bare, "postfix": bar.postfix}))
            if room > (0 if bar.total is None or count <= _LEAST_METRICS else _BAR_COLUMNS):
                bar.bar_format = full if room > _BAR_COLUMNS else bare
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


class Bar(tqdm):  # type: ignore[type-arg] # at runtime it takes none
    """A bar with a lock for threads only: from Python 3.14 on, tqdm's lock for processes starts another process."""


Bar.set_lock(threading.RLock())


def _bar_class() -> type[tqdm[Any]]:
    """Return the bar of a notebook (needs ipywidgets), or that of a terminal."""
    if not in_notebook():
        return Bar
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", TqdmWarning)  # without ipywidgets it falls back to text
        from tqdm.auto import tqdm as shown
    return shown


def metric_texts(
    stats: Mapping[str, float], episode_return: float | None = None, clock: str = keys.ENV_STEPS
) -> list[str]:
    """Return texts of a run's main metrics, the most important first; episode returns replace horizon returns."""
    parts = []
    if "profiling/env_steps_per_s" in stats:
        parts.append(f"{short(stats['profiling/env_steps_per_s'])}/s")
    parts += [f"eval {measured(stats[name])}" for name in keys.EVALUATED_RETURNS if name in stats]
    if episode_return is not None:
        parts.append(f"return {measured(episode_return)}")
    elif _HORIZON_RETURN in stats:
        parts.append(f"horizon return {measured(stats[_HORIZON_RETURN])}")
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


def pooled_row(
    stats: Stats, measure: Callable[[], Mapping[str, float]] = dict, fell_back: bool = False
) -> tuple[dict[str, float], dict[str, float], list[bool]]:
    """Return the pooled statistics of all ranks as one row, rank 0's own measurements, and which ranks fell back."""
    if ranks().size == 1:
        return stats.read(), dict(measure()), [fell_back]
    numbers, counts = stats.counted()  # to the host; times and memory are measured after that
    gated = {name: list(prefixes) for name, prefixes in counts.items()}
    shared = ranks().share("a row", [numbers, gated, dict(measure()), fell_back])
    all_gated = {name: prefixes for _, gated, *_ in shared for name, prefixes in gated.items()}
    measured_by_first, have_fallen = shared[0][2], [fallen for *_, fallen in shared]
    return pool([numbers for numbers, *_ in shared], all_gated).read(), measured_by_first, have_fallen
