"""Studies as a user runs them: the table, the tracked runs, going on, and what is refused."""

from __future__ import annotations

import errno
import itertools
import json
import os
import re
import shutil
import signal

import numpy as np
import pytest
from tests.conftest import InProcess, intercepted
from tests.forks import need_gradients_in_forks
from tests.studies.synthetic import evaluations

from rl8x import Trainer, compare
from rl8x.checkpoint.manager import CheckpointManager
from rl8x.cli.study import _rows
from rl8x.distributed import Ranks
from rl8x.drawing import LIGHT
from rl8x.envs import CartPole
from rl8x.randomization import Uniform
from rl8x.replay.recording import record
from rl8x.studies import Study, StudyConfig, StudyError, table
from rl8x.studies import study as module
from rl8x.studies import training as work
from rl8x.studies.definition import Training
from rl8x.studies.parent import _results, _series
from rl8x.studies.statistics import summarize
from rl8x.studies.table import read_evaluations
from rl8x.tracking.journal import is_sent
from rl8x.tracking.locks import FolderLock
from rl8x.tracking.protocol import StoreDownError
from rl8x.trainers.grid import CellEvaluator

SMALL = {"num_envs": 8, "horizon": 8, "device": "cpu", "model_config": {"hidden_sizes": [8]}}
BASE = {
    "env": "CartPole",
    "max_steps": 3,
    "episodes": 4,
    "algorithm_config": SMALL,
    "progress": "none",
}
TRAIN = {"fixed": {"length": 0.5}, "wide": {"length": Uniform(0.25, 1.0)}}
TEST = {"length": [0.25, 0.5, 2.0], "gravity": [9.8, 20]}
TRIED = {"vary": {"lr": [1e-3, 1e-2]}, "evaluate_at": [2], "train": {"wide": TRAIN["wide"]}, "name": "tried"}


class Few(CartPole):
    max_num_envs = 8


def make(**changes):
    return Study(**{"train": TRAIN, "test": TEST, "seeds": 2, **BASE, **changes})


def runs_of(client):
    found = client.search_runs([experiment.experiment_id for experiment in client.search_experiments()])
    parents = [run for run in found if "mlflow.parentRunId" not in run.data.tags]
    return parents, [run for run in found if run not in parents]


@pytest.fixture(scope="module")
def ran(mlflow_template, tmp_path_factory):
    """A study that has run, tracked: its folder's `mlruns`, the study, its table, and a client."""
    from mlflow import MlflowClient

    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("study")
        patch.chdir(folder)
        patch.setattr("rl8x.tracking.shipping._ShipperProcess", InProcess)
        (folder / "mlruns").mkdir()
        shutil.copyfile(mlflow_template, folder / "mlruns" / "mlflow.db")
        first = run_with_trouble(make(**TRIED), patch)
        first["done_again"] = []
        again = lambda job: first["done_again"].append(job["seed"]) or work.run_job(job)  # noqa: E731
        patch.setattr("rl8x.studies.study.run_job", again)
        study = make(**TRIED)
        frame = study.run()
        yield study, frame, MlflowClient(f"sqlite:///{folder}/mlruns/mlflow.db"), make(**TRIED), first


def run_with_trouble(study, monkeypatch):
    """Run a study whose last training fails, and whose first cannot reach its store when it is over."""
    away, left, whole, conclude = [], [], work._TrainingJob.run_to_end, work._TrainingJob._conclude

    def before(name, *args):
        if away:
            raise StoreDownError("away")

    def run_to_end(self):
        if (self.job["seed"], self.job["vary"]) == (1, {"lr": 1e-2}):
            raise RuntimeError("no luck")
        return whole(self)

    def without_store(self, trainer):
        if (self.job["seed"], self.job["vary"]) != (0, {"lr": 1e-3}):
            return conclude(self, trainer)
        away.append(True)
        try:
            return conclude(self, trainer)
        finally:
            left.extend((study.folder.parent.parent / "spool" / self.job["tracking"]["run_key"]).iterdir())
            away.clear()

    with monkeypatch.context() as patch:
        intercepted(patch, before)
        patch.setattr(work, "_PATIENCE_S", 10.0)
        patch.setattr(work._TrainingJob, "run_to_end", run_to_end)
        patch.setattr(work._TrainingJob, "_conclude", without_store)
        frame = study.run()
    folder = study.folder / Training("wide", {"lr": 1e-2}, 1).key
    return {"failed": study.failed, "frame": frame, "trace": (folder / "error.txt").read_text(), "left": left}


