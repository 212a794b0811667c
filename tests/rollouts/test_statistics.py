import functools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rl8x import keys
from rl8x.algorithms.off_policy.off_policy import collected_stats
from rl8x.algorithms.off_policy.updates import single_update_stats, update_stats
from rl8x.execution import Execution
from rl8x.functional import moments
from rl8x.rollouts.statistics import Stats, StatsProgram, masked_summary, pool, summary, transition_stats

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


# -- a single transition or update


def one_transition(**changed):
    """Return the tensors of a rollout of one transition by key, `[2, 1, ...]`."""
    numbers = {"observations": [[0.1, -2.0]], "actions": [1], "logp": [-0.3], "rewards": [0.7]}
    numbers |= {"episode_returns": [3.3], "episode_lengths": [7], "terminated": [False], "truncated": [False]}
    numbers |= {f"{keys.METRICS}/score": [math.nan]} | changed
    names = {"observations": keys.OBS, "actions": keys.ACTIONS, "logp": keys.LOGP}
    return {names.get(name, name): torch.tensor([value, value]) for name, value in numbers.items()}


@pytest.mark.parametrize(
    "changed",
    [
        {},
        {"terminated": [True], f"{keys.METRICS}/score": [0.3]},
        {"truncated": [True], "observations": [[3, 4]]},
        {"rewards": [math.nan]},
        {"observations": [[math.inf, 0.0]], "terminated": [True]},
        {"valid": [False], "truncated": [True]},
        {"values": [0.5], "final_values": [math.nan]},
    ],
)
def test_statistics_of_a_single_transition_are_those_of_a_horizon_of_one(changed):
    tensors = one_transition(**changed)
    expected, found = collected_stats(tensors, horizon=1), transition_stats(tensors)
    assert found.counted()[0].keys() == expected.counted()[0].keys()
    assert found.counted()[1] == expected.counted()[1]
    assert list(found) == list(expected)
    np.testing.assert_equal(dict(found), dict(expected))


@pytest.mark.parametrize("wrong", [None, "loss", "norm", "weights"])
def test_statistics_of_a_single_update_are_those_of_a_step_of_one(wrong):
    names, row, weights = ("losses/q", "q/grad_norm", "losses/policy"), torch.tensor([[0.1, 0.2]]), torch.ones(5000)
    for bad, values in {"loss": row[:, :1], "norm": row[:, 1:], "weights": weights[-1:]}.items():
        values.fill_(math.inf if bad == wrong else 3e38)  # finite, though sums are not
    found = single_update_stats(row[0], names, [weights])
    assert dict(found) == dict(update_stats({"rows/0": row, "weights/0": weights}, names))
    flags = [found[f"finite/{name}"] for name in ("losses", "gradients", "parameters")]
    assert flags == [float(bad == wrong) for bad in ("loss", "norm", "weights")]


# -- by a program

HORIZON, COPIES = 3, 20
CPU = torch.device("cpu")


def rollout(seed=0):
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randn(HORIZON + 1, COPIES, 2, generator=generator)
    ended = torch.rand(2, HORIZON + 1, COPIES, generator=generator) < 0.2
    return {
        "obs": drawn,
        "actions": torch.zeros(HORIZON + 1, COPIES, dtype=torch.int64),
        "rewards": drawn[..., 0] * 3.0,
        "terminated": ended[0],
        "truncated": ended[1],
        "episode_returns": drawn[..., 1].clone(),
        "episode_lengths": torch.arange(HORIZON * COPIES + COPIES).view(HORIZON + 1, COPIES),
        "metrics/height": torch.where(drawn[..., 1] > 0, drawn[..., 0], torch.nan),
        "next_obs": drawn + 1.0,
    }


@pytest.fixture(scope="module")
def compiled():
    program = StatsProgram(functools.partial(collected_stats, horizon=HORIZON), Execution("compile", "fp32", CPU))
    program.prepare(rollout())
    return program


def alike(compiled, tensors):
    found, expected = compiled(tensors), compiled.summarise(tensors)
    counted, gates = found.counted()
    assert all(type(value) is float for value in found.unread()[0].values())
    assert gates == expected.counted()[1]
    assert counted.keys() == expected.counted()[0].keys()
    assert dict(found) == pytest.approx(dict(expected), rel=1e-5, abs=1e-6, nan_ok=True)
    return dict(found)


def test_numbers_of_a_program_are_the_functions(compiled):
    for seed in (1, 2):
        alike(compiled, rollout(seed))
    none_ended = dict.fromkeys(("terminated", "truncated"), torch.zeros(HORIZON + 1, COPIES, dtype=torch.bool))
    row = alike(compiled, rollout() | none_ended)
    assert row["episodes/ended"] == 0.0
    assert "episodes/returns/mean" not in row


def test_a_program_of_an_earlier_run_is_found_and_names_its_numbers(compiled, monkeypatch):
    compiled(rollout())
    again = StatsProgram(compiled.summarise, Execution("compile", "fp32", CPU))
    monkeypatch.setattr("rl8x.execution.compiled.verdict", lambda *_: pytest.fail("verified again"))
    again.prepare(rollout())
    alike(again, rollout(3))


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(
    ("key", "flag"), [("obs", "observations"), ("next_obs", "observations"), ("rewards", "rewards")]
)
def test_one_number_that_is_not_finite_is_seen_wherever_it_is(compiled, number, key, flag):
    for place in range(0, HORIZON * COPIES, 7):
        tensors = rollout()
        tensors[key].view((HORIZON + 1) * COPIES, -1)[place, -1] = number
        row = compiled(tensors)
        assert [name for name, value in row.items() if name.startswith("finite/") and value] == [f"finite/{flag}"]


def test_other_names_and_shapes_are_summarised_without_a_program(compiled):
    more = rollout() | {"metrics/speed": torch.ones(HORIZON + 1, COPIES)}
    assert dict(compiled(more)) == pytest.approx(dict(compiled.summarise(more)), nan_ok=True)
    fewer = {name: tensor[:, :5] for name, tensor in rollout().items()}
    assert compiled(fewer)["rewards/mean"] == pytest.approx(float(fewer["rewards"][:HORIZON].mean()))


def test_what_was_not_asked_for_or_is_eager_has_no_program():
    for mode, prepares in (("compile", False), ("eager", True)):
        program = StatsProgram(functools.partial(collected_stats, horizon=HORIZON), Execution(mode, "fp32", CPU))
        if prepares:
            program.prepare(rollout())
        assert any(isinstance(value, torch.Tensor) for value in program(rollout()).unread()[0].values())
