"""The training's side and the shipper together: in one process on a fake store, then as processes."""

import logging
import os
import re
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest import mock

import pytest
from tests.conftest import intercepted
from tests.forks import ForkedPython

from rl8x.tracking import MLflowTracker, shipper, shipping, sync
from rl8x.tracking.appending import Journal
from rl8x.tracking.journal import SendingJournal, Unsent, read_ack
from rl8x.tracking.location import Location, locate
from rl8x.tracking.protocol import StoreDownError, StoreRefusedError
from rl8x.tracking.shipping import OpenRun
from tracking.fakes import FakeStore, header, row, values


def wait_for(condition, timeout_s=60.0):
    end = time.monotonic() + timeout_s
    while not condition() and time.monotonic() < end:
        time.sleep(0.02)
    assert condition()


def messages(caplog, level):
    return [r.getMessage() for r in caplog.records if r.levelno == level and r.name.startswith("rl8x")]


def drain(run, timeout_s=60.0):
    return run.wait(run.journal.mark(), timeout_s, timeout_s, first_contact_s=shipping.FIRST_CONTACT_S)


@pytest.fixture
def store(monkeypatch):
    store = FakeStore()
    monkeypatch.setattr(shipper, "MLflowStore", lambda location, **options: store)
    return store


@pytest.fixture
def make(tmp_path, store, monkeypatch, caplog):
    """Begin a run that is sent to the fake store, by a shipper in this process; its end is not waited for."""
    monkeypatch.setattr(shipper, "FIRST_WAIT_S", 0.01)
    monkeypatch.setattr(shipping, "_CHECK_S", 0.02)
    monkeypatch.setattr(shipping, "SILENT_S", 10**6)  # looks, which are many now
    monkeypatch.setattr(shipping, "KILL_S", 10**6)
    caplog.set_level(logging.INFO)
    made = []

    def make(*ops, arrives=False, key=None, ack=None, owner=store, **options):
        waits = {"interval_s": 0.01, "timeout_s": 10, "finish_timeout_s": 20.0, "outage_timeout_s": 0.0}
        options = {**waits, "keeps_status": False, "sample": None, "fresh": True, **options}
        journal = Journal.create(tmp_path / "spool", header(key or f"abc{len(made)}", owns=True))
        if ack is not None:  # of a shipper before
            sending = SendingJournal.open(journal.folder)
            sending.acknowledge(**ack)
            sending.close()
        made.append(run := OpenRun(journal, Location("the store"), owner, **options))
        for op in ops:
            run.append(op)
        assert not arrives or drain(run)
        return run

    yield make
    if store.hang is not None:
        store.hang.set()
    for run in made:
        run._close()


def test_rows_arrive_and_a_run_that_ended_leaves_nothing(make, store, tmp_path, monkeypatch):
    monkeypatch.setattr(shipping, "IDLE_S", 1)
    run = make(*map(row, range(50)), arrives=True)
    assert values(store.run, "a") == [(step, float(step)) for step in range(50)]
    assert run.journal.folder.exists()
    run.end("FINISHED", 2)
    run.append(row(99))  # a thread that goes on after the end
    run.finish()
    assert (store.run["status"], len(values(store.run, "a"))) == ("FINISHED", 50)
    assert list((tmp_path / "spool").iterdir()) == []
    wait_for(lambda: [thread.name for thread in threading.enumerate()].count("rl8x-tracking") == 0)


def test_rows_that_come_without_a_pause_are_sent_once_an_interval(make, store):
    run, step = make(row(0), interval_s=0.2, arrives=True), 0
    store.fails = lambda *_: time.sleep(0.02)  # while which others come; it returns no error
    begin, sent = time.monotonic(), store.calls.count("log_points")
    while time.monotonic() - begin < 0.9:
        step += 1
        run.append(row(step))
        time.sleep(0.001)
    num_calls = store.calls.count("log_points") - sent
    assert num_calls <= (time.monotonic() - begin) / 0.2 + 1
    assert drain(run)
    assert len(values(store.run, "a")) == step + 1


