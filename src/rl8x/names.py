"""Error messages for things that are chosen by name, or made with keyword arguments."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from rl8x.synonyms import called_here


def did_you_mean(
    name: object, legal: Iterable[str], *, most: int = 1, cutoff: float = 0.6, show: Callable[[str], str] = repr
) -> str:
    """Return " Did you mean 'this'?" with the nearest legal names, ignoring case; empty if none is near.

    At most `most` names, as `show` writes them; `cutoff` is that of `difflib.get_close_matches`. Of another library's
    name it is what that is here.
    """
    legal = list(legal)
    known = called_here(name, legal, show)
    if known:
        return known
    lowered = {each.lower(): each for each in reversed(legal)}  # of names that differ by case only, the first
    near = difflib.get_close_matches(str(name).lower(), lowered, n=most, cutoff=cutoff)
    return f" Did you mean {' or '.join(show(lowered[each]) for each in near)}?" if near else ""


def unknown_name(kind: str, name: object, legal: Collection[str], where: str = "") -> str:
    """Write the message that a name is unknown, with the nearest and all legal names."""
    return f"no {kind} {name!r}{where}.{did_you_mean(name, legal, most=2, cutoff=0.5)} There are {', '.join(legal)}."


def resolved_arguments(cls: type, config: Mapping[str, Any], *, num_positional: int) -> dict[str, Any]:
    """Return the keyword arguments of a class, defaults included, without those that the caller passes by position."""
    parameters = list(inspect.signature(cls).parameters.values())[num_positional:]
    defaults = {each.name: each.default for each in parameters if each.default is not each.empty}
    return defaults | dict(config)


def check_arguments(cls: type, config: Mapping[str, Any], config_name: str, *, num_positional: int) -> None:
    """Refuse keyword arguments that a class does not take.

    Args:
        cls: The class to be made.
        config: Its keyword arguments.
        config_name: What the user calls them.
        num_positional: How many leading arguments the caller supplies.

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
