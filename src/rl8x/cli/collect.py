"""`rl8x collect`: a data set from what a checkpoint's policy does, or from random actions, to learn from offline."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from rl8x.checkpoint import CheckpointError
from rl8x.cli.acting import acting_at_random, acting_options, asked_config, check_spaces, in_words, load_acting
from rl8x.cli.errors import Command, FiniteRange, UserError, check_folder
from rl8x.envs import validate
from rl8x.output import say
from rl8x.replay.minari_format import check_new_id, write_minari
from rl8x.rollouts.recording import record

_EXAMPLES = """\b
rl8x collect my-run --transitions 100000
rl8x collect runs/000040-step-400 --transitions 1e5 --epsilon 0.3 --output medium
rl8x collect CartPole --random --transitions 20000 --output random
rl8x collect my-run env_config.length=0.4 --transitions 20000 --output short-pole
rl8x collect my-run --transitions 20000 --format minari --output cartpole/medium-v0
rl8x train --algorithm bc --dataset medium --eval-env CartPole --steps-per-eval 10 --max-steps 100
"""


_OUTPUT = "A new folder for the data set, or a new id of Minari's. [default: datasets/RUN-N, or rl8x/RUN-N-v0]"
_FORMAT = "A memory-mapped TensorDict, or Minari's HDF5 in its own folder of data sets."
_RANDOM = "Act at random: a run only says in which environment, and RUN may be the name of one."


@click.command("collect", cls=Command, epilog=_EXAMPLES)
@click.option("--transitions", required=True, metavar="N", help="How many transitions.")
@click.option("--output", metavar="NAME", help=_OUTPUT)
@click.option("--format", "file_format", type=click.Choice(["rl8x", "minari"]), default="rl8x", help=_FORMAT)
@click.option("--random", "is_random", is_flag=True, help=_RANDOM)
@click.option("--epsilon", type=FiniteRange(0, 1), default=0.0, help="Share of random actions.")
@click.option("--deterministic", is_flag=True, help="Take the most likely actions rather than samples.")
@click.option(
    "--num-envs", type=click.IntRange(min=1), default=8, help="Copies of the environment. Each ends in a cut episode."
)
@acting_options
def collect(run: str, overrides: Sequence[str], is_random: bool, env: str | None, **how: Any) -> int:
    """Record what the policy of RUN does: its name or ID in MLflow, the path of its checkpoints, or of one of them.

    With --random RUN may also be an environment, named as for `rl8x train`; it then has its defaults.

    It acts under the env_config of the training, of which env_config.NAME=VALUE changes one parameter, and
    env_config={} goes back to the environment's defaults; in another --env it acts under that one's defaults.

    The data set has true final observations, and says where episodes terminated and where they were truncated. It is
    in rl8x's own format, a memory-mapped TensorDict, or in Minari's; `--dataset` and `Dataset.load` read both.
    """
    if is_random and (how["epsilon"] or how["deterministic"]):
        raise UserError("--random leaves nothing for --epsilon or --deterministic to change: give one of them.")
    auto, trust = how.pop("auto"), how.pop("trust")
    count = _whole(how.pop("transitions"))
    target = _new_target(f"{Path(run).name}-{count}", how.pop("output"), how.pop("file_format"))
    maker, no_env = acting_at_random(run) if is_random and env is None else (None, "")
    acting, trained = None, dict[str, Any]()
    if maker is None:
        try:
            acting = load_acting(run, env, auto=auto, trust=trust)
        except CheckpointError as error:
            raise UserError(f"{no_env} It is no run either: {error}") if no_env else error from None
        maker, trained = acting.maker, dict(acting.trained_config)
    device = "cpu" if acting is None else acting.policy.device
    made = maker(min(how.pop("num_envs"), count), device=device, seed=how["seed"])
    with contextlib.closing(made) as environment:
        validate(environment)
        if acting is not None:
            check_spaces(environment, acting.policy)
        asked = asked_config(trained, overrides, environment.num_copies)
        config = environment.plain_config(asked, copies="--num-envs")
        policy = None if acting is None or is_random else acting.policy
        recorded = record(policy, environment, count, env_config=config, **how)
    if isinstance(target, Path):
        target.parent.mkdir(parents=True, exist_ok=True)
        recorded.dataset.save(target)
    else:
        name = "random" if is_random or acting is None else acting.algorithm
        write_minari(target, recorded.dataset, algorithm_name=name)
    source = "" if acting is None or overrides or env is not None else f", {acting.source}"
    say(f"env_config  {in_words(config)}{source}")
    mean = f", mean return {recorded.returns.mean():.4g}" if len(recorded.returns) else ""
    say(f"wrote       {target}: {recorded.dataset.size:,} transitions, {len(recorded.returns):,} whole episodes{mean}")
    return 0


def _new_target(default: str, output: str | None, file_format: str) -> Path | str:
    """Return the folder, or the id of Minari's, that the data set is to have, and refuse one that is there."""
    if file_format == "minari":
        name = f"rl8x/{re.sub(r'[^-_0-9A-Za-z]', '-', default)}-v0" if output is None else output
        check_new_id(name)
        return name
    folder = Path("datasets") / default if output is None else Path(output)
    if folder.exists():
        raise UserError(f"{folder} is there already: give another --output.")
    check_folder(folder.parent, "--output")
    return folder


def _whole(text: str) -> int:
    """Read a whole number of at least 1, which may be written as 1e5."""
    try:
        number = float(text)
        if number < 1 or not number.is_integer():
            raise ValueError
    except (ValueError, OverflowError):
        raise UserError(f"--transitions must be a whole number of at least 1; got {text!r}.") from None
    return int(number)