def test_an_outage_is_one_warning_and_nothing_is_lost(make, store, caplog):
    run = make(row(0), arrives=True)
    for outage in range(2):
        store.down, tried = True, store.calls.count("log_points")
        run.append(row(2 * outage + 1))
        wait_for(lambda tried=tried: store.calls.count("log_points") >= tried + 3)
        wait_for(lambda outage=outage: len(messages(caplog, logging.WARNING)) == outage + 1)
        run.append(row(2 * outage + 2))
        store.down = False
        assert drain(run)
        wait_for(lambda outage=outage: len(messages(caplog, logging.INFO)) == outage + 1)
    assert values(store.run, "a") == [(step, float(step)) for step in range(5)]
    warnings = messages(caplog, logging.WARNING)
    assert len(warnings) == 2
    assert "the store does not take rows (no answer); training goes on" in warnings[0]
    assert messages(caplog, logging.INFO) == ["tracking: the store takes rows again; what waited is being sent"] * 2


def test_an_outage_that_several_threads_hear_of_at_once_is_told_once(make, monkeypatch):
    run, told = make(row(0), arrives=True), []
    monkeypatch.setattr(shipping._log, "warning", lambda *said: told.append(said) or time.sleep(0.2))
    monkeypatch.setattr(shipping, "SILENT_S", 0)
    with ThreadPoolExecutor(2) as threads:
        assert [*threads.map(lambda _: run._report(), range(2))] == [None, None]
    assert len(told) == 1
    monkeypatch.setattr(shipping, "SILENT_S", 10**6)
    wait_for(lambda: not run.outage)
    monkeypatch.setattr(shipping, "_started", mock.Mock(side_effect=OSError("no memory")))
    make()  # by this thread, and by the one that looks after all runs
    assert len(told) == 2


def test_a_run_that_was_collected_is_told_once_though_python_ends_meanwhile(make, store, caplog, monkeypatch):
    owner, begun, warn = Location("collected"), threading.Event(), OpenRun._warn_of_rest
    monkeypatch.setattr(OpenRun, "_warn_of_rest", lambda run: (begun.set(), time.sleep(0.5), warn(run)))
    store.down = True
    run = make(row(0), owner=owner)
    del owner
    assert begun.wait(60.0)
    shipping._end_at_exit()
    assert [text for text in messages(caplog, logging.WARNING) if "not all of the run has reached" in text] == [
        f"tracking: not all of the run has reached the store (no answer); it is in {run.journal.folder}, and "
        f"`rl8x sync {run.journal.folder} --to 'the store'` sends it"
    ]
    assert run not in shipping._open


@pytest.mark.parametrize(("is_down", "why"), [(True, "no answer"), (False, "it took longer than 0.2 s")])
def test_a_store_that_is_away_or_hangs_holds_nobody_up_and_gets_the_rest_later(is_down, why, make, store, caplog):
    store.down, store.hang = is_down, None if is_down else threading.Event()
    run = make(finish_timeout_s=0.2)
    with mock.patch.object(shipping, "FIRST_CONTACT_S", 0.0):
        wait_for(lambda: run.journal.ack.outage if is_down else store.entered.is_set())
        for step in range(500):
            run.append(row(step))
        assert not drain(run, 0.1)
        begin = time.monotonic()
        run.end("FINISHED", 2)
        run.finish()
        assert time.monotonic() - begin < 45  # the store hangs for longer
    assert (store.runs, run.outage, run.journal.unsent().num_rows) == ({}, why, 500)
    assert f"not all of the run has reached the store ({why}); it is in" in messages(caplog, logging.WARNING)[-1]
    if store.hang is not None:
        store.hang.set()
    store.down = False  # while this process lives, it is sent all the same
    wait_for(lambda: not run.journal.folder.exists())
    assert (len(values(store.run, "a")), store.run["status"]) == (500, "FINISHED")


