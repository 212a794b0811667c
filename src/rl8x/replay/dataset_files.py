"""Reads transitions from files: rl8x's own folder, D4RL's HDF5 layout, and Minari's episodes."""

from __future__ import annotations

import contextlib
import itertools
import json
import math
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
import psutil
import torch
from torch import Tensor

from rl8x import keys
from rl8x.disk import SUMS, sums_of, wrong_sums
from rl8x.spaces import WIDER, space_from_plain, space_to_plain, tree_of
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

FILE: Final = "transitions.safetensors"
SPACES: Final = ("observation_space", "action_space")
# The name of the tensor with the returns of episodes in a data set's file.
_RETURNS: Final = "episode_returns"


def write_folder(folder: Path, rows: Mapping[str, Tensor], returns: Tensor, spaces: Mapping[str, Any]) -> None:
    """Write a data set and its digest: rows, spaces, and returns of episodes, which may have missing rows."""
    from safetensors import SafetensorError
    from safetensors.numpy import save_file

    plain = {name: space_to_plain(space) for name, space in spaces.items() if space is not None}
    arrays = {name: np.ascontiguousarray(each.numpy(force=True)) for name, each in {**rows, _RETURNS: returns}.items()}
    try:
        save_file(arrays, folder / FILE, {"rl8x": json.dumps(plain)})
    except SafetensorError as error:
        raise OSError(str(error)) from error
    (folder / SUMS).write_text(sums_of(folder, [FILE]), encoding="utf-8")


@contextlib.contextmanager
def _opened(folder: Path) -> Iterator[tuple[Any, dict[str, Any]]]:
    """Map the file of a data set into memory; yield it, and the data set's spaces by the names of `SPACES`."""
    from safetensors import safe_open

    with (
        refused_if_damaged(f"{folder} is not a data set that rl8x saved"),
        safe_open(folder / FILE, "pt") as file,
    ):
        plain = json.loads(file.metadata()["rl8x"])
        yield file, {name: space_from_plain(plain[name]) for name in SPACES if name in plain}


def read_folder(folder: Path) -> tuple[dict[str, Tensor], Tensor, dict[str, Any]]:
    """Map a data set that `write_folder` wrote; return its rows, the returns `[episodes]`, and its spaces by name."""
    with _opened(folder) as (file, spaces):
        if wrong := wrong_sums(folder, sums_of(folder, [FILE])):
            raise ValueError(wrong)
        rows = {name: file.get_tensor(name) for name in file.offset_keys()}
        return rows, rows.pop(_RETURNS), spaces


def is_hdf5(path: Path) -> bool:
    """Return whether there is a file with the suffix of D4RL's layout, which does not contain spaces."""
    return path.is_file() and path.suffix in (".hdf5", ".h5")


def lacks_spaces(path: Path) -> bool:
    """Return whether there is a data set that does not contain both of its spaces."""
    if not (path / FILE).is_file():
        return is_hdf5(path)
    with _opened(path) as (_, spaces):
        return len(spaces) < len(SPACES)


def read_hdf5(path: Path) -> dict[str, Tensor]:
    """Read a file in D4RL's layout; other entries are ignored."""
    with refused_if_damaged(f"{path} is not a file in the layout of D4RL"):
        try:
            import h5py
        except ImportError as error:
            raise ImportError(f"{path} needs h5py to be read: pip install h5py.") from error
        with h5py.File(path, "r") as file:
            arrays = dict(_held_arrays(file, _D4RL))
            _check_fits(arrays)
            rows = {_D4RL[name]: _tensor(name, array[()]) for name, array in arrays.items()}
    missing = [name for name in ("observations", "actions", "rewards", "terminals") if _D4RL[name] not in rows]
    if missing:
        raise ValueError(f"{path} has no {', '.join(missing)}: a file in the layout of D4RL has them.")
    rows.setdefault(keys.TRUNCATED, torch.zeros_like(rows[keys.TERMINATED]))
    return rows


def read_minari(source: Any) -> tuple[Any, list[dict[str, Tensor]]]:
    """Return a `MinariDataset` and the transitions of each of its episodes; raises as `Dataset.from_minari`."""
    folder = getattr(getattr(source, "storage", None), "data_path", None)
    if isinstance(source, str):
        try:
            import minari
            from minari.storage import get_dataset_path
        except ImportError as error:
            raise ImportError(
                f"{source!r} is not a file here, and reading it as one of Minari's data sets needs Minari: "
                "pip install 'minari[hdf5]'."
            ) from error
        folder = Path(get_dataset_path(source)) / "data"
        if not folder.exists():
            raise ValueError(f"Minari has no data set {source!r} on this machine: there is no {folder}.")
    with refused_if_damaged(f"{folder or 'this'} is not one of Minari's data sets"):
        if folder is not None:
            _check_minari(Path(folder))
        source = minari.load_dataset(source) if isinstance(source, str) else source
        episodes = [rows for rows in map(transitions_of, source.iterate_episodes()) if len(rows[keys.REWARDS])]
        kinds = [{name: (part.dtype, part.shape[1:]) for name, part in each.items()} for each in episodes]
        if any(kind != kinds[0] for kind in kinds):
            raise ValueError("the episodes differ in the names, shapes or types of what they hold")
        return source, episodes


