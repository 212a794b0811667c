"""Going on after torchrun has started a job again: which run was this job's."""

from __future__ import annotations

import functools
import os
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import psutil

from rl8x.checkpoint.find import find_of_job

# Runs that this process has gone on with: the next trainer of a script means another.
_TAKEN: Final[set[Path]] = set()


@functools.cache
def job() -> str | None:
    """Return what tells a job from others: the torchrun that started this process; None without it.

    It is of one machine: of torchrun's own names for a job the usual one is the same for all.
    """
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return None
    agent = psutil.Process(os.getppid())
    return f"{os.environ['TORCHELASTIC_RUN_ID']} on {platform.node()}, {agent.pid} since {agent.create_time():.2f}"


def is_restart() -> bool:
    """Whether torchrun has started this job before."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT") or 0) > 0


def unfinished(build: Mapping[str, Any], root: Path | None) -> Path | None:
    """Return the folder of checkpoints of the run that the job began of an algorithm.

    Args:
        build: How the algorithm was built, as plain data.
        root: Where such folders are, or the run's own; None: nothing is saved.
    """
    name = job()
    folder = None if name is None or root is None else find_of_job(name, build, root, _TAKEN)
    if folder is not None:
        _TAKEN.add(folder)
    return folder
