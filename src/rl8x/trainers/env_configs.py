"""The `env_config` of a run: checked before its first step, and told in params, one for each value."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from rl8x.envs import Env
from rl8x.envs.parameters import inherited_config, shown_value

PlainConfig = Mapping[str, object]
CONFIGS: Final = ("env_config.", "eval_env_config.")


def plain_configs(
    env: Env, eval_env: Env | None, env_config: Mapping[str, Any] | None, eval_env_config: Mapping[str, Any] | None
) -> tuple[dict[str, object] | None, dict[str, object] | None]:
    """Check what a run is to train and to evaluate under, before its first step.

    Args:
        env: The training environment.
        eval_env: The evaluation environment; None where that is the training's.
        env_config: As `run()` takes it.
        eval_env_config: As `run()` takes it.

    Returns:
        Both in plain JSON form; None stays None.

    Raises:
        ValueError: If a value is not legal or has not as many numbers as there are copies.
    """
    plain = None if env_config is None else env.plain_config(env_config)
    if eval_env_config is None:
        if eval_env is not None:
            config = env.next_config if plain is None else plain
            called = "eval_env_config (None: as in training)"
            eval_env.plain_config(inherited_config(config, eval_env.num_envs), called=called, copies="num_eval_envs")
        return plain, None
    if eval_env is None:
        return plain, env.plain_config(eval_env_config, called="eval_env_config")
    return plain, eval_env.plain_config(eval_env_config, called="eval_env_config", copies="num_eval_envs")


def config_params(env: Env, eval_env: Env, config: PlainConfig, eval_config: PlainConfig | None) -> dict[str, Any]:
    """Name the value of each parameter of the environment, and those of evaluations where they are others.

    Args:
        env: The training environment.
        eval_env: Where evaluations play, which may be the same.
        config: What is trained under.
        eval_config: What is evaluated under; None is as in training.
    """
    trained = _in_force(env, config)
    params = {f"env_config.{name}": shown_value(value) for name, value in trained.items()}
    inherited = inherited_config(config, eval_env.num_envs) if eval_config is None else eval_config
    for name, value in _in_force(eval_env, inherited).items():
        if name in (eval_config or {}) or value != trained.get(name):
            params[f"eval_env_config.{name}"] = shown_value(value)
    return params


def _in_force(env: Env, config: PlainConfig) -> dict[str, object]:
    return {name: config.get(name, parameter.default) for name, parameter in env.parameters.items()}
