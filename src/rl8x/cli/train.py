"""`rl8x train`: a run from a run file, by options, or both."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final

import click

from rl8x import keys
from rl8x.algorithms import AlgorithmConfig, PPOConfig
from rl8x.cli.errors import UserError, refused_runs, users_mistakes
from rl8x.cli.options import GroupedCommand, field_options, find_modules_here, given, trust_option
from rl8x.cli.resume import resumed
from rl8x.config import RunConfig, apply_overrides, dump_run, load_run_file, parse_value
from rl8x.config.files import SUFFIXES
from rl8x.config.run import ALIASES, HYPERPARAMETER_ALIASES, renamed_keys
from rl8x.importing import texts
from rl8x.output import say

if TYPE_CHECKING:
    from rl8x.trainers import Trainer, TrainStats

# Fields that have a form of their own on the command line
_OWN_FORM: Final = ("env", "algorithm_config", "stop_conditions", "seed")
_RUN_FIELDS: Final = [field for field in dataclasses.fields(RunConfig) if field.name not in _OWN_FORM]
_COMMON_NAMES: Final = {field.name for field in dataclasses.fields(AlgorithmConfig)}
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
"""


def _groups() -> dict[str, str]:
    groups = dict.fromkeys(("file", "stop", "resume", "dry_run", "trust"), "The run")
    groups |= {field.name: "The run" for field in _RUN_FIELDS}
    for name in ("tracking", "tracking_uri", "experiment_name", "run_name", "progress"):
        groups[name] = "Tracking and display"
    for field in dataclasses.fields(PPOConfig):
        groups[field.name] = "Every algorithm" if field.name in _COMMON_NAMES else "PPO"
    return groups


@click.command(
    "train", cls=GroupedCommand, groups=_groups(), epilog=_EXAMPLES, context_settings={"max_content_width": 120}
)
@click.argument("words", nargs=-1, metavar="[ENV] [KEY=VALUE]...")
@click.option("-f", "--file", metavar="FILE", help="Run file: YAML, TOML or JSON. What stands after it wins.")
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
@trust_option
@click.option("--dry-run", is_flag=True, help="Check everything, print the run as a run file, and train nothing.")
def train(
    words: tuple[str, ...],
    file: str | None,
    stop: tuple[str, ...],
    resume: str | None,
    dry_run: bool,
    trust: bool,
    **options: Any,
) -> int:
    """Train a policy in ENV: a built-in environment (see `rl8x envs`), a Gymnasium id, or a dotted path to a class.

    KEY=VALUE sets any key of a run file, with dots for what is inside: env_config.length=0.4. Hyperparameters need no
    algorithm_config before them: lr=3e-4. Later wins: the run file, then KEY=VALUE, then options. Without a stop
    condition the run goes on until Ctrl-C.
    """
    with users_mistakes():
        run = read_run(words, file, stop, given(options), trust=trust)
        going_on = resumed(run, resume, trust=trust) if resume is not None and not dry_run else None
        trainer = going_on or run.make_trainer()
    if dry_run:
        _print_run_file(run.to_dict())
        return 0
    with telling_the_end(trainer, run.progress), refused_runs(trainer):
        stats = run.train(trainer)
        summarize_run(stats, say_reason=run.progress == "none")
    return 0


def _print_run_file(data: dict[str, Any]) -> None:
    """Print a run as a run file; it is mostly sent to a file, so without passwords."""
    from rl8x.tracking.secrets import hide_in_data

    shown = hide_in_data(data)
    click.echo(dump_run(shown), nl=False)
    if shown != data:
        say("rl8x: passwords are printed as ***; to train from this, set MLFLOW_TRACKING_URI or put them in", err=True)


train.params.extend(field_options(_RUN_FIELDS))
train.params.extend(field_options(dataclasses.fields(PPOConfig)))


