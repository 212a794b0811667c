"""Scaling of rewards, such that the discounted returns of any task have the same bounds."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from rl8x.distributed import ranks
from rl8x.functional import RunningMoments, running_returns


class ReturnScale(nn.Module):
    """The factor of rewards with which discounted returns lie within plus and minus a bound.

        1 / max(std of G, max |G| / bound),    G_t = r_t + gamma (1 - cut_{t-1}) G_{t-1}

    over all transitions ever seen. A replay keeps rewards as they were; updates scale them by the present number.

    Args:
        num_envs: Copies of the environment.
        gamma: Discount of one step.
        bound: The largest return.

    Source: Engstrom et al. 2020, arXiv:2005.12729, section 3 (running returns).
    """

    carry: Tensor
    largest: Tensor

    def __init__(self, num_envs: int, gamma: float, bound: float) -> None:
        super().__init__()
        self.gamma = gamma
        self.bound = bound
        self.moments = RunningMoments()
        # Not part of the learned state: it belongs to the running episodes, and differs between ranks.
        self.register_buffer("carry", torch.zeros(num_envs), persistent=False)
        self.register_buffer("largest", torch.zeros(1))

    @torch.no_grad()
    def observe(self, rewards: Tensor, cuts: Tensor, valid: Tensor | None = None) -> None:
        """Update the scale with a horizon, and those of the other ranks.

        Args:
            rewards: Reward after each action, `[horizon, num_envs]`, finite.
            cuts: Where an episode ended, `[horizon, num_envs]`, bool.
            valid: False at masked autoreset steps, `[horizon, num_envs]`, bool; None: all are experience.
        """
        returns, carry = running_returns(rewards, cuts, self.carry, self.gamma)
        if valid is not None:
            returns = torch.where(valid, returns, 0.0)
        self.carry.copy_(carry)
        largest = torch.stack(ranks().gather(returns.abs().max())).amax(0)
        self.largest.copy_(torch.maximum(self.largest, largest))
        self.moments.update(returns, valid)

    def cut(self) -> None:
        """Reset the reward sums, as the episodes of all copies have ended."""
        self.carry.zero_()

    @property
    def scale(self) -> Tensor:
        """The factor, `[1]`; finite even if all rewards are 0."""
        std = self.moments.std.float()
        return torch.maximum(std, self.largest / self.bound).clamp(min=1e-4).reciprocal()
