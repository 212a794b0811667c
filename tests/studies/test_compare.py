"""Comparisons against the runs that were logged, in a local database and on MLflow's server."""

import math
import re
import threading

import numpy as np
import pandas as pd
import pytest
from tests.studies.synthetic import evaluations, write_study

from rl8x.checkpoint import files
from rl8x.studies.compare import Comparison, compare, differing, grouped_runs
from rl8x.studies.report import find_study
from rl8x.tracking import TrackingError
from rl8x.tracking.location import locate
from rl8x.tracking.private import RunRecord
from rl8x.tracking.repeats import Point
from rl8x.tracking.runs import RunReader
from rl8x.tracking.store import MLflowStore, NewRun


def record(name, metrics=(), **params):
    return RunRecord(f"id-{name}", name, "FINISHED", 0, params, dict(metrics), {})


STEPS = {"a": (0, 10, 20), "b": (5, 15, 20), "c": (0, 20)}
RETURNS = {"a": (0.0, 30.0, 20.0), "b": (10.0, 20.0, 40.0), "c": (5.0, float("nan"))}
LR = {"a": "0.01", "b": "0.01", "c": "0.001"}


def fill(store, experiment="poles"):
    """Log three runs with params, metrics, and a parent; returns their IDs by name."""
    ids = {"parent": store.create_run(NewRun("9", experiment, None, "parent", 1))}
    for number, name in enumerate(STEPS):
        ids[name] = run_id = store.create_run(NewRun(f"spool{number}", experiment, None, name, 2 + number))
        store.set_tags(run_id, {"mlflow.parentRunId": ids["parent"]})
        store.log_params(run_id, {"lr": LR[name], "env": "CartPole", "seed": str(number)})
        points = [
            Point("returns/mean", value, 1 + at, at) for at, value in zip(STEPS[name], RETURNS[name], strict=True)
        ]
        store.log_points(run_id, [*points, Point("env/steps", 20.0, 99, 20), Point("losses/total", 1.0, 99, 20)])
    return ids


@pytest.fixture
def store(mlruns):
    return MLflowStore(locate(None))


def test_a_row_for_each_run_with_what_differs_and_last_and_best_values(store):
    ids = fill(store)
    made = compare(["b", ids["a"], "c"])
    frame = made.frame.set_index("name")
    assert list(frame.index) == ["b", "a", "c"]
    assert [name for name in frame if name.startswith("params.")] == ["params.lr", "params.seed"]
    assert frame["params.lr"].to_dict() == LR
    assert made.metrics == ("returns/mean",)
    assert frame["returns/mean"].to_dict() == {"a": 20.0, "b": 40.0, "c": 5.0}  # the last finite value
    assert frame["best/returns/mean"].to_dict() == {"a": 30.0, "b": 40.0, "c": 5.0}
    assert frame["best_step/returns/mean"].to_dict() == {"a": 10.0, "b": 20.0, "c": 0.0}
    assert compare(["a"], minimize=True).frame["best/returns/mean"].tolist() == [0.0]
    assert made.clock == "transitions of training"


def test_the_best_of_a_thinned_run_is_that_of_all_its_rows(store):
    run_id = store.create_run(NewRun("1", "poles", None, "long", 1))
    shown = [Point("eval/returns/mean", value, 1 + at, at) for at, value in ((10, 3.0), (30, 5.0))]
    store.log_points(run_id, [*shown, Point("best/eval/returns/mean", 9.0, 99, 40)])
    store.log_points(run_id, [Point("best_step/eval/returns/mean", 20.0, 99, 40)])
    names = ("eval/returns/mean", "best/eval/returns/mean", "best_step/eval/returns/mean")
    assert compare(["long"]).frame.loc[0, [*names]].tolist() == [5.0, 9.0, 20.0]
    assert compare(["long"], minimize=True).frame.loc[0, [*names]].tolist() == [5.0, 3.0, 10.0]


