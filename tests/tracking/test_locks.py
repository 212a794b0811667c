import os
import subprocess
import sys
import threading

from rl8x.tracking.locks import FileLock


def test_one_holder_in_a_process(tmp_path):
    first, second = FileLock(tmp_path / "lock"), FileLock(tmp_path / "lock")
    assert first.acquire()
    assert first.held
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
