"""A report's table, figures and page against the frame that they were made of."""

import json
import re

import numpy as np
import pandas as pd
import pytest
from matplotlib.patches import Rectangle
from tests.studies.synthetic import SUPPORTS, evaluations, write_study

from rl8x import drawing
from rl8x.drawing import LIGHT
from rl8x.studies import figures
from rl8x.studies.report import FoundStudy, report
from rl8x.studies.report import make_report as make
from rl8x.studies.statistics import HEADINGS, cells_of, summarize
from rl8x.studies.table import read_evaluations
from rl8x.tracking import TrackingError


def make_report(table, *, title="Study", units=(), definition=(), **options):
    return make(FoundStudy(table, SUPPORTS, dict(definition), dict(units), title=title), **options)


@pytest.fixture(scope="module")
def table():
    return evaluations(points=(2_000, 5_000))


@pytest.fixture(scope="module")
def made(table):
    return make_report(table, title="Poles <& masses>", units={"length": "m"}, definition={"seeds": [0, 1]})


def of(table, training):
    return table[table["final"] & (table["training"] == training)]


def test_values_equal_those_of_the_frame(table, made):
    """Each statistic by pandas alone."""
    frame = made.frame.set_index("training")
    for training in ("fixed", "uniform"):
        own = of(table, training)
        ordered, policies = own["returns"].sort_values(), own.groupby("seed")["returns"]
        quarter = len(ordered) // 4
        middle, worst = ordered.iloc[quarter : len(ordered) - quarter].mean(), policies.min().mean()
        expected = [ordered.mean(), middle, worst, worst, policies.apply(lambda each: each.nsmallest(2).mean()).mean()]
        names = ["mean", "iqm", "cvar_1", "worst_cell", "cvar_10"]
        assert frame.loc[training, names].tolist() == pytest.approx(expected)
    uniform = of(table, "uniform")
    means = uniform.groupby("inside")["returns"].mean()
    expected = [means[True], means[False], means[True] - means[False]]
    assert frame.loc["uniform", ["inside", "outside", "gap"]].tolist() == pytest.approx(expected)
    pairs = uniform.merge(of(table, "fixed"), on=["test.length", "test.mass"])
    wins = (pairs["returns_x"] > pairs["returns_y"]) + 0.5 * (pairs["returns_x"] == pairs["returns_y"])
    assert frame.loc["uniform", "improvement"] == pytest.approx(wins.mean())
    assert frame.loc["fixed", ["improvement", "gap"]].isna().all()  # no cell is the one point of its support


@pytest.mark.parametrize("over", ["policies", "cells"])
def test_intervals_of_two_policies_contain_the_estimates(over):
    """One fails in ten cells and the other nowhere: a mixture of both fails somewhere, and is as bad as the first."""
    table = evaluations(trainings=("uniform",), seeds=2, grid={"length": np.linspace(0.4, 0.9, 20)})
    fails = (table["seed"] == 0) & (table["test.length"].rank(method="dense") <= 10)
    table = table.assign(returns=np.where(fails, -100.0, 0.0))
    frame = summarize(read_evaluations(table), over=over, resamples=300).frame.iloc[0]
    for name in ("mean", "iqm"):
        assert frame[f"{name}_low"] <= frame[name] <= frame[f"{name}_high"], name
    for name in ("cvar_10", "cvar_1", "worst_cell"):
        assert (frame[name], frame[f"{name}_low"], frame[f"{name}_high"]) == (-50.0, -100.0, 0.0)


@pytest.mark.parametrize("over", ["policies", "cells"])
def test_inside_is_what_each_policy_was_trained_on(over):
    """Ranges that move go with each seed to other ends."""
    table = evaluations(trainings=("uniform",))
    widest = {0: 0.6, 1: 1.1, 2: 1.7}
    table = table.assign(inside=table["test.length"] <= table["seed"].map(widest))
    policies = table.groupby(["seed", "inside"])["returns"].mean().groupby("inside").mean()
    figures = [policies[True], policies[False], policies[True] - policies[False]]
    for rows in (table, table.sample(frac=1, random_state=3)):
        made = make_report(rows, over=over)
        assert made.frame.loc[0, ["inside", "outside", "gap"]].tolist() == pytest.approx(figures)
        assert made.frame.loc[0, "gap_low"] <= made.frame.loc[0, "gap"] <= made.frame.loc[0, "gap_high"]
    worst = table.assign(returns=np.where(np.isclose(table["test.length"], 1.05), -1e3, table["returns"]))
    assert make_report(worst)._worst_cells()[1][-1] == "inside for 2 of 3 seeds"


