"""The ranks of one training, which `torchrun` starts, and all communication between them: by NCCL, gloo and sockets.

Every rank makes the same calls in the same order. If a rank dies, the calls of the others end with an error; if it
hangs, after `RL8X_RANK_TIMEOUT_S` seconds (60 by default). With one rank, each call returns its argument.
"""

from __future__ import annotations

import atexit
import contextlib
import datetime
import json
import os
from collections.abc import Iterator, Sequence
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor

from rl8x.local_sockets import LocalSockets, connect

TIMEOUT_VARIABLE: Final = "RL8X_RANK_TIMEOUT_S"
_TIMEOUT_S: Final = 60.0
_HEADER: Final = 8  # bytes of the length of a text
# gloo's all-reduce and all-gather take a dozen messages in sequence, ten times as long as necessary for a few ranks:
# ranks on CPUs exchange vectors directly, except large ones (in bytes), for which bandwidth counts.
_MOST_EXCHANGING: Final = 8
_MOST_EXCHANGED: Final = 2**22
_NCCL_REMEDIES: Final = (
    "Settings that usually cure NCCL: NCCL_SHM_DISABLE=1 (little shared memory, as in containers), NCCL_IB_DISABLE=1 "
    "(a broken InfiniBand), NCCL_ALGO=Ring (a topology that it misjudges); NCCL_DEBUG=INFO says more."
)
_GLOO_REMEDY: Final = "If ranks do not find each other, name the network by GLOO_SOCKET_IFNAME."


class RankError(RuntimeError):
    """The ranks cannot continue together: one has ended, does not answer, or differs from the others."""


