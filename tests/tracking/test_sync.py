import shutil
from unittest import mock

import pytest
from tests.faults.journals import odd_journals

from rl8x.tracking import sync
from rl8x.tracking.appending import Journal
from rl8x.tracking.locks import FolderLock
from rl8x.tracking.protocol import StoreRefusedError
from rl8x.tracking.repeats import Point
from rl8x.tracking.sender import Sender
from rl8x.tracking.store import NewRun
from tracking.fakes import BothSides, FakeStore, finish, header, left_over, resume, row, tags, values


def sent(folder, store):
    """Sync all of a folder to a store, whatever its journals name."""
    return sync(folder, connect=lambda location: store, allow=lambda location: True)


def test_all_journals_are_sent(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert str(sync()) == "nothing to send"
    left_over(tmp_path, "one", 3)
    left_over(tmp_path, "two", 2, finish("FAILED"))
    store = FakeStore()
    report = sent(tmp_path, store)
    assert report.num_sent == 2
    assert "sent one (run run0, 3 rows)" in str(report)
    by_journal = {run["journal_id"]: run for run in store.runs.values()}
    assert (by_journal["one"]["status"], by_journal["one"]["end_time"]) == ("KILLED", 1002)  # when it last wrote
    assert by_journal["two"]["status"] == "FAILED"
    assert values(by_journal["one"], "a") == [(0, 0.0), (1, 1.0), (2, 2.0)]
    assert list(tmp_path.iterdir()) == []


def test_a_journal_without_a_word_is_removed_once_its_process_is_gone(tmp_path):
    (tmp_path / "one").mkdir()
    (tmp_path / "one/journal.jsonl").touch()  # killed before the header was written
    with FolderLock(tmp_path / "one"):
        busy = sync(tmp_path)
        assert (busy.num_busy, busy.num_sent) == (1, 0)
        assert str(busy).startswith(f"busy one: the journal {tmp_path}/one is in use by this process")
    report = sync(tmp_path)
    assert (report.num_failed, report.num_sent) == (0, 1)
    assert "nothing was logged" in str(report)
    assert list(tmp_path.iterdir()) == []


def test_a_failure_keeps_the_journal_for_the_next_time_and_stops_no_other(tmp_path):
    left_over(tmp_path, "one", 3)
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad/journal.jsonl").write_text("garbage\n")
    store = FakeStore()
    store.lose_answers = 1
    report = sent(tmp_path, store)
    assert (report.num_sent, report.num_failed) == (0, 2)
    assert "the answer was lost" in str(report)
    assert "is not a journal" in str(report)
    assert sent(tmp_path / "one", store).num_sent == 1  # alone
    assert values(store.run, "a") == [(0, 0.0), (1, 1.0), (2, 2.0)]
    assert [folder.name for folder in tmp_path.iterdir()] == ["bad"]


def running(root):
    """A journal whose process is alive, with a row more than its store."""
    journal, store = BothSides(root, header("one", uri="http://x")), FakeStore()
    journal.append(*map(row, range(3)))
    Sender(journal, store, fresh=True).send_some()
    journal.append(row(3))
    return journal, store


def test_a_copy_of_a_journal_in_use_is_left_alone_until_that_is_done(tmp_path):
    journal, store = running(tmp_path / "spool")
    shutil.copytree(tmp_path / "spool", tmp_path / "backup")
    report = sent(tmp_path / "backup", store)
    assert (report.num_busy, report.num_sent) == (1, 0)
    assert f"is a copy of {tmp_path}/spool/one, which is in use by this process" in str(report)
    assert (store.run["status"], len(values(store.run, "a"))) == ("RUNNING", 3)
    journal.append(finish("FINISHED", 9000))
    Sender(journal, store).send_some()
    journal.close()
    assert sent(tmp_path / "backup", store).num_sent == 1
    assert (store.run["status"], store.run["end_time"]) == ("FINISHED", 9000)
    assert values(store.run, "a") == [(step, float(step)) for step in range(4)]


def test_a_run_that_went_on_elsewhere_and_ended_keeps_its_end_and_gets_no_row_twice(tmp_path):
    journal, store = running(tmp_path / "spool")
    journal.append(tags(new="1", known="old"), {"op": "describe", "text": "running"})
    journal.close()  # killed; where it is resumed this journal is not found
    store.log_points("run0", [Point("a", 3.0, 2003, 3), Point("a", 4.0, 2004, 4)])
    store.set_tags("run0", {"known": "new"})
    store.set_status("run0", "FINISHED", 5000)
    assert sent(tmp_path / "spool", store).num_sent == 1
    assert (store.run["status"], store.run["end_time"]) == ("FINISHED", 5000)
    assert values(store.run, "a") == [(step, float(step)) for step in range(5)]
    assert store.run["tags"] == {"known": "new", "new": "1"}


@pytest.mark.parametrize(("resumed_at", "status"), [(4000, "FINISHED"), (6000, "KILLED")])
def test_a_resume_counts_only_where_the_run_did_not_end_after_it(resumed_at, status, tmp_path):
    journal, store = running(tmp_path / "spool")
    journal.append(resume(resumed_at))
    journal.close()
    store.set_status("run0", "FINISHED", 5000)
    assert sent(tmp_path / "spool", store).num_sent == 1
    assert store.run["status"] == status


def test_a_users_run_that_ended_gets_no_other_word(tmp_path):
    store = FakeStore()
    run_id = store.create_run(NewRun("one", "e", None, None, 1), {"rl8x.status": "FINISHED"})
    left_over(tmp_path, "one", 1, run_id=run_id, owns=False)
    sent(tmp_path, store)
    assert (store.run["tags"]["rl8x.status"], store.run["status"]) == ("FINISHED", "RUNNING")


@pytest.mark.parametrize("is_resumed", [False, True])
def test_what_was_refused_is_counted_and_tried_again_and_is_there_once_where_a_run_repeats_it(tmp_path, is_resumed):
    left_over(tmp_path, "one", 3, finish("FINISHED"))
    store = FakeStore()
    store.refuse = lambda point: point.step == 1
    report = sent(tmp_path, store)
    assert (report.num_sent, report.num_failed, report.num_rejected) == (0, 1, 1)
    assert "1 entry could not be logged" in str(report)
    assert str(report).endswith("0 sent, 1 failed, 0 busy, 1 entry set aside")
    assert (values(store.run, "a"), store.run["status"]) == ([(0, 0.0), (2, 2.0)], "FINISHED")
    assert sent(tmp_path, store).num_failed == 1
    store.refuse = lambda point: False
    if is_resumed:
        journal = Journal.open(tmp_path / "one")
        for op in (resume(), *(row(step, 2000 + step) for step in (1, 2, 3))):
            journal.append(op)
        journal.close()
    assert sent(tmp_path, store).num_sent == 1
    assert values(store.run, "a") == [(step, float(step)) for step in range(4 if is_resumed else 3)]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("error", [StoreRefusedError("no"), RuntimeError("ours")])
def test_a_store_that_cannot_be_made_is_no_traceback(tmp_path, error):
    left_over(tmp_path, "one", 3)
    report = sync(tmp_path, connect=mock.Mock(side_effect=error), allow=lambda location: True)
    assert report.num_failed == 1
    assert str(error) in str(report)


def test_nothing_odd_is_lost_or_stops_the_others(tmp_path):
    odd = odd_journals(tmp_path, "http://x")
    assert len(odd) >= 95
    store = FakeStore()
    for _ in range(2):
        report = sent(tmp_path, store)
        arrived = {}
        for run in store.runs.values():
            steps = {point.step for point in run["points"] if point.name == "a" and point.value == point.step}
            arrived.setdefault(run["journal_id"], set()).update(steps)
        assert {journal.name: lost for journal in odd if (lost := journal.lost(arrived.get(journal.name, set())))} == {}
        outcomes = {journal.folder.name: journal.outcome for journal in report.journals}
        left = {journal.name for journal in odd if journal.folder.is_dir()}
        assert left - {"folder-ops-missing"} == {name for name, outcome in outcomes.items() if outcome != "sent"}
        assert all("\n" not in journal.message for journal in report.journals)
    assert report.num_sent == 0
    for run in store.runs.values():
        steps = [step for step, _ in values(run, "a")]
        assert len(steps) == len(set(steps)), run["journal_id"]
