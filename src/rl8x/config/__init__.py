"""Run files: a training run as plain data, in YAML, TOML or JSON.

env: CartPole
env_config: {length: {uniform: [0.25, 1.0]}}
algorithm_config: {num_envs: 4096, lr: 3e-4}
steps_per_eval: 5
stop_conditions:
  - hits_upper_bound: [episodes/returns/mean, 475]
  - wall_time: 10m
"""

from rl8x.config.files import apply_overrides, load_run_file, parse_value
from rl8x.config.run import RunConfig, algorithm_configs
from rl8x.plain_yaml import dump_run

__all__ = [
    "RunConfig",
    "algorithm_configs",
    "apply_overrides",
    "dump_run",
    "load_run_file",
    "parse_value",
]
