"""Flags of numbers that are not finite: of rollouts, and of the updates of a step; trainers/test_non_finite.py acts."""

import math

import pytest
import torch
from tests.rollouts.test_statistics import COPIES, rollout

from rl8x.algorithms.off_policy.sources import collected_stats
from rl8x.algorithms.off_policy.updates import update_stats
from rl8x.rollouts.statistics import on_host


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


@pytest.mark.parametrize("host_looks", [True, False])
@pytest.mark.parametrize("wrong", [None, "loss", "norm", "weights"])
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
