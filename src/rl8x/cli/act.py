"""`rl8x play` and `collect`: film a run's policy or print its returns, or record a data set from it."""

from __future__ import annotations

import contextlib
import os
import re
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import click
from numpy.typing import NDArray

from rl8x.checkpoint import CheckpointError, find, load_policy
from rl8x.checkpoint.load import env_maker_of
from rl8x.cli.errors import Command, FiniteRange, UserError, WholeRange, check_file, check_folder, name_for_files
from rl8x.config import apply_overrides, parse_value
from rl8x.envs import Env, env_maker, validate
from rl8x.envs.cells import make_cells
from rl8x.envs.parameters import inherited_config, plain, shown_value
from rl8x.importing import find_modules_here
from rl8x.output import counted, measured, say, table
from rl8x.policy import Policy, check_fits
from rl8x.replay.recording import check_new_id, record, write_minari
from rl8x.rollouts.episodes import play_episodes
from rl8x.video import LEAST_FPS, check_format, film, make_filmed

_COUNT: Final = WholeRange(min=1)
_ENV: Final = "Act in this environment.  [default: where the run trained, or evaluated]"

# -- the policy and its environment


class Acting(NamedTuple):
    """A policy and the environment that it acts in."""

    policy: Any  # a `Policy`; None for random actions
    maker: Callable[..., Env]
    algorithm: str
    # The `env_config` of the training's next reset, with moving parameters at their saved values; of a run that learned
    # from data that of its evaluations; empty in another environment than the run's. `source` is its origin in words.
    trained_config: Mapping[str, Any]
    source: str = ""

    def config(
        self, env: Env, words: Sequence[str], crossed: Mapping[str, list[Any]], each: int = 1, *, copies: str
    ) -> dict[str, Any]:
        """Return the plain `env_config` to act under: the training's, changed by typed `words` and the grid `crossed`.

        Each value of a list applies to `each` consecutive copies; `copies` is the option that sets their number.
        """
        if self.policy is not None:
            check_fits(self.policy, env)
        trained = plain(inherited_config(self.trained_config, env.num_copies // each))
        config = apply_overrides({"env_config": trained}, words)
        if other := [name for name in config if name != "env_config"]:
            raise UserError(f"only env_config.NAME=VALUE may follow RUN; got {other[0]}={config[other[0]]!r}.")
        values = config["env_config"] or {}
        if not isinstance(values, Mapping):
            raise UserError(f"env_config must be values by name, as in env_config.length=0.4; got {values!r}.")
        values = {
            name: [part for part in value for _ in range(each)] if isinstance(value, list) else value
            for name, value in {**values, **crossed}.items()
        }
        return env.plain_config(values, copies=copies)


def acting_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the parameters that both commands share: the run, its environment, overrides, the seed, and flags."""
    for parameter in (
        click.option("--trust", is_flag=True, help="Import the modules that the checkpoint names: their code runs."),
        click.option("--auto", is_flag=True, help="Take the newest good checkpoint if the given one is damaged."),
        click.option("--seed", type=WholeRange(0, 2**63 - 1), default=0, help="Seeds environment and actions."),
        click.option("--env", metavar="ENV", help=_ENV),
        click.argument("overrides", nargs=-1, metavar="[env_config.NAME=VALUE]..."),
        click.argument("run"),
    ):
        command = parameter(command)
    return command


def load_acting(run: str, env: str | None, *, auto: bool, trust: bool) -> Acting:
    """Make a run's policy, and find its environment: `env`, else the training's, or without one the evaluations'."""
    find_modules_here(trust or [] if env is None else trust or [env])
    checkpoint = find(run, auto=auto)
    spec, resolved = checkpoint.spec, checkpoint.metadata["resolved"]
    policy = load_policy(checkpoint, device=resolved["config"].get("device", "auto"), trust=trust)
    if env is not None:
        return Acting(policy, env_maker(env, trust=True), resolved["algorithm"], {})
    maker = env_maker_of(spec, trust)
    if maker is not None:
        config = checkpoint.state["trainer"]["algorithm"].get("collector", {}).get("env", {}).get("present", {})
        return Acting(policy, maker, resolved["algorithm"], config, ", as in the training")
    evaluated_in = spec.trainer.eval_env
    if not isinstance(evaluated_in, str) or evaluated_in == "auto":
        raise UserError(f"{run} does not say in which environment: give it by --env, as in --env CartPole.")
    maker, config = env_maker(evaluated_in, trust=trust), spec.run.eval_env_config or {}
    return Acting(policy, maker, resolved["algorithm"], config, ", as in the run's evaluations")


def _in_words(config: Mapping[str, Any]) -> str:
    """Return a plain `env_config` as one line of text."""
    return ", ".join(f"{name} = {shown_value(value)}" for name, value in config.items()) or "the defaults"


# -- play

_PLAY_EXAMPLES = """\b
rl8x play my-run
rl8x play my-run --output films/my-run.gif
rl8x play runs/000040-step-400 env_config.length=0.4 --episodes 3 --output short-pole.mp4
rl8x play my-run --grid length=0.25,0.5,1 --grid force_mag=5,10,20 --output physics.gif
rl8x play my-run --env-config "length: {uniform: [0.2, 2]}" --copies 9 --output random.gif
"""
_EPISODES: Final = 10  # without a film
_ENV_CONFIG: Final = "Values of the environment's parameters; a list has one for each copy. [default: as in training]"
_GRID: Final = "Play a copy for each value, side by side; a second --grid makes rows of them."


@click.command("play", cls=Command, epilog=_PLAY_EXAMPLES)
@click.option("--output", "out", metavar="FILE", help="Write a film: a .gif, or a .mp4 (extra `video`).")
@click.option(
    "--episodes",
    type=_COUNT,
    metavar="N",
    help="Episodes of each copy, in a film one after the other. [default: 1 in a film, else 10]",
)
@click.option("--env-config", metavar="MAPPING", help=_ENV_CONFIG)
@click.option("--grid", multiple=True, metavar="NAME=V1,V2,...", help=_GRID)
@click.option("--copies", type=_COUNT, metavar="N", help="Copies side by side, where nothing else says.")
@click.option("--sample", is_flag=True, help="Sample actions rather than take the most likely ones.")
@click.option("--max-steps", type=_COUNT, help="Where to stop if episodes go on. [default: 1000; 200 if none ends]")
@click.option("--fps", type=FiniteRange(min=LEAST_FPS), help="Steps a second. [default: the environment's]")
@acting_options
def play(run: str, overrides: Sequence[str], out: str | None, grid: Sequence[str], env: str | None, **how: Any) -> int:
    """Play episodes with the policy of RUN: its name or ID in MLflow, the path of its checkpoints, or of one of them.

    Without --output the returns are printed. Built-in environments draw themselves, as do your own that have a `draw`;
    Gymnasium's render. Several copies with different physics are one picture, with the values written above each.

    It plays under the env_config of the training, of which env_config.NAME=VALUE changes one parameter; --env-config
    replaces all of it.
    """
    env_config, copies, episodes, fps = (how.pop(name) for name in ("env_config", "copies", "episodes", "fps"))
    if out is not None:
        check_format(Path(out).suffix)
        check_file(out, "--output")
    words = [*([] if env_config is None else [f"env_config={env_config}"]), *overrides]
    axes = _axes(grid)
    # Every combination of two lists; the values of the first change fastest.
    cells = make_cells(dict(reversed(axes.items())), called="--grid") if axes else {}
    crossed = {name: cells[name].tolist() for name in axes}
    number = _copies(words, crossed, copies)
    acting = load_acting(run, env, auto=how.pop("auto"), trust=how.pop("trust"))
    policy: Policy = acting.policy
    how["deterministic"] = not how.pop("sample")
    if out is not None:
        columns = len(next(iter(axes.values()))) if len(axes) > 1 else None
        options: Any = {"episodes": episodes or 1, "columns": columns, "fps": fps, **how}
        made = make_filmed(acting.maker, number, device=policy.device, seed=how["seed"])
        with contextlib.closing(made) as environment:
            config = acting.config(environment, words, crossed, copies="--copies")
            shown = film(policy, environment, Path(out).suffix, env_config=config, **options)
        returns, lengths, finished = (array.T for array in (shown.returns, shown.lengths, shown.finished))
        shown.save(out)
    else:
        config, returns, lengths, finished = _play(acting, words, crossed, number, episodes or _EPISODES, how)
    same = {name: value for name, value in config.items() if not isinstance(value, list)}
    apart = ", ".join(name for name in config if name not in same) if number > 1 else ""
    played = f"{_in_words(same)}; of each copy {apart}" if apart else _in_words(config)
    say(f"env_config  {played}{'' if words or grid else acting.source}")
    say(_report(config, returns, lengths, finished))
    if out is not None:
        say(f"wrote       {out}: {shown.num_frames:,} frames, {len(shown.data) / 1e6:.2g} MB")
    return 0


def _axes(grid: Sequence[str]) -> dict[str, list[Any]]:
    """Read the options --grid."""
    axes = []
    for text in grid:
        name, equals, values = text.partition("=")
        axes.append((name.strip(), [parse_value(value) for value in values.split(",") if value.strip()]))
        if not name or not equals or not axes[-1][1]:
            raise UserError(f"--grid is NAME=V1,V2,..., such as length=0.25,0.5,1; got {text!r}.")
    if len(axes) > 2 or len(dict(axes)) < len(axes):
        listed = ", ".join(name for name, _ in axes)
        raise UserError(f"--grid may be given once or twice, for different parameters; got {listed}.")
    return dict(axes)


def _copies(words: Sequence[str], crossed: Mapping[str, list[Any]], asked: int | None) -> int:
    """Return the number of copies: the number of values of a grid or a typed list, else `asked`, else one."""
    typed = apply_overrides({}, words).get("env_config")
    typed = typed if isinstance(typed, Mapping) else {}
    lists = {**crossed, **{name: value for name, value in typed.items() if isinstance(value, list)}}
    sizes = {name: len(value) for name, value in lists.items()} | ({} if asked is None else {"--copies": asked})
    if len(set(sizes.values())) > 1:
        listed = ", ".join(f"{name} for {size}" for name, size in sizes.items())
        raise UserError(f"values must be for the same number of copies; got {listed}.")
    return next(iter(sizes.values()), 1)


def _play(
    acting: Acting, words: Sequence[str], crossed: Mapping[str, list[Any]], copies: int, episodes: int, how: Any
) -> tuple[dict[str, Any], NDArray[Any], NDArray[Any], NDArray[Any]]:
    """Play all episodes at once; return the config, returns, lengths and whether they ended, `[copies, episodes]`."""
    with contextlib.closing(acting.maker(copies * episodes, device=acting.policy.device, seed=how["seed"])) as env:
        config = acting.config(env, words, crossed, episodes, copies="--copies")
        last = deque(play_episodes(acting.policy, env, env_config=config, **how), maxlen=1).pop()
    config = {name: value[::episodes] if isinstance(value, list) else value for name, value in config.items()}
    played = (array.reshape(copies, episodes) for array in (last.returns, last.lengths, ~last.running))
    return (config, *played)  # type: ignore[return-value]


def _report(config: Mapping[str, Any], returns: NDArray[Any], lengths: NDArray[Any], finished: NDArray[Any]) -> str:
    """Return a line on the episodes of one copy, or a table of several; arrays are `[copies, episodes]`."""
    copies, episodes = returns.shape
    cut = int((~finished).sum())
    note = f"\n{counted(cut, 'episode')} of {finished.size} had not ended: see --max-steps" if cut else ""
    if copies == 1:
        shown = ", ".join(map(measured, returns[0, :20])) + (", ..." if episodes > 20 else "")
        mean = f", mean {measured(returns.mean())}" if episodes > 1 else ""
        return f"returns     {shown}{mean}; {lengths.mean():,.4g} steps{' on average' * (episodes > 1)}{note}"
    varied = [name for name, value in config.items() if isinstance(value, list)]
    rows = [["copy", *varied, "mean return", "lowest", "highest", "steps"]]
    for copy in range(copies):
        numbers = [returns[copy].mean(), returns[copy].min(), returns[copy].max(), lengths[copy].mean()]
        rows.append([str(copy), *(f"{config[name][copy]:g}" for name in varied), *map(measured, numbers)])
    return table(rows) + note


# -- collect

_COLLECT_EXAMPLES = """\b
rl8x collect my-run --transitions 100000
rl8x collect runs/000040-step-400 --transitions 1e5 --epsilon 0.3 --output medium
rl8x collect CartPole --random --transitions 20000 --output random
rl8x collect my-run env_config.length=0.4 --transitions 20000 --output short-pole
rl8x collect my-run --transitions 20000 --format minari --output cartpole/medium-v0
rl8x train --algorithm bc --dataset medium --eval-env CartPole --steps-per-eval 10 --max-steps 100
"""
_OUTPUT: Final = "A new folder for the data set, or a new id of Minari's. [default: datasets/RUN-N, or rl8x/RUN-N-v0]"
_FORMAT: Final = "A file of safetensors, or Minari's HDF5 in its own folder of data sets."
_RANDOM: Final = "Take random actions in the environment of RUN, which may then be the name of an environment."


@click.command("collect", cls=Command, epilog=_COLLECT_EXAMPLES)
@click.option("--transitions", type=WholeRange(min=1), required=True, metavar="N", help="How many transitions.")
@click.option("--output", metavar="NAME", help=_OUTPUT)
@click.option("--format", "file_format", type=click.Choice(["rl8x", "minari"]), default="rl8x", help=_FORMAT)
@click.option("--random", "is_random", is_flag=True, help=_RANDOM)
@click.option("--epsilon", type=FiniteRange(0, 1), default=0.0, help="Share of random actions.")
@click.option("--deterministic", is_flag=True, help="Take the most likely actions rather than samples.")
@click.option("--num-envs", type=_COUNT, default=8, help="Copies of the environment. Each ends in a cut episode.")
@acting_options
def collect(run: str, overrides: Sequence[str], is_random: bool, env: str | None, **how: Any) -> int:
    """Record what the policy of RUN does: its name or ID in MLflow, the path of its checkpoints, or of one of them.

    With --random, RUN may also be an environment, named as for `rl8x train`, which then has its defaults.

    It acts under the env_config of the training, of which env_config.NAME=VALUE changes one parameter, and
    env_config={} restores the environment's defaults. Another --env has its own defaults.

    The data set has true final observations, and says where episodes terminated and where they were truncated. It is
    in rl8x's own format, a file of safetensors, or in Minari's; `--dataset` and `Dataset.load` read both.
    """
    if is_random and (how["epsilon"] or how["deterministic"]):
        raise UserError("--random leaves nothing for --epsilon or --deterministic to change: give one of them.")
    count, output = how.pop("transitions"), how.pop("output")
    name = f"{name_for_files(run)}-{count}"
    target: Path | str
    if how.pop("file_format") == "minari":
        target = output or f"rl8x/{re.sub(r'[^-_0-9A-Za-z]', '-', name)}-v0"
        check_new_id(target)
    else:
        target = Path(output or f"datasets/{name}")
        if target.exists():
            raise UserError(f"{target} is there already: give another --output.")
        check_folder(target.parent, "--output")
    acting = _collecting(run, env, is_random=is_random, auto=how.pop("auto"), trust=how.pop("trust"))
    device = "cpu" if acting.policy is None else acting.policy.device
    made = acting.maker(min(how.pop("num_envs"), count), device=device, seed=how["seed"])
    with contextlib.closing(made) as environment:
        validate(environment)
        config = acting.config(environment, overrides, {}, copies="--num-envs")
        recorded = record(None if is_random else acting.policy, environment, count, env_config=config, **how)
    if isinstance(target, Path):
        target.parent.mkdir(parents=True, exist_ok=True)
        recorded.dataset.save(target)
    else:
        write_minari(target, recorded.dataset, algorithm_name="random" if is_random else acting.algorithm)
    say(f"env_config  {_in_words(config)}{'' if overrides else acting.source}")
    mean = f", mean return {measured(float(recorded.returns.mean()))}" if len(recorded.returns) else ""
    both = f"{counted(recorded.dataset.size, 'transition')}, {counted(len(recorded.returns), 'whole episode')}"
    say(f"wrote       {target}: {both}{mean}")
    return 0


def _collecting(run: str, env: str | None, *, is_random: bool, auto: bool, trust: bool) -> Acting:
    """Find the policy and its environment; for random actions RUN may name an environment, unless it is a path."""
    no_env = ""
    if is_random and env is None and not os.path.exists(run):  # Path.exists() raises if a name is too long
        find_modules_here([run])
        try:
            return Acting(None, env_maker(run, trust=True), "random", {})
        except ValueError as error:
            no_env = f"{error} It is no run either: "
    try:
        return load_acting(run, env, auto=auto, trust=trust)
    except CheckpointError as error:
        raise UserError(f"{no_env}{error}") from None
