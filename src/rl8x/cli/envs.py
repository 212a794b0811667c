"""`rl8x envs`: what there is to train on."""

from __future__ import annotations

import inspect
import textwrap
from typing import Any

import click

from rl8x.cli.errors import users_mistakes


@click.command("envs")
@click.argument("name", required=False)
def envs(name: str | None) -> None:
    """List the built-in environments, or describe the one called NAME: spaces, episodes, what env_config may set."""
    from rl8x.envs import BUILTIN, resolve

    with users_mistakes():
        if name is not None:
            click.echo(describe(resolve(name)))
            return
    click.echo("\n".join(summarize(cls) for cls in BUILTIN.values()))
    click.echo("\n`rl8x envs NAME` tells more; `rl8x train NAME` trains.")


def describe(cls: type[Any]) -> str:
    """Describe an environment in full."""
    env = cls(1, seed=0)
    lines = [cls.__name__, "", inspect.getdoc(cls) or "", ""]
    lines += [f"observation  {env.single_observation_space}", f"action       {env.single_action_space}"]
    lines += [f"episodes     {_episodes(env).removeprefix('episodes ')}", ""]
    if not env.parameters:
        return "\n".join([*lines, "env_config can set nothing."])
    rows: list[tuple[str, ...]] = [("env_config", "default", "low", "high", "unit", "")]
    for name, parameter in env.parameters.items():
        numbers = (f"{number:g}" for number in (parameter.default, parameter.low, parameter.high))
        rows.append((name, *numbers, parameter.unit, parameter.description))
    example = next(iter(env.parameters))
    bounds = env.parameters[example]
    lines += [
        table(rows),
        "",
        "A number for all copies, a list with one for each, or a distribution drawn at each reset:",
    ]
    drawn = f"{{uniform: [{bounds.default / 2:g}, {bounds.default * 2:g}]}}" if bounds.default else "{grid: [...]}"
    lines.append(f"  rl8x train {cls.__name__} env_config.{example}='{drawn}'")
    return "\n".join(lines)


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


def table(rows: list[tuple[str, ...]]) -> str:
    """Put rows in columns."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )
