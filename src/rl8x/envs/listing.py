"""Environments in words: each in a line, or one in full, for a terminal."""

from __future__ import annotations

import inspect
import textwrap
from typing import Any

from rl8x.envs.base import Env
from rl8x.envs.gymnasium_env import GymnasiumEnv
from rl8x.envs.registry import env_maker
from rl8x.output import table


def describe(name: str) -> str:
    """Describe an environment in full, as `rl8x envs NAME` does: spaces, episodes, and what `env_config` may set.

    Args:
        name: What `rl8x train` takes: a built-in name, a Gymnasium id, or a dotted path to a class. Its code runs.

    Raises:
        ValueError: If there is none of the name, or what it makes is no rl8x environment.
    """
    env = env_maker(name, trust=True)(1, seed=0)
    if not isinstance(env, Env):
        raise ValueError(f"{name!r} makes {type(env).__name__}, which is no rl8x Env.")
    copies = getattr(env.vector_env, "envs", ()) if isinstance(env, GymnasiumEnv) else ()
    source = type(copies[0].unwrapped) if copies else type(env)
    lines = [name, "", _introduction(source), ""]
    lines += [f"observation  {env.single_observation_space}", f"action       {env.single_action_space}"]
    lines += [f"episodes     {_episodes(env).removeprefix('episodes ')}", ""]
    takes = [str(parameter.replace(annotation=parameter.empty)) for parameter in _arguments(source)]
    if issubclass(source, Env) and not any(each.startswith("observe_parameters") for each in takes):
        takes.append("observe_parameters='none'")
    if takes:
        lines += [f"env_kwargs   {', '.join(takes)}", ""]
    env.close()
    if not env.parameters:
        by_name = " until env_kwargs.parameters names it (docs/simulators.md)" if isinstance(env, GymnasiumEnv) else ""
        return "\n".join([*lines, f"env_config can set nothing{by_name}."])
    rows: list[tuple[str, ...]] = [("env_config", "default", "low", "high", "unit", "")]
    for parameter_name, parameter in env.parameters.items():
        numbers = (f"{number:g}" for number in (parameter.default, parameter.low, parameter.high))
        rows.append((parameter_name, *numbers, parameter.unit, parameter.description))
    example = next(iter(env.parameters))
    bounds = env.parameters[example]
    lines += [
        table(rows),
        "",
        "A number for all copies, a list with one for each, or a distribution drawn at each reset:",
    ]
    drawn = f"{{uniform: [{bounds.default / 2:g}, {bounds.default * 2:g}]}}" if bounds.default else "{grid: [...]}"
    lines.append(f"  rl8x train {name} env_config.{example}='{drawn}'")
    return "\n".join(lines)


def _introduction(source: type[Any]) -> str:
    """Return a class's docstring; of one in sections, as Gymnasium's are, the first alone."""
    text = inspect.getdoc(source) or ""
    first, *rest = text.removeprefix("## Description").strip().split("\n## ")
    return first.strip() if rest else text


def _arguments(source: type[Any]) -> list[inspect.Parameter]:
    """Return what the constructor takes but for what rl8x gives it or every environment takes."""
    ours = ("num_envs", "device", "seed", "time_limit", "render_mode")
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    parameters = inspect.signature(source).parameters.values()
    return [parameter for parameter in parameters if parameter.name not in ours and parameter.kind not in variable]


def summarize(cls: type[Any]) -> str:
    """Put an environment in a line, and what env_config may set, with default and bounds, below it."""
    env = cls(1, seed=0)
    line = f"{cls.__name__:<22} {_short(env.single_observation_space)} -> {_short(env.single_action_space)}, "
    settable = "; ".join(
        f"{name} {parameter.default:g} in {parameter.bounds}" for name, parameter in env.parameters.items()
    )
    return line + _episodes(env) + ("\n" + textwrap.indent(textwrap.fill(settable, 110), "    ") if settable else "")


def _short(space: Any) -> str:
    kind = type(space).__name__
    if kind == "Discrete":
        return f"Discrete({space.n})"
    return f"{kind}{list(space.shape)}" if kind == "Box" else kind


def _episodes(env: Any) -> str:
    if not env.episodic:
        return "episodes never end"
    ends = ["with the task"] if env.terminates else []
    ends += [f"after {env.time_limit} steps"] if env.time_limit is not None else []
    return f"episodes end {' or '.join(ends)}"
