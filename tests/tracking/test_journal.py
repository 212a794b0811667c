"""A journal on the disk: lines, what has arrived of them, full disks, and how it ends."""

import dataclasses
import errno
import json
import os
import shutil
import threading
import zlib
from pathlib import Path

import pytest

from rl8x.tracking import TrackingError, appending, artifacts, sync
from rl8x.tracking import journal as module
from rl8x.tracking.appending import Journal
from rl8x.tracking.journal import (
    ACK,
    EMPTY_ACK,
    JOURNAL,
    Ack,
    JournalInUseError,
    SendingJournal,
    Unsent,
    encode,
    is_sent,
    parse_ack,
    read_ack,
    read_header,
)
from rl8x.tracking.runs import journal_folders
from tracking.fakes import BothSides, artifact, finish, header, params, row, tags

FINISH = finish("FAILED")


def ops(journal):
    return [op for op, *_ in journal.read()]


def steps(journal):
    return [op["s"] for op in ops(journal) if op["op"] == "m"]


def arrive(journal, number=None):
    """Acknowledge the first lines that are to be sent, or all of them."""
    for _, offset, line in journal.read()[:number]:
        journal.acknowledge(offset, line)


def test_what_has_arrived_is_known_though_another_thread_closes_the_journal_meanwhile(tmp_path, monkeypatch):
    journal, read = Journal.create(tmp_path, header()), Journal._read_ack
    closes = threading.Thread(target=journal.close)

    def slowly(journal):
        if threading.current_thread() is not closes:
            closes.start()
            closes.join(0.5)
        return read(journal)

    monkeypatch.setattr(Journal, "_read_ack", slowly)
    assert journal.ack == Ack()
    closes.join()
    assert journal.unsent() == Unsent(num_others=1)


def test_an_end_that_arrives_while_it_is_recorded_that_the_store_is_away_is_no_longer_to_come(tmp_path, monkeypatch):
    journal, acknowledge = BothSides(tmp_path, header()), SendingJournal.acknowledge
    changes = {"finished": True, "ending": None, "outage": ""}
    arrives = threading.Thread(target=acknowledge, args=(journal, None, 1), kwargs=changes)

    def slowly(journal, *at, **changes):
        if changes.get("ending") is not None:
            arrives.start()
            arrives.join(0.5)
        acknowledge(journal, *at, **changes)

    monkeypatch.setattr(SendingJournal, "acknowledge", slowly)
    journal.acknowledge(outage="no answer")
    journal.lines.append((1, encode({**FINISH, "lost_rows": 0})))
    journal.note_ending()
    arrives.join()
    assert (journal.ack.finished, journal.ack.ending) == (True, None)
    journal.close()


def test_what_is_appended_is_read_from_where_it_has_not_arrived(tmp_path):
    journal = BothSides(tmp_path, header(), *map(row, range(3)))
    assert ops(journal) == [{**header(), "folder": str(journal.folder)}, row(0), row(1), row(2)]
    assert journal.read()[-1][1] == os.path.getsize(journal.folder / JOURNAL) == journal.end
    arrive(journal, 2)
    journal.acknowledge(run_id="r")
    journal.close()
    again = BothSides(journal.folder)
    assert (again.ack.run_id, steps(again)) == ("r", [1, 2])
    mark = again.journal.mark()
    again.append(params())
    assert (again.journal.unsent(), mark()) == (Unsent(2, 1), False)
    arrive(again, 2)
    assert (again.journal.unsent(), mark(), again.pending) == (Unsent(0, 1), True, True)
    arrive(again)
    assert not again.pending
    assert again.journal.has_arrived
    again.close()
    assert again.journal.unsent() == Unsent()


def test_secrets_are_not_kept(tmp_path, monkeypatch):
    monkeypatch.setenv("DATABRICKS_TOKEN", "dapi0123")
    monkeypatch.setenv("MY_TOKEN", "short12")  # which params and tags may have as another word
    uri, shown = "http://me:p%2Fw@host", "http://me:***@host"
    journal = BothSides(tmp_path, {**header(), "uri": uri})
    path = artifact("files/1/dapi0123.txt")  # which has to be found again
    given = tags(url=uri, pages=[uri]), params(token="dapi0123 short12", lr=0.1)
    journal.append(*given, {"op": "text", "to": "x.txt", "text": f"{uri} dapi0123 short12"}, path)
    journal.rejected.add(given[0], f"no {uri}")
    hidden = tags(url=shown, pages=[shown]), params(token="*** short12", lr=0.1)
    first = {**header(), "uri": shown, "folder": str(journal.folder)}
    assert ops(journal) == [first, *hidden, {"op": "text", "to": "x.txt", "text": f"{shown} *** ***"}, path]
    assert "p%2Fw" not in (journal.folder / "rejected.jsonl").read_text()