def test_the_table_has_a_row_for_each_policy_point_and_cell(ran):
    _, frame, *_ = ran
    assert len(frame) == 2 * 2 * 2 * 6  # rates, seeds, points, cells
    who = [table.TRAINING, "vary.lr", table.SEED, table.RUN, table.ENV_STEPS, table.UPDATES, table.FINAL]
    assert list(frame) == [*who, table.INSIDE, table.CELL, "test.length", "test.gravity", *table.MEASURED]
    assert set(frame[table.ENV_STEPS]) == {128, 192}
    assert set(frame[frame[table.FINAL]][table.ENV_STEPS]) == {192}
    # inside: lengths 0.25 and 0.5 at the default gravity
    within = frame[frame[table.INSIDE]][["test.length", "test.gravity"]].drop_duplicates()
    assert within.to_numpy().tolist() == [[0.25, 9.8], [0.5, 9.8]]


def test_the_table_is_what_a_training_by_hand_gives(ran):
    study, frame, *_ = ran
    run = study.config.run_of(Training("wide", {"lr": 1e-2}, 1)).replace(tracking=False)
    trainer = Trainer.from_spec(run)
    trainer.run()
    rows = frame[frame[table.FINAL] & (frame["vary.lr"] == 1e-2) & (frame[table.SEED] == 1)]
    measured = CellEvaluator(trainer.algorithm, study.config.cells(), episodes=4, copies=4).evaluate()
    for name in table.MEASURED:
        assert rows[name].tolist() == list(measured[name]), name


def test_the_runs_are_a_parent_and_its_children(ran, monkeypatch):
    _, frame, client, *_ = ran
    (parent,), children = runs_of(client)
    assert {child.data.tags["mlflow.parentRunId"] for child in children} == {parent.info.run_id}
    names = ("study.training", "vary.lr", "study.seed")
    varied = [[child.data.params[name] for name in names] for child in children]
    assert sorted(varied) == [["wide", rate, seed] for rate in ("0.001", "0.01") for seed in "01"]
    assert {child.info.run_id for child in children} == set(frame[table.RUN])
    assert {run.info.status for run in (parent, *children)} == {"FINISHED"}
    final = frame[frame[table.FINAL]]
    assert parent.data.metrics["result/returns/mean"] == pytest.approx(final[table.RETURNS].mean())
    by_rate = final.groupby("vary.lr")[table.RETURNS].mean()
    assert parent.data.metrics["best/returns/mean"] == pytest.approx(by_rate.max())
    assert parent.data.tags["study.best"] == f"wide lr={by_rate.idxmax()}"
    result = f"{by_rate.max():.4g}, mean return of wide lr={by_rate.idxmax()}"
    named = [parent.data.tags[f"rl8x.{name}"] for name in ("task", "algorithm", "result")]
    assert named == ["CartPole", "PPO", result]
    note = parent.data.tags["mlflow.note.content"].split("\n\n")
    assert note[0] == f"Best `wide lr={by_rate.idxmax()}`: mean return {by_rate.max():.4g} over seeds and test cells."
    assert note[1].startswith("**Study of PPO on `CartPole`**: training `wide`; `lr` ")
    assert note[-1].startswith("Its runs side by side: `rl8x compare /")
    gap = final[final[table.INSIDE]][table.RETURNS].mean() - final[~final[table.INSIDE]][table.RETURNS].mean()
    assert parent.data.metrics["result/returns/gap"] == pytest.approx(gap)
    assert max(len(run.data.metrics) for run in (parent, *children)) <= 80
    # Once in each of the two reports, of which the first was of three policies; points of a training are there once,
    # though its process was cut off from the store.
    histories = [client.get_metric_history(run.info.run_id, "result/returns/mean") for run in (parent, *children)]
    assert [*map(len, histories)] == [2, 1, 1, 1, 1]
    for child in children:
        for name in (name for name in child.data.metrics if name.startswith("best/")):
            history = client.get_metric_history(child.info.run_id, name.removeprefix("best/"))
            assert child.data.metrics[name] == max(point.value for point in history)
    # MLflow reads the tables.
    monkeypatch.setenv("MLFLOW_TRACKING_URI", client.tracking_uri)
    experiment = parent.info.experiment_id
    loaded = client.load_table(experiment, "evaluations.json", run_ids=[parent.info.run_id])
    assert len(loaded) == len(frame)
    assert loaded[table.RETURNS].tolist() == pytest.approx(frame[table.RETURNS].tolist())
    of_child = client.load_table(experiment, "evaluations.json", run_ids=[children[0].info.run_id])
    assert len(of_child) == 2 * 6


