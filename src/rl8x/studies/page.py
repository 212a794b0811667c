"""A report or comparison as one HTML file that loads nothing: figures are embedded, for light and dark pages."""

from __future__ import annotations

import base64
import html
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from rl8x import drawing
from rl8x.disk import replace_synced
from rl8x.drawing import DARK, LIGHT, Drawing

if TYPE_CHECKING:
    import pandas

_STYLE: Final = """
:root { color-scheme: light dark; --text: #1f2328; --muted: #5b636d; --line: #d8dde3; --back: #ffffff; --panel: #f6f8fa;
  --accent: #0072b2; }
@media (prefers-color-scheme: dark) {
  :root { --text: #e3e6ea; --muted: #9aa4af; --line: #30363d; --back: #15181d; --panel: #1c2027; --accent: #56b4e9; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--back); color: var(--text); font: 16px/1.5 system-ui, sans-serif; }
main { max-width: 75rem; margin: 0 auto; padding: 2rem 1.25rem 4rem; }
h1 { font-size: 1.7rem; margin: 0 0 .25rem; } h2 { font-size: 1.2rem; margin: 2.5rem 0 .5rem; }
p, li { max-width: 50rem; } .lead, figcaption, .meanings { color: var(--muted); }
.wide { overflow-x: auto; } table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .92rem; }
th, td { padding: .4rem .8rem; border-bottom: 1px solid var(--line); text-align: right; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; position: sticky; left: 0; background: var(--back); }
thead th { border-bottom: 2px solid var(--text); font-weight: 600; } tbody tr:hover td { background: var(--panel); }
td small { display: block; color: var(--muted); font-size: .78rem; }
figure { margin: 1rem 0 0; } picture { display: block; overflow-x: auto; }
figure img { max-width: 100%; min-width: 36rem; height: auto; border-radius: 6px; }
figcaption { max-width: 50rem; font-size: .92rem; margin-top: .4rem; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .2rem 1rem; font-size: .92rem; } dd { margin: 0; }
details { margin-top: 2rem; } summary { cursor: pointer; color: var(--accent); }
pre { background: var(--panel); padding: 1rem; overflow-x: auto; border-radius: 6px; font-size: .82rem; }
"""


class Section(NamedTuple):
    """A part of a page: a heading and its HTML."""

    title: str
    body: str


def page(title: str, lead: str, sections: Sequence[Section]) -> str:
    """Write a page."""
    parts = "\n".join(f"<section><h2>{html.escape(each.title)}</h2>\n{each.body}</section>" for each in sections)
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{html.escape(title)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n<main>\n"
        f'<h1>{html.escape(title)}</h1>\n<p class="lead">{html.escape(lead)}</p>\n{parts}\n</main>\n</body>\n</html>\n'
    )


def image(figure: Drawing) -> Section:
    """Write a figure with its caption, drawn for light and for dark pages."""
    dark, light = (base64.b64encode(drawing.png(figure, theme)).decode("ascii") for theme in (DARK, LIGHT))
    body = (
        f'<figure><picture><source media="(prefers-color-scheme: dark)" srcset="data:image/png;base64,{dark}">'
        f'<img src="data:image/png;base64,{light}" alt="{html.escape(figure.title)}"></picture>\n'
        f"<figcaption>{html.escape(figure.caption)}</figcaption></figure>\n"
    )
    return Section(figure.title, body)


def table(rows: Sequence[Sequence[str]]) -> str:
    """Write a table whose first row has the headings; what a cell has in brackets at its end stands below it."""
    head = "".join(f"<th>{html.escape(cell)}</th>" for cell in rows[0])
    body = "\n".join("<tr>" + "".join(f"<td>{_cell(cell)}</td>" for cell in row) + "</tr>" for row in rows[1:])
    return f'<div class="wide"><table>\n<thead><tr>{head}</tr></thead>\n<tbody>\n{body}\n</tbody>\n</table></div>\n'


def _cell(text: str) -> str:
    value, bracket, rest = text.rpartition(" [")
    if bracket and rest.endswith("]"):
        return f"{html.escape(value)}<small>[{html.escape(rest)}</small>"
    return html.escape(text)


def paragraphs(sentences: Sequence[str]) -> str:
    """Write sentences as a list."""
    return "<ul>" + "".join(f"<li>{html.escape(each)}</li>" for each in sentences) + "</ul>\n" if sentences else ""


def meanings(named: dict[str, str]) -> str:
    """Write what names mean."""
    items = "".join(f"<dt>{html.escape(name)}</dt><dd>{html.escape(text)}</dd>" for name, text in named.items())
    return f'<dl class="meanings">{items}</dl>\n'


def folded(title: str, text: str) -> str:
    """Write a long text that is opened by a click."""
    return f"<details><summary>{html.escape(title)}</summary><pre>{html.escape(text)}</pre></details>\n"


def write_files(
    folder: Path, pages: Mapping[str, str], tables: Mapping[str, pandas.DataFrame], figures: Sequence[Drawing]
) -> list[Path]:
    """Write pages, tables as CSV, and figures as PNGs for a light page into a folder, which is made.

    Args:
        folder: The folder.
        pages: HTML by the name of its file.
        tables: Tables by the names of their files.
        figures: The figures, whose names their files have.

    Returns:
        The paths of the files, in this order.
    """
    folder.mkdir(parents=True, exist_ok=True)
    contents = {name: text.encode() for name, text in pages.items()}
    contents |= {name: table.to_csv(index=False).encode() for name, table in tables.items()}
    contents |= {f"{each.name}.png": drawing.png(each, LIGHT, titled=True) for each in figures}
    for name, data in contents.items():
        replace_synced(folder / name, data)
    return [folder / name for name in contents]
