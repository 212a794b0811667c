"""Generalised advantage estimation on a whole rollout at once."""

from __future__ import annotations

import torch
from torch import Tensor


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
        rewards: Reward after each action, `[horizon, num_envs]`.
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
        ValueError: If the shapes do not fit together.

    Source: Schulman et al. 2016, arXiv:1506.02438, eq. 16; time limits as in Pardo et al. 2018, arXiv:1712.00378.
    """
    _check_shapes(rewards, values, final_values, terminated, truncated)
    next_values = torch.where(terminated, 0.0, torch.where(truncated, final_values, values[1:]))
    advantages = next_values.mul_(gamma).add_(rewards).sub_(values[:-1])
    decay = (terminated | truncated).logical_not_().to(advantages.dtype).mul_(gamma * gae_lambda)
    # Views made once: indexing in the loop would cost as much as the arithmetic.
    rows, decays = advantages.unbind(0), decay.unbind(0)
    for t in range(len(rows) - 2, -1, -1):
        rows[t].addcmul_(rows[t + 1], decays[t])
    return advantages, advantages + values[:-1]


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