def test_a_study_that_is_done_is_read_and_not_done_again(ran):
    study, _, client, again, _ = ran
    ends = lambda: [run.info.end_time for runs in runs_of(client) for run in runs]  # noqa: E731
    before = ends()
    assert again.run().equals(study.results())
    assert ends() == before
    assert again.supports == {"wide": {name: [low, high] for name, (low, high) in study.supports["wide"].items()}}
    assert again.supports["wide"]["length"] == [0.25, 1.0]
    assert again.supports["wide"]["gravity"] == [9.8, 9.8]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"episodes": 5}, "`episodes` was 4 and is 5"),
        ({"train": {"wide": {}}}, "`train` was"),
        ({"max_steps": 4}, "`max_steps` was 3 and is 4"),
        ({"seeds": 3}, r"`seeds` was \[0, 1\] and is \[0, 1, 2\]"),
    ],
)
def test_a_study_that_was_changed_is_refused(ran, changes, message):
    with pytest.raises(StudyError, match=message):
        make(**{**TRIED, **changes, "directory": str(ran[0].folder)}).run()


def test_two_processes_do_not_run_one_study(ran):
    study, _, _, again, _ = ran
    stored = table.read(study.folder / "study.json")
    table.write(study.folder / "study.json", stored | {"done": None})
    with FolderLock(study.folder), pytest.raises(StudyError, match="is at the study in"):
        again.run()
    table.write(study.folder / "study.json", stored)


def test_a_training_that_fails_is_named_and_tried_again(ran):
    study, _, client, _, first = ran
    assert first["failed"] == {"wide lr=0.01 seed=1": "RuntimeError: no luck"}
    assert "no luck" in first["trace"]
    assert len(first["frame"]) == 3 * 2 * 6
    assert first["done_again"] == [1]
    assert study.failed == {}
    (parent,), _ = runs_of(client)
    assert parent.data.tags["study.failed"] == "none"
    # Each point once, where nothing of it changed; what came out of four policies instead of three is the last.
    history = client.get_metric_history(parent.info.run_id, "result/policies")
    assert [point.value for point in sorted(history, key=lambda point: point.timestamp)] == [3, 4]


def test_what_a_training_could_not_send_is_sent(ran):
    study, frame, client, _, first = ran
    assert "journal.jsonl" in {path.name for path in first["left"]}
    assert all(map(is_sent, (study.folder.parent.parent / "spool").iterdir()))  # for those that have checkpoints
    rows = frame[frame[table.FINAL] & (frame["vary.lr"] == 1e-3) & (frame[table.SEED] == 0)]
    run = client.get_run(rows[table.RUN].iloc[0])
    assert run.data.metrics["result/returns/mean"] == pytest.approx(rows[table.RETURNS].mean())
    assert run.info.status == "FINISHED"


