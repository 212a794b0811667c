"""MLflow's pages on the runs of a folder, in a browser: opened, read, and photographed."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import psutil
from mlflow import MlflowClient
from tests.browser.chromium import Browser
from tests.ports import free_port

LEARNING_RATES: Final = {"fast": "5e-3", "slow": "5e-4"}


@contextlib.contextmanager
def served(folder: Path) -> Iterator[str]:
    """Have `rl8x ui` show the runs of a folder for as long as the context lasts; yields its address."""
    port = free_port()
    command = [sys.executable, "-m", "rl8x.cli.main", "ui", "--no-browser", "--port", str(port)]
    environment = {**os.environ, "MLFLOW_DISABLE_TELEMETRY": "true"}
    address = f"http://127.0.0.1:{port}"
    with open(folder / "ui.log", "wb") as log:
        process = subprocess.Popen(command, cwd=folder, env=environment, stdout=log, stderr=log)
        try:
            for _ in range(3000):
                if process.poll() is not None:
                    raise RuntimeError(f"rl8x ui has ended: {(folder / 'ui.log').read_text()}")
                with contextlib.suppress(OSError), urllib.request.urlopen(f"{address}/health", timeout=5):
                    break
                time.sleep(0.1)
            else:
                raise RuntimeError(f"rl8x ui does not answer: {(folder / 'ui.log').read_text()}")
            yield address
        finally:
            end(process)


def end(process: subprocess.Popen[bytes]) -> None:
    family = [*psutil.Process(process.pid).children(recursive=True), psutil.Process(process.pid)]
    for each in family:
        with contextlib.suppress(psutil.NoSuchProcess):
            each.terminate()
    _, left = psutil.wait_procs(family, 10)
    for each in left:
        each.kill()
    process.wait()


# MLflow's page remembers in the browser that its panel for questions is closed, and that it need not open by itself.
_NO_ASSISTANT: Final = """
localStorage.setItem("mlflow.assistant.fab.autoOpenedOnFirstLoad_v1", "true");
localStorage.setItem("mlflow.assistant.panelOpen_v1", "false");
"""


class Pages:
    """MLflow's pages of a run, as its client gives it, and of the run's experiment, in a browser.

    Each method opens one and waits for texts; returns what the page shows. Charts and lists are of all runs, in the
    view of `rl8x ui`; `metrics` are the charts of the run alone, `grouped` those by a param in the page's own menu.
    """

    def __init__(self, browser: Browser, address: str, run: Any) -> None:
        self.browser = browser
        self._address = address
        self._experiment = f"{address}/#/experiments/{run.info.experiment_id}"
        self._run = f"{self._experiment}/runs/{run.info.run_id}"
        browser.open(f"{address}/version")
        browser.wait_for(".")
        browser.run(_NO_ASSISTANT)

    def _open(self, address: str, query: str = "") -> None:
        """Open a page as it is for training rather than for language models, without its panel for questions."""
        # The page of a comparison reads the first of the query by its question mark.
        self.browser.open(f"{address}?{query}&workflowType=machine_learning")
        self.browser.wait_for("Model training")

    def overview(self, *texts: str) -> str:
        self._open(self._run)
        return self.browser.wait_for(*texts)

    def artifact(self, path: str, *texts: str) -> str:
        self._open(f"{self._run}/artifacts/{path}")
        return self.browser.wait_for(path.rpartition("/")[2], *texts)

    def grouped(self, param: str, *texts: str) -> str:
        self.charts("mean returns")
        self.browser.click("Group by")
        self.browser.click(param)
        return self.browser.wait_for(*texts)

    def listed(self, *texts: str) -> str:
        self._open(f"{self._experiment}/runs", "compareRunsMode=TABLE&viewStateShareKey=rl8x")
        return self.browser.wait_for("matching runs", *texts)

    def charts(self, *texts: str) -> str:
        self._open(f"{self._experiment}/runs", "compareRunsMode=CHART&viewStateShareKey=rl8x")
        return self.browser.wait_for("matching runs", *texts)

    def metrics(self, *texts: str) -> str:
        self._open(f"{self._run}/model-metrics")
        return self.browser.wait_for(*texts)

    def compared(self, run_ids: Sequence[str], *texts: str) -> str:
        query = {"runs": [*run_ids], "experiments": [self._experiment.rpartition("/")[2]]}
        chosen = "&".join(f"{name}={urllib.parse.quote(json.dumps(value))}" for name, value in query.items())
        self._open(f"{self._address}/#/compare-runs", chosen)
        return self.browser.wait_for(*texts)

    def model(self, model_id: str, *texts: str) -> str:
        self._open(f"{self._experiment}/models/{model_id}")
        return self.browser.wait_for(*texts)


def arguments(name: str, *, steps: int, every: int, films: int, settings: Sequence[str]) -> list[str]:
    """Return the words after `rl8x` that train a run of `LEARNING_RATES`, evaluated and filmed every so many steps."""
    asked = f"--run-name {name} --lr {LEARNING_RATES[name]} --num-threads 1 --device cpu --seed 0 --log-models"
    asked += f" --max-steps {steps} --steps-per-eval {every} --evals-per-film {films}"
    return ["train", "CartPole", *asked.split(), "checkpoints.best=eval/returns/mean", *settings]


def runs_in(folder: Path) -> tuple[Mapping[str, Any], Mapping[str, list[Any]]]:
    """Return the runs of a folder by name, as MLflow's client gives them, and their models, the best rank first."""
    client = MlflowClient(f"sqlite:///{folder}/mlruns/mlflow.db")
    experiments = [each.experiment_id for each in client.search_experiments()]
    runs = {run.info.run_name: run for run in client.search_runs(experiments)}
    order = [{"field_name": "metrics.eval/returns/mean", "ascending": False}]
    models = client.search_logged_models(experiments, order_by=order)
    return runs, {
        name: [each for each in models if each.source_run_id == run.info.run_id] for name, run in runs.items()
    }


def film_of(folder: Path, run: Any) -> str:
    client = MlflowClient(f"sqlite:///{folder}/mlruns/mlflow.db")
    return str(max(each.path for each in client.list_artifacts(run.info.run_id, "films")))
