"""`rl8x train` and `rl8x resume`: train a run from a run file and options, or from a checkpoint, to its end."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from rl8x import keys
from rl8x.algorithms import AlgorithmConfig
from rl8x.cli.errors import LOST_ROWS, UserError, WholeRange, is_users_mistake, users_mistakes
from rl8x.cli.options import AlgorithmCommand, RunCommand, read_run, stop_specs
from rl8x.config import RunSpec, apply_overrides, dump_run
from rl8x.config.files import algorithm_config_class
from rl8x.config.spec import FIELDS, RunOptions
from rl8x.distributed import RankError, ranks
from rl8x.execution.programs import ProgramError
from rl8x.importing import find_modules_here, texts
from rl8x.output import counted, measured, say

if TYPE_CHECKING:
    from rl8x.trainers import Trainer, TrainStats

_EXAMPLES: Final = """\b
rl8x train CartPole --stop "wall_time: 1m"
rl8x train CartPole --lr 3e-4 --steps-per-eval 5 --stop "eval/returns/mean >= 475"
rl8x train CartPole --preset gpu --num-envs 8192 --stop "wall_time: 10m"
rl8x train HalfCheetah-v5 --algorithm sac --tuned
rl8x train CartPole --tuned lr=1e-3 --seed 3
rl8x train -f run.yaml lr=1e-3 env_config.length='{uniform: [0.25, 1]}'
rl8x train my_module.MyEnv algorithm_config.model_config.hidden_sizes='[64, 64]' --max-steps 100
rl8x train CartPole --lr 3e-4 --dry-run > run.yaml    # a run file: the same keys, in YAML, TOML or JSON

\b
An algorithm of your own is a subclass of rl8x.algorithms.AlgorithmConfig, whose fields are options too:
  rl8x train CartPole --algorithm my_module.MyConfig --help
"""
# Keys with a special form on the command line
_OWN_FORM: Final = ("env", "algorithm_config", "stop_conditions", "seed")
# Errors whose messages suffice: the request is impossible on this machine, or with these ranks.
_IMPOSSIBLE: Final = (ProgramError, RankError)


@click.command(
    "train",
    cls=RunCommand,
    run_fields=[name for name in FIELDS if name not in _OWN_FORM],
    display=("tracking", "tracking_uri", "experiment_name", "run_name", "progress"),
    epilog=_EXAMPLES,
)
@click.option(
    "--stop",
    multiple=True,
    metavar="CONDITION",
    help="End the run when this is met, as in 'eval/returns/mean >= 475 and env/steps >= 1e5', 'wall_time: 1h' or "
    "'plateau: {name: episodes/returns/mean}'; may be repeated. Kinds: hits_upper_bound, hits_lower_bound, plateau, "
    "stops_decreasing, stops_increasing, wall_time, non_finite, confirmed, all, any, not.",
)
@click.option(
    "--resume",
    metavar="auto|RUN",
    help="Continue a run, given by its name, ID or path. auto: the newest unfinished run of the same run file, or a "
    "new run if there is none, for jobs that may be preempted and started again.",
)
@click.option("--dry-run", is_flag=True, help="Check everything, print the run as a run file, and train nothing.")
def train(stop: tuple[str, ...], resume: str | None, dry_run: bool, **options: Any) -> int:
    """Train a policy in ENV: a built-in environment (see `rl8x envs`), a Gymnasium id, or a dotted path to a class.

    KEY=VALUE sets any key of a run file, with dots for nested keys: env_config.length=0.4. Hyperparameters need no
    prefix `algorithm_config.`: lr=3e-4. Options override KEY=VALUE, which overrides the run file or that of --tuned; a
    number also replaces the file's schedule of the same hyperparameter. Without a stop condition the run continues
    until Ctrl-C. The exit code is 3 if the training is complete, but neither MLflow nor the disk took all its rows.
    """
    from rl8x.trainers import Trainer

    with users_mistakes(RankError):
        run = read_run(options, stop)
        going_on = resumed(run, resume, trust=options["trust"]) if resume is not None and not dry_run else None
        trainer = going_on or Trainer.from_spec(run)
    for given, why in run.without_effect().items():
        warnings.warn(f"`{given}` has no effect: {why}.", RuntimeWarning, stacklevel=1)
    if not dry_run:
        return run_to_the_end(trainer, trainer.run, run.run.progress)
    from rl8x.tracking.secrets import hide_in_data  # the output usually goes to a file

    shown = hide_in_data(run.to_plain())
    click.echo(dump_run(shown), nl=False)
    if shown != run.to_plain():
        say("rl8x: passwords are printed as ***; to train from this, set MLFLOW_TRACKING_URI or put them in", err=True)
    return 0


def _saved_class(parameters: Mapping[str, Any], asks_help: bool) -> type[AlgorithmConfig] | None:
    """Find the saved run's config class if an option or `--help` needs it, as the search may query a server."""
    run, words, trust = parameters.get("run"), parameters.get("words") or (), parameters.get("trust", False)
    if run is None or not (asks_help or any(word.startswith("--") for word in (run, *words))):
        return None
    if run.startswith("--"):
        raise UserError(f"name the run first: rl8x resume RUN {run} ...")
    from rl8x.checkpoint import find
    from rl8x.tracking.location import typed_store

    with typed_store(parameters.get("tracking_uri")):
        name = find(run, auto=parameters.get("auto", False)).spec.algorithm.algorithm
    find_modules_here(trust)
    return algorithm_config_class(name, trust) if isinstance(name, str) else None


