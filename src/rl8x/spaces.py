"""Functions of Gymnasium's spaces: dtypes, masks, readable names, plain data, and trees of tensors."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Final, TypeAlias

import gymnasium.spaces as spaces
import numpy as np
import torch
from torch import Tensor

DTYPES: dict[str, torch.dtype] = {
    name: getattr(torch, name)
    for name in ("float16", "float32", "float64", "int8", "int16", "int32", "int64", "uint8", "bool")
}
WIDER: Final = {"uint16": np.int32, "uint32": np.int64}
"""For types of whole numbers that torch hardly supports, a type that holds all their numbers."""
LARGEST_BOUND: Final = 1e9
"""Bounds of actions from this one on count as none: the squared norm of a critic's gradient grows with their fourth
power, which float32 cannot hold."""
# An observation of a GB; larger ones come from damaged files.
_MAX_NUMBERS: Final = 2**28
SUPPORTED = (spaces.Box, spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary, spaces.Dict, spaces.Tuple)
Nested: TypeAlias = "spaces.Dict | spaces.Tuple[Any]"
"""Spaces with parts. In rl8x their elements are dicts of tensors; those of a `Tuple` have the keys "0", "1", ..."""


class AsymmetricDict(spaces.Dict):
    """A `Dict` of observations with parts that only a critic sees; it is equal to a `Dict` of the same parts.

    Args:
        parts: The parts by name.
        critic_only: Names of the parts that only a critic sees.

    Raises:
        ValueError: If there is no part of such a name.

    Source: Pinto et al. 2018, arXiv:1710.06542.
    """

    def __init__(self, parts: Mapping[str, spaces.Space[Any]], *, critic_only: Sequence[str]) -> None:
        super().__init__(dict(parts))
        self.critic_only = tuple(critic_only)
        for name in self.critic_only:
            if name not in parts:
                raise ValueError(f"`critic_only` names parts: {', '.join(parts)}; got {name!r}.")

    def __repr__(self) -> str:
        """Show the parts, and the names of those for the critic alone."""
        return f"{super().__repr__()}, critic only: {', '.join(self.critic_only)}"


def critic_only(space: spaces.Space[Any]) -> tuple[str, ...]:
    """Return the names of the parts of an observation that only a critic sees; empty for most spaces."""
    return space.critic_only if isinstance(space, AsymmetricDict) else ()


def without_parts(space: spaces.Space[Any], names: Collection[str]) -> spaces.Space[Any]:
    """Return a `Dict` without some of its parts; a space that has none of them is returned unchanged."""
    if not isinstance(space, spaces.Dict) or not any(name in space.spaces for name in names):
        return space
    return spaces.Dict({name: part for name, part in space.spaces.items() if name not in names})


def named_parts(space: Nested) -> list[tuple[str, spaces.Space[Any]]]:
    """Return the parts of a `Dict` or `Tuple` space with their keys; a `Tuple`'s are "0", "1", ...

    Those of a `Dict` are sorted by key, as two of other orders are equal to Gymnasium: networks fit both.
    """
    if isinstance(space, spaces.Dict):
        return sorted(space.spaces.items(), key=lambda part: str(part[0]))
    return [(str(i), part) for i, part in enumerate(space.spaces)]


def leaves(space: spaces.Space[Any], path: tuple[str, ...] = ()) -> list[tuple[tuple[str, ...], spaces.Space[Any]]]:
    """Return the innermost parts of a space with their paths of keys; a space without parts has the path ()."""
    if not isinstance(space, spaces.Dict | spaces.Tuple):
        return [(path, space)]
    return [leaf for key, part in named_parts(space) for leaf in leaves(part, (*path, key))]


def map_spaces(space: spaces.Space[Any], function: Callable[[spaces.Space[Any]], spaces.Space[Any]]) -> Any:
    """Return the space with a function applied to every part that has no parts itself."""
    if isinstance(space, spaces.Dict):
        return spaces.Dict({key: map_spaces(part, function) for key, part in space.spaces.items()})
    if isinstance(space, spaces.Tuple):
        return spaces.Tuple([map_spaces(part, function) for part in space.spaces])
    return function(space)


def in_tensor_types(space: spaces.Space[Any]) -> spaces.Space[Any]:
    """Return the space with float32 in place of float64 and of floats in another byte order, and types as `WIDER`."""
    dtype = np.dtype(space.dtype)
    if isinstance(space, spaces.Box) and dtype.name in WIDER:
        return spaces.Box(space.low, space.high, space.shape, WIDER[dtype.name])
    if isinstance(space, spaces.Box) and dtype.kind == "f" and not (dtype.isnative and dtype.itemsize <= 4):
        with np.errstate(over="ignore"):  # the largest bounds of float64 become infinite
            return spaces.Box(space.low.astype(np.float32), space.high.astype(np.float32), space.shape, np.float32)
    return space


def check_bounds(space: Any, owner: str, instead: str) -> None:
    """Raise a `ValueError` unless float actions have bounds below `LARGEST_BOUND`, with low < high everywhere."""
    largest = min(LARGEST_BOUND, float(np.finfo(space.dtype).max))
    sizes = np.maximum(np.abs(space.low), np.abs(space.high))
    if not (sizes < largest).all():
        raise ValueError(
            f"{owner} needs actions with finite bounds; got {describe_space(space)} with bounds up to {sizes.max():g}, "
            "which are as good as none. Give the environment's Box the largest actions that make sense (Gymnasium: "
            f"RescaleAction), or use {instead}."
        )
    if not (space.low < space.high).all():
        raise ValueError(
            f"{owner} needs actions that can be chosen, with low < high in each dimension; got {space.low.tolist()} "
            f"and {space.high.tolist()}. Leave out what is fixed, or use {instead}."
        )


def are_alike(one: spaces.Space[Any], other: spaces.Space[Any]) -> bool:
    """Whether a policy for one space fits the other: they are equal, except that precisions of floats may differ."""
    return bool(map_spaces(one, in_tensor_types) == map_spaces(other, in_tensor_types))


def torch_dtype(space: spaces.Space[Any]) -> torch.dtype:
    """Return the dtype of a tensor of the space's elements."""
    name = _dtype_name(space.dtype) if space.dtype is not None else "none"
    if name not in DTYPES:
        raise ValueError(f"{describe_space(space)} has no dtype for a tensor; needs one of {', '.join(DTYPES)}.")
    return DTYPES[name]


