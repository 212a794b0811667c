import contextlib
import shutil
import sqlite3

import pytest
from tests.faults.journals import odd_journals

from rl8x.cli.main import main
from rl8x.tracking import TrackingError, sync
from rl8x.tracking.appending import Journal
from rl8x.tracking.locks import FolderLock
from rl8x.tracking.protocol import StoreRefusedError
from rl8x.tracking.repeats import Point
from rl8x.tracking.sender import Sender
from rl8x.tracking.store import NewRun
from tracking.fakes import BothSides, FakeStore, values


def any_store(location):
    return True


def left_over(root, spool_id, num_rows, *ops, **header):
    journal = Journal.create(
        root, {"op": "open", "version": 1, "spool_id": spool_id, "t": 1, "experiment": "e", "uri": "http://x", **header}
    )
    for step in range(num_rows):
        journal.append({"op": "m", "t": 1000 + step, "s": step, "m": {"a": float(step)}})
    for op in ops:
        journal.append(op)
    journal.close()


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
    assert (by_spool["one"]["status"], by_spool["one"]["end_time"]) == ("KILLED", 1002)  # when it last wrote
    assert by_spool["two"]["status"] == "FAILED"
    assert values(by_spool["one"], "a") == [(0, 0.0), (1, 1.0), (2, 2.0)]
    assert list(tmp_path.iterdir()) == []


def test_one_spool_alone(tmp_path):
    left_over(tmp_path, "one", 1)
    left_over(tmp_path, "two", 1)
    assert sync(tmp_path / "two", connect=lambda location: FakeStore(), allow=any_store).num_sent == 1
    assert [folder.name for folder in tmp_path.iterdir()] == ["one"]


def test_a_spool_without_a_word_is_removed_once_its_process_is_gone(tmp_path):
    (tmp_path / "one").mkdir()
    (tmp_path / "one/journal.jsonl").touch()  # killed before the header was written
    with FolderLock(tmp_path / "one"):
        assert sync(tmp_path).num_busy == 1
    report = sync(tmp_path)
    assert (report.num_failed, report.num_sent) == (0, 1)
    assert "nothing was logged" in str(report)
    assert list(tmp_path.iterdir()) == []


def test_a_failure_keeps_the_spool_for_the_next_time(tmp_path):
    left_over(tmp_path, "one", 3)
    store = FakeStore()
    store.lose_answers = 1
    report = sync(tmp_path, connect=lambda location: store, allow=any_store)
    assert (report.num_sent, report.num_failed) == (0, 1)
    assert "the answer was lost" in str(report)
    assert sync(tmp_path, connect=lambda location: store, allow=any_store).num_sent == 1
    assert values(store.run, "a") == [(0, 0.0), (1, 1.0), (2, 2.0)]


def test_one_bad_spool_does_not_stop_the_others(tmp_path):
    left_over(tmp_path, "one", 1)
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad/journal.jsonl").write_text("garbage\n")
    report = sync(tmp_path, connect=lambda location: FakeStore(), allow=any_store)
    assert (report.num_sent, report.num_failed) == (1, 1)
    assert "is not a journal" in str(report)


def test_a_password_is_asked_for(tmp_path, monkeypatch):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    left_over(tmp_path, "one", 1, uri="http://me:***@server")
    seen = []

    def connect(location):
        seen.append(location.uri)
        return FakeStore()

    assert "the password of http://me:***@server is needed" in str(sync(tmp_path, connect=connect, allow=any_store))
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://me:secret@server")
    assert sync(tmp_path, connect=connect, allow=any_store).num_sent == 1
    assert seen == ["http://me:secret@server"]


def running(root, num_rows=3):
    """A spool whose process is alive, and the store that has its rows."""
    journal = BothSides(
        root, {"op": "open", "version": 1, "spool_id": "one", "t": 1, "experiment": "e", "uri": "http://x"}
    )
    for step in range(num_rows):
        journal.append({"op": "m", "t": 1000 + step, "s": step, "m": {"a": float(step)}})
    store = FakeStore()
    Sender(journal, store, fresh=True).send_some()
    return journal, store


