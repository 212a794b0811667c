"""How runs end that nobody ends, in real scripts and a real interpreter, whose store is away: the journals tell it."""

import json
import subprocess
import sys
import textwrap

import pytest

from rl8x.tracking.protocol import status_of

BEGIN = """
import sys, threading, time
from rl8x.tracking import MLflowTracker, shipping

def no_process(database):
    raise OSError("away")

shipping._ShipperProcess = no_process

def start(name):
    tracker = MLflowTracker(run_name=name, outage_timeout_s=0.0, interval_s=0.05)
    tracker.start(params={}, tags={})
    return tracker

def loop(tracker, fail_at=None):
    for step in range(4):
        if step == fail_at:
            raise ZeroDivisionError
        tracker.log_metrics({"a": 1.0}, step)

def endless(tracker):
    for step in range(1_000_000):
        tracker.log_metrics({"a": 1.0}, step)
        began.set()
        time.sleep(0.01)

began = threading.Event()
"""


def statuses(folder):
    """Read from the journals how runs ended: by name, the status, and whether nothing came after it."""
    found = {}
    for file in (folder / "mlruns" / "spool").glob("*/journal.jsonl"):
        ops = [json.loads(line) for line in file.read_text().splitlines()]
        ends = [op["status"] for op in ops if op["op"] == "finish"]
        found[ops[0]["run_name"]] = ends[0] if len(ends) == 1 and ops[-1]["op"] in ("finish", "tags") else ends
    return found


def python(folder, *args, **options):
    return subprocess.run([sys.executable, *args], cwd=folder, capture_output=True, text=True, timeout=240, **options)


def test_of_a_script_that_raises_only_what_raised_or_is_cut_off_has_not_finished(tmp_path):
    script = """
        from multiprocessing.pool import ThreadPool
        tracker, in_thread, in_pool, in_daemon = map(start, ("script", "thread", "pool", "daemon"))
        threading.Thread(target=loop, args=[in_thread]).start()
        pool = ThreadPool(1)
        pool.apply(loop, [in_pool])  # the thread is there, but no longer in the loop
        threading.Thread(target=endless, args=[in_daemon], daemon=True).start()
        began.wait()
        loop(tracker)
        1 / 0
    """
    python(tmp_path, "-c", BEGIN + textwrap.dedent(script))
    assert statuses(tmp_path) == {"script": "FAILED", "thread": "FINISHED", "pool": "FINISHED", "daemon": "KILLED"}


@pytest.mark.parametrize(("options", "status"), [(["-c"], "FINISHED"), (["-i", "-c"], "KILLED")])
def test_the_code_of_an_exit_counts_where_python_keeps_it(options, status, tmp_path):
    """As notebooks and `python -i` do; a script's own exit leaves no trace."""
    python(tmp_path, *options, f"{BEGIN}tracker = start('run'); loop(tracker); sys.exit(4)", input="")
    assert statuses(tmp_path) == {"run": status}
    assert [status_of(SystemExit(code)) for code in ("no", False, 0, None)] == ["KILLED", *["FINISHED"] * 3]


def test_only_what_interrupted_a_loop_makes_it_failed_in_an_interpreter(tmp_path):
    cells = """
        exec(open("begin.py").read())
        undefined_name
        after_failed = start("after a failed line")
        for step in range(3): after_failed.log_metrics({"a": 1.0}, step)

        interrupted = start("interrupted")
        for step in range(3):
            interrupted.log_metrics({"a": 1.0}, step)
            if step == 1: raise KeyboardInterrupt

        before_failed = start("before a failed line")
        loop(before_failed)
        undefined_name
        again = start("tried again")
        loop(again, 2)
        loop(again)
        last = start("failed at last")
        loop(last, 2)
    """
    (tmp_path / "begin.py").write_text(BEGIN)
    ended = python(tmp_path, "-i", input=textwrap.dedent(cells))
    assert ended.stderr.count("NameError") == 2, ended.stderr
    assert statuses(tmp_path) == {
        "after a failed line": "FINISHED",
        "interrupted": "KILLED",
        "before a failed line": "FINISHED",
        "tried again": "FINISHED",
        "failed at last": "FAILED",
    }


def test_a_run_whose_tracker_is_collected_ends_then(tmp_path):
    script = """
        import gc, os
        tracker = start("collected")
        loop(tracker)
        cycle = [tracker]
        cycle.append(cycle)
        other = start("other")
        loop(other)
        del tracker, cycle
        gc.collect()
        while len(shipping._open) > 1:
            time.sleep(0.02)
        os._exit(0)
    """
    done = python(tmp_path, "-c", BEGIN + textwrap.dedent(script))
    assert statuses(tmp_path) == {"collected": "FINISHED", "other": []}
    assert done.stderr.count("not all of the run has reached") == 1
