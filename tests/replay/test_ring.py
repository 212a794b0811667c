import errno
import os
from collections import deque

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rl8x.replay.ring import Replay


def rows_of(numbers):
    """Make rows that are told apart by their number, with all kinds of columns."""
    numbers = torch.as_tensor(numbers, dtype=torch.float32)
    return {
        "obs/image": (numbers % 256).to(torch.uint8).view(-1, 1, 1).expand(-1, 2, 3),
        "obs/vector": numbers.unsqueeze(1) + torch.tensor([0.0, 0.5, 0.25]),
        "actions": numbers.long() * 3,
        "returns": -numbers,
        "flags": numbers.long().unsqueeze(1) % torch.tensor([2, 3]) == 0,
    }


def same_rows(rows, numbers):
    expected = rows_of(numbers)
    return rows.keys() == expected.keys() and all(
        rows[name].dtype == expected[name].dtype and torch.equal(rows[name], expected[name]) for name in expected
    )


@given(st.integers(1, 20), st.lists(st.integers(0, 45), min_size=1, max_size=8), st.booleans())
@settings(max_examples=80, deadline=None)
def test_a_ring_is_a_deque(tmp_path_factory, capacity, blocks, on_disk):
    folder = tmp_path_factory.mktemp("ring") / "new" if on_disk else None
    replay = Replay(capacity, "cpu", path=folder)
    kept = deque(maxlen=capacity)
    total = 0
    for count in blocks:
        replay.append(rows_of(range(total, total + count)))
        kept.extend(range(total, total + count))
        total += count
        assert (replay.size, replay.total) == (len(kept), total)
    assert not on_disk or not any(folder.glob("*"))  # its files have no names
    numbers = sorted(kept, key=lambda number: number % capacity)
    assert same_rows(replay.gather(torch.arange(replay.size)), numbers)
    assert same_rows(dict(replay.as_tensordict().items()), numbers)


def test_rows_are_drawn_uniformly():
    replay = Replay(50, "cpu")
    replay.append(rows_of(range(40)))
    index = replay.sample(400, 100, torch.Generator().manual_seed(3))
    assert index.shape == (400, 100)
    counts = index.flatten().bincount(minlength=40).double()
    assert len(counts) == 40  # none of the empty slots
    # 39 degrees of freedom: chi-square exceeds 72.1 in 1 of 1,000 draws.
    assert ((counts - 1000.0).square() / 1000.0).sum() < 72.1


@pytest.mark.skipif(
    not hasattr(os, "posix_fallocate"), reason="this system takes no space for files before they are full"
)
def test_a_disk_that_refuses_after_all_is_named_and_nothing_is_left(tmp_path, monkeypatch):
    """As one with a quota does, of which its free space says nothing."""

    def refuse(file, offset, size):
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    replay = Replay(10**6, "cpu", path=tmp_path)
    with pytest.raises(ValueError, match=f"file of 0.0 GB cannot be made in {tmp_path}: .*quota.* Lower the capacity"):
        replay.append(rows_of([0]))
    assert (replay.size, replay.total, list(tmp_path.iterdir())) == (0, 0, [])
