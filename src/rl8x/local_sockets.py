"""Exchange of vectors between ranks on one machine, over Unix sockets that the calling thread reads and writes.

Waking gloo's thread for each message took a third of a training step of a few milliseconds (docs/scaling.md).
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

_HEADER: Final = 8  # bytes before a vector, with its length in bytes
# Seconds of busy waiting before the thread sleeps. Other ranks are rarely later, and an idle processor wakes up slowly.
_SPIN_S: Final = 0.001


class LocalSockets:
    """Sockets to other ranks."""

    def __init__(self, sockets: Mapping[int, socket.socket], timeout_s: float) -> None:
        self._sockets = dict(sockets)
        self._timeout_s = timeout_s
        for each in self._sockets.values():
            each.setblocking(False)

    def exchange(self, tensor: Tensor, received: Mapping[int, Tensor]) -> None:
        """Send a tensor to other ranks, and receive one of the same size from each."""
        own = _bytes_of(tensor)
        message = memoryview(len(own).to_bytes(_HEADER, "little") + own)
        found = {rank: bytearray(len(message)) for rank in received}
        # The bytes still to send to each rank, and the memory to receive its bytes into.
        left = dict.fromkeys(((rank, True) for rank in received), message)
        left |= {(rank, False): memoryview(content) for rank, content in found.items()}
        while left:
            for (rank, sends), part in [*left.items()]:
                rest = left[rank, sends] = part[self._moved(rank, sends, part) :]
                if not sends and len(rest) <= len(own) and found[rank][:_HEADER] != message[:_HEADER]:
                    raise RuntimeError(f"rank {rank} sends something else: all ranks must do the same")
            left = {way: part for way, part in left.items() if part}
            if left:
                self._wait(left)
        for rank, into in received.items():
            _bytes_of(into)[:] = memoryview(found[rank])[_HEADER:]

    def _moved(self, rank: int, sends: bool, part: memoryview) -> int:
        """Send or receive as much as possible without blocking; return the number of bytes."""
        peer = self._sockets[rank]
        try:
            count = peer.send(part) if sends else peer.recv_into(part)
        except BlockingIOError:
            return 0
        except OSError as error:
            raise RuntimeError(f"rank {rank} has closed its connection ({error.strerror})") from error
        if not count:
            raise RuntimeError(f"rank {rank} has closed its connection")
        return count

    def _wait(self, left: Mapping[tuple[int, bool], object]) -> None:
        """Wait until a socket is ready, first by spinning, then asleep."""
        waited, until = select.poll(), time.perf_counter() + _SPIN_S
        for rank in {rank for rank, _ in left}:
            sending, coming = (rank, True) in left, (rank, False) in left
            waited.register(self._sockets[rank], select.POLLOUT * sending | select.POLLIN * coming)
        while not (ready := waited.poll(0)) and time.perf_counter() < until:
            pass
        if not ready and not waited.poll(1000 * self._timeout_s):
            raise RuntimeError(f"rank {min(left)[0]} has timed out")

    def close(self) -> None:
        """Close the sockets."""
        for each in self._sockets.values():
            each.close()


def _bytes_of(tensor: Tensor) -> memoryview:
    """Return the memory of a contiguous tensor on the CPU."""
    content: Any = tensor.detach().reshape(-1).view(torch.uint8).numpy()
    return memoryview(content)


def connect(rank: int, size: int, store: Any, timeout_s: float) -> LocalSockets | None:
    """Connect this rank to all others, which must be on the same machine; None on systems other than Linux."""
    if sys.platform != "linux":  # only Linux has abstract addresses, which need no file
        return None
    sockets = {}
    with socket.socket(socket.AF_UNIX) as listener:
        listener.settimeout(timeout_s)
        listener.bind("")
        listener.listen(size)
        store.set(f"socket of {rank}", listener.getsockname())
        for other in range(rank):
            sockets[other] = socket.socket(socket.AF_UNIX)
            sockets[other].settimeout(timeout_s)
            sockets[other].connect(bytes(store.get(f"socket of {other}")))
            sockets[other].sendall(bytes([rank]))
        for _ in range(rank + 1, size):
            peer, _ = listener.accept()
            peer.settimeout(timeout_s)
            sockets[peer.recv(1)[0]] = peer
    connected = LocalSockets(sockets, timeout_s)
    # Forked processes, such as simulators, would keep the sockets open after this process has ended.
    os.register_at_fork(after_in_child=connected.close)
    return connected
