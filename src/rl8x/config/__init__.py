"""A run as plain data: run files in YAML, TOML or JSON, see `rl8x train --help`, and `RunSpec`, which reads them."""

from rl8x.config.files import algorithm_configs, apply_overrides, load_run_file, parse_value
from rl8x.config.spec import AlgorithmSpec, Checkpoints, EnvSpec, RunOptions, RunSpec, TrainerSpec
from rl8x.plain import dump_run

__all__ = [
    "AlgorithmSpec",
    "Checkpoints",
    "EnvSpec",
    "RunOptions",
    "RunSpec",
    "TrainerSpec",
    "algorithm_configs",
    "apply_overrides",
    "dump_run",
    "load_run_file",
    "parse_value",
]
