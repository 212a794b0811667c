import logging
import math
import os
import re
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from mlflow import MlflowClient

from rl8x.tracking import MLflowTracker


def tracker_of(tmp_path, **options):
    return MLflowTracker(**{"interval_s": 0.05, "spool_dir": tmp_path / "mlruns" / "spool", **options})


def history(client, run_id, name):
    return sorted((point.step, point.value) for point in client.get_metric_history(run_id, name))


def test_names_values_and_artifacts_of_any_kind_arrive_as_mlflow_takes_them(mlruns, mlflow_client, tmp_path, caplog):
    tracker = MLflowTracker(tags={"group": "g"}, interval_s=0.05)
    assert tracker.location == f"sqlite:///{mlruns}/mlflow.db"
    tracker.start(params={"layers": [1, 2], "text": "x" * 6500, "bad[0]": None}, tags={"task": "t"})
    tracker.log_metrics({"odd (%)": 1.0, "nan": math.nan, "high": math.inf, "low": -math.inf}, 1)
    tracker.log_text("Traceback", "errors/traceback.txt")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder/file.txt").write_text("content")
    tracker.log_artifact(tmp_path / "folder/file.txt")
    tracker.log_artifact(tmp_path / "folder", "kept")
    tracker.set_tags({"task": "changed"})
    assert tracker.flush(60)
    assert mlflow_client.get_run(tracker.run_id).info.status == "RUNNING"
    tracker.finish("FAILED")

    run = mlflow_client.get_run(tracker.run_id)
    assert run.info.status == "FAILED"
    assert run.info.end_time >= run.info.start_time
    assert mlflow_client.get_experiment(run.info.experiment_id).name == "rl8x"
    params, text = run.data.params, run.data.params.pop("text")
    assert (params, len(text)) == ({"layers": "[1, 2]", "bad_0_": "None"}, 6000)
    assert {"task": "changed", "group": "g"}.items() <= run.data.tags.items()
    most = sys.float_info.max
    metrics = [("high", most), ("low", -most), ("nan", math.nan), ("odd ___", 1.0)]
    assert str(sorted(run.data.metrics.items())) == str(metrics)
    kept = mlruns / "artifacts" / tracker.run_id / "artifacts"
    assert run.info.artifact_uri == kept.as_uri()
    names = {str(path.relative_to(kept)) for path in kept.rglob("*.txt")}
    assert names == {"errors/traceback.txt", "file.txt", "kept/folder/file.txt", "params/text.txt"}
    assert (kept / "errors/traceback.txt").read_text() == "Traceback"
    assert list((mlruns / "spool").iterdir()) == []
    assert [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING and "rl8x" in r.name] == [
        "tracking: the metric 'odd (%)' is logged as 'odd ___', which MLflow takes"
    ]


def test_the_users_active_run_is_logged_to_and_not_ended(mlruns, mlflow_client, tmp_path, monkeypatch):
    import mlflow

    uri = f"sqlite:///{mlruns}/mlflow.db"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    tracker, again = tracker_of(tmp_path), {}
    with mlflow.start_run() as run:
        for _ in range(2):
            tracker.start(params={"lr": 1}, tags={}, **again)
            assert tracker.run_id == run.info.run_id
            tracker.log_metrics({"a": 1.0}, 1)
            tracker.finish("KILLED")
            assert mlflow_client.get_run(run.info.run_id).info.status == "RUNNING"
            again = {"resume": tracker.resume_handle, "repeats": False}
        other = tracker_of(tmp_path, tracking_uri=f"sqlite:///{tmp_path}/other.db")
        assert other.location != uri
    done = mlflow_client.get_run(run.info.run_id)
    assert (done.info.status, done.data.params, done.data.tags["rl8x.status"]) == ("FINISHED", {"lr": "1"}, "KILLED")
    assert history(mlflow_client, run.info.run_id, "a") == [(1, 1.0), (1, 1.0)]


def test_a_run_that_had_no_id_yet_is_resumed_where_it_is(mlruns, mlflow_client, tmp_path):
    tracker = tracker_of(tmp_path, experiment_name="elsewhere")
    tracker.start(params={}, tags={})
    handle = f"journal-{tracker.journal_folder.name}"  # of a checkpoint from before the store answered
    tracker.log_metrics({"a": 1.0}, 1)
    tracker.finish("KILLED")
    again = tracker_of(tmp_path)
    again.start(params={}, tags={}, resume=handle)
    for step in (1, 2):
        again.log_metrics({"a": float(step)}, step)
    again.finish("FINISHED")
    assert again.run_id == tracker.run_id
    assert history(mlflow_client, again.run_id, "a") == [(1, 1.0), (2, 2.0)]