class Ranks:
    """The processes that train together, and this process's place among them.

    The process group is made at the first call that needs the others.

    Attributes:
        silent: Whether sums over ranks are left out; see `alone`.
    """

    def __init__(self, rank: int = 0, size: int = 1, local_rank: int = 0, local_size: int = 1) -> None:
        self.rank = rank
        self.size = size
        self.local_rank = local_rank
        self.local_size = local_size
        self.silent = False
        self._capacity = 4096 - _HEADER
        self._began = False
        self._lost = False
        self._backend = ""
        self._sockets: LocalSockets | None = None

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, the only one that writes to disks and trackers."""
        return self.rank == 0

    @property
    def device(self) -> torch.device:
        """The default device of a rank: its own GPU, or the CPU if there is none; a `RankError` if GPUs are too few."""
        if not torch.cuda.is_available() or self.size == 1:
            return torch.device("cuda" if torch.cuda.is_available() else "cpu")
        count = torch.cuda.device_count()
        if self.local_rank >= count:
            raise RankError(
                f"rank {self.rank} is number {self.local_rank} on its machine, which has {count} GPU(s): use "
                f"--nproc-per-node {count}, or device='cpu'."
            )
        torch.cuda.set_device(self.local_rank)
        return torch.device("cuda", self.local_rank)

    def _begin(self) -> None:
        """Make the process group, together with all other ranks."""
        if self._began:
            return
        if not dist.is_initialized():
            self._backend, device = "gloo", None
            # The same on all ranks of a machine: with fewer GPUs than ranks, all are on the CPU.
            if torch.cuda.is_available() and self.local_size <= torch.cuda.device_count():
                self._backend, device = "cpu:gloo,cuda:nccl", torch.device("cuda", self.local_rank)
                torch.cuda.set_device(device)
            limit = datetime.timedelta(seconds=timeout_s())
            if device is None:
                self._keep_to_own_processors()
            with self._explained():
                # torchrun has put this process's rank into the environment.
                engine: Any = dist  # its types lack some of its names
                store, rank, size = next(engine.rendezvous("env://", timeout=limit))
                # torchrun may keep one store for all restarts, in which a rank would wait for the address of a killed
                # one. Agents on several machines count restarts differently.
                start = os.environ.get("TORCHELASTIC_RESTART_COUNT", "") if self.local_size == size else ""
                store = engine.PrefixStore(f"rl8x/{start}", store)
                options: dict[str, Any] = {"timeout": limit, "device_id": device}
                dist.init_process_group(self._backend, store=store, rank=rank, world_size=size, **options)
                if self.local_size == size <= _MOST_EXCHANGING:
                    self._sockets = connect(rank, size, store, timeout_s())
            atexit.register(self._end)
        self._began = True

    def _keep_to_own_processors(self) -> None:
        """Keep this process's threads to its share of the machine's processors, as Open MPI does by default."""
        # Ranks wait for each other at each update, and waking threads move between processors: two ranks on two
        # processors took a fifth longer. A user's choice of processors (`taskset`, a container) is kept.
        if not hasattr(os, "sched_setaffinity"):
            return
        allowed = sorted(os.sched_getaffinity(0))
        share = len(allowed) // self.local_size
        if share and len(allowed) == os.cpu_count():
            own = allowed[self.local_rank * share : (self.local_rank + 1) * share]
            for thread in os.listdir("/proc/self/task"):
                with contextlib.suppress(ProcessLookupError):  # it has ended in the meantime
                    os.sched_setaffinity(int(thread), own)

    def _end(self) -> None:
        """Leave the process group, unless the others are lost: NCCL might wait for them."""
        if self._sockets is not None:
            self._sockets.close()
        if dist.is_initialized() and not self._lost:
            dist.destroy_process_group()

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        """Raise errors of torch.distributed as `RankError`, with advice."""
        try:
            yield
        except (RuntimeError, ValueError, OSError) as error:
            reason = " ".join(str(error).split())
            self._lost = True
            remedies = _NCCL_REMEDIES if "nccl" in f"{reason} {self._backend}".lower() else _GLOO_REMEDY
            raise RankError(
                f"rank {self.rank} of {self.size} has lost the others: one has ended (its own error says why), or has "
                f"not answered for {timeout_s():g} s ({TIMEOUT_VARIABLE}). {remedies} The engine says: {reason:.300}"
            ) from error

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Replace sums over ranks by this rank's own values, while a function is traced or captured."""
        before, self.silent = self.silent, True
        try:
            yield
        finally:
            self.silent = before

    # -- tensors

    def sum(self, tensor: Tensor) -> Tensor:
        """Return the sum of the ranks' tensors `[*]`, bit-identical on all ranks."""
        if self.size == 1 or self.silent:
            return tensor.clone()
        self._begin()
        total = tensor.detach().clone(memory_format=torch.contiguous_format)
        with self._explained():
            if self._exchanges(total) and self.size & (self.size - 1) == 0:
                self._add_by_pairs(total)
            else:
                dist.all_reduce(total)
        return total

    def _exchanges(self, tensor: Tensor) -> bool:
        """Whether a tensor `[*]` is exchanged directly, without collectives."""
        few = self.size <= _MOST_EXCHANGING and tensor.numel() * tensor.element_size() <= _MOST_EXCHANGED
        return few and tensor.device.type == "cpu"

    def _add_by_pairs(self, total: Tensor) -> None:
        """Add up the ranks' tensors `[*]`, a power of two of them, in place, by recursive doubling.

        In each round two ranks exchange their sums and both add them, which gives the same bits in either order.

        Source: Thakur et al. 2005, "Optimization of Collective Communication Operations in MPICH", section 4.5.
        """
        others = torch.empty_like(total)
        for bit in range(self.size.bit_length() - 1):
            self._exchange(total, {self.rank ^ 1 << bit: others})
            total += others

    def _exchange(self, tensor: Tensor, received: dict[int, Tensor]) -> None:
        """Send a tensor `[*]` to other ranks, and receive one like it from each, by rank."""
        if self._sockets is not None:
            self._sockets.exchange(tensor, received)
            return
        works = [dist.isend(tensor, rank) for rank in received]
        works += [dist.irecv(into, rank) for rank, into in received.items()]
        for work in works:
            assert work is not None  # this process is in the group
            work.wait()

    def gather(self, tensor: Tensor) -> list[Tensor]:
        """Return every rank's tensor, each `[*]` of the same shape, in the order of ranks."""
        if self.size == 1:
            return [tensor]
        self._begin()
        own = tensor.contiguous()
        gathered = [torch.empty_like(own) for _ in range(self.size)]
        with self._explained():
            if self._exchanges(own):
                gathered[self.rank] = own.clone()
                self._exchange(own, {rank: into for rank, into in enumerate(gathered) if rank != self.rank})
            else:
                dist.all_gather(gathered, own)
        return gathered

    def broadcast(self, tensors: Sequence[Tensor]) -> None:
        """Broadcast tensors `[*]` from rank 0, in place."""
        if self.size == 1:
            return
        self._begin()
        with torch.no_grad(), self._explained():
            for tensor in tensors:
                sent = tensor.detach().clone(memory_format=torch.contiguous_format)
                dist.broadcast(sent, 0)
                tensor.copy_(sent)

    # -- plain data

    def share(self, what: str, value: Any) -> list[Any]:
        """Return every rank's value, in the order of ranks."""
        if self.size == 1:
            return [value]
        text = json.dumps([what, value]).encode()
        while True:
            capacity = self._capacity
            sent = torch.zeros(_HEADER + capacity, dtype=torch.uint8)
            part = len(text).to_bytes(_HEADER, "little") + text[:capacity]
            sent[: len(part)] = torch.frombuffer(bytearray(part), dtype=torch.uint8)
            received = [bytes(each.numpy()) for each in self.gather(sent)]
            sizes = [int.from_bytes(each[:_HEADER], "little") for each in received]
            if max(sizes) <= capacity:
                break
            self._capacity = 2 * max(sizes)
        found = [json.loads(each[_HEADER : _HEADER + size]) for each, size in zip(received, sizes, strict=True)]
        for rank, (other, _) in enumerate(found):
            if other != what:
                raise RankError(f"rank {rank} is at {other}, rank {self.rank} at {what}: all ranks must do the same.")
        return [each for _, each in found]

    def first(self, what: str, value: Any) -> Any:
        """Return rank 0's value; arguments are those of `share`."""
        return self.share(what, value if self.is_first else None)[0]

    def any(self, what: str, flag: bool) -> bool:
        """Whether a flag is set on any rank."""
        return any(self.share(what, bool(flag)))

    def all(self, what: str, flag: bool) -> bool:
        """Whether a flag is set on all ranks."""
        return all(self.share(what, bool(flag)))

    def collect(self, what: str, content: bytes) -> list[bytes]:
        """Return every rank's bytes, in the order of ranks, on rank 0; on the others nothing."""
        sizes = self.share(what, len(content))
        if not self.is_first:
            if content:
                with self._explained():
                    dist.send(torch.frombuffer(bytearray(content), dtype=torch.uint8), 0)
            return []
        found = [content]
        for rank in range(1, self.size):
            received = torch.empty(sizes[rank], dtype=torch.uint8)
            if sizes[rank]:
                with self._explained():
                    dist.recv(received, rank)
            found.append(received.numpy().tobytes())
        return found

    def spread(self, what: str, content: bytes) -> bytes:
        """Return rank 0's bytes."""
        size = self.first(what, len(content))
        sent = torch.zeros(size, dtype=torch.uint8)
        if self.is_first and size:
            sent = torch.frombuffer(bytearray(content), dtype=torch.uint8)
        self.broadcast([sent])
        return sent.numpy().tobytes()

    def share_of(self, number: int) -> int:
        """Return this rank's share of `number` items; if they do not divide evenly, the first ranks have one more."""
        return number // self.size + (self.rank < number % self.size)