@functools.lru_cache
def _dtype_name(dtype: Any) -> str:
    return str(np.dtype(dtype).name)  # takes longer than to compare shapes


def describe_space(space: object) -> str:
    """Name a space in a few characters, for example `Box([4], float32)` or `Discrete(2)`."""
    if isinstance(space, spaces.Dict):
        return "Dict(" + ", ".join(f"{key}: {describe_space(value)}" for key, value in space.spaces.items()) + ")"
    if isinstance(space, spaces.Tuple):
        return "Tuple(" + ", ".join(map(describe_space, space.spaces)) + ")"
    if isinstance(space, spaces.Discrete):
        return f"Discrete({space.n})" if space.start == 0 else f"Discrete({space.n}, start={space.start})"
    if isinstance(space, spaces.Box | spaces.MultiDiscrete | spaces.MultiBinary):
        return f"{type(space).__name__}({list(space.shape)}, {np.dtype(space.dtype).name})"
    return f"{type(space).__name__}" if isinstance(space, spaces.Space) else repr(space)


def check_supported(space: object, name: str) -> None:
    """Raise a `ValueError` unless rl8x supports a space, and its elements have at least one number."""
    _check_parts(space, name)
    if isinstance(space, spaces.Space) and not any(math.prod(leaf.shape or ()) for _, leaf in leaves(space)):
        raise ValueError(f"{name} must have at least one number; got {describe_space(space)}.")


def _check_parts(space: object, name: str) -> None:
    if isinstance(space, spaces.Dict | spaces.Tuple):
        for key, part in named_parts(space):
            # Flat names of tensors are the keys joined by slashes.
            if not isinstance(key, str) or "/" in key:
                raise ValueError(f"{name} must have texts without '/' as keys; got {key!r}. Rename that part.")
            _check_parts(part, f"{name}[{key!r}]" if isinstance(space, spaces.Dict) else f"{name}[{key}]")
        if not len(space.spaces):
            raise ValueError(f"{name} must have at least one part; got {describe_space(space)}.")
    elif isinstance(space, SUPPORTED):
        torch_dtype(space)
    else:
        kinds = ", ".join(cls.__name__ for cls in SUPPORTED)
        raise ValueError(f"{name} must be a gymnasium.spaces.{{{kinds}}}; got {describe_space(space)}.")


