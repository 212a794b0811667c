"""Run the example study, and make of it what docs/studies.md shows: figures, a table, screenshots of MLflow's page.

    python -m benchmarks.study_figures                # examples/study.yaml in a folder of its own, minutes
    python -m benchmarks.study_figures --folder DIR   # what is done of it there is not done again

Writes docs/images/study-*.png, benchmarks/results/study.json, and the table between the marks of docs/studies.md; where
there is a Chromium, docs/images/mlflow-study-*.png too.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from benchmarks.browser import Browser, find_chromium
from benchmarks.learning import machine, put
from benchmarks.mlflow_pages import Pages, served

ROOT: Final = Path(__file__).parents[1]
STUDY: Final = ROOT / "examples" / "study.yaml"
RESULTS: Final = ROOT / "benchmarks" / "results" / "study.json"
IMAGES: Final = ROOT / "docs" / "images"
FIGURES: Final = {"heat-maps": "study-heat-maps", "curve-length": "study-curve", "profiles": "study-profiles"}
CELL_PARAMS: Final = ("study.training", "study.seed")


def written_rows(report: Any) -> dict[str, Any]:
    """Return what a report says as plain data, for the repository."""
    from rl8x.studies.statistics import cells_of

    return {
        "study": report.study.definition,
        "table": cells_of(report.summary),
        "notes": list(report.summary.notes),
        "rows": json.loads(report.frame.to_json(orient="records", double_precision=10)),
        "machine": machine(),
    }


def table(document: Mapping[str, Any]) -> str:
    """Lay a report's table out in Markdown, a line for each statistic, since pages are narrow."""
    heads, *groups = document["table"]
    lines = [f"| | {' | '.join(group[0] for group in groups)} |", "|---" * (len(groups) + 1) + "|"]
    for column, head in enumerate(heads):
        if column > 0:
            lines.append(f"| {head} | {' | '.join(group[column] for group in groups)} |")
    return "\n".join(lines)


def photograph(folder: Path, parent: Any, group_texts: tuple[str, ...], images: Path) -> list[Path]:
    """Take the screenshots of a study's pages in MLflow; returns their paths."""
    with served(folder) as address, Browser(1360, 860) as browser:
        pages = Pages(browser, address, parent)
        pages.overview("Metrics", "result/returns/mean")
        browser.settle()
        made = [browser.screenshot(images / "mlflow-study-parent.png")]
        pages.artifact("evaluations.json", "training", "test.length")
        browser.settle()
        made.append(browser.screenshot(images / "mlflow-study-table.png"))
        pages.artifact("report/heat-maps.png", "report.html")
        browser.settle()
        made.append(browser.screenshot(images / "mlflow-study-report.png"))
        pages.grouped(CELL_PARAMS[0], *group_texts)
        browser.settle()
        made.append(browser.screenshot(images / "mlflow-study-compare.png"))
    return made


def parent_of(folder: Path, name: str) -> Any:
    """Return the parent run of a study, as MLflow's client gives it."""
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{folder}/mlruns/mlflow.db")
    experiments = [each.experiment_id for each in client.search_experiments()]
    runs = client.search_runs(experiments, f"tags.`rl8x.study` = '{name}'")
    return next(run for run in runs if "mlflow.parentRunId" not in run.data.tags)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="working directory of the study; by default a temporary one")
    parser.add_argument("--jobs", type=int, default=2)
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as temporary:
        folder = (options.folder or Path(temporary)).absolute()
        folder.mkdir(parents=True, exist_ok=True)
        os.chdir(folder)
        from rl8x.studies import Study, StudyConfig

        study = Study.from_config(StudyConfig.from_file(STUDY))
        begun_before, start = study.folder.exists(), time.perf_counter()
        study.run(jobs=options.jobs, progress="lines")
        report = study.report()
        wall_s = None if begun_before else round(time.perf_counter() - start, 1)
        document = {"jobs": options.jobs, "wall_s": wall_s, **written_rows(report)}
        RESULTS.write_text(json.dumps(document, indent=1) + "\n")
        put(ROOT / "docs" / "studies.md", "study", table(document))
        for name, image in FIGURES.items():
            (IMAGES / f"{image}.png").write_bytes((study.folder / "report" / f"{name}.png").read_bytes())
        print(report)
        if find_chromium() is None:
            print("no screenshots: there is no chromium, chromium-browser or google-chrome")
            return 0
        for path in photograph(folder, parent_of(folder, study.config.name), tuple(study.config.train), IMAGES):
            print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
