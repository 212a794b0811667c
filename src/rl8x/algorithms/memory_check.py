"""Check that a run fits into memory: compare a lower bound of its needs with what is available at the start.

When memory runs out on the CPU, the system kills the process without a message. Only memory that is certain to be
allocated at the same time counts, so that no run that fits is refused; measured peaks are 1.5 times as high with small
networks, and higher with others.
"""

from __future__ import annotations

import contextlib
import gc
import math
import re
import shutil
import tempfile
import warnings
from collections.abc import Collection, Iterator
from contextvars import ContextVar
from pathlib import Path
from typing import Any, Final

import gymnasium
import numpy as np
import psutil
import torch

from rl8x.disk import named_path
from rl8x.distributed import ranks
from rl8x.envs import Env
from rl8x.execution.execution import of_glibc
from rl8x.policy import Policy
from rl8x.spaces import leaves

Space = gymnasium.Space[Any]
# Bytes of a rollout slot without observation and action: start, terminated and truncated (bool), reward and return
# (float32), length (int64).
_SLOT: Final = 3 * 1 + 2 * 4 + 8
# Bytes of an evaluation's shortest chunk, 16 steps: reward (float32) and mask (bool).
_EVALUATED: Final = 16 * (4 + 1)
# Bytes of an episode's return and length, as the tests of cells keep them.
_TESTED: Final = 2 * 8
# Measured memory of a run with a small network, relative to what is counted.
_USUAL: Final = 1.5
# A control group's limit from these bytes on means no limit (v1); its usage, which is slow to read, is then not read.
_NO_LIMIT: Final = 2**60
_CHECKS: Final = ContextVar("checks", default=True)
# torch's messages for a tensor that does not fit into memory, or never could; the second group: bytes.
_NO_ROOM: Final = re.compile(
    r"(can't allocate memory|not enough memory|Storage size calculation overflowed|Overflow when unpacking long)"
    r"(?:.*?tried to allocate (\d+) bytes)?",
    re.DOTALL,
)
# Options that decide how much memory an algorithm takes.
_SIZES: Final = ("model_config", "critic_hidden_sizes", "num_critics", "num_envs", "horizon", "buffer_size")


@contextlib.contextmanager
def no_memory_checks() -> Iterator[None]:
    """Skip memory checks within the context: algorithms built there only act and store no experience."""
    token = _CHECKS.set(False)
    try:
        yield
    finally:
        _CHECKS.reset(token)


@contextlib.contextmanager
def allocations_refused(name: str, options: Collection[str]) -> Iterator[None]:
    """Raise a `ValueError` if torch cannot allocate a tensor for the named algorithm; list its size `options`."""
    try:
        yield
    except (RuntimeError, TypeError) as error:
        found = _NO_ROOM.search(str(error))
        if found is None and not isinstance(error, torch.OutOfMemoryError):
            raise
        size = "as much memory as a tensor needs" if found is None or not found[2] else _shown(int(found[2]))
        listed = ", ".join(f"`{option}`" for option in _SIZES if option in options)
        raise ValueError(
            f"{name} does not fit into memory: torch could not allocate {size}. Lower the sizes given, in {listed}."
        ) from error


