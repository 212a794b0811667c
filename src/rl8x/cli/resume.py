"""`rl8x resume`: go on with a run from a checkpoint."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from rl8x.algorithms import AlgorithmConfig
from rl8x.cli.errors import UserError, users_mistakes
from rl8x.cli.options import AlgorithmCommand, find_modules_here, given_options
from rl8x.cli.running import run_to_the_end
from rl8x.conditions import from_spec
from rl8x.config import RunConfig, apply_overrides, parse_value
from rl8x.config.run import algorithm_config_class
from rl8x.importing import import_named, texts
from rl8x.output import say

if TYPE_CHECKING:
    from rl8x.trainers import Trainer


class _ResumeCommand(AlgorithmCommand):
    """A command with an option for each hyperparameter of the saved run's algorithm."""

    def config_class(self, given: Mapping[str, Any], *, asks_help: bool) -> type[AlgorithmConfig] | None:
        """Find the saved run's config class, where an option or `--help` asks for it: a search may ask a server."""
        run, words, trust = given.get("run"), given.get("words") or (), given.get("trust", False)
        if run is None or not (asks_help or any(word.startswith("--") for word in (run, *words))):
            return None
        if run.startswith("--"):
            raise UserError(f"name the run first: rl8x resume RUN {run} ...")
        from rl8x.checkpoint import find

        name = find(run, auto=given.get("auto", False)).metadata.get("build", {}).get("config_class")
        find_modules_here(trust)
        return None if name is None else algorithm_config_class(str(name), trust)


@click.command("resume", cls=_ResumeCommand)
@click.argument("run")
@click.argument("words", nargs=-1, metavar="[HYPERPARAMETER=VALUE]...")
@click.option("--auto", is_flag=True, help="Take the newest good checkpoint where the one meant is damaged.")
@click.option("--max-steps", type=click.IntRange(min=1), help="End after so many steps, those before among them.")
@click.option("--steps-per-eval", type=click.IntRange(min=1), help="Evaluate after every so many steps from here on.")
@click.option("--stop", multiple=True, metavar="CONDITION", help="Stop conditions instead of the run's own.")
@click.option(
    "--progress", type=click.Choice(["auto", "bar", "lines", "none"]), default="auto", help="What is shown meanwhile."
)
def resume(
    run: str,
    words: tuple[str, ...],
    auto: bool,
    max_steps: int | None,
    steps_per_eval: int | None,
    stop: tuple[str, ...],
    progress: Any,
    trust: bool,
    **hyperparameters: Any,
) -> int:
    """Go on with RUN: its name or ID in MLflow, the path of its folder of checkpoints, or of one of them.

    The same tracked run goes on, to the same numbers as if it had never been interrupted. HYPERPARAMETER=VALUE changes
    one from here on, as in lr=1e-4 or --lr 1e-4, and is noted in the run's tags; `rl8x resume RUN --help` lists them.
    The exit code is 3 if rows are lost, as in `train`.
    """
    options = given_options({"max_steps": max_steps, "steps_per_eval": steps_per_eval})
    with users_mistakes():
        overrides = apply_overrides({}, words) | given_options(hyperparameters)
        conditions = [parse_value(text) for text in stop]
        find_modules_here(trust or list(texts([overrides, conditions])))
        if conditions:
            import_condition = functools.partial(import_named, trust=True)
            options["stop_conditions"] = [from_spec(condition, find=import_condition) for condition in conditions]
        trainer = make_trainer(run, auto=auto, overrides=overrides, trust=trust)
    return run_to_the_end(trainer, functools.partial(trainer.run, progress=progress, **options), progress)


def make_trainer(
    source: str | Path, *, auto: bool, overrides: dict[str, Any], trust: bool, run: RunConfig | None = None
) -> Trainer:
    """Make the trainer of a run.

    Args:
        source: What `rl8x resume` takes.
        auto: Whether the newest good checkpoint will do.
        overrides: Hyperparameters to be different.
        run: Builds the algorithm, which must be as it was; None leaves that to the checkpoint, and where that cannot
            name all to its run file.
        trust: As `Trainer.resume` takes it.
    """
    from rl8x.checkpoint import CheckpointError, find
    from rl8x.trainers import Trainer

    checkpoint = find(source, auto=auto)
    tracker = None if run is None else _tracker_to_same_store(run, checkpoint.metadata.get("run") or {})
    run_file = checkpoint.metadata.get("run_file")
    if run is None and run_file is not None and checkpoint.metadata.get("build", {}).get("problems"):
        data = dict(run_file)
        data["algorithm_config"] = {**data.get("algorithm_config", {}), **overrides}
        run = RunConfig.from_dict(data, trust=trust or frozenset(texts(overrides)))
    algorithm = None if run is None else run.make_algorithm()
    try:
        named = Path(source).resolve() == checkpoint.path.resolve()
        meant = checkpoint.path if named else checkpoint.path.parent
        return Trainer.resume(meant, auto=auto, algorithm=algorithm, overrides=overrides, tracker=tracker, trust=trust)
    except CheckpointError as error:
        for name in ("algorithm", "tracker"):
            if f"`{name}=`" in str(error):
                call = f"Trainer.resume({str(checkpoint.path)!r}, {name}=...)"
                raise UserError(f"{error}, in a script: {call}") from error
        raise


def _tracker_to_same_store(run: RunConfig, saved: dict[str, Any]) -> Any:
    """Make the tracker of a run that the user describes, where it names the store that the checkpoint does."""
    from rl8x.tracking.location import locate

    if run.tracking_uri is None or not run.tracking or saved.get("tracker") != "MLflowTracker":
        return None
    return run.make_tracker() if locate(run.tracking_uri).shown == saved.get("location") else None


def resumed(run: RunConfig, source: str, *, trust: bool) -> Trainer | None:
    """Make the trainer that `rl8x train --resume` asks for.

    Args:
        run: The run as the command line says it.
        source: `"auto"`, or what `rl8x resume` takes.
        trust: As `Trainer.resume` takes it.

    Returns:
        The trainer; None where `"auto"` found nothing to go on with.
    """
    from rl8x.checkpoint import listed
    from rl8x.checkpoint.find import find_unfinished

    if source != "auto":
        return make_trainer(source, auto=False, overrides={}, trust=trust, run=run)
    directory = run.checkpoints.get("directory")
    if directory is None:
        folder = find_unfinished(run.to_dict())
    else:
        folder = Path(directory) if listed(Path(directory)) else None
    if folder is None:
        return None
    say(f"rl8x: going on with {folder}", err=True)
    return make_trainer(folder, auto=True, overrides={}, trust=trust, run=run)
