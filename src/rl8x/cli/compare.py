"""`rl8x compare`: runs side by side."""

from __future__ import annotations

from pathlib import Path

import click

from rl8x.cli.errors import FiniteRange, check_folder, users_mistakes

_EXAMPLES = """\b
rl8x compare first-run second-run
rl8x compare my-study --group-by lr --metric eval/returns/mean
rl8x compare --experiment CartPole --group-by algorithm --output figures
"""


@click.command("compare", epilog=_EXAMPLES, context_settings={"max_content_width": 120})
@click.argument("runs", nargs=-1, metavar="[RUN]...")
@click.option("--experiment", metavar="NAME", help="All runs of an experiment, by its name or ID.")
@click.option(
    "--metric",
    "metrics",
    multiple=True,
    metavar="NAME",
    help="Compare this metric; may be repeated. [default: returns of evaluations, else of training]",
)
@click.option(
    "--group-by", multiple=True, metavar="PARAM", help="Average the runs with the same value; may be repeated."
)
@click.option("--minimize", is_flag=True, help="The lowest value of a metric is its best one.")
@click.option(
    "--level", type=FiniteRange(0, 1, min_open=True, max_open=True), default=0.95, help="Coverage. [default: 0.95]"
)
@click.option("--output", metavar="DIR", help="Folder for the files. [default: reports/compare-RUN]")
@click.option("--tracking-uri", metavar="URI", help="Where the runs are. Default: as in training.")
def compare(
    runs: tuple[str, ...],
    experiment: str | None,
    metrics: tuple[str, ...],
    group_by: tuple[str, ...],
    minimize: bool,
    level: float,
    output: str | None,
    tracking_uri: str | None,
) -> None:
    """Compare runs: the params that differ, last and best metrics, and learning curves.

    RUN is a run's name or ID, or a folder of checkpoints; of a study, by its folder or parent run, the children are
    compared. Prints the table, with a column for each run where a row for each would be too wide, and writes
    compare.html, runs.csv, curves.csv and a PNG for each metric.
    """
    from rl8x.studies.compare import PAGE
    from rl8x.studies.compare import compare as compare_runs
    from rl8x.studies.find import plain_name

    if output is not None:
        check_folder(Path(output), "--output")
    with users_mistakes(OSError):
        comparison = compare_runs(
            runs,
            experiment=experiment,
            metrics=metrics,
            group_by=group_by,
            minimize=minimize,
            level=level,
            tracking_uri=tracking_uri,
        )
        folder = output or f"reports/compare-{plain_name(experiment or Path(runs[0]).name)}"
        comparison.write(folder)
    click.echo(str(comparison))
    click.echo(f"\nWritten: {folder}/{PAGE}, with its tables and figures beside it")
