"""Who the ranks are, how their rows become one, and what they exchange over sockets; here each rank is a thread."""

import concurrent.futures
import datetime
import math
import multiprocessing
import os
import queue
import socket
import threading
import time
from types import SimpleNamespace

import pytest
import torch

from rl8x import distributed, keys
from rl8x.algorithms.hyperparameters import part_seed
from rl8x.distributed import Ranks, timeout_s
from rl8x.local_sockets import LocalSockets, connect
from rl8x.rollouts.statistics import pool

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


@pytest.mark.parametrize("left", [{}, {"RANK": ""}, {"WORLD_SIZE": "two"}, {"LOCAL_RANK": ""}])
def test_variables_that_torchrun_does_not_set_so_are_none_of_a_rank(monkeypatch, left):
    set_so = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "here"}
    for name, value in {**set_so, "MASTER_PORT": "29500", **left}.items():
        monkeypatch.setenv(name, value)
    found = distributed._of_torchrun()
    assert (found.rank, found.size, found.local_size) == ((0, 1, 1) if left else (1, 2, 1))


class Wires:
    """What `torch.distributed` does between threads, each of which is a rank."""

    def __init__(self, size):
        self.size, self.calls, self.here = size, [], threading.local()
        self.sent = {(a, b): queue.Queue() for a in range(size) for b in range(size)}

    def isend(self, tensor, rank):
        self.calls.append("isend")
        self.sent[self.here.rank, rank].put(tensor.clone())
        return SimpleNamespace(wait=lambda: None)

    def irecv(self, tensor, rank):
        found = self.sent[rank, self.here.rank]
        return SimpleNamespace(wait=lambda: tensor.copy_(found.get(timeout=30)))

    def all_gather(self, tensors, tensor):
        self.calls.append("all_gather")
        for rank in range(self.size):
            self.sent[self.here.rank, rank].put(tensor.clone())
        for rank, into in enumerate(tensors):
            self.irecv(into, rank).wait()

    def all_reduce(self, tensor):
        self.calls.append("all_reduce")
        parts = [torch.empty_like(tensor) for _ in range(self.size)]
        self.all_gather(parts, tensor)
        tensor.copy_(torch.stack(parts).sum(0))


def part_of(rank):
    return torch.randn(1000, generator=torch.Generator().manual_seed(rank)) * 10**rank


@pytest.mark.parametrize(
    ("size", "most", "calls"),
    [
        (2, 4000, {"isend"}),
        (3, 4000, {"isend", "all_reduce", "all_gather"}),  # no power of two
        (4, 4000, {"isend"}),
        (8, 4000, {"isend"}),
        (4, 3999, {"isend", "all_reduce", "all_gather"}),
        (16, 4000, {"all_reduce", "all_gather"}),
    ],
)
def test_sums_are_the_same_to_the_bit_on_all_ranks_and_gatherings_in_their_order(size, most, calls, monkeypatch):
    wires = Wires(size)
    monkeypatch.setattr(distributed, "dist", wires)
    monkeypatch.setattr(distributed, "_MOST_EXCHANGED", most)

    def rank_of(rank):
        wires.here.rank = rank
        this = Ranks(rank, size, rank)
        this._began = True
        given = part_of(rank)
        found = [this.sum(given), this.sum(torch.tensor(rank)), *this.gather(given.view(10, 100).T)]
        assert given.equal(part_of(rank))
        return found

    with concurrent.futures.ThreadPoolExecutor(size) as pool:
        found = list(pool.map(rank_of, range(size)))
    expected = torch.stack([part_of(rank) for rank in range(size)])
    for total, number, *rows in found:
        assert total.equal(found[0][0])
        torch.testing.assert_close(total.double(), expected.double().sum(0), rtol=1e-5, atol=1e-5 * 10**size)
        assert number == sum(range(size))
        assert torch.stack(rows).equal(expected.view(size, 10, 100).mT)
    assert set(wires.calls) == calls


@pytest.mark.parametrize(
    ("allowed", "local_size", "kept"),
    [
        ({0, 1, 2, 3, 4}, 2, [[0, 1], [2, 3]]),
        ({0, 1, 2, 3, 4}, 5, [[0], [1], [2], [3], [4]]),
        ({0, 1, 2, 3, 4}, 6, []),  # more ranks than processors
        ({1, 3}, 2, []),  # the user's choice
    ],
)
def test_ranks_share_out_the_processors_of_a_machine(allowed, local_size, kept, monkeypatch):
    chosen = []
    monkeypatch.setattr(os, "cpu_count", lambda: 5)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: allowed)
    monkeypatch.setattr(os, "sched_setaffinity", lambda thread, own: chosen.append((thread, own)))
    for rank in range(local_size):
        Ranks(rank, local_size, rank, local_size)._keep_to_own_processors()
    assert [own for thread, own in chosen if thread == os.getpid()] == kept
    assert {thread for thread, _ in chosen} == (
        {int(name) for name in os.listdir("/proc/self/task")} if kept else set()
    )


def test_each_rank_has_seeds_of_its_own_but_for_weights():
    parts = ("env", "sampling", "minibatches", "eval_env", "eval_sampling", "mine")
    found = [part_seed(3, part, rank) for part in parts for rank in range(3)]
    assert len(set(found)) == len(found)
    assert len({part_seed(3, "weights", rank) for rank in range(3)}) == 1
    assert part_seed(3, "env") == part_seed(3, "env", 0)


@pytest.mark.parametrize("given", ["0", "-1", "soon", "nan"])
def test_a_time_out_that_is_none_is_refused(given, monkeypatch):
    monkeypatch.setenv("RL8X_RANK_TIMEOUT_S", given)
    with pytest.raises(ValueError, match="RL8X_RANK_TIMEOUT_S must be a positive number of seconds"):
        timeout_s()
    monkeypatch.setenv("RL8X_RANK_TIMEOUT_S", "7.5")
    assert timeout_s() == 7.5


def test_a_rank_without_episodes_does_not_count_in_their_mean():
    rows = [{"r/mean": value, keys.EPISODES_ENDED: count} for value, count in ((math.nan, 0.0), (4.0, 2.0))]
    assert dict(pool(rows, {keys.EPISODES_ENDED: ("r/",)})) == {"r/mean": 4.0, keys.EPISODES_ENDED: 2.0}