def _bounds(space: spaces.Space[Any]) -> tuple[Any, Any]:
    """Return the lowest and the highest numbers of a space without parts, scalars or `[*shape]`."""
    if isinstance(space, spaces.Box):
        return space.low, space.high
    if isinstance(space, spaces.Discrete | spaces.MultiDiscrete):
        return space.start, space.start + (space.n if isinstance(space, spaces.Discrete) else space.nvec) - 1
    return np.zeros(space.shape or ()), np.ones(space.shape or ())


def check_elements(actions: Tensor, space: spaces.Discrete | spaces.MultiDiscrete, owner: str) -> None:
    """Raise, on the CPU only, unless whole numbers, `[*, *shape]`, are elements of a space."""
    if actions.device.type == "cpu":
        low, high = map(torch.as_tensor, _bounds(space))
        wrong = ~((actions >= low) & (actions <= high))
        if wrong.any():
            raise ValueError(f"{owner} must be elements of {describe_space(space)}; got {actions[wrong][0].item()}.")


def check_mask(mask: spaces.Space[Any], actions: spaces.Space[Any], name: str) -> None:
    """Raise unless an action mask fits the actions: a flag for each action of each choice in turn, or for each bit."""
    if isinstance(actions, spaces.Dict | spaces.Tuple):
        parts = dict(named_parts(actions))
        if not isinstance(mask, spaces.Dict | spaces.Tuple):
            some = ", ".join(parts)
            raise ValueError(f"{name!r} must be a Dict with masks for some of {some}; got {describe_space(mask)}.")
        for key, part in named_parts(mask):
            if key not in parts:
                raise ValueError(f"no part {key!r} of the action space in {name!r}. There are {', '.join(parts)}.")
            check_mask(part, parts[key], f"{name}/{key}")
        return
    if not isinstance(actions, spaces.Discrete | spaces.MultiDiscrete | spaces.MultiBinary):
        raise ValueError(f"{name!r} needs discrete actions; got {describe_space(actions)}.")
    width = spaces.flatdim(actions)
    if mask.shape != (width,):
        raise ValueError(f"{name!r} must be shaped [{width}], one flag an action; got {describe_space(mask)}.")


def only_legal(actions: Any, mask: Any, space: spaces.Space[Any]) -> Any:
    """Replace actions that a mask forbids by the first legal one, bits by 0; where it allows none, all are legal."""
    if isinstance(space, spaces.Dict | spaces.Tuple):
        parts = dict(named_parts(space))
        return {key: only_legal(part, mask[key], parts[key]) if key in mask else part for key, part in actions.items()}
    if isinstance(space, spaces.MultiBinary):
        return actions * mask.reshape(actions.shape).to(actions.dtype)
    if not isinstance(space, spaces.Discrete | spaces.MultiDiscrete):
        return actions
    sizes = [int(space.n)] if isinstance(space, spaces.Discrete) else space.nvec.reshape(-1).tolist()
    start = torch.as_tensor(np.asarray(space.start).reshape(-1), device=actions.device)
    chosen = actions.reshape(len(actions), -1) - start
    columns = []
    for taken, flags in zip(chosen.unbind(1), mask.bool().split(sizes, -1), strict=True):
        allowed = flags.gather(1, taken.long().unsqueeze(1)).squeeze(1) | ~flags.any(1)
        columns.append(torch.where(allowed, taken, flags.int().argmax(1)))
    return (torch.stack(columns, 1) + start).reshape(actions.shape).to(actions.dtype)