def read_run(
    words: tuple[str, ...], file: str | None, stop: tuple[str, ...], options: Mapping[str, Any], *, trust: bool
) -> RunConfig:
    """Put a run together from what stood on the command line.

    What the user gave there may import the modules that it names, what stands in a file only where he trusts it.

    Args:
        words: At most one environment, and `key=value` overrides.
        file: A run file.
        stop: Stop conditions in YAML; they replace the file's.
        options: Values of the options that were given, by field.
        trust: Whether the file may import any module.
    """
    data = renamed_keys(load_run_file(file)) if file is not None else {}
    envs = [word for word in words if "=" not in word]
    if len(envs) > 1:
        raise UserError(f"one environment at most; got {' and '.join(envs)}.")
    if envs and envs[0].lower().endswith(SUFFIXES):
        raise UserError(f"{envs[0]!r} is no environment. To read a run file: rl8x train -f {envs[0]}")
    overrides = [_under_algorithm(word) for word in words if "=" in word]
    data = apply_overrides(data, overrides, ALIASES)
    conditions = [parse_value(text) for text in stop]
    if envs:
        data["env"] = envs[0]
    if conditions:
        data["stop_conditions"] = conditions
    of_run = {field.name for field in _RUN_FIELDS}
    data.update({name: value for name, value in options.items() if name in of_run})
    hyperparameters = {name: value for name, value in options.items() if name not in of_run}
    if hyperparameters:
        inner = data.get("algorithm_config") or {}
        if "seed" in hyperparameters:
            data.pop("seed", None)
        data["algorithm_config"] = {**inner, **hyperparameters} if isinstance(inner, Mapping) else inner
    words_given = frozenset(texts([envs, apply_overrides({}, overrides, ALIASES), conditions, dict(options)]))
    find_modules_here(trust or words_given)
    return RunConfig.from_dict(data, trust=trust or words_given)


def _under_algorithm(word: str) -> str:
    """Put a hyperparameter that is overridden by its bare name where run files have it."""
    name = re.split(r"[.=]", word, maxsplit=1)[0].strip()
    of_run = {field.name for field in dataclasses.fields(RunConfig)} | set(ALIASES)
    if "=" not in word or name in of_run:
        return word
    hyperparameters = {field.name for field in dataclasses.fields(PPOConfig)} | set(HYPERPARAMETER_ALIASES)
    near = difflib.get_close_matches(name, of_run | hyperparameters, n=1)
    return f"algorithm_config.{word}" if near and near[0] in hyperparameters else word


@contextlib.contextmanager
def telling_the_end(trainer: Trainer, progress: str) -> Iterator[None]:
    """Say where the run is and how to go on with it, however it ends; the trainer has, unless told to be silent."""
    try:
        yield
    except BaseException:
        _tell_the_end(trainer, progress, err=True)
        raise
    _tell_the_end(trainer, progress, err=False)


def _tell_the_end(trainer: Trainer, progress: str, *, err: bool) -> None:
    for line in trainer.ending if progress == "none" else ():
        say(line, err=err)


def summarize_run(stats: TrainStats, *, say_reason: bool = True) -> None:
    """Say why a run stopped, and with what.

    Args:
        stats: Its last row.
        say_reason: Whether to say why it stopped; the trainer has, unless it was told to be silent.
    """
    if say_reason:
        say(f"stopped by {stats.stop_reason}")
    steps, env_steps, episodes = (stats[name] for name in (keys.STEPS, keys.ENV_STEPS, keys.ENV_EPISODES))
    say(f"trained     {steps:,.0f} steps, {env_steps:,.0f} env steps, {episodes:,.0f} episodes")
    for group in ("returns", "horizon_returns"):
        if f"{keys.EVAL_PREFIX}{group}/mean" in stats:
            say(_describe_evaluation(stats, group))


def _describe_evaluation(stats: TrainStats, group: str) -> str:
    low, high, mean, std = (stats[keys.EVAL_PREFIX + name] for name in keys.summary(group))
    when = "final" if f"{keys.EVAL_PREFIX}{group}/mean" in stats.fresh else "last"
    what = "return" if group == "returns" else "return of a horizon"
    episodes = stats.get(keys.EVAL_PREFIX + keys.EPISODES_ENDED, 0)
    played = f"{episodes:,.0f} whole episodes, " if episodes and group == "returns" else ""
    figures = f"{what} {mean:.4g} +- {std:.3g} (from {low:.4g} to {high:.4g})"
    return f"evaluated   {figures}, {played}deterministic, the {when} policy"
