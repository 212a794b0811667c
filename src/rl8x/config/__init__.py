"""Run files: a training run as plain data, in YAML, TOML or JSON; `rl8x train --help` shows one."""

from rl8x.config.algorithms import algorithm_configs
from rl8x.config.files import apply_overrides, load_run_file, parse_value
from rl8x.config.run import RunConfig
from rl8x.plain_yaml import dump_run

__all__ = [
    "RunConfig",
    "algorithm_configs",
    "apply_overrides",
    "dump_run",
    "load_run_file",
    "parse_value",
]