@pytest.mark.parametrize("said", [None, {"tried": True}, {"tried": True, "outage": "no answer"}])
def test_a_store_that_answers_late_for_the_first_time_gets_the_rest_too(said, make, store, monkeypatch, caplog):
    """Whatever a process before has said of it, as long as the one of this run has not begun."""
    begun, has_arrived, send = threading.Event(), OpenRun.has_arrived, shipper.Tail.run
    monkeypatch.setattr(OpenRun, "has_arrived", property(lambda run: (begun.set(), has_arrived.fget(run))[1]))
    # The run is made once its end is waited for, and its row takes longer than that is waited for.
    monkeypatch.setattr(shipper.Tail, "run", lambda tail: (begun.wait(60), send(tail))[1])
    store.fails = lambda call, _: time.sleep(0.5) if call == "log_points" else None
    run = make(row(0), ack=said, finish_timeout_s=0.1)
    run.end("FINISHED", 2)
    run.finish()
    assert (values(store.run, "a"), run.journal.unsent()) == ([(0, 0.0)], Unsent())
    assert messages(caplog, logging.WARNING) == []


def test_errors_of_our_own_do_not_end_the_shipper_and_what_is_set_aside_is_told_once(make, store, caplog):
    run = make(arrives=True)
    store.fails = lambda call, _: ZeroDivisionError("ours") if call == "log_points" else None
    run.append(row(1))
    assert drain(run)
    store.fails = lambda call, _: None
    store.refuse = lambda point: point.step > 2
    for step in (2, 3, 4):
        run.append(row(step))
    assert drain(run)
    assert values(store.run, "a") == [(2, 2.0)]
    wait_for(lambda: run.journal.ack.rejected == 3)
    run.check()
    [told] = [text for text in messages(caplog, logging.WARNING) if "could not be logged" in text]
    assert "the metric 'a' could not be logged (ZeroDivisionError" in told
    assert f"it is in {run.journal.folder}/rejected.jsonl, and `rl8x sync` tries it again" in told


def test_what_two_threads_send_past_a_full_disk_comes_in_its_order(make, store):
    run, others = make(arrives=True), []
    run.journal._write = lambda line: False
    send_message = run._send_message

    def slowly(do, **about):
        if do == "lines" and not others:
            run.append(row(1))
            others.append(threading.Thread(target=run._send_lines))
            others[0].start()
            others[0].join(0.5)
        send_message(do, **about)

    run._send_message = slowly
    run.append(row(0))
    run._send_lines()
    others[0].join()
    assert drain(run)
    assert values(store.run, "a") == [(0, 0.0), (1, 1.0)]


def test_a_run_that_begins_again_under_its_key_before_its_end_is_heard_of_is_sent(make, store, monkeypatch):
    again, attempt = threading.Event(), shipper.Tail._try
    make(arrives=True)  # whose process is that of the next ones too
    monkeypatch.setattr(shipper.Tail, "_try", lambda tail: (tail.closed and again.wait(60), attempt(tail))[1])
    for step in range(2):
        run = make(row(step), key="mine", fresh=step == 0)
        again.set()
        run.end("FINISHED", 2)
        run.finish()
        assert run.journal.unsent() == Unsent()
        again.clear()
    (run_id,) = store.find_runs("mine")
    assert values(store.runs[run_id], "a") == [(0, 0.0), (1, 1.0)]
    again.set()


def test_rows_that_come_just_before_a_run_is_closed_are_sent(make, store, monkeypatch):
    """They come while all before them is found to be sent, as those of a training may that waits no longer."""
    coming, run = [], make(row(0), arrives=True)

    def closed(tail):
        if not coming:
            return vars(tail)["closed"]
        run.journal.append(coming.pop())
        vars(tail)["closed"] = True
        return False

    writable = property(closed, lambda tail, value: vars(tail).update(closed=value))
    monkeypatch.setattr(shipper.Tail, "closed", writable, raising=False)
    coming.append(row(1))
    wait_for(lambda: values(store.run, "a") == [(0, 0.0), (1, 1.0)])


def test_what_neither_takes_is_lost_and_told_and_the_end_is_known(make, store, caplog):
    run = make(row(0), arrives=True)
    store.down = True
    run.append(row(1))
    wait_for(lambda: run.journal.ack.outage)
    run.journal._write = lambda line: False
    run.append(row(2))
    run.end("FAILED", 5)
    run.finish()
    # It tells of the end too, where its sender has not said in time that it knows it.
    told = messages(caplog, logging.WARNING)[-1]
    assert re.search("the run has lost 1 row( and 1 other entry)?: neither the disk nor the store took them", told)
    assert read_ack(run.journal.folder).ending["lost_rows"] == 1


