import math

import pytest
import torch

from rl8x.rollouts.statistics import Stats, reduce_horizons


def test_values_are_floats_and_tensors_are_copied_once(monkeypatch):
    copies = []
    tolist = torch.Tensor.tolist
    monkeypatch.setattr(torch.Tensor, "tolist", lambda self: copies.append(self.shape) or tolist(self))
    merged = Stats.merge(Stats({"a": torch.tensor(1.5), "b": 2}), Stats({"c": torch.tensor(3, dtype=torch.int64)}))
    assert copies == []
    assert dict(merged) == {"a": 1.5, "b": 2.0, "c": 3.0}
    assert all(type(value) is float for value in merged.values())
    assert copies == [(2,)]


def test_large_counts_survive_the_copy():
    assert Stats({"n": torch.tensor(2**40 + 1)})["n"] == 2**40 + 1


def test_figures_of_nothing_are_left_out():
    counts = {"episodes/ended": ("episodes/returns/",)}
    values = {"episodes/ended": torch.tensor(0), "episodes/returns/mean": torch.tensor(math.nan), "x": 1.0}
    assert dict(Stats(values, counts)) == {"episodes/ended": 0.0, "x": 1.0}
    assert Stats(values | {"episodes/ended": torch.tensor(2)}, counts).keys() == values.keys()


def test_later_parts_win_and_read_parts_can_be_merged():
    first = Stats({"a": torch.tensor(1.0)})
    assert first["a"] == 1.0
    assert dict(Stats.merge(first, {"a": 2.0, "b": 3.0})) == {"a": 2.0, "b": 3.0}


def test_horizons_reduce_as_documented():
    horizons = [
        {"r/min": -1.0, "r/max": 2.0, "r/mean": 1.0, "r/std": 3.0, "n": 2.0},
        {"r/min": 0.0, "r/max": 5.0, "r/mean": 2.0, "r/std": 4.0, "n": 1.0, "e/mean": 7.0},
    ]
    # std: sqrt((9 + 16) / 2)
    assert reduce_horizons(horizons) == pytest.approx(
        {"r/min": -1.0, "r/max": 5.0, "r/mean": 1.5, "r/std": 12.5**0.5, "n": 3.0, "e/mean": 7.0}
    )


@pytest.mark.parametrize("order", [1, -1])
def test_a_horizon_that_is_not_a_number_shows_in_all_figures(order):
    horizons = [{"r/min": 0.0, "r/max": 1.0, "r/std": 0.5}, dict.fromkeys(("r/min", "r/max", "r/std"), math.nan)]
    assert all(math.isnan(value) for value in reduce_horizons(horizons[::order]).values())
