"""FastSAC: soft actor-critic with the hyperparameters for a thousand copies of a simulator on an accelerator.

Large batches, few updates for each transition, fast targets, and categorical critics with layer normalisation. Atoms
need no bounds of each task, since rewards are scaled to returns (`return_bound`).

Source: Seo et al. 2025, arXiv:2512.01996, and its code in holosoma (hyperparameters).
"""

from __future__ import annotations

import dataclasses

from rl8x.algorithms.hyperparameters import changed_default
from rl8x.algorithms.sac import SAC, SACConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class FastSACConfig(SACConfig):
    """SAC's hyperparameters with FastSAC's defaults: 8 updates for each step of 1024 copies."""

    num_envs: int = changed_default(SACConfig, "num_envs", 1024)
    horizon: int = changed_default(SACConfig, "horizon", 1)
    batch_size: int = changed_default(SACConfig, "batch_size", 8192)
    updates_per_sample: float = changed_default(SACConfig, "updates_per_sample", 8 / 1024)
    warmup_steps: int = changed_default(SACConfig, "warmup_steps", 10 * 1024)
    gamma: float = changed_default(SACConfig, "gamma", 0.97)
    tau: float = changed_default(SACConfig, "tau", 0.125)
    critic_layer_norm: bool = changed_default(SACConfig, "critic_layer_norm", True)
    num_atoms: int = changed_default(SACConfig, "num_atoms", 101)
    return_bound: float | None = changed_default(SACConfig, "return_bound", 5.0)
    policy_delay: int = changed_default(SACConfig, "policy_delay", 4)
    initial_alpha: float = changed_default(SACConfig, "initial_alpha", 0.001)


class FastSAC(SAC, config=FastSACConfig):
    """FastSAC on one environment. Made by `FastSACConfig(...).build(env)`."""