def test_a_copy_of_a_spool_in_use_is_left_alone_until_that_is_done(tmp_path):
    journal, store = running(tmp_path / "spool")
    journal.append({"op": "m", "t": 1003, "s": 3, "m": {"a": 3.0}})
    shutil.copytree(tmp_path / "spool", tmp_path / "backup")
    report = sync(tmp_path / "backup", connect=lambda location: store, allow=any_store)
    assert (report.num_busy, report.num_sent) == (1, 0)
    assert f"is a copy of {tmp_path}/spool/one, which is in use by this process" in str(report)
    assert (store.run["status"], len(values(store.run, "a"))) == ("RUNNING", 3)
    journal.append({"op": "finish", "status": "FINISHED", "t": 9000})
    Sender(journal, store).send_some()
    journal.close()
    assert sync(tmp_path / "backup", connect=lambda location: store, allow=any_store).num_sent == 1
    assert (store.run["status"], store.run["end_time"]) == ("FINISHED", 9000)
    assert values(store.run, "a") == [(step, float(step)) for step in range(4)]


def test_a_run_that_went_on_elsewhere_and_ended_keeps_its_end_and_gets_no_row_twice(tmp_path):
    journal, store = running(tmp_path / "spool")
    journal.append({"op": "m", "t": 1003, "s": 3, "m": {"a": 3.0}})
    journal.append({"op": "tags", "tags": {"new": "1", "known": "old"}})
    journal.append({"op": "describe", "text": "running"})
    journal.close()  # killed; where it is resumed this spool is not found
    run_id = next(iter(store.runs))
    store.log_points(run_id, [Point("a", 3.0, 2003, 3), Point("a", 4.0, 2004, 4)])
    store.set_tags(run_id, {"known": "new"})
    store.set_status(run_id, "FINISHED", 5000)
    assert sync(tmp_path / "spool", connect=lambda location: store, allow=any_store).num_sent == 1
    assert (store.run["status"], store.run["end_time"]) == ("FINISHED", 5000)
    assert values(store.run, "a") == [(step, float(step)) for step in range(5)]
    assert store.run["tags"] == {"known": "new", "new": "1"}


@pytest.mark.parametrize(("resumed_at", "status"), [(4000, "FINISHED"), (6000, "KILLED")])
def test_a_resume_counts_only_where_the_run_did_not_end_after_it(resumed_at, status, tmp_path):
    journal, store = running(tmp_path / "spool")
    journal.append({"op": "resume", "t": resumed_at, "repeats": True, "keeps_status": False})
    journal.close()
    store.set_status(next(iter(store.runs)), "FINISHED", 5000)
    assert sync(tmp_path / "spool", connect=lambda location: store, allow=any_store).num_sent == 1
    assert store.run["status"] == status


def test_a_users_run_that_ended_gets_no_other_word(tmp_path):
    store = FakeStore()
    run_id = store.create_run(NewRun("one", "e", None, None, 1), {})
    store.set_tags(run_id, {"rl8x.status": "FINISHED"})
    left_over(tmp_path, "one", 1, run_id=run_id, owns=False)
    sync(tmp_path, connect=lambda location: store, allow=any_store)
    assert (store.run["tags"]["rl8x.status"], store.run["status"]) == ("FINISHED", "RUNNING")


def test_what_was_refused_is_tried_again_and_counted(tmp_path):
    left_over(tmp_path, "one", 3, {"op": "finish", "status": "FINISHED", "t": 9})
    store = FakeStore()
    store.refuse = lambda point: point.step == 1
    report = sync(tmp_path, connect=lambda location: store, allow=any_store)
    assert (report.num_sent, report.num_failed, report.num_rejected) == (0, 1, 1)
    assert "1 entry could not be logged" in str(report)
    assert str(report).endswith("0 sent, 1 failed, 0 busy, 1 entry set aside")
    assert values(store.run, "a") == [(0, 0.0), (2, 2.0)]
    assert store.run["status"] == "FINISHED"
    assert sync(tmp_path, connect=lambda location: store, allow=any_store).num_failed == 1
    store.refuse = lambda point: False
    assert sync(tmp_path, connect=lambda location: store, allow=any_store).num_sent == 1
    assert values(store.run, "a") == [(0, 0.0), (1, 1.0), (2, 2.0)]
    assert list(tmp_path.iterdir()) == []


