"""Transitions that were recorded before the training: read once, checked, and sampled like a replay.

They are given by name, each `[rows, ...]`: `obs`, `actions` and `next_obs` (a tensor, or parts as in `obs/position`),
`rewards`, `terminated` and `truncated`.
"""

from __future__ import annotations

import copy
import functools
import hashlib
import math
import os
import shutil
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self

import gymnasium
import torch
from torch import Tensor

from rl8x import keys
from rl8x.distributed import resolve_device
from rl8x.functional import Moments, moments
from rl8x.replay.dataset_files import FILE, SPACES, is_hdf5, read_folder, read_hdf5, read_minari, write_folder
from rl8x.replay.nstep import NStep
from rl8x.replay.ring import Columns, Rows, spec_of
from rl8x.spaces import as_elements, check_mask, far_outside, leaves, only_legal, tree_of
from rl8x.trees import as_tensor, flatten_tree, is_part, unflatten_tree, without_ends

if TYPE_CHECKING:
    from tensordict import TensorDict


class Dataset(Rows):
    """Recorded transitions with a replay's `size`, `sample` and `gather`; `load` and `from_tensors` make one.

    If no `next_obs` is recorded, it is the next row's `obs`. The observations after a truncated step and after the last
    row are then unknown: those rows are left out, and the row before each bootstraps from the left-out row's `obs`.

    Args:
        transitions: By name, each `[rows, ...]`, in the order in which they were made, episode after episode. Floats
            become float32, whole numbers their space's type; rewards and flags may be `[rows, 1]`, and flags 0 and 1.
        device: Where batches are made.
        gaps: Treatment of a row that ends no episode but whose `next_obs` is not the next row's `obs`: "refuse" it, or
            "truncate" the episode there, as for rows in any order.
        observation_space: Space of one observation; None if it is not known, but algorithms need it.
        action_space: Space of one action, likewise.

    Attributes:
        size: Number of rows that can be drawn.
        transitions: The checked rows, by name, on the device of the given tensors, not on `device`.
        episode_returns: Sum of the rewards of each episode that ends, `[episodes]`, including rows that are left out.

    Raises:
        ValueError: If the transitions are not valid; the message names the problem and the row.
    """

    _missing = "gather from what `prepared(n, gamma)` returns: returns depend on them."

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
        rows = _checked(transitions)
        self.observation_space, self.action_space = observation_space, action_space
        for name, space in (
            (keys.OBS, observation_space),
            (keys.NEXT_OBS, observation_space),
            (keys.ACTIONS, action_space),
        ):
            if space is not None and any(is_part(each, name) for each in rows):
                rows |= as_elements(name, space, rows)
        _check_legal(rows, observation_space, action_space)
        _warn_of_far_actions(rows, action_space)
        if has_next := any(is_part(name, keys.NEXT_OBS) for name in rows):
            _check_gaps(rows, gaps)
        ends = (rows[keys.TERMINATED] | rows[keys.TRUNCATED]).nonzero().squeeze(1)
        sums = rows[keys.REWARDS].double().cumsum(0)[ends]
        self.episode_returns = sums.diff(prepend=sums.new_zeros(1)).float()
        self.transitions = rows if has_next else _with_next(keys.OBS, rows)
        self.size = len(self.transitions[keys.REWARDS])
        self.device = resolve_device(device)

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Any], device: torch.device | str = "cpu", **options: Any) -> Self:
        """Create a data set from copies of transitions by name; observations and actions may be trees `[rows, ...]`.

        Args:
            tensors: Transitions by name, see the class; a dict of tensors in place of one is a tree.
            device: Where batches are made.
            options: `gaps`, `observation_space` and `action_space` of the class.
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
        if (place / FILE).is_file():
            rows, returns, spaces = read_folder(place)
            dataset = cls(rows, device, **(spaces | options))
            dataset.episode_returns = returns
            return dataset
        if is_hdf5(place):
            return cls(read_hdf5(place), device, **options)
        if place.exists() or "/" not in str(path) or place.is_absolute():
            raise ValueError(
                f"no data set in {str(path)!r}: give a folder that `Dataset.save` wrote (it has a {FILE}), a file "
                ".hdf5 or .h5 in the layout of D4RL, or the id of one of Minari's data sets."
            )
        return cls.from_minari(str(path), device, **options)

    @classmethod
    def from_minari(cls, source: Any, device: torch.device | str = "cpu", **options: Any) -> Self:
        """Create a data set from one of Minari's.

        Args:
            source: Its id, or a `MinariDataset`: an object with `iterate_episodes()`.
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
        """Write the data set to a new folder, atomically: a file of safetensors, and its digest in `SHA256SUMS`.

        Args:
            path: The folder.

        Raises:
            FileExistsError: If the path exists.
            ValueError: If the folder cannot be written.
        """
        path = Path(path)
        if path.exists():
            raise FileExistsError(f"{path} is there already: give another folder.")
        beside = path.with_name(f"{path.name}.new-{os.getpid()}")
        try:
            beside.mkdir(parents=True)
            spaces = {name: getattr(self, name) for name in SPACES}
            write_folder(beside, self.transitions, self.episode_returns, spaces)
            beside.rename(path)
        except OSError as error:
            raise ValueError(
                f"the data set cannot be written to {path.parent}: {error.strerror or error}. Give another folder."
            ) from None
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
        """Return an upper bound of the device memory that the rows of `prepared` take, in bytes.

        Args:
            next_actions: Whether rows have `next_actions` too.
        """
        parts = (keys.OBS, keys.NEXT_OBS, keys.ACTIONS) + (keys.ACTIONS,) * next_actions
        spec = spec_of(self.transitions)
        of_parts = sum(spec[name].row_bytes for part in parts for name in spec if is_part(name, part))
        return len(self.transitions[keys.REWARDS]) * (of_parts + 2 * torch.float32.itemsize)

    @torch.no_grad()
    def prepared(self, n: int, gamma: float, device: torch.device | None = None, *, next_actions: bool = False) -> Self:
        """Return the same transitions with rows of n-step returns on the device, to sample from.

            returns_t   = sum_{j < m} gamma^j r_{t+j}
            discounts_t = gamma^m (1 - terminated_{t+m-1})

        m is n, or fewer steps if an episode ends. If its episode continues, the last row bootstraps from its
        `next_obs`.

        Args:
            n: Steps of a return, at least 1.
            gamma: Discount of a step, in [0, 1].
            device: Device of the rows; None: the data set's.
            next_actions: Whether rows hold the recorded action on `next_obs` too. For the last step of a truncated or
                unfinished episode none is recorded: that step makes no row, and returns end with the step before it,
                whose `next_obs` is the last step's `obs`. Rows that terminated hold their own action, which has no
                effect, as their discount is 0.

        Raises:
            ValueError: If a number is out of its range, or next actions are asked for and no row has one.

        Source: Sutton & Barto 2018, section 7.1; time limits as in Pardo et al. 2018, arXiv:1712.00378.
        """
        other = copy.copy(self)
        other.device = self.device if device is None else device
        transitions = _with_next(keys.ACTIONS, self.transitions) if next_actions else self.transitions
        other.size = size = len(transitions[keys.REWARDS])
        n = min(n, size)  # no return is longer
        block = {name: tensor.unsqueeze(1) for name, tensor in transitions.items()}
        # Padding after the last row completes the windows of the rows before it; no return reaches it.
        block[keys.TRUNCATED] = block[keys.TRUNCATED].clone()
        block[keys.TRUNCATED][-1] = True
        repeated = torch.arange(size + n - 1, device=block[keys.REWARDS].device).clamp(max=size - 1)
        padded = {name: tensor[repeated] for name, tensor in block.items()} if n > 1 else block
        rows = NStep(n, gamma).rows(padded, size + n - 1)
        other.stored = Columns(spec_of(rows), size, other.device)
        views = other.stored.views(other.stored.tensors)
        for name, tensor in rows.items():
            views[name].copy_(tensor)
        return other

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
            expert: The mean return of an expert.
        """
        return normalized_score(self.episode_returns.mean().item(), random, expert)


def normalized_score(value: float, random: float, expert: float) -> float:
    """Rescale a mean return such that a random policy's is 0 and an expert's is 100.

    Args:
        value: The mean return.
        random: The mean return of a random policy.
        expert: The mean return of an expert.

    Source: Fu et al. 2020, arXiv:2004.07219, section 5.
    """
    if random == expert:
        raise ValueError(f"the returns of `random` and `expert` must differ; both are {random:g}.")
    return 100.0 * (value - random) / (expert - random)


# -- checks of transitions, and columns that are copied from the next row

_FLAGS: Final = (keys.TERMINATED, keys.TRUNCATED)
_NAMES: Final = "`obs`, `actions`, `rewards`, `terminated`, `truncated` and, where it is known, `next_obs`"


def _first(wrong: Tensor) -> int:
    """Return the index of the first row with a true element of `wrong`, `[rows, ...]`."""
    return int(wrong.reshape(len(wrong), -1).any(1).to(torch.uint8).argmax())


def _checked(transitions: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return transitions in the dtypes that are stored; raise `ValueError` for the first problem."""
    parts = dict.fromkeys(name.split("/", 1)[0] for name in transitions)
    legal = (keys.OBS, keys.ACTIONS, keys.REWARDS, *_FLAGS, keys.NEXT_OBS)
    missing = [name for name in legal[:-1] if name not in parts]
    unknown = [name for name in parts if name not in legal]
    if missing or unknown:
        problem = f"has no {', '.join(missing)}" if missing else f"has {', '.join(unknown)}, which is not known"
        raise ValueError(f"a data set holds {_NAMES}; this one {problem}.")
    lengths = {name: len(tensor) if tensor.ndim else 0 for name, tensor in transitions.items()}
    if len(set(lengths.values())) != 1 or 0 in lengths.values():
        raise ValueError(f"a data set needs equally many rows of each name, and at least 1; got {lengths}.")
    rows = {name: tensor.float() if tensor.is_floating_point() else tensor for name, tensor in transitions.items()}
    for name in (keys.REWARDS, *_FLAGS):
        if rows[name].numel() != lengths[name]:
            raise ValueError(f"`{name}` must be one number a row; got the shape {list(rows[name].shape)}.")
        rows[name] = rows[name].reshape(-1)
    for name in _FLAGS:
        wrong = (rows[name] != 0) & (rows[name] != 1)
        if wrong.any():
            row = _first(wrong)
            raise ValueError(f"`{name}` must be true or false, or 0 or 1; got {rows[name][row].item()} in row {row:,}.")
        rows[name] = rows[name].bool()
    rows[keys.REWARDS] = rows[keys.REWARDS].float()
    for name, tensor in rows.items():
        if tensor.is_floating_point() and not tensor.isfinite().all():
            # After a termination nothing bootstraps.
            numbers = without_ends(tensor, rows[keys.TERMINATED]) if is_part(name, keys.NEXT_OBS) else tensor
            if not numbers.isfinite().all():
                row = _first(~numbers.isfinite())
                raise ValueError(f"`{name}` is not finite in row {row:,} of {len(tensor):,}: leave such rows out.")
            rows[name] = numbers
    if keys.NEXT_OBS in parts:
        for name in [name for name in rows if is_part(name, keys.OBS, keys.NEXT_OBS)]:
            first = name.partition("/")[0]
            other = (keys.NEXT_OBS if first == keys.OBS else keys.OBS) + name.removeprefix(first)
            if other not in rows:
                raise ValueError(f"`{name}` has no `{other}` to go with it.")
            kinds = [f"{each.dtype} {list(each.shape[1:])}" for each in (rows[name], rows[other])]
            if kinds[0] != kinds[1]:
                raise ValueError(f"`{name}` and `{other}` must be alike; got {kinds[0]} and {kinds[1]}.")
    return rows