@pytest.mark.parametrize("place", ["mlruns/studies", pytest.param("apart", marks=pytest.mark.long)])
def test_a_study_goes_on_in_its_store_from_another_working_directory(
    mlruns, mlflow_client, tmp_path, monkeypatch, place
):
    monkeypatch.setattr("rl8x.tracking.shipping._ShipperProcess", InProcess)
    options = {
        "train": {"fixed": {}},
        "max_steps": 1,
        "name": "moved",
        "directory": str(mlruns.parent / place / "moved"),
    }
    with monkeypatch.context() as patch:
        patch.setattr(work._TrainingJob, "_conclude", lambda *_: 1 / 0)
        assert list(make(**options).run()) == []
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    study = make(**options)
    frame = study.run()
    study.report()
    assert len(compare(study.folder).runs) == 2
    (parent,), children = runs_of(mlflow_client)
    assert {run.info.run_id for run in children} == {*frame[table.RUN]}
    assert {run.info.status for run in (parent, *children)} == {"FINISHED"}
    assert len(children) == 2
    assert "report" in {each.path for each in mlflow_client.list_artifacts(parent.info.run_id)}
    assert not (tmp_path / "elsewhere" / "mlruns").exists()


# -- without tracking


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


ONCE = {"tracking": False, "max_steps": 1, "seeds": 1}


def test_a_full_disk_is_said_in_one_line_and_the_study_goes_on(here, monkeypatch):
    study, write = make(**ONCE), table.write

    def full(path, data):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(table, "write", lambda path, data: (full if path.parent != study.folder else write)(path, data))
        assert study.run().empty
        assert set(study.failed.values()) == {"OSError: [Errno 28] No space left on device"}
        patch.setattr(table, "write", full)
        with pytest.raises(StudyError, match=r"cannot be written \(No space left on device\): .* goes on"):
            make(**ONCE).run()
    assert len(make(**ONCE).run()) == 2 * 6


def test_what_a_team_gets_in_each_cell_is_its_return(here):
    team = {"env": "Spread", "env_kwargs": {"num_agents": 2, "time_limit": 3}}
    vary = {"env_kwargs.team_return": ["mean", "sum"]}
    frame = make(**team, **ONCE, vary=vary, train={"fixed": {}}, test={"damping": [0.25, 0.5]}).run()
    mean, of_both = (
        frame[frame["vary.env_kwargs.team_return"] == name][table.RETURNS].tolist() for name in ("mean", "sum")
    )
    assert of_both == pytest.approx([2 * each for each in mean])
    assert len(set(mean)) == 2
    assert [{*frame[name]} for name in (table.EPISODES, table.LENGTHS, table.ENV_STEPS)] == [{4}, {3.0}, {2 * 8 * 8}]


def test_what_learns_from_a_data_set_is_tested_in_the_environment_that_it_names(here, capfd):
    record(None, CartPole(4, seed=0), 60).dataset.save("data")
    options = {"train": {"data": {}}, "test": {"length": [0.25, 0.5]}, "tracking": False, "algorithm": "bc"}
    options |= {"env_kwargs": {"time_limit": 7}, "max_steps": 2, "episodes": 4, "progress": "none"}
    options |= {"algorithm_config": {"dataset": "data", "device": "cpu", "batch_size": 8}}
    with pytest.raises(ValueError, match="give `eval_env`, as it trains on a data set"):
        Study(**options).run()
    study = Study(**options, eval_env="CartPole", steps_per_eval=1, evaluate_at=1)
    frame = study.run(progress="lines")
    assert frame[table.LENGTHS].between(1, 7).all()
    assert frame[table.INSIDE].tolist() == [False, True] * 2  # where a parameter has its default
    # It counts updates, not transitions, by which its points are told apart.
    first, _, last, _ = updates = frame[table.UPDATES].tolist()
    assert updates == [first, first, 2 * first, 2 * first]
    assert (frame[table.ENV_STEPS] == 0).all()
    assert f" {last} updates, " in capfd.readouterr().err
    made = study.report(log=False)
    assert f"training took {last} updates." in str(made)
    (drawn,) = [each for each in made.drawings if each.name == "training"]
    figure = drawn.draw(LIGHT)
    assert figure.get_supxlabel() == "updates of training"
    assert figure.axes[0].lines[0].get_xdata().tolist() == [first, last]


