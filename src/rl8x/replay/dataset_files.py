"""Reads transitions from files: a memory-mapped TensorDict, D4RL's HDF5 layout, and Minari's episodes."""

from __future__ import annotations

import contextlib
import functools
import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import product
from pathlib import Path
from typing import Any, Final

import numpy as np
import psutil
import torch
from torch import Tensor

from rl8x import keys
from rl8x.disk import SUMS, sums_of, wrong_sums
from rl8x.replay.columns import DTYPES
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
    """Map the tensors of a memory-mapped TensorDict, by flat names; digests that are there are checked."""
    try:
        tensors = _mapped_tensors(folder)
        wrong = wrong_sums(folder, _sums(folder)) if (folder / SUMS).exists() else None
    except (ValueError, KeyError, TypeError, AttributeError, OSError, RecursionError) as error:
        raise ValueError(f"{folder} is not a memory-mapped TensorDict, or damaged: {_shown(error)}.") from None
    if wrong is not None:
        raise ValueError(f"{folder} is damaged: {wrong}.")
    return tensors


def _mapped_tensors(folder: Path) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    meta = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
    for name, entry in meta.items():
        if not isinstance(entry, dict) or "/" in name:  # none that tensordict writes for an observation's part
            continue
        if "dtype" not in entry:
            tensors |= {f"{name}/{part}": tensor for part, tensor in _mapped_tensors(folder / _file_name(name)).items()}
            continue
        file, shape = folder / f"{_file_name(name)}.memmap", entry["shape"]
        dtype = DTYPES.get(str(entry["dtype"]).removeprefix("torch."))
        if dtype is None:
            raise ValueError(f"`{name}` has the unknown dtype {entry['dtype']!r:.80}")
        if not isinstance(shape, list) or not all(type(size) is int and size >= 0 for size in shape):
            raise ValueError(f"`{name}` has no shape of whole numbers; got {shape!r:.80}")
        size = math.prod(shape)
        # A data set of somebody else's may have a link to any file here.
        if not file.is_file() or file.is_symlink() or file.stat().st_size < size * dtype.itemsize:
            raise ValueError(f"{file} must have {size * dtype.itemsize:,} bytes, and is shorter, a link or not there")
        tensors[name] = (
            torch.from_file(str(file), shared=False, size=size, dtype=dtype).view(shape)
            if size
            else torch.zeros(shape, dtype=dtype)
        )
    return tensors


def _sums(folder: Path) -> str:
    """Return the digests of a data set's files."""
    files = (file for file in folder.rglob("*") if file.suffix in (".memmap", ".json"))
    return sums_of(folder, sorted(file.relative_to(folder).as_posix() for file in files))


def _shown(error: Exception) -> str:
    return " ".join((str(error) if type(error) is ValueError else repr(error)).split()).rstrip(".")


def _file_name(name: str) -> str:
    """Return the name of a part's file or folder, in which tensordict writes some characters as numbers."""
    if name in ("", ".", ".."):
        return "%2E" * len(name) or "%"
    return re.sub(r'[\x00-\x1f\x7f/<>:"|?*\\ %]', lambda found: f"%{ord(found[0]):02X}", name)


SPACES: Final = ("observation_space", "action_space")
_SPACES_FILE: Final = "spaces.json"
_EPISODES_FILE: Final = "episodes.json"


def write_about(folder: Path, spaces: Mapping[str, Any], returns: Tensor) -> None:
    """Write a data set's spaces, its episodes' returns, `[episodes]`, and the digests that `read_folder` checks.

    The rows may lack the ends of some episodes, so that the returns cannot be computed from them.
    """
    plain = {name: space_to_plain(space) for name, space in spaces.items() if space is not None}
    (folder / _SPACES_FILE).write_text(json.dumps(plain))
    (folder / _EPISODES_FILE).write_text(json.dumps(returns.tolist()))
    (folder / SUMS).write_text(_sums(folder), encoding="utf-8")


def read_spaces(folder: Path) -> dict[str, Any]:
    """Read the spaces of a data set from its folder, by the names of `SPACES`."""
    with _said(folder / _SPACES_FILE, "the spaces of a data set") as plain:
        return {name: space_from_plain(plain[name]) for name in SPACES if name in plain}


def read_episode_returns(folder: Path) -> Tensor | None:
    """Return the returns of episodes that a data set's folder says, `[episodes]`; None where it does not."""
    with _said(folder / _EPISODES_FILE, "the returns of episodes") as returns:
        return torch.tensor([float(each) for each in returns]) if (folder / _EPISODES_FILE).is_file() else None