def test_two_runs_are_sent_at_once_where_one_store_hangs(make, store, monkeypatch):
    slow = FakeStore()
    slow.hang = threading.Event()
    stores = iter([slow, store])
    monkeypatch.setattr(shipper, "MLflowStore", lambda location, **options: next(stores))
    first = make()
    assert slow.entered.wait(60)
    make(row(1), arrives=True)
    slow.hang.set()
    assert drain(first)


@pytest.fixture
def forks():
    """Let the process be a fork of this one, which has imported MLflow once for all of them."""
    import mlflow.store.tracking.sqlalchemy_store  # noqa: F401

    with mock.patch.object(subprocess, "Popen", ForkedPython):
        yield


def in_forked_process(test):
    return pytest.mark.store_process(pytest.mark.usefixtures("forks")(test))


def mlflow():
    """MLflow's own client, made only now: a process that is forked must not share its connections."""
    from mlflow import MlflowClient

    return MlflowClient(tracking_uri=locate().uri)


def history(run_id, name):
    return [(point.step, point.value) for point in mlflow().get_metric_history(run_id, name)]


def alive(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def started(**options):
    tracker = MLflowTracker(interval_s=0.05, **options)
    tracker.start(params={"lr": 0.1}, tags={})
    tracker.log_metrics({"a": 1.0}, 1)
    assert tracker.flush(60)
    return tracker, shipping._shared.popen


@pytest.mark.parametrize("moved", [False, True])
@pytest.mark.parametrize("known", [False, True])
def test_a_run_that_goes_on_in_its_process_after_an_outage_is_sent_wherever_its_folder_is(
    known, moved, mlruns, monkeypatch, tmp_path
):
    """The shipper is still trying to send the first part, from the folder that it was told of then."""
    down = []

    def before(*_):
        if down:
            raise StoreDownError("nobody answers")

    intercepted(monkeypatch, before)
    first = MLflowTracker(interval_s=0.05, finish_timeout_s=5.0, outage_timeout_s=0.0)
    first.start(params={}, tags={})
    assert not known or first.flush(60)
    down.append("for now")
    first.log_metrics({"a": 1.0}, 1)
    first.finish("KILLED")
    if moved:
        (tmp_path / "later").mkdir()
        mlruns.rename(tmp_path / "later/mlruns")
        monkeypatch.chdir(tmp_path / "later")
    down.clear()
    again = MLflowTracker(interval_s=0.05)
    again.start(params={}, tags={}, resume=first.resume_handle)
    again.log_metrics({"a": 2.0}, 2)
    again.finish("FINISHED")
    assert history(again.run_id, "a") == [(1, 1.0), (2, 2.0)]
    assert mlflow().get_run(again.run_id).info.status == "FINISHED"


@in_forked_process
def test_a_run_arrives_whole_by_the_process_that_was_started_early_and_ends_with_it(mlruns, monkeypatch):
    monkeypatch.setattr(shipping, "IDLE_S", 1)
    shipping._start_watcher()
    shipping.start_early(locate().database)
    wait_for(lambda: shipping._watcher is None)  # the run of before is over for long
    early = shipping._shared.popen
    monkeypatch.setenv("LOGNAME", "someone")
    monkeypatch.setenv("MLFLOW_RUN_CONTEXT", '{"given": "later"}')
    tracker, process = started(tags={"team": "a"})
    shipping.end_unused()
    assert (process is early, process.poll()) == (True, None)  # it is in use
    assert os.getpriority(os.PRIO_PROCESS, process.pid) == min(19, os.nice(0) + 10)  # it gives way to the training
    # In the same session, without which Linux would not compare the two; in a group of its own, so that Ctrl-C in the
    # terminal does not reach it.
    assert (os.getsid(process.pid), os.getpgid(process.pid)) == (os.getsid(0), process.pid)
    tracker.finish("FINISHED")
    run = mlflow().get_run(tracker.run_id)
    assert (run.info.status, run.data.params) == ("FINISHED", {"lr": "0.1"})
    about = {"team": "a", "given": "later", "mlflow.source.name": sys.argv[0], "mlflow.user": "someone"}
    assert about.items() <= run.data.tags.items()
    assert process.wait(120) == 0
    assert tracker.run_id.encode() in (mlruns / "mlflow.db").read_bytes()  # which is complete without its log


@pytest.fixture
def deadly_pipes():
    """As in scripts whose output goes into `head`: a write to a pipe that nobody reads ends the process."""
    before = signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGPIPE, before)


