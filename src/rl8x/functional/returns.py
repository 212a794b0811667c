"""Running discounted returns, whose spread is the scale of a task's rewards."""

from __future__ import annotations

import torch
from torch import Tensor


@torch.no_grad()
def running_returns(rewards: Tensor, cuts: Tensor, carry: Tensor, gamma: float) -> tuple[Tensor, Tensor]:
    """Run the discounted sum of *past* rewards forward through a rollout.

        R_t = r_t + gamma * (1 - cut_{t-1}) * R_{t-1}

    Dividing rewards by the standard deviation of R brings the returns of any task to about unit scale.

    Args:
        rewards: Reward after each action, `[horizon, num_envs]`.
        cuts: Where an episode ended, terminated or truncated, `[horizon, num_envs]`, bool.
        carry: What the rollout before this one left, `[num_envs]`; zeros before the first.
        gamma: Discount of one step, in [0, 1].

    Returns:
        R, `[horizon, num_envs]`, and the carry for the next rollout, `[num_envs]`: the last row, 0 where it ended an
        episode. Both are new tensors; the inputs stay as they are.

    Source: Engstrom et al. 2020, arXiv:2005.12729, section 3 (reward scaling).
    """
    if cuts.shape != rewards.shape or carry.shape != rewards.shape[1:]:
        raise ValueError(
            f"`cuts` must be shaped like `rewards`, {list(rewards.shape)}, and `carry` {list(rewards.shape[1:])}; "
            f"got {list(cuts.shape)} and {list(carry.shape)}."
        )
    returns = rewards.clone()
    goes_on = cuts.logical_not().to(returns.dtype)
    rows, decays = returns.unbind(0), (goes_on * gamma).unbind(0)
    rows[0].add_(carry, alpha=gamma)
    for t in range(1, len(rows)):
        rows[t].addcmul_(rows[t - 1], decays[t - 1])
    return returns, rows[-1] * goes_on[-1]