def test_rows_are_groups_of_training_and_hyperparameters():
    evaluated = read_evaluations(evaluations(vary=(1.0, 2.0)))
    labels = [group.label for group in evaluated.groups]
    assert labels == ["fixed, lr=1", "fixed, lr=2", "uniform, lr=1", "uniform, lr=2"]
    assert [len(group.seeds) for group in evaluated.groups] == [3] * 4
    summary = summarize(evaluated, baseline="uniform, lr=1")
    assert summary.frame["improvement"].isna().tolist() == [False, False, True, False]
    for baseline, says in (
        ("uniform", "'uniform' is the training of several groups; there are uniform, lr=1; uniform"),
        ("wide", "'wide' is no group of this study; there are fixed, lr=1"),
    ):
        with pytest.raises(ValueError, match=says):
            summarize(evaluated, baseline=baseline)


@pytest.mark.parametrize("scale", [1e-12, 1e-5, 1.0, 1e16])
def test_a_text_reads_as_its_number_whatever_the_returns_are(scale):
    """The mean return of a task may be 1e-6: its table had zeros."""
    summary = make_report(evaluations().assign(returns=lambda rows: rows["returns"] * scale)).summary
    head, *lines = cells_of(summary)
    for name in ("mean", "cvar_1", "outside"):
        for line, row in zip(lines, summary.frame.to_dict("records"), strict=True):
            numbers = [row[name], row[f"{name}_low"], row[f"{name}_high"]]
            told = re.findall(r"[-+.\de]+", line[head.index(HEADINGS[name])])
            assert [float(text) for text in told] == pytest.approx(numbers, abs=1e-2 * max(map(abs, numbers)))
            assert max(map(len, told)) <= 10


def test_rows_that_come_again_leave_the_first_group_the_first():
    table = evaluations()
    assert make_report(pd.concat([table, of(table, "fixed")])).frame.equals(make_report(table).frame)


def test_a_policy_that_lacks_cells_or_is_not_finite_is_left_out_and_named(table):
    final = table.index[table["final"]]
    damaged, cell = table.drop(final[0]), table.loc[final[-1]]
    damaged.loc[final[-1], "returns"] = np.nan
    made = make_report(pd.concat([damaged, damaged.iloc[5:9]]))  # rows that are there twice count once
    assert made.frame["seeds"].tolist() == [2, 2]
    text = " ".join(made.summary.notes)
    assert "fixed, seed 0 is left out: it lacks 1 of 20 cells" in text
    at = f"length={cell['test.length']:g}, mass={cell['test.mass']:g}"
    assert f"uniform, seed 2 is left out: it has returns that are not finite in 1 cell of 20, such as {at}" in text
    assert made.frame["mean"][0] == pytest.approx(of(table, "fixed")[lambda rows: rows["seed"] > 0]["returns"].mean())


def test_policies_that_the_table_lacks_are_counted(table):
    lacking = table[(table["training"] == "fixed") | (table["seed"] != 1)]
    definition = {"train": {"fixed": {}, "uniform": {}}, "seeds": [0, 1, 2], "vary": {}}
    said = "1 of the study's 6 policies is missing: trainings that failed or are not done."
    assert said in str(make_report(lacking, definition=definition))
    varied = {**definition, "vary": {"lr": [1, 2]}}
    two_seeds = lacking.drop(lacking.index[lacking["final"]][0])[lambda rows: rows["seed"] < 2]
    made = make_report(two_seeds.assign(**{"vary.lr": 1}), definition=varied)
    assert "9 of the study's 12 policies are missing" in str(made)  # of three others one is left out
    for whole in (definition, {**varied, "trials": 3}, {}):
        assert "missing" not in str(make_report(table, definition=whole))


def test_one_seed_has_no_interval_and_few_have_narrow_ones():
    alone = make_report(evaluations(seeds=1))
    assert np.isnan(alone.frame["mean_low"]).all()
    assert "One seed has no interval, and says nothing of other seeds: fixed, uniform." in str(alone)
    assert "[" not in " ".join(map(" ".join, cells_of(alone.summary)))
    assert "fewer than 5 seeds such intervals are too narrow" in str(make_report(evaluations(seeds=2)))
    assert "too narrow" not in str(make_report(evaluations(seeds=5)))
    finer = make_report(evaluations(seeds=2), level=0.999)
    assert "Intervals: 99.9%, " in str(finer)
    assert "99.9% intervals over seeds" in finer.drawings[0].caption


