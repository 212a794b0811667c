"""The configurations of a run's environments as params: one for the value of each parameter."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from rl8x.algorithms.base import GenericAlgorithmBase
from rl8x.algorithms.online import OnlineAlgorithm
from rl8x.envs import Env
from rl8x.envs.parameters import inherited_config, shown_value

PlainConfig = Mapping[str, object]


def training_config(algorithm: GenericAlgorithmBase[Any], given: PlainConfig | None) -> PlainConfig | None:
    """Return what the next step trains under, with a run's `env_config`, in plain form; None without environment."""
    if not isinstance(algorithm, OnlineAlgorithm):
        return None
    if not algorithm.reset_is_due():
        return algorithm.env.config
    return algorithm.env.next_config if given is None else given


def config_params(
    env: Env | None,
    eval_env: Env | None,
    config: PlainConfig,
    eval_config: PlainConfig | None,
    steered_by: str | None,
    shown: Collection[str] = (),
) -> dict[str, Any]:
    """Name the value of each parameter of the environment, and those of evaluations where they are others.

    Without training environment `config` is what the evaluation environment came with; without `eval_config`
    evaluations are under `config` too. Where a function sets the values again and again, its name stands for all.
    What has been `shown` of evaluations is so again, also where it is as in training by now: no param goes away.
    """
    trained = {} if env is None else _in_force(env, config)
    params = {f"env_config.{name}": shown_value(value) for name, value in trained.items()}
    if steered_by is not None:
        trained, params = {}, {"env_config": f"function {steered_by}"}
    played = env if eval_env is None else eval_env
    if played is None:
        return params
    inherited = inherited_config(config, played.num_envs) if eval_config is None else eval_config
    played_under = {} if steered_by and eval_config is None else _in_force(played, inherited)
    for name, value in played_under.items():
        param = f"eval_env_config.{name}"
        if name in (eval_config or {}) or value != trained.get(name) or param in shown:
            params[param] = shown_value(value)
    params["num_eval_envs"] = played.num_envs
    params["eval_env"] = "training environment" if eval_env is None else type(eval_env).__name__
    return params


def _in_force(env: Env, config: PlainConfig) -> dict[str, object]:
    return {name: config.get(name, parameter.default) for name, parameter in env.parameters.items()}
