from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv
from gymnasium.wrappers import RecordEpisodeStatistics
from gymnasium.wrappers.vector import RecordEpisodeStatistics as RecordEpisodesOfVector
from tests.probes import Probe, Steps

from rl8x import PPOConfig
from rl8x.envs import GymnasiumEnv, validate
from rl8x.envs.episode_metrics import REDUCTIONS, EpisodeMetrics

ALL = torch.ones(3, dtype=torch.bool)


@pytest.mark.parametrize(
    "rows",
    [
        [[1.0, 5.0, math.nan], [4.0, 1.0, math.nan]],
        [[1.0, math.nan, math.nan], [math.nan, 5.0, math.nan], [4.0, 1.0, math.nan]],
    ],
)
def test_each_reduction_by_hand(rows):
    metrics, accumulators = EpisodeMetrics({name: name for name in REDUCTIONS}), {}
    for row in rows:
        info = {name: np.array(row) for name in metrics.reductions}
        masks = {f"_{name}": np.array([True, True, False]) for name in metrics.reductions}
        accumulators = metrics.update(accumulators, info | (masks if rows[0][1] == 5 else {}), None, ALL)
    figures = {name: figure.tolist()[:2] for name, figure in metrics.values(accumulators).items()}
    assert figures == {"last": [4, 1], "mean": [2.5, 3], "sum": [5, 6], "max": [4, 5], "min": [1, 1]}
    assert all(math.isnan(figure[2]) for figure in metrics.values(accumulators).values())
    after = metrics.values(metrics.restarted(accumulators, torch.tensor([True, False, False])))
    assert after["sum"].isnan().tolist() == [True, False, True]


@pytest.mark.parametrize(
    "numbers",
    [np.arange(3, dtype=kind) for kind in (">f4", ">i2", "u2", "u8", np.float16, np.longdouble)]
    + [np.arange(3.0)[::-1][::-1], np.arange(3.0).repeat(2)[4::-2][::-1], np.broadcast_to(np.arange(3), (1, 3))],
)
def test_any_array_of_numbers_is_reported(numbers, recwarn):
    metrics = EpisodeMetrics(["x"])
    assert metrics.values(metrics.update({}, {"x": numbers}, None, ALL))["x"].tolist() == [0, 1, 2]
    backwards = metrics.values(metrics.update({}, {"x": numbers.reshape(-1)[::-1]}, None, ALL))
    assert backwards["x"].tolist() == [2, 1, 0]
    assert list(recwarn) == []


def test_infos_of_any_kind_are_looked_through_for_what_was_meant_and_what_is_no_number_is_left_alone():
    metrics = EpisodeMetrics(["sucess"])
    info = {"success": np.ones(3), 3: np.ones(3), ("a",): 1, "paths": [[1], [1, 2]], "self": metrics, "none": None}
    info |= {"text": np.array(["a", "b", "c"]), "wide": np.zeros((3, 2)), "nested": {"x": "y"}}
    with pytest.warns(RuntimeWarning, match=r"Did you mean 'success'.* it reported 'success'\.$"):
        metrics.check_reported({}, info, ALL)
    assert EpisodeMetrics(["paths", "text", "wide", "nested", "other", "text/x"]).update({}, info, None, ALL) == {}


class Goal(Steps):
    """Episodes of 3 to 5 steps; success where the length is even; `effort` is the step's number; resets say so too."""

    def reset(self, *, seed=None, options=None):
        obs, _ = super().reset(seed=seed)
        self.length = int(self.np_random.integers(3, 6))
        return obs, {"is_success": True, "effort": 100.0}

    def step(self, action):
        obs, reward, ended, *_ = super().step(action)
        info = {"effort": float(self.time)} | ({"is_success": self.length % 2 == 0} if ended else {})
        return obs, reward, ended, False, info


@pytest.mark.parametrize("form", [bool, np.bool_, float, np.int64, lambda x: np.array([x])])
@pytest.mark.parametrize("made", [True, False])
def test_a_success_in_any_form_is_averaged(form, made):
    class Formed(Goal):
        def step(self, action):
            *result, info = super().step(action)
            return *result, info | ({"is_success": form(info["is_success"])} if "is_success" in info else {})

    env = GymnasiumEnv(Formed, 3, seed=4) if made else GymnasiumEnv(SyncVectorEnv([Formed] * 3), seed=4)
    found = {
        int(step.episode_lengths[row]): float(step.metrics["is_success"][row]) for step, row in ended_rows(env, 30)
    }
    assert found == {3: 0.0, 4: 1.0, 5: 0.0}


def vectorised(mode):
    kind = AsyncVectorEnv if mode == "async" else SyncVectorEnv
    return kind([Goal] * 3, autoreset_mode=AutoresetMode.SAME_STEP if mode == "async" else mode)


@pytest.mark.parametrize("mode", [*AutoresetMode, "async", "made"])
def test_figures_over_episodes_in_each_autoreset_mode(mode):
    source = Goal if mode == "made" else vectorised(mode)
    env = GymnasiumEnv(source, 3, seed=4, metrics={"is_success": "last", "effort": "sum"})
    ended = 0
    for step, row in ended_rows(env, 40):
        length = int(step.episode_lengths[row])
        assert step.metrics["is_success"][row] == float(length % 2 == 0)
        assert step.metrics["effort"][row] == length * (length + 1) / 2
        ended += 1
    assert ended > 15
    env.close()