def _check_legal(rows: Mapping[str, Tensor], observation_space: Any, action_space: Any) -> None:
    """Raise if an observation's mask forbids its action, which thus has no value and no log-probability."""
    seen = observation_space.spaces if isinstance(observation_space, gymnasium.spaces.Dict) else {}
    if keys.ACTION_MASK not in seen or action_space is None:
        return
    check_mask(seen[keys.ACTION_MASK], action_space, keys.ACTION_MASK)
    taken, mask = unflatten_tree(keys.ACTIONS, rows), unflatten_tree(f"{keys.OBS}/{keys.ACTION_MASK}", rows)
    for name, part in flatten_tree(keys.ACTIONS, only_legal(taken, mask, action_space)).items():
        wrong = (part != rows[name]).reshape(len(part), -1).any(1)
        if wrong.any():
            row = _first(wrong)
            raise ValueError(
                f"`{name}` is {rows[name][row].tolist()} in row {row:,}, which the row's `{keys.ACTION_MASK}` says is "
                f"illegal (there are {int(wrong.sum()):,} such rows): leave such rows out, or mend their masks."
            )


def _warn_of_far_actions(rows: Mapping[str, Tensor], action_space: Any) -> None:
    """Warn of actions out of the bounds of their `Box`, to which an environment may have clipped them."""
    for path, leaf in [] if action_space is None else leaves(action_space):
        if not isinstance(leaf, gymnasium.spaces.Box):
            continue
        name = "/".join((keys.ACTIONS, *path))
        far = far_outside(rows[name], leaf)
        if not far.any():
            continue
        row, count = _first(far), int(far.reshape(len(far), math.prod(leaf.shape)).any(1).sum())
        place = tuple(far[row].nonzero()[0].tolist())
        warnings.warn(
            f"`{name}` is out of the bounds of its Box in {count:,} of {len(far):,} rows, first in row {row:,}: "
            f"{rows[name][row][place].item():g}, where {leaf.low[place]:g} to {leaf.high[place]:g} is legal. They are "
            "learned from as they are: clip what the environment clipped, or give the space that they are of.",
            RuntimeWarning,
            stacklevel=3,
        )


