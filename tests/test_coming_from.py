"""What the pages for users of other libraries say of defaults is so."""

from __future__ import annotations

import ast
import dataclasses
import re

import pytest
from tests.pages import ROOT

from rl8x.config import algorithm_configs

PAGES = ("coming-from-sb3.md", "coming-from-cleanrl.md", "coming-from-rsl-rl.md")


def defaults(page: str) -> list[tuple[str, str, str]]:
    """Return option, algorithm and default of each cell in a column of defaults, which comes after that of rl8x."""
    found: list[tuple[str, str, str]] = []
    header: list[str] | None = None
    for line in (ROOT / "docs" / page).read_text().splitlines():
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        if not line.startswith("|"):
            header = None
        elif header is None:
            header = cells
        elif not set(line) <= {"|", "-"} and (at := header.index("rl8x") + 1) < len(header) and cells[at]:
            names, told = header[at].split(", "), cells[at].split(", ")
            option = re.findall(r"`(\w+)", cells[at - 1])[0]
            found += zip([option] * len(names), names, told * len(names) if len(told) == 1 else told, strict=True)
    return found


@pytest.mark.parametrize("page", PAGES)
def test_defaults_are_those_of_the_configs(page: str) -> None:
    """`-` is where an algorithm has no option of that name."""
    configs = algorithm_configs()
    for option, algorithm, told in defaults(page):
        fields = {field.name: field for field in dataclasses.fields(configs[algorithm])}
        if told == "-":
            assert option not in fields, f"{algorithm}: {option}"
        else:
            factory = fields[option].default_factory
            default = fields[option].default if factory is dataclasses.MISSING else factory()
            assert ast.literal_eval(told) == default, f"{algorithm}: {option}"
    assert len(defaults(page)) > 20
