"""A policy in all test cells at once: every copy of the environment has the parameters of its cell.

Each cell has random numbers of its own. So what is measured in it depends neither on the other cells nor on how many
copies are stepped together, and all policies meet the same episodes, which is what makes them comparable.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Iterator
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from rl8x.algorithms.base import GenericAlgorithmBase
from rl8x.algorithms.memory_check import available_bytes, slot_bytes
from rl8x.envs import Env
from rl8x.envs.cells import Cells, check_test, num_cells
from rl8x.execution import Execution
from rl8x.rollouts.episodes import FirstEpisodes
from rl8x.rollouts.step import Stepper, first_cursor

# Steps between two looks at whether all episodes have ended: each look is a copy to the host.
_STEPS_PER_LOOK: Final = 16
_MAX_STEPS: Final = 10_000
# Copies that are stepped together: the tensors of fewer stay in the processor's cache, of more do not, and copies in
# which all episodes have ended are not stepped on.
_COPIES: Final = {"cpu": 8_192, "cuda": 262_144}
_SIMULATED_COPIES: Final = 256
# What a step may take for each byte of its observation: activations, the next observation, and their copies.
_BYTES_PER_BYTE: Final = 64


@dataclasses.dataclass(frozen=True)
class Measured:
    """Episodes in each cell: how many, and mean, spread and minimum of their returns and lengths, `[cells]` each."""

    episodes: int
    returns: np.ndarray[Any, np.dtype[np.float64]]
    returns_std: np.ndarray[Any, np.dtype[np.float64]]
    returns_min: np.ndarray[Any, np.dtype[np.float64]]
    lengths: np.ndarray[Any, np.dtype[np.float64]]

    def columns(self) -> dict[str, list[float]]:
        """Return them as columns of a table, by their names."""
        columns = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        columns["episodes"] = np.full(len(self.returns), self.episodes)
        return {name: values.tolist() for name, values in columns.items()}


class CellEvaluator:
    """Plays episodes of an algorithm's present policy in every cell, without any effect on the training.

    Args:
        algorithm: Whose policy acts, deterministically.
        env_factory: Makes environments, as the training's was made; None for the algorithm's own.
        called: What the user calls the cells, for messages.
        cells: The cells.
        episodes: Episodes in each.
        seed: Of the random numbers of all cells.
        copies: Copies that are stepped together at most; None goes by memory and kind of environment.

    Attributes:
        parameters: The parameters that the cells may set.

    Raises:
        ValueError: If there is nothing to make an environment with, its episodes never end, or it does not have the
            cells' parameters.
    """

    def __init__(
        self,
        algorithm: GenericAlgorithmBase[Any],
        cells: Cells,
        *,
        episodes: int,
        seed: int = 0,
        copies: int | None = None,
        env_factory: Any = None,
        called: str = "test",
    ) -> None:
        factory = env_factory or algorithm.env_factory
        if factory is None:
            raise ValueError("environments are made to test cells in: build the algorithm from a class or a name.")
        self._factory, self._algorithm = factory, algorithm
        self._cells, self._episodes, self._seed = cells, episodes, seed
        self._warned = False
        self._execution = Execution("eager", algorithm.execution.precision, algorithm.device)
        one = self._make(1)
        check_test(one, cells, episodes, name=type(one).__name__, called=called)
        self.parameters = one.parameters
        self._cells_at_once = max(1, min(num_cells(cells), (copies or self._copies(one)) // episodes))
        one.close()

    def _make(self, num_envs: int) -> Env:
        env: Env = self._factory(num_envs, device=self._algorithm.device, seed=self._seed)
        return env

    def _copies(self, env: Env) -> int:
        limit = _COPIES.get(env.device.type, _COPIES["cpu"]) if env.capturable else _SIMULATED_COPIES
        free = available_bytes(env.device)
        if free is not None:
            limit = min(limit, free // 4 // (_BYTES_PER_BYTE * slot_bytes(env.single_observation_space, None)))
        return min(limit, env.max_num_envs or limit)

    @torch.no_grad()
    def evaluate(self) -> Measured:
        """Play all episodes."""
        count, at_once = num_cells(self._cells), self._cells_at_once
        returns, lengths = (np.zeros((count, self._episodes)) for _ in range(2))
        env: Env | None = None
        for first in range(0, count, at_once):
            some = range(first, min(first + at_once, count))
            if env is None or env.num_envs != len(some) * self._episodes:
                if env is not None:
                    env.close()
                env = self._make(len(some) * self._episodes)
            played = self._play(env, some)
            returns[some], lengths[some] = (each.double().cpu().numpy().reshape(len(some), -1) for each in played)
        assert env is not None
        env.close()
        return Measured(
            self._episodes, returns.mean(axis=1), returns.std(axis=1), returns.min(axis=1), lengths.mean(axis=1)
        )

    def _play(self, env: Env, cells: range) -> tuple[Tensor, Tensor]:
        """Play the first episode of each copy; returns its returns and lengths, `[copies]`."""
        config = {name: np.repeat(values[cells], self._episodes) for name, values in self._cells.items()}
        env.configure(config)
        env.adopt_next_config()
        env.set_seed(seed_of(self._seed, cells[0]))  # of simulators, whose random numbers are their own
        noises = _noises(env, [seed_of(self._seed, cell) for cell in cells], self._episodes)
        algorithm, policy = self._algorithm, self._algorithm.policy
        carry, obs = env.restart(next(noises))
        stepper = Stepper(policy, env, self._execution, state_reset_every=algorithm.state_reset_every)
        episodes = FirstEpisodes(env)
        played = stepper.play(carry, first_cursor(policy, obs), ((noise, None) for noise in noises))
        for t, (_, transition) in enumerate(played, 1):
            episodes.add(transition.step)
            if t >= _MAX_STEPS or (t % _STEPS_PER_LOOK == 0 and not bool(episodes.running.any())):
                break
        self._warn_unfinished(int(episodes.running.sum()), env.num_envs)
        return episodes.returns, episodes.lengths

    def _warn_unfinished(self, count: int, of: int) -> None:
        if count and not self._warned:
            self._warned = True
            warnings.warn(
                f"{count} of {of} test episodes had not ended after {_MAX_STEPS:,} steps; they are counted as they "
                f"stood. Give the environment a `time_limit` of {_MAX_STEPS:,} or less in env_kwargs.",
                stacklevel=2,
            )


def seed_of(seed: int, cell: int) -> int:
    """Return the seed of a cell's random numbers."""
    return int(np.random.SeedSequence([seed, cell]).generate_state(1, dtype=np.uint64)[0] >> np.uint64(1))


def _noises(env: Env, seeds: list[int], episodes: int) -> Iterator[Tensor]:
    """Yield the noise of one step after the other, `[cells * episodes, width]`, each cell's of its own generator."""
    generators = [torch.Generator(env.device).manual_seed(seed) for seed in seeds]
    width, steps = env.noise_width, 1
    while True:
        shape = (steps, episodes, width)
        parts = [torch.rand(shape, generator=generator, device=env.device) for generator in generators]
        yield from torch.cat(parts, dim=1).unbind(0)
        steps = _STEPS_PER_LOOK
