"""The common part of `rl8x collect` and `play`: load a run's policy, and the environment that it is to act in."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import click

from rl8x.cli.errors import UserError
from rl8x.config import apply_overrides
from rl8x.envs import Env, env_maker
from rl8x.envs.parameters import inherited_config, plain, shown_value
from rl8x.importing import find_modules_here
from rl8x.policy import Policy
from rl8x.spaces import are_alike

_ENV: Final = "Act in this environment.  [default: where the run trained, or evaluated]"


class Acting(NamedTuple):
    """Who acts where.

    `trained_config` is the `env_config` of the training's next reset, of what moves where it stood; of a run that
    learned from data what it evaluated under; empty in another environment than the run's. `source` says whose it is.
    """

    policy: Policy
    maker: Callable[..., Env]
    algorithm: str
    trained_config: Mapping[str, Any]
    source: str = "as in the training"


def acting_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command what both have: the run, its environment and values for it, a seed, how a checkpoint is read."""
    for parameter in (
        click.option("--trust", is_flag=True, help="Import the modules that the checkpoint names: their code runs."),
        click.option("--auto", is_flag=True, help="Take the newest good checkpoint where the one meant is damaged."),
        click.option("--seed", type=click.IntRange(0, 2**63 - 1), default=0, help="Seeds environment and actions."),
        click.option("--env", metavar="ENV", help=_ENV),
        click.argument("overrides", nargs=-1, metavar="[env_config.NAME=VALUE]..."),
        click.argument("run"),
    ):
        command = parameter(command)
    return command


def load_acting(run: str, env: str | None, *, auto: bool, trust: bool) -> Acting:
    """Make the policy of a run's checkpoint, and find what makes the environment that it is to act in.

    None is the training's, or if there is none the one that the run evaluated in.
    """
    from rl8x.algorithms.hyperparameters import resolve_device
    from rl8x.checkpoint import find, load_policy
    from rl8x.checkpoint.load import env_maker_of

    find_modules_here(trust or [] if env is None else trust or [env])
    checkpoint = find(run, auto=auto)
    spec, resolved = checkpoint.spec, checkpoint.metadata["resolved"]
    policy = load_policy(checkpoint, device=str(resolve_device(resolved["config"].get("device", "auto"))), trust=trust)
    if env is not None:
        return Acting(policy, env_maker(env, trust=True), resolved["algorithm"], {})
    maker = env_maker_of(spec, trust)
    if maker is not None:
        state = checkpoint.state["trainer"]["algorithm"].get("collector", {}).get("env", {})
        config = state.get("present") or state.get("next_config") or state.get("config") or {}
        return Acting(policy, maker, resolved["algorithm"], config)
    evaluated_in = spec.trainer.eval_env
    if not isinstance(evaluated_in, str) or evaluated_in == "auto":
        raise UserError(f"{run} does not say in which environment: give it by --env, as in --env CartPole.")
    maker = env_maker(evaluated_in, trust=trust)
    return Acting(policy, maker, resolved["algorithm"], spec.run.eval_env_config or {}, "as in the run's evaluations")


def acting_at_random(name: str) -> tuple[Callable[..., Env] | None, str]:
    """Find what makes the environment of a name, which is not that of a file or folder; None and why there is none."""
    find_modules_here([name])
    if os.path.exists(name):  # not Path.exists(), which raises at a name that is too long
        return None, ""
    try:
        return env_maker(name, trust=True), ""
    except ValueError as error:
        return None, str(error)


def check_spaces(env: Env, policy: Policy) -> None:
    """Refuse an environment of other spaces than the policy's."""
    spaces = (env.single_observation_space, env.single_action_space)
    if not all(map(are_alike, spaces, (policy.observation_space, policy.action_space))):
        raise UserError(f"the policy was trained for other spaces than those of --env: {spaces[0]} and {spaces[1]}.")


def asked_config(trained: Mapping[str, Any], overrides: Sequence[str], num_envs: int) -> dict[str, Any]:
    """Return the `env_config` to act under: the training's, for a number of copies, changed by what was typed."""
    config = apply_overrides({"env_config": plain(inherited_config(trained, num_envs))}, overrides)
    if other := [name for name in config if name != "env_config"]:
        raise UserError(f"only env_config.NAME=VALUE may follow RUN; got {other[0]}={config[other[0]]!r}.")
    values = config["env_config"] or {}
    if not isinstance(values, Mapping):
        raise UserError(f"env_config must be values by name, as in env_config.length=0.4; got {values!r}.")
    return dict(values)


def in_words(config: Mapping[str, Any]) -> str:
    """Write an `env_config` in plain form in a line."""
    return ", ".join(f"{name} = {shown_value(value)}" for name, value in config.items()) or "the defaults"
