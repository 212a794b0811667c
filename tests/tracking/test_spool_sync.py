import shutil

import pytest

from rl8x.tracking import TrackingError, sync
from rl8x.tracking.sender import Sender
from rl8x.tracking.spool import Spool
from rl8x.tracking.store import Point, RunSpec
from tracking.fakes import FakeStore, values


def left_over(root, spool_id, num_rows, *ops, **header):
    spool = Spool.create(
        root, {"op": "open", "version": 1, "spool_id": spool_id, "t": 1, "experiment": "e", "uri": "http://x", **header}
    )
    for step in range(num_rows):
        spool.append({"op": "m", "t": 1000 + step, "s": step, "m": {"a": float(step)}})
    for op in ops:
        spool.append(op)
    spool.close()


def test_nothing_to_send(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert str(sync()) == "nothing to send"
    with pytest.raises(TrackingError, match="no folder"):
        sync(tmp_path / "none")


def test_all_spools_are_sent(tmp_path):
    left_over(tmp_path, "one", 3)
    left_over(tmp_path, "two", 2, {"op": "finish", "status": "FAILED", "t": 9})
    store = FakeStore()
    report = sync(tmp_path, connect=lambda location: store)
    assert report.num_sent == 2
    assert "sent one (run run0, 3 rows)" in str(report)
    by_spool = {run["spool_id"]: run for run in store.runs.values()}
    assert by_spool["one"]["status"] == "KILLED"
    assert by_spool["two"]["status"] == "FAILED"
    assert values(by_spool["one"], "a") == [(0, 0.0), (1, 1.0), (2, 2.0)]
    assert list(tmp_path.iterdir()) == []


def test_one_spool_alone(tmp_path):
    left_over(tmp_path, "one", 1)
    left_over(tmp_path, "two", 1)
    assert sync(tmp_path / "two", connect=lambda location: FakeStore()).num_sent == 1
    assert [folder.name for folder in tmp_path.iterdir()] == ["one"]


def test_a_failure_keeps_the_spool_for_the_next_time(tmp_path):
    left_over(tmp_path, "one", 3)
    store = FakeStore()
    store.lose_answers = 1
    report = sync(tmp_path, connect=lambda location: store)
    assert (report.num_sent, report.num_failed) == (0, 1)
    assert "the answer was lost" in str(report)
    assert sync(tmp_path, connect=lambda location: store).num_sent == 1
    assert values(store.run, "a") == [(0, 0.0), (1, 1.0), (2, 2.0)]


def test_a_spool_in_use_is_left_alone(tmp_path):
    spool = Spool.create(tmp_path, {"op": "open", "version": 1, "spool_id": "one", "t": 1, "uri": "http://x"})
    report = sync(tmp_path, connect=lambda location: FakeStore())
    assert (report.num_busy, report.num_sent) == (1, 0)
    spool.close()


def test_one_bad_spool_does_not_stop_the_others(tmp_path):
    left_over(tmp_path, "one", 1)
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad/ops.jsonl").write_text("garbage\n")
    report = sync(tmp_path, connect=lambda location: FakeStore())
    assert (report.num_sent, report.num_failed) == (1, 1)
    assert "is not a spool" in str(report)


def test_a_password_is_asked_for(tmp_path, monkeypatch):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    left_over(tmp_path, "one", 1, uri="http://me:***@server")
    seen = []

    def connect(location):
        seen.append(location.uri)
        return FakeStore()

    assert "the password of http://me:***@server is needed" in str(sync(tmp_path, connect=connect))
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://me:secret@server")
    assert sync(tmp_path, connect=connect).num_sent == 1
    assert seen == ["http://me:secret@server"]


def running(root, num_rows=3):
    """A spool whose process is alive, and the store that has its rows."""
    spool = Spool.create(
        root, {"op": "open", "version": 1, "spool_id": "one", "t": 1, "experiment": "e", "uri": "http://x"}
    )
    for step in range(num_rows):
        spool.append({"op": "m", "t": 1000 + step, "s": step, "m": {"a": float(step)}})
    store = FakeStore()
    Sender(spool, lambda: store, fresh=True).send_some()
    return spool, store


def test_a_copy_of_a_spool_in_use_is_left_alone_until_that_is_done(tmp_path):
    spool, store = running(tmp_path / "spool")
    spool.append({"op": "m", "t": 1003, "s": 3, "m": {"a": 3.0}})
    shutil.copytree(tmp_path / "spool", tmp_path / "backup")
    report = sync(tmp_path / "backup", connect=lambda location: store)
    assert (report.num_busy, report.num_sent) == (1, 0)
    assert f"is a copy of {tmp_path}/spool/one, which is in use by this process" in str(report)
    assert (store.run["status"], len(values(store.run, "a"))) == ("RUNNING", 3)
    spool.append({"op": "finish", "status": "FINISHED", "t": 9000})
    Sender(spool, lambda: store).send_some()
    spool.close(remove=True)
    assert sync(tmp_path / "backup", connect=lambda location: store).num_sent == 1
    assert (store.run["status"], store.run["end_time"]) == ("FINISHED", 9000)
    assert values(store.run, "a") == [(step, float(step)) for step in range(4)]


def test_a_run_that_went_on_elsewhere_and_ended_keeps_its_end_and_gets_no_row_twice(tmp_path):
    spool, store = running(tmp_path / "spool")
    spool.append({"op": "m", "t": 1003, "s": 3, "m": {"a": 3.0}})
    spool.append({"op": "tags", "tags": {"new": "1", "known": "old"}})
    spool.append({"op": "describe", "text": "running"})
    spool.close()  # killed; where it is resumed this spool is not found
    run_id = next(iter(store.runs))
    store.log_points(run_id, [Point("a", 3.0, 2003, 3), Point("a", 4.0, 2004, 4)])
    store.set_tags(run_id, {"known": "new"})
    store.set_status(run_id, "FINISHED", 5000)
    assert sync(tmp_path / "spool", connect=lambda location: store).num_sent == 1
    assert (store.run["status"], store.run["end_time"]) == ("FINISHED", 5000)
    assert values(store.run, "a") == [(step, float(step)) for step in range(5)]
    assert store.run["tags"] == {"known": "new", "new": "1"}


@pytest.mark.parametrize(("resumed_at", "status"), [(4000, "FINISHED"), (6000, "KILLED")])
def test_a_resume_counts_only_where_the_run_did_not_end_after_it(resumed_at, status, tmp_path):
    spool, store = running(tmp_path / "spool")
    spool.append({"op": "resume", "t": resumed_at, "repeats": True, "keeps_status": False})
    spool.close()
    store.set_status(next(iter(store.runs)), "FINISHED", 5000)
    assert sync(tmp_path / "spool", connect=lambda location: store).num_sent == 1
    assert store.run["status"] == status


def test_a_killed_run_ends_when_it_last_wrote(tmp_path):
    left_over(tmp_path, "one", 3)
    store = FakeStore()
    sync(tmp_path, connect=lambda location: store)
    assert (store.run["status"], store.run["end_time"]) == ("KILLED", 1002)


def test_a_users_run_that_ended_gets_no_other_word(tmp_path):
    store = FakeStore()
    run_id = store.create_run(RunSpec("one", "e", None, None, 1))
    store.set_tags(run_id, {"rl8x.status": "FINISHED"})
    left_over(tmp_path, "one", 1, run_id=run_id, owns=False)
    sync(tmp_path, connect=lambda location: store)
    assert (store.run["tags"]["rl8x.status"], store.run["status"]) == ("FINISHED", "RUNNING")
