import os
import shutil
import subprocess
import sys

import pytest
from tests.forks import ForkedPython

from rl8x.tracking.locks import FileLock, FolderLock, is_locked, was_left

KINDS = {"file": lambda folder: FileLock(folder / "lock"), "folder": FolderLock}
EITHER = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)


@EITHER
def test_one_holder_in_a_process(kind, tmp_path):
    first, second = kind(tmp_path), kind(tmp_path)
    assert first.acquire()
    assert not second.acquire(0.1)
    assert second.owner() == "this process"
    first.release()
    first.release()
    assert second.acquire()
    second.release()


def holder(folder):
    """Return a process that has locked a folder."""

    def hold():
        print(FolderLock(folder).acquire(), flush=True)
        sys.stdin.read()

    process = ForkedPython(hold, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "True\n"
    return process


@EITHER
def test_another_process_sees_it_and_its_death_frees_it(kind, tmp_path):
    process = holder(tmp_path)
    lock = kind(tmp_path)
    assert not lock.acquire()
    assert lock.owner() == f"process {process.pid}"
    if isinstance(lock, FolderLock):  # which stays locked where its file is removed
        (tmp_path / "lock").unlink()
        assert not lock.acquire()
        assert lock.owner() == (f"process {process.pid}" if os.path.exists("/proc/locks") else "another process")
        assert not (tmp_path / "lock").exists()  # who is refused makes none
    assert is_locked(tmp_path)
    process.kill()
    process.communicate()
    assert was_left(tmp_path) == (tmp_path / "lock").exists()
    assert lock.acquire(5)
    lock.release()
    assert not was_left(tmp_path)


def test_copies_of_the_file_and_readers_of_it_do_not_drop_it(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    with FolderLock(folder):
        shutil.copytree(folder, tmp_path / "copy")
        shutil.make_archive(str(tmp_path / "backup"), "zip", folder)
        code = "import sys; from rl8x.tracking.locks import *; print(*(is_locked(Path(p)) for p in sys.argv[1:]))"
        command = [sys.executable, "-c", code, str(folder), str(tmp_path / "copy")]
        assert subprocess.run(command, stdout=subprocess.PIPE, text=True).stdout == "True False\n"
        assert not FolderLock(folder).acquire()
    assert not is_locked(folder)
    assert not is_locked(tmp_path / "none")


@EITHER
def test_what_was_removed_by_the_holder_before_is_not_taken(kind, tmp_path, monkeypatch):
    folder = tmp_path / "run"
    folder.mkdir()
    first, second = kind(folder), kind(folder)
    first.acquire()
    opened = os.open

    def ends_in_between(*args):
        fd = opened(*args)
        monkeypatch.undo()
        shutil.rmtree(folder)
        first.release()
        folder.mkdir()
        return fd

    monkeypatch.setattr("rl8x.tracking.locks.os.open", ends_in_between)
    assert second.acquire(1)
    assert is_locked(folder)
    second.release()
