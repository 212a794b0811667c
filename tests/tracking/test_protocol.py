"""Names, values and steps as they are logged; what trackers do alike in memory and in MLflow."""

import math
import pickle
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rl8x.tracking import MemoryTracker, MLflowTracker, NullTracker, Tracker, TrackingError
from rl8x.tracking.protocol import NameTable, artifact_name, legal_name, metric_step, metric_value, readable

LEGAL = {"returns/mean": "returns/mean", "a.b-c d:e_1": "a.b-c d:e_1", "accuracy (%)": "accuracy ___", "a//b": "a/b"}
LEGAL |= {"hidden[0]": "hidden_0_", "/a/": "a", "a/../b": "a/__/b", ".": "_", "..0": "_.0", "größe": "größe"}


@pytest.mark.parametrize("given_name", LEGAL)
def test_legal_name(given_name):
    assert legal_name(given_name) == LEGAL[given_name]


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
    # In one call what is legal keeps its name, and the others are numbered in the order of the alphabet.
    for order in ("x>0 x<0 x_0", "x_0 x<0 x>0", "x<0 x_0 x>0"):
        legal = NameTable().legal({name: name for name in order.split()})
        assert legal == {"x_0": "x_0", "x_0-2": "x<0", "x_0-3": "x>0"}


def test_a_run_that_goes_on_has_the_names_it_had():
    before = NameTable()
    first = [before.add(name) for name in ("x_0", "x>0", "y(", "x<0", "z")]
    after = NameTable(before=before.state)
    assert before.state == {"x>0": "x_0-2", "y(": "y_", "x<0": "x_0-3", "x_0": "x_0"}
    assert [after.add(name) for name in ("x=0", "y[", "z")] == ["x_0-4", "y_-2", "z"]
    assert [after.add(name) for name in ("x<0", "y(", "x>0", "x_0")] == first[3::-1]


def test_metric_values_and_steps():
    ones = [np.array(2), np.array([2.0]), torch.tensor([[2]]), np.ones((1, 1, 1)) * 2]  # arrays of one
    assert [metric_value("x", one) for one in ones] == [2.0] * 4
    given = [3, True, torch.tensor(1.5), np.float32(0.5), math.nan, -math.inf]
    assert str([metric_value("x", value) for value in given]) == "[3.0, 1.0, 1.5, 0.5, nan, -inf]"
    for bad in ("..b", None, "high", torch.zeros(2), np.zeros(2), [1.0], 10**400):
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
    for bad in ("..b", "/etc/passwd", "../x", "a/../../x", "a/..", "", " ", ".", "C:/x", "a\\..\\b", "~/x", "a\0b"):
        with pytest.raises(ValueError, match="artifact's name"):
            artifact_name(bad)


def test_utf8_that_an_ascii_locale_left_unread_is_read():
    """As Python gives the argument "Grün" where LC_ALL=C and its UTF-8 mode is off."""
    assert readable("Gr\udcc3\udcbcn") == readable("Grün") == "Grün"
    assert readable("caf\udce9 Gr\udcc3\udcbcn") == "caf\\udce9 Grün"
    assert readable("\ud800 ü") == "\\ud800 ü"


def test_keeps_all_and_is_returned_from_another_process(tmp_path, monkeypatch):
    assert isinstance(NullTracker(), Tracker)
    tracker = MemoryTracker()
    tracker.start(params={"lr": 0.1}, tags={"task": "x"})
    tracker.log_metrics({"a": 1, "b": 2.5}, 10)
    tracker.log_params({"gamma": 0.9})
    tracker.set_tags({"stop": "done"})
    (tmp_path / "file.txt").write_text("x")
    tracker.log_artifact(tmp_path / "file.txt", "folder")
    tracker.log_text("hello", "note.txt")
    monkeypatch.chdir(tmp_path)
    tracker.log_artifact(".")
    assert tracker.artifacts.pop() == tmp_path.name
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