def tree_of(element: Any, convert: Callable[[Any], Tensor], space: spaces.Space[Any] | None = None) -> Any:
    """Convert nested dicts and tuples to nested dicts of tensors, `[num, *shape]` each, with keys "0", "1", ..."""
    # A space decides what has parts: simulators may also return a `Tuple` as a list, and a `Box` as a tuple of numbers.
    if not (isinstance(element, Mapping | tuple) if space is None else isinstance(space, spaces.Dict | spaces.Tuple)):
        return convert(element)
    by_name = element if isinstance(element, Mapping) else {str(i): part for i, part in enumerate(element)}
    parts: Any = dict.fromkeys(by_name) if space is None else dict(named_parts(space))  # type: ignore[arg-type]
    return {key: tree_of(by_name[key], convert, part) for key, part in parts.items()}


def element_of(space: spaces.Space[Any], tree: Any, convert: Callable[[spaces.Space[Any], Tensor], Any]) -> Any:
    """Invert `tree_of`: return dicts of `[num, *space.shape]` tensors as the dicts and tuples of a space, converted."""
    if not isinstance(space, spaces.Dict | spaces.Tuple):
        return convert(space, tree)
    parts = {key: element_of(part, tree[key], convert) for key, part in named_parts(space)}
    return {key: parts[key] for key in space.spaces} if isinstance(space, spaces.Dict) else tuple(parts.values())


def in_dtypes(space: spaces.Space[Any], tree: Any) -> Any:
    """Return the parts of a space of a tree of tensors, `[num, *shape]` each, in the dtypes of the space's elements."""
    if isinstance(space, spaces.Dict | spaces.Tuple):
        return {key: in_dtypes(part, tree[key]) for key, part in named_parts(space)}
    return tree.to(torch_dtype(space))


def outside(obs: Any, space: spaces.Space[Any], name: str = "obs") -> list[str]:
    """Return a text for each part of an observation with numbers beyond its `Box`'s bounds by more than rounding."""
    if isinstance(space, spaces.Dict | spaces.Tuple):
        return [text for key, part in named_parts(space) for text in outside(obs[key], part, f"{name}[{key!r}]")]
    if not isinstance(space, spaces.Box) or not space.shape:
        return []
    far = far_outside(obs, space)
    if not bool(far.any()):
        return []
    bounds = f"{space.low.min():g} to {space.high.max():g}"
    return [f"{name} has {obs[far][0].item():g}, out of the bounds of its Box ({bounds})"]


def far_outside(numbers: Tensor, space: spaces.Box) -> Tensor:
    """Return which numbers, `[..., *shape]`, are out of the bounds of a `Box` by more than rounding."""
    low, high = (torch.from_numpy(bound.astype(np.float64)).to(numbers.device) for bound in (space.low, space.high))
    numbers = numbers.double()
    return (numbers < low - 1e-3 * low.abs().clamp(min=1)) | (numbers > high + 1e-3 * high.abs().clamp(min=1))


def where_rows(mask: Tensor, yes: Any, no: Any) -> Any:
    """Choose rows of `[num, ...]` tensors, or dicts of them: from `yes` if `mask`, `[num]` bool, is True, else `no`."""
    if isinstance(no, dict):
        return {key: where_rows(mask, yes[key], value) for key, value in no.items()}
    return torch.where(mask.view(-1, *(1,) * (no.ndim - 1)), yes, no)


# -- as plain data

# The arguments that make the spaces without parts, and what None is in a bound.
_ARGUMENTS: Final[Mapping[str, tuple[str, ...]]] = {
    "Box": ("low", "high", "shape", "dtype"),
    "Discrete": ("n", "start", "dtype"),
    "MultiDiscrete": ("nvec", "start", "dtype"),
    "MultiBinary": ("n",),
}
_INFINITE: Final = {"low": -np.inf, "high": np.inf}


def space_to_plain(space: spaces.Space[Any]) -> dict[str, Any]:
    """Return a space as plain data, from which `space_from_plain` makes an equal one."""
    check_supported(space, "a space")
    return _to_plain(space)


def _to_plain(space: spaces.Space[Any]) -> dict[str, Any]:
    """Return a space, or a part of one, as plain data; it may have no numbers."""
    if isinstance(space, spaces.Dict | spaces.Tuple):
        hidden = {"critic_only": list(space.critic_only)} if isinstance(space, AsymmetricDict) else {}
        parts = [[key, _to_plain(part)] for key, part in named_parts(space)]
        return {"kind": type(space).__name__, "parts": parts, **hidden}
    kind = next(kind for kind in _ARGUMENTS if isinstance(space, getattr(spaces, kind)))
    return {"kind": kind, **{name: _plain_argument(name, getattr(space, name)) for name in _ARGUMENTS[kind]}}