@contextlib.contextmanager
def _said(file: Path, what: str) -> Iterator[Any]:
    """Give the data of a file of JSON, empty without one; raise if they are not `what` the context takes them for."""
    try:
        yield json.loads(file.read_text()) if file.is_file() else {}
    except (KeyError, TypeError, AttributeError, ValueError, AssertionError, OverflowError, RecursionError) as error:
        raise ValueError(f"{file} does not say {what}: {_shown(error)}.") from None


def is_hdf5(path: Path) -> bool:
    """Return whether there is a file with the suffix of D4RL's layout, which does not contain spaces."""
    return path.is_file() and path.suffix in (".hdf5", ".h5")


def lacks_spaces(path: Path) -> bool:
    """Return whether there is a data set that does not contain both of its spaces."""
    return is_hdf5(path) or ((path / "meta.json").is_file() and len(read_spaces(path)) < len(SPACES))


def read_hdf5(path: Path) -> dict[str, Tensor]:
    """Read a file in D4RL's layout; other entries are ignored."""
    with refused_if_damaged(f"{path} is not a file in the layout of D4RL"):
        try:
            rows = read_arrays(path, _D4RL)
        except ImportError as error:
            raise ImportError(f"{path} needs h5py to be read: pip install h5py.") from error
    missing = [name for name in ("observations", "actions", "rewards", "terminals") if _D4RL[name] not in rows]
    if missing:
        raise ValueError(f"{path} has no {', '.join(missing)}: a file in the layout of D4RL has them.")
    rows.setdefault(keys.TRUNCATED, torch.zeros_like(rows[keys.TERMINATED]))
    return rows


def read_minari(source: Any) -> tuple[Any, list[dict[str, Tensor]]]:
    """Return a `MinariDataset` and the transitions of each of its episodes; raises as `Dataset.from_minari`."""
    folder, load = getattr(getattr(source, "storage", None), "data_path", None), None
    if isinstance(source, str):
        folder, load = _minaris_folder(source)
    if folder is None:
        return source, _alike(source.iterate_episodes())
    with refused_if_damaged(f"{folder} is not one of Minari's data sets"):
        _check_minari(Path(folder))
        source = source if load is None else load()
        return source, _alike(source.iterate_episodes())


def _alike(episodes: Iterable[Any]) -> list[dict[str, Tensor]]:
    """Return the transitions of each of Minari's episodes that has any; refuse such as do not go together."""
    found = [rows for rows in map(transitions_of, episodes) if len(rows[keys.REWARDS])]
    kinds = [{name: (part.dtype, part.shape[1:]) for name, part in each.items()} for each in found]
    if any(kind != kinds[0] for kind in kinds):
        raise ValueError("the episodes differ in the names, shapes or types of what they hold")
    return found


def _minaris_folder(name: str) -> tuple[Path, Callable[[], Any]]:
    """Return the folder of a local data set of Minari's, and what loads it."""
    try:
        import minari
        from minari.storage import get_dataset_path
    except ImportError as error:
        raise ImportError(
            f"{name!r} is not a file here, and reading it as one of Minari's data sets needs Minari: "
            "pip install 'minari[hdf5]'."
        ) from error
    folder = Path(get_dataset_path(name)) / "data"
    if not folder.exists():
        raise ValueError(f"Minari has no data set {name!r} on this machine: there is no {folder}.")
    return folder, functools.partial(minari.load_dataset, name)


def _check_minari(folder: Path) -> None:
    """Refuse a data set of Minari's whose metadata, or whose file of HDF5, is not as Minari writes them."""
    metadata = json.loads((folder / "metadata.json").read_text(encoding="utf-8"))
    for name in SPACES:
        # Without them Minari makes the environment that the metadata name, which runs its code.
        if not isinstance(metadata, dict) or not isinstance(metadata.get(name), str):
            raise ValueError(f"its metadata do not say the {name}")
        space_from_plain(_minaris_space(json.loads(metadata[name])))
    if (file := folder / "main_data.hdf5").exists():
        rows = check_groups(file)
        counted = {"episodes": len(rows), "steps": sum(each["rewards"] for each in rows.values())}
        said = {name: metadata[f"total_{name}"] for name in counted}
        if counted != said:
            raise ValueError(f"its metadata say {said}, and its file has {counted}")


