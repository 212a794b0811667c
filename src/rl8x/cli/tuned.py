"""`rl8x tuned`: the settings that learn, with what was measured, or the run file of one."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

import click

from rl8x.cli.errors import users_mistakes
from rl8x.output import table

if TYPE_CHECKING:
    from rl8x.config import RunSpec

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
        click.echo(table(rows()))
        click.echo("\n`rl8x train TASK --algorithm ALGORITHM --tuned` trains with one.")
        return
    with users_mistakes():
        click.echo(tuned_file(task, algorithm).read_text(encoding="utf-8"), nl=False)


def rows() -> list[tuple[str, ...]]:
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


def _cells(run: RunSpec, result: Mapping[str, Any] | None) -> tuple[str, str, str]:
    """Write transitions, returns and seconds; of a setting that was not measured what its run file says."""
    if result is None:
        (stop,) = run.run.stop_conditions
        return f"{stop['hits_upper_bound'][1]:,}", "not measured", "not measured"
    returns = result["returns"]
    digits = 2 if abs(max(returns, key=abs)) < 20 else 1
    low, middle, high = (f"{value:.{digits}f}" for value in (min(returns), statistics.median(returns), max(returns)))
    seeds = f"{low} to {high}, {len(returns)} seeds" if len(returns) > 1 else "1 seed"
    return f"{result['transitions']:,}", f"{middle} ({seeds})", f"{result['seconds']:.0f}"
