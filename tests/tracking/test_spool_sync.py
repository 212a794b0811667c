import pytest

from rl8x.tracking import TrackingError, sync
from rl8x.tracking.spool import Spool
from tracking.fakes import FakeStore, values


def any_store(location):
    return True


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
    report = sync(tmp_path, connect=lambda location: store, allow=any_store)
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
    assert sync(tmp_path / "two", connect=lambda location: FakeStore(), allow=any_store).num_sent == 1
    assert [folder.name for folder in tmp_path.iterdir()] == ["one"]


def test_a_failure_keeps_the_spool_for_the_next_time(tmp_path):
    left_over(tmp_path, "one", 3)
    store = FakeStore()
    store.lose_answers = 1
    report = sync(tmp_path, connect=lambda location: store, allow=any_store)
    assert (report.num_sent, report.num_failed) == (0, 1)
    assert "the answer was lost" in str(report)
    assert sync(tmp_path, connect=lambda location: store, allow=any_store).num_sent == 1
    assert values(store.run, "a") == [(0, 0.0), (1, 1.0), (2, 2.0)]


def test_a_spool_in_use_is_left_alone(tmp_path):
    spool = Spool.create(tmp_path, {"op": "open", "version": 1, "spool_id": "one", "t": 1, "uri": "http://x"})
    report = sync(tmp_path, connect=lambda location: FakeStore(), allow=any_store)
    assert (report.num_busy, report.num_sent) == (1, 0)
    spool.close()


def test_one_bad_spool_does_not_stop_the_others(tmp_path):
    left_over(tmp_path, "one", 1)
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad/ops.jsonl").write_text("garbage\n")
    report = sync(tmp_path, connect=lambda location: FakeStore(), allow=any_store)
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