def test_what_a_process_adds_to_a_run_that_is_over_is_not_added_again(mlruns, mlflow_client, tmp_path):
    """Killed after it added a result to its own run: whoever resumes the run at its end adds the same."""
    key = "0123456789abcdef0123456789abcdef"
    for begins in (True, False):
        tracker = tracker_of(tmp_path, run_key=key)
        tracker.start(params={}, tags={})
        if begins:
            tracker.log_metrics({"a": 1.0}, 1)
        tracker.finish("FINISHED")
        tracker.start(params={}, tags={}, resume=tracker.resume_handle, repeats=False, keeps_status=True)
        assert tracker.journal_folder.name == key  # where a process that knows the key alone finds it
        tracker.log_metrics({"result": 2.0}, 1)
        tracker.finish("FINISHED")
    assert history(mlflow_client, tracker.run_id, "result") == [(1, 2.0)]
    assert history(mlflow_client, tracker.run_id, "a") == [(1, 1.0)]


def test_the_experiment_of_the_environment(mlruns, mlflow_client, tmp_path, monkeypatch):
    tracker, by_id = tracker_of(tmp_path), mlflow_client.create_experiment("by-id")
    for variable, value, name in (("NAME", "by-name", "by-name"), ("ID", by_id, "by-id")):
        monkeypatch.setenv(f"MLFLOW_EXPERIMENT_{variable}", value)
        tracker.start(params={}, tags={})
        tracker.finish("FINISHED")
        run = mlflow_client.get_run(tracker.run_id)
        assert mlflow_client.get_experiment(run.info.experiment_id).name == name
        monkeypatch.delenv(f"MLFLOW_EXPERIMENT_{variable}")
        monkeypatch.setenv("MLFLOW_TRACKING_URI", tracker.location)  # the ID is of an experiment there


def test_a_fork_has_no_part_in_the_run_that_a_tracker_has(mlruns, mlflow_client, tmp_path):
    tracker = tracker_of(tmp_path)
    tracker.finish("FINISHED")  # nothing was started: nothing to end
    assert not (mlruns / "spool").exists()
    tracker.start(params={}, tags={})
    with pytest.raises(RuntimeError, match="has a run already"):
        tracker.start(params={}, tags={})
    if (child := os.fork()) == 0:  # a forked worker has a copy of the tracker; it must not write or end the run
        tracker.log_metrics({"a": 9.0}, 9)
        tracker.finish("KILLED")
        os._exit(0)
    os.waitpid(child, 0)
    tracker.log_metrics({"a": 1.0}, 1)
    tracker.finish("FINISHED")
    assert mlflow_client.get_run(tracker.run_id).info.status == "FINISHED"
    assert history(mlflow_client, tracker.run_id, "a") == [(1, 1.0)]


@pytest.mark.parametrize(
    ("what", "expected"),
    [
        (".", {"{here}/plan.txt", "{here}/mlruns/mlflow.db"}),
        ("link", {"link/plan.txt", "link/mlruns/mlflow.db"}),  # leads to itself
        ("mlruns/spool", {"spool/notes/note.txt"}),
    ],
)
def test_a_folder_with_the_journals_in_it_is_logged_without_them(what, expected, mlruns, tmp_path):
    (tmp_path / "plan.txt").write_text("plan")
    (tmp_path / "link").symlink_to(tmp_path)
    (mlruns / "spool/notes").mkdir(parents=True)
    (mlruns / "spool/notes/note.txt").write_text("note")
    tracker = tracker_of(tmp_path)
    tracker.start(params={}, tags={})
    tracker.log_text("first", "first.txt")
    assert tracker.flush(60)
    tracker.log_artifact(what)
    tracker.finish("FINISHED")
    logged = mlruns / "artifacts" / tracker.run_id / "artifacts"
    found = {str(path.relative_to(logged)) for path in logged.rglob("*") if path.is_file()}
    expected = {"first.txt"} | {name.format(here=tmp_path.name) for name in expected}
    assert {path for path in found if not path.endswith(("-wal", "-shm", ".lock"))} == expected
    assert not (mlruns / "spool").joinpath(tracker.journal_folder.name).exists()


