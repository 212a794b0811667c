import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rl8x.algorithms.off_policy.sources import collected_stats
from rl8x.rollouts.statistics import Stats, numpy_if_small, pool, summary

numbers = st.floats(-1e3, 1e3, width=32)


def test_values_are_floats_of_all_that_was_merged():
    merged = Stats.merge(Stats({"a": torch.tensor(1.5), "b": 2}), Stats({"c": torch.tensor(3, dtype=torch.int64)}))
    assert dict(merged) == {"a": 1.5, "b": 2.0, "c": 3.0}
    assert all(type(value) is float for value in merged.values())


@pytest.mark.parametrize("read", [False, True])
def test_counts_gate_what_they_count_also_where_they_were_read(read):
    values = {"x": torch.tensor(math.nan), "y": torch.tensor(2.0), "n": torch.tensor(2**40 + 1)}
    values["_count/x"] = torch.tensor(0)
    stats = Stats(values, {"_count/x": ("x",)})
    if read:
        assert dict(stats) == {"y": 2.0, "n": 2.0**40 + 1}
    assert dict(Stats.merge(stats, {"y": 1.0, "z": 3.0})) == {"y": 1.0, "n": 2.0**40 + 1, "z": 3.0}
    assert stats.counted()[0]["_count/x"] == 0.0
    assert stats.counted()[1] == {"_count/x": ("x",)}
    assert Stats(values | {"_count/x": torch.tensor(2)}, {"_count/x": ("x",)}).keys() == {"x", "y", "n"}


def test_horizons_are_pooled_as_if_one_had_counted_all():
    horizons = [
        {"r/min": -1.0, "r/max": 2.0, "r/mean": 1.0, "r/std": 3.0, "episodes/ended": 2.0, "_count/r": 1},
        {"r/min": 0.0, "r/max": 5.0, "r/mean": 2.0, "r/std": 4.0, "episodes/ended": 1.0, "_count/r": 3, "e/mean": 7.0},
    ]
    # mean: (1 + 3 * 2) / 4; std: ((9 + 0.75^2) + 3 (16 + 0.25^2)) / 4 under the root
    expected = {"r/min": -1.0, "r/max": 5.0, "r/mean": 1.75, "r/std": 14.4375**0.5, "episodes/ended": 3.0}
    assert dict(pool(horizons, {"_count/r": ("r/",)})) == pytest.approx(expected | {"e/mean": 7.0})


@pytest.mark.parametrize("order", [1, -1])
def test_a_horizon_that_is_not_a_number_shows_in_all_figures(order):
    horizons = [{"r/min": 0.0, "r/max": 1.0, "r/std": 0.5}, dict.fromkeys(("r/min", "r/max", "r/std"), math.nan)]
    assert all(math.isnan(value) for value in pool(horizons[::order], {}).values())


@settings(max_examples=80, deadline=None)
@given(st.lists(st.tuples(numbers, st.booleans()), min_size=1, max_size=30))
def test_summaries_equal_numpys(rows):
    values = torch.tensor([value for value, _ in rows], dtype=torch.float64)
    mask = torch.tensor([kept for _, kept in rows])
    array, kept = values.numpy(), values.numpy()[mask.numpy()]
    expected = [array.min(), array.max(), array.mean(), array.std()]
    of_kept = [kept.min(), kept.max(), kept.mean(), kept.std()] if len(kept) else [math.nan] * 4
    assert [float(figure) for figure in summary(values)] == pytest.approx(expected, abs=1e-9)
    values[~mask] = math.nan
    for figures in (summary(values, mask), summary(array, mask.numpy())):
        assert [float(figure) for figure in figures] == pytest.approx(of_kept, abs=1e-9, nan_ok=True)


def test_whole_numbers_are_summarised_as_floats():
    found = [float(figure) for figure in summary(torch.tensor([[1, 2], [3, 6]]))]
    assert found == pytest.approx([1.0, 6.0, 3.0, math.sqrt(3.5)])  # (4 + 1 + 0 + 9) / 4


# -- of a few numbers, by NumPy

COPIES = 20


def rollout(horizon=3, copies=COPIES, seed=0):
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randn(horizon + 1, copies, 2, generator=generator)
    ended = torch.rand(2, horizon + 1, copies, generator=generator) < 0.2
    return {
        "obs": drawn,
        "actions": torch.zeros(horizon + 1, copies, dtype=torch.int64),
        "logp": drawn[..., 0] - 9.0,
        "rewards": drawn[..., 0] * 3.0,
        "terminated": ended[0],
        "truncated": ended[1],
        "episode_returns": drawn[..., 1].clone(),
        "episode_lengths": torch.arange(horizon * copies + copies).view(horizon + 1, copies),
        "metrics/height": torch.where(drawn[..., 1] > 0, drawn[..., 0], torch.nan),
        "next_obs": drawn + 1.0,
    }


def filled(name, number, horizon=3, copies=COPIES):
    return {name: torch.full((horizon + 1, copies), number)}


CHANGES = {
    "some ended": {},
    "none ended": filled("terminated", False) | filled("truncated", False),
    "no height": filled("metrics/height", math.nan),
    "some valid": {"valid": rollout(seed=7)["terminated"] | rollout(seed=7)["truncated"]},
    "none valid": filled("valid", False),
    "a reward": filled("rewards", math.inf),
    "a final value": filled("values", 0.5) | filled("final_values", math.nan),
    "whole numbers": {"obs": torch.zeros(4, COPIES, 2, dtype=torch.uint8)},
    "another number format": {"obs": torch.zeros(4, COPIES, 2, dtype=torch.bfloat16)},
}


@pytest.mark.parametrize("copies", [COPIES, 1])
@pytest.mark.parametrize("what", CHANGES)
@pytest.mark.filterwarnings("error")
def test_statistics_of_few_numbers_are_those_of_many(what, copies):
    tensors = {name: tensor[:, :copies] for name, tensor in (rollout() | CHANGES[what]).items()}
    horizon = 1 if copies == 1 else 3
    expected, found = (collected_stats(given, horizon) for given in (tensors, numpy_if_small(tensors)))
    if "valid" in tensors:
        ended = (tensors["terminated"] | tensors["truncated"]) & tensors["valid"]
        assert expected["episodes/ended"] == int(ended[:horizon].sum())
    isnt_tensor = [not isinstance(value, torch.Tensor) for value in found.unread()[0].values()]
    assert all(isnt_tensor) or "format" in what
    assert found.counted()[1] == expected.counted()[1]
    assert list(found) == list(expected)
    assert dict(found) == pytest.approx(dict(expected), rel=1e-5, abs=1e-6, nan_ok=True)
