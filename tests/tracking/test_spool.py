import errno
import json
import logging
import os
import shutil

import pytest

from rl8x.tracking import TrackingError, kept_files, ops_file, rejected, sync
from rl8x.tracking import spool as spool_module
from rl8x.tracking.runs import spool_folders
from rl8x.tracking.spool import Spool
from rl8x.tracking.spool_files import SpoolInUseError, Unsent, read_header


def header(spool_id="abc"):
    return {"op": "open", "version": 1, "spool_id": spool_id, "t": 1}


def row(step):
    return {"op": "m", "t": 1000 + step, "s": step, "m": {"a": step / 2}}


def steps(spool):
    return [op["s"] for op, _ in spool.read() if op["op"] == "m"]


def test_what_has_not_arrived_is_counted(tmp_path):
    spool = Spool.create(tmp_path, header())
    assert spool.unsent() == Unsent(0, 1)  # the header
    spool.append({"op": "params", "params": {}})
    for step in range(3):
        spool.append(row(step))
    assert spool.unsent() == Unsent(3, 2)
    spool.acknowledge(spool.read()[2][1])
    assert spool.unsent() == Unsent(2, 0)
    spool.close()
    assert spool.unsent() == Unsent(2, 0)
    (tmp_path / "file").write_text("")
    nowhere = Spool.create(tmp_path / "file", header())
    nowhere.append(row(0))
    assert nowhere.unsent() == Unsent(0, 0, 1)


def test_secrets_are_not_kept(tmp_path, monkeypatch):
    monkeypatch.setenv("DATABRICKS_TOKEN", "dapi0123")
    uri, shown = "http://me:p%2Fw@host", "http://me:***@host"
    spool = Spool.create(tmp_path, {**header(), "uri": uri})
    name = "dapi0123.txt"
    ops = [
        {"op": "tags", "tags": {"url": uri, "pages": [uri]}},
        {"op": "params", "params": {"token": "dapi0123", "lr": 0.1}},
        {"op": "text", "to": "x.txt", "text": f"{uri} dapi0123"},
        {"op": "artifact", "file": f"files/1/{name}", "to": None},  # a path, which has to be found again
    ]
    for op in ops:
        spool.append(op)
    spool.rejected.add(ops[0], f"no {uri}")
    assert [op for op, _ in spool.read()] == [
        {**header(), "uri": shown, "folder": str(spool.folder)},
        {"op": "tags", "tags": {"url": shown, "pages": [shown]}},
        {"op": "params", "params": {"token": "***", "lr": 0.1}},
        {"op": "text", "to": "x.txt", "text": f"{shown} ***"},
        ops[3],
    ]
    assert "p%2Fw" not in (spool.folder / "rejected.jsonl").read_text()
    assert spool.header["uri"] == shown


def test_a_row_is_set_aside_without_a_look_at_those_before(tmp_path, monkeypatch):
    spool, asked, keys = Spool.create(tmp_path, header()), [], rejected._keys
    monkeypatch.setattr(rejected, "_keys", lambda op: asked.append(op) or keys(op))
    for step in (*range(50), 7):  # one comes twice
        spool.rejected.add(row(step), "refused")
    assert len(asked) == 51
    assert spool.rejected.entries == [row(step) for step in range(50)]
    spool.rejected.add({"op": "tags", "tags": {"a": "1"}}, "refused")
    spool.rejected.replaced_by({"op": "tags", "tags": {"a": "2", "b": "3"}})
    spool.rejected.add(row(3), "refused")
    assert spool.rejected.entries == rejected.Rejected(spool.folder).entries == [row(step) for step in range(50)]


def test_a_spool_is_for_its_owner(tmp_path, monkeypatch):
    monkeypatch.setattr(spool_module, "COMPACT_BYTES", 10)
    before = os.umask(0)
    try:
        spool = Spool.create(tmp_path / "spool", header())
        spool.append(row(0))
        spool.acknowledge(spool.read()[-1][1])
        spool.compact()
        spool.rejected.add(row(0), "refused")
    finally:
        os.umask(before)
    modes = {path.name: oct(path.stat().st_mode & 0o777) for path in spool.folder.iterdir()}
    assert modes == dict.fromkeys(["ops.jsonl", "ack.json", "end.json", "rejected.jsonl", "lock"], "0o600")
    assert oct(spool.folder.stat().st_mode & 0o777) == "0o700"


