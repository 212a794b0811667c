import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rl8x.algorithms.off_policy.sources import collected_stats
from rl8x.algorithms.off_policy.updates import update_stats
from rl8x.functional import moments
from rl8x.rollouts.statistics import Stats, masked_summary, on_host, pool, summary

numbers = st.floats(-1e3, 1e3, width=32)


def test_values_are_floats_and_tensors_are_copied_once(monkeypatch):
    copies = []
    tolist = torch.Tensor.tolist
    monkeypatch.setattr(torch.Tensor, "tolist", lambda self: copies.append(self.shape) or tolist(self))
    merged = Stats.merge(Stats({"a": torch.tensor(1.5), "b": 2}), Stats({"c": torch.tensor(3, dtype=torch.int64)}))
    assert copies == []
    assert dict(merged) == {"a": 1.5, "b": 2.0, "c": 3.0}
    assert all(type(value) is float for value in merged.values())
    assert copies == [(2,)]


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
    array = values.numpy()
    expected = [array.min(), array.max(), array.mean(), array.std()]
    assert [float(figure) for figure in summary(values)] == pytest.approx(expected, abs=1e-9)
    kept = array[mask.numpy()]
    figures = [float(figure) for figure in masked_summary(values, mask)]
    if len(kept):
        assert figures == pytest.approx([kept.min(), kept.max(), kept.mean(), kept.std()], abs=1e-9)
    else:
        assert all(math.isnan(figure) for figure in figures)


@pytest.mark.parametrize(
    ("values", "mask", "expected"),
    [
        ([1.0, math.nan, 3.0, math.inf], [True, False, True, False], [1.0, 3.0, 2.0, 1.0]),
        ([[1, 2], [3, 6]], [[True] * 2] * 2, [1.0, 6.0, 3.0, math.sqrt(3.5)]),  # (4 + 1 + 0 + 9) / 4
        ([[1, 2], [3, 6]], [[False, True], [False, True]], [2.0, 6.0, 4.0, 2.0]),
    ],
)
def test_summaries_of_whole_numbers_and_under_masks(values, mask, expected):
    values, mask = torch.tensor(values), torch.tensor(mask)
    assert [float(figure) for figure in masked_summary(values, mask)] == pytest.approx(expected)
    assert [float(figure) for figure in summary(values[mask])] == pytest.approx(expected)
    found = moments(values.float().flatten(), mask.flatten())
    assert [float(each) for each in found] == pytest.approx([int(mask.sum()), expected[2], expected[3] ** 2])


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
    expected, found = (collected_stats(given, horizon) for given in (tensors, on_host(tensors)))
    isnt_tensor = [not isinstance(value, torch.Tensor) for value in found.unread()[0].values()]
    assert all(isnt_tensor) or "format" in what
    assert found.counted()[1] == expected.counted()[1]
    assert list(found) == list(expected)
    assert dict(found) == pytest.approx(dict(expected), rel=1e-5, abs=1e-6, nan_ok=True)


def test_many_numbers_stay_tensors():
    tensors = {"obs": torch.zeros(2**17 + 1)}
    assert on_host(tensors) is tensors


@pytest.mark.parametrize("where", [dict, on_host])
@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(
    ("key", "flag"),
    [("obs", "observations"), ("next_obs", "observations"), ("rewards", "rewards"), ("logp", "actions")],
)
def test_one_number_that_is_not_finite_is_seen_wherever_it_is(where, number, key, flag):
    for place in range(0, 3 * COPIES, 7):
        tensors = rollout()
        tensors[key].view(4 * COPIES, -1)[place, -1] = number
        row = collected_stats(where(tensors), 3)
        assert [name for name, value in row.items() if name.startswith("finite/") and value] == [f"finite/{flag}"]


@pytest.mark.parametrize("wrong", [None, "loss", "norm", "weights"])
@pytest.mark.parametrize("host_looks", [True, False])
def test_statistics_of_updates_are_means_of_those_that_have_each(wrong, host_looks):
    names, weights = ("losses/q", "q/grad_norm", "losses/policy"), torch.full((5000,), 3e38)  # their sum is not finite
    rows = [torch.tensor([[0.25, 2.0]]), torch.tensor([[0.75, 4.0, 5.0], [1.25, 6.0, 7.0]])]
    for bad, values in {"loss": rows[0][:, :1], "norm": rows[0][:, 1:], "weights": weights[-1:]}.items():
        if bad == wrong:
            values.fill_(math.inf)
            rows[1][:] = math.nan if bad != "weights" else 1.0  # all that follows is bad, and names no cause
    found = update_stats(rows, names, [weights], host_looks=host_looks)
    flags = [found[f"finite/{name}"] for name in ("losses", "gradients", "parameters")]
    assert flags == [float(bad == wrong) for bad in ("loss", "norm", "weights")]
    if wrong is None:
        assert [found[name] for name in names] == [0.75, 4.0, 6.0]
        assert dict(update_stats(rows[:1], names, [weights], host_looks=host_looks)).keys() & {*names} == {*names[:2]}
