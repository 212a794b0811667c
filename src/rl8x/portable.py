"""Policies without a trainer: observations as rows of tensors, actions as elements of spaces, and policy files.

A file is in the format of safetensors. It has weights and running moments by name, and in the header's metadata, under
`rl8x`, JSON that describes the policy and has the digest of the whole file. Reading it runs no code.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

import gymnasium
import torch
from torch import Tensor

from rl8x import __version__
from rl8x.models import State
from rl8x.spaces import check_elements, describe_space, element_of, leaves, named_parts, torch_dtype
from rl8x.trees import Tree, as_tensor, flatten_tree, unflatten_tree

SUFFIX: Final = ".safetensors"
_FORMAT: Final = "rl8x-policy"
_VERSION: Final = 1
_ZEROS: Final = b"0" * 64
# The first match is in the header: JSON within JSON, with escaped quotes.
_DIGEST: Final = re.compile(rb'\\"sha256\\": \\"([0-9a-f]{64})\\"')


class Decision(NamedTuple):
    """The result of `Policy.decide`.

    Attributes:
        actions: An element of the action space for one observation; for several, with a leading axis, `[num, ...]`.
        state: The policy's memory after the observations, for the next call, each `[num, *]`; empty without a memory.
    """

    actions: Any
    state: State


def policy_bytes(description: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> bytes:
    """Return the content of a policy's file, with its description and its tensors, `[*]` each."""
    from safetensors.torch import save

    about = {
        "format": _FORMAT,
        "version": _VERSION,
        "sha256": _ZEROS.decode(),
        **description,
        "versions": {"rl8x": __version__, "torch": torch.__version__},
    }
    # Copies, since weights in training are views of one vector.
    own = {name: value.detach().cpu().clone().contiguous() for name, value in tensors.items()}
    # One entry, so that equal policies make equal files: safetensors writes metadata entries in no fixed order.
    return _sealed(save(own, {"rl8x": json.dumps(about)}))


def read_policy(content: bytes, name: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Read the description and the tensors of a policy; nothing that the file names is imported or called."""
    from safetensors import SafetensorError
    from safetensors.torch import load

    try:
        tensors = load(content)
        # The header is JSON, preceded by its length.
        header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
        description = json.loads(header.get("__metadata__", {}).get("rl8x", "null"))
    except (SafetensorError, ValueError, RecursionError) as error:
        raise ValueError(f"{name} is no policy that rl8x saved, or damaged ({' '.join(str(error).split())}).") from None
    if not isinstance(description, dict) or description.get("format") != _FORMAT:
        raise ValueError(f"{name} holds tensors, but not those of a policy that rl8x saved.")
    version = description.get("version")
    if not isinstance(version, int) or version > _VERSION:
        raise ValueError(f"{name} has version {version!r} of the format; this rl8x reads up to {_VERSION}: update it.")
    if _sealed(content) != content:
        reason = "it does not have the digest that was written"
        raise ValueError(f"{name} is no policy that rl8x saved, or damaged ({reason}).")
    return description, tensors


def _sealed(content: bytes) -> bytes:
    """Return a file's content with its digest filled in: the SHA-256 of the content with zeros as the digest."""
    place = _DIGEST.search(content)
    if place is None:
        return b""
    before, after = content[: place.start(1)], content[place.end(1) :]
    return before + hashlib.sha256(before + _ZEROS + after).hexdigest().encode() + after


def check_finite(rows: Tree) -> None:
    """Raise if observations `[num, *obs]` are not finite: a decision on NaN looks like any other."""
    for name, part in flatten_tree("obs", rows).items():
        if part.is_floating_point() and not (finite := part.isfinite()).all():
            first = int((~finite).flatten(1).any(1).nonzero()[0])
            raise ValueError(f"`{name}` must be finite; got {part[first][~finite[first]][0].item()} in row {first}.")


def zeros(space: gymnasium.Space[Any], num: int, device: torch.device | None = None) -> Any:
    """Return observations of zeros, or of the first numbers of spaces that have a start, `[num, *obs]` or a dict."""
    if isinstance(space, gymnasium.spaces.Dict | gymnasium.spaces.Tuple):
        return {name: zeros(part, num, device) for name, part in named_parts(space)}
    lowest = torch.as_tensor(getattr(space, "start", 0), dtype=torch_dtype(space), device=device)
    return lowest.expand(num, *(space.shape or ())).clone()


def to_rows(space: gymnasium.Space[Any], obs: Any, device: torch.device | None = None) -> tuple[Any, bool]:
    """Return observations as tensors `[num, *obs]`, or a dict of them, and whether there was a leading axis."""
    rows: dict[str, Tensor] = {}
    batched = set()
    for path, leaf in leaves(space):
        name, part = "/".join(("obs", *path)), obs
        for key in path:
            part = {str(i): each for i, each in enumerate(part)} if isinstance(part, tuple | list) else part
            part = part.get(key) if isinstance(part, Mapping) else None
            if part is None:
                hint = ""
                if isinstance(space, gymnasium.spaces.Dict) and not isinstance(obs, Mapping | tuple):
                    hint = f" Give its parts by name: {', '.join(map(repr, space.spaces))}."
                raise ValueError(f"the observation has no `{name}`; it must be of {describe_space(leaf)}.{hint}")
        tensor = as_tensor(part, name=f"`{name}`")
        shape = tuple(leaf.shape or ())
        axes = tensor.dim() - len(shape)
        if axes not in (0, 1) or tuple(tensor.shape[axes:]) != shape:
            needed = f"{list(shape)}, or {['num', *shape]} for several".replace("'", "")
            raise ValueError(f"`{name}` must be shaped {needed}; got {list(tensor.shape)}.")
        batched.add(axes == 1)
        raw, tensor = tensor, tensor.to(device, torch_dtype(leaf))
        if not tensor.is_floating_point():
            _check_whole(raw, tensor, leaf, f"`{name}`")
        rows[name] = tensor if axes else tensor.unsqueeze(0)
    if len(batched) > 1 or len({len(row) for row in rows.values()}) > 1:
        given = ", ".join(f"`{name}` {list(row.shape)}" for name, row in rows.items())
        raise ValueError(f"all parts must be of one observation, or of the same number; got {given}.")
    return unflatten_tree("obs", rows), batched.pop()


def _check_whole(given: Tensor, whole: Tensor, space: gymnasium.Space[Any], name: str) -> None:
    """Raise if the conversion to the space's integer type has changed numbers, or if they are outside of the space."""
    if given.dtype != whole.dtype:  # images have their space's dtype, and need no check
        wrong = given.to(whole.device, torch.float64) != whole.double()
        if wrong.any():
            number = given.to(whole.device)[wrong][0].item()
            raise ValueError(f"{name} must be elements of {describe_space(space)}, whole numbers; got {number}.")
    if isinstance(space, gymnasium.spaces.Discrete | gymnasium.spaces.MultiDiscrete):
        check_elements(whole, space, name)


def to_elements(space: gymnasium.Space[Any], actions: Any, *, batched: bool) -> Any:
    """Return actions `[num, *action]` for an environment: arrays in the space's dicts, tuples and dtypes."""

    def converted(leaf: gymnasium.Space[Any], part: Tensor) -> Any:
        array = part.cpu().numpy().astype(leaf.dtype, copy=False)
        return array if batched else array[0]

    return element_of(space, actions, converted)
