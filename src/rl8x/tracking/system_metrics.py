"""Samples of processors, memory and GPUs as metrics `system/...`, which MLflow's page shows on a tab of their own.

MLflow's own sampler logs past the spool, so that an outage would lose what it measured and hold up what waits for it.
Names are those of MLflow where it has the same.
"""

from __future__ import annotations

import math
import os
import time
from typing import Any, Final

import psutil

SWITCH: Final = "MLFLOW_ENABLE_SYSTEM_METRICS_LOGGING"
INTERVAL: Final = "MLFLOW_SYSTEM_METRICS_SAMPLING_INTERVAL"
_INTERVAL_S: Final = 10.0
_MB: Final = 1e6


class SystemSampler:
    """Measures processors, memory and NVIDIA's GPUs now and then; a sample takes about a millisecond.

    Args:
        pid: The process that trains.
        interval_s: Seconds from one sample to the next.
    """

    def __init__(self, pid: int, interval_s: float) -> None:
        self.interval_s = interval_s
        self._process = psutil.Process(pid)
        self._gpus = _Gpus()
        psutil.cpu_percent()  # both measure since the call before
        self._process.cpu_percent()
        self._due = time.monotonic() + self.interval_s

    def sample(self) -> dict[str, float]:
        """Return what is measured now, where a sample is due; else nothing."""
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
            **self._gpus.measured(),
        }
        return {f"system/{name}": float(value) for name, value in measured.items()}


class _Gpus:
    """NVIDIA's GPUs, where the package nvidia-ml-py finds some."""

    def __init__(self) -> None:
        self._nvml: Any = None
        self._handles: list[Any] = []
        try:
            import pynvml

            pynvml.nvmlInit()
            self._handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
            self._nvml = pynvml
        except Exception:  # not installed, or without a driver that it knows
            self._handles = []

    def measured(self) -> dict[str, float]:
        """Return use and memory of each."""
        metrics: dict[str, float] = {}
        for index, handle in enumerate(self._handles):
            try:
                memory = self._nvml.nvmlDeviceGetMemoryInfo(handle)
                metrics[f"gpu_{index}_memory_usage_megabytes"] = memory.used / _MB
                metrics[f"gpu_{index}_memory_usage_percentage"] = 100 * memory.used / memory.total
                metrics[f"gpu_{index}_utilization_percentage"] = self._nvml.nvmlDeviceGetUtilizationRates(handle).gpu
            except Exception:  # a part of a GPU does not say all
                continue
        return metrics


def is_asked_for(choice: bool | None, *, owns: bool) -> bool:
    """Whether to sample: where the user says so, to rl8x or, of a run that rl8x began, to MLflow.

    MLflow itself samples for a run that the user began.
    """
    return choice if choice is not None else owns and os.environ.get(SWITCH, "").strip().lower() in ("true", "1")


def interval() -> float:
    """Return the seconds between two samples, from MLflow's variable for them."""
    try:
        interval_s = float(os.environ.get(INTERVAL, _INTERVAL_S))
    except ValueError:
        return _INTERVAL_S
    return interval_s if math.isfinite(interval_s) and interval_s > 0 else _INTERVAL_S
