"""`rl8x study`: trainings under several configurations and seeds, tested in many environments, from one file."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import click

from rl8x.cli.errors import LOST_ROWS, UserError, users_mistakes
from rl8x.cli.options import find_modules_here, one_file
from rl8x.config import apply_overrides
from rl8x.config.files import SUFFIXES
from rl8x.importing import texts
from rl8x.output import counted, say, table

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
_FAILED: Final = 1


@click.command("study", epilog=_EXAMPLES, context_settings={"max_content_width": 120})
@click.argument("words", nargs=-1, metavar="[KEY=VALUE]...")
@click.option(
    "-f",
    "--file",
    metavar="FILE",
    multiple=True,
    callback=one_file,
    help="The study's file: YAML, TOML or JSON. Later arguments override it.",
)
@click.option("--jobs", type=click.IntRange(min=1), default=1, help="Trainings at the same time on this machine.")
@click.option(
    "--backend",
    type=click.Choice(["processes", "dask", "ray"]),
    default="processes",
    help="What does the jobs: processes of this machine, or a cluster, which must see the study's folder.",
)
@click.option("--cluster", metavar="ADDRESS", help="Of a Dask scheduler; without it, one is made on this machine.")
@click.option("--progress", type=click.Choice(["auto", "bar", "lines", "none"]), help="What is shown meanwhile.")
@click.option("--dry-run", is_flag=True, help="Check everything, list the trainings, and train nothing.")
@click.option("--trust", is_flag=True, help="Import the modules that the file names: their code runs.")
def study(
    words: tuple[str, ...],
    file: str | None,
    jobs: int,
    backend: str,
    cluster: str | None,
    progress: str | None,
    dry_run: bool,
    trust: bool,
) -> int:
    """Train under several configurations, hyperparameters and seeds, and test every policy in many environments.

    KEY=VALUE sets any key of the file: seeds=5, test.length='[0.5, 1]'; hyperparameters need no algorithm_config before
    them. The same command goes on with a study that was interrupted: what is done is not done again. Each training is
    a run in MLflow, a child of the study's. The exit code is 1 where trainings failed (all others
    are done then), and 3 where the store does not have all of it.
    """
    from rl8x.studies.definition import StudyConfig
    from rl8x.studies.jobs import check_backend
    from rl8x.studies.study import Study

    if file is None:
        hint = f" As in: rl8x study -f {words[0]}" if words and words[0].lower().endswith(SUFFIXES) else ""
        raise UserError(f"name the study's file: -f FILE.{hint}")
    with users_mistakes():
        find_modules_here(trust or frozenset(texts(apply_overrides({}, words))))
        config = StudyConfig.from_file(Path(file), words, trust=trust or None)
        study = Study.from_config(config)
        if dry_run:
            check_backend(backend, cluster)
            notes = config.check()
            _list(config)
            for note in notes:
                say(note)
            return 0
        frame = study.run(jobs, backend=backend, cluster=cluster, progress=progress)
    _summarize(study, frame)
    return _FAILED if study.failed else 0 if study.has_arrived else LOST_ROWS


def _list(config: Any) -> None:
    """Say what a study would do."""
    from rl8x.envs.cells import num_cells

    cells = num_cells(config.cells())
    if config.searches:
        trainings = config.trials * len(config.train) * len(config.seeds)
        say(f"at most {counted(trainings, 'training', 'trainings')} of {counted(config.trials, 'trial', 'trials')}")
    else:
        trainings = len(config.trainings())
        for training in config.trainings():
            say(training.label)
        say(counted(trainings, "training", "trainings"))
    played = f"{counted(config.episodes, 'episode', 'episodes')} in each"
    say(f"each tested in {counted(cells, 'cell', 'cells')}, {played}: {cells * config.episodes:,} episodes a policy")


def _summarize(study: Any, frame: Any) -> None:
    """Print results, failures, and what to do next."""
    if not frame.empty:
        say(table(_rows(frame)))
        for note in _without_inside(study, frame):
            say(note)
    for label, error in study.failed.items():
        say(f"failed: {label}: {error}")
    if study.failed:
        say(f"the same command tries again; tracebacks are in {study.folder}")
    if not study.has_arrived:
        say("the store does not have all of it: the same command sends the rest")
    if not frame.empty:
        say(f"to look at it: rl8x report {shlex.quote(str(study.folder))}")


def _without_inside(study: Any, frame: Any) -> list[str]:
    """Say of each training that no cell is inside of why that is."""
    from rl8x.envs.cells import why_none_is_inside
    from rl8x.studies import table as columns

    final = frame[frame[columns.FINAL]]
    within = final.groupby(columns.TRAINING, sort=False)[columns.INSIDE].any()
    cells, supports = study.config.cells(), study.supports
    return [f"{name}: {why_none_is_inside(cells, supports[name])}" for name, has in within.items() if not has]


def _rows(frame: Any) -> list[list[str]]:
    """Make a line for each training configuration and set of hyperparameters: mean returns over seeds."""
    from rl8x.studies import table as columns
    from rl8x.studies.summary import HEADINGS

    final = frame[frame[columns.FINAL]]
    who = [name for name in frame.columns if name == columns.TRAINING or name.startswith(columns.VARY)]
    varied = (name.removeprefix(columns.VARY) for name in who)
    rows = [[*varied, "seeds", "return", "inside", "outside", HEADINGS["worst_cell"]]]
    for names, group in final.groupby(who, sort=False, dropna=False):
        within = group[columns.INSIDE]
        values: Mapping[str, Any] = {
            "all": group[columns.RETURNS],
            "inside": group[columns.RETURNS][within],
            "outside": group[columns.RETURNS][~within],
        }
        # A return that is not finite makes no mean of the others.
        means = ["-" if part.empty else f"{part.mean(skipna=False):.4g}" for part in values.values()]
        worst = group.groupby(columns.SEED)[columns.RETURNS].agg(lambda of_seed: of_seed.min(skipna=False))
        worst = worst.mean(skipna=False)
        rows.append([*map(str, names), str(group[columns.SEED].nunique()), *means, f"{worst:.4g}"])
    return rows
