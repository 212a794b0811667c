"""Searches: ranges are drawn from, hopeless trials are given up, and a killed search goes on."""

from __future__ import annotations

import importlib.util
import math
import sys
from unittest import mock

import pytest

from rl8x.studies import Study, StudyError, search
from rl8x.studies.definition import Training

NEEDS = pytest.mark.skipif(importlib.util.find_spec("optuna") is None, reason="optuna is not installed")


def make(trials, **changes):
    vary = {"lr": {"log_uniform": [1e-4, 1e-2]}, "horizon": {"int": [4, 8]}, "model_config": [{"hidden_sizes": [8]}]}
    options = {"train": {"fixed": {}}, "test": {"length": [0.25, 0.5]}, "env": "CartPole", "vary": vary}
    options |= {"max_steps": 2, "episodes": 2, "evaluate_at": [1], "tracking": False, "progress": "none"}
    return Study(trials=trials, **{**options, "algorithm_config": {"num_envs": 8, "device": "cpu"}, **changes})


@pytest.fixture
def decide(tmp_path):
    """Tells of the same point of trials of one training whether they are pruned."""
    return lambda trial, value: search.should_prune(tmp_path, Training("a", {}, 0, trial), 10, value)


def test_a_resumed_training_decides_as_before(tmp_path, decide):
    # Three others say too little of the fourth.
    assert [decide(trial, value) for trial, value in enumerate([2.0, 3.0, 4.0, 1.0])] == [False] * 4
    assert decide(4, 2.4)  # the median is 2.5
    assert not decide(5, 2.4)  # the median itself
    assert decide(4, 99.0)  # what was decided stays
    assert not search.should_prune(tmp_path, Training("a", {}, 0, 6), 20, 0.0)  # another point has its own median
    for trial in range(4):  # and another training, whose name ends alike
        assert not search.should_prune(tmp_path, Training("very-a", {}, 0, trial), 10, 99.0)
    assert not decide(7, 2.6)


def test_a_return_that_is_not_a_number_is_the_worst(decide):
    assert not any(decide(trial, value) for trial, value in enumerate([math.nan, math.nan, 5.0, 1.0, 2.0]))
    assert decide(5, math.nan)
    assert not decide(6, 0.5)  # three are the worst of six
    assert decide(7, 0.4)  # the median is 0.5


@NEEDS
def test_a_search_ends_after_its_trials_and_goes_on_with_more(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    first = make(3)
    frame = first.run()
    policies = frame[["vary.lr", "vary.horizon", "vary.model_config"]].drop_duplicates()
    assert len(policies) == 3
    assert policies["vary.lr"].between(1e-4, 1e-2).all()
    assert policies["vary.horizon"].between(4, 8).all()
    assert set(policies["vary.model_config"]) == {'{"hidden_sizes": [8]}'}
    with pytest.raises(StudyError, match="has 3 trials"):
        make(2).run()
    again = make(3)
    assert again.run().equals(frame)
    assert again.supports["fixed"]["length"] == first.supports["fixed"]["length"] == [0.5, 0.5]

    # Killed in a trial: what it had begun is done, and no other in its place.
    run_job = mock.patch("rl8x.studies.study.run_job", side_effect=KeyboardInterrupt)
    with run_job as killed, pytest.raises(KeyboardInterrupt):
        make(4).run()
    # Failed: the trial has no value, and its training is tried again all the same.
    with mock.patch("rl8x.studies.study.run_job", lambda job: {"key": job["key"], "error": "no luck"}):
        failed = make(4)
        failed.run()
    assert list(failed.failed.values()) == ["no luck"]
    more = make(4).run()
    assert len(more[["vary.lr"]].drop_duplicates()) == 4
    assert killed.call_args[0][0]["vary"]["lr"] in set(more["vary.lr"])
    assert more[: len(frame)].equals(frame)


@NEEDS
def test_what_a_kill_leaves_is_ended_by_the_same_study(tmp_path, monkeypatch):
    """A trial that was drawn alone, one that was begun, and one whose training was done but not told."""
    monkeypatch.chdir(tmp_path)
    make(1).run()
    study = make(4)
    opened = search.open_search(study.folder, study.config)
    opened.ask()
    assert len(search.next_trials(opened, study.config, 1, ())) == 1

    with mock.patch.object(search, "tell", side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
        make(4).run()
    frame = make(4).run()
    trials = search.open_search(study.folder, study.config).trials
    assert [trial.state.name for trial in trials] == ["COMPLETE", "FAIL", "COMPLETE", "COMPLETE", "COMPLETE"]
    assert frame["vary.lr"].nunique() == 4


@NEEDS
@pytest.mark.parametrize(
    ("returns", "value"), [([1.0, 4.0], 2.5), ([math.nan, 1.0], -math.inf), ([math.inf], -math.inf)]
)
def test_a_value_that_is_not_finite_is_the_worst_for_optuna_too(returns, value):
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(direction="maximize")
    search.tell(study, study.ask().number, returns, pruned=False)
    (trial,) = study.trials
    assert (trial.state.name, trial.value) == ("COMPLETE", value)


def test_without_optuna_the_refusal_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(ValueError, match=r"pip install 'rl8x\[studies\]'"):
        make(2).run()
    assert list(tmp_path.iterdir()) == []
