"""Evaluates a policy in all cells of a grid of physics, or of a study's test, and logs the results.

Every copy of the environment has the parameters of its cell, and each cell has its own random numbers. So a cell's
results depend neither on the other cells nor on how many copies are stepped together. All policies meet the same
episodes, which makes them comparable.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rl8x.algorithms.base import GenericAlgorithmBase
from rl8x.algorithms.memory_check import available_bytes, check_cells, slot_bytes
from rl8x.drawing import (
    LIGHT,
    Drawing,
    Theme,
    along,
    axes_of,
    draw_line,
    draw_map,
    drawn,
    finite_curve,
    labelled,
    main_pair,
    new_figure,
    over_two,
    png,
    scale,
)
from rl8x.envs import Env
from rl8x.envs.cells import Cells, check_test, make_cells, num_cells
from rl8x.execution import Execution
from rl8x.plain import checked_number
from rl8x.rollouts.episodes import STEPS_PER_LOOK, EpisodeRunner, warn_of_cut
from rl8x.tracking import Tracker
from rl8x.tracking.protocol import legal_name
from rl8x.trainers.evaluation import NOWHERE, Evaluations

if TYPE_CHECKING:
    import pandas
    from matplotlib.figure import Figure

FOLDER: Final = "grids"
"""The folder of grids among a run's artifacts."""
RETURNS: Final = "returns"
"""The column of mean returns in a grid's table; columns that are not in `_MEASURED` are parameters."""
_MEASURED: Final = ("episodes", RETURNS, "returns_std", "returns_min", "lengths")
UNITS: Final = "units"
"""The attribute of a grid's table that holds the units of its parameters."""
_MAX_NAME: Final = 100
# Most copies that are stepped together: tensors of more copies do not fit into the processor's cache, and a smaller
# batch stops as soon as all its episodes have ended.
_COPIES: Final = {"cpu": 8_192, "cuda": 262_144}
_SIMULATED_COPIES: Final = 256
# Memory of a step for each byte of its observation: activations, the next observation, and their copies.
_BYTES_PER_BYTE: Final = 64


