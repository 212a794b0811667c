import os
import shutil
import signal
import subprocess
import sys
import threading

from rl8x.tracking.locks import FileLock, is_locked


def test_one_holder_in_a_process(tmp_path):
    first, second = FileLock(tmp_path / "lock"), FileLock(tmp_path / "lock")
    assert first.acquire()
    assert not second.acquire(0.1)
    assert second.owner() == "this process"
    first.release()
    first.release()
    assert second.acquire()
    second.release()


def test_another_process_sees_it_and_its_death_frees_it(tmp_path):
    code = """
import sys
from pathlib import Path
from rl8x.tracking.locks import FileLock
lock = FileLock(Path(sys.argv[1]))
print(lock.acquire(), flush=True)
sys.stdin.read()
"""
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path / "lock")], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "True\n"
    lock = FileLock(tmp_path / "lock")
    assert not lock.acquire()
    assert lock.owner() == f"process {process.pid}"
    process.kill()
    process.communicate()
    assert lock.acquire(5)
    lock.release()


def test_a_forked_child_does_not_keep_it(tmp_path):
    lock = FileLock(tmp_path / "lock")
    lock.acquire()
    end, begin = os.pipe()
    if (child := os.fork()) == 0:
        os.read(end, 1)
        os._exit(0)
    lock.release()
    other = FileLock(tmp_path / "lock")
    assert other.acquire()
    other.release()
    os.write(begin, b"x")
    os.waitpid(child, 0)


def test_waiting(tmp_path):
    first, second = FileLock(tmp_path / "lock"), FileLock(tmp_path / "lock")
    first.acquire()
    entered = threading.Event()

    def wait():
        with second:
            entered.set()

    thread = threading.Thread(target=wait)
    thread.start()
    assert not entered.wait(0.1)
    first.release()
    assert entered.wait(5)
    thread.join()


HOLDS_IT = """
import os, sys
from pathlib import Path
from rl8x.tracking.locks import FileLock
lock = FileLock(Path(sys.argv[1]))
assert lock.acquire()
if os.fork() == 0:
    os.read(0, 1)
    os._exit(0)
print("held", flush=True)
os.read(0, 1)
"""


def test_a_forked_child_that_outlives_its_killed_parent_does_not_keep_it(tmp_path):
    command = [sys.executable, "-c", HOLDS_IT, str(tmp_path / "lock")]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "held\n"
    assert is_locked(tmp_path / "lock")
    process.send_signal(signal.SIGKILL)
    process.wait()
    lock = FileLock(tmp_path / "lock")
    assert lock.acquire(5)
    lock.release()
    process.communicate()  # lets the child end


def test_copies_of_the_file_and_readers_of_it_do_not_drop_it(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    with FileLock(folder / "lock"):
        shutil.copytree(folder, tmp_path / "copy")
        shutil.make_archive(str(tmp_path / "backup"), "zip", folder)
        code = "import sys; from rl8x.tracking.locks import *; sys.exit(is_locked(Path(sys.argv[1])))"
        command = [sys.executable, "-c", code]
        assert subprocess.run([*command, str(folder / "lock")], check=False).returncode == 1
        assert subprocess.run([*command, str(tmp_path / "copy/lock")], check=False).returncode == 0
        assert not FileLock(folder / "lock").acquire()
    assert not is_locked(folder / "lock")
    assert not is_locked(tmp_path / "none")


def test_a_file_that_was_removed_by_the_holder_before_is_not_taken(tmp_path, monkeypatch):
    folder = tmp_path / "run"
    folder.mkdir()
    first, second = FileLock(folder / "lock"), FileLock(folder / "lock")
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
    assert is_locked(folder / "lock")
    second.release()
