"""Vectors that ranks of one machine exchange over sockets; here each rank is a thread."""

import concurrent.futures
import datetime
import multiprocessing
import socket
import threading
import time

import pytest
import torch

from rl8x.local_sockets import LocalSockets, connect

TIMEOUT_S = 20.0


def on_each(size, job):
    """Connect ranks, and return what the job returns on each, given its sockets and its number."""
    store = torch.distributed.HashStore()
    store.set_timeout(datetime.timedelta(seconds=TIMEOUT_S))

    def rank_of(rank):
        sockets = connect(rank, size, store, TIMEOUT_S)
        try:
            return job(sockets, rank)
        finally:
            sockets.close()

    with concurrent.futures.ThreadPoolExecutor(size) as pool:
        return list(pool.map(rank_of, range(size)))


def drawn(rank, shape, dtype):
    numbers = torch.randint(0, 2 if dtype == torch.bool else 100, shape, generator=torch.Generator().manual_seed(rank))
    return numbers.to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.uint8, torch.bool, torch.int64, torch.bfloat16])
@pytest.mark.parametrize("shape", [(), (3, 5), (0,), (1000,)])
def test_all_ranks_get_what_the_others_send(shape, dtype):
    def job(sockets, rank):
        for _ in range(3):  # one after another
            others = {other: torch.zeros(shape, dtype=dtype) for other in range(4) if other != rank}
            sockets.exchange(drawn(rank, shape, dtype), others)
            assert all(others[other].equal(drawn(other, shape, dtype)) for other in others)
        return len(others)

    assert on_each(4, job) == [3] * 4


def test_vectors_that_fill_the_sockets_pass_each_other():
    size = 2**20  # 8 MB, of which a socket takes some 200 kB

    def job(sockets, rank):
        found = torch.empty(size, dtype=torch.float64)
        sockets.exchange(torch.full((size,), 1.5 + rank, dtype=torch.float64), {1 - rank: found})
        return found.unique().tolist()

    assert on_each(2, job) == [[2.5], [1.5]]


@pytest.mark.parametrize("forks", [False, True])
def test_a_rank_that_ends_is_missed_at_once_though_what_it_has_forked_goes_on(forks):
    forked = multiprocessing.get_context("fork").Process(target=time.sleep, args=(TIMEOUT_S,), daemon=True)

    def job(sockets, rank):
        if rank == 1:
            return forked.start() if forks else None
        with pytest.raises(RuntimeError, match="rank 1 has closed its connection"):
            sockets.exchange(torch.ones(3), {1: torch.ones(3)})
        return forks and forked.is_alive()

    assert on_each(2, job) == [forks, None]
    if forks:
        forked.kill()
        forked.join()


def test_ranks_at_different_things_are_refused():
    met = threading.Barrier(2)

    def job(sockets, rank):
        with pytest.raises(RuntimeError, match=f"rank {1 - rank} sends something else: all ranks must do the same"):
            sockets.exchange(torch.ones(3 + rank), {1 - rank: torch.ones(3 + rank)})
        met.wait(TIMEOUT_S)
        return "told"

    assert on_each(2, job) == ["told"] * 2


def test_a_rank_that_hangs_is_given_up():
    here, there = socket.socketpair()
    with here, there, pytest.raises(RuntimeError, match="rank 1 has timed out"):
        LocalSockets({1: here}, 0.05).exchange(torch.ones(3), {1: torch.ones(3)})