class CellEvaluator:
    """Plays episodes of an algorithm's current policy in every cell, without any effect on the training."""

    def __init__(
        self,
        algorithm: GenericAlgorithmBase[Any],
        cells: Cells,
        *,
        episodes: int,
        seed: int = 0,
        copies: int | None = None,  # most copies to step together
        env_factory: Any = None,  # None: the training's
        called: str = "test",  # for messages
    ) -> None:
        factory = env_factory or algorithm.env_factory
        if factory is None:
            raise ValueError("environments are made to test cells in: build the algorithm from a class or a name.")
        self._factory, self._algorithm = factory, algorithm
        self._cells, self._episodes, self._seed = cells, episodes, seed
        self._execution = Execution("eager", algorithm.execution.precision, algorithm.device)
        self._warned = False
        one = self._make(1)
        check_test(one, cells, episodes, name=type(one).__name__, called=called)
        check_cells(episodes, num_cells(cells), one)
        self.parameters = one.parameters
        if copies is None:
            copies = _COPIES.get(one.device.type, _COPIES["cpu"]) if one.capturable else _SIMULATED_COPIES
            free = available_bytes(one.device)
            if free is not None:
                copies = min(copies, free // 4 // (_BYTES_PER_BYTE * slot_bytes(one.single_observation_space, None)))
            copies = min(max(1, copies // one.num_agents), one.max_num_envs or copies)
        self._cells_at_once = max(1, min(num_cells(cells), copies // episodes))
        one.close()

    def _make(self, num_envs: int) -> Env:
        env: Env = self._factory(num_envs, device=self._algorithm.device, seed=self._seed)
        return env

    @torch.no_grad()
    def evaluate(self) -> dict[str, NDArray[Any]]:
        """Play all episodes; return the statistics of the cells by column name, each `[cells]`."""
        count, at_once = num_cells(self._cells), self._cells_at_once
        returns, lengths = np.zeros((2, count, self._episodes))
        env, cut = self._make(at_once * self._episodes), 0
        for first in range(0, count, at_once):
            some = range(first, min(first + at_once, count))
            if len(some) < at_once:  # the last ones
                env.close()
                env = self._make(len(some) * self._episodes)
            played = self._play(env, some)
            running, *measured = played.by_copy
            cut += int(running.sum())
            for each, numbers in zip((returns, lengths), measured, strict=True):
                each[some] = numbers.double().cpu().numpy().reshape(len(some), -1)
        env.close()
        self._warned = self._warned or warn_of_cut(cut, returns.size, "test")
        return {
            "episodes": np.full(count, self._episodes),
            RETURNS: returns.mean(axis=1),
            "returns_std": returns.std(axis=1),
            "returns_min": returns.min(axis=1),
            "lengths": lengths.mean(axis=1),
        }

    def _play(self, env: Env, cells: range) -> EpisodeRunner:
        """Play the first episode of each copy."""
        config = {name: np.repeat(values[cells], self._episodes) for name, values in self._cells.items()}
        noises = _noises(env, [seed_of(self._seed, cell) for cell in cells], self._episodes)
        runner = EpisodeRunner(self._algorithm.policy, env, self._execution)
        # The seed is for simulators, which draw their own random numbers.
        runner.begin(config, seed=seed_of(self._seed, cells[0]), noises=noises)
        for _ in runner.play(noises=noises):
            pass
        return runner


def seed_of(seed: int, cell: int) -> int:
    """Return the seed of a cell's random numbers."""
    return int(np.random.SeedSequence([seed, cell]).generate_state(1, dtype=np.uint64)[0] >> np.uint64(1))


def _noises(env: Env, seeds: list[int], episodes: int) -> Iterator[tuple[Tensor, None]]:
    """Yield the noise of each step, `[num_envs, width]`, drawn for each cell by its own generator."""
    generators = [torch.Generator(env.device).manual_seed(seed) for seed in seeds]
    width, steps = env.noise_width, 1
    while True:
        shape = (steps, env.num_agents, episodes, width)
        parts = [torch.rand(shape, generator=generator, device=env.device) for generator in generators]
        yield from ((noise, None) for noise in torch.cat(parts, dim=2).flatten(1, 2).unbind(0))
        steps = STEPS_PER_LOOK


# -- a trainer's grids


def measure_grid(
    algorithm: GenericAlgorithmBase[Any],
    evaluations: Evaluations,
    grid: Mapping[str, Any],
    episodes: int,
    seed: int,
) -> pandas.DataFrame:
    """Play episodes in every cell of a grid, in environments like the evaluations'; see `Trainer.evaluate_grid`."""
    import pandas

    episodes = checked_number(episodes, "episodes", least=1, whole=True)
    seed = checked_number(seed, "seed", least=0, whole=True)
    cells = make_cells(grid, called="grid")
    if taken := [name for name in cells if name in _MEASURED]:
        raise ValueError(
            f"`grid`: {taken[0]!r} is a column of the results ({', '.join(_MEASURED)}), so that no parameter can have "
            "that name there: give the environment's another one."
        )
    factory, env = evaluations.factory, evaluations.env_in_use
    if factory is None and env is None:
        raise RuntimeError(f"{NOWHERE}.")

    def another(num_envs: int, *, seed: int, **kwargs: Any) -> Env:
        assert env is not None
        made = env.another(num_envs, seed=seed)
        if made is None:
            raise ValueError(
                f"a grid is evaluated in copies of its own, and the {type(env.unwrapped).__name__} that was given "
                "cannot be made again with another number of them: give a class, a name or a factory in its place."
            )
        return made

    player = CellEvaluator(
        algorithm, cells, episodes=episodes, seed=seed, env_factory=factory or another, called="grid"
    )
    frame = pandas.DataFrame({**cells, **player.evaluate()})
    frame.attrs[UNITS] = {name: player.parameters[name].unit for name in cells}
    return frame


def grid_name(frame: pandas.DataFrame) -> str:
    """Return the default name of a grid: its parameters."""
    return legal_name(" ".join(_parameters_of(frame)))[:_MAX_NAME].strip()


def log_grid(tracker: Tracker, frame: pandas.DataFrame, name: str, step: int) -> None:
    """Log the table and the figure of a grid as one artifact, a folder named after the trainer's step."""
    with tempfile.TemporaryDirectory() as folder:
        made = Path(folder) / f"step-{step:08d}"
        made.mkdir()
        frame.to_csv(made / "cells.csv", index=False)
        drawing = _grid_drawing(frame)
        if drawing is not None:
            (made / "returns.png").write_bytes(png(drawing, LIGHT, titled=True))
        tracker.log_artifact(made, f"{FOLDER}/{name}")


# -- its figure


def plot_grid(frame: pandas.DataFrame) -> Figure:
    """Draw the mean returns of a grid: a curve over one parameter, a heat map over two.

    Of more than two parameters the heat map shows the two that explain most, and averages over the others.

    Args:
        frame: What `Trainer.evaluate_grid` returned, or a part of its rows.

    Returns:
        The figure, which notebooks show.

    Raises:
        ValueError: If no parameter has several values, or no cell a finite return.
    """
    drawing = _grid_drawing(frame)
    if drawing is None:
        raise ValueError("there is nothing to draw: give one parameter of the grid several values with finite returns.")
    return drawn(drawing, LIGHT, titled=True)


def _parameters_of(frame: pandas.DataFrame) -> list[str]:
    """Return the parameters of a grid's table."""
    return [str(column) for column in frame.columns if column not in _MEASURED]


def _grid_drawing(frame: pandas.DataFrame) -> Drawing | None:
    """Return the figure of a grid; None if no parameter has several values, or no cell a finite return."""
    axes, _ = axes_of(frame[_parameters_of(frame)])
    scores = frame[RETURNS].where(np.isfinite(frame[RETURNS])).to_numpy(dtype=np.float64)  # others are not drawn
    if not axes or np.isnan(scores).all():
        return None
    units = frame.attrs.get(UNITS, {})
    if len(axes) == 1:
        [axis] = axes

        def curve(theme: Theme) -> Figure:
            figure = new_figure(7.2, 4.2)
            panel = figure.subplots()
            line = finite_curve(axis.values, along(scores, axis))
            draw_line(panel, line, "", 0, theme, marker=len(axis.values) <= 25)
            scale(panel, axis)
            panel.set(xlabel=labelled(axis.name, units), ylabel="mean return")
            panel.grid(True, alpha=0.6)
            return figure

        return Drawing("returns", f"Return over {axis.name}", "", curve)
    x, y = axes if len(axes) == 2 else main_pair(axes, [scores])
    rest = ", ".join(axis.name for axis in axes if axis not in (x, y))
    means = over_two(scores, x, y)

    def heat_map(theme: Theme) -> Figure:
        figure = new_figure(5.6, 4.4)
        panel = figure.subplots()
        panel.set_facecolor(theme.faint)
        mesh = draw_map(panel, means, x, y, float(np.nanmin(means)), float(np.nanmax(means)))
        panel.set(xlabel=labelled(x.name, units), ylabel=labelled(y.name, units))
        label = f"mean return, averaged over {rest}" if rest else "mean return"
        figure.colorbar(mesh, ax=panel, label=label, aspect=25, pad=0.015)
        return figure

    return Drawing("returns", f"Return over {x.name} and {y.name}", "", heat_map)
