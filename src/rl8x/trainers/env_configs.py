"""The `env_config` of a run: checked before its first step, and recorded in params, one for each value."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from rl8x.algorithms.base import GenericAlgorithmBase
from rl8x.algorithms.online import OnlineAlgorithm
from rl8x.envs import Env
from rl8x.envs.parameters import inherited_config, shown_value

PlainConfig = Mapping[str, object]
CONFIGS: Final = ("env_config.", "eval_env_config.")


def plain_configs(
    env: Env | None, eval_env: Env | None, env_config: Mapping[str, Any] | None, eval_config: Mapping[str, Any] | None
) -> dict[str, dict[str, object] | None]:
    """Check what a run is to train and to evaluate under, before its first step.

    Args:
        env: The training environment; None where there is none.
        eval_env: An evaluation environment of its own; None where there is none.
        env_config: As `run()` takes it.
        eval_config: The `eval_env_config`, as `run()` takes it.

    Returns:
        Both in plain JSON form, by the names of the options; None stays None.

    Raises:
        ValueError: If a value is not legal or has not as many numbers as there are copies, or there is no environment.
    """
    if env is None and env_config is not None:
        raise ValueError("`env_config` would never apply: the algorithm trains without an environment.")
    plain = None if env is None or env_config is None else env.plain_config(env_config)
    if eval_config is not None:
        played = env if eval_env is None else eval_env
        if played is None:
            raise ValueError("`eval_env_config` would never apply: give the trainer an `eval_env`.")
        copies = "num_envs" if eval_env is None else "num_eval_envs"
        return {
            "env_config": plain,
            "eval_env_config": played.plain_config(eval_config, called="eval_env_config", copies=copies),
        }
    if env is not None and eval_env is not None:
        config = env.next_config if plain is None else plain
        called = "eval_env_config (None: as in training)"
        eval_env.plain_config(inherited_config(config, eval_env.num_envs), called=called, copies="num_eval_envs")
    return {"env_config": plain, "eval_env_config": None}


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