def test_the_support_of_what_moves_is_that_of_the_time_of_the_test(here):
    # From exactly 0.5 at no transition to [0.3, 0.7] at 128. A horizon has what the ones before it came to.
    moving = {"scheduled": {"points": [[0, {"uniform": [0.5, 0.5]}], [128, {"uniform": [0.3, 0.7]}]]}}
    options = {"train": {"moving": {"length": moving}}, "test": {"length": [0.31, 0.45, 0.5, 0.55, 0.69]}}
    study = make(**options, evaluate_at=1, seeds=1, tracking=False)
    frame = study.run()
    within = {steps: rows[table.INSIDE].tolist() for steps, rows in frame.groupby(table.ENV_STEPS)}
    assert within[64] == [False, False, True, False, False]
    assert within[128] == [False, True, True, True, False]
    assert within[192] == [True] * 5
    assert study.supports["moving"]["length"] == pytest.approx([0.3, 0.7])


@pytest.mark.parametrize(
    "options",
    [{"test": TEST}, {"test": {name: {"uniform": [1.0, 2.0]} for name in ("length", "gravity")}, "test_cells": 5}],
)
def test_cells_have_the_same_numbers_where_the_test_is_in_another_order(options):
    """A study that is gone on with may be, and its trainings are compared cell by cell."""
    turned = options | {"test": dict(reversed(options["test"].items()))}
    cells, others = (make(**each).config.cells() for each in (options, turned))
    assert [list(cells), list(others)] == [["length", "gravity"], ["gravity", "length"]]
    for name, values in cells.items():
        assert values.tolist() == others[name].tolist()


def test_cells_of_a_sample_count_each_where_some_are_alike(here):
    test = {"length": {"choice": {"values": [0.5, 2.0], "weights": [0.75, 0.25]}}}
    study = make(**ONCE, test=test, test_cells=12, train={"fixed": {}})
    frame = study.run()
    assert len(frame) == 12
    assert frame["test.length"].nunique() == 2
    made = study.report(log=False)
    assert made.frame.loc[0, ["cells", "mean"]].tolist() == [12, pytest.approx(frame[table.RETURNS].mean())]
    assert f" in {12 * 4} episodes" in made.evaluations.counts


def test_a_varied_key_may_lead_into_what_another_sets(here):
    vary = {"model_config": [{"activation": "tanh"}], "model_config.hidden_sizes": [[8], [4, 4]]}
    config = make(**ONCE, vary=vary, train={"fixed": {}}).config
    before = [training.key for training in config.trainings()]
    sizes = [config.run_of(each).algorithm.algorithm_config["model_config"] for each in config.trainings()]
    assert sizes == [{"activation": "tanh", "hidden_sizes": each} for each in ([8], [4, 4])]
    assert config.vary == vary
    assert [training.key for training in config.trainings()] == before


