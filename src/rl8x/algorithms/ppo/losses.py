"""PPO's objective, as a pure function of tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import torch
from torch import Tensor
from torch.nn import functional as F

from rl8x import keys
from rl8x.algorithms.on_policy import SequenceBatch
from rl8x.algorithms.ppo.config import PPOConfig
from rl8x.policy import Evaluation
from rl8x.trees import unflatten_tree

PPO_LOSS_METRICS: Final = (
    "losses/policy",
    "losses/vf",
    "losses/entropy",
    "losses/total",
    "monitors/kl_div",
    "monitors/clip_frac",
    "monitors/vf_clip_frac",
)
TOTAL: Final = "losses/total"
KL_DIV: Final = "monitors/kl_div"


def ppo_minibatch_losses(
    policy: Callable[..., Evaluation],
    batch: SequenceBatch,
    state: SequenceBatch,
    entropy_coeff: Tensor,
    config: PPOConfig,
) -> Tensor:
    """Evaluate a minibatch's sequences under a policy and sum PPO's losses over it; see `ppo_losses`.

    Args:
        policy: Called as a module, under the weights of the update.
        batch: The minibatch, each `[seq_len, batch, ...]`.
        state: The policy's state before the sequences, each `[batch, *]`.
        entropy_coeff: Weight of the entropy, 0-d.
        config: Clipping and weights.
    """
    obs, actions = (unflatten_tree(key, batch) for key in (keys.OBS, keys.ACTIONS))
    acted = unflatten_tree(keys.PARAMS, batch)
    given = (obs, actions, state, batch[keys.STARTS], *([acted] if acted else []))
    return ppo_losses(policy(*given), batch, config, entropy_coeff)


def ppo_losses(evaluation: Evaluation, batch: SequenceBatch, config: PPOConfig, entropy_coeff: Tensor) -> Tensor:
    """Sum PPO's losses and monitors over a batch.

        r_t      = exp(logp_t - logp_old_t)
        L_policy = -min(r_t A_t, clip(r_t, 1 - eps, 1 + eps) A_t), for A_t < 0 bounded by -c A_t
        L_vf     = min(smooth_l1(v_t, R_t), vf_clip)
        L_total  = L_policy + vf_coeff L_vf - entropy_coeff H_t

    Args:
        evaluation: Log-probabilities, values and entropies under the present weights, each `[seq_len, batch]`; the KL
            divergence is estimated where it has none.
        batch: Stored actions' log-probabilities, advantages, returns, and which rows count, each `[seq_len, batch]`.
        config: Clipping and weights.
        entropy_coeff: Weight of the entropy, 0-d.

    Returns:
        Sums in the order of `PPO_LOSS_METRICS`, `[7]`.

    Source: Schulman et al. 2017, arXiv:1707.06347, eq. 7 and 9; dual clip: Ye et al. 2020, arXiv:1912.09729, eq. 5.
    """
    advantages = batch[keys.ADVANTAGES]
    log_ratio = evaluation.logp - batch[keys.LOGP]
    ratio = log_ratio.exp()
    clip = config.clip_param
    surrogate = torch.minimum(ratio * advantages, ratio.clamp(1.0 - clip, 1.0 + clip) * advantages)
    if config.dual_clip_param is not None:
        bounded = torch.maximum(surrogate, config.dual_clip_param * advantages)
        surrogate = torch.where(advantages < 0, bounded, surrogate)
    vf_loss = F.smooth_l1_loss(evaluation.values, batch[keys.RETURNS], reduction="none")
    vf_clip_frac = torch.zeros_like(vf_loss)
    if config.vf_clip_param is not None:
        vf_clip_frac = (vf_loss.detach() > config.vf_clip_param).to(vf_loss.dtype)
        vf_loss = vf_loss.clamp(max=config.vf_clip_param)
    total = config.vf_coeff * vf_loss - surrogate - entropy_coeff * evaluation.entropy
    with torch.no_grad():
        kl_div = ratio - 1.0 - log_ratio if evaluation.kl is None else evaluation.kl
        clip_frac = ((ratio - 1.0).abs() > clip).to(ratio.dtype)
    columns = torch.stack((-surrogate, vf_loss, evaluation.entropy, total, kl_div, clip_frac, vf_clip_frac))
    if keys.VALID in batch:
        columns = columns * batch[keys.VALID]
    return columns.flatten(1).sum(1)