@in_forked_process
def test_all_trackers_share_one_process_also_one_after_another_and_one_that_was_killed_is_replaced(
    mlruns, monkeypatch, deadly_pipes
):
    tracker, process = started()
    other, same = started()
    assert same is process
    process.kill()
    process.wait()
    for each in (tracker, other):
        each.log_metrics({"a": 2.0}, 2)
        assert each.flush(60)
    again = shipping._shared.popen
    tracker.finish("FINISHED")
    assert (again.pid == process.pid, again.poll()) == (False, None)
    other.finish("FINISHED")
    later, same = started()
    assert same is again
    later.finish("FINISHED")
    monkeypatch.setattr(shipping, "IDLE_S", 1)
    assert again.wait(120) == 0
    assert len({tracker.run_id, other.run_id, later.run_id}) == 3
    for each in (tracker, other):
        assert history(each.run_id, "a") == [(1, 1.0), (2, 2.0)]


@pytest.mark.long
@in_forked_process
def test_a_stopped_process_is_an_outage_until_it_goes_on_and_is_replaced_where_it_does_not(mlruns, monkeypatch, caplog):
    caplog.set_level(logging.INFO)
    tracker, process = started()
    monkeypatch.setattr(shipping, "SILENT_S", 2)  # only now: on a busy machine it may be as silent while it starts
    monkeypatch.setattr(shipping, "KILL_S", 4)
    os.kill(process.pid, signal.SIGSTOP)
    tracker.log_text("x" * 200_000, "long.txt")
    wait_for(lambda: messages(caplog, logging.WARNING))
    os.kill(process.pid, signal.SIGCONT)
    wait_for(lambda: "takes rows again" in caplog.text)
    assert shipping._shared.popen is process
    os.kill(process.pid, signal.SIGSTOP)
    wait_for(lambda: shipping._shared.popen is not process)
    assert process.wait() == -signal.SIGKILL
    tracker.log_metrics({"a": 2.0}, 2)
    assert tracker.flush(60)
    monkeypatch.setattr(shipping, "KILL_S", 60)
    again = shipping._shared.popen
    os.kill(again.pid, signal.SIGSTOP)
    tracker.log_metrics({"a": 3.0}, 3)
    tracker.finish("FINISHED")
    reason = f"the process that talks to MLflow (process ID {again.pid}) does not answer: is it stopped?"
    for text in (messages(caplog, logging.WARNING)[-1], tracker.whereabouts().lines()[0]):
        assert reason in text
    assert f"; it is in {tracker.journal_folder}, and `rl8x sync` sends it" in caplog.text
    wait_for(lambda: not alive(again.pid))
    assert sync().num_sent == 1
    assert history(tracker.run_id, "a") == [(1, 1.0), (2, 2.0), (3, 3.0)]


@pytest.mark.store_process
@pytest.mark.parametrize("script", ["while True: pass", "input()"])
def test_what_runs_is_told_from_what_waits_or_is_stopped(script):
    with subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE) as other:
        ship = object.__new__(shipping._ShipperProcess)
        ship.popen = other
        wait_for(lambda: ship.is_busy() == (script != "input()"))
        other.send_signal(signal.SIGSTOP)
        wait_for(lambda: not ship.is_busy())
        other.kill()