def test_what_is_appended_is_read(tmp_path):
    spool = Spool.create(tmp_path, header())
    for step in range(3):
        spool.append(row(step))
    ops = spool.read()
    assert [op for op, _ in ops] == [{**header(), "folder": str(spool.folder)}, row(0), row(1), row(2)]
    assert ops[-1][1] == os.path.getsize(spool.folder / "ops.jsonl")
    spool.acknowledge(ops[1][1], run_id="r")
    assert steps(spool) == [1, 2]
    spool.close()
    again = Spool.open(spool.folder)
    assert again.ack.run_id == "r"
    assert steps(again) == [1, 2]
    again.acknowledge(again.read()[-1][1])
    assert not again.pending
    again.close(remove=True)
    assert not spool.folder.exists()


def test_nan_and_infinity_survive(tmp_path):
    spool = Spool.create(tmp_path, header())
    spool.append({"op": "m", "t": 1, "s": 1, "m": {"n": float("nan"), "i": float("inf"), "j": float("-inf")}})
    metrics = spool.read()[1][0]["m"]
    assert metrics["n"] != metrics["n"]
    assert (metrics["i"], metrics["j"]) == (float("inf"), float("-inf"))
    spool.close()


@pytest.mark.parametrize("torn", [b'{"op":"m","t":5', b"x" * 200_000])
def test_a_torn_last_line_is_cut_off(tmp_path, torn):
    spool = Spool.create(tmp_path, header())
    spool.append(row(0))
    spool.close()
    whole = os.path.getsize(spool.folder / "ops.jsonl")
    with open(spool.folder / "ops.jsonl", "ab") as file:
        file.write(torn)
    again = Spool.open(spool.folder)
    assert os.path.getsize(spool.folder / "ops.jsonl") == whole
    again.append(row(1))
    assert steps(again) == [0, 1]
    again.close()


def test_a_broken_line_in_the_middle_is_named(tmp_path):
    spool = Spool.create(tmp_path, header())
    spool.close()
    with open(spool.folder / "ops.jsonl", "ab") as file:
        file.write(b"\x00\x00garbage\n[1]\n")
    spool = Spool.open(spool.folder)
    spool.append(row(1))
    assert [op["op"] for op, _ in spool.read()] == ["open", "unreadable", "unreadable", "m"]
    spool.close()


def test_an_unreadable_acknowledgement_means_none(tmp_path):
    spool = Spool.create(tmp_path, header())
    spool.append(row(0))
    spool.acknowledge(spool.read()[-1][1], run_id="r")
    spool.close()
    (spool.folder / "ack.json").write_text('{"offs')
    again = Spool.open(spool.folder)
    assert again.ack.run_id is None
    assert steps(again) == [0]
    again.close()


def test_one_owner(tmp_path):
    spool = Spool.create(tmp_path, header())
    with pytest.raises(SpoolInUseError, match="in use by this process"):
        Spool.open(spool.folder)
    spool.close()
    Spool.open(spool.folder).close()


def test_a_spool_that_is_being_removed_is_not_opened_any_more(tmp_path, monkeypatch):
    """Its files go one by one. Another process could lock it once its lock's file has gone, and lose the next file."""
    spool = Spool.create(tmp_path, header())
    spool.append(row(0))
    whole, others = shutil.rmtree, []

    def slow(folder, **options):
        if folder.exists():
            (folder / "lock").unlink()
            with pytest.raises(TrackingError):
                Spool.open(spool.folder)
            others.append(Spool.create(tmp_path, header()))
            others[0].append(row(1))
        whole(folder, **options)

    monkeypatch.setattr(shutil, "rmtree", slow)
    spool.close(remove=True)
    (other,) = others
    assert steps(other) == [1]
    assert (other.folder / "ops.jsonl").read_text().count('"s":1') == 1
    other.close()
    assert [path.name for path in tmp_path.iterdir()] == ["abc"]


