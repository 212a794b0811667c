"""Change PPO's loss: penalise ratios far from 1 in place of clipping them (SPO, Xie et al. 2024, arXiv:2401.16025)."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor, nn

from rl8x import NullTracker, PPOConfig, Trainer, keys
from rl8x.algorithms import PPO
from rl8x.algorithms.hyperparameters import option
from rl8x.algorithms.on_policy import Objective
from rl8x.envs import CartPole

METRICS = ("losses/policy", "losses/vf", "losses/entropy", "losses/total", "monitors/penalty")


@dataclasses.dataclass(frozen=True, kw_only=True)
class SPOConfig(PPOConfig, defaults={"num_envs": 64, "gamma": 0.99, "lr": 5e-3, "sgd_minibatch_size": 512}):
    """PPO's options with other defaults, and one of its own, which `rl8x train --help` shows and a run file may set."""

    penalty: float = option(1.0, "Weight of the penalty of ratios that are not 1.", low=0.0)


def losses(policy: Any, batch: Any, state: Any, entropy_coeff: Tensor, config: SPOConfig) -> Tensor:
    """Return each of `METRICS`, as minibatches are `[seq_len, batch, ...]`; compiled like PPO's own."""
    found = policy(batch[keys.OBS], batch[keys.ACTIONS], state, batch[keys.STARTS])
    advantages = batch[keys.ADVANTAGES]
    ratio = (found.logp - batch[keys.LOGP]).exp()
    penalty = config.penalty * advantages.abs() / (2 * config.clip_param) * (ratio - 1).square()
    vf_loss = nn.functional.smooth_l1_loss(found.values, batch[keys.RETURNS], reduction="none")
    policy_loss = penalty - ratio * advantages
    total = policy_loss + config.vf_coeff * vf_loss - entropy_coeff * found.entropy
    return torch.stack((policy_loss, vf_loss, found.entropy, total, penalty))


class SPO(PPO, config=SPOConfig):
    """Simple policy optimisation; `SPOConfig(...).build(env)` makes it."""

    objective = Objective(losses, METRICS, total="losses/total")


def main(max_steps: int = 40) -> Any:
    config = SPOConfig(model_config={"hidden_sizes": [64, 64]}, seed=0, num_threads=1, device="cpu")
    trainer = Trainer(config.build(CartPole), tracker=NullTracker(), num_eval_envs=64)
    stats = trainer.run(max_steps=max_steps, steps_per_eval=max_steps)
    print(f"return {stats['eval/returns/mean']:.0f}; expected above 400")
    return stats


if __name__ == "__main__":
    main()
