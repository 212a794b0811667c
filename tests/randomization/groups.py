"""Curricula made by hand, for tests of what they draw and how they move."""

import torch

from rl8x.randomization.curriculum import make_curricula


def group_of(seed=0, **members):
    """Return the one curriculum of some parameters' distributions, with its first levels drawn."""
    (group,) = make_curricula(members)
    group.allocate_state(torch.device("cpu"))
    group.begin(torch.Generator().manual_seed(seed))
    return group
