"""Reads transitions from files: a memory-mapped TensorDict, D4RL's HDF5 layout, and Minari's episodes."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from rl8x import keys
from rl8x.spaces import space_from_plain, space_to_plain
from rl8x.trees import flatten_tree

# Names in D4RL's layout.
_D4RL: Final = {
    "observations": keys.OBS,
    "actions": keys.ACTIONS,
    "rewards": keys.REWARDS,
    "next_observations": keys.NEXT_OBS,
    "terminals": keys.TERMINATED,
    "timeouts": keys.TRUNCATED,
}


def read_folder(folder: Path) -> dict[str, Tensor]:
    """Map the tensors of a memory-mapped TensorDict, by flat names; only its JSON and plain memory are read."""
    try:
        return _mapped_tensors(folder)
    except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError, AttributeError, OSError) as error:
        raise ValueError(f"{folder} is not a memory-mapped TensorDict, or damaged: {error!r}.") from None


def _mapped_tensors(folder: Path) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    meta = json.loads((folder / "meta.json").read_text())
    for name, entry in meta.items():
        if not isinstance(entry, dict) or "/" in name:  # none that tensordict writes for an observation's part
            continue
        if "dtype" not in entry:
            tensors |= {f"{name}/{part}": tensor for part, tensor in _mapped_tensors(folder / _file_name(name)).items()}
            continue
        file, shape, dtype = (
            folder / f"{_file_name(name)}.memmap",
            entry["shape"],
            getattr(torch, entry["dtype"].split(".")[-1], None),
        )
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"{folder}: `{name}` has the unknown dtype {entry['dtype']!r}.")
        size = math.prod(shape)
        if not file.is_file() or file.stat().st_size < size * dtype.itemsize:
            raise ValueError(f"{file} must have {size * dtype.itemsize:,} bytes, and is shorter or not there.")
        tensors[name] = torch.from_file(str(file), shared=False, size=size, dtype=dtype).view(shape)
    return tensors


def _file_name(name: str) -> str:
    """Return the name of a part's file or folder, in which tensordict writes some characters as numbers."""
    if name in ("", ".", ".."):
        return "%2E" * len(name) or "%"
    return re.sub(r'[\x00-\x1f\x7f/<>:"|?*\\ %]', lambda found: f"%{ord(found[0]):02X}", name)


SPACES: Final = ("observation_space", "action_space")
_SPACES_FILE: Final = "spaces.json"


def write_spaces(folder: Path, spaces: Mapping[str, Any]) -> None:
    """Write the spaces of a data set, those of `SPACES` that are not None, to its folder."""
    plain = {name: space_to_plain(space) for name, space in spaces.items() if space is not None}
    (folder / _SPACES_FILE).write_text(json.dumps(plain))


def read_spaces(folder: Path) -> dict[str, Any]:
    """Read the spaces of a data set from its folder, by the names of `SPACES`."""
    file = folder / _SPACES_FILE
    if not file.is_file():
        return {}
    try:
        plain = json.loads(file.read_text())
        return {name: space_from_plain(plain[name]) for name in SPACES if name in plain}
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise ValueError(f"{file} does not say the spaces of a data set: {error!r}.") from None


_EPISODES_FILE: Final = "episodes.json"


def write_episode_returns(folder: Path, returns: Tensor) -> None:
    """Write the returns of episodes, `[episodes]`, to a data set's folder: its rows may lack the ends of some."""
    (folder / _EPISODES_FILE).write_text(json.dumps(returns.tolist()))


def read_episode_returns(folder: Path) -> Tensor | None:
    """Return the returns of episodes that a data set's folder says, `[episodes]`; None where it does not."""
    file = folder / _EPISODES_FILE
    if not file.is_file():
        return None
    try:
        return torch.tensor([float(each) for each in json.loads(file.read_text())])
    except (TypeError, ValueError) as error:
        raise ValueError(f"{file} does not say the returns of episodes: {error!r}.") from None


def is_hdf5(path: Path) -> bool:
    """Return whether there is a file with the suffix of D4RL's layout, which does not contain spaces."""
    return path.is_file() and path.suffix in (".hdf5", ".h5")


def lacks_spaces(path: Path) -> bool:
    """Return whether there is a data set that does not contain both of its spaces."""
    return is_hdf5(path) or ((path / "meta.json").is_file() and len(read_spaces(path)) < len(SPACES))


def read_hdf5(path: Path) -> dict[str, Tensor]:
    """Read a file in D4RL's layout; other entries are ignored."""
    try:
        import h5py
    except ImportError as error:
        raise ImportError(f"{path} needs h5py to be read: pip install h5py.") from error
    try:
        with h5py.File(path, "r") as file:
            rows = {ours: torch.from_numpy(file[name][()]) for name, ours in _D4RL.items() if name in file}
    except (OSError, TypeError) as error:  # TypeError: a group, or not numbers
        raise ValueError(f"{path} is not a file in the layout of D4RL, or damaged: {error}.") from None
    missing = [name for name in ("observations", "actions", "rewards", "terminals") if _D4RL[name] not in rows]
    if missing:
        raise ValueError(f"{path} has no {', '.join(missing)}: a file in the layout of D4RL has them.")
    rows.setdefault(keys.TRUNCATED, torch.zeros_like(rows[keys.TERMINATED]))
    return rows


def load_minari(name: str) -> Any:
    """Return the local `MinariDataset` of an id; raises as `Dataset.from_minari`."""
    try:
        import minari
    except ImportError as error:
        raise ImportError(
            f"{name!r} is not a file here, and reading it as one of Minari's data sets needs Minari: "
            "pip install 'minari[hdf5]'."
        ) from error
    try:
        return minari.load_dataset(name)
    except (FileNotFoundError, ValueError, KeyError) as error:
        raise ValueError(f"Minari has no data set {name!r} on this machine: {error}") from error


def transitions_of(episode: Any) -> dict[str, Tensor]:
    """Return the transitions of one of Minari's episodes, which has one more observation than actions."""
    steps = len(episode.rewards)
    obs = flatten_tree(keys.OBS, _tensors(episode.observations))
    actions = flatten_tree(keys.ACTIONS, _tensors(episode.actions))
    lengths = {len(part) - 1 for part in obs.values()} | {len(part) for part in actions.values()}
    if lengths != {steps}:
        raise ValueError(f"episode {episode.id} has {steps} rewards; observations must be one more, actions as many.")
    truncated = torch.as_tensor(episode.truncations).bool()
    if steps and not (truncated[-1] or bool(episode.terminations[-1])):
        truncated = truncated.clone()
        truncated[-1] = True  # recording stopped there, and another episode follows
    return {
        **{name: part[:-1] for name, part in obs.items()},
        **actions,
        keys.REWARDS: torch.as_tensor(episode.rewards),
        keys.TERMINATED: torch.as_tensor(episode.terminations),
        keys.TRUNCATED: truncated,
        **{keys.NEXT_OBS + name.removeprefix(keys.OBS): part[1:] for name, part in obs.items()},
    }


def _tensors(tree: Any) -> Any:
    """Return a tree of arrays as one of tensors; the parts of a tuple have the names "0", "1", ..."""
    if isinstance(tree, Mapping):
        return {name: _tensors(part) for name, part in tree.items()}
    if isinstance(tree, tuple):
        return {str(i): _tensors(part) for i, part in enumerate(tree)}
    return torch.as_tensor(tree)
