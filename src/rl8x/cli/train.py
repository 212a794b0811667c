"""`rl8x train`: a run from a run file, by options, or both."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, Final

import click

from rl8x.cli.errors import users_mistakes
from rl8x.cli.options import RunCommand, read_run
from rl8x.cli.resume import resumed
from rl8x.cli.running import run_to_the_end
from rl8x.config import RunConfig, dump_run
from rl8x.output import say

_EXAMPLES: Final = """\b
rl8x train CartPole --stop "wall_time: 1m"
rl8x train CartPole --num-envs 4096 --lr 3e-4 --steps-per-eval 5 --stop "hits_upper_bound: [eval/returns/mean, 475]"
rl8x train -f run.yaml lr=1e-3 env_config.length='{uniform: [0.25, 1]}'
rl8x train my_module.MyEnv algorithm_config.model_config.hidden_sizes='[64, 64]' --max-steps 100
rl8x train CartPole --lr 3e-4 --dry-run > run.yaml

\b
A run file has the same keys, in YAML, TOML or JSON:
  env: CartPole
  env_config: {length: {uniform: [0.25, 1.0]}}
  algorithm_config: {num_envs: 4096, lr: 3e-4}
  steps_per_eval: 5
  stop_conditions:
    - plateau: {name: episodes/returns/mean, patience: 20}
    - any: [{wall_time: 10m}, {hits_upper_bound: [env/steps, 1e8]}]

\b
An algorithm of your own is a subclass of rl8x.algorithms.AlgorithmConfig, whose fields are options too:
  rl8x train CartPole --algorithm my_module.MyConfig --help
"""


# Keys that have a form of their own on the command line
_OWN_FORM: Final = ("env", "algorithm_config", "stop_conditions", "seed")


class _TrainCommand(RunCommand):
    """A command with an option for each key of a run file."""

    run_fields = tuple(field.name for field in dataclasses.fields(RunConfig) if field.name not in _OWN_FORM)
    display = ("tracking", "tracking_uri", "experiment_name", "run_name", "progress")


@click.command("train", cls=_TrainCommand, epilog=_EXAMPLES, context_settings={"max_content_width": 120})
@click.option(
    "--stop",
    multiple=True,
    metavar="CONDITION",
    help="End the run when this is met, as in 'wall_time: 1h' or 'plateau: {name: episodes/returns/mean}'; may be "
    "repeated. Kinds: hits_upper_bound, hits_lower_bound, plateau, stops_decreasing, stops_increasing, wall_time, "
    "non_finite, confirmed, all, any, not.",
)
@click.option(
    "--resume",
    metavar="auto|RUN",
    help="Go on with a run: by name, ID or path; auto: with the newest unfinished one of the same run file, if there "
    "is one. For jobs that may be preempted and started again.",
)
@click.option("--dry-run", is_flag=True, help="Check everything, print the run as a run file, and train nothing.")
def train(stop: tuple[str, ...], resume: str | None, dry_run: bool, **options: Any) -> int:
    """Train a policy in ENV: a built-in environment (see `rl8x envs`), a Gymnasium id, or a dotted path to a class.

    KEY=VALUE sets any key of a run file, with dots for what is inside: env_config.length=0.4. Hyperparameters need no
    algorithm_config before them: lr=3e-4. Later wins: the run file, then KEY=VALUE, then options. Without a stop
    condition the run goes on until Ctrl-C. The exit code is 3 if the run was trained, but rows of it are lost, since
    neither MLflow nor the disk took them.
    """
    with users_mistakes():
        run = read_run(options, stop)
        going_on = resumed(run, resume, trust=options["trust"]) if resume is not None and not dry_run else None
        trainer = going_on or run.make_trainer()
    if not dry_run:
        return run_to_the_end(trainer, functools.partial(run.train, trainer), run.progress)
    _print_run_file(run.to_dict())
    return 0


def _print_run_file(data: dict[str, Any]) -> None:
    """Print a run as a run file; it is mostly sent to a file, so without passwords."""
    from rl8x.tracking.secrets import hide_in_data

    shown = hide_in_data(data)
    click.echo(dump_run(shown), nl=False)
    if shown != data:
        say("rl8x: passwords are printed as ***; to train from this, set MLFLOW_TRACKING_URI or put them in", err=True)