def test_a_journal_is_for_its_owner(tmp_path):
    before = os.umask(0)
    try:
        journal = BothSides(tmp_path / "spool", header())
        journal.rejected.add(row(0), "refused")
    finally:
        os.umask(before)
    modes = {path.name: path.stat().st_mode & 0o777 for path in (journal.folder, *journal.folder.iterdir())}
    assert modes == {"abc": 0o700, **dict.fromkeys([JOURNAL, ACK, "rejected.jsonl", "lock"], 0o600)}


@pytest.mark.parametrize("torn", [b'{"op":"m","t":5', b"x" * 200_000])
def test_a_torn_last_line_is_neither_read_nor_kept(torn, tmp_path):
    journal = BothSides(tmp_path, header(), row(0))
    journal.close()
    whole = os.path.getsize(journal.folder / JOURNAL)
    with open(journal.folder / JOURNAL, "ab") as file:
        file.write(torn)
    sending = SendingJournal.open(journal.folder)
    assert (steps(sending), sending.end) == ([0], whole)
    sending.close()
    again = BothSides(journal.folder)
    assert os.path.getsize(journal.folder / JOURNAL) == whole
    again.append(row(1))
    assert steps(again) == [0, 1]
    again.close()


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("hello", "is not a journal"),
        (json.dumps({"op": "open", "version": 9}), "version 9"),
        *((json.dumps(header(odd)), "its header has journal_id=") for odd in ("x' OR tags.a = 'b", "", "../up")),
    ],
)
def test_what_has_no_header_that_can_be_read_is_refused(line, message, tmp_path):
    with pytest.raises(TrackingError, match="cannot open"):
        Journal.open(tmp_path / "none")
    (tmp_path / JOURNAL).write_text(f"{line}\n")
    with pytest.raises(TrackingError, match=message):
        read_header(tmp_path)


def test_one_process_appends_and_one_sends(tmp_path):
    journal = BothSides(tmp_path, header())
    with pytest.raises(JournalInUseError, match="in use by this process"):
        Journal.open(journal.folder)
    assert SendingJournal.open(journal.folder) is None
    if (child := os.fork()) == 0:  # which keeps neither lock beyond the end of its parent
        os._exit(0 if SendingJournal.open(journal.folder) is None and not journal._lock.is_held else 1)
    assert os.waitpid(child, 0)[1] == 0
    journal.close()
    BothSides(journal.folder).close()


