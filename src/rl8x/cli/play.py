"""`rl8x play`: play episodes with the policy of a checkpoint, as a film or for their returns."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import click
import numpy as np
from numpy.typing import NDArray

from rl8x.cli.acting import Acting, acting_options, asked_config, check_spaces, in_words, load_acting
from rl8x.cli.errors import Command, FiniteRange, UserError, check_file
from rl8x.config import apply_overrides, parse_value
from rl8x.envs import Env
from rl8x.envs.cells import make_cells
from rl8x.output import counted, say, table
from rl8x.rollouts.episodes import play_episodes
from rl8x.video import check_format, film, make_filmed

_EXAMPLES = """\b
rl8x play my-run
rl8x play my-run --output films/my-run.gif
rl8x play runs/000040-step-400 env_config.length=0.4 --episodes 3 --output short-pole.mp4
rl8x play my-run --grid length=0.25,0.5,1 --grid force_mag=5,10,20 --output physics.gif
rl8x play my-run --env-config "length: {uniform: [0.2, 2]}" --copies 9 --output random.gif
"""
_EPISODES: Final = 10  # without a film
_COUNT: Final = click.IntRange(min=1)
_ENV_CONFIG: Final = "Values of the environment's parameters; a list has one for each copy. [default: as in training]"
_GRID: Final = "A copy for each value, side by side; a second one makes rows, one above the other."


@click.command("play", cls=Command, epilog=_EXAMPLES)
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
@click.option(
    "--max-steps", type=_COUNT, help="Where to stop when episodes do not end. [default: 1000; 200 where they never do]"
)
@click.option("--fps", type=FiniteRange(min=0, min_open=True), help="Steps a second. [default: the environment's]")
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
    axes = [_axis(text) for text in grid]
    crossed = _crossed(axes)
    number = _copies(words, crossed, copies)
    acting = load_acting(run, env, auto=how.pop("auto"), trust=how.pop("trust"))
    how |= {"deterministic": not how.pop("sample"), "state_reset_every": acting.policy.state_reset_every}
    if out is not None:
        columns = len(axes[0][1]) if len(axes) > 1 else None
        options: Any = {"episodes": episodes or 1, "columns": columns, "fps": fps, **how}
        made = make_filmed(acting.maker, number, device=acting.policy.device, seed=how["seed"])
        with contextlib.closing(made) as environment:
            config = _config(acting, environment, words, crossed)
            shown = film(acting.policy, environment, Path(out).suffix, env_config=config, **options)
        returns, lengths, finished = (array.T for array in (shown.returns, shown.lengths, shown.finished))
        shown.save(out)
    else:
        config, returns, lengths, finished = _play(acting, words, crossed, number, episodes or _EPISODES, how)
    same = {name: value for name, value in config.items() if not isinstance(value, list)}
    asked = words or grid or env is not None
    say(f"env_config  {in_words(same if number > 1 else config)}" + ("" if asked else f", {acting.source}"))
    say(_report(config, returns, lengths, finished))
    if out is not None:
        say(f"wrote       {out}: {shown.num_frames:,} frames, {len(shown.data) / 1e6:.2g} MB")
    return 0


def _axis(text: str) -> tuple[str, list[Any]]:
    """Read an option --grid."""
    name, equals, values = text.partition("=")
    parsed = [parse_value(value) for value in values.split(",") if value.strip()]
    if not name or not equals or not parsed:
        raise UserError(f"--grid is NAME=V1,V2,..., such as length=0.25,0.5,1; got {text!r}.")
    return name.strip(), parsed


def _crossed(axes: Sequence[tuple[str, list[Any]]]) -> dict[str, list[Any]]:
    """Return the values of each copy, of every combination of two lists at most, the first one's changing fastest."""
    names = [name for name, _ in axes]
    if len(axes) > 2 or len(set(names)) < len(names):
        raise UserError(f"--grid may be given once or twice, for different parameters; got {', '.join(names)}.")
    crossed = make_cells(dict(reversed(axes)), called="--grid") if axes else {}
    return {name: crossed[name].tolist() for name in names}


def _copies(words: Sequence[str], crossed: Mapping[str, list[Any]], asked: int | None) -> int:
    """Return how many copies there are to be: as many as a grid or a typed list has values."""
    typed = apply_overrides({}, words).get("env_config")
    typed = typed if isinstance(typed, Mapping) else {}
    lists = {**crossed, **{name: value for name, value in typed.items() if isinstance(value, list)}}
    sizes = {name: len(value) for name, value in lists.items()} | ({} if asked is None else {"--copies": asked})
    if len(set(sizes.values())) > 1:
        listed = ", ".join(f"{name} for {size}" for name, size in sizes.items())
        raise UserError(f"values must be for the same number of copies; got {listed}.")
    return next(iter(sizes.values()), 1)


def _config(
    acting: Acting, env: Env, words: Sequence[str], crossed: Mapping[str, list[Any]], each: int = 1
) -> dict[str, Any]:
    """Return the `env_config` in plain form, a list's values for `each` copies."""
    check_spaces(env, acting.policy)
    config = asked_config(acting.trained_config, words, env.num_copies // each) | dict(crossed)
    if each > 1:
        config = {name: np.repeat(v, each).tolist() if isinstance(v, list) else v for name, v in config.items()}
    return env.plain_config(config, copies="--copies")


def _play(
    acting: Acting, words: Sequence[str], crossed: Mapping[str, list[Any]], copies: int, episodes: int, how: Any
) -> tuple[dict[str, Any], NDArray[Any], NDArray[Any], NDArray[Any]]:
    """Play all episodes at once; returns config, returns, lengths and whether they ended, `[copies, episodes]`."""
    with contextlib.closing(acting.maker(copies * episodes, device=acting.policy.device, seed=how["seed"])) as env:
        config = _config(acting, env, words, crossed, episodes)
        last = deque(play_episodes(acting.policy, env, env_config=config, **how), maxlen=1).pop()
    config = {name: value[::episodes] if isinstance(value, list) else value for name, value in config.items()}
    played = (array.reshape(copies, episodes) for array in (last.returns, last.lengths, ~last.running))
    return (config, *played)  # type: ignore[return-value]


def _report(config: Mapping[str, Any], returns: NDArray[Any], lengths: NDArray[Any], finished: NDArray[Any]) -> str:
    """Say how the episodes went, `[copies, episodes]` each: a line, or a table of the copies."""
    copies, episodes = returns.shape
    cut = int((~finished).sum())
    note = f"\n{counted(cut, 'episode', 'episodes')} of {finished.size} had not ended: see --max-steps" if cut else ""
    if copies == 1:
        shown = ", ".join(f"{value:.4g}" for value in returns[0, :20]) + (", ..." if episodes > 20 else "")
        mean = f", mean {returns.mean():.4g}" if episodes > 1 else ""
        return f"returns     {shown}{mean}; {lengths.mean():,.4g} steps{' on average' * (episodes > 1)}{note}"
    varied = [name for name, value in config.items() if isinstance(value, list)]
    rows = [["copy", *varied, "mean return", "lowest", "highest", "steps"]]
    for copy in range(copies):
        numbers = [returns[copy].mean(), returns[copy].min(), returns[copy].max(), lengths[copy].mean()]
        rows.append([str(copy), *(f"{config[name][copy]:g}" for name in varied), *(f"{n:.4g}" for n in numbers)])
    return table(rows) + note
