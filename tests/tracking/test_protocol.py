"""Names, values and steps as they are logged, and the trackers that keep a run in memory, or none."""

import math
import pickle

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rl8x.tracking import MemoryTracker, NullTracker, Tracker
from rl8x.tracking.protocol import NameTable, artifact_name, legal_name, metric_step, metric_value, readable


@pytest.mark.parametrize(
    ("given_name", "legal"),
    [
        ("returns/mean", "returns/mean"),
        ("a.b-c d:e_1", "a.b-c d:e_1"),
        ("accuracy (%)", "accuracy ___"),
        ("hidden[0]", "hidden_0_"),
        ("a//b", "a/b"),
        ("/a/", "a"),
        ("a/../b", "a/__/b"),
        (".", "_"),
        ("größe", "größe"),
    ],
)
def test_legal_name(given_name, legal):
    assert legal_name(given_name) == legal


@settings(deadline=None)
@given(st.text(min_size=1, max_size=400))
def test_every_legal_name_is_taken_by_mlflow(text):
    from mlflow.utils.validation import _validate_metric_name

    if not text.strip("/"):
        return
    legal = legal_name(text)
    _validate_metric_name(legal)
    assert len(legal) <= 250
    assert legal_name(legal) == legal


def test_long_names_stay_apart_and_what_is_no_name_is_refused():
    assert legal_name("x" * 300 + "a") != legal_name("x" * 300 + "b")
    with pytest.raises(TypeError, match="must be a str; got int"):
        legal_name(3)
    with pytest.raises(ValueError, match="'//'"):
        legal_name("//")


def test_names_that_would_become_one_are_numbered(caplog):
    table, given = NameTable(), ("a(", "a(", "a[", "a_", "a_-2", "b")
    assert [table.add(name) for name in given] == ["a_", "a_", "a_-2", "a_-3", "a_-2-2", "b"]
    assert "'a[' is logged as 'a_-2', since 'a(' is called 'a_'" in caplog.text
    long = "x" * 249
    assert NameTable().legal({long + c: c for c in "(["}) == {long + "_": "(", long[:248] + "-2": "["}


@pytest.mark.parametrize("order", ["x>0 x<0 x_0", "x_0 x<0 x>0", "x<0 x_0 x>0"])
def test_names_in_one_call_are_numbered_whatever_their_order(order):
    # What is legal keeps its name; the others are numbered in the order of the alphabet.
    table = NameTable().legal({name: name for name in order.split()})
    assert table == {"x_0": "x_0", "x_0-2": "x<0", "x_0-3": "x>0"}


def test_a_run_that_goes_on_has_the_names_it_had():
    before = NameTable()
    first = [before.add(name) for name in ("x_0", "x>0", "y(", "x<0", "z")]
    after = NameTable(before=before.state)
    assert before.state == {"x>0": "x_0-2", "y(": "y_", "x<0": "x_0-3", "x_0": "x_0"}
    assert [after.add(name) for name in ("x=0", "y[", "z")] == ["x_0-4", "y_-2", "z"]
    assert [after.add(name) for name in ("x<0", "y(", "x>0", "x_0")] == first[3::-1]


def test_metric_values_and_steps():
    given = [3, True, torch.tensor(1.5), np.float32(0.5), math.nan, -math.inf]
    assert str([metric_value("x", value) for value in given]) == "[3.0, 1.0, 1.5, 0.5, nan, -inf]"
    for bad in (None, "high", torch.zeros(2), [1.0], 10**400):
        with pytest.raises(TypeError, match="'loss' must be one number"):
            metric_value("loss", bad)
    assert metric_step(np.int64(7)) == metric_step(torch.tensor(7)) == 7
    with pytest.raises(TypeError, match=r"integer; got float 1\.5"):
        metric_step(1.5)
    with pytest.raises(ValueError, match="64 bits"):
        metric_step(2**63)


def test_artifact_names_stay_inside():
    assert artifact_name("a/b.txt") == "a/b.txt"
    assert artifact_name("./a//b.txt") == "a/b.txt"
    for bad in ("/etc/passwd", "../x", "a/../../x", "a/..", "", " ", ".", "C:/x", "a\\..\\b", "~/x", "a\0b"):
        with pytest.raises(ValueError, match="artifact's name"):
            artifact_name(bad)


def test_utf8_that_an_ascii_locale_left_unread_is_read():
    """As Python gives the argument "Grün" where LC_ALL=C and its UTF-8 mode is off."""
    assert readable("Gr\udcc3\udcbcn") == readable("Grün") == "Grün"
    assert readable("caf\udce9 Gr\udcc3\udcbcn") == "caf\\udce9 Grün"
    assert readable("\ud800 ü") == "\\ud800 ü"


def test_keeps_all_and_is_returned_from_another_process(tmp_path):
    assert isinstance(NullTracker(), Tracker)
    tracker = MemoryTracker()
    tracker.start(params={"lr": 0.1}, tags={"task": "x"})
    tracker.log_metrics({"a": 1, "b": 2.5}, 10)
    tracker.log_params({"gamma": 0.9})
    tracker.set_tags({"stop": "done"})
    (tmp_path / "file.txt").write_text("x")
    tracker.log_artifact(tmp_path / "file.txt", "folder")
    tracker.log_text("hello", "note.txt")
    assert tracker.flush()
    again = pickle.loads(pickle.dumps(tracker))
    again.log_metrics({"a": 3}, 20)
    assert (tracker.rows, tracker.status) == ([(10, {"a": 1.0, "b": 2.5})], "RUNNING")
    assert (again.rows, again.history("a")) == ([(10, {"a": 1.0, "b": 2.5}), (20, {"a": 3.0})], [(10, 1.0), (20, 3.0)])
    assert (again.params, again.tags) == ({"lr": 0.1, "gamma": 0.9}, {"task": "x", "stop": "done"})
    assert (again.artifacts, again.texts) == (["folder/file.txt", "note.txt"], {"note.txt": "hello"})
    again.finish("FINISHED")
    assert again.status == "FINISHED"
    again.start(params={}, tags={})
    assert (again.rows, again.run_id == tracker.run_id) == ([], False)