def test_a_return_that_is_not_finite_makes_no_policy_the_best():
    final = evaluations(seeds=2)
    worst = final[(final["training"] == "fixed") & (final["seed"] == 1)]["returns"].nsmallest(15).index
    final.loc[worst, "returns"] = np.nan  # the mean of the others is the highest
    means = final.groupby(["training", "seed"])["returns"].mean().drop(("fixed", 1))
    best, mean, metrics = _results(final)
    of_trainings = means.groupby("training").mean()
    assert (best, mean) == (of_trainings.idxmax(), pytest.approx(of_trainings.max()))
    expected = {"result/policies": 3, "result/cells": 20, "result/returns/mean": pytest.approx(means.mean())}
    assert expected.items() <= metrics.items()
    curves = [("fixed", [[10, 1.0]]), ("fixed", [[10, 3.0], [20, 5.0]]), ("wide", [])]
    assert _series(curves, 9)["returns/fixed/mean"] == {10: 2.0, 20: 3.0}
    assert not any("wide" in name for name in _series(curves, 9))


def test_a_policy_without_a_cell_inside_has_no_part_in_a_gap():
    frame = evaluations(seeds=2)  # ranges that move may leave one seed of a training without such a cell
    frame[table.INSIDE] &= (frame["training"] == "uniform") | (frame["seed"] == 1)
    own = frame.groupby(["training", "seed", table.INSIDE])[table.RETURNS].mean().unstack()
    _, _, metrics = _results(frame)
    assert metrics["result/returns/gap"] == pytest.approx((own[True] - own[False]).mean())
    fixed, uniform = _rows(frame)[1:]
    assert fixed[3] == "-"
    assert uniform[3] == f"{own.loc['uniform', True].mean():.4g}"
    assert summarize(read_evaluations(frame)).frame["inside"].isna().tolist() == [True, False]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"train": {}}, "at least one training"),
        ({"train": {"a": {"lenght": 1}}}, r"train\['a'\] has no parameter 'lenght'.*Did you mean 'length'"),
        ({"test": {"length": [100]}}, r"test\['length'\] must be in"),
        ({"seeds": [1, 1]}, "`seeds` must be"),
        ({"env_config": {}}, "give it by name under `train`"),
        ({"vary": {"lr": [1, 0.5, 1.0]}}, "a list of different values; got"),
        ({"vary": {"env_config.length": [1]}}, r"vary\['env_config.length'\] .*: give it by name under `train`"),
        ({"vary": {"lr": {"unifrm": [0, 1]}}, "trials": 2}, "Did you mean 'uniform'"),
        ({"vary": {"lr": {"log_uniform": [0, 1]}}, "trials": 2}, "above 0"),
        ({"vary": {"lr": {"uniform": [0, float("inf")]}}, "trials": 2}, "takes two finite numbers"),
        ({"vary": {"lr": [1e-3], "algorithm_config.lr": [1e-2]}}, "are both 'algorithm_config.lr': keep one"),
        ({"vary": {"episodes": [1]}}, "no hyperparameter"),
        ({"trials": 3}, "ranges of hyperparameters"),
        ({"max_steps": None}, "must end"),
        ({"checkpoints": {"directory": "x"}}, "no `directory`"),
        ({"evaluate_at": 0}, "`evaluate_at`"),
        ({"evaluate_at": [1, 50], "max_steps": 3}, "has step 50, but trainings end after `max_steps` = 3"),
        ({"evaluate_at": 9, "vary": {"max_steps": [3, 8]}, "max_steps": None}, "has step 9, .* = 8"),
        ({"name": "../x"}, "`name` must be"),
        ({"directory": ""}, "`directory` must be a path, without NUL; got ''"),
        ({"directory": "a\0b"}, "`directory` must be a path, without NUL"),
        ({"env": "Pendulum", "env_kwargs": {"time_limit": None}, "train": {"a": {}}, "test": {"g": [9]}}, "never end"),
        ({"stop_conditions": [{"hits_upper_bound": ["eval/returns/mean", 1]}]}, "no evaluations"),
        ({"env": Few, "episodes": 9}, "`episodes` is 9, .* has at most 8 copies: give as many, or fewer"),
        ({"episodes": 10**13}, "a test of episodes=10,000,000,000,000 in each of .* cells needs .* Lower `episodes`"),
    ],
)
def test_what_is_wrong_is_said_before_anything_is_written(here, changes, message):
    with pytest.raises((ValueError, TypeError), match=message):
        make(tracking=False, **changes).run()
    assert list(here.iterdir()) == []