def _check_gaps(rows: dict[str, Tensor], gaps: str) -> None:
    """Raise for, or truncate in place, episodes that do not continue in the next row; see `gaps` of `Dataset`."""
    goes_on = ~(rows[keys.TERMINATED] | rows[keys.TRUNCATED])[:-1]
    apart = torch.zeros_like(goes_on)
    for name, part in rows.items():
        if is_part(name, keys.OBS):
            later = rows[keys.NEXT_OBS + name.removeprefix(keys.OBS)]
            apart |= (later[:-1] != part[1:]).reshape(len(apart), math.prod(part.shape[1:])).any(1)
    apart &= goes_on
    if gaps == "truncate":
        rows[keys.TRUNCATED] = rows[keys.TRUNCATED] | torch.cat([apart, apart.new_zeros(1)])
    elif apart.any():
        row = _first(apart)
        raise ValueError(
            f"row {row:,} ends no episode, but its `next_obs` is not the `obs` of row {row + 1:,} (there are "
            f"{int(apart.sum()):,} such rows). Mark where episodes are cut in `truncated`, or take gaps='truncate'."
        )


def _with_next(what: str, rows: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Give each row the observation, or the action, of the row after it, as `next_*`; leave out rows without one."""
    terminated, ends = rows[keys.TERMINATED], rows[keys.TERMINATED] | rows[keys.TRUNCATED]
    unknown = ~terminated & ends
    unknown[-1] = ~terminated[-1]
    # The row before one that is left out ends the episode, as if truncated.
    cut = torch.cat([unknown[1:], unknown.new_zeros(1)]) & ~ends
    if unknown.all():
        raise ValueError(
            f"no row has `next_{what}`, which are the `{what}` of the row after it in its episode: the last rows of "
            "episodes that are truncated or not over have none, and there are no others. Record longer episodes"
            f"{', or `next_obs`' if what == keys.OBS else ''}."
        )
    # Observations after a termination are never bootstrapped from, but have to be finite.
    own = torch.arange(len(ends), device=ends.device)
    source = torch.where(ends, own, own + 1)[~unknown]
    kept = {name: tensor[~unknown] for name, tensor in rows.items()}
    kept[keys.TRUNCATED] = (rows[keys.TRUNCATED] | cut)[~unknown]
    parts = {name: part for name, part in rows.items() if is_part(name, what)}
    return kept | {f"next_{name}": part[source] for name, part in parts.items()}