@pytest.mark.parametrize(
    ("params", "shown"),
    [
        # What the model has, where all runs tell it; else what was given.
        ([{"model.sizes": "(256,)"}, {"model.sizes": "[8]", "model_config.sizes": "[8]"}], ["model.sizes"]),
        ([{}, {"model_config.sizes": "[8]"}], ["model_config.sizes"]),
        ([{"model.sizes": "[9]"}, {"model_config.sizes": "[8]"}], ["model.sizes", "model_config.sizes"]),
        ([{"env_config.mass": "1"}, {"env_config.mass": "2"}], ["env_config.mass"]),
        ([{"model.num_parameters": "1", "lr": "1"}, {"model.num_parameters": "2", "lr": "2"}], ["lr"]),
        ([{"execution.compiled_from": "16"}, {"execution.compiled_from": "32"}], ["execution.compiled_from"]),
    ],
)
def test_of_params_that_tell_the_same_one_is_shown(params, shown):
    assert differing([record("run", **own) for own in params]) == shown


def test_groups_average_their_runs_on_common_steps(store):
    fill(store)
    made = compare(["parent"], group_by="algorithm_config.lr")
    assert list(made.groups) == ["lr=0.001", "lr=0.01"]
    assert [[run.name for run in runs] for runs in made.groups.values()] == [["c"], ["a", "b"]]
    curve = made.curves("returns/mean")["lr=0.01"]
    assert curve.steps.tolist() == [5, 10, 15, 20]  # from where both have begun
    assert curve.mean.tolist() == [(15 + 10) / 2, (30 + 15) / 2, (25 + 20) / 2, (20 + 40) / 2]
    assert (curve.low <= curve.mean).all()
    assert curve.high.tolist() == [15, 30, 25, 40]  # of two runs the ends of 95% are the runs themselves
    grouped = made.grouped.set_index("group")
    assert grouped["returns/mean"].to_dict() == {"lr=0.01": 30.0, "lr=0.001": 5.0}
    assert grouped["best/returns/mean"].to_dict() == {"lr=0.01": 35.0, "lr=0.001": 5.0}
    assert np.isnan(grouped.loc["lr=0.001", "returns/mean_low"])
    assert "A group of one run has no interval." in str(made)
    finer = compare(["parent"], group_by="lr", level=0.999)
    assert "Intervals: 99.9%, " in str(finer)
    assert "bands 99.9% intervals" in finer.drawings[0].caption


def test_runs_of_other_programs_are_read_as_mlflow_shows_them(store):
    run_id = store.create_run(NewRun("9", "others", None, "odd", 1))
    loss, size = [(5.0, 300, -1), (9_999.7, 200, 2)], [(1e300, 0, 1), (math.inf, 0, 2), (-math.inf, 0, 3)]
    store.log_points(run_id, [Point("loss", *point) for point in loss])  # by a clock that goes back
    store.log_points(run_id, [Point("size", *point) for point in size])
    made = compare(["odd"], metrics=["loss", "size"])
    assert made.frame.loc[0, ["loss", "best_step/loss", "size"]].tolist() == [9_999.7, 2, 1e300]
    assert made.cells()[1] == ["odd", "running", "2", "10000", "10000", "2", "1e+300", "1e+300", "1"]
    of_store = [(point.value, point.timestamp, point.step) for point in store.points(run_id, "size")]
    assert of_store == size
    assert RunReader().run("odd").metrics == {"loss": 9_999.7, "size": -math.inf}


def test_a_studys_folder_stands_for_its_parent(store, tmp_path):
    ids = fill(store)
    (tmp_path / "begun").mkdir()  # it need not have a table yet
    (tmp_path / "begun" / "study.json").write_text('{"definition": {}, "run_key": "9"}')
    assert [run.name for run in compare([tmp_path / "begun"]).runs] == ["a", "b", "c"]
    store.set_tags(ids["parent"], {"rl8x.study": "poles"})
    with pytest.raises(ValueError, match="the study 'parent' has no results yet"):
        find_study("parent")
    with pytest.raises(ValueError, match=r"the run 'a' has no artifact evaluations\.json: it is no study's parent run"):
        find_study("a")
    with pytest.raises(ValueError, match=r"the study in .*untracked has no runs in MLflow"):
        compare([write_study(tmp_path / "untracked", evaluations(seeds=1, grid={"length": [0.5, 1.0]}))])