def ended_rows(env, steps):
    """Step without noise; yield each row whose episode ended, with its step."""
    env.reset()
    carry = env.carry
    for _ in range(steps):
        carry, step = env.advance(carry, torch.zeros(3, dtype=torch.int64), torch.empty(3, 0))
        rows = (step.terminated | step.truncated) & (step.valid if step.valid is not None else True)
        yield from ((step, row) for row in rows.nonzero().squeeze(1).tolist())


@pytest.mark.parametrize("kind", [SyncVectorEnv, AsyncVectorEnv])
@pytest.mark.parametrize("mode", AutoresetMode)
@pytest.mark.parametrize("around", ["the vector", "each copy", "both"])
def test_gymnasiums_statistics_of_episodes_are_those_of_the_episodes(around, mode, kind):
    """Its wrapper around the vector puts a mask beside its dict, that around a copy beside each number too."""
    make = Goal if around == "the vector" else lambda: RecordEpisodeStatistics(Goal())
    vector = kind([make] * 3, autoreset_mode=mode)
    names = {"each copy": ["episode"], "the vector": ["episode"], "both": ["episode", "outer"]}[around]
    if around != "each copy":
        vector = RecordEpisodesOfVector(vector, stats_key=names[-1])
    env = GymnasiumEnv(vector, seed=4, metrics=[f"{name}/{figure}" for name in names for figure in "rl"])
    ended = 0
    for step, row in ended_rows(env, 30):
        for name in names:
            assert step.metrics[f"{name}/r"][row] == step.episode_returns[row] == step.episode_lengths[row]
            assert step.metrics[f"{name}/l"][row] == step.episode_lengths[row]
        ended += 1
    assert ended > 12
    env.close()


def test_masks_at_all_levels_count_together():
    some, others = torch.tensor([True, True, False]), torch.tensor([True, False, True])
    log = {"x": torch.tensor([1.0, 2.0, 3.0]), "_x": others}
    reported = {"log": log, "_log": some, "deep": {"log": log}, "_deep": "no mask", "log/y": 4.0, "_log/y": some}
    figures = EpisodeMetrics(["log/x", "deep/log/x", "log/y"])
    values = figures.values(figures.update({}, reported, None, ALL))
    expected = {"log/x": [1, -1, -1], "deep/log/x": [1, -1, 3], "log/y": [4, 4, -1]}
    assert {name: value.nan_to_num(-1).tolist() for name, value in values.items()} == expected
    info = {"final_info": {"x": torch.tensor([1.0, 2.0, 3.0])}, "_final_info": some}
    values = EpisodeMetrics("x").update({}, info, ALL, ALL)["x"]["value"]
    assert values.nan_to_num(-1).tolist() == [1, 2, -1]
    after_resets = {"x": torch.tensor([1.0, 2.0, 3.0]), "final_info": {}}  # of which only the third goes on
    values = EpisodeMetrics("x").update({}, after_resets, some, ALL)["x"]["value"]
    assert values.nan_to_num(-1).tolist() == [-1, -1, 3]


def test_a_metric_that_is_never_reported_is_warned_of_once_when_an_episode_has_ended():
    env = GymnasiumEnv(vectorised(AutoresetMode.SAME_STEP), seed=4, metrics=["is_sucess", "effort"])
    env.reset()
    actions = torch.zeros(3, dtype=torch.int64)
    with pytest.warns(RuntimeWarning, match="names 'is_sucess', which .* Did you mean 'is_success'") as caught:
        [env.step(actions) for _ in range(20)]
    assert len(caught) == 1
    assert "In `info` it reported 'effort', 'is_success'." in str(caught[0].message)


@pytest.mark.parametrize("metrics", ["auto", ["is_success"], {"effort": "max"}, ()])
def test_metrics_that_are_reported_and_those_that_nobody_asked_for_are_not_warned_of(metrics, recwarn):
    env = GymnasiumEnv(vectorised(AutoresetMode.SAME_STEP), seed=4, metrics=metrics)
    env.reset()
    for _ in range(9):
        env.step(torch.zeros(3, dtype=torch.int64))
    assert list(recwarn) == []


class Own(Probe):
    default_time_limit = 4
    metric_names = ("distance",)

    def initial_state(self, parameters, noise):
        return {"x": noise}

    def transition(self, state, actions, parameters, noise):
        return {"x": state["x"] + 1.0}, torch.zeros(self.num_envs), torch.zeros(self.num_envs, dtype=torch.bool)

    def measure(self, state, parameters):
        return {"distance": state["x"][:, 0].floor()}


def test_an_environment_of_ones_own_measures_its_states():
    config = PPOConfig(num_envs=4, horizon=8, seed=0, device="cpu", model_config={"hidden_sizes": [4]})
    algorithm = config.build(Own)
    assert algorithm.collect()["episodes/info/distance/mean"] == 4.0  # at the last state, not after the reset
    assert algorithm.evaluate()["episodes/info/distance/mean"] == 4.0
    env = Own(2, seed=0)
    env.reset()
    info = env.step(torch.zeros(2, dtype=torch.int64))[4]
    assert info["distance"].tolist() == [1.0, 1.0]
    assert info["_distance"].all()


@pytest.mark.parametrize(
    ("attributes", "message"),
    [
        (
            {"metric_names": ("distance", "speed")},
            r"metrics as a dict with .*; got \['distance'\]",
        ),
        (
            {"measure": lambda *_: {"distance": torch.ones(2, dtype=torch.int64)}},
            r"metrics.* as \[2\] torch.float32",
        ),
    ],
)
def test_what_is_measured_is_validated(attributes, message):
    with pytest.raises(ValueError, match=rf"Wrong.measure must return {message}"):
        validate(type("Wrong", (Own,), attributes)(2))
