"""Minari's format: data sets written and read by Minari itself, in its own folder.

Source: Younis et al. 2024, "Minari", https://minari.farama.org; layout of version 0.5.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import gymnasium
import numpy as np
import torch

from rl8x import keys
from rl8x.replay.dataset import Dataset
from rl8x.trees import is_part, unflatten_tree

_ID: Final = re.compile(r"[-_\w][-_\w/]*[-_\w]+/[-_\w]+-v\d+", re.ASCII)
_NEEDS: Final = "to write a data set in Minari's format needs Minari: pip install 'minari[hdf5]'."


def check_new_id(name: str) -> None:
    """Raise if a data set cannot be written under an id."""
    if not _ID.fullmatch(name):
        raise ValueError(
            "an id of Minari's is NAMESPACE/NAME-vNUMBER, of letters, digits, - and _, at least two in NAMESPACE, such "
            f"as cartpole/medium-v0; got {name!r}."
        )
    if _folder(name).exists():
        raise ValueError(f"Minari has {name!r} already, in {_folder(name)}: give another id.")


def write_minari(name: str, dataset: Dataset, *, algorithm_name: str) -> None:
    """Write a data set, whole or not at all, under an id that `minari.load_dataset` and `Dataset.load` read.

    Images are written as they are, not as JPEG. The last episode, if it ends nowhere, is truncated.
    """
    check_new_id(name)
    import minari
    from minari.data_collector import EpisodeBuffer
    from minari.dataset.minari_storage import MinariStorage
    from minari.namespace import create_namespace, list_local_namespaces

    spaces = dataset.observation_space, dataset.action_space
    folder = _folder(name)
    # Beside it, in a hidden folder, which Minari does not list.
    beside = _root() / f".rl8x-{os.getpid()}"
    try:
        (beside / "data").mkdir(parents=True)
        storage = MinariStorage.new(beside / "data", *spaces, data_format="hdf5", jpeg_encoding=False)
        version = {"minari_version": minari.__version__, "dataset_id": name}
        storage.update_metadata({**version, "algorithm_name": algorithm_name})
        storage.update_episodes(EpisodeBuffer(**episode) for episode in _episodes(dataset))
        namespace = name.rpartition("/")[0]
        if namespace not in list_local_namespaces():
            create_namespace(namespace)
        beside.rename(folder)
    except NotImplementedError as error:
        raise ValueError(f"Minari cannot store these spaces: {error}.") from error
    finally:
        shutil.rmtree(beside, ignore_errors=True)


def _episodes(dataset: Dataset) -> Iterator[dict[str, Any]]:
    """Yield the episodes of a data set as the arguments of Minari's `EpisodeBuffer`."""
    rows = {name: tensor.cpu() for name, tensor in dataset.transitions.items()}
    truncated = rows[keys.TRUNCATED].clone()
    truncated[-1] |= ~rows[keys.TERMINATED][-1]
    ends = ((rows[keys.TERMINATED] | truncated).nonzero().squeeze(1) + 1).tolist()
    for start, stop in zip([0, *ends[:-1]], ends, strict=True):
        part = {key: tensor[start:stop] for key, tensor in rows.items()}
        for key in [key for key in part if is_part(key, keys.OBS)]:
            last = rows[keys.NEXT_OBS + key.removeprefix(keys.OBS)][stop - 1 : stop]
            part[key] = torch.cat([part[key], last])
        yield {
            "observations": _arrays(unflatten_tree(keys.OBS, part), dataset.observation_space),
            "actions": _arrays(unflatten_tree(keys.ACTIONS, part), dataset.action_space),
            "rewards": part[keys.REWARDS].numpy(),
            "terminations": part[keys.TERMINATED].numpy(),
            "truncations": truncated[start:stop].numpy(),
        }


def _arrays(tree: Any, space: Any) -> Any:
    """Return a tree of tensors as arrays of a space's dtypes, with tuples restored."""
    if isinstance(space, gymnasium.spaces.Dict):
        return {name: _arrays(tree[name], part) for name, part in space.spaces.items()}
    if isinstance(space, gymnasium.spaces.Tuple):
        return tuple(_arrays(tree[str(i)], part) for i, part in enumerate(space.spaces))
    return tree.numpy().astype(np.dtype(space.dtype), copy=False)


def _root() -> Path:
    """Return the folder of Minari's data sets."""
    try:
        import h5py  # noqa: F401
        from minari.storage import get_dataset_path
    except ImportError as error:
        raise ImportError(_NEEDS) from error
    return Path(get_dataset_path())


def _folder(name: str) -> Path:
    return _root() / name
