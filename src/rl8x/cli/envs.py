"""`rl8x envs` and `tuned`: what there is to train in, and settings that learn."""

from __future__ import annotations

import inspect
import statistics
import textwrap
from typing import Any, Final

import click

from rl8x.cli.errors import UserError, users_mistakes
from rl8x.output import table


@click.command("envs")
@click.argument("name", required=False)
def envs(name: str | None) -> None:
    """List the built-in environments, or describe the one called NAME: spaces, episodes, what env_config may set.

    NAME is a built-in name, a Gymnasium id, or a dotted path to a class.
    """
    from rl8x.cli.options import find_modules_here
    from rl8x.envs import BUILTIN

    if name is not None:
        find_modules_here([name])
        with users_mistakes():
            click.echo(describe(name))
        return
    click.echo("\n".join(summarize(cls) for cls in BUILTIN.values()))
    click.echo("\n`rl8x envs NAME` describes one; `rl8x train NAME` trains.")


def describe(name: str) -> str:
    """Describe an environment in full, by what `rl8x train` takes for it."""
    from rl8x.envs import Env, GymnasiumEnv, env_maker

    env = env_maker(name, trust=True)(1, seed=0)
    if not isinstance(env, Env):
        raise UserError(f"{name!r} makes {type(env).__name__}, which is no rl8x Env.")
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


_EXAMPLES: Final = """\b
rl8x tuned                                            # all of them
rl8x train HalfCheetah-v5 --algorithm sac --tuned     # train with one
rl8x tuned HalfCheetah-v5 sac > run.yaml              # look at one, or change it
"""


@click.command("tuned", epilog=_EXAMPLES)
@click.argument("task", required=False)
@click.argument("algorithm", default="PPO")
def tuned(task: str | None, algorithm: str) -> None:
    """List the settings that learn a task, or print the run file of that of TASK by ALGORITHM, PPO by default.

    Returns are those of the final policy, deterministic, in fresh episodes: the median of some seeds, and the lowest to
    the highest. Seconds are those of training on one CPU thread.
    """
    from rl8x.config.tuned import tuned_file

    if task is None:
        click.echo(table(tuned_rows()))
        click.echo("\n`rl8x train TASK --algorithm ALGORITHM --tuned` trains with one.")
        return
    with users_mistakes():
        click.echo(tuned_file(task, algorithm).read_text(encoding="utf-8"), nl=False)


def tuned_rows() -> list[tuple[str, ...]]:
    """Return the table's cells: a line for each task and algorithm, in the order of the files."""
    from rl8x.config import RunSpec
    from rl8x.config.tuned import measured, tuned_files

    found = measured()
    lines: list[tuple[str, ...]] = [("task", "algorithm", "transitions", "return", "seconds")]
    for files in tuned_files().values():
        for path in files.values():
            run = RunSpec.from_file(path)
            lines.append((run.env.env, run.algorithm.algorithm, *_cells(run, found.get(path.stem))))
    return lines


def _cells(run: Any, result: Any) -> tuple[str, str, str]:
    """Write transitions, returns and seconds; of a setting that was not measured what its run file says."""
    if result is None:
        (stop,) = run.run.stop_conditions
        return f"{stop['hits_upper_bound'][1]:,}", "not measured", "not measured"
    returns = result["returns"]
    digits = 2 if abs(max(returns, key=abs)) < 20 else 1
    low, middle, high = (f"{value:.{digits}f}" for value in (min(returns), statistics.median(returns), max(returns)))
    seeds = f"{low} to {high}, {len(returns)} seeds" if len(returns) > 1 else "1 seed"
    return f"{result['transitions']:,}", f"{middle} ({seeds})", f"{result['seconds']:.0f}"
