"""The `env_config` of a run as its params record it, one for each value."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from rl8x.algorithms.base import GenericAlgorithmBase
from rl8x.algorithms.online import OnlineAlgorithm
from rl8x.envs import Env
from rl8x.envs.parameters import inherited_config, shown_value

PlainConfig = Mapping[str, object]
CONFIGS: Final = ("env_config.", "eval_env_config.")


def training_config(algorithm: GenericAlgorithmBase[Any], given: PlainConfig | None) -> PlainConfig | None:
    """Return what the next step of a run trains under, in plain form; None without a training environment.

    Args:
        algorithm: What is trained.
        given: The run's `env_config` in plain form.
    """
    if not isinstance(algorithm, OnlineAlgorithm):
        return None
    if not algorithm.reset_is_due():
        return algorithm.env.config
    return algorithm.env.next_config if given is None else given


def config_params(
    env: Env | None, eval_env: Env | None, config: PlainConfig, eval_config: PlainConfig | None
) -> dict[str, Any]:
    """Name the value of each parameter of the environment, and those of evaluations where they are others.

    Args:
        env: The training environment; None where there is none.
        eval_env: An evaluation environment of its own; None where there is none.
        config: What is trained under; without training environment what the evaluation environment came with.
        eval_config: What is evaluated under; None is `config`.
    """
    trained = {} if env is None else _in_force(env, config)
    params = {f"env_config.{name}": shown_value(value) for name, value in trained.items()}
    played = env if eval_env is None else eval_env
    if played is None:
        return params
    inherited = inherited_config(config, played.num_envs) if eval_config is None else eval_config
    for name, value in _in_force(played, inherited).items():
        if name in (eval_config or {}) or value != trained.get(name):
            params[f"eval_env_config.{name}"] = shown_value(value)
    params["num_eval_envs"] = played.num_envs
    params["eval_env"] = "training environment" if eval_env is None else type(eval_env).__name__
    return params


def _in_force(env: Env, config: PlainConfig) -> dict[str, object]:
    return {name: config.get(name, parameter.default) for name, parameter in env.parameters.items()}
