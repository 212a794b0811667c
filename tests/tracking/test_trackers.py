"""What both trackers that keep a run do alike, in memory and in MLflow: refuse calls, and go on with a run."""

from types import SimpleNamespace

import pytest

from rl8x.tracking import MemoryTracker, MLflowTracker, Tracker, TrackingError


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