def test_a_run_that_repeats_a_row_that_was_set_aside_has_it_once(tmp_path):
    resume = {"op": "resume", "t": 6, "repeats": True, "keeps_status": False}
    left_over(tmp_path, "one", 3)
    store = FakeStore()
    store.refuse = lambda point: point.step == 1
    sync(tmp_path, connect=lambda location: store, allow=any_store)
    store.refuse = lambda point: False
    journal = Journal.open(tmp_path / "one")
    journal.append(resume)
    for step in (1, 2, 3):
        journal.append({"op": "m", "t": 2000 + step, "s": step, "m": {"a": float(step)}})
    journal.close()
    assert sync(tmp_path, connect=lambda location: store, allow=any_store).num_sent == 1
    assert values(store.run, "a") == [(0, 0.0), (1, 1.0), (2, 2.0), (3, 3.0)]


@pytest.mark.parametrize("error", [StoreRefusedError("no"), RuntimeError("ours")])
def test_a_store_that_cannot_be_made_is_no_traceback(tmp_path, error):
    left_over(tmp_path, "one", 3)

    def connect(location):
        raise error

    report = sync(tmp_path, connect=connect, allow=any_store)
    assert report.num_failed == 1
    assert str(error) in str(report)


def test_nothing_odd_is_lost_or_stops_the_others(tmp_path):
    odd = odd_journals(tmp_path, "http://x")
    assert len(odd) >= 95
    store = FakeStore()
    for _ in range(2):
        report = sync(tmp_path, connect=lambda location: store, allow=any_store)
        arrived = {}
        for run in store.runs.values():
            steps = {point.step for point in run["points"] if point.name == "a" and point.value == point.step}
            arrived.setdefault(run["spool_id"], set()).update(steps)
        assert {spool.name: lost for spool in odd if (lost := spool.lost(arrived.get(spool.name, set())))} == {}
        outcomes = {spool.folder.name: spool.outcome for spool in report.spools}
        left = {spool.name for spool in odd if spool.folder.is_dir()}
        assert left - {"folder-ops-missing"} == {name for name, outcome in outcomes.items() if outcome != "sent"}
        assert all("\n" not in spool.message for spool in report.spools)
    assert report.num_sent == 0
    for run in store.runs.values():
        steps = [step for step, _ in values(run, "a")]
        assert len(steps) == len(set(steps)), run["spool_id"]


def test_odd_spools_reach_mlflow_by_the_command(mlruns, mlflow_client, capsys):
    some = ("header-run_name-2", "header-experiment-4", "ops-null-bytes", "ops-text-that-is-not-utf-8", "ops-values")
    odd = [spool for spool in odd_journals(mlruns / "all", f"sqlite:///{mlruns}/mlflow.db") if spool.name in some]
    (mlruns / "spool").mkdir()
    for spool in odd:
        spool.folder.rename(mlruns / "spool" / spool.name)
    assert main(["sync"]) == 1
    told = capsys.readouterr().out
    assert told.splitlines()[-1] == "2 sent, 3 failed, 0 busy, 7 entries set aside"
    with contextlib.closing(sqlite3.connect(mlruns / "mlflow.db")) as database:
        query = "SELECT t.value, m.step FROM metrics m JOIN tags t USING (run_uuid) WHERE m.key = 'a' AND t.key = ?"
        found = database.execute(query, ["rl8x.spool_id"]).fetchall()
    assert sorted(found) == sorted((spool.name, step) for spool in odd for step in spool.steps)
    experiments = {experiment.name for experiment in mlflow_client.search_experiments()}
    assert experiments == {"Default", "odd", "caf\\udce9 \\x00"}
    ids = [experiment.experiment_id for experiment in mlflow_client.search_experiments()]
    runs = {run.data.tags["rl8x.spool_id"]: run for run in mlflow_client.search_runs(ids)}
    assert runs["header-run_name-2"].info.run_name == "caf\\udce9"
    assert runs["ops-null-bytes"].data.params == {"a": "x\\x00y"}