def test_what_a_killed_process_was_removing_is_no_spool(tmp_path, monkeypatch):
    spool = Spool.create(tmp_path, header())
    monkeypatch.setattr(shutil, "rmtree", lambda folder, **options: None)
    spool.close(remove=True)
    monkeypatch.undo()
    (left,) = tmp_path.iterdir()
    assert spool_folders(tmp_path) == []
    assert sync(tmp_path).spools == []
    assert not left.exists()


def test_no_spool(tmp_path):
    with pytest.raises(TrackingError, match="cannot open"):
        Spool.open(tmp_path / "none")
    (tmp_path / "ops.jsonl").write_text("hello\n")
    with pytest.raises(TrackingError, match="is not a spool"):
        read_header(tmp_path)
    (tmp_path / "ops.jsonl").write_text(json.dumps({"op": "open", "version": 9}) + "\n")
    with pytest.raises(TrackingError, match="version 9"):
        read_header(tmp_path)


class Disk:
    """Stands in for the disk: full where `room` is 0, else writes through."""

    def __init__(self, monkeypatch):
        self.full = False
        self._pwrite = os.pwrite
        monkeypatch.setattr(spool_module.os, "pwrite", self.pwrite)
        monkeypatch.setattr(spool_module, "_RETRY_S", 0.0)

    def pwrite(self, fd, data, offset):
        if not self.full:
            return self._pwrite(fd, data, offset)
        if len(data) > 20:  # a full disk often takes the beginning of a line
            return self._pwrite(fd, data[:5], offset)
        raise OSError(errno.ENOSPC, "No space left on device")


def test_a_full_disk_loses_nothing(tmp_path, monkeypatch, caplog):
    disk = Disk(monkeypatch)
    spool = Spool.create(tmp_path, header())
    spool.append(row(0))
    disk.full = True
    for step in range(1, 4):
        spool.append(row(step))
    assert len([r for r in caplog.records if r.levelno == logging.WARNING]) == 1
    assert "wait in memory" in caplog.text
    disk.full = False
    spool.append(row(4))
    assert steps(spool) == [0, 1, 2, 3, 4]
    spool.close()
    again = Spool.open(spool.folder)
    assert steps(again) == [0, 1, 2, 3, 4]
    again.close()


def test_lines_in_memory_are_sent_from_there(tmp_path, monkeypatch):
    disk = Disk(monkeypatch)
    spool = Spool.create(tmp_path, header())
    spool.acknowledge(spool.read()[-1][1])
    disk.full = True
    for step in range(3):
        spool.append(row(step))
    assert [(op["s"], offset) for op, offset in spool.read()] == [(0, None), (1, None), (2, None)]
    spool.acknowledge(lines=2)
    spool.give_back()
    assert steps(spool) == [2]
    disk.full = False
    spool.append(row(3))  # row 2 goes to the disk with it while it is being sent
    spool.acknowledge(lines=1)
    spool.give_back()
    [(op, offset)] = spool.read()
    assert (op, offset) == (row(3), os.path.getsize(spool.folder / "ops.jsonl"))
    spool.acknowledge(offset)
    assert not spool.pending
    spool.close()


def test_lines_that_go_to_the_disk_before_a_lost_answer_are_sent_again(tmp_path, monkeypatch):
    disk = Disk(monkeypatch)
    disk.full = True
    spool = Spool.create(tmp_path, header())
    for step in range(3):
        spool.append(row(step))
    assert steps(spool) == [0, 1, 2]
    disk.full = False
    spool.append(row(3))
    spool.acknowledge(lines=1)
    spool.give_back()
    assert steps(spool) == [1, 2, 3]
    spool.close()
    assert steps(Spool.open(spool.folder)) == [1, 2, 3]