def _minaris_space(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return a space as Minari's metadata have it in the form of `space_to_plain`."""
    parts = data.get("subspaces", {})
    items = list(parts.items() if isinstance(parts, dict) else enumerate(parts))
    return {
        "dtype": "int64",
        **data,
        "kind": data["type"],
        "parts": [[key, _minaris_space(part)] for key, part in items],
    }


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


# For whole numbers that torch hardly computes with, a type that holds them all.
_WIDER: Final = {"uint16": np.int32, "uint32": np.int64}


@contextlib.contextmanager
def refused_if_damaged(what: str) -> Iterator[None]:
    """Say in one line that a file cannot be read, whatever goes wrong within the context."""
    try:
        yield
    except ImportError:
        raise
    except Exception as error:  # of damaged files h5py, and Minari with it, raise nearly everything there is
        reason = " ".join(str(error).split()).rstrip(".") or type(error).__name__
        raise ValueError(f"{what}, or damaged: {reason:.300}.") from None


def read_arrays(path: Path, names: Mapping[str, str]) -> dict[str, Tensor]:
    """Read arrays at the top of a file; those that are not there are left out."""
    import h5py

    with h5py.File(path, "r") as file:
        found = {name: _member(file, name) for name in names if file.get(name, getlink=True) is not None}
        _check_fits(sum(_checked_bytes(name, array) for name, array in found.items()))
        return {names[name]: _tensor(name, array[()]) for name, array in found.items()}


def check_groups(path: Path) -> dict[str, dict[str, int]]:
    """Check all arrays in the groups of a file as `read_arrays` does; return the rows of those at the top of each."""
    import h5py

    with h5py.File(path, "r") as file:
        need, seen, rows = 0, set[int](), dict[str, dict[str, int]]()
        left: list[tuple[tuple[str, ...], Any]] = [((name,), _member(file, name)) for name in file]
        while left:
            names, member = left.pop()
            if not isinstance(member, h5py.Group):
                need += _checked_bytes("/".join(names), member)
                rows.setdefault(names[0], {})["/".join(names[1:])] = member.shape[0] if member.shape else 0
                continue
            address = h5py.h5o.get_info(member.id).addr
            if address in seen:
                raise ValueError(f"`{'/'.join(names)}` is there twice")  # maybe within itself
            seen.add(address)
            rows.setdefault(names[0], {})
            left += [((*names, name), _member(member, name)) for name in member]
        _check_fits(need)
        return rows


def _member(group: Any, name: str) -> Any:
    """Return a member of a group, unless it may lie in another file."""
    import h5py

    if not isinstance(group.get(name, getlink=True), h5py.HardLink):
        raise ValueError(f"`{name}` is a link to something else")
    return group[name]


def _checked_bytes(name: str, array: Any) -> int:
    """Return the memory that an array takes; refuse what the file itself does not hold."""
    import h5py

    if not isinstance(array, h5py.Dataset):
        raise ValueError(f"`{name}` is not an array of numbers")
    if array.is_virtual or array.external:
        raise ValueError(f"`{name}` lies in another file")
    if array.shape is None:
        raise ValueError(f"`{name}` is empty")
    made = array.id.get_create_plist()
    for i in range(made.get_nfilters()):
        number, _, _, filter_name = made.get_filter(i)
        if not h5py.h5z.filter_avail(number):
            raise ValueError(f"`{name}` is stored with the filter {number} ({filter_name!r:.40}), which is not here")
    if array.chunks is None:
        whole = array.id.get_storage_size() >= array.nbytes
    else:
        starts = [range(0, size, chunk) for size, chunk in zip(array.shape, array.chunks, strict=True)]
        whole = array.id.get_num_chunks() >= math.prod(map(len, starts)) and all(
            map(_is_stored(array), product(*starts))
        )
    if not whole:
        raise ValueError(f"`{name}` is said to be {list(array.shape)}, of which not all was ever written")
    return int(array.nbytes)


def _is_stored(array: Any) -> Callable[[tuple[int, ...]], bool]:
    """Return what says whether the chunk at a position is found, and is whole where no filter made it smaller."""
    unfiltered = math.prod(array.chunks) * array.dtype.itemsize

    def is_stored(at: tuple[int, ...]) -> bool:
        chunk = array.id.get_chunk_info_by_coord(at)
        return chunk.byte_offset is not None and (not chunk.filter_mask or chunk.size >= unfiltered)

    return is_stored


def _check_fits(need: int) -> None:
    available = psutil.virtual_memory().available
    if need > available:
        raise ValueError(f"it holds {need / 1e9:,.1f} GB, and {available / 1e9:,.1f} GB of memory are available")


def _tensor(name: str, array: Any) -> Tensor:
    array = np.asarray(array)
    if array.dtype.kind not in "biuf":
        raise ValueError(f"`{name}` is not an array of numbers")
    array = array.astype(_WIDER.get(array.dtype.name, array.dtype.newbyteorder("=")), copy=False)
    if array.dtype == np.uint64:
        if array.size and array.max() > np.iinfo(np.int64).max:
            raise ValueError(f"`{name}` has numbers that no tensor holds")
        array = array.astype(np.int64)
    if array.dtype == np.bool_ and (array.view(np.uint8) > 1).any():
        raise ValueError(f"`{name}` has flags that are neither true nor false")
    return torch.from_numpy(array)
