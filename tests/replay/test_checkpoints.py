"""A replay in a run's checkpoints: what is written, what is shared, and what comes back."""

import os
import shutil

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.checkpoint.legal import metadata
from tests.checkpoint.test_files import opened

from rl8x.checkpoint import CheckpointError, listed, read
from rl8x.checkpoint.tree import clone, copied, segments_in, tensors_in
from rl8x.replay import ring as segmentation
from rl8x.replay.ring import Replay


@pytest.fixture(autouse=True)
def _small_segments(monkeypatch):
    monkeypatch.setattr(segmentation, "_ROWS", 8)


def rows_of(first, last, version=0):
    numbers = torch.arange(first, last)
    return {
        "obs/image": (numbers % 251).to(torch.uint8).view(-1, 1, 1).expand(-1, 2, 2),
        "obs/vector": numbers.float().unsqueeze(1) + torch.tensor([0.0, 0.5]) + 1000.0 * version,
        "actions": numbers * 3,
        "returns": -numbers.double(),
    }


def add(replay, count, version=0):
    replay.append(rows_of(replay.total, replay.total + count, version))


def same_rings(left, right):
    one, other = left.as_tensordict(), right.as_tensordict()
    return (
        (left.size, left.total) == (right.size, right.total)
        and set(one.keys()) == set(other.keys())
        and all(torch.equal(one[name], other[name]) for name in one.keys())  # noqa: SIM118
    )


def save(manager, replay, steps=1):
    """Write a checkpoint and return its folder."""
    state = {"best": None, "replay": replay.state_dict()}
    manager.save(steps, metadata(), state)
    return manager.wait()


def loaded(path, capacity):
    replay = Replay(capacity, "cpu")
    replay.load_state_dict(read(path).state["replay"])
    return replay


def copy_of(replay):
    copy = Replay(replay.capacity, "cpu")
    copy.load_state_dict(clone(replay.state_dict()))
    return copy


def segments(path):
    return {file.name: file for file in path.glob("*.segment.pt")}


@given(st.integers(1, 40), st.lists(st.integers(0, 60), min_size=1, max_size=8), st.sampled_from([1, 100]), st.data())
@settings(max_examples=15, deadline=None)
def test_a_ring_goes_on_from_every_checkpoint_that_is_kept(tmp_path_factory, capacity, counts, keep, data):
    tmp_path = tmp_path_factory.mktemp("run")
    replay, manager, expected = Replay(capacity, "cpu"), opened(tmp_path, keep=keep), {}
    for version, count in enumerate(counts):
        add(replay, count, version)
        path = save(manager, replay, version)
        expected[path] = copy_of(replay)
        if data.draw(st.booleans()):
            replay = loaded(path, capacity)
    manager.end()
    assert listed(tmp_path)[-1] == path
    for path in listed(tmp_path):
        resumed, ring = loaded(path, capacity), expected[path]
        assert same_rings(resumed, ring)
        add(resumed, 5)
        add(ring, 5)
        assert same_rings(resumed, ring)


def test_a_checkpoint_costs_what_is_new(tmp_path):
    replay, manager = Replay(64, "cpu"), opened(tmp_path)
    add(replay, 60)
    before = segments(save(manager, replay))
    add(replay, 10)
    after = segments(save(manager, replay))
    # Rows 0 to 5 are overwritten, and still part of the first piece; the tail from 56 on is made anew.
    shared = before.keys() & after.keys()
    assert (len(before), len(after), len(shared)) == (8, 9, 7)
    assert all(after[name].samefile(before[name]) for name in shared)
    manager.end()
    manager = opened(tmp_path)
    same = segments(save(manager, replay))
    assert same.keys() == after.keys()  # nothing is new
    state = replay.state_dict()
    assert tensors_in(state) == {}
    assert [each[2].decode() for each in copied(state)["segments"]] == [each.name for each in segments_in(state)]
    add(replay, 12)  # of the first two pieces no row is left
    assert len(segments(save(manager, replay)).keys() & same.keys()) == 6


def test_a_checkpoint_that_is_gone_is_not_shared_and_rows_are_copied_when_save_returns(tmp_path):
    replay, manager = Replay(100, "cpu"), opened(tmp_path, keep=1)
    add(replay, 30)
    path = save(manager, replay)
    shutil.copytree(path, tmp_path / "elsewhere/000001-step-1")
    assert same_rings(loaded(tmp_path / "elsewhere/000001-step-1", 100), replay)
    shutil.rmtree(path)
    expected = copy_of(replay)
    manager.save(2, metadata(), {"best": None, "replay": replay.state_dict()})
    add(replay, 20)
    path = manager.wait()
    manager.end()
    assert same_rings(loaded(path, 100), expected)


