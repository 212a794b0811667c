"""Train CartPole twice and photograph what MLflow's page has of it: list, description, charts, comparison, model, film.

    python -m benchmarks.run_figures                # in a temporary folder
    python -m benchmarks.run_figures --folder DIR   # what is trained there is not trained again

Writes docs/images/mlflow-*.png; needs a Chromium.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from benchmarks.browser import Browser, find_chromium
from benchmarks.mlflow_pages import Pages, served

IMAGES: Final = Path(__file__).parents[1] / "docs" / "images"
SETTINGS: Final = "--num-envs 64 --horizon 32 --gamma 0.99 --sgd-minibatch-size 512 --max-grad-norm 0.5"
LEARNING_RATES: Final = {"fast": "5e-3", "slow": "5e-4"}
# A page without a mouse shows the charts' tool bars, over the data, which else come with the mouse.
_NO_TOOL_BARS: Final = "document.head.insertAdjacentHTML('beforeend', '<style>.modebar { display: none }</style>')"


def arguments(name: str, *, steps: int, every: int, films: int, settings: Sequence[str]) -> list[str]:
    """Return the words after `rl8x` that train a run, with models and films.

    Args:
        name: The run's, of `LEARNING_RATES`.
        steps: Of the trainer.
        every: Steps between evaluations.
        films: Evaluations between films.
        settings: Further words.
    """
    asked = f"--run-name {name} --lr {LEARNING_RATES[name]} --num-threads 1 --device cpu --seed 0 --log-models"
    asked += f" --max-steps {steps} --steps-per-eval {every} --evals-per-film {films}"
    return ["train", "CartPole", *asked.split(), "checkpoints.best=eval/returns/mean", *settings]


def runs_in(folder: Path) -> tuple[Mapping[str, Any], Mapping[str, list[Any]]]:
    """Return the runs of a folder by name, as MLflow's client gives them, and their models, the best rank first."""
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{folder}/mlruns/mlflow.db")
    experiments = [each.experiment_id for each in client.search_experiments()]
    runs = {run.info.run_name: run for run in client.search_runs(experiments)}
    order = [{"field_name": "metrics.eval/returns/mean", "ascending": False}]
    models = client.search_logged_models(experiments, order_by=order)
    return runs, {
        name: [each for each in models if each.source_run_id == run.info.run_id] for name, run in runs.items()
    }


def film_of(folder: Path, run: Any) -> str:
    """Return the path of the last film among a run's artifacts."""
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{folder}/mlruns/mlflow.db")
    return str(max(each.path for each in client.list_artifacts(run.info.run_id, "films")))


def photograph(folder: Path, images: Path) -> list[Path]:
    """Take the screenshots; returns their paths."""
    runs, models = runs_in(folder)
    run, made = runs["fast"], []

    def keep(browser: Browser, name: str) -> None:
        browser.settle()
        browser.run(_NO_TOOL_BARS)
        made.append(browser.screenshot(images / f"mlflow-{name}.png"))

    with served(folder) as address, Browser(1360, 860) as browser:
        pages = Pages(browser, address, run)
        pages.listed(*runs)
        keep(browser, "runs")
        pages.overview("CartPole")
        browser.click("Show more")
        browser.wait_for("rl8x play")
        keep(browser, "run")
        pages.charts("mean returns")
        keep(browser, "charts")
        pages.compared([each.info.run_id for each in runs.values()], *runs)
        keep(browser, "compare")
        pages.model(models["fast"][0].model_id, "eval/returns/mean")
        keep(browser, "model")
        pages.artifact(film_of(folder, run))
        keep(browser, "film")
    return made


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="working directory of the runs; by default a temporary one")
    options = parser.parse_args(argv)
    if find_chromium() is None:
        print("there is no chromium, chromium-browser or google-chrome", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as temporary:
        folder = (options.folder or Path(temporary)).absolute()
        folder.mkdir(parents=True, exist_ok=True)
        os.chdir(folder)
        if not (folder / "mlruns" / "mlflow.db").exists():
            for name in LEARNING_RATES:
                words = arguments(name, steps=32, every=4, films=4, settings=SETTINGS.split())
                subprocess.run([Path(sys.executable).with_name("rl8x"), *words], check=True)
        for path in photograph(folder, IMAGES):
            print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
