"""Returns and advantages of a rollout."""

from __future__ import annotations

import torch
from torch import Tensor


@torch.no_grad()
def running_returns(rewards: Tensor, cuts: Tensor, carry: Tensor, gamma: float) -> tuple[Tensor, Tensor]:
    """Compute the discounted sum of *past* rewards at each step of a rollout.

        R_t = r_t + gamma * (1 - cut_{t-1}) * R_{t-1}

    Dividing rewards by the standard deviation of R brings the returns of any task to about unit scale.

    Args:
        rewards: Reward after each action, `[horizon, num_envs]`, horizon at least 1.
        cuts: Where an episode ended, terminated or truncated, `[horizon, num_envs]`, bool.
        carry: What the rollout before this one left, `[num_envs]`; zeros before the first.
        gamma: Discount of one step, in [0, 1].

    Returns:
        R, `[horizon, num_envs]`, and the carry for the next rollout, `[num_envs]`: the last row, 0 where it ended an
        episode. Both are new tensors; the inputs stay as they are.

    Raises:
        ValueError: If the shapes do not fit together, there is no step, or `gamma` is not in [0, 1].

    Source: Engstrom et al. 2020, arXiv:2005.12729, section 3 (reward scaling).
    """
    _check_rewards(rewards, gamma=gamma)
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


@torch.no_grad()
def generalized_advantages(
    rewards: Tensor,
    values: Tensor,
    final_values: Tensor,
    terminated: Tensor,
    truncated: Tensor,
    *,
    gamma: float,
    gae_lambda: float,
) -> tuple[Tensor, Tensor]:
    """Estimate advantages as an exponentially weighted sum of temporal-difference errors.

        v'_t    = 0                  where terminated_t
                  final_values_t     where truncated_t and not terminated_t
                  values_{t+1}       elsewhere
        delta_t = r_t + gamma * v'_t - values_t
        cut_t   = terminated_t or truncated_t
        A_t     = delta_t + gamma * gae_lambda * (1 - cut_t) * A_{t+1},    A_horizon = 0

    Args:
        rewards: Reward after each action, `[horizon, num_envs]`, horizon at least 1.
        values: Value of each observation acted on, and of the one after the last step, `[horizon + 1, num_envs]`.
        final_values: Value of the observation that each step led to, before any reset, `[horizon, num_envs]`. Read only
            where an episode is truncated and not terminated; what stands elsewhere, NaN too, has no influence.
        terminated: Where the task ended the episode, so that nothing comes after, `[horizon, num_envs]`, bool.
        truncated: Where a time limit or a forced reset cut the episode, `[horizon, num_envs]`, bool.
        gamma: Discount of the reward one step later, in [0, 1].
        gae_lambda: Weight of longer sums of rewards: 0 trusts the values alone, 1 the rewards alone, in [0, 1].

    Returns:
        Advantages and returns (advantages + values), new tensors, `[horizon, num_envs]`; the inputs stay untouched.

    Raises:
        ValueError: If the shapes do not fit together, there is no step, or `gamma` or `gae_lambda` is not in [0, 1].

    Source: Schulman et al. 2016, arXiv:1506.02438, eq. 16; time limits as in Pardo et al. 2018, arXiv:1712.00378.
    """
    _check_rewards(rewards, gamma=gamma, gae_lambda=gae_lambda)
    _check_shapes(rewards, values, final_values, terminated, truncated)
    next_values = torch.where(terminated, 0.0, torch.where(truncated, final_values, values[1:]))
    advantages = next_values.mul_(gamma).add_(rewards).sub_(values[:-1])
    decay = (terminated | truncated).logical_not_().to(advantages.dtype).mul_(gamma * gae_lambda)
    # Views made once: indexing in the loop would cost as much as the arithmetic.
    rows, decays = advantages.unbind(0), decay.unbind(0)
    for t in range(len(rows) - 2, -1, -1):
        rows[t].addcmul_(rows[t + 1], decays[t])
    return advantages, advantages + values[:-1]


def _check_rewards(rewards: Tensor, **factors: float) -> None:
    if not rewards.dim() or not len(rewards):
        raise ValueError(f"`rewards` must be shaped [horizon, num_envs], a step or more; got {list(rewards.shape)}.")
    for name, factor in factors.items():
        if not 0.0 <= factor <= 1.0:
            raise ValueError(f"`{name}` must be at least 0 and at most 1; got {factor}.")


def _check_shapes(rewards: Tensor, values: Tensor, final_values: Tensor, terminated: Tensor, truncated: Tensor) -> None:
    horizon, *copies = rewards.shape
    if values.shape != (horizon + 1, *copies):
        raise ValueError(
            f"`values` must have one row more than `rewards`: {[horizon + 1, *copies]}; got {list(values.shape)}."
        )
    for name, tensor in (("final_values", final_values), ("terminated", terminated), ("truncated", truncated)):
        if tensor.shape != rewards.shape:
            raise ValueError(
                f"`{name}` must be shaped like `rewards`, {list(rewards.shape)}; got {list(tensor.shape)}."
            )