def refuses(*args, **options):
    raise OSError(18, "Invalid cross-device link")


def test_a_checkpoint_that_goes_while_it_is_shared_is_a_warning(tmp_path, monkeypatch, caplog):
    from rl8x.checkpoint import files

    replay, manager, write = Replay(20, "cpu"), opened(tmp_path), files.write
    add(replay, 20)
    first = save(manager, replay)

    def late(*args):
        shutil.rmtree(first)
        return write(*args)

    monkeypatch.setattr(files, "write", late)
    save(manager, replay)
    assert "no checkpoint at step 1, those before are kept" in caplog.text
    monkeypatch.setattr(files, "write", write)
    assert same_rings(loaded(save(manager, replay), 20), replay)


@pytest.mark.parametrize("folder", [".", "other"])
def test_a_resumed_run_shares_with_the_checkpoint_it_goes_on_from(folder, tmp_path):
    replay, manager = Replay(100, "cpu"), opened(tmp_path)
    add(replay, 30, version=1)
    first = save(manager, replay)
    add(replay, 30, version=1)
    second = save(manager, replay)
    manager.end()
    # The first is gone on with: what comes has the numbers of rows in the second, and is something else.
    checkpoint = read(first)
    other, manager = Replay(100, "cpu"), opened(tmp_path / folder)
    other.load_state_dict(checkpoint.state["replay"])
    manager.go_on_from(checkpoint, listed(tmp_path)[-1])
    add(other, 30, version=2)
    third = save(manager, other)
    manager.end()
    assert same_rings(loaded(third, 100), other)
    assert same_rings(loaded(second, 100), replay)
    assert segments(third).keys() & segments(second).keys() == segments(third).keys() & segments(first).keys()
    shared = segments(third).keys() & segments(first).keys()
    assert len(shared) == 3
    assert all(segments(third)[name].samefile(segments(first)[name]) for name in shared)


def test_another_disk_gets_copies_and_nothing_is_shared_with_what_was_found_damaged(tmp_path, monkeypatch):
    replay, manager = Replay(100, "cpu"), opened(tmp_path)
    add(replay, 30)
    first = save(manager, replay)
    with monkeypatch.context() as patched:
        patched.setattr(os, "link", refuses)
        second = save(manager, replay)
    assert segments(second).keys() == segments(first).keys()
    assert not any(file.samefile(segments(first)[name]) for name, file in segments(second).items())
    assert same_rings(loaded(second, 100), replay)
    for file in segments(second).values():
        file.write_bytes(b"damaged")
    assert manager.last_good().path == first
    third = save(manager, replay)
    manager.end()
    assert same_rings(loaded(third, 100), replay)
    assert all(file.samefile(segments(first)[name]) for name, file in segments(third).items())


def test_a_segment_that_goes_after_it_was_checked_is_named(tmp_path):
    replay, manager = Replay(100, "cpu"), opened(tmp_path)
    add(replay, 20)
    checkpoint = read(save(manager, replay))
    manager.end()
    shutil.copytree(checkpoint.path, checkpoint.path.parent / "whole")
    name, file = sorted(segments(checkpoint.path).items())[1]
    file.unlink()
    resumed = loaded(checkpoint.path.parent / "whole", 100)  # has rows, and their names
    with pytest.raises(CheckpointError, match=f"cannot be used: .*{name}"):
        resumed.load_state_dict(checkpoint.state["replay"])


def test_a_replay_of_another_capacity_takes_the_newest_rows():
    replay = Replay(20, "cpu")
    add(replay, 50)
    for capacity in (7, 20, 31):
        other = Replay(capacity, "cpu")
        other.load_state_dict(replay.state_dict())
        add(other, 3)
        assert other.total == 53
        assert other.size == min(capacity, 23)
        assert sorted(other.as_tensordict()["actions"].tolist()) == [3 * row for row in range(53 - other.size, 53)]


def test_a_state_that_is_no_longer_the_present_one_is_not_read():
    replay = Replay(20, "cpu")
    add(replay, 20)
    state = replay.state_dict()
    add(replay, 1)
    with pytest.raises(RuntimeError, match="has gone on"):
        Replay(20, "cpu").load_state_dict(state)


def test_large_rows_make_short_segments(monkeypatch):
    monkeypatch.setattr(segmentation, "_ROWS", 32_768)
    sizes = {1: 32_768, 42 * 4: 32_768, 500: 8192, 4 * 84 * 84: 256, 10**9: 1}
    assert {size: segmentation.segment_rows(size) for size in sizes} == sizes