def check_training(
    config: Any, env: Any, device: torch.device, *, policy: Policy | None = None, seq_len: int = 1
) -> None:
    """Raise a `ValueError` if a horizon, with the policy's state every `seq_len` steps, does not fit into memory.

    `env` may be a class or factory, whose unknown spaces count as 0; the policy is None before it is built.
    """
    spaces = [getattr(env, f"single_{name}_space", None) for name in ("observation", "action")]
    agents = env.num_agents if isinstance(env, Env) else 1
    num_envs, horizon, options = config.num_envs * agents, config.horizon, "`num_envs` or `horizon`"
    need = config.rollout_bytes(*(space if isinstance(space, gymnasium.Space) else None for space in spaces)) * agents
    if policy is not None:
        state = sum(value.numel() * value.element_size() for value in policy.initial_state(1).values())
        need += num_envs * (horizon // seq_len) * state
        options = "`num_envs`, `horizon` or the size of the model" + (", or raise `seq_len`" if state else "")
    # A build checks several times and warns only in the last check.
    check_memory(need, device, f"num_envs={num_envs:,} and horizon={horizon:,} need", options, warn=policy is not None)


def check_evaluation(num_envs: int, device: torch.device, observation: Space) -> None:
    """Raise a `ValueError` if the copies of an evaluation environment do not fit into memory."""
    need = num_envs * (_EVALUATED + 2 * _stored(observation))
    check_memory(need, device, f"an evaluation of num_eval_envs={num_envs:,} needs", "`num_eval_envs`")


def check_cells(episodes: int, cells: int, env: Env) -> None:
    """Raise a `ValueError` if the episodes of one cell, played at once, and all results do not fit into memory."""
    played = _EVALUATED + 2 * _stored(env.single_observation_space)
    what = f"a test of episodes={episodes:,} in each of {cells:,} cells needs"
    check_memory(episodes * (env.num_agents * played + cells * _TESTED), env.device, what, "`episodes`")


def check_replay_on_disk(buffer_size: int, path: str, need: int) -> None:
    """Raise a `ValueError` if a replay's folder is not writable, or its disk has fewer than `need` bytes free."""
    if not _CHECKS.get():
        return
    try:
        named_path(path, "`buffer_path`").mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(path).free
        tempfile.TemporaryFile(dir=path).close()
    except OSError as error:
        raise ValueError(
            f"`buffer_path` must be a folder that can be written to; got {path!r}: {error.strerror}."
        ) from None
    if need > free:
        raise ValueError(
            f"buffer_size={buffer_size:,} needs at least {need / 1e9:,.1f} GB in {path!r}, and {free / 1e9:,.1f} GB "
            "are free. Lower `buffer_size`, or give another `buffer_path`."
        )


def row_bytes(observation: Space, action: Space) -> int:
    """Return the bytes of one transition in a replay: two observations, the action, return and discount (float32)."""
    return 2 * _stored(observation) + _stored(action) + 2 * 4


def slot_bytes(observation: Space | None, action: Space | None) -> int:
    """Return the bytes of one step of one copy in a rollout; unknown spaces count as 0."""
    return _SLOT + _stored(observation) + _stored(action)


def available_bytes(device: torch.device) -> int | None:
    """Return this rank's share of the available memory in bytes, including swap space; None if it is unknown."""
    if device.type == "cuda":
        free = torch.cuda.mem_get_info(device)[0]
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    if device.type != "cpu":
        return None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # psutil warns if a container hides the swap counters
        swap = psutil.swap_memory().free
    free = psutil.virtual_memory().available
    return (min([free, *_left_in_groups()]) + swap) // ranks().local_size


def _left_in_groups(proc: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")) -> list[int]:
    """Return the bytes left under each memory limit of this process's control groups (v1 and v2), as in containers."""
    left = []
    try:
        groups = [line.split(":", 2)[1:] for line in proc.read_text().splitlines()]
    except (OSError, ValueError):
        return []
    for controllers, path in groups:
        base, names = root, ("memory.max", "memory.current", "inactive_file")
        if "memory" in controllers.split(","):
            base, names = root / "memory", ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        elif controllers:
            continue
        folder, (limit, usage, cache) = base / path.strip("/"), names
        for each in (folder, *folder.parents):
            with contextlib.suppress(OSError, ValueError):  # no such group, or no limit: "max"
                if each.is_relative_to(base) and (most := int((each / limit).read_text())) < _NO_LIMIT:
                    stat = dict(line.split() for line in (each / "memory.stat").read_text().splitlines())
                    left.append(most - int((each / usage).read_text()) + int(stat.get(cache, 0)))  # reclaimable
    return left


def check_memory(need: int, device: torch.device, what: str, options: str, *, warn: bool = False) -> None:
    """Raise a `ValueError` that names `options` to lower if memory is too small; with `warn`, warn if it may be."""
    if not _CHECKS.get():
        return
    available = available_bytes(device)
    if available is not None and need * _USUAL > available and device.type == "cpu":
        gc.collect()
        of_glibc("malloc_trim")(0)
        available = available_bytes(device)
    if available is None or need * _USUAL <= available:
        return
    text = f"{what} at least {_shown(need)} of memory on {device}, but {_shown(max(available, 0))} are available."
    if need > available:
        raise ValueError(f"{text} Lower {options}.")
    if warn:
        warnings.warn(f"{text} That may not be enough. If it is not, lower {options}.", RuntimeWarning, stacklevel=5)


def _shown(size: int) -> str:
    return f"{size / 1e9:,.1f} GB" if size >= 1e8 else f"{size / 1e6:,.1f} MB"


def _stored(space: Space | None) -> int:
    """Return the bytes of one element in a rollout."""
    parts = [] if space is None else [leaf for _, leaf in leaves(space)]
    return sum(math.prod(leaf.shape or ()) * np.dtype(leaf.dtype).itemsize for leaf in parts if leaf.dtype is not None)