@pytest.mark.long
@pytest.mark.store_process
def test_one_that_is_started_early_imports_mlflow_touches_nothing_and_is_ended_unused(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    shipping.start_early(locate().database)
    process = shipping._shared.popen
    loaded = Path(f"/proc/{process.pid}/maps")
    wait_for(lambda: "/sqlalchemy/" in loaded.read_text(), 240)
    assert list(tmp_path.iterdir()) == []
    shipping.end_unused()
    assert shipping._shared is None
    assert process.poll() is not None


@pytest.mark.store_process
def test_one_that_cannot_be_started_is_an_outage(mlruns, monkeypatch, caplog, tmp_path):
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    tracker = MLflowTracker(finish_timeout_s=0.1, outage_timeout_s=0.0)
    tracker.start(params={}, tags={})
    tracker.log_metrics({"a": 1.0}, 1)
    tracker.finish("FINISHED")
    assert "the process that talks to MLflow cannot be started: [Errno 2] No such file" in caplog.text
    assert tracker.whereabouts().unsent.num_rows == 1


KILLED = """
import os, time
from rl8x.tracking import MLflowTracker, shipping
tracker = MLflowTracker(interval_s=0.05, finish_timeout_s=120.0)
tracker.start(params={}, tags={})
tracker.log_metrics({"a": 1.0}, 1)
assert tracker.flush(240)
print(shipping._shared.popen.pid, tracker.run_id, flush=True)
if (forked := os.fork()) > 0:  # the child is there longer, and has neither pipe nor lock nor journal
    print(forked, flush=True)
    tracker.log_metrics({"a": 2.0}, 2)
time.sleep(240)
"""


@in_forked_process
def test_of_a_run_that_is_killed_the_shipper_sends_the_rest_and_ends(mlruns):
    process = ForkedPython([sys.executable, "-c", KILLED], stdout=subprocess.PIPE, text=True)
    pid, run_id = process.stdout.readline().split()
    forked = int(process.stdout.readline())
    assert alive(pid)
    process.kill()
    process.wait()
    process.stdout.close()
    wait_for(lambda: not alive(pid))
    # Also where the child has not come so far yet as to close them.
    wait_for(lambda: not [fd for fd in os.scandir(f"/proc/{forked}/fd") if str(mlruns) in os.path.realpath(fd)])
    os.kill(forked, signal.SIGKILL)
    assert mlflow().get_run(run_id).info.status == "KILLED"
    assert history(run_id, "a")[0] == (1, 1.0)
    assert str(sync()) == "nothing to send"


LATE = """
import os, signal, time
from rl8x.tracking import MLflowTracker, shipper, shipping
main, parent = shipper.main, os.getpid()

def main_later(*given):
    while os.getppid() == parent:
        time.sleep(0.01)
    main(*given)

shipper.main = main_later
tracker = MLflowTracker(interval_s=0.05)
tracker.start(params={}, tags={})
tracker.log_metrics({"a": 1.0}, 1)
print(shipping._shared.popen.pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


@in_forked_process
def test_of_a_run_that_is_killed_while_the_shipper_still_starts_it_sends_all(mlruns):
    process = ForkedPython([sys.executable, "-c", LATE], stdout=subprocess.PIPE, text=True)
    pid = process.communicate()[0]
    wait_for(lambda: not alive(int(pid)))
    client = mlflow()
    (run,) = client.search_runs([client.get_experiment_by_name("rl8x").experiment_id])
    assert run.info.status == "KILLED"
    assert history(run.info.run_id, "a") == [(1, 1.0)]
    assert list((mlruns / "spool").iterdir()) == []


@pytest.mark.store_process
def test_one_that_was_started_early_ends_with_the_process_that_is_killed(tmp_path):
    code = (
        "import os, signal\nfrom rl8x.tracking import shipping\n"
        "shipping.start_early(None)\nprint(shipping._shared.popen.pid, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, cwd=tmp_path)
    wait_for(lambda: not alive(int(done.stdout)))


def test_a_name_that_is_refused_is_told(make, store, caplog):
    store.fails = lambda call, content: StoreRefusedError("no") if call == "create_run" and content.experiment else None
    run = make(row(0))
    wait_for(lambda: "does not take rows (no)" in caplog.text)
    assert not drain(run, 0.0)
