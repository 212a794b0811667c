"""A simulated CUDA device, for machines without one: `device.cpp`, and what torch's Python has to know of it.

Values, devices and waits are as on a GPU; speed, memory, streams and the kernels themselves are not. A captured program
is recorded once and replayed without Python, and whatever waits for the device while it is captured is refused.

It needs a torch that is built for CPUs alone: one that is built with CUDA has registered its own hooks.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import subprocess
import time
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

SOURCE = Path(__file__).with_name("device.cpp")


def build(library: Path) -> None:
    root = Path(torch.__file__).parent
    folder = root / "lib"
    options = ["-O0", "-g0", "-shared", "-fPIC", "-std=c++20", f"-I{root / 'include'}"]
    links = [f"-L{folder}", "-ltorch_cpu", "-lc10", f"-Wl,-rpath,{folder}"]
    subprocess.run(["g++", *options, str(SOURCE), "-o", str(library), *links], check=True)


class Device:
    """The device of a built library, which torch takes for a GPU from then on; of a process of its own."""

    def __init__(self, library: Path) -> None:

        self._functions = ctypes.CDLL(str(library), ctypes.RTLD_GLOBAL)
        self._functions.num_waits.restype = ctypes.c_int64
        believe()

    @property
    def waits(self) -> int:
        """How often the host has waited for it."""
        return int(self._functions.num_waits())

    @contextlib.contextmanager
    def refusing_waits(self):
        """Refuse whatever waits for the device, as a GPU does while it captures."""
        self._functions.refuse_waits(True)
        try:
            yield
        finally:
            self._functions.refuse_waits(False)

    def capture(self, function):
        """Stand in for `rl8x.execution.programs.capture_cuda`: nothing of Python runs in a replay."""
        from tests.probes import record_once

        function()  # which may load and allocate
        with self.refusing_waits():
            function()
        return record_once(function)


class Event:
    """A point in time on the device, which is always at once."""

    def __init__(self, enable_timing: bool = False) -> None:
        self.time = 0.0

    def record(self) -> None:
        self.time = time.perf_counter()

    def elapsed_time(self, end: Event) -> float:
        return 1e3 * (end.time - self.time)

    def synchronize(self) -> None:
        """There is nothing to wait for."""


class Properties:
    name, total_memory, major, minor, multi_processor_count = "a simulation", 16 << 30, 9, 0, 1


def believe() -> None:
    """Have torch's Python say that there is a GPU, in as far as rl8x and torch ask."""
    generator = torch.Generator("cuda")
    answers = {
        "is_available": True,
        "device_count": int(os.environ.get("LOCAL_WORLD_SIZE", 1)),
        "current_device": int(os.environ.get("LOCAL_RANK", 0)),
        "is_initialized": True,
        "is_bf16_supported": True,
        "mem_get_info": (16 << 30, 16 << 30),
        "get_device_name": Properties.name,
        "get_device_properties": Properties,
        "get_device_capability": (9, 0),
        "_is_in_bad_fork": False,
        **dict.fromkeys(("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved"), 0),
        **dict.fromkeys(("_lazy_init", "set_device", "synchronize", "empty_cache", "reset_peak_memory_stats")),
    }
    for name, answer in answers.items():
        setattr(torch.cuda, name, lambda *_, answer=answer, **__: answer)
    torch.cuda.Event = Event
    torch.cuda.get_rng_state = lambda *_: generator.get_state()
    torch.cuda.set_rng_state = lambda state, *_: generator.set_state(state)
    torch.cuda.manual_seed = torch.cuda.manual_seed_all = generator.manual_seed


def join_by_gloo() -> None:
    """Have ranks on the device exchange its tensors by gloo, in the place of NCCL."""
    dist: Any = torch.distributed
    begin = dist.init_process_group
    dist.init_process_group = lambda backend, *rest, device_id=None, **more: begin(
        backend.removesuffix(",cuda:nccl").removeprefix("cpu:"), *rest, **more
    )
    for name in ("all_reduce", "broadcast", "all_gather"):
        setattr(dist, name, _on_the_host(getattr(dist, name)))


def _on_the_host(collective):
    """Return a collective of tensors of the host as one of tensors anywhere."""

    def call(*arguments):
        copies = tree_map(lambda part: part.cpu() if isinstance(part, torch.Tensor) else part, arguments)
        collective(*copies)
        for part, copied in zip(tree_leaves(arguments), tree_leaves(copies), strict=True):
            if isinstance(part, torch.Tensor) and part is not copied:
                part.copy_(copied)

    return call
