"""MLflow's page on the runs of an experiment: the link to it, and the order of its charts.

Without a link of this kind MLflow's UI opens an experiment on what it has for language models, and sorts charts by the
alphabet, counters first. The order is a saved view of MLflow's: a tag of the experiment, which the link names and the
page's menu of views lists.
"""

from __future__ import annotations

import base64
import json
import re
import zlib
from collections.abc import Iterable
from typing import Any, Final
from urllib.parse import urlencode, urlsplit

from rl8x.tracking.location import Location
from rl8x.tracking.store import MLflowStore, StoreDownError, StoreRefusedError

VIEW: Final = "rl8x"
VIEW_TAG: Final = f"mlflow.sharedViewState.{VIEW}"
# What a run is looked at for, above everything that its metrics are grouped into.
_FIRST: Final = (
    "eval/returns/mean",
    "eval/horizon_returns/mean",
    "episodes/returns/mean",
    "returns/mean",
)
_FIRST_SECTION: Final = "mean returns"
_WITHOUT_GROUP: Final = "Model metrics"  # MLflow's name of the section of metrics whose names have no `/`
# Sections by the beginning of their names; "" is every other, such as a callback's metrics.
_SHOWN: Final = ("", "losses", "monitors", "eval", "episodes", "returns", "rewards")
_FOLDED: Final = ("coefficients", "profiling", "memory", "env", "algorithm")


def runs_page(store: MLflowStore, base: str) -> str:
    """Return the link to the charts of the experiment that has the newest of our runs, and keep their order there.

    Args:
        store: Where the runs are.
        base: Address of MLflow's server.
    """
    experiments = {str(experiment.experiment_id): experiment for experiment in store.experiments()}
    runs = store.search(list(experiments), "tags.`rl8x.version` != ''", max_results=10) if experiments else []
    if not runs:
        return f"{base}/#/experiments?{urlencode({'workflowType': 'machine_learning'})}"
    experiment_id = runs[0].info.experiment_id
    query = {"workflowType": "machine_learning", "compareRunsMode": "CHART"}
    names = {name for run in runs if run.info.experiment_id == experiment_id for name in run.data.metrics}
    if _keep_view(store, experiment_id, experiments[experiment_id].tags.get(VIEW_TAG), view(names)):
        query["viewStateShareKey"] = VIEW
    return f"{base}/#/experiments/{experiment_id}/runs?{urlencode(query)}"


def server_address(location: Location, host: str, port: int) -> str:
    """Return the address of MLflow's page: of the server that keeps the runs, else of the one at `host` and `port`."""
    if location.remote:
        parts = urlsplit(location.uri)
        return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}".rstrip("/")
    name = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
    return f"http://{name}:{port}"


def _keep_view(store: MLflowStore, experiment_id: str, present: str | None, state: dict[str, Any]) -> bool:
    """Write the view, unless the user has saved another under its name; return whether there is one."""
    text = f"deflate;{base64.b64encode(zlib.compress(json.dumps(state).encode())).decode()}"
    # MLflow's page writes no `by`: where it is missing, the view is the user's own.
    envelope = json.dumps({"name": VIEW, "createdAt": 0, "updatedAt": 0, "by": VIEW, "state": text})
    if present is not None and (present == envelope or not _is_ours(present)):
        return True
    try:
        store.set_experiment_tag(experiment_id, VIEW_TAG, envelope)
    except (StoreDownError, StoreRefusedError):  # such as a server on which the user may only look
        return present is not None
    return True


def _is_ours(envelope: str) -> bool:
    try:
        return bool(json.loads(envelope).get("by") == VIEW)
    except (ValueError, AttributeError):
        return False


def view(names: Iterable[str]) -> dict[str, Any]:
    """Return the state of MLflow's page that shows metrics in the order in which they are of use.

    The mean returns of evaluations and episodes come first, then losses and monitors; counters, times and coefficients
    are folded, at the end. MLflow makes the charts of all other metrics, each in the section of its name up to the last
    `/`.

    Args:
        names: Metrics that the experiment has.
    """
    names = set(names)
    named = {name for name in names if re.fullmatch(r"eval/.+/(horizon_)?returns/mean", name)}  # evaluations with names
    first = [*_FIRST, *sorted(named)]
    found = {name.rpartition("/")[0] or _WITHOUT_GROUP for name in names - set(first)} - {"system"}
    sections = sorted(found, key=lambda name: (_rank(name), name.count("/"), name))
    return {
        "compareRunCharts": [_line_chart(name) for name in first],
        "compareRunSections": [_section(_FIRST_SECTION), *map(_section, sections)],
        "isAccordionReordered": True,
    }


def _rank(section: str) -> int:
    group = section.split("/")[0]
    order = (*_SHOWN, *_FOLDED)
    return order.index(group if group in order else "")


def _section(name: str) -> dict[str, Any]:
    shown = name.split("/")[0] not in _FOLDED
    return {
        "uuid": f"rl8x-{name}",
        "name": name,
        "display": shown,
        "isReordered": True,
        "deleted": False,
        "isGenerated": True,
    }


def _line_chart(metric: str) -> dict[str, Any]:
    """Return a chart with all that MLflow's page reads of one."""
    return {
        "uuid": f"rl8x-{metric}",
        "type": "LINE",
        "metricKey": metric,
        "displayName": metric.removesuffix("/mean"),
        "metricSectionId": f"rl8x-{_FIRST_SECTION}",
        "deleted": False,
        "isGenerated": True,
        "runsCountToCompare": 10,
        "lineSmoothness": 0,
        "xAxisKey": "step",
        "xAxisScaleType": "linear",
        "selectedXAxisMetricKey": "",
        "yAxisKey": "metric",
        "yAxisExpressions": [],
        "scaleType": "linear",
        "range": {},
        "ignoreOutliers": False,
        "useGlobalXaxisKey": True,
        "useGlobalLineSmoothing": True,
    }
