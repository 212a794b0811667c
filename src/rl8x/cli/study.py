"""`rl8x study`, `report` and `compare`: run a study, report its results, and compare runs."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any, Final

import click

from rl8x.cli.errors import (
    LOST_ROWS,
    Command,
    FiniteRange,
    UserError,
    WholeRange,
    check_folder,
    name_for_files,
    tracking_uri,
    users_mistakes,
)
from rl8x.cli.options import run_file
from rl8x.config import apply_overrides
from rl8x.config.files import SUFFIXES
from rl8x.importing import find_modules_here, texts
from rl8x.output import counted, measured, say, table

_EXAMPLES: Final = """\b
rl8x study -f study.yaml --jobs 2
rl8x study -f study.yaml seeds=5 episodes=16
rl8x study -f study.yaml --backend dask --cluster tcp://head:8786

\b
A study's file has the keys of a run file, and those of a study:
  env: CartPole
  algorithm_config: {num_envs: 512}
  max_steps: 100
  train:
    fixed: {length: 0.5}
    wide: {length: {uniform: [0.25, 1.0]}}
  test:
    length: {linspace: [0.1, 2.0, 21]}
    gravity: {linspace: [2, 20, 21]}
  seeds: 3
  vary: {lr: [3e-4, 1e-3]}

\b
A search has ranges instead of lists, and `trials`:
  vary: {lr: {log_uniform: [1e-4, 1e-2]}}
  trials: 20