def test_what_is_written_is_what_is_shown(store, tmp_path):
    fill(store)
    made = compare(["a", "b"], metrics=["returns/mean", "losses/total"], group_by="lr", output=tmp_path / "out")
    pngs = {"curve-returns-mean.png", "curve-losses-total.png"}
    tables = {path.name: pd.read_csv(path) for path in (tmp_path / "out").glob("*.csv")}
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"compare.html", *pngs, *tables}
    assert tables.keys() == {"runs.csv", "groups.csv", "curves.csv"}
    assert tables["runs.csv"]["best/returns/mean"].tolist() == [30, 40]
    mine = tables["curves.csv"].query("metric == 'returns/mean'")
    assert mine["mean"].tolist() == made.curves("returns/mean")["lr=0.01"].mean.tolist()
    page = (tmp_path / "out" / "compare.html").read_text()
    assert "<script" not in page
    assert "http" not in re.sub(r"base64,[A-Za-z0-9+/=]+", "", page)
    assert page.count("data:image/png") == 4


def test_runs_are_found_by_experiment_parent_and_checkpoints(store, tmp_path, monkeypatch):
    ids = fill(store)
    fill(store, "others")
    of_experiment = compare(experiment="poles")
    assert [run.id for run in of_experiment.runs] == [ids["a"], ids["b"], ids["c"]]  # the parent is no training
    assert [run.id for run in compare([ids["parent"], ids["b"]]).runs] == [ids["a"], ids["b"], ids["c"]]
    folder = tmp_path
    (folder / "checkpoint.json").touch()
    monkeypatch.setattr(files, "describe", lambda path: {"run": {"id": ids["b"]}})
    assert [run.id for run in compare([folder]).runs] == [ids["b"]]
    monkeypatch.setattr(files, "describe", lambda path: {"run": {"id": None, "handle": "journal-nothing"}})
    with pytest.raises(ValueError, match="has checkpoints of a run that is not in MLflow"):
        compare([folder])


def test_runs_of_several_stores_are_refused_where_one_store_would_be_asked_for_all(store, tmp_path):
    fill(store)
    elsewhere = tmp_path / "elsewhere" / "mlruns" / "checkpoints" / "a"
    elsewhere.mkdir(parents=True)
    (tmp_path / "elsewhere" / "mlruns" / "mlflow.db").touch()
    for given in ({"runs": ["a", elsewhere]}, {"runs": elsewhere, "experiment": "poles"}):
        with pytest.raises(ValueError, match=r"several stores, .*mlflow\.db and .*mlflow\.db: compare those of one"):
            compare(**given)


def test_a_run_that_went_on_with_another_value_of_a_param_is_not_like_the_others(store):
    store.set_tags(fill(store)["b"], {"rl8x.param_change.lr": "0.5"})
    made = compare(["a", "b"], group_by="lr")
    assert made.frame["params.lr"].tolist() == ["0.01", "0.01, later 0.5"]
    assert list(made.groups) == ["lr=0.01", "lr=0.01, later 0.5"]


@pytest.fixture
def server(mlruns, monkeypatch):
    """MLflow's own server on the database of `mlruns`, in this process."""
    import mlflow.server
    from mlflow.server import handlers
    from mlflow.tracking._tracking_service import utils
    from werkzeug.serving import make_server

    monkeypatch.setattr(utils, "_tracking_uri", None)  # both are set by the server, for its whole process
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "")
    monkeypatch.setenv(mlflow.server.BACKEND_STORE_URI_ENV_VAR, f"sqlite:///{mlruns}/mlflow.db")
    monkeypatch.setenv(mlflow.server.ARTIFACT_ROOT_ENV_VAR, str(mlruns / "artifacts"))
    monkeypatch.setattr(handlers, "_tracking_store", None)
    with make_server("127.0.0.1", 0, mlflow.server.app, threaded=True) as served:
        thread = threading.Thread(target=served.serve_forever, args=[0.01])
        thread.start()
        yield f"http://127.0.0.1:{served.server_port}"
        served.shutdown()
        thread.join()