def timeout_s() -> float:
    """Return the time-out in seconds, after which a rank that does not answer ends the others."""
    given = os.environ.get(TIMEOUT_VARIABLE, "")
    try:
        seconds = float(given) if given else _TIMEOUT_S
    except ValueError:
        seconds = 0.0
    if not 0.0 < seconds < 2e6:  # `poll` takes at most 2^31 milliseconds
        raise ValueError(f"{TIMEOUT_VARIABLE} must be a positive number of seconds; got {given!r}.")
    return seconds


def _of_torchrun() -> Ranks:
    """Return this process's place from torchrun's environment variables; one rank if they are missing or empty."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT")
    numbers = [os.environ.get(name, "") for name in names]
    if not (dist.is_available() and "MASTER_ADDR" in os.environ and all(map(str.isdecimal, numbers))):
        return Ranks()
    rank, size, local_rank, local_size, _ = map(int, numbers)
    return Ranks(rank, size, local_rank, local_size)


_PRESENT: Final = _of_torchrun()


def ranks() -> Ranks:
    """Return the processes that train together."""
    return _PRESENT


def sum_over_ranks(*tensors: Tensor) -> list[Tensor]:
    """Return the sums of the ranks' tensors, float32 `[*]` each, by one all-reduce, for which programs cannot wait."""
    if _PRESENT.size == 1:
        return list(tensors)
    total = _PRESENT.sum(torch.cat([tensor.reshape(-1) for tensor in tensors]))
    parts = torch.split_with_sizes(total, [tensor.numel() for tensor in tensors])
    return [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]


def resolve_device(device: str | torch.device) -> torch.device:
    """Return the named device; `"auto"` is CUDA if available. For several ranks, `"cuda"` is each one's own GPU."""
    if str(device) == "auto" or (str(device) == "cuda" and ranks().size > 1):
        return ranks().device
    try:
        resolved = torch.device(device)
        torch.zeros(1, device=resolved).item()  # raises for `meta`, which has no values
    except (RuntimeError, AssertionError, TypeError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(
            f"`device` must be 'auto' or a device of this machine; got {str(device)!r:.200} ({reason})."
        ) from None
    return resolved
