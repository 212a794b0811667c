import resource
import threading

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from rl8x.execution.memory import keep_small_blocks

SMALL, LARGE = 2**16, 2**16 + 1


@pytest.fixture(autouse=True)
def _installed():
    if not keep_small_blocks():
        pytest.skip("no C++ compiler")


def taken(size):
    return torch.empty(size, dtype=torch.uint8)


@pytest.mark.parametrize("size", [1, 63, 64, 65, 100, 4096, 5000, SMALL])
def test_the_next_tensor_of_a_size_gets_the_block_that_was_freed_last(size):
    first, second = taken(size), taken(size)
    places = [first.data_ptr(), second.data_ptr()]
    del first
    del second
    again = [taken(size), taken(size)]
    assert [tensor.data_ptr() for tensor in again] == places[::-1]


def test_every_block_is_aligned_large_enough_and_its_own():
    generator = torch.Generator().manual_seed(0)
    sizes = [*torch.randint(1, 2 * SMALL, (3000,), generator=generator).tolist(), SMALL, LARGE, 0, 64, 127, 128]
    kept: list[tuple[torch.Tensor, int]] = []
    for i, size in enumerate(sizes):
        kept.append((taken(size).fill_(i % 251), i % 251))
        if i % 3 == 0:
            tensor, value = kept.pop(int(torch.randint(len(kept), (), generator=generator)))
            assert bool((tensor == value).all())
    assert all(bool((tensor == value).all()) for tensor, value in kept)
    assert all(tensor.data_ptr() % 64 == 0 for tensor, _ in kept)


def resident_mb():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize() / 1e6


def test_blocks_that_one_thread_takes_and_another_frees_do_not_pile_up():
    def hand_over(times):
        for _ in range(times):
            made = []
            thread = threading.Thread(target=lambda made=made: made.extend(taken(SMALL) for _ in range(100)))
            thread.start()
            thread.join()
            del made[:], thread

    hand_over(5)
    before = resident_mb()
    hand_over(100)  # 655 MB, were they kept
    assert resident_mb() < before + 50


def test_tensors_outlive_the_thread_that_made_them():
    made = []
    thread = threading.Thread(target=lambda: made.extend(torch.full((100,), 3.0) for _ in range(50)))
    thread.start()
    thread.join()
    others = [torch.zeros(100) for _ in range(100)]
    assert all(bool((tensor == 3.0).all()) for tensor in made)
    assert all(not tensor.any() for tensor in others)


def test_the_memory_profiler_still_sees_it():
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        tensor = torch.empty(1000)
    [empty] = [event for event in profiled.key_averages() if event.key == "aten::empty"]
    assert empty.self_cpu_memory_usage == tensor.nbytes == 4000
