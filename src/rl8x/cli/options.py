"""Command-line options made of config fields, so that a hyperparameter is explained once, where it is declared."""

from __future__ import annotations

import dataclasses
import math
import os
import sys
from collections.abc import Iterable
from importlib.machinery import PathFinder
from typing import Any

import click

from rl8x.config import parse_value
from rl8x.importing import Trust, module_named


class GroupedCommand(click.Command):
    """A command whose help lists its options in groups."""

    groups: dict[str, str]  # option name -> group

    def __init__(self, *args: Any, groups: dict[str, str] | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.groups = dict(groups or {})

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write a section for each group, options without one last."""
        sections: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is not None and isinstance(parameter, click.Option):
                sections.setdefault(self.groups.get(parameter.name or "", "Other"), []).append(record)
        for title in (*dict.fromkeys(self.groups.values()), "Other"):
            if title in sections:
                with formatter.section(title):
                    formatter.write_dl(sections[title])


class FieldType(click.ParamType[Any]):
    """The values of a config field: read as YAML, except where the field is text; the config itself checks them."""

    def __init__(self, field: dataclasses.Field[Any]) -> None:
        kinds = str(field.type)
        self.text = kinds in ("str", "str | None")
        self.optional = kinds.endswith("None")
        self.name = _metavar(field)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Read one value."""
        if not isinstance(value, str):
            return value
        if self.optional and value.lower() in ("none", "null"):
            return _NONE
        if self.text:
            return value
        try:
            return parse_value(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)


trust_option = click.option(
    "--trust",
    is_flag=True,
    help="Import the modules that the run file or checkpoint names, those of the working directory too: their code "
    "runs. Names that are given here need no such word.",
)


class _None:
    """A None that was given, next to click's own for an option that was not."""


_NONE = _None()


def find_modules_here(trust: Trust) -> None:
    """Let names import modules of the working directory, where they are trusted; last, so that they hide nothing.

    Args:
        trust: Whether all names are trusted, or those that the user has given on the command line.
    """
    here = os.getcwd()
    if isinstance(trust, bool):
        wanted = trust
    else:
        tops = {module.partition(".")[0] for module in map(module_named, trust) if module is not None}
        wanted = any(PathFinder.find_spec(top, [here]) is not None for top in tops)
    if wanted and here not in sys.path:
        sys.path.append(here)


def given(options: dict[str, Any]) -> dict[str, Any]:
    """Return the options that were on the command line, `none` as None."""
    return {name: None if value is _NONE else value for name, value in options.items() if value is not None}


def field_options(fields: Iterable[dataclasses.Field[Any]]) -> list[click.Option]:
    """Make an option of each config field."""
    return [_option(field) for field in fields]


def _option(field: dataclasses.Field[Any]) -> click.Option:
    flag = "--" + field.name.replace("_", "-")
    text = _explanation(field)
    if str(field.type) == "bool":
        return click.Option([f"{flag}/--no-{flag[2:]}", field.name], default=None, help=text)
    return click.Option([flag, field.name], type=FieldType(field), default=None, help=text)


def _metavar(field: dataclasses.Field[Any]) -> str:
    choices = field.metadata.get("choices")
    if choices:
        return "|".join(str(choice).lower() for choice in choices)
    kinds = str(field.type)
    for prefix, name in (("int", "integer"), ("float", "number"), ("dict", "mapping"), ("list", "list")):
        if kinds.startswith(prefix):
            return name
    return "name" if "type[" in kinds else "text"


def _explanation(field: dataclasses.Field[Any]) -> str:
    notes = [f"default: {_shown(field)}"]
    declared = field.metadata
    low, high, above = declared.get("low", -math.inf), declared.get("high", math.inf), declared.get("above", -math.inf)
    notes += [f"> {above:g}"] if above > -math.inf else []
    notes += [f">= {low:g}"] if low > -math.inf else []
    notes += [f"<= {high:g}"] if high < math.inf else []
    return f"{declared.get('help', '')}  [{'; '.join(notes)}]"


def _shown(field: dataclasses.Field[Any]) -> str:
    if field.default is dataclasses.MISSING:
        return "{}"
    if isinstance(field.default, bool):
        return "yes" if field.default else "no"
    return "none" if field.default in (None, "") else str(field.default)
