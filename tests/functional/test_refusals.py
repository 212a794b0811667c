"""What functions of tensors refuse: shapes that would be broadcast, numbers out of range."""

import math

import pytest
import torch

from rl8x.functional import (
    RunningMoments,
    expectation,
    explained_variance,
    generalized_advantages,
    moments,
    project,
    running_returns,
)

NO, R, V = torch.zeros(4, 3, dtype=torch.bool), torch.rand(4, 3), torch.rand(5, 3)


def advantages(rewards=R, values=V, final_values=R, terminated=NO, truncated=NO, **factors):
    factors = {"gamma": 0.9, "gae_lambda": 0.8} | factors
    return generalized_advantages(rewards, values, final_values, terminated, truncated, **factors)


def returns(rewards=R, cuts=NO, carry=R[0], gamma=0.9):
    return running_returns(rewards, cuts, carry, gamma)


REFUSED = [
    (r"one row more than `rewards`: \[5, 3\]; got \[4, 3\]", lambda: advantages(values=R)),
    (r"`terminated` must be shaped like `rewards`, \[4, 3\]; got \[4, 1\]", lambda: advantages(terminated=NO[:, :1])),
    (r"a step or more; got \[\]", lambda: advantages(*[torch.tensor(0.0)] * 3, *[torch.tensor(False)] * 2)),
    (r"`carry` must be shaped \[3\]; got \[4\]", lambda: returns(carry=torch.zeros(4))),
    *(("`gamma` must be at least 0 and at most 1", lambda g=g: returns(gamma=g)) for g in (-0.1, 1.5, math.nan)),
    ("`gae_lambda` must be at least 0 and", lambda: advantages(gae_lambda=1.5)),
    (r"`batch` must be shaped \[..., 3\]; got \[5, 2\]", lambda: RunningMoments((3,)).update(torch.rand(5, 2))),
    (r"`mask` must be shaped \[5\], one a row; got \[4\]", lambda: RunningMoments((3,)).update(V, NO[:, 0])),
    (r"must not be negative; got .* -1", lambda: RunningMoments(epsilon=-1.0)),
    (r"must not be negative; got \(2, -1\)", lambda: RunningMoments((2, -1))),
    (r"must have one shape; got \[4\], \[4\] and \[1\]", lambda: explained_variance(R[:, 0], R[:, 0], NO[:1, 0])),
    (r"`mask` \[rows\]; got \[4, 3\] and \[1\]", lambda: moments(R, NO[:1, 0])),
    (r"`batch` must be shaped \[rows, ...\] .*; got \[\]", lambda: moments(torch.tensor(1.0))),
    (r"`atoms` \[num_atoms\]; got \[4, 3\], \[4\]", lambda: expectation(R, R[:, 0])),
    # of one atom a distance would be 0 / 0
    (r"at least two; got \[4, 1\], \[4, 1\], \[1\]", lambda: project(R[:, :1], R[:, :1], torch.zeros(1))),
    (r"got \[4, 3\], \[4, 1\], \[3\]", lambda: project(R, R[:, :1], torch.arange(3.0))),
]


@pytest.mark.parametrize(("message", "call"), REFUSED)
def test_what_is_not_legal_is_refused_with_what_is(message, call):
    with pytest.raises(ValueError, match=message):
        call()
