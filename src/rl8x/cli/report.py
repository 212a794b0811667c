"""`rl8x report`: statistics, figures and a page of a study."""

from __future__ import annotations

from pathlib import Path

import click

from rl8x.cli.errors import FiniteRange, check_folder, users_mistakes

_EXAMPLES = """\b
rl8x report studies/cartpole
rl8x report my-study --baseline fixed --parameters length,masspole
rl8x report 208998b475a04c3283bf23d5b52180d5 --tracking-uri http://server:5000 --output figures
"""


@click.command("report", epilog=_EXAMPLES, context_settings={"max_content_width": 120})
@click.argument("study")
@click.option("--baseline", metavar="GROUP", help="Compare the others with this training. [default: the first]")
@click.option(
    "--parameters",
    metavar="NAMES",
    help="Test parameters to draw over, with commas between them. [default: all; heat maps over the main two]",
)
@click.option(
    "--bootstrap",
    type=click.Choice(["policies", "cells"]),
    default="policies",
    help="What intervals resample: whole policies, or seeds anew in each cell, as the package rliable does, which is "
    "too narrow where one policy is played in all cells. [default: policies]",
)
@click.option(
    "--level", type=FiniteRange(0, 1, min_open=True, max_open=True), default=0.95, help="Coverage. [default: 0.95]"
)
@click.option("--seed", type=click.IntRange(min=0), default=0, help="Seeds the bootstrap. [default: 0]")
@click.option(
    "--output", metavar="DIR", help="Folder for the files. [default: report in the study's folder, or reports/NAME]"
)
@click.option("--log/--no-log", default=True, help="Log the files to the parent run too, where it is known. [default]")
@click.option("--tracking-uri", metavar="URI", help="Where the runs are. Default: as in training.")
def report(
    study: str,
    baseline: str | None,
    parameters: str | None,
    bootstrap: str,
    level: float,
    seed: int,
    output: str | None,
    log: bool,
    tracking_uri: str | None,
) -> None:
    """Report on STUDY: a study's folder, or the name or ID of its parent run.

    Prints a row for each training and set of hyperparameters, with 95% intervals over seeds in brackets: mean return,
    interquartile mean (IQM), mean of the worst 10% and 1% of the cells (CVaR), own worst cell, means inside and outside
    of what was trained on, their gap, and the probability to beat the baseline. Writes report.html, summary.csv and
    PNGs.
    """
    from rl8x.studies.report import PAGE
    from rl8x.studies.report import report as make_report

    names = None if parameters is None else [name.strip() for name in parameters.split(",") if name.strip()]
    if output is not None:
        check_folder(Path(output), "--output")
    with users_mistakes(OSError):
        result = make_report(
            study,
            baseline=baseline,
            parameters=names,
            over="cells" if bootstrap == "cells" else "policies",
            level=level,
            seed=seed,
            output=output,
            log=log,
            tracking_uri=tracking_uri,
        )
    click.echo(str(result))
    click.echo(f"\nWritten: {result.folder}/{PAGE}, with its table and figures beside it")
