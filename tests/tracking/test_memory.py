import pytest

from rl8x.tracking import MemoryTracker, NullTracker, Tracker, TrackingError


def test_keeps_all(tmp_path):
    tracker = MemoryTracker()
    tracker.start(params={"lr": 0.1}, tags={"task": "x"})
    tracker.log_metrics({"a": 1, "b": 2.5}, 10)
    tracker.log_metrics({"a": 3}, 20)
    tracker.log_params({"gamma": 0.9})
    tracker.set_tags({"stop": "done"})
    (tmp_path / "file.txt").write_text("x")
    tracker.log_artifact(tmp_path / "file.txt", "folder")
    tracker.log_text("hello", "note.txt")
    assert tracker.flush()
    assert tracker.status == "RUNNING"
    tracker.finish("FINISHED")
    assert tracker.rows == [(10, {"a": 1.0, "b": 2.5}), (20, {"a": 3.0})]
    assert tracker.history("a") == [(10, 1.0), (20, 3.0)]
    assert tracker.params == {"lr": 0.1, "gamma": 0.9}
    assert tracker.tags == {"task": "x", "stop": "done"}
    assert tracker.artifacts == ["folder/file.txt", "note.txt"]
    assert tracker.texts == {"note.txt": "hello"}
    assert tracker.status == "FINISHED"


def test_resume_logs_nothing_twice():
    tracker = MemoryTracker()
    tracker.start(params={}, tags={})
    first = tracker.run_id
    tracker.log_metrics({"a": 1.0}, 1)
    tracker.log_metrics({"a": 2.0}, 2)
    tracker.finish("KILLED")
    tracker.start(params={}, tags={}, resume=tracker.resume_handle)
    tracker.log_metrics({"a": 2.0, "b": 5.0}, 2)
    tracker.log_metrics({"a": 3.0}, 3)
    assert tracker.run_id == first
    assert tracker.history("a") == [(1, 1.0), (2, 2.0), (3, 3.0)]
    assert tracker.history("b") == [(2, 5.0)]
    tracker.start(params={}, tags={})
    assert tracker.rows == []
    assert tracker.run_id != first


def test_calls_out_of_turn(tmp_path):
    tracker = MemoryTracker()
    with pytest.raises(RuntimeError, match="start"):
        tracker.log_metrics({"a": 1.0}, 1)
    tracker.start(params={}, tags={})
    with pytest.raises(ValueError, match="FINISHED, FAILED, KILLED; got 'DONE'"):
        tracker.finish("DONE")
    with pytest.raises(TrackingError, match="cannot go on with 'other'"):
        tracker.start(params={}, tags={}, resume="other")
    with pytest.raises(FileNotFoundError):
        tracker.log_artifact(tmp_path / "none")
    with pytest.raises(TrackingError, match="relative path"):
        tracker.log_text("x", "../x")


def test_null_tracker_is_a_tracker():
    tracker = NullTracker()
    assert isinstance(tracker, Tracker)
    assert isinstance(MemoryTracker(), Tracker)
    tracker.start(params={}, tags={})
    tracker.log_metrics({"a": 1.0}, 1)
    tracker.finish("FAILED")
    assert tracker.run_id is None


def test_going_on_in_the_same_process_drops_nothing_and_may_keep_the_status():
    tracker = MemoryTracker()
    tracker.start(params={}, tags={})
    tracker.log_metrics({"a": 1.0}, 1)
    tracker.finish("KILLED")
    tracker.start(params={}, tags={}, resume=tracker.resume_handle, repeats=False, keeps_status=True)
    tracker.log_metrics({"a": 2.0}, 1)
    assert tracker.status == "KILLED"
    tracker.finish("FINISHED")
    assert tracker.status == "KILLED"
    # Another process that resumes repeats both, and then has something to add.
    tracker.start(params={}, tags={}, resume=tracker.resume_handle)
    for value in (1.0, 2.0, 3.0):
        tracker.log_metrics({"a": value}, 1)
    tracker.finish("FINISHED")
    assert tracker.history("a") == [(1, 1.0), (1, 2.0), (1, 3.0)]
    assert tracker.status == "FINISHED"
    with pytest.raises(RuntimeError, match="start"):
        tracker.log_metrics({"a": 1.0}, 1)


def test_what_a_resumed_run_leaves_behind_is_dropped():
    tracker = MemoryTracker()
    for value, last in ((1.0, 4), (2.0, 3)):
        tracker.start(params={}, tags={}, resume=tracker.resume_handle)
        for step in range(1, last + 1):
            tracker.log_metrics({"losses/total": 0.5 if step == 1 else value, "profiling/step_ms": value}, step)
        tracker.finish("FINISHED")
    assert tracker.history("losses/total") == [(1, 0.5), (2, 2.0), (3, 2.0)]
    assert tracker.history("profiling/step_ms") == [(1, 1.0), (2, 2.0), (3, 2.0)]