def _check_minari(folder: Path) -> None:
    """Raise an error if the metadata or the HDF5 file of a Minari data set are not as Minari writes them."""
    metadata = json.loads((folder / "metadata.json").read_text(encoding="utf-8"))
    for name in SPACES:
        # Without them Minari makes the environment that the metadata name, which runs its code.
        if not isinstance(metadata, dict) or not isinstance(metadata.get(name), str):
            raise ValueError(f"its metadata do not say the {name}")
        space_from_plain(_minaris_space(json.loads(metadata[name])))
    if (path := folder / "main_data.hdf5").exists():
        import h5py

        with h5py.File(path, "r") as file:
            arrays = dict(_held_arrays(file))
            _check_fits(arrays)
            counted = {"episodes": len(file), "steps": sum(arrays[f"{name}/rewards"].shape[0] for name in file)}
        said = {name: metadata[f"total_{name}"] for name in counted}
        if counted != said:
            raise ValueError(f"its metadata say {said}, and its file has {counted}")


def _minaris_space(data: Mapping[str, Any]) -> dict[str, Any]:
    """Convert a space from the form of Minari's metadata to that of `space_to_plain`."""
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
    obs = flatten_tree(keys.OBS, tree_of(episode.observations, torch.as_tensor))
    actions = flatten_tree(keys.ACTIONS, tree_of(episode.actions, torch.as_tensor))
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


@contextlib.contextmanager
def refused_if_damaged(what: str) -> Iterator[None]:
    """Turn any exception in the context except `ImportError` into a one-line `ValueError` that begins with `what`."""
    try:
        yield
    except ImportError:
        raise
    except Exception as error:  # h5py, and so Minari, raises almost any exception for damaged files
        reason = " ".join(str(error).split()).rstrip(".") or type(error).__name__
        raise ValueError(f"{what}, or damaged: {reason:.300}.") from None


def _held_arrays(
    group: Any, names: Collection[str] | None = None, above: str = "", seen: set[int] | None = None
) -> Iterator[tuple[str, Any]]:
    """Yield an HDF5 file's arrays by path, or those of `names` at its top; raise for links and missing data."""
    import h5py

    seen = set() if seen is None else seen
    for name in group:
        if names is not None and name not in names:
            continue
        path = f"{above}{name}"
        if not isinstance(group.get(name, getlink=True), h5py.HardLink):
            raise ValueError(f"`{path}` is a link to something else")
        member = group[name]
        if names is None and isinstance(member, h5py.Group):
            address = h5py.h5o.get_info(member.id).addr
            if address in seen:
                raise ValueError(f"`{path}` is there twice")  # maybe within itself
            seen.add(address)
            yield from _held_arrays(member, None, f"{path}/", seen)
            continue
        if not isinstance(member, h5py.Dataset):
            raise ValueError(f"`{path}` is not an array of numbers")
        if member.is_virtual or member.external:
            raise ValueError(f"`{path}` lies in another file")
        if member.shape is None:
            raise ValueError(f"`{path}` is empty")
        if not _is_whole(member):
            raise ValueError(f"`{path}` is said to be {list(member.shape)}, of which not all was ever written")
        yield path, member


def _is_whole(array: Any) -> bool:
    """Return whether each chunk of an array is in the file, at its full size if no filter compressed it."""
    if array.chunks is None:
        return bool(array.id.get_storage_size() >= array.nbytes)
    starts = [range(0, size, chunk) for size, chunk in zip(array.shape, array.chunks, strict=True)]
    if array.id.get_num_chunks() < math.prod(map(len, starts)):
        return False
    unfiltered = math.prod(array.chunks) * array.dtype.itemsize
    chunks = map(array.id.get_chunk_info_by_coord, itertools.product(*starts))
    return all(each.byte_offset is not None and (not each.filter_mask or each.size >= unfiltered) for each in chunks)


def _check_fits(arrays: Mapping[str, Any]) -> None:
    need, available = sum(int(array.nbytes) for array in arrays.values()), psutil.virtual_memory().available
    if need > available:
        raise ValueError(f"it holds {need / 1e9:,.1f} GB, and {available / 1e9:,.1f} GB of memory are available")


def _tensor(name: str, array: Any) -> Tensor:
    array = np.asarray(array)
    if array.dtype.kind not in "biuf":
        raise ValueError(f"`{name}` is not an array of numbers")
    array = array.astype(WIDER.get(array.dtype.name, array.dtype.newbyteorder("=")), copy=False)
    if array.dtype == np.uint64:
        if array.size and array.max() > np.iinfo(np.int64).max:
            raise ValueError(f"`{name}` has numbers that no tensor holds")
        array = array.astype(np.int64)
    if array.dtype == np.bool_ and (array.view(np.uint8) > 1).any():
        raise ValueError(f"`{name}` has flags that are neither true nor false")
    return torch.from_numpy(array)
