import base64
import json
import zlib

import pytest

from rl8x.tracking import runs_link
from rl8x.tracking.location import Location, locate
from rl8x.tracking.protocol import StoreDownError
from rl8x.tracking.store import MLflowStore
from rl8x.tracking.ui import VIEW_TAG, server_address, view

METRICS = (
    *("algorithm/steps", "env/steps", "profiling/collect_ms", "losses/policy", "success/rate", "loss"),
    *("eval/long pole/returns/mean", "eval/long pole/returns/std", "eval/returns/mean", "eval/returns/std"),
)


@pytest.fixture
def run_in(mlflow_client):
    """Make a run of ours in an experiment, at a time."""

    def make(experiment, time, tags=(("rl8x.version", "0.1"),)):
        found = mlflow_client.get_experiment_by_name(experiment)
        number = mlflow_client.create_experiment(experiment) if found is None else found.experiment_id
        run = mlflow_client.create_run(number, start_time=time, tags=dict(tags))
        for name in METRICS:
            mlflow_client.log_metric(run.info.run_id, name, 1.0, step=5)
        return number

    return make


def link(**options):
    return runs_link(None, "127.0.0.1", 5001, **options)


def sections(tag):
    envelope = json.loads(tag)
    kind, _, text = envelope["state"].partition(";")
    assert (envelope["name"], kind) == ("rl8x", "deflate")
    state = json.loads(zlib.decompress(base64.b64decode(text)))
    return state, [section["name"] for section in state["compareRunSections"]]


def test_the_link_leads_to_the_experiment_of_our_newest_run_and_its_view(run_in, mlflow_client):
    run_in("older", 1000)
    number = run_in("newer", 2000)
    run_in("of another program", 3000, tags=())
    assert link() == (
        f"http://127.0.0.1:5001/#/experiments/{number}/runs"
        "?workflowType=machine_learning&compareRunsMode=CHART&viewStateShareKey=rl8x",
        False,
    )
    state, names = sections(mlflow_client.get_experiment(number).tags[VIEW_TAG])
    charts = [chart["metricKey"] for chart in state["compareRunCharts"]]
    assert (charts[0], charts[2], charts[-1]) == (
        "eval/returns/mean",
        "episodes/returns/mean",
        "eval/long pole/returns/mean",
    )
    shown = ["mean returns", "Model metrics", "success", "losses", "eval/returns", "eval/long pole/returns"]
    assert names == [*shown, "profiling", "env", "algorithm"]
    assert [section["display"] for section in state["compareRunSections"]] == [True] * 6 + [False] * 3
    for name in ("older", "of another program"):
        assert VIEW_TAG not in mlflow_client.get_experiment_by_name(name).tags


def test_a_view_of_ours_is_renewed_and_one_of_the_users_is_kept(run_in, mlflow_client):
    number = run_in("one", 1000)
    link()
    run = mlflow_client.create_run(number, tags={"rl8x.version": "0.1"})
    mlflow_client.log_metric(run.info.run_id, "prices/best", 1.0)
    link()
    assert "prices" in sections(mlflow_client.get_experiment(number).tags[VIEW_TAG])[1]
    mine = json.dumps({"name": "rl8x", "createdAt": 1, "updatedAt": 2, "state": "{}"})  # as MLflow's page writes it
    mlflow_client.set_experiment_tag(number, VIEW_TAG, mine)
    assert link()[0].endswith("viewStateShareKey=rl8x")
    assert mlflow_client.get_experiment(number).tags[VIEW_TAG] == mine


def test_without_runs_the_link_leads_to_the_experiments(mlruns):
    assert link() == ("http://127.0.0.1:5001/#/experiments?workflowType=machine_learning", False)


def test_who_may_only_look_gets_a_link_without_the_view(run_in, monkeypatch):
    number = run_in("one", 1000)

    def refuse(*_):
        raise StoreDownError("PERMISSION_DENIED")

    monkeypatch.setattr(MLflowStore, "set_experiment_tag", refuse)
    assert link()[0].endswith(f"/{number}/runs?workflowType=machine_learning&compareRunsMode=CHART")


def test_the_list_of_runs_shows_what_a_run_was_and_came_to():
    columns = view(METRICS)["selectedColumns"]
    assert columns == ["tags.`rl8x.task`", "tags.`rl8x.algorithm`", "tags.`rl8x.result`"]  # as MLflow's page has them


def logged(client, number, rows):
    run = client.create_run(number, tags={"rl8x.version": "0.1"})
    for step in range(2):
        for name, values in rows.items():
            client.log_metric(run.info.run_id, name, values[step], step=step)


def test_sections_of_constants_and_of_results_are_folded_and_no_constant_is_a_chart(mlflow_client):
    number = mlflow_client.create_experiment("one")
    rows = {"returns/mean": (32, 32), "returns/std": (0, 0), "rewards/mean": (1, 1), "rewards/std": (0, 0.5)}
    rows |= {"eval/rewards/mean": (1, 1), "eval/returns/mean": (9, 500), "episodes/lengths/max": (5, 5)}
    rows |= {f"{group}/eval/returns/mean": (500, 500) for group in ("best", "final")} | {"losses/value": (2, 2)}
    logged(mlflow_client, number, rows)
    logged(mlflow_client, number, rows | {"episodes/lengths/max": (6, 6), "losses/value": (3, 2)})
    link()
    state, names = sections(mlflow_client.get_experiment(number).tags[VIEW_TAG])
    display = dict(zip(names, [section["display"] for section in state["compareRunSections"]], strict=True))
    assert [name for name, shown in display.items() if shown] == [
        "mean returns",
        "losses",
        "episodes/lengths",
        "rewards",
    ]
    folded = ["eval/rewards", "returns", "final/eval/returns", "best/eval/returns"]
    assert names[4:] == folded  # at the end
    assert "returns/mean" not in [chart["metricKey"] for chart in state["compareRunCharts"]]


def test_one_row_says_of_no_metric_that_it_is_constant(run_in, mlflow_client):
    number = run_in("one", 1000)
    link()
    state, _ = sections(mlflow_client.get_experiment(number).tags[VIEW_TAG])
    assert state["compareRunSections"][3]["display"]


def test_every_section_and_chart_has_an_identity_of_its_own():
    state = view([*METRICS, "a/b/c", "system/cpu"])
    parts = state["compareRunSections"] + state["compareRunCharts"]
    assert len({part["uuid"] for part in parts}) == len(parts)
    assert {chart["metricSectionId"] for chart in state["compareRunCharts"]} == {state["compareRunSections"][0]["uuid"]}


@pytest.mark.parametrize(
    ("uri", "host", "address"),
    [
        ("sqlite:///x.db", "0.0.0.0", "http://127.0.0.1:5001"),
        ("sqlite:///x.db", "::1", "http://[::1]:5001"),
        ("sqlite:///x.db", "box", "http://box:5001"),
        ("https://me:secret@server/mlflow/", "127.0.0.1", "https://server/mlflow"),
        ("https://me:s@cret@server/?token=abcd", "127.0.0.1", "https://server"),
    ],
)
def test_the_address(uri, host, address):
    location = locate(uri) if uri.startswith("sqlite") else Location(uri)
    assert server_address(location, host, 5001) == address
