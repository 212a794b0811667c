"""`rl8x envs` and `tuned`: what there is to train in, and settings that learn."""

from __future__ import annotations

from typing import Final

import click

from rl8x.cli.errors import Command
from rl8x.importing import find_modules_here
from rl8x.output import table


@click.command("envs", cls=Command)
@click.argument("name", required=False)
def envs(name: str | None) -> None:
    """List the built-in environments, or describe the one called NAME: spaces, episodes, what env_config may set.

    NAME is a built-in name, a Gymnasium id, or a dotted path to a class.
    """
    from rl8x.envs import BUILTIN, describe
    from rl8x.envs.listing import summarize

    if name is not None:
        find_modules_here([name])
        click.echo(describe(name))
        return
    click.echo("\n".join(summarize(cls) for cls in BUILTIN.values()))
    click.echo("\n`rl8x envs NAME` describes one; `rl8x train NAME` trains.")


_EXAMPLES: Final = """\b
rl8x tuned                                            # all of them
rl8x train HalfCheetah-v5 --algorithm sac --tuned     # train with one
rl8x tuned HalfCheetah-v5 sac > run.yaml              # look at one, or change it
"""


@click.command("tuned", cls=Command, epilog=_EXAMPLES)
@click.argument("task", required=False)
@click.argument("algorithm", default="PPO")
def tuned(task: str | None, algorithm: str) -> None:
    """List the settings that learn a task, or print the run file of that of TASK by ALGORITHM, PPO by default.

    Returns are those of the final policy, deterministic, in fresh episodes: the median of some seeds, and the lowest to
    the highest. Seconds are those of training on one CPU thread.
    """
    from rl8x.config.tuned import tuned_file, tuned_rows

    if task is None:
        click.echo(table(tuned_rows()))
        click.echo("\n`rl8x train TASK --algorithm ALGORITHM --tuned` trains with one.")
        return
    click.echo(tuned_file(task, algorithm).read_text(encoding="utf-8"), nl=False)