@pytest.fixture(params=["in memory", "in MLflow"])
def kept(request, mlruns, mlflow_client, tmp_path):
    """What makes the tracker of another process, and what reads a metric, the status and the end of the run back."""
    if request.param == "in memory":
        memory = MemoryTracker()
        return SimpleNamespace(tracker=lambda: memory, history=memory.history, end=lambda: (memory.status, None))
    (tmp_path / "checkpoints").mkdir()  # the journal of a run that has some stays
    options = {"interval_s": 0.05, "tags": {"rl8x.checkpoints": str(tmp_path / "checkpoints")}}

    def info():
        [found] = mlflow_client.search_runs([each.experiment_id for each in mlflow_client.search_experiments()])
        return found.info

    return SimpleNamespace(
        tracker=lambda: MLflowTracker(**options),
        history=lambda name: sorted((p.step, p.value) for p in mlflow_client.get_metric_history(info().run_id, name)),
        end=lambda: (info().status, info().end_time),
    )


def test_what_is_refused_leaves_the_run_alone(kept, tmp_path):
    tracker = kept.tracker()
    assert isinstance(tracker, Tracker)
    with pytest.raises(RuntimeError, match="call start"):
        tracker.log_metrics({"a": 1.0}, 1)
    with pytest.raises(TrackingError, match=r"(no run|cannot go on with) 'other'"):
        tracker.start(params={}, tags={}, resume="other")
    tracker.start(params={}, tags={})
    for call, error, message in (
        (lambda: tracker.finish("DONE"), ValueError, "FINISHED, FAILED, KILLED; got 'DONE'"),
        (lambda: tracker.log_metrics({"a": None}, 1), TypeError, "metric 'a' must be one number; got NoneType"),
        (lambda: tracker.log_metrics({"a": 1.0}, 0.5), TypeError, "step must be an integer"),
        (lambda: tracker.log_text("x", "../../x"), TrackingError, "relative path"),
        (lambda: tracker.log_artifact(tmp_path / "none"), FileNotFoundError, "none"),
        (lambda: tracker.log_artifact(""), FileNotFoundError, "''"),  # which is the working directory
    ):
        with pytest.raises(error, match=message):
            call()
    tracker.log_metrics({"a": 1.0}, 1)
    tracker.finish("FINISHED")
    assert (kept.history("a"), kept.end()[0]) == ([(1, 1.0)], "FINISHED")


def test_a_run_that_a_process_goes_on_with_loses_no_point_and_keeps_its_status_where_asked(kept):
    tracker = kept.tracker()
    tracker.start(params={}, tags={})
    for step in (1, 2, 3):
        tracker.log_metrics({"a": float(step)}, step)
    tracker.finish("KILLED")
    handle, end = tracker.resume_handle, kept.end()
    tracker.start(params={}, tags={}, resume=handle, repeats=False, keeps_status=True)
    for _ in range(5):
        tracker.log_metrics({"a": 3.0}, 3)  # equal values of one step, in one millisecond
    assert tracker.flush(60)
    assert kept.end()[0] == "KILLED"
    tracker.finish("FINISHED")
    assert kept.end() == end
    assert kept.history("a") == [(1, 1.0), (2, 2.0), *[(3, 3.0)] * 6]

    # A process that resumes from a checkpoint at step 1, and goes on with itself before it has repeated all.
    again = kept.tracker()
    again.start(params={}, tags={}, resume=handle)
    again.log_metrics({"a": 2.0}, 2)
    again.finish("FINISHED")
    again.start(params={}, tags={}, resume=handle, repeats=False)
    again.log_metrics({"a": 2.5}, 2)
    for value in [3.0] * 6 + [3.5]:
        again.log_metrics({"a": value}, 3)
    again.finish("FINISHED")
    assert sorted(kept.history("a")) == [(1, 1.0), (2, 2.0), (2, 2.5), *[(3, 3.0)] * 6, (3, 3.5)]
    assert kept.end()[0] == "FINISHED"


def test_what_a_resumed_run_leaves_behind_is_dropped(kept):
    handle = None
    for value, last in ((1.0, 4), (2.0, 3)):
        tracker = kept.tracker()
        tracker.start(params={}, tags={}, resume=handle)
        for step in range(1, last + 1):
            tracker.log_metrics({"losses/total": 0.5 if step == 1 else value, "profiling/step_ms": value}, step)
        tracker.finish("FINISHED")
        handle = tracker.resume_handle
    assert kept.history("losses/total") == [(1, 0.5), (2, 2.0), (3, 2.0)]
    assert kept.history("profiling/step_ms") == [(1, 1.0), (2, 2.0), (3, 2.0)]