def slot(number, **changes):
    text = changes.pop("text", None) or json.dumps({**dataclasses.asdict(Ack()), **changes}).encode()
    line = b"%d %s" % (number, text)
    return (b"%08x %s" % (zlib.crc32(line), line)).ljust(len(EMPTY_ACK) // 2, b"\0")


@pytest.mark.parametrize(
    ("slots", "offset"),
    [
        ((slot(1, offset=10), slot(2, offset=20)), 20),
        ((slot(3, offset=30), slot(2, offset=20)), 30),
        ((slot(3, offset=30)[:9] + slot(1)[9:], slot(2, offset=20)), 20),  # torn
        ((slot(3, offset=30).replace(b'"offset": 30', b'"offset": 31'), slot(2, offset=20)), 20),
        ((slot(3, offset=1, no=1), slot(2, text=b"[" * 2000)), 0),
        ((b"", b""), 0),
        ((b'{"offs', b""), 0),
    ],
)
def test_the_newer_slot_that_is_whole_counts(slots, offset):
    assert parse_ack(b"".join(slots))[0].offset == offset


def test_what_has_arrived_is_overwritten_in_place_in_two_slots(tmp_path):
    journal = BothSides(tmp_path, header())
    path = journal.folder / ACK
    node = path.stat().st_ino
    journal.acknowledge(run_name="é" * 250, outage="\N{GRINNING FACE}" * 200)  # as long as they can be
    for beat in range(1, 4):
        journal.acknowledge(beat=beat)
        assert (read_ack(journal.folder).run_name, read_ack(journal.folder).beat) == ("é" * 250, beat)
    assert (path.stat().st_ino, path.stat().st_size) == (node, len(EMPTY_ACK))
    halves = path.read_bytes()[: len(EMPTY_ACK) // 2], path.read_bytes()[len(EMPTY_ACK) // 2 :]
    assert {parse_ack(each)[0].beat for each in halves} == {2, 3}  # each of them alone


@pytest.mark.parametrize("offset", [-3, 1, 5, 500])
def test_after_an_acknowledgement_that_is_no_lines_end_all_are_sent_again(tmp_path, offset):
    """Of lines that a power cut took, or of an edited file. What the run lost then, the store may have."""
    journal = BothSides(tmp_path, header(), row(0))
    journal.acknowledge(journal.end + offset, run_id="r", finished=True)
    journal.close()
    assert not is_sent(journal.folder)
    opened = Journal.open(journal.folder)
    assert opened.lacks_rows
    opened.close()
    again = BothSides(journal.folder)
    assert (steps(again), again.ack.run_id) == ([0], "r")
    again.append(row(2))
    again.close()


class Disk:
    """Stands in for the disk: full where `room` is 0, else writes through."""

    def __init__(self, monkeypatch):
        self.full = False
        self._pwrite = os.pwrite
        monkeypatch.setattr(module.os, "pwrite", self.pwrite)

    def pwrite(self, fd, data, offset):
        if not self.full or len(data) == len(EMPTY_ACK) // 2:  # a slot has its room
            return self._pwrite(fd, data, offset)
        if len(data) > 20:  # a full disk often takes the beginning of a line
            return self._pwrite(fd, data[:5], offset)
        raise OSError(errno.ENOSPC, "No space left on device")


@pytest.fixture
def disk(monkeypatch):
    return Disk(monkeypatch)


def test_a_full_disk_loses_nothing(tmp_path, disk, caplog):
    journal = BothSides(tmp_path, header(), row(0))
    disk.full = True
    journal.append(*map(row, range(1, 4)))
    assert ["wait in memory" in each.getMessage() for each in caplog.records] == [True]
    assert steps(journal) == [0]
    journal.append(row(4))
    disk.full = False
    journal.journal.drain()
    assert steps(journal) == [0, 1, 2, 3, 4]
    journal.close()
    assert steps(BothSides(journal.folder)) == [0, 1, 2, 3, 4]


def test_lines_that_no_disk_takes_count_once_they_have_arrived_past_it(tmp_path, disk):
    journal = BothSides(tmp_path, header())
    disk.full = True
    journal.append(*map(row, range(3)))
    journal.journal.end(FINISH)
    journal.lines.extend(journal.journal.waiting(0))
    assert [number for number, _ in journal.lines] == [1, 2, 3, 4]
    assert steps(journal) == []  # first what the disk has
    arrive(journal)
    assert [(op.get("s"), number) for op, _, number in journal.read()] == [(0, 1), (1, 2), (2, 3), (None, 4)]
    arrive(journal, 2)
    journal.journal.drain()
    assert journal.journal.unsent() == Unsent(0, 0, 1, 1)
    journal.acknowledge(ending=FINISH)
    assert journal.journal.unsent() == Unsent(0, 1, 1, 0)  # the end is safe there
    assert journal.journal.waiting(0)[0][0] == 3
    arrive(journal)
    assert journal.journal.has_arrived
    journal.close()
    again = Journal.open(journal.folder)
    assert again.lacks_rows  # which the store has: a resume asks there
    again.append(row(9))
    assert again.waiting(0)[0][0] == 5  # numbers go on
    again.close()


def test_a_journal_that_the_disk_does_not_take_is_made_elsewhere(tmp_path, monkeypatch, caplog):
    (tmp_path / "blocked").write_text("a file where the folder should be")
    journal = BothSides(tmp_path / "blocked", header())
    assert (journal.folder.name, journal.folder.parents[1]) == ("abc", Path("/dev/shm"))
    assert oct(journal.folder.parent.stat().st_mode & 0o777) == "0o700"
    assert str(journal.folder) in caplog.text
    journal.append(row(0))
    assert steps(journal) == [0]
    journal.close()
    shutil.rmtree(journal.folder.parent)
    monkeypatch.setattr(appending.tempfile, "mkdtemp", lambda **_: (_ for _ in ()).throw(OSError(28, "full")))
    with pytest.raises(TrackingError, match="no disk takes the journal of a run"):
        Journal.create(tmp_path / "blocked", header())


def test_memory_is_bounded(tmp_path, disk, monkeypatch, caplog):
    monkeypatch.setattr(appending, "MAX_MEMORY_LINES", 3)
    journal = Journal.create(tmp_path, header())
    disk.full = True
    for op in (params(), *map(row, range(5))):
        journal.append(op)
    assert [json.loads(line)["op"] for _, line in journal.waiting(0)] == ["params", "m", "m"]
    # The header, three rows dropped, two still in memory.
    assert journal.unsent() == Unsent(num_others=1, num_lost=5, num_others_lost=1)
    assert len(caplog.records) == 2
    journal.close()


def test_half_a_copy_of_an_artifact_does_not_stay(tmp_path, monkeypatch):
    journal = BothSides(tmp_path, header())
    (tmp_path / "policy").write_text("weights")

    def fails(source, target):
        target.write_text("wei")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(artifacts.shutil, "copyfile", fails)
    with pytest.raises(OSError, match="No space"):
        artifacts.keep(journal.folder, tmp_path / "policy")
    assert list((journal.folder / "files").iterdir()) == []


def test_syncing_covers_what_was_appended_and_the_folders_that_lead_there(tmp_path, monkeypatch):
    journal = Journal.create(tmp_path / "spool", header())
    synced = []
    monkeypatch.setattr(appending.os, "fsync", lambda fd: synced.append(os.fstat(fd).st_ino))
    journal.sync_to_disk()
    folders = [journal.folder, tmp_path / "spool", tmp_path]
    assert synced == [path.stat().st_ino for path in (journal.folder / JOURNAL, *folders)]
    journal.close()


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="only Linux leads to a folder that was moved")
def test_a_journal_that_is_moved_under_its_owner_gets_the_rest(tmp_path):
    journal = BothSides(tmp_path / "mlruns/spool", header(), row(0))
    moved = tmp_path / "moved/spool/abc"
    (tmp_path / "mlruns").rename(tmp_path / "moved")
    journal.journal.drain()
    journal.append(row(1))
    with pytest.raises(FileNotFoundError):
        artifacts.keep(journal.folder, tmp_path / "moved")
    arrive(journal)
    journal.acknowledge(run_id="r")
    journal.rejected.add(row(0), "refused")
    assert {path.name for path in moved.iterdir()} == {JOURNAL, ACK, "rejected.jsonl", "lock"}
    assert not (tmp_path / "mlruns").exists()
    assert read_ack(moved).run_id == "r"


def finished(tmp_path, **texts):
    journal = BothSides(tmp_path / "spool", header(), tags(**texts), row(0), {"op": "left", "s": 0, "t": 5}, FINISH)
    arrive(journal)
    journal.acknowledge(finished=True)
    super(BothSides, journal).close()
    journal.journal.close()
    return journal.folder


def test_a_journal_whose_run_has_checkpoints_keeps_its_rows_as_long_as_they_are_there(tmp_path):
    (tmp_path / "checkpoints/abc").mkdir(parents=True)
    folder = finished(tmp_path, **{"rl8x.checkpoints": str(tmp_path / "checkpoints/abc")})
    kept = [json.loads(line) for line in (folder / JOURNAL).read_text().splitlines()]
    assert [op["op"] for op in kept] == ["open", "m", "left"]
    assert (kept[0]["generation"], kept[0]["checkpoints"], kept[1]) == (1, "../../checkpoints/abc", row(0))
    assert is_sent(folder)
    assert str(sync(tmp_path / "spool")) == "nothing to send"
    # Killed between the two steps: what is sent again adds nothing, and the run is over all the same.
    path, ack = folder / ACK, read_ack(folder)
    path.write_bytes(EMPTY_ACK)
    killed = SendingJournal.open(folder)
    offset = killed.end + len(encode(row(1)))  # of the longer file, and a line's end in this one too, before long
    killed.acknowledge(**{**ack.__dict__, "generation": 0, "offset": offset})
    killed.close()
    resumed = Journal.open(folder)
    resumed.append(row(1))
    assert (resumed.has_arrived, resumed.ack.finished, resumed.unsent()) == (False, False, Unsent(2, 2))
    resumed.close()
    assert not is_sent(folder)
    again = BothSides(folder)
    assert (steps(again), again.ack.finished) == ([0, 1], True)
    arrive(again)
    again.close()
    shutil.move(tmp_path / "checkpoints", tmp_path / "elsewhere")
    assert str(sync(tmp_path / "spool")) == "nothing to send"
    assert not folder.exists()


def test_a_journal_that_is_being_removed_is_not_opened_any_more(tmp_path, monkeypatch):
    whole, others, root = shutil.rmtree, [], tmp_path / "spool"

    def slow(folder, **options):
        if folder.exists():
            (folder / "lock").unlink()
            with pytest.raises(TrackingError):
                Journal.open(root / "abc")
            others.append(BothSides(root, header()))
            others[0].append(row(1))
        whole(folder, **options)

    monkeypatch.setattr(shutil, "rmtree", slow)
    finished(tmp_path)
    (other,) = others
    assert steps(other) == [1]
    assert [path.name for path in root.iterdir()] == ["abc"]  # of the one that had arrived nothing is left


def test_what_a_killed_process_was_removing_is_no_journal(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", lambda folder, **options: None)
        finished(tmp_path)
    (left,) = (tmp_path / "spool").iterdir()
    assert journal_folders(tmp_path / "spool") == sync(tmp_path / "spool").journals == []
    assert not left.exists()
