"""MLflow's pages in a real browser: runs with their descriptions, charts, models and films, and a study's runs."""

import re
import shutil
from types import SimpleNamespace

import pytest
from tests.browser.chromium import NAMES, Browser, find_chromium
from tests.browser.mlflow_pages import LEARNING_RATES, Pages, arguments, film_of, runs_in, served
from tests.conftest import InProcess

from rl8x.cli.main import main
from rl8x.randomization import Uniform
from rl8x.studies import Study, table

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(find_chromium() is None, reason=f"there is no browser: none of {', '.join(NAMES)}"),
]

# The width of the widest picture that the page has loaded, in pixels, as JavaScript.
WIDEST = "Math.max(0, ...[...document.images].map(image => image.naturalWidth))"


@pytest.fixture(scope="module")
def seen(mlflow_template, tmp_path_factory):
    """Two runs, and a study that has reported, in a folder of their own, whose pages `rl8x ui` shows a browser."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("browser")
        patch.chdir(folder)
        patch.setattr("rl8x.tracking.shipping._ShipperProcess", InProcess)
        (folder / "mlruns").mkdir()
        shutil.copyfile(mlflow_template, folder / "mlruns" / "mlflow.db")
        for name in LEARNING_RATES:
            small = ["--num-envs", "8", "--horizon", "16", "model_config.hidden_sizes=[8]", "--progress", "none"]
            words = arguments(name, steps=4, every=2, films=2, settings=small)
            patch.setattr("sys.argv", ["rl8x", *words])
            assert main(words) == 0
        train, test = {"fixed": {}, "wide": {"length": Uniform(0.25, 1.0)}}, {"length": [0.25, 0.5, 2.0]}
        config = {"num_envs": 8, "horizon": 16, "device": "cpu", "model_config": {"hidden_sizes": [8]}}
        options = {"env": "CartPole", "max_steps": 3, "episodes": 4, "progress": "none", "name": "poles", "seeds": 2}
        study = Study(train, test | {"gravity": [5, 9.8, 20]}, algorithm_config=config, **options)
        frame, report = study.run(), study.report()
        runs, models = runs_in(folder)
        with served(folder) as address, Browser(1360, 900) as browser:
            poles, fast = (Pages(browser, address, runs[name]) for name in ("poles", "fast"))
            yield SimpleNamespace(**locals())


def test_the_parent_shows_what_was_asked_and_what_came_out(seen):
    frame, mean = seen.frame, seen.frame[table.RETURNS].mean()
    shown = seen.poles.overview("poles", "study.trainings", "fixed, wide", "result/returns/mean", "study.best")
    # MLflow's page writes metrics in full, or rounds them.
    numbers = [float(each) for each in re.findall(r"\d+\.\d+", shown)]
    assert any(number == pytest.approx(mean, rel=1e-3) for number in numbers)
    assert "length: [0.25, 0.5, 2.0]; gravity: [5, 9.8, 20]" in shown
    best = frame.groupby(table.TRAINING)[table.RETURNS].mean()
    assert best.idxmax() in shown.partition("study.best")[2]
    # So is the table, with its numbers.
    first = frame.iloc[0]
    columns = ("training", "test.length", "test.gravity")
    shown = seen.poles.artifact("evaluations.json", *columns, first[table.RUN])
    assert all(f"{first[name]:.4g}"[:4] in shown for name in (table.RETURNS, table.LENGTHS))


def test_the_report_is_shown_with_its_figures_and_its_page_is_complete_by_itself(seen):
    """Opened from the disk, light and dark, wide and narrow: nothing is loaded, and nothing is cut off."""
    browser = seen.browser
    seen.poles.artifact("report/heat-maps.png", "report.html", "summary.csv", "profiles.png")
    browser.wait_until(f"{WIDEST} > 600")
    # MLflow shows HTML in a frame that scripts cannot look into.
    seen.poles.artifact("report/report.html", "summary.csv")
    browser.wait_until("document.querySelectorAll('iframe').length === 1")
    (page,) = seen.folder.glob("mlruns/studies/*/report/report.html")
    for width, scheme in ((1280, "light"), (390, "dark")):
        browser.resize(width, 900)
        browser.prefer(scheme)
        browser.open(page.as_uri())
        shown = browser.wait_for("Statistics", "P(improves)", "The worst cell of the mean over seeds")
        assert seen.report.summary.notes[0] in shown
        assert browser.run("document.documentElement.scrollWidth") <= width
        assert browser.run("[...document.images].every(image => image.complete && image.naturalWidth > 0)")
        # A figure is scrolled rather than shrunk until nobody can read it.
        assert browser.run("Math.min(...[...document.images].map(image => image.width))") >= 500
        back = browser.run("getComputedStyle(document.body).backgroundColor")
        assert back == {"light": "rgb(255, 255, 255)", "dark": "rgb(21, 24, 29)"}[scheme]
        fetched = "performance.getEntriesByType('resource').filter(each => !each.name.startsWith('data:')).length"
        assert browser.run(fetched) == 0
    browser.resize(1360, 900)
    browser.prefer("light")


def test_runs_are_listed_grouped_overlaid_and_compared(seen):
    fast = seen.fast
    # The page asks for the models after it has shown the runs.
    columns = "rl8x.task", "rl8x.algorithm", "rl8x.result"
    shown = fast.listed(*LEARNING_RATES, "poles", *columns, "CartPole", "PPO", "best")
    assert "best" in shown.partition("fast")[2]
    shown = seen.poles.grouped("study.training", "fixed", "wide")
    assert {"fixed", "wide"} <= set(re.findall(r"Group: (\w+)", shown))
    shown = fast.charts("mean returns", "eval/returns/mean", *LEARNING_RATES)
    assert shown.index("mean returns") < shown.index("eval/returns/mean")  # the view that rl8x gives
    ids = [seen.runs[name].info.run_id for name in LEARNING_RATES]
    shown = fast.compared(ids, *LEARNING_RATES, "0.005", "0.0005")
    assert "Comparing 2 Runs" in shown


def test_a_runs_page_says_what_it_was_how_it_ended_and_what_to_do_with_it(seen):
    seen.fast.overview("PPO", "CartPole", "rl8x.result")
    seen.browser.click("Show more")
    shown = seen.browser.wait_for("rl8x play")
    command = "rl8x train CartPole --run-name fast --lr 5e-3"
    assert all(text in shown for text in ("Stopped after 4 steps", command, "rl8x resume", "rl8x export"))
    seen.fast.metrics("fast (algorithm/steps)")


def test_a_model_is_linked_to_its_run_and_metrics_and_a_film_is_shown(seen):
    best = next(each for each in seen.models["fast"] if each.name == "best")
    (metric,) = (each for each in best.metrics if each.key == "eval/returns/mean")
    shown = seen.fast.model(best.model_id, "best", "eval/returns/mean", "fast")
    assert f"{metric.value:.4g}"[:4] in shown
    # So are films.
    seen.fast.artifact(film_of(seen.folder, seen.runs["fast"]), "learning-curves.png", "run.yaml")
    seen.browser.wait_until(f"{WIDEST} > 200")
