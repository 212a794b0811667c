"""One update of an algorithm that learns from rows, on a batch made by hand: for second formulations of its loss."""

import torch
from gymnasium.spaces import Discrete

from rl8x import keys
from rl8x.algorithms.off_policy.learner import TAU


def batch_of(algorithm, tau=0.5):
    """Make six rows, terminations among them, and what an update draws beside its rows."""
    generator = torch.Generator().manual_seed(5)
    shape, space = algorithm.observation_space.shape, algorithm.action_space

    def actions():
        if isinstance(space, Discrete):
            return torch.randint(int(space.n), (6,), generator=generator)
        low, high = torch.tensor(space.low), torch.tensor(space.high)
        return torch.rand(6, *space.shape, generator=generator) * (high - low) + low

    drawn = {name: each[0] for name, each in algorithm.draw(0, 1).items()}
    return drawn | {
        keys.OBS: torch.randn(6, *shape, generator=generator),
        keys.NEXT_OBS: torch.randn(6, *shape, generator=generator),
        keys.ACTIONS: actions(),
        keys.NEXT_ACTIONS: actions(),
        keys.RETURNS: torch.randn(6, generator=generator) * 3,
        keys.DISCOUNTS: torch.tensor([0.9, 0.0, 0.81, 0.9, 0.0, 0.9]),
        TAU: torch.tensor(tau),
    }


def disturb(algorithm, size=0.3):
    """Move all trained weights, so that targets differ from networks and policies are far from uniform."""
    generator = torch.Generator().manual_seed(8)
    for each in algorithm.nets.trained.values():
        for view in each.optimizer.views:
            view.data.add_(torch.randn(view.shape, generator=generator) * size)


def updated(algorithm, batch, turn=-1):
    """Make one update, by default one of all phases; return its metrics and the errors of the rows."""
    return algorithm.cycle[turn].update(algorithm.nets.bind(algorithm.nets.state, algorithm.nets.rates), batch)