def test_a_progress_that_there_is_not_and_a_folder_of_something_else_are_refused(here, monkeypatch):
    with pytest.raises(ValueError, match=r"`progress` must be one of 'auto', .*; got 'quiet'"):
        make().run(progress="quiet")
    assert list(here.iterdir()) == []
    (here / "mine").mkdir()
    (here / "mine" / "thesis.txt").write_text("x")
    monkeypatch.setenv("HOME", str(here))
    with pytest.raises(StudyError, match="no study's folder"):
        make(tracking=False, directory="~/mine").run()
    (here / "mine" / "thesis.txt").rename(here / "mine" / "study.json.new-0123abcd")  # what a killed process left
    assert make(tracking=False, directory="~/mine")._stored() is None


@pytest.mark.parametrize(
    ("words", "given"),
    [  # of what is typed, hyperparameters are those of the algorithm that is typed
        (["initial_alpha=0.1", "algorithm_cls=SACConfig"], {"initial_alpha": 0.1}),
        (["algorithm=sac", "vary.tau=[0.1]"], {"tau": 0.1}),
        # a number takes the place of the file's schedule of it
        (["vary.lr=[0.1]"], {"lr": 0.1, "lr_schedule": None}),
        (["vary={lr: [0.1], lr_schedule: [[[0, 0.1]]]}"], {"lr": 0.1, "lr_schedule": [[0, 0.1]]}),
        (["vary={model_config.lr: [0.1]}"], {"model_config": {"lr": 0.1}}),  # another number of the name
    ],
)
def test_what_is_typed_and_varied_is_meant_as_in_train(here, words, given):
    before = {"num_envs": 8, "lr_schedule": [[0, 1e-3], [1000, 1e-4]]}
    file = {"env": "Pendulum", "max_steps": 3, "train": {"a": {}}, "test": {"g": [9]}, "algorithm_config": before}
    (here / "tiny.json").write_text(json.dumps(file))
    config = StudyConfig.from_file(here / "tiny.json", words)
    run = config.run_of(config.trainings()[0])
    assert run.algorithm.algorithm_config == {**before, **given}


def killed_at(run, owner, name, when="before", number=1):
    """Call `run` in a fork that is killed before or after its n-th call of an attribute, which it must reach."""
    need_gradients_in_forks()
    pid = os.fork()
    if pid == 0:
        try:
            whole, calls = getattr(owner, name), itertools.count(1)

            def call(*args, **kwargs):
                is_now = next(calls) == number
                returned = None if is_now and when == "before" else whole(*args, **kwargs)
                if is_now:
                    os.kill(os.getpid(), signal.SIGKILL)
                return returned

            setattr(owner, name, call)
            run()
        finally:
            os._exit(0)
    assert os.WIFSIGNALED(os.waitpid(pid, 0)[1]), f"{name} was not called {number} times"


@pytest.mark.long
def test_a_study_that_is_killed_anywhere_goes_on(here):
    """Killed with -9 where it is most awkward; the table is that of a study which nobody killed."""
    options = {"tracking": False, "max_steps": 4, "train": {"wide": TRAIN["wide"]}, "evaluate_at": [2]}
    options |= {"checkpoints": {"every_steps": 3}, "name": "killed"}
    whole = make(**{**options, "name": "whole"}).run()
    for owner, name, when, number in (
        (work._TrainingJob, "__call__", "before", 4),  # after a checkpoint, before the last step's row was seen
        (table, "write", "after", 1),  # measured, and not done: point 2 lies there
        (table, "write", "before", 3),  # all is done but to say so
        (table, "write", "before", 4),  # in the second training's end: the study's table
        (table, "write", "after", 1),
        (Study, "_collect", "after", 1),
        (module.ParentRun, "finish", "after", 1),
    ):
        killed_at(lambda: make(**options).run(), owner, name, when, number)
    resumed = make(**options)
    assert resumed.run().equals(whole)
    assert resumed.failed == {}
    assert table.read(resumed.folder / "study.json")["done"] == 0


