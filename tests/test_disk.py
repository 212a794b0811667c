"""A file is replaced whole or not at all, and what the disk refused leaves nothing behind."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from rl8x import disk


@pytest.mark.parametrize("fails", ["fsync", "replace"])
def test_what_the_disk_refuses_leaves_the_file_as_it_was_and_nothing_beside_it(
    fails: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    path = tmp_path / "policy.bin"
    disk.replace_synced(path, b"before")
    with monkeypatch.context() as patch:
        patch.setattr(disk.os, fails, full)
        with pytest.raises(OSError, match="No space left"):
            disk.replace_synced(path, b"after")
    assert [(each.name, each.read_bytes()) for each in tmp_path.iterdir()] == [("policy.bin", b"before")]
    disk.replace_synced(path, b"after")
    assert path.read_bytes() == b"after"


def test_two_that_write_the_same_file_at_once_write_it_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As ranks do, each of which saves its policy under the same name."""
    path, replace, others = tmp_path / "policy.bin", os.replace, [b"another's"]

    def slowly(*names: Path) -> None:
        if others:  # the other one writes while this one is about to rename
            disk.replace_synced(path, others.pop())
            assert path.read_bytes() == b"another's"
        replace(*names)

    monkeypatch.setattr(disk.os, "replace", slowly)
    disk.replace_synced(path, b"mine")
    assert [(each.name, each.read_bytes()) for each in tmp_path.iterdir()] == [("policy.bin", b"mine")]
