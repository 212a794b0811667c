"""Transitions that were recorded before the training: read once, checked, and sampled like a replay.

A data set is transitions one after the other, by name, each `[rows, ...]`: `obs`, `actions` and `next_obs` (a tensor,
or parts as in `obs/position`), `rewards`, `terminated` and `truncated`.
"""

from __future__ import annotations

import copy
import functools
import hashlib
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self

import gymnasium
import torch
from torch import Tensor

from rl8x import keys
from rl8x.functional import Moments, moments
from rl8x.replay.columns import Columns, spec_of, take_room
from rl8x.replay.dataset_files import (
    SPACES,
    is_hdf5,
    read_episode_returns,
    read_folder,
    read_hdf5,
    read_minari,
    read_spaces,
    write_about,
)
from rl8x.replay.dataset_rows import check_gaps, check_legal, checked, warn_of_far_actions, with_next
from rl8x.replay.nstep import NStep
from rl8x.spaces import as_elements, only_legal, tree_of
from rl8x.trees import as_tensor, flatten_tree, is_part, unflatten_tree

if TYPE_CHECKING:
    from tensordict import TensorDict

# Overhead of a file and its folder entry in bytes, rounded up.
_FILE_BYTES: Final = 8192


class Dataset:
    """Recorded transitions with a replay's `size`, `sample` and `gather`; `load` and `from_tensors` make one.

    Where no `next_obs` is recorded, it is the next row's `obs`. What a truncated step led to is then not known, nor
    what the last row led to: those rows are left out, and the row before each bootstraps from their `obs`.

    Args:
        transitions: By name, each `[rows, ...]`, in the order in which they were made, episode after episode. Floats
            become float32, whole numbers what their space has; rewards and flags may be `[rows, 1]`, and flags 0 and 1.
        device: Where batches are made.
        gaps: Treatment of a row that ends no episode and is not followed by the row that it led to: "refuse" it, or
            "truncate" the episode there, as for rows in any order.
        observation_space: Space of one observation; None where it is not known, as an algorithm needs it.
        action_space: Space of one action, likewise.

    Attributes:
        size: Rows that are drawn.
        transitions: The rows as they were checked, by name, where they were given: not on `device`.
        episode_returns: Sum of the rewards of each episode that ends, `[episodes]`, with those of rows left out.

    Raises:
        ValueError: If something is wrong with them; it says what, and in which row.
    """

    def __init__(
        self,
        transitions: Mapping[str, Tensor],
        device: torch.device | str = "cpu",
        *,
        gaps: str = "refuse",
        observation_space: gymnasium.Space[Any] | None = None,
        action_space: gymnasium.Space[Any] | None = None,
    ) -> None:
        if gaps not in ("refuse", "truncate"):
            raise ValueError(f"`gaps` must be 'refuse' or 'truncate'; got {gaps!r}.")
        rows = checked(transitions)
        self.observation_space, self.action_space = observation_space, action_space
        for name, space in (
            (keys.OBS, observation_space),
            (keys.NEXT_OBS, observation_space),
            (keys.ACTIONS, action_space),
        ):
            if space is not None and any(is_part(each, name) for each in rows):
                rows |= as_elements(name, space, rows)
        check_legal(rows, observation_space, action_space)
        warn_of_far_actions(rows, action_space)
        if has_next := any(is_part(name, keys.NEXT_OBS) for name in rows):
            check_gaps(rows, gaps)
        self.episode_returns = _episode_returns(rows)
        if not has_next:
            rows = with_next(keys.OBS, rows)
        self.transitions = rows
        self.size = len(rows[keys.REWARDS])
        self.device = torch.device(device)
        self._columns: Columns | None = None

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Any], device: torch.device | str = "cpu", **options: Any) -> Self:
        """Create a data set from copies of transitions by name; observations and actions may be trees `[rows, ...]`.

        Args:
            tensors: Transitions by name, see the class; a dict of tensors in place of one is a tree.
            device: Where batches are made.
            options: `gaps`, `observation_space` and `action_space` of the class.

        Raises:
            ValueError: If something is wrong with them; it says what, and in which row.
        """
        flat = {key: leaf for name, tree in tensors.items() for key, leaf in flatten_tree(name, tree).items()}
        return cls({name: as_tensor(leaf).detach().clone() for name, leaf in flat.items()}, device, **options)

    @classmethod
    def stand_in(cls, observation_space: gymnasium.Space[Any], action_space: gymnasium.Space[Any]) -> Self:
        """Create a data set of one row with these spaces, for an algorithm that only acts and needs no data.

        Args:
            observation_space: Space of one observation.
            action_space: Space of one action.
        """

        def row(space: gymnasium.Space[Any]) -> Any:
            return tree_of(space.sample(), lambda part: torch.as_tensor(part).unsqueeze(0))

        obs, actions, end = row(observation_space), row(action_space), torch.ones(1, dtype=torch.bool)
        if isinstance(obs, Mapping) and keys.ACTION_MASK in obs:
            actions = only_legal(actions, obs[keys.ACTION_MASK], action_space)
        tensors = {keys.OBS: obs, keys.NEXT_OBS: obs, keys.ACTIONS: actions, keys.REWARDS: torch.zeros(1)}
        spaces: dict[str, Any] = {"observation_space": observation_space, "action_space": action_space}
        return cls.from_tensors({**tensors, keys.TERMINATED: end, keys.TRUNCATED: ~end}, **spaces)

    @classmethod
    def load(cls, path: str | Path, device: torch.device | str = "cpu", **options: Any) -> Self:
        """Read a data set.

        Args:
            path: A folder that `save` wrote, a file in the layout of D4RL (.hdf5 or .h5), or the id of one of Minari's
                data sets on this machine, such as "D4RL/pen/human-v2".
            device: Where batches are made.
            options: `gaps`, `observation_space` and `action_space` of the class.

        Raises:
            ValueError: If there is no such data set, or it is not valid.
            ImportError: If h5py or Minari is needed and not installed.
        """
        place = Path(path)
        if (place / "meta.json").is_file():
            spaces, returns = read_spaces(place), read_episode_returns(place)
            dataset = cls(read_folder(place), device, **(spaces | options))
            dataset.episode_returns = dataset.episode_returns if returns is None else returns
            return dataset
        if is_hdf5(place):
            return cls(read_hdf5(place), device, **options)
        if place.exists() or "/" not in str(path) or place.is_absolute():
            raise ValueError(
                f"no data set in {str(path)!r}: give a folder that `Dataset.save` wrote (it has a meta.json), a file "
                ".hdf5 or .h5 in the layout of D4RL, or the id of one of Minari's data sets."
            )
        return cls.from_minari(str(path), device, **options)

    @classmethod
    def from_minari(cls, source: Any, device: torch.device | str = "cpu", **options: Any) -> Self:
        """Create a data set from one of Minari's.

        Args:
            source: Its id, or the `MinariDataset`: what has `iterate_episodes()`.
            device: Where batches are made.
            options: `gaps`, `observation_space` and `action_space` of the class.

        Raises:
            ValueError: If Minari has no data set of this id on this machine, or it has no steps.
            ImportError: If Minari is needed and not installed.
        """
        source, episodes = read_minari(source)
        if not episodes:
            raise ValueError("this data set of Minari's has no steps.")
        spaces: dict[str, Any] = {name: getattr(source, name, None) for name in SPACES}
        rows = {name: torch.cat([each[name] for each in episodes]) for name in episodes[0]}
        return cls(rows, device, **(spaces | options))

    def save(self, path: str | Path) -> None:
        """Write the transitions to a new folder, atomically, as a memory-mapped TensorDict.

        Args:
            path: The folder.

        Raises:
            FileExistsError: If there is something.
            ValueError: If the disk refuses, or a part has a name that a TensorDict's file has for itself.
        """
        path = Path(path)
        if path.exists():
            raise FileExistsError(f"{path} is there already: give another folder.")
        size = sum(tensor.numel() * tensor.element_size() + _FILE_BYTES for tensor in self.transitions.values())
        try:
            take_room(path.parent, size)
        except OSError as error:
            raise ValueError(
                f"a data set of {size / 1e9:,.3f} GB cannot be written to {path.parent}: {error.strerror}. Give "
                "another folder."
            ) from None
        beside = path.with_name(f"{path.name}.new-{os.getpid()}")
        try:
            self.as_tensordict().memmap(str(beside))
            written = read_folder(beside)
            lost = [name for name in self.transitions if name not in written]
            if lost:  # tensordict keeps its own `device` or `shape` there
                raise ValueError(f"`{lost[0]}` cannot be written to a file: rename that part of the space.")
            write_about(beside, {name: getattr(self, name) for name in SPACES}, self.episode_returns)
            beside.rename(path)
        finally:
            shutil.rmtree(beside, ignore_errors=True)

    def as_tensordict(self) -> TensorDict:
        """Return the transitions as a TensorDict of batch size `[size]`, sharing the memory."""
        from tensordict import TensorDict  # imports torch's compiler, which takes a second

        names = dict.fromkeys(name.split("/", 1)[0] for name in self.transitions)
        trees = {name: unflatten_tree(name, self.transitions) for name in names}
        return TensorDict(trees, batch_size=[len(self.transitions[keys.REWARDS])])

    @functools.cached_property
    def digest(self) -> str:
        """A hash of all transitions, in 16 hexadecimal digits."""
        sha256 = hashlib.sha256()
        for name, tensor in sorted(self.transitions.items()):
            sha256.update(f"{name} {tensor.dtype} {list(tensor.shape)};".encode())
            sha256.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
        return sha256.hexdigest()[:16]

    def __repr__(self) -> str:
        """Return a text with the size and the digest."""
        return f"Dataset({self.size} transitions, {self.digest})"

    # -- the interface of a replay

    def prepared_bytes(self, *, next_actions: bool = False) -> int:
        """Return an upper bound of the device memory that the rows of `prepare` take, in bytes.

        Args:
            next_actions: Whether rows have `next_actions` too.
        """
        parts = (keys.OBS, keys.NEXT_OBS, keys.ACTIONS) + (keys.ACTIONS,) * next_actions
        spec = spec_of(self.transitions)
        of_parts = sum(spec[name].row_bytes for part in parts for name in spec if is_part(name, part))
        return len(self.transitions[keys.REWARDS]) * (of_parts + 2 * torch.float32.itemsize)

    def prepared(self, n: int, gamma: float, device: torch.device, *, next_actions: bool = False) -> Self:
        """Return the same transitions with rows of their own on a device; see `prepare`.

        Args:
            n: Steps of a return.
            gamma: Discount of a step.
            device: Where the rows go.
            next_actions: Whether rows have `next_actions` too.
        """
        other = copy.copy(self)
        other.device = device
        other.prepare(n, gamma, next_actions=next_actions)
        return other

    @torch.no_grad()
    def prepare(self, n: int, gamma: float, *, next_actions: bool = False) -> None:
        """Compute rows with n-step returns on the device.

            returns_t   = sum_{j < m} gamma^j r_{t+j}
            discounts_t = gamma^m (1 - terminated_{t+m-1})

        m is n, or fewer steps where an episode ends. The last row bootstraps from its `next_obs` where its episode goes
        on.

        Args:
            n: Steps of a return, at least 1.
            gamma: Discount of a step, in [0, 1].
            next_actions: Whether rows hold the recorded action on `next_obs` too. Of the last step of an episode that
                is truncated, or that the data leave open, none is recorded: it makes no row of its own, and returns end
                with the step before it, whose `next_obs` is that step's `obs`. Rows that terminated hold their own
                action, which counts for nothing, as their discount is 0.

        Raises:
            ValueError: If a number is out of its range, or next actions are asked for and no row has one.

        Source: Sutton & Barto 2018, section 7.1; time limits as in Pardo et al. 2018, arXiv:1712.00378.
        """
        transitions = with_next(keys.ACTIONS, self.transitions) if next_actions else self.transitions
        self.size = len(transitions[keys.REWARDS])
        n = min(n, self.size)  # no return is longer
        block = {name: tensor.unsqueeze(1) for name, tensor in transitions.items()}
        # Padding after the last row completes the windows of the rows before it; no return reaches it.
        block[keys.TRUNCATED] = block[keys.TRUNCATED].clone()
        block[keys.TRUNCATED][-1] = True
        repeated = torch.arange(self.size + n - 1, device=block[keys.REWARDS].device).clamp(max=self.size - 1)
        padded = {name: tensor[repeated] for name, tensor in block.items()} if n > 1 else block
        rows = NStep(n, gamma).rows(padded, self.size + n - 1)
        self._columns = Columns(spec_of(rows), self.size, self.device)
        stored = self._columns.views(self._columns.tensors)
        for name, tensor in rows.items():
            stored[name].copy_(tensor)

    def sample(self, count: int, batch: int, generator: torch.Generator) -> Tensor:
        """Draw rows uniformly, with replacement.

        Args:
            count: Batches.
            batch: Rows of each.
            generator: Source of the draws, on the device.

        Returns:
            Where they are, int64 `[count, batch]`.
        """
        return torch.randint(self.size, (count, batch), generator=generator, device=self.device)

    def gather(self, index: Tensor) -> dict[str, Tensor]:
        """Return copies of rows.

        Args:
            index: Where they are, int64 `[*index]`.

        Returns:
            By name, each `[*index, ...]`: `obs`, `actions`, `returns`, `discounts` and `next_obs`, as of a replay, and
            `next_actions` where they were asked for.

        Raises:
            RuntimeError: If `prepare` has not been called.
        """
        return self.columns.views(self.columns.gather(index, self.device))

    @property
    def columns(self) -> Columns:
        """Where the rows are; a RuntimeError before `prepare`."""
        if self._columns is None:
            raise RuntimeError("call `prepare(n, gamma)` before `gather`: returns depend on them.")
        return self._columns

    # -- statistics

    @functools.cached_property
    def obs_moments(self) -> dict[str, Moments]:
        """Count, mean and variance of each float part of the observations, by name, `[*obs]` float64."""
        parts = {name: part for name, part in self.transitions.items() if is_part(name, keys.OBS)}
        return {name: moments(part) for name, part in parts.items() if part.is_floating_point()}

    def normalized_score(self, random: float, expert: float) -> float:
        """Return the mean return of the episodes on the scale of `normalized_score`; NaN if none ends.

        Args:
            random: The mean return of a random policy.
            expert: That of an expert.

        Raises:
            ValueError: If the two are equal.

        Source: Fu et al. 2020, arXiv:2004.07219, section 5.
        """
        return normalized_score(self.episode_returns.mean().item(), random, expert)


def normalized_score(value: float, random: float, expert: float) -> float:
    """Rescale a mean return such that a random policy's is 0 and an expert's is 100.

    Args:
        value: The mean return.
        random: That of a random policy.
        expert: That of an expert.

    Raises:
        ValueError: If the two are equal.

    Source: Fu et al. 2020, arXiv:2004.07219, section 5.
    """
    if random == expert:
        raise ValueError(f"the returns of `random` and `expert` must differ; both are {random:g}.")
    return 100.0 * (value - random) / (expert - random)


def _episode_returns(rows: Mapping[str, Tensor]) -> Tensor:
    ends = (rows[keys.TERMINATED] | rows[keys.TRUNCATED]).nonzero().squeeze(1)
    sums = rows[keys.REWARDS].double().cumsum(0)[ends]
    return sums.diff(prepend=sums.new_zeros(1)).float()
