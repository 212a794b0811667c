"""Make the figures of pages: a film, screenshots of MLflow's page, and the figures and the table of the example study.

python -m benchmarks.figures play               # docs/images/playing.gif
python -m benchmarks.figures runs               # docs/images/mlflow-*.png; needs a Chromium
python -m benchmarks.figures study --jobs 2     # docs/images/study-*.png, benchmarks/results/study.json, and where
# there is a Chromium docs/images/mlflow-study-*.png; minutes
python -m benchmarks.figures runs --folder DIR  # what was trained there is not trained again
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.results import RESULTS, ROOT, Row, about, save, table

IMAGES = ROOT / "docs" / "images"
STUDY = ROOT / "examples" / "study.yaml"
STUDY_FIGURES = {"heat-maps": "study-heat-maps", "curve-length": "study-curve", "profiles": "study-profiles"}
SETTINGS = "--num-envs 64 --horizon 32 --gamma 0.99 --sgd-minibatch-size 512 --max-grad-norm 0.5"
MAX_FILM_BYTES = 300_000  # what a page should have to load
LENGTHS = [0.2, 0.5, 1.1]
# A page without a mouse shows the charts' tool bars, over the data, which else come with the mouse.
_NO_TOOL_BARS = "document.head.insertAdjacentHTML('beforeend', '<style>.modebar { display: none }</style>')"


def play(folder: Path, options: argparse.Namespace) -> None:
    """Film one policy, trained on poles of random lengths, on three of them."""
    from rl8x import HitsUpperBound, NullTracker, PPOConfig, Trainer
    from rl8x.envs import CartPole
    from rl8x.randomization import Uniform

    transitions = 163_840
    sizes = {"num_envs": 64, "horizon": 32, "sgd_minibatch_size": 512, "model_config": {"hidden_sizes": [64, 64]}}
    falling = {"kind": "interp", "points": [[0, 1e-2], [transitions, 0.0]]}
    config = PPOConfig(**sizes, gamma=0.99, lr_schedule=falling, max_grad_norm=0.5, device="cpu", seed=0)
    trainer = Trainer(config.build(CartPole), tracker=NullTracker(), checkpoints=False, num_eval_envs=64)
    trainer.run(
        env_config={"length": Uniform(0.1, 1.3)},
        eval_env_config={"length": (LENGTHS * 22)[:64]},
        steps_per_eval=8,
        stop_conditions=[HitsUpperBound("env/steps", transitions)],
    )
    film = trainer.play(env_config={"length": LENGTHS}, max_steps=215, seed=4)
    if len(film.data) > MAX_FILM_BYTES:
        raise SystemExit(f"the film has {len(film.data):,} bytes, more than {MAX_FILM_BYTES:,}: give it fewer steps")
    film.save(IMAGES / "playing.gif")


def runs(folder: Path, options: argparse.Namespace) -> None:
    """Train CartPole twice and photograph list, description, charts, comparison, model and film."""
    from tests.browser.mlflow_pages import LEARNING_RATES, arguments, film_of, runs_in

    if not (folder / "mlruns" / "mlflow.db").exists():
        for name in LEARNING_RATES:
            words = arguments(name, steps=32, every=4, films=4, settings=SETTINGS.split())
            subprocess.run([Path(sys.executable).with_name("rl8x"), *words], check=True)
    found, models = runs_in(folder)
    run = found["fast"]

    with opened(folder, run) as (pages, keep):
        pages.listed(*found)
        keep("runs")
        pages.overview("CartPole")
        pages.browser.click("Show more")
        pages.browser.wait_for("rl8x play")
        keep("run")
        pages.charts("mean returns")
        keep("charts")
        pages.compared([each.info.run_id for each in found.values()], *found)
        keep("compare")
        pages.model(models["fast"][0].model_id, "eval/returns/mean")
        keep("model")
        pages.artifact(film_of(folder, run))
        keep("film")


@contextlib.contextmanager
def opened(folder: Path, run: Any) -> Iterator[tuple[Any, Callable[[str], None]]]:
    """Give MLflow's pages on a run in a browser, and what takes a screenshot of a name."""
    from tests.browser.chromium import Browser
    from tests.browser.mlflow_pages import Pages, served

    with served(folder) as address, Browser(1360, 860) as browser:

        def keep(name: str) -> None:
            browser.settle()
            browser.run(_NO_TOOL_BARS)
            browser.screenshot(IMAGES / f"mlflow-{name}.png")

        yield Pages(browser, address, run), keep


def study(folder: Path, options: argparse.Namespace) -> None:
    """Run the example study, and keep its figures, what its report says, and screenshots where there is a Chromium."""
    from tests.browser.chromium import find_chromium
    from tests.browser.mlflow_pages import runs_in

    from rl8x.studies import Study, StudyConfig
    from rl8x.studies.statistics import cells_of

    made = Study.from_config(StudyConfig.from_file(STUDY))
    begun_before, start = made.folder.exists(), time.perf_counter()
    made.run(jobs=options.jobs, progress="lines")
    report = made.report()
    document = {
        "jobs": options.jobs,
        "wall_s": None if begun_before else round(time.perf_counter() - start, 1),
        "study": report.study.definition,
        "table": cells_of(report.summary),
        "notes": list(report.summary.notes),
        "rows": json.loads(report.frame.to_json(orient="records", double_precision=10)),
    }
    save(RESULTS / "study.json", {**document, **about("rl8x", "torch")})
    for name, image in STUDY_FIGURES.items():
        (IMAGES / f"{image}.png").write_bytes((made.folder / "report" / f"{name}.png").read_bytes())
    print(report)
    if find_chromium() is None:
        print("no screenshots: there is no Chromium")
        return
    with opened(folder, runs_in(folder)[0][made.config.name]) as (pages, keep):
        pages.overview("Metrics", "result/returns/mean")
        keep("study-parent")
        pages.artifact("evaluations.json", "training", "test.length")
        keep("study-table")
        pages.artifact("report/heat-maps.png", "report.html")
        keep("study-report")
        pages.grouped("study.training", *made.config.train)
        keep("study-compare")


def study_table(document: Row) -> str:
    """Lay the table of a study's report out, a line for each statistic, since pages are narrow."""
    heads, *groups = document["table"]
    lines = [[head, *(group[column] for group in groups)] for column, head in enumerate(heads) if column > 0]
    return table(["", *(group[0] for group in groups)], lines)


def main(argv: list[str] | None = None) -> None:
    """Make the figures that the command line asks for, in a temporary folder if none is named."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    figures: dict[str, Any] = {"play": play, "runs": runs, "study": study}
    parser.add_argument("figure", choices=figures)
    parser.add_argument("--folder", type=Path, help="working directory of what is trained; by default a temporary one")
    parser.add_argument("--jobs", type=int, default=2, help="trainings of the study at a time (default: %(default)s)")
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as temporary:
        folder = (options.folder or Path(temporary)).absolute()
        folder.mkdir(parents=True, exist_ok=True)
        os.chdir(folder)
        figures[options.figure](folder, options)


if __name__ == "__main__":
    main()