@pytest.mark.parametrize("width", [60, 80, 140])
def test_the_terminal_table_fits_and_has_all_numbers(made, width, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(width))
    text = str(made)
    blocks, notes = text.split("\nIntervals: ")
    said = "Evaluations online: 6 policies at 18 points of their training in 1,440 episodes"
    assert notes.splitlines()[-1].startswith(said)
    assert max(map(len, blocks.splitlines())) <= width
    row, numbers = made.frame.set_index("training").loc["uniform"], re.findall(r"-?\d+(?:\.\d+)?", blocks)
    for name in ("mean", "iqm", "cvar_10", "gap"):
        assert any(abs(float(number) - row[name]) <= 0.5 for number in numbers), name
    assert all(heading in blocks for heading in HEADINGS.values())


def test_heat_maps_show_the_frame_on_one_scale_with_the_supports(table):
    evaluated = read_evaluations(table)
    (length, mass), _ = drawing.chosen_axes(evaluated.cells, None)
    figure = figures.heat_maps(evaluated.groups, SUPPORTS, length, mass, {"length": "m"}, LIGHT)
    panels = [panel for panel in figure.axes if panel.collections and panel.get_title()]
    assert [panel.get_title() for panel in panels] == ["fixed", "uniform"]
    assert figure.get_supxlabel() == "length [m]"
    meshes = [panel.collections[0] for panel in panels]
    for mesh, training in zip(meshes, ("fixed", "uniform"), strict=True):
        cells = of(table, training).pivot_table(index="test.mass", columns="test.length", values="returns")
        np.testing.assert_allclose(mesh.get_array().reshape(cells.shape), cells)
        assert mesh.get_coordinates()[0, 0].tolist() == pytest.approx([0.1 - 0.2375, 0.02 - 0.13])
    assert len({(mesh.norm.vmin, mesh.norm.vmax) for mesh in meshes}) == 1
    (cross,) = panels[0].lines
    assert (cross.get_xdata()[0], cross.get_ydata()[0]) == (0.5, 0.1)
    (box,) = [patch for patch in panels[1].patches if isinstance(patch, Rectangle)]
    assert [*box.get_xy(), box.get_width(), box.get_height()] == pytest.approx([0.3, 0.05, 0.7, 0.25])


def test_curves_show_marginal_means_and_bands(table):
    evaluated = read_evaluations(table)
    length = drawing.chosen_axes(evaluated.cells, ["length"])[0][0]
    figure = figures.curves(evaluated.groups, SUPPORTS, length, {}, LIGHT)
    panel, strip = figure.axes
    for line, training in zip(panel.lines[:2], ("fixed", "uniform"), strict=True):
        expected = of(table, training).groupby("test.length")["returns"].mean()
        np.testing.assert_allclose(line.get_xdata(), expected.index)
        np.testing.assert_allclose(line.get_ydata(), expected)
    of_seeds = of(table, "uniform").groupby(["test.length", "seed"])["returns"].mean().unstack()
    band = panel.collections[1].get_paths()[0].get_extents()
    assert of_seeds.to_numpy().min() - 1e-9 <= band.ymin < band.ymax <= of_seeds.to_numpy().max() + 1e-9
    bar = strip.patches[0]
    assert (bar.get_x(), bar.get_x() + bar.get_width()) == pytest.approx((0.3, 1.0))


def test_figures_fit_the_number_of_test_parameters(table, made):
    three = {"length": [0.5, 1.0, 2.0], "mass": [0.1, 0.4], "force": [10.0, 10.001]}
    of_three = make_report(evaluations(grid=three))
    for drawn, between in (
        (make_report(evaluations(grid={"length": [0.5]})), []),
        (make_report(evaluations(grid={"length": np.linspace(0.1, 2, 6)})), ["curve-length"]),
        (made, ["heat-maps", "curve-length", "curve-mass"]),
        (of_three, ["heat-maps", "curve-length", "curve-mass", "curve-force"]),
    ):
        training = ["training"] * (drawn is made)
        assert [each.name for each in drawn.drawings] == ["intervals", *between, "profiles", *training]
    caption = of_three.drawings[1].caption
    assert "Averaged over force: length and mass are the two parameters that explain most" in caption
    asked = make_report(evaluations(grid=three), parameters=["force", "mass"])
    assert asked.drawings[1].title == "Return over force and mass"
    with pytest.raises(ValueError, match="'masses' is no test parameter with several values; there are length, mass"):
        make_report(table, parameters=["masses"])