def _plain_argument(name: str, value: Any) -> Any:
    """Return an argument of a space as plain data; a bound that is the same everywhere is one number."""
    if name == "dtype":
        return np.dtype(value).name
    value = np.asarray(value)
    if name in _INFINITE:
        first = value.flat[0] if value.size else 0
        value = np.asarray(first) if (value == first).all() else value
        value = np.where(np.isfinite(value), value, None)  # JSON has no infinite numbers
    return value.tolist()


def space_from_plain(plain: Mapping[str, Any]) -> spaces.Space[Any]:
    """Invert `space_to_plain`: return the space for its plain data."""
    kind = plain["kind"]
    if kind in ("Dict", "AsymmetricDict"):
        parts = {key: space_from_plain(part) for key, part in plain["parts"]}
        made = spaces.Dict(parts) if kind == "Dict" else AsymmetricDict(parts, critic_only=plain["critic_only"])
        _check_parts(made, "a space")
        return made
    if kind == "Tuple":
        return spaces.Tuple([space_from_plain(part) for _, part in plain["parts"]])
    if kind not in _ARGUMENTS:
        raise ValueError(f"no space of the kind {kind!r}")
    arguments = {name: plain[name] for name in _ARGUMENTS[kind]}
    if "dtype" in arguments:
        arguments["dtype"] = np.dtype(plain["dtype"]).type
    if math.prod(plain.get("shape", ())) > _MAX_NUMBERS:
        raise ValueError(f"a Box has at most {_MAX_NUMBERS:,} numbers; got {plain['shape']}")
    for name in _INFINITE.keys() & arguments.keys():
        bound = np.array(plain[name], plain["dtype"])
        if bound.dtype.kind == "f":
            bound[np.isnan(bound)] = _INFINITE[name]  # it was None
        arguments[name] = np.broadcast_to(bound, plain["shape"]).copy()
    space: spaces.Space[Any] = getattr(spaces, kind)(**arguments)
    return space


def as_elements(name: str, space: spaces.Space[Any], rows: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return rows `[rows, ...]`, by flat names that begin with `name`, in the dtypes of a space's elements."""
    found = {}
    for path, leaf in leaves(space):
        part = "/".join((name, *path))
        if part not in rows:
            raise ValueError(f"a data set for {describe_space(space)} needs `{part}`; there are {', '.join(rows)}.")
        tensor = rows[part]
        shape, is_float = tuple(leaf.shape or ()), isinstance(leaf, spaces.Box) and torch_dtype(leaf).is_floating_point
        if tuple(tensor.shape[1:]) != shape or tensor.is_floating_point() != is_float:
            kind = f"{tensor.dtype} {list(tensor.shape[1:])}"
            raise ValueError(f"`{part}` must be elements of {describe_space(leaf)}; got {kind} in each row.")
        found[part] = tensor if is_float else _whole_numbers(part, leaf, tensor)
    return found


def _whole_numbers(part: str, leaf: spaces.Space[Any], tensor: Tensor) -> Tensor:
    """Return whole numbers `[rows, *leaf.shape]` in the dtype that rl8x uses; raise if any is not in the space."""
    if isinstance(leaf, spaces.Box) and tensor.dtype == torch_dtype(leaf):
        return tensor
    tensor = tensor.long() if isinstance(leaf, spaces.Discrete | spaces.MultiDiscrete) else tensor
    # Extremes over all rows, since a flag for each number would take as much memory as the images.
    ends = [end.reshape(-1).tolist() for end in (tensor.amin(0), tensor.amax(0))]
    bounds = [np.asarray(bound).reshape(-1).tolist() for bound in _bounds(leaf)]
    for least, most, first, last in zip(*ends, *bounds, strict=True):
        if least < first or most > last:
            allowed, found = f"from {int(first)} to {int(last)}", f"{int(least)} to {int(most)}"
            raise ValueError(f"`{part}` must be {allowed}, as {describe_space(leaf)} says; got {found}.")
    return tensor.to(torch_dtype(leaf)) if isinstance(leaf, spaces.Box) else tensor