@pytest.mark.parametrize("file", ["state.pt", "checkpoint.json"])
def test_a_training_whose_checkpoints_are_all_damaged_says_so_and_how_to_begin_it_anew(here, file):
    options = {"tracking": False, "max_steps": 4, "train": {"wide": TRAIN["wide"]}, "seeds": 1, "name": "damaged"}
    killed_at(lambda: make(**options).run(), work._TrainingJob, "__call__", "before", 3)
    study, (written,) = make(**options), (here / "mlruns/studies/damaged").glob("*/checkpoints/0*")
    (written / file).write_bytes(b"{")
    study.run()
    folder = written.parents[1]
    assert list(study.failed) == ["wide seed=0"]
    told = study.failed["wide seed=0"]
    assert told.startswith(f"CheckpointError: remove {folder} to train it anew: ")
    assert re.search(rf"{file} (is damaged|does not have)", (folder / work.ERROR).read_text())
    shutil.rmtree(folder)
    assert study.run().equals(make(**{**options, "name": "whole"}).run())


def test_a_simulators_training_that_was_killed_has_what_its_own_policies_measured(here, monkeypatch):
    """What came after its checkpoint comes out otherwise, as a simulator begins new episodes."""
    options = {"tracking": False, "train": {"fixed": {}}, "test": {"length": [0.3, 0.6]}, "seeds": 1}
    options |= {"env": "CartPole-v1", "env_kwargs": {"parameters": {"length": "length"}}, "max_steps": 4}
    options |= {"checkpoints": {"every_steps": 2}, "evaluate_at": 1}
    options |= {"algorithm_config": {**SMALL, "lr": 0.1}}
    save = CheckpointManager.save
    monkeypatch.setattr(CheckpointManager, "save", lambda self, *a, **more: save(self, *a, **more) or self.wait())
    killed_at(lambda: make(**options, name="killed").run(), work._TrainingJob, "__call__", "after", 3)
    resumed = make(**options, name="killed")
    folder = resumed.folder / Training("fixed", {}, 0).key
    before = table.read_points(folder)
    assert [*before] == [1, 2, 3]
    (folder / "points" / "9.json").write_text(json.dumps(before[3]))  # as if it had got further then
    with pytest.warns(RuntimeWarning, match="begins new episodes|episodes"):
        frame = resumed.run()
    after = table.read_points(folder)
    assert [*after] == [1, 2, 3, 4]
    assert [after[step] == before[step] for step in before] == [True, True, False]
    assert frame[table.FINAL].tolist() == [False] * 6 + [True] * 2
    assert [at for at, _ in table.read(folder / table.RESULT)["curve"]][-1] <= 4 * 64


def test_what_a_kill_tore_or_somebody_removed_is_left_out(tmp_path):
    assert table.read_training(tmp_path, "").empty
    (tmp_path / "points").mkdir()
    for name, text in (("3.json", '{"columns": ["final"], "data": [[false]]}'), ("9.json", '{"col'), ("x.json", "{}")):
        (tmp_path / "points" / name).write_text(text)
    assert [*table.read_points(tmp_path)] == [3]
    assert table.read_training(tmp_path, "a").to_dict("list") == {"final": [True], "run_id": ["a"]}


def test_a_study_under_torchrun_is_refused(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("rl8x.studies.jobs.ranks", lambda: Ranks(0, 4, 0))
    with pytest.raises(ValueError, match="torchrun has started 4: start it without torchrun, with `jobs` trainings"):
        make().run()
    assert list(tmp_path.iterdir()) == []