def test_a_server_gives_the_same_comparison(store, server, mlflow_client):
    ids = fill(store)
    local, remote = compare(["parent"], group_by="lr"), compare(["parent"], group_by="lr", tracking_uri=server)
    pd.testing.assert_frame_equal(local.frame, remote.frame)
    pd.testing.assert_frame_equal(local.grouped, remote.grouped)
    assert local.cells() == remote.cells()
    assert [run.id for run in compare(experiment="poles", tracking_uri=server).runs] == [run.id for run in local.runs]
    with pytest.raises(TrackingError, match=r"there is no run 'paren' in http://127.*; did you mean parent"):
        compare(["paren"], tracking_uri=server)
    mlflow_client.delete_run(ids["c"])
    for uri in (None, server):
        assert [run.name for run in compare(["parent"], tracking_uri=uri).runs] == ["a", "b"]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"runs": ["paren"]}, r"there is no run 'paren' in .*; did you mean parent"),
        ({"runs": []}, "no run is named: give names or IDs of runs, folders of checkpoints, or an experiment"),
        ({"experiment": "sticks"}, "there is no experiment 'sticks' in .*; there are Default, poles"),
        (
            {"runs": ["a"], "metrics": ["rollout/ep_rew_mean"]},
            r"no run has the metric .*It is 'returns/mean' here",
        ),
        ({"runs": ["parent"], "group_by": "lrr"}, r"no run has the param 'lrr'; those that differ: lr, seed"),
        ({"runs": ["a", "empty"]}, "there is no metric that all of the runs have; without any: empty"),
    ],
)
def test_bad_input_gets_one_line(store, arguments, says):
    fill(store)
    store.create_run(NewRun("7", "poles", None, "empty", 7))
    with pytest.raises(ValueError, match=says):
        compare(**arguments)


def test_groups_are_in_the_order_of_their_numbers_and_what_is_missing_is_last():
    runs = [record("a", lr="1e-2"), record("b"), record("c", lr="auto"), record("d", lr="9e-3"), record("e", lr="1e-2")]
    groups = grouped_runs(runs, ["lr"])
    assert list(groups) == ["lr=9e-3", "lr=1e-2", "lr=auto", "lr=None"]
    assert [run.name for run in groups["lr=1e-2"]] == ["a", "e"]
    alike = grouped_runs([record("a"), record("a")._replace(id="other")], [])
    assert list(alike) == ["a (id-a)", "a (other)"]


def test_long_values_that_differ_in_their_middle_are_two_groups():
    sizes = [
        f"{{'hidden_sizes': [64, 64], 'activation': '{name}', 'shared': True, 'layer_norm': True}}"
        for name in ("tanh", "elu", "elu")
    ]
    groups = grouped_runs([record(name, model=size) for name, size in zip("abc", sizes, strict=True)], ["model"])
    assert [[run.name for run in runs] for runs in groups.values()] == [["b", "c"], ["a"]]
    assert all(len(label) < len(f"model={sizes[0]}") for label in groups)


ONLINE, OFFLINE = {"env/steps": 64.0, "algorithm/updates": 4.0}, {"env/steps": 0.0, "algorithm/updates": 4.0}


@pytest.mark.parametrize(
    ("metrics", "clock"),
    [
        ([ONLINE, ONLINE], "transitions of training"),
        ([OFFLINE, OFFLINE], "updates"),  # rows of what learns from data have 0 transitions
        ([ONLINE, OFFLINE], "clock of the algorithm"),
        ([{"loss": 1.0}], "clock of the algorithm"),
    ],
)
def test_the_clock_is_that_of_all_runs(metrics, clock):
    points = pd.DataFrame(columns=["run_id", "metric", "step", "value"])
    assert Comparison(tuple(record("a", each) for each in metrics), (), points, (), {}).clock == clock
