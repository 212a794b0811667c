"""Data for the store's pages of a run: thinned rows, a picture of learning curves, and samples of the machine.

With thinning, a metric's first 128 points are sent as they come, then 64 for each doubling of their number. When the
run ends, the last point and every k-th one are added, where k is the smallest power of two within the limit. Only a
point's index in its metric decides, so that a resumed run, which repeats rows, sends the same points.
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
import numbers
import os
import threading
import time
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Final

import numpy as np
import psutil
from numpy.typing import NDArray

from rl8x.drawing import LIGHT, Drawing, draw_panels, finite_curve, png
from rl8x.output import shown
from rl8x.tracking.protocol import TrackingError
from rl8x.tracking.secrets import logger

_log = logger(__name__)

_DENSE: Final = 128
# Prefixes of the most important metrics; below, those of metrics that are left out first if there are too many.
_FIRST: Final = (
    "eval/",
    "test/",
    "result/",
    "best/",
    "final/",
    "best_step/",
    "episodes/returns/",
    "env/",
    "algorithm/",
    "env_config/",
)
_LAST: Final = ("profiling/", "memory/", "rewards/", "episodes/info/")
# Number of keys kept free, by rank, for more important metrics that may come later, such as evaluations.
_KEPT_FREE: Final = (0, 12, 24)


class Thinning:
    """Selects the points of a run to send, and writes all rows to a file: a JSON line with step, time and metrics each.

    Args:
        path: The file, which belongs to one run; a resumed run appends to it.
        max_points: Largest number of points of a metric at the first end of the run, at least 1,280. Each end of a run
            that goes on after it adds some.
        max_keys: Largest number of metrics, at least 25. Their groups decide which are sent: evaluations, returns and
            counters are never left out for losses, and losses never for times and memory.

    Raises:
        ValueError: If a limit is no whole number, or too small.
    """

    def __init__(self, path: str | os.PathLike[str], *, max_points: int = 2_000, max_keys: int = 80) -> None:
        least = {"max_points": (max_points, 10 * _DENSE), "max_keys": (max_keys, _KEPT_FREE[-1] + 1)}
        for name, (value, smallest) in least.items():
            if not isinstance(value, numbers.Integral) or value < smallest:
                raise ValueError(f"Thinning: `{name}` must be a whole number, at least {smallest}; got {shown(value)}.")
        self.path = Path(path)
        self.max_points, self.max_keys = max_points, max_keys
        self._file: BinaryIO | None = None
        self._counts: Counter[str] = Counter()
        self._keys: dict[str, bool] = {}
        self._filled: Counter[str] = Counter()
        self._goes_back = False
        self._has_failed = False

    def begin(self, *, new: bool, repeats: bool) -> None:
        """Open the file, and continue the rows that it has.

        Args:
            new: Whether the run is a new one, which has no rows yet.
            repeats: Whether rows in the file repeat, from the step of the first new row on.

        Raises:
            TrackingError: If the file cannot be created, or has rows of another run.
        """
        try:
            if self._file is None:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                self._file = open(self.path, "ab+")  # noqa: SIM115 - it stays open with the run
                self._read_back(None)
            has_rows = self.path.stat().st_size > 0
        except OSError as error:
            raise TrackingError(f"rows cannot be kept in {self.path} ({error.strerror}): choose another file") from None
        if new and has_rows:
            raise TrackingError(
                f"{self.path} has the rows of another run: give each run a file of its own, or remove it"
            )
        self._goes_back = repeats

    def _read_back(self, again: tuple[int, Collection[str]] | None) -> None:
        """Count the rows in the file; cut off a torn line, and all rows from the first one that repeats.

        `again` has the step and the metric names of the repeated row. The cut is at the first row of that step with one
        of these names, or of a later step. A run that had ended has other rows of that step, which do not repeat.
        """
        assert self._file is not None
        self._counts.clear()
        self._keys.clear()
        end = 0
        self._file.seek(0)
        for line in self._file:
            row = _parsed(line)
            if row is None:
                break
            if again is not None:
                step, names = again
                if row["step"] > step or (row["step"] == step and any(name in row["metrics"] for name in names)):
                    break
            end += len(line)
            self._count(row)
        self._file.truncate(end)
        self._file.seek(end)

    def _count(self, row: Mapping[str, Any]) -> dict[str, int]:
        """Return the index of each point of a row within its metric, for the metrics that are sent."""
        places = {}
        for name in row["metrics"]:
            if name not in self._keys:
                self._keys[name] = self._has_room(name)
            if self._keys[name]:
                places[name] = self._counts[name]
                self._counts[name] += 1
        return places

    def _has_room(self, name: str) -> bool:
        rank = 0 if name.startswith(_FIRST) else 2 if name.startswith(_LAST) else 1
        taken = sum(self._keys.values())
        if taken < self.max_keys - _KEPT_FREE[rank]:
            return True
        if all(self._keys.values()):
            _log.warning(
                "tracking: the run has more than %s metrics; %r and others are in its artifact %s only",
                self.max_keys,
                name,
                self.path.name,
            )
        return False

    def take(self, step: int, time: int, row: Mapping[str, float]) -> dict[str, float]:
        """Write a row to the file.

        Args:
            step: The clock's current value.
            time: Milliseconds since 1970.
            row: Numbers by name.

        Returns:
            The points of the row to send now.
        """
        assert self._file is not None
        if self._goes_back:
            self._read_back((step, row.keys()))
            self._goes_back = False
        kept = {"step": step, "time": time, "metrics": dict(row)}
        try:
            self._file.write(json.dumps(kept).encode() + b"\n")
            self._file.flush()  # a failed write is tried again with the next row
        except OSError as error:
            self._failed(error)
        return {name: row[name] for name, place in self._count(kept).items() if is_sent_at_once(place)}

    def rest(self) -> Iterator[tuple[int, int, dict[str, float]]]:
        """Yield step, time and points of the additional rows to send at the end of the run."""
        assert self._file is not None
        counts, filled = dict(self._counts), self._filled.copy()
        added = {count: _added(count, self.max_points) for count in set(counts.values())}
        places: Counter[str] = Counter()
        try:
            self._file.seek(0)
        except OSError as error:  # the disk is still full
            self._failed(error)
            return
        for line in self._file:
            row = _parsed(line)
            if row is None:  # a full disk took only a part of it
                continue
            points = {}
            metrics = row["metrics"]
            for name in counts.keys() & metrics.keys():
                place = places[name]
                places[name] += 1
                if place >= filled[name] and added[counts[name]][place]:
                    points[name] = metrics[name]
            if points:
                yield row["step"], row["time"], points
        self._filled = Counter(counts)

    def _failed(self, error: OSError) -> None:
        if not self._has_failed:
            _log.warning("tracking: cannot write to %s (%s): rows may be missing there", self.path, error)
        self._has_failed = True

    def sync(self) -> None:
        """Make the written rows survive a power cut."""
        if self._file is not None:
            with contextlib.suppress(OSError):
                os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._file.close()
            self._file = None


def _parsed(line: bytes) -> dict[str, Any] | None:
    """Parse a line; None if it is torn or invalid."""
    if not line.endswith(b"\n"):
        return None
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) and row.keys() >= {"step", "time", "metrics"} else None


def is_sent_at_once(place: int) -> bool:
    """Whether a metric's point is sent at once: in the n-th doubling after the first 128, every 2^n-th point is."""
    return place % (1 << (place // _DENSE).bit_length()) == 0


def _added(count: int, max_points: int) -> NDArray[np.bool_]:
    """Return which points of a metric are sent only at the end of the run, as a bool mask `[count]`."""
    places = np.arange(count)
    doublings = np.ceil(np.log2(places // _DENSE + 1)).astype(np.int64)
    sent = places % (1 << doublings) == 0
    every = 1
    while True:
        even = places % every == 0
        even[-1:] = True
        if np.sum(even | sent) <= max_points:
            return np.asarray(even & ~sent)
        every *= 2


CURVES_FILE: Final = "learning-curves.png"
Series = Mapping[str, Sequence[Sequence[float]]]
"""(step, value) pairs of metrics, by name."""

_drawing = threading.Lock()  # Matplotlib's settings are global to the process


def draw_curves(series: Series, title: str, clock: str) -> bytes | None:
    """Draw learning curves as a PNG; None if no curve has two points, or drawing fails."""
    try:
        curves = {name: finite_curve(*np.transpose(points)) for name, points in series.items() if len(points) > 1}
        if not curves:
            return None
        metric = next(iter(curves)) if len(curves) == 1 else "return"
        draw = functools.partial(draw_panels, [curves], [metric], clock, width=1, legend=True)
        with _drawing:
            return png(Drawing("learning-curves", title, "", draw), LIGHT, titled=True)
    except Exception:  # such as a broken Matplotlib, or an edited journal
        _log.debug("tracking: the learning curves cannot be drawn", exc_info=True)
        return None


SWITCH: Final = "MLFLOW_ENABLE_SYSTEM_METRICS_LOGGING"
INTERVAL: Final = "MLFLOW_SYSTEM_METRICS_SAMPLING_INTERVAL"
_INTERVAL_S: Final = 10.0
_MB: Final = 1e6


class SystemSampler:
    """Measures processors, memory and NVIDIA GPUs every `interval_s`; a sample takes about a millisecond."""

    def __init__(self, pid: int, interval_s: float) -> None:
        self.interval_s = interval_s
        self._process = psutil.Process(pid)
        self._nvml, self._gpus = _gpus()
        psutil.cpu_percent()  # both measure since the previous call
        self._process.cpu_percent()
        self._due = time.monotonic() + self.interval_s

    def sample(self) -> dict[str, float]:
        """Return measurements by metric name if a sample is due, else an empty dict."""
        now = time.monotonic()
        if now < self._due:
            return {}
        self._due = now + self.interval_s
        memory = psutil.virtual_memory()
        measured = {
            "cpu_utilization_percentage": psutil.cpu_percent(),
            "system_memory_usage_megabytes": memory.used / _MB,
            "system_memory_usage_percentage": memory.percent,
            "process_cpu_percentage": self._process.cpu_percent(),  # 100 is one processor
            "process_memory_megabytes": self._process.memory_info().rss / _MB,
        }
        for index, gpu in enumerate(self._gpus):
            with contextlib.suppress(Exception):  # a partition of a GPU does not report everything
                used = self._nvml.nvmlDeviceGetMemoryInfo(gpu)
                measured[f"gpu_{index}_memory_usage_megabytes"] = used.used / _MB
                measured[f"gpu_{index}_memory_usage_percentage"] = 100 * used.used / used.total
                measured[f"gpu_{index}_utilization_percentage"] = self._nvml.nvmlDeviceGetUtilizationRates(gpu).gpu
        return {f"system/{name}": float(value) for name, value in measured.items()}


def _gpus() -> tuple[Any, list[Any]]:
    """Return the module `pynvml` of nvidia-ml-py and its GPU handles; (None, []) if it finds none."""
    try:
        import pynvml

        pynvml.nvmlInit()
        return pynvml, [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
    except Exception:  # not installed, or no suitable driver
        return None, []


def sampling_interval(choice: bool | None, *, owns: bool) -> float | None:
    """Return the seconds between two samples of the machine, from MLflow's variable; default 10.

    None if it is not to be sampled: by the `choice` of the user, else by the switch of MLflow in a run that rl8x began.
    """
    if not (owns and os.environ.get(SWITCH, "").strip().lower() in ("true", "1") if choice is None else choice):
        return None
    with contextlib.suppress(ValueError):
        if 0 < (interval_s := float(os.environ.get(INTERVAL, ""))) < math.inf:
            return interval_s
    return _INTERVAL_S
