"""Sockets between the ranks of one machine, by which two of them exchange vectors without a thread in between.

gloo has each message handed over by a thread of its own. Where an update takes milliseconds, to wake that thread and to
be woken by it took a rank as long again as a third of its work (two ranks on two virtual cores).
"""

from __future__ import annotations

import os
import select
import socket
import sys
import time
from collections.abc import Mapping
from typing import Any, Final

import torch
from torch import Tensor

_HEADER: Final = 8  # bytes before a vector that say how many there are
# Ranks that do the same are rarely later than that. A processor that idles takes its time to wake up, with cold caches.
_AWAKE_S: Final = 0.001
_LONGEST_MS: Final = 2**31 - 1  # that `poll` takes


class Wires:
    """Sockets to some other ranks, by their numbers.

    Args:
        sockets: The sockets.
        timeout_s: Seconds after which another rank that neither sends nor receives is given up.
    """

    def __init__(self, sockets: Mapping[int, socket.socket], timeout_s: float) -> None:
        self._sockets = dict(sockets)
        self._timeout_s = timeout_s
        for each in self._sockets.values():
            each.setblocking(False)

    def exchange(self, tensor: Tensor, received: Mapping[int, Tensor]) -> None:
        """Send a tensor `[*]` to some ranks, and receive what they send, as many bytes, by their numbers.

        Raises:
            RuntimeError: If a rank has ended, does not answer, or sends something else.
        """
        own = _bytes_of(tensor)
        message = memoryview(len(own).to_bytes(_HEADER, "little") + own)
        sending = dict.fromkeys(received, message)
        found = {rank: bytearray(len(message)) for rank in received}
        coming = {rank: memoryview(content) for rank, content in found.items()}
        while sending or coming:
            for rank, part in [*sending.items()]:
                sending[rank] = part[self._send(rank, part) :]
            for rank, part in [*coming.items()]:
                coming[rank] = part[self._receive(rank, part) :]
                if len(coming[rank]) <= len(own) and found[rank][:_HEADER] != message[:_HEADER]:
                    raise RuntimeError(f"rank {rank} sends something else: all ranks must do the same")
            sending, coming = ({rank: part for rank, part in each.items() if part} for each in (sending, coming))
            self._wait(sending, coming)
        for rank, into in received.items():
            _bytes_of(into)[:] = memoryview(found[rank])[_HEADER:]

    def _send(self, rank: int, part: memoryview) -> int:
        """Send as much as goes at once; return how many bytes that was."""
        try:
            return self._sockets[rank].send(part)
        except BlockingIOError:
            return 0
        except OSError as error:
            raise RuntimeError(f"rank {rank} has closed its connection ({error.strerror})") from error

    def _receive(self, rank: int, part: memoryview) -> int:
        """Receive as much as is there; return how many bytes that was."""
        try:
            count = self._sockets[rank].recv_into(part)
        except BlockingIOError:
            return 0
        except OSError as error:
            raise RuntimeError(f"rank {rank} has closed its connection ({error.strerror})") from error
        if not count:
            raise RuntimeError(f"rank {rank} has closed its connection")
        return count

    def _wait(self, sending: Mapping[int, object], coming: Mapping[int, object]) -> None:
        """Wait until one of the sockets can go on, awake at first."""
        if not (sending or coming):
            return
        waited, until = select.poll(), time.perf_counter() + _AWAKE_S
        for rank in {*sending, *coming}:
            waited.register(self._sockets[rank], select.POLLOUT * (rank in sending) | select.POLLIN * (rank in coming))
        while not (ready := waited.poll(0)) and time.perf_counter() < until:
            pass
        if not ready and not waited.poll(min(1000 * self._timeout_s, _LONGEST_MS)):
            raise RuntimeError(f"rank {min({*sending, *coming})} has timed out")

    def close(self) -> None:
        """Close the sockets."""
        for each in self._sockets.values():
            each.close()


def _bytes_of(tensor: Tensor) -> memoryview:
    """Return the memory of a contiguous tensor on the CPU."""
    content: Any = tensor.detach().reshape(-1).view(torch.uint8).numpy()
    return memoryview(content)


def connect(rank: int, size: int, store: Any, timeout_s: float) -> Wires | None:
    """Connect a rank to all others, which have to be on this machine; None where the system has no such sockets.

    Args:
        rank: Its number.
        size: How many there are.
        store: Where they tell each other their addresses, with the methods of `torch.distributed.Store`.
        timeout_s: Seconds after which one that does not come is given up.

    Raises:
        OSError: If one does not come.
    """
    if sys.platform != "linux":  # names without a file, which the system gives and takes back
        return None
    sockets = {}
    with socket.socket(socket.AF_UNIX) as door:
        door.settimeout(timeout_s)
        door.bind("")
        door.listen(size)
        store.set(f"wire of {rank}", door.getsockname())
        for other in range(rank):
            sockets[other] = socket.socket(socket.AF_UNIX)
            sockets[other].settimeout(timeout_s)
            sockets[other].connect(bytes(store.get(f"wire of {other}")))
            sockets[other].sendall(bytes([rank]))
        for _ in range(rank + 1, size):
            caller, _ = door.accept()
            caller.settimeout(timeout_s)
            sockets[caller.recv(1)[0]] = caller
    wires = Wires(sockets, timeout_s)
    # What this process forks, such as simulators, would keep them open for the others when it has ended.
    os.register_at_fork(after_in_child=wires.close)
    return wires