@click.command("resume", cls=AlgorithmCommand, find=_saved_class)
@click.argument("run")
@click.argument("words", nargs=-1, metavar="[HYPERPARAMETER=VALUE]...")
@click.option("--auto", is_flag=True, help="Take the newest good checkpoint if the given one is damaged.")
@click.option("--max-steps", type=WholeRange(min=1), help="End after so many steps, including those before.")
@click.option("--steps-per-eval", type=WholeRange(min=1), help="Evaluate after every so many steps from here on.")
@click.option("--stop", multiple=True, metavar="CONDITION", help="Stop conditions instead of the run's own.")
@click.option("--tracking-uri", metavar="URI", help="The store that has the run. Default: as in training.")
@click.option(
    "--progress", type=click.Choice(["auto", "bar", "lines", "none"]), default="auto", help="What is shown as it runs."
)
def resume(run: str, words: Sequence[str], auto: bool, tracking_uri: str | None, trust: bool, **given: Any) -> int:
    """Continue RUN: its name or ID in MLflow, or the path of its folder of checkpoints, or of one of them.

    The same tracked run continues, to the same numbers as if it had never been interrupted. HYPERPARAMETER=VALUE, as in
    lr=1e-4 or --lr 1e-4, changes a hyperparameter from here on, which the run's tags record; `rl8x resume RUN --help`
    lists them. The exit code is 3 if rows are lost, as in `train`.
    """
    from rl8x.tracking.location import typed_store

    limits = {name: given.pop(name) for name in ("max_steps", "steps_per_eval")}
    options: dict[str, Any] = {name: value for name, value in limits.items() if value is not None}
    progress, stop = given.pop("progress"), given.pop("stop")
    with typed_store(tracking_uri):
        with users_mistakes(RankError):
            overrides = _hyperparameters(words) | given
            conditions = stop_specs(stop)
            find_modules_here(trust or list(texts([overrides, conditions])))
            if conditions:
                options["stop_conditions"] = RunOptions(stop_conditions=conditions).conditions(trust=True)
            trainer = make_trainer(run, auto=auto, overrides=overrides, trust=trust)
        return run_to_the_end(trainer, functools.partial(trainer.run, progress=progress, **options), progress)


def _hyperparameters(words: Sequence[str]) -> dict[str, Any]:
    """Read NAME=VALUE of hyperparameters, with or without `algorithm_config.`; raise for other keys of a run."""
    overrides = apply_overrides({}, words)
    if isinstance(overrides.get("algorithm_config"), Mapping):
        overrides |= overrides.pop("algorithm_config")
    for name in overrides:
        if name in FIELDS and name != "seed":
            raise UserError(
                f"a resume takes hyperparameters as NAME=VALUE, and `{name}` is none. Its options are --max-steps, "
                "--steps-per-eval and --stop; the rest of a run stays as it was."
            )
    return overrides


def make_trainer(source: str | Path, **options: Any) -> Trainer:
    """Make the trainer that resumes a run; if only a script can, raise `UserError` with the Python call."""
    from rl8x.checkpoint import CheckpointError
    from rl8x.trainers import Trainer

    try:
        return Trainer.resume(source, **options)
    except CheckpointError as error:
        for name in ("algorithm", "tracker"):
            if f"`{name}=`" in str(error):
                call = f"Trainer.resume({str(source)!r}, {name}=...)"
                raise UserError(f"{error}, in a script: {call}") from error
        raise


