import logging
import threading
import time

import pytest

from rl8x.tracking import writer as writer_module
from rl8x.tracking.location import Location
from rl8x.tracking.sender import Sender
from rl8x.tracking.spool import Spool
from rl8x.tracking.writer import Writer
from tracking.fakes import FakeStore, values


@pytest.fixture
def store():
    return FakeStore()


@pytest.fixture
def make(tmp_path, store, monkeypatch, caplog):
    """Make a spool and a writer that sends it to the fake store; stops the writer at the end."""
    monkeypatch.setattr(writer_module, "FIRST_WAIT_S", 0.01)
    caplog.set_level(logging.INFO)
    made = []

    def make():
        spool = Spool.create(tmp_path, {"op": "open", "version": 1, "spool_id": "abc", "t": 1, "experiment": "e"})
        writer = Writer(Sender(spool, store, fresh=True), Location("the store"), interval_s=0.01)
        made.append(writer)
        return spool, writer

    yield make
    if store.hang is not None:
        store.hang.set()
    for writer in made:
        writer.stop(5)


def row(step):
    return {"op": "m", "t": 1000 + step, "s": step, "m": {"a": float(step)}}


def drain(spool, writer, timeout_s=120.0):
    return writer.wait(lambda: not spool.pending, timeout_s, timeout_s)


def messages(caplog, level):
    return [record.getMessage() for record in caplog.records if record.levelno == level]


def test_rows_arrive(make, store):
    spool, writer = make()
    for step in range(50):
        spool.append(row(step))
    assert drain(spool, writer)
    assert values(store.run, "a") == [(step, float(step)) for step in range(50)]


def test_a_finished_spool_is_removed(make):
    spool, writer = make()
    spool.append({"op": "finish", "status": "FINISHED", "t": 2})
    assert drain(spool, writer)
    writer.stop(5)
    assert not spool.folder.exists()


def test_an_unfinished_spool_stays(make):
    spool, writer = make()
    spool.append(row(1))
    assert drain(spool, writer)
    writer.stop(5)
    assert spool.folder.exists()


def test_an_outage_is_one_warning_and_nothing_is_lost(make, store, caplog):
    spool, writer = make()
    spool.append(row(0))
    assert drain(spool, writer)
    for outage in range(2):
        store.down = True
        begin = len(store.calls)
        spool.append(row(2 * outage + 1))
        while len(store.calls) < begin + 3:  # several tries
            store.entered.clear()
            assert store.entered.wait(5)
        spool.append(row(2 * outage + 2))
        store.down = False
        assert drain(spool, writer)
    assert values(store.run, "a") == [(step, float(step)) for step in range(5)]
    writer.stop(5)  # what has arrived is acknowledged before it is told
    warnings = messages(caplog, logging.WARNING)
    assert len(warnings) == 2
    assert "the store does not take rows (no answer); training goes on" in warnings[0]
    assert messages(caplog, logging.INFO) == ["tracking: the store takes rows again; what waited is being sent"] * 2


def test_a_store_that_is_away_from_the_start(make, store):
    store.down = True
    spool, writer = make()
    spool.append(row(0))
    assert not drain(spool, writer, 0.1)
    assert writer.reason
    assert store.runs == {}
    store.down = False
    assert drain(spool, writer)
    assert values(store.run, "a") == [(0, 0.0)]


def test_a_hanging_store_holds_nobody_up(make, store):
    store.hang = threading.Event()
    spool, writer = make()
    assert store.entered.wait(5)
    times = []
    for step in range(500):
        begin = time.perf_counter()
        spool.append(row(step))
        times.append(time.perf_counter() - begin)
    assert sorted(times)[-3] < 0.05  # two may be the computer's own doing
    begin = time.monotonic()
    assert not drain(spool, writer, 0.2)
    writer.stop(0.1)
    assert time.monotonic() - begin < 2
    store.hang.set()
    store.hang = None
    for thread in threading.enumerate():
        if thread.name == "rl8x-tracking":
            thread.join(5)
    Spool.open(spool.folder).close()  # the thread gave the spool back when it was through


def test_errors_of_our_own_do_not_end_the_thread(make, store, monkeypatch, caplog):
    spool, writer = make()
    assert drain(spool, writer)
    good = store.log_points
    monkeypatch.setattr(store, "log_points", lambda *_: 1 / 0)
    spool.append(row(1))
    assert drain(spool, writer)
    monkeypatch.setattr(store, "log_points", good)
    spool.append(row(2))
    assert drain(spool, writer)
    assert values(store.run, "a") == [(2, 2.0)]
    assert [op["s"] for op in spool.rejected.entries] == [1]
    assert "does not take rows (ZeroDivisionError" in messages(caplog, logging.WARNING)[0]
    assert "the metric 'a' could not be logged" in messages(caplog, logging.WARNING)[1]
