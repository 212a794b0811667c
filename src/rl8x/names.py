"""Error messages for things that are chosen by name and made with keyword arguments."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any


def did_you_mean(
    name: object, legal: Iterable[str], *, most: int = 1, cutoff: float = 0.6, show: Callable[[str], str] = repr
) -> str:
    """Return " Did you mean 'this'?" with the nearest legal names, or nothing where none is near.

    Args:
        name: The unknown name.
        legal: The names that there are.
        most: How many to show at most.
        cutoff: How near a name must be, from 0 to 1; see `difflib.get_close_matches`.
        show: How a name is written.
    """
    near = difflib.get_close_matches(str(name), list(legal), n=most, cutoff=cutoff)
    return f" Did you mean {' or '.join(map(show, near))}?" if near else ""


def unknown_name(kind: str, name: object, legal: Collection[str], where: str = "") -> str:
    """Say that there is no such thing, which ones are near, and which there are."""
    hint = did_you_mean(str(name).lower(), legal, most=2, cutoff=0.5)
    return f"no {kind} {name!r}{where}.{hint} There are {', '.join(legal)}."


def resolved_arguments(cls: type, config: Mapping[str, Any], *, num_positional: int) -> dict[str, Any]:
    """Return the keyword arguments that a class is made with, its defaults where `config` says nothing.

    Args:
        cls: The class.
        config: Keyword arguments that were given.
        num_positional: How many leading arguments of the class the caller supplies.
    """
    parameters = list(inspect.signature(cls).parameters.values())[num_positional:]
    defaults = {each.name: each.default for each in parameters if each.default is not each.empty}
    return defaults | dict(config)


def check_arguments(cls: type, config: Mapping[str, Any], config_name: str, *, num_positional: int) -> None:
    """Refuse keyword arguments that a class does not take.

    Args:
        cls: The class to be made.
        config: Its keyword arguments.
        config_name: What the user calls them.
        num_positional: How many leading arguments of the class are supplied by the caller and not the user's to set.

    Raises:
        ValueError: At the first unknown one; the message names the nearest and the legal ones.
    """
    parameters = list(inspect.signature(cls).parameters.values())[num_positional:]
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return
    legal = [parameter.name for parameter in parameters if parameter.kind is not parameter.VAR_POSITIONAL]
    for name in config:
        if name not in legal:
            if not legal:
                raise ValueError(f"{cls.__name__} takes nothing in `{config_name}`; got {name!r}.")
            raise ValueError(unknown_name("argument", name, legal, f" of {cls.__name__} in `{config_name}`"))