def test_memory_is_bounded(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(ops_file, "MAX_MEMORY_LINES", 3)
    (tmp_path / "blocked").write_text("a file where the folder should be")
    spool = Spool.create(tmp_path / "blocked", header())
    spool.append({"op": "params", "params": {}})
    for step in range(5):
        spool.append(row(step))
    assert [op["op"] for op, _ in spool.read()] == ["params", "m", "m"]
    assert steps(spool) == [3, 4]
    assert spool.unsent() == Unsent(num_lost=5, num_others_lost=1)  # three rows dropped, two still in memory
    assert len(caplog.records) == 2
    spool.close()


def test_a_large_spool_begins_anew(tmp_path, monkeypatch):
    monkeypatch.setattr(spool_module, "COMPACT_BYTES", 1000)
    spool = Spool.create(tmp_path, header())
    for step in range(30):
        spool.append(row(step))
    mark = spool.mark()
    spool.compact()
    assert len(steps(spool)) == 30  # nothing acknowledged: nothing goes
    spool.acknowledge(spool.read()[-1][1], run_id="r")
    spool.compact()
    assert os.path.getsize(spool.folder / "ops.jsonl") < 1000
    assert mark()
    assert not spool.pending
    spool.append(row(10))
    assert steps(spool) == [10]
    before = (spool.folder / "ack.json").read_bytes()
    spool.close()
    again = Spool.open(spool.folder)
    assert (steps(again), again.ack.run_id) == ([10], "r")
    again.close()
    # Killed between the two renames: the acknowledgement still counts in the file that is gone.
    (spool.folder / "ack.json").write_bytes(before.replace(b'"generation": 1', b'"generation": 0'))
    again = Spool.open(spool.folder)
    assert (steps(again), again.ack.run_id) == ([10], "r")
    again.close()


@pytest.mark.parametrize("too_far", [1, 5, 500])
def test_after_an_acknowledgement_of_lines_that_a_power_cut_took_all_are_sent_again(tmp_path, too_far):
    spool = Spool.create(tmp_path, header())
    spool.append(row(0))
    end = os.path.getsize(spool.folder / "ops.jsonl")
    spool.append(row(1))
    spool.acknowledge(end + too_far, run_id="r")
    spool.close()
    os.truncate(spool.folder / "ops.jsonl", end)
    again = Spool.open(spool.folder)
    assert (steps(again), again.ack.run_id) == ([0], "r")
    again.append(row(2))
    again.close()  # killed before anything was acknowledged
    again = Spool.open(spool.folder)
    assert (steps(again), again.ack.run_id) == ([0, 2], "r")
    again.close()


def test_after_an_acknowledgement_within_a_line_all_are_sent_again(tmp_path):
    spool = Spool.create(tmp_path, header())
    spool.append(row(0))
    spool.append(row(1))
    spool.acknowledge(os.path.getsize(spool.folder / "ops.jsonl") - 3)
    spool.close()
    again = Spool.open(spool.folder)
    assert steps(again) == [0, 1]
    again.close()


def test_syncing_covers_what_was_appended_and_the_folders_that_lead_there(tmp_path, monkeypatch):
    synced = []
    monkeypatch.setattr(spool_module.os, "fsync", lambda fd: synced.append(os.fstat(fd).st_ino))
    monkeypatch.setattr(spool_module, "COMPACT_BYTES", 100)
    spool = Spool.create(tmp_path / "spool", header())
    synced.clear()
    spool.sync_to_disk()
    folders = [spool.folder, tmp_path / "spool", tmp_path]
    assert synced == [path.stat().st_ino for path in (spool.folder / "ops.jsonl", *folders)]
    spool.acknowledge(spool.read()[-1][1])
    synced.clear()
    spool.compact()  # another file, which a cut must not leave empty, and its name
    spool.sync_to_disk()
    ops = (spool.folder / "ops.jsonl").stat().st_ino
    assert synced == [ops, spool.folder.stat().st_ino, ops]
    spool.close()
    spool.sync_to_disk()


def test_lines_longer_than_one_read(tmp_path, monkeypatch):
    monkeypatch.setattr(ops_file, "READ_BYTES", 64)
    spool = Spool.create(tmp_path, header())
    spool.append({"op": "text", "to": "x", "text": "y" * 1000})
    spool.append(row(1))
    seen = []
    while spool.pending:
        ops = spool.read()
        seen += [op["op"] for op, _ in ops]
        spool.acknowledge(ops[-1][1])
    assert seen == ["open", "text", "m"]
    spool.close()


def test_the_end_has_room_on_a_full_disk(tmp_path):
    spool = Spool.create(tmp_path, header())
    spool.append(row(0))
    spool._write = lambda line: False  # the disk is full, but not what has its room on it
    for step in range(1, 4):
        spool.append(row(step))
    finish = {"op": "finish", "status": "FAILED", "t": 9}
    spool.end(finish)
    assert spool.unsent() == Unsent(1, 2, 3, 0)  # the header and the end are safe
    spool.close()
    for _ in range(2):  # the second finds it among the ops
        again = Spool.open(spool.folder)
        ops = [op for op, _ in again.read()]
        assert ops[1:] == [row(0), {"op": "tags", "tags": {"rl8x.lost_rows": "3"}}, finish]
        again.close()


def test_rows_that_the_disk_takes_in_the_end_are_not_lost(tmp_path):
    spool = Spool.create(tmp_path, header())
    spool._write = lambda line: False
    spool.append(row(0))
    spool.end({"op": "finish", "status": "FAILED", "t": 9})
    assert spool.unsent().num_lost == 1
    del spool._write
    spool.close()
    assert spool.unsent() == Unsent(1, 2)
    again = Spool.open(spool.folder)
    assert [op["op"] for op, _ in again.read()] == ["open", "m", "finish"]
    again.close()


def test_half_a_copy_of_an_artifact_does_not_stay(tmp_path, monkeypatch):
    spool = Spool.create(tmp_path, header())
    (tmp_path / "policy").write_text("weights")

    def fails(source, target):
        target.write_text("wei")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(kept_files.shutil, "copyfile", fails)
    with pytest.raises(OSError, match="No space"):
        spool.keep_file(tmp_path / "policy")
    assert list((spool.folder / "files").iterdir()) == []
    spool.close()


def test_a_spool_that_is_deleted_under_its_owner_is_written_anew(tmp_path):
    root = tmp_path / "mlruns/spool"
    spool = Spool.create(root, header())
    spool.append(row(0))
    spool.acknowledge(spool.read()[0][1], run_id="r")
    spool.look_after()
    shutil.rmtree(tmp_path / "mlruns")
    spool.append(row(1))
    spool.look_after()
    spool.append(row(2))
    assert steps(spool) == [0, 1, 2]
    with pytest.raises(SpoolInUseError):
        Spool.open(spool.folder)
    assert (tmp_path / "mlruns/.gitignore").exists()
    spool.close()
    again = Spool.open(spool.folder)
    assert read_header(again.folder) == header() | {"folder": str(again.folder)}
    assert again.ack.run_id == "r"
    assert steps(again) == [0, 1, 2]
    again.close()


def test_a_spool_that_cannot_be_written_anew_keeps_all_until_it_can(tmp_path):
    root = tmp_path / "root"
    spool = Spool.create(root, header())
    spool.append(row(0))
    shutil.rmtree(root)
    root.write_text("in the way")
    spool.look_after()
    spool.append(row(1))
    assert steps(spool) == [0, 1]
    root.unlink()
    spool.look_after()
    spool.append(row(2))
    spool.close()
    again = Spool.open(spool.folder)
    assert steps(again) == [0, 1, 2]
    again.close()


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="only Linux tells where a file was moved to")
def test_a_spool_that_is_moved_under_its_owner_is_followed(tmp_path):
    spool = Spool.create(tmp_path / "mlruns/spool", header())
    spool.append(row(0))
    spool.look_after()
    moved = tmp_path / "moved/spool/abc"
    (tmp_path / "mlruns").rename(tmp_path / "moved")
    spool.look_after()
    assert spool.folder == moved
    spool.append(row(1))
    spool.acknowledge(spool.read()[-1][1], run_id="r")
    spool.rejected.add(row(0), "refused")
    assert {path.name for path in moved.iterdir()} == {"ops.jsonl", "ack.json", "end.json", "rejected.jsonl", "lock"}
    assert not (tmp_path / "mlruns").exists()
    spool.close()