"""
_BACKEND: Final = "Where the trainings run: in processes of this machine, or on a cluster that sees the study's folder."
_FAILED: Final = 1


@click.command("study", cls=Command, epilog=_EXAMPLES, params=[run_file("The study's file")])
@click.argument("words", nargs=-1, metavar="[KEY=VALUE]...")
@click.option("--jobs", type=WholeRange(min=1), default=1, help="Trainings at the same time on this machine.")
@click.option("--backend", type=click.Choice(["processes", "dask", "ray"]), default="processes", help=_BACKEND)
@click.option("--cluster", metavar="ADDRESS", help="Address of a Dask scheduler. Default: a new one on this machine.")
@click.option("--progress", type=click.Choice(["auto", "bar", "lines", "none"]), help="What is shown as it runs.")
@click.option("--dry-run", is_flag=True, help="Check everything, list the trainings, and train nothing.")
@click.option("--trust", is_flag=True, help="Import the modules that the file names: their code runs.")
def study(words: tuple[str, ...], file: str | None, dry_run: bool, trust: bool, **how: Any) -> int:
    """Train under several configurations, hyperparameters and seeds, and test every policy in many environments.

    KEY=VALUE sets any key of the file: seeds=5, test.length='[0.5, 1]'. Hyperparameters need no prefix
    `algorithm_config.`. The same command continues a study that was interrupted, without repeating what is done. Each
    training is a run in MLflow, a child of the study's run. The exit code is 1 if trainings failed (all others are done
    then), and 3 if the store does not have all rows.
    """
    from rl8x.studies.definition import StudyConfig
    from rl8x.studies.jobs import check_backend
    from rl8x.studies.study import Study

    if file is None:
        hint = f" As in: rl8x study -f {words[0]}" if words and words[0].lower().endswith(SUFFIXES) else ""
        raise UserError(f"name the study's file: -f FILE.{hint}")
    find_modules_here(trust or frozenset(texts(apply_overrides({}, words))))
    config = StudyConfig.from_file(Path(file), words, trust=trust or None)
    study = Study.from_config(config)
    if dry_run:
        check_backend(how["backend"], how["cluster"])
        notes = config.check()
        _list(config)
        for note in notes:
            say(note)
        return 0
    frame = study.run(**how)
    _summarize(study, frame)
    return _FAILED if study.failed else 0 if study.has_arrived else LOST_ROWS


def _list(config: Any) -> None:
    """Print the trainings and tests that a study would make."""
    from rl8x.envs.cells import num_cells

    cells = num_cells(config.cells())
    if config.searches:
        trainings = config.trials * len(config.train) * len(config.seeds)
        say(f"at most {counted(trainings, 'training')} of {counted(config.trials, 'trial')}")
    else:
        labels = [training.label for training in config.trainings()]
        say("\n".join([*labels, counted(len(labels), "training")]))
    played = f"{counted(config.episodes, 'episode')} in each"
    say(f"each tested in {counted(cells, 'cell')}, {played}: {cells * config.episodes:,} episodes a test")


def _summarize(study: Any, frame: Any) -> None:
    """Print results, why a training has no test cell inside its range, failures, and what to do next."""
    from rl8x.envs.cells import why_none_is_inside
    from rl8x.studies import table as columns

    if not frame.empty:
        say(table(_rows(frame)))
        final = frame[frame[columns.FINAL]]
        for name, has_inside in final.groupby(columns.TRAINING, sort=False)[columns.INSIDE].any().items():
            if not has_inside:
                say(f"{name}: {why_none_is_inside(study.config.cells(), study.supports[name])}")
    for label, error in study.failed.items():
        say(f"failed: {label}: {error}")
    if study.failed:
        say(f"the same command tries again; tracebacks are in {study.folder}")
    if not study.has_arrived:
        say("the store does not have all of it: the same command sends the rest")
    if not frame.empty:
        say(f"to look at it: rl8x report {shlex.quote(str(study.folder))}")


def _rows(frame: Any) -> list[list[str]]:
    """Return a row for each training configuration and set of hyperparameters: mean returns over seeds."""
    from rl8x.studies import table as columns
    from rl8x.studies.statistics import HEADINGS

    final = frame[frame[columns.FINAL]]
    by = columns.who(final)
    policies = columns.policies(final).groupby(by, sort=False, dropna=False)
    within = final.groupby([*by, columns.SEED], sort=False, dropna=False)[columns.INSIDE]
    lacks = {"inside": ~within.any(), "outside": within.all()}
    # A return that is not finite is not skipped, so its mean is not finite either.
    means = policies[["mean", "inside", "outside", "min"]].mean(skipna=False).map(measured)
    for name, policy_lacks in lacks.items():  # as in the report: a group has a mean if each of its policies has one
        means[name] = means[name].mask(policy_lacks.groupby(by, sort=False, dropna=False).any(), "-")
    means.insert(0, "seeds", policies.size())
    heads = [*(name.removeprefix(columns.VARY) for name in by), "seeds", "return", "inside", "outside"]
    return [[*heads, HEADINGS["worst_cell"]], *means.reset_index().astype(str).to_numpy().tolist()]


_REPORT_EXAMPLES: Final = """\b
rl8x report studies/cartpole
rl8x report my-study --baseline fixed --parameters length,masspole
rl8x report 208998b475a04c3283bf23d5b52180d5 --tracking-uri http://server:5000 --output figures
"""
_PARAMETERS: Final = "Test parameters to draw over, with commas between. [default: all; heat maps over the main two]"
_BOOTSTRAP: Final = (
    "What intervals resample: whole policies, or seeds anew in each cell, as the package rliable does, which is too "
    "narrow where one policy is played in all cells."
)
_METRIC: Final = "Compare this metric; may be repeated. [default: returns of evaluations, else of training]"
_level = click.option("--level", type=FiniteRange(0, 1, min_open=True, max_open=True), default=0.95, help="Coverage.")


@click.command("report", cls=Command, epilog=_REPORT_EXAMPLES)
@click.argument("study")
@click.option("--baseline", metavar="GROUP", help="Compare the others with this training. [default: the first]")
@click.option("--parameters", metavar="NAMES", help=_PARAMETERS)
@click.option("--bootstrap", "over", type=click.Choice(["policies", "cells"]), default="policies", help=_BOOTSTRAP)
@_level
@click.option("--seed", type=WholeRange(min=0), default=0, help="Seeds the bootstrap.")
@click.option("--output", metavar="DIR", help="Folder for the files. [default: report/ of the study, or reports/NAME]")
@click.option("--log/--no-log", default=True, help="Log the files to the parent run too, where it is known.")
@tracking_uri
def report(study: str, parameters: str | None, output: str | None, **options: Any) -> None:
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
        result = make_report(study, parameters=names, output=output, **options)
    click.echo(str(result))
    click.echo(f"\nWritten: {result.folder}/{PAGE}, with its table and figures beside it")


_COMPARE_EXAMPLES: Final = """\b
rl8x compare first-run second-run
rl8x compare my-study --group-by lr --metric eval/returns/mean
rl8x compare --experiment CartPole --group-by algorithm --output figures
"""


@click.command("compare", cls=Command, epilog=_COMPARE_EXAMPLES)
@click.argument("runs", nargs=-1, metavar="[RUN]...")
@click.option("--experiment", metavar="NAME", help="All runs of an experiment, by its name or ID.")
@click.option("--metric", "metrics", multiple=True, metavar="NAME", help=_METRIC)
@click.option("--group-by", multiple=True, metavar="PARAM", help="Average runs with the same value; may be repeated.")
@click.option("--minimize", is_flag=True, help="The lowest value of a metric is its best one.")
@_level
@click.option("--output", metavar="DIR", help="Folder for the files. [default: reports/compare-RUN]")
@tracking_uri
def compare(runs: tuple[str, ...], experiment: str | None, output: str | None, **options: Any) -> None:
    """Compare runs: the params that differ, last and best metrics, and learning curves.

    RUN is a run's name or ID, or a folder of checkpoints; of a study, by its folder or parent run, the children are
    compared. Prints the table, with a column for each run where a row for each would be too wide, and writes
    compare.html, runs.csv, curves.csv and a PNG for each metric.
    """
    from rl8x.studies.compare import PAGE
    from rl8x.studies.compare import compare as compare_runs
    from rl8x.studies.table import plain_name

    if output is not None:
        check_folder(Path(output), "--output")
    with users_mistakes(OSError):
        comparison = compare_runs(runs, experiment=experiment, **options)
        folder = output or f"reports/compare-{plain_name(experiment or name_for_files(runs[0]))}"
        comparison.write(folder)
    click.echo(str(comparison))
    click.echo(f"\nWritten: {folder}/{PAGE}, with its tables and figures beside it")
