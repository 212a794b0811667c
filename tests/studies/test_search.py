"""Searches: ranges are drawn from, hopeless trials are given up, and a killed search goes on."""

from __future__ import annotations

import importlib.util
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rl8x.studies import Study, StudyError, search
from rl8x.studies.definition import Training

NEEDS = pytest.mark.skipif(importlib.util.find_spec("optuna") is None, reason="optuna is not installed")


def make(trials, **changes):
    options = {
        "train": {"fixed": {}},
        "test": {"length": [0.25, 0.5]},
        "env": "CartPole",
        "max_steps": 2,
        "episodes": 2,
        "evaluate_at": [1],
        "tracking": False,
        "progress": "none",
        "vary": {
            "lr": {"log_uniform": [1e-4, 1e-2]},
            "horizon": {"int": [4, 8]},
            "model_config": [{"hidden_sizes": [8]}],
        },
        "algorithm_config": {"num_envs": 8, "device": "cpu"},
    }
    return Study(trials=trials, **{**options, **changes})


@given(st.floats(-1e6, 1e6), st.lists(st.floats(-1e6, 1e6), max_size=30))
def test_below_the_median_is_below_more_than_half(value, others):
    below = sum(value < other for other in others)
    if len(others) < 4:
        assert not search.is_below_median(value, others)
    elif below > len(others) / 2 + 1:
        assert search.is_below_median(value, others)
    elif below < len(others) / 2:
        assert not search.is_below_median(value, others)


def test_a_resumed_training_decides_as_before(tmp_path):
    def decide(trial, value):
        return search.should_prune(tmp_path, Training("a", {}, 0, trial), 10, value)

    assert [decide(trial, value) for trial, value in enumerate([1.0, 2.0, 3.0, 4.0])] == [False] * 4
    assert decide(4, 2.4)  # the median is 2.5
    assert not decide(5, 2.5)
    assert decide(4, 99.0)  # what was decided stays
    assert not search.should_prune(tmp_path, Training("a", {}, 0, 6), 20, 0.0)  # another point has its own median


def test_a_return_that_is_not_a_number_is_the_worst(tmp_path):
    def decide(trial, value):
        return search.should_prune(tmp_path, Training("a", {}, 0, trial), 10, value)

    assert not any(decide(trial, value) for trial, value in enumerate([math.nan, math.nan, 5.0, 1.0, 2.0]))
    assert decide(5, math.nan)
    assert not decide(6, 0.5)  # three are the worst of six
    assert decide(7, 0.4)  # the median is 0.5


def test_trainings_whose_names_end_alike_have_medians_of_their_own(tmp_path):
    def decide(name, trial, value):
        return search.should_prune(tmp_path, Training(name, {}, 0, trial), 10, value)

    for trial in range(4):
        assert not decide("very-wide", trial, 100.0)
        assert not decide("wide", trial, 1.0)
    assert not decide("wide", 4, 1.0)  # as all of `wide` before it, though below all of `very-wide`
    assert decide("very-wide", 4, 99.0)


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
    assert make(3).run().equals(frame)

    # Killed in a trial: what it had begun is done, and no other in its place.
    begun = []

    def killed(job):
        begun.append(job["vary"])
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("rl8x.studies.study.run_job", killed)
        with pytest.raises(KeyboardInterrupt):
            make(4).run()
    # Failed: the trial has no value, and its training is tried again all the same.
    with monkeypatch.context() as patch:
        patch.setattr("rl8x.studies.study.run_job", lambda job: {"key": job["key"], "error": "no luck"})
        failed = make(4)
        failed.run()
    assert list(failed.failed.values()) == ["no luck"]
    more = make(4).run()
    assert len(more[["vary.lr"]].drop_duplicates()) == 4
    assert begun[0]["lr"] in set(more["vary.lr"])
    assert more[: len(frame)].equals(frame)


def test_without_optuna_the_refusal_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(__import__("sys").modules, "optuna", None)
    with pytest.raises(ValueError, match=r"pip install 'rl8x\[studies\]'"):
        make(2).run()
    assert list(tmp_path.iterdir()) == []
