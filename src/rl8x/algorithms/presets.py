"""The presets of all algorithms: other defaults for another kind of work, each by one word.

`PPOConfig.rl8(...)`, `preset: rl8` in a run file and `--preset rl8` mean the same; what is given beside it wins.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from rl8x.algorithms.hyperparameters import Default

PRESETS: Final[dict[str, dict[str, dict[str, Any]]]] = {
    "PPO": {
        # rl8's defaults: one batch of many copies.
        "rl8": {
            "num_envs": Default(8192),
            "horizon": 32,
            "gamma": 0.95,
            "lr": 1e-3,
            "lr_schedule": None,
            "num_sgd_iters": 4,
            "sgd_minibatch_size": None,
            "max_grad_norm": 5.0,
            "normalize_observations": False,
            "model_config": {"hidden_sizes": [256, 256]},
        },
        # Thousands of copies on a GPU: few epochs of large minibatches, a 16th of the rollout each.
        "gpu": {
            "num_envs": Default(4096),
            "horizon": 32,
            "gamma": 0.99,
            "lr_schedule": {"kind": "adaptive", "high": 1e-2},
            "num_sgd_iters": 5,
            "max_grad_norm": 1.0,
            "model_config": {"hidden_sizes": [256, 256]},
        },
    },
    # FastSAC's (Seo et al. 2025, arXiv:2512.01996).
    "SAC": {
        "gpu": {
            "num_envs": Default(1024),
            "horizon": 1,
            "batch_size": 8192,
            "updates_per_sample": 8 / 1024,
            "warmup_steps": 10 * 1024,
            "gamma": 0.97,
            "tau": 0.125,
            "critic_layer_norm": True,
            "num_atoms": 101,
            "return_bound": 5.0,
            "policy_delay": 4,
            "initial_alpha": 0.001,
        },
    },
    # FastTD3's (Seo et al. 2025, arXiv:2505.22642).
    "TD3": {
        "gpu": {
            "num_envs": Default(1024),
            "horizon": 1,
            "batch_size": 32768,
            "updates_per_sample": 2 / 1024,
            "warmup_steps": 10 * 1024,
            "buffer_size": 10 * 1024 * 1024,
            "gamma": 0.97,
            "tau": 0.1,
            "target_interval": 1,
            "exploration_noise": 0.4,
            "exploration_noise_min": 0.001,
            "target_noise": 0.001,
            "optimizer": "adamw",
            "optimizer_config": {"weight_decay": 0.1},
            "normalize_observations": True,
            "model_config": {"hidden_sizes": [512, 256, 128]},
            "critic_hidden_sizes": [1024, 512, 256],
            "num_atoms": 101,
            "return_bound": 5.0,
        },
    },
}


def with_preset(config_class: type, name: str | None, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the hyperparameters that were given, and those of a preset for the others."""
    if name is None:
        return dict(given)
    algorithms = [cls.__name__.removesuffix("Config") for cls in config_class.__mro__]
    algorithm = next((each for each in algorithms if each in PRESETS), algorithms[0])
    presets = PRESETS.get(algorithm, {})
    if name not in presets:
        others = ", ".join(f"{other} ({', '.join(names)})" for other, names in PRESETS.items())
        listed = f"{algorithm} has {' and '.join(presets)}" if presets else f"{algorithm} has none; others do: {others}"
        raise ValueError(f"no preset {name!r}: {listed}.")
    left_out = {"model_config"} if given.get("model") is not None else set()
    return {key: value for key, value in presets[name].items() if key not in left_out} | dict(given)