def test_text_that_is_not_utf8_arrives_readable(mlruns, mlflow_client, tmp_path):
    latin, shown = "caf\udce9", "caf\\udce9"  # what Python makes of the argument "café" in Latin-1
    tracker = tracker_of(tmp_path, run_name=latin, experiment_name=f"e {latin}")
    tracker.start(params={"name": f"{latin}\0", f"key {latin}": "x" * 300, "big" * 100 + latin: 1}, tags={"t": latin})
    tracker.log_params({"huge": 10**5000, f"long {latin}": latin * 2000})
    tracker.log_metrics({f"m {latin}": 1.0, "n" * 260 + latin: 2.0}, 1)
    tracker.describe(f"by {latin}")
    tracker.log_text(f"trace {latin} 😀", f"{latin}.txt")
    (tmp_path / "folder" / latin).mkdir(parents=True)
    for path in (tmp_path / f"{latin}.bin", tmp_path / "folder" / latin / f"{latin}.bin"):
        path.write_text("content")
    tracker.log_artifact(tmp_path / f"{latin}.bin")
    tracker.log_artifact(tmp_path / "folder")
    tracker.finish("FINISHED")
    assert not tracker.journal_folder.exists()
    run = mlflow_client.get_run(tracker.run_id)
    assert (run.info.run_name, run.info.status) == (shown, "FINISHED")
    assert mlflow_client.get_experiment(run.info.experiment_id).name == f"e {shown}"
    params = {"name": f"{shown}\\x00", "key caf_": "x" * 300, "huge": "int that cannot be written (ValueError)"}
    assert params.items() <= run.data.params.items()
    assert run.data.params["long caf_"].startswith(shown * 2)
    assert {"t": shown, "mlflow.note.content": f"by {shown}"}.items() <= run.data.tags.items()
    assert run.data.metrics["m caf_"] == 1.0
    folder = Path(mlflow_client.download_artifacts(run.info.run_id, "", str(tmp_path / "folder")))
    assert (folder / "caf_udce9.txt").read_text() == f"trace {shown} 😀"
    for name in ("caf_udce9.bin", "folder/caf_udce9/caf_udce9.bin"):
        assert (folder / name).read_text() == "content"


@pytest.mark.parametrize("given", [3, True, ["a"], b"a"])
@pytest.mark.parametrize("name", ["experiment_name", "run_name", "tracking_uri", "run_key"])
def test_names_that_are_no_texts_are_refused(name, given):
    told = re.escape(f"MLflowTracker: `{name}` must be a text or None; got {given!r}.")
    with pytest.raises(TypeError, match=told):
        MLflowTracker(**{name: given})


@pytest.mark.parametrize("key", ["", "a/b", "../x", "é", "a" * 500])
def test_keys_of_runs_that_name_no_folder_everywhere_are_refused(key):
    with pytest.raises(ValueError, match="MLflowTracker: `run_key` must be 1 to 100 letters of a to z and digits; got"):
        MLflowTracker(run_key=key)


@pytest.mark.parametrize("seconds", [-1.0, math.inf, math.nan, "5", None, True])
@pytest.mark.parametrize("name", ["finish_timeout_s", "outage_timeout_s", "request_timeout_s", "interval_s"])
def test_seconds_that_are_none_are_refused(name, seconds):
    with pytest.raises(ValueError, match=f"MLflowTracker: `{name}` must be a finite number, at least 0; got"):
        MLflowTracker(**{name: seconds})


@pytest.mark.long
def test_an_ascii_locale_takes_nothing_from_names_and_paths(mlruns, mlflow_client, tmp_path):
    """In such a folder MLflow would find no artifacts, did its process not speak UTF-8 whatever the locale.

    Nor could it be imported where warnings are errors, which its own are.
    """
    body = """
        import os, sys
        from rl8x.tracking import MLflowTracker
        from rl8x.output import say
        assert sys.getfilesystemencoding() == "ascii"
        tracker = MLflowTracker(run_name=sys.argv[1], interval_s=0.05, finish_timeout_s=300.0)
        tracker.start(params={"größe": "ä"}, tags={"müll": "ö"})
        tracker.log_metrics({"höhe": 1.0}, 1)
        tracker.log_text("grüße", "öl.txt")
        tracker.finish("FINISHED")
        say(tracker.whereabouts().lines()[0])
        say(tracker.run_id)
        """
    folder = tmp_path / "grün"
    folder.mkdir()
    shutil.move(mlruns, folder)
    locale = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PYTHONWARNINGS": "error"}
    (tmp_path / "script.py").write_text(textwrap.dedent(body), encoding="utf-8")
    command = [sys.executable, tmp_path / "script.py", "Läufer"]
    done = subprocess.run(command, cwd=folder, env={**os.environ, **locale}, capture_output=True, check=True)
    line, run_id = done.stdout.decode("ascii").splitlines()
    assert line.startswith("run L\\xe4ufer is in sqlite:")
    run = MlflowClient(f"sqlite:///{folder}/mlruns/mlflow.db").get_run(run_id)
    kept = folder / "mlruns" / "artifacts" / run_id / "artifacts"
    assert (run.info.run_name, run.info.artifact_uri) == ("Läufer", kept.as_uri())
    assert (run.data.params, run.data.tags["müll"], run.data.metrics) == ({"größe": "ä"}, "ö", {"höhe": 1.0})
    assert (kept / "öl.txt").read_text("utf-8") == "grüße"