def resumed(run: RunSpec, source: str, *, trust: bool) -> Trainer | None:
    """Make the trainer of `rl8x train --resume`, with the options of `run`; None if `"auto"` finds no run."""
    from rl8x.checkpoint import Checkpoints, find, listed
    from rl8x.checkpoint.load import find_unfinished
    from rl8x.tracking.location import locate
    from rl8x.trainers.resume import TRAINER_OPTIONS

    place: str | Path = source
    if source == "auto":
        directory = run.trainer.checkpoints.get("directory")
        folder = find_unfinished(run) if directory is None else Path(directory)
        if folder is None or not listed(folder):
            return None
        say(f"rl8x: going on with {folder}", err=True)
        place = folder
    checkpoint = find(place, auto=source == "auto")
    saved, own, algorithm = checkpoint.metadata["run"], run.trainer, run.make_algorithm()
    tracker = None  # the run file's tracker if it uses the checkpoint's store, else the saved run's
    if own.tracking and own.tracking_uri is not None and saved["tracker"] == "MLflowTracker":
        tracker = own.make_tracker() if locate(own.tracking_uri).shown == saved["location"] else None
    found = checkpoint.path if checkpoint.is_at(place) else checkpoint.path.parent
    options: dict[str, Any] = {name: getattr(own, name) for name in TRAINER_OPTIONS}
    options["checkpoints"] = replace(own.make_checkpoints() or Checkpoints(), directory=checkpoint.path.parent)
    made = {"algorithm": algorithm, "tracker": tracker, "trust": trust}
    trainer = make_trainer(found, auto=source == "auto", **made, **options)
    trainer.plan(run)
    return trainer


def run_to_the_end(trainer: Trainer, run: Callable[[], TrainStats], progress: str) -> int:
    """Run a trainer and return the exit code; print the results, and if `progress` is `"none"` why it stopped, too."""
    from rl8x.tracking import MLflowTracker
    from rl8x.tracking.shipping import end_unused

    before, failed = dict(trainer.state), True
    tracker = trainer.tracker if isinstance(trainer.tracker, MLflowTracker) else None
    if tracker is None:  # the run file turns tracking off
        end_unused()
    try:
        stats = run()
        failed = False
        if not ranks().is_first:  # only rank 0 prints
            return 0
        if progress == "none":
            say(f"stopped by {stats.stop_reason}")
        if trainer.state == before:
            more = "a larger --max-steps or another --stop"
            ended = f"the run has come to its end ({stats.stop_reason})"
            say(f"rl8x: nothing was trained: {ended}. To train more, resume it with {more}", err=True)
        _summarize(stats, trainer.train_step.evaluated_at)
    except Exception as error:  # what is rejected before the first step is the user's mistake; later errors are bugs
        if trainer.state == before and (isinstance(error, _IMPOSSIBLE) or is_users_mistake(error)):
            raise UserError(str(error)) from error
        raise
    finally:
        for line in trainer.ending if progress == "none" and ranks().is_first else ():
            say(line, err=failed)
    where = None if tracker is None else tracker.whereabouts()  # lost rows are neither in the store nor on disk
    return LOST_ROWS if where is not None and (where.unsent.num_lost or where.unsent.num_others_lost) else 0


def _summarize(stats: TrainStats, evaluated_at: int) -> None:
    """Print the amount of training, and the results of the last evaluation."""
    names = (keys.STEPS, keys.UPDATES, keys.ENV_STEPS, keys.ENV_EPISODES)
    steps, updates, env_steps, episodes = (int(stats[name]) for name in names)
    seen = f"{env_steps:,} transitions, {counted(episodes, 'episode')}"
    seen = seen if env_steps else counted(updates, "update")  # training on a data set, or no step yet
    say(f"trained     {counted(steps, 'step')}, {seen}")
    when = "the final policy" if evaluated_at == steps else f"at step {evaluated_at:,} of {steps:,}"
    whole = stats.get(keys.EVAL_PREFIX + keys.EPISODES_ENDED, 0)
    played = f"{counted(int(whole), 'whole episode')}, " if whole else ""
    for group, quantity, of in (("returns", "return", played), ("horizon_returns", "return of a horizon", "")):
        if f"{keys.EVAL_PREFIX}{group}/mean" in stats:
            low, high, mean, std = (stats[keys.EVAL_PREFIX + name] for name in keys.summary(group))
            returns = f"{quantity} {measured(mean)} +- {std:.3g} (from {measured(low)} to {measured(high)})"
            say(f"evaluated   {returns}, {of}deterministic, {when}")
