"""Copies of lists, dicts and arrays: such as a config keeps, which nobody can change, and such as it hands out."""

from __future__ import annotations

from typing import Any, NoReturn

import numpy as np
from torch import Tensor


def _refuse(self: object, *args: object, **options: object) -> NoReturn:
    raise TypeError(
        "what a config holds cannot be changed: change a copy.deepcopy() of this, and make another config of it by "
        "dataclasses.replace(config, ...)."
    )


class FrozenDict(dict[Any, Any]):
    """A dict that cannot be changed; a copy of it is a plain one."""

    __setitem__ = __delitem__ = __ior__ = clear = pop = popitem = setdefault = update = _refuse

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (dict(self),)


class FrozenList(list[Any]):
    """A list that cannot be changed; a copy of it is a plain one."""

    __setitem__ = __delitem__ = __iadd__ = __imul__ = _refuse
    append = clear = extend = insert = pop = remove = reverse = sort = _refuse

    def __reduce__(self) -> tuple[Any, ...]:
        return list, (list(self),)


def frozen(value: Any) -> Any:
    """Copy lists, dicts, arrays and tensors within each other, as such that cannot be changed (but for tensors).

    Whatever else there is, such as a module or a function, stays the same object.
    """
    if isinstance(value, np.ndarray):
        value = value.copy()
        value.flags.writeable = False
        return value
    return _copied(value, FrozenDict, FrozenList)


def thawed(value: Any) -> Any:
    """Copy lists, dicts, arrays and tensors within each other, as plain ones that may be changed."""
    return value.copy() if isinstance(value, np.ndarray) else _copied(value, dict, list)


def _copied(value: Any, dict_class: type[dict[Any, Any]], list_class: type[list[Any]]) -> Any:
    again = frozen if dict_class is FrozenDict else thawed
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return dict_class({key: again(item) for key, item in value.items()})
    if isinstance(value, list):
        return list_class(map(again, value))
    if isinstance(value, set):
        return set(value)
    if isinstance(value, tuple):
        items = tuple(map(again, value))
        # Of one class with fields, such as torch.Size, only what has something to copy becomes a plain tuple.
        return value if all(item is own for item, own in zip(items, value, strict=True)) else items
    return value