@pytest.fixture(scope="module")
def written(table, tmp_path_factory):
    """A report of a study's folder, with few figures, and that folder."""
    definition = {"name": "Poles <& masses>", "seeds": [0], "env": "my.Pole", "algorithm": "sac"}
    folder = write_study(tmp_path_factory.mktemp("studies") / "poles", table, SUPPORTS, **definition)
    path = folder / "study.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"units": {"length": "m"}, "created": "2026-11-25"}))
    return report(folder, parameters=["length"], log=False), folder


def test_a_studys_folder_becomes_a_report_also_one_that_was_sent(written, table, tmp_path, monkeypatch):
    """Without runs beside it; a store that was named has to be there."""
    monkeypatch.chdir(tmp_path)
    write_study(tmp_path / "sent", table, seeds=[0])
    assert str(report("sent", parameters=["length"]).folder) == "sent/report"
    with pytest.raises(TrackingError, match=r"other\.db does not exist"):
        report("sent", parameters=["length"], tracking_uri="sqlite:///other.db")
    assert {each.name for each in tmp_path.iterdir()} == {"sent"}
    made, folder = written
    assert made.study.title == "Poles <& masses>"
    assert [each.name for each in made.drawings] == ["intervals", "curve-length", "profiles", "training"]
    names = {path.name for path in (folder / "report").iterdir()}
    assert names == {"report.html", "summary.csv", *(f"{each.name}.png" for each in made.drawings)}
    pd.testing.assert_frame_equal(pd.read_csv(folder / "report" / "summary.csv"), made.frame)
    pd.testing.assert_frame_equal(made.frame, make_report(table).frame)


def test_the_page_stands_alone_and_has_the_table(written):
    made, folder = written
    text = (folder / "report" / "report.html").read_text()
    assert not re.search("<(script|link|iframe)", text)
    sources = re.findall(r'(?:src|srcset|href)="([^"]*)"', text)
    assert len(sources) == 2 * len(made.drawings)
    assert all(source.startswith("data:image/png;base64,") for source in sources)
    rows = [re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row) for row in text.split("<tr")[1:]]
    assert "http" not in re.sub(r"base64,[A-Za-z0-9+/=]+", "", text)
    assert "Poles &lt;&amp; masses&gt;" in text
    assert '<p class="lead">SAC on my.Pole, begun on 2026-11-25. 6 policies in 2 groups, each in 20 test cells' in text
    assert ["", "length [m]", "mass", "mean over seeds", "own worst cell", "support"] in rows
    row = made.frame.set_index("training").loc["uniform"]
    cells = dict(zip(rows[0], rows[2], strict=True))
    value, low, high = map(float, re.findall(r"-?\d[\d.]*", cells["IQM"]))
    assert [value, low, high] == pytest.approx([row["iqm"], row["iqm_low"], row["iqm_high"]], abs=0.5)
    worst = next(row for row in rows if row[0] == "uniform" and len(row) == 6)
    means = made.evaluations.groups[1].scores.mean(axis=0)
    expected = [made.evaluations.cells["length"][means.argmin()], means.min(), row["worst_cell"]]
    assert [float(worst[column]) for column in (1, 3, 4)] == pytest.approx(expected, rel=1e-3)


BAD = [  # a table, or the text of a study's file
    (lambda table: table.iloc[:0], "the table of evaluations is empty: no training"),
    (lambda table: table.drop(columns=["inside", "seed"]), "lacks the columns seed, inside"),
    (lambda table: table[~table["final"]], "no policy of the study has been evaluated at the end"),
    (lambda table: table.assign(returns=np.nan), "no policy of the study is complete: fixed, seed 0 is left out"),
    ("", r"there is no .*evaluations.json: .* is no folder of a study"),
    ("{", r"evaluations.json cannot be read"),
    ("[]", r"must hold a mapping; got list"),
    ("{}", r"is no table: it needs `columns` and `data`"),
]


@pytest.mark.parametrize(("bad", "says"), BAD)
def test_a_bad_table_gets_one_line(table, tmp_path, bad, says):
    if isinstance(bad, str):
        (tmp_path / ("evaluations.json" if bad else "other.json")).write_text(bad)
    with pytest.raises(ValueError, match=says):
        report(tmp_path) if isinstance(bad, str) else make_report(bad(table))
