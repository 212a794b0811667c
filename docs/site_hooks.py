"""What the site shows that is kept elsewhere: tables of options, pieces of other files, links that leave docs/.

`<!-- options: rl8x.algorithms.PPOConfig -->` becomes a table of the config's fields,
`<!-- parameters: rl8x.envs.CartPole -->` one of an environment's parameters, and `<!-- include: FILE -->` that file, or
with `<!-- include: FILE#Heading -->` what stands under one of its headings. A missing file is left out.
"""

from __future__ import annotations

import dataclasses
import importlib
import math
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).parents[1]
# The site's search shows guides before the reference, and what only explains last; by the beginning of the path.
BOOSTS = {"reference/": 0.02, "coming-from": 0.1, "architecture": 0.02, "benchmarks": 0.02, "changelog": 0.02}
# What readers type and no heading says.
SOUGHT = {
    "hyperparameters.md": ["learning rate schedule", "lr decay", "anneal", "normalize observations"],
    "conditions.md": ["early stopping", "patience", "no improvement"],
    "checkpoints.md": ["save best model", "load", "resume"],
    "tutorials/resuming.md": ["resume", "continue"],
    "playing.md": ["film", "video", "render", "record"],
    "algorithms.md": ["dropout"],
    "which-algorithm.md": ["choose", "which algorithm", "compare algorithms"],
    "not-learning.md": ["not learning", "not training", "debug", "troubleshooting", "unstable"],
    "scaling.md": ["distributed", "multi gpu"],
    "environments.md": ["gym", "curriculum"],
    "tutorials/randomization.md": ["domain randomization"],
}


def on_files(files: Any, config: Any) -> Any:
    """Add the measurements that pages link to."""
    for path in sorted((ROOT / "benchmarks" / "results").glob("*.json")):
        files.append(File.generated(config, f"results/{path.name}", abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Fill in what a page asks for, and say how its search finds it."""
    path = page.file.src_uri
    page.meta["search"] = {"boost": next((boost for start, boost in BOOSTS.items() if path.startswith(start)), 1.0)}
    page.meta["tags"] = SOUGHT.get(path, [])
    markdown = re.sub(r"<!-- include: (\S+?)(?:#(.+?))? -->", lambda match: included(match[1], match[2]), markdown)
    markdown = re.sub(r"<!-- options: (\S+) -->", lambda match: options_table(match[1]), markdown)
    markdown = re.sub(r"<!-- parameters: (\S+) -->", lambda match: parameters_table(match[1]), markdown)
    markdown = re.sub(r"^> \[!(\w+)\]\n((?:>.*\n?)+)", admonition, markdown, flags=re.MULTILINE)
    # In a table's code GitHub needs `\|`, of which Python-Markdown would show the backslash.
    markdown = re.sub(r"^\|.*", lambda row: re.sub(r"`[^`]*`", unescaped, row[0]), markdown, flags=re.MULTILINE)
    up = "../" * page.file.src_uri.count("/")
    return re.sub(r"\]\(((?:\.\./)+)([^)]+)\)", lambda match: f"]({link(match[1], match[2], up)})", markdown)


def admonition(alert: re.Match[str]) -> str:
    """Return one of GitHub's alerts, `> [!NOTE]` and its lines, as an admonition."""
    return f"!!! {alert[1].lower()}\n\n" + re.sub(r"^> ?", "    ", alert[2], flags=re.MULTILINE)


def unescaped(code: re.Match[str]) -> str:
    """Return a span of code with bare pipes, which end no cell there."""
    return code[0].replace("\\|", "|")


def included(path: str, heading: str | None) -> str:
    """Return a file's text below its title, or below a heading, with links as from docs/; code stands in a block."""
    if not (ROOT / path).exists():
        return ""
    text = (ROOT / path).read_text()
    if not path.endswith(".md"):
        language = {".py": "python", ".yaml": "yaml"}[Path(path).suffix]
        return f"```{language}\n{text}```"
    if heading:
        text = re.split(r"^## ", text.split(f"\n## {heading}\n")[1], flags=re.MULTILINE)[0]
    else:
        text = re.sub(r"\A# .*\n", "", text)
    if not path.startswith("docs/"):
        text = re.sub(r"\]\((?!\w+:|#|/)", "](../", text).replace("](../docs/", "](")
    return text


def link(ups: str, target: str, up: str) -> str:
    """Return where a link that leads out of docs/ goes on the site; others stay."""
    if len(ups) // 3 <= up.count("../"):
        return ups + target
    if target.startswith("benchmarks/results/"):
        return f"{up}results/{target.removeprefix('benchmarks/results/')}"
    if match := re.match(r"examples/(?:\w+/)?(\w+)\.(?:py|yaml)", target):
        return f"{up}examples.md#{match[1].replace('_', '-')}"
    if target.startswith("examples"):
        return f"{up}examples.md"
    return ups + target


def options_table(path: str) -> str:
    """Return a table of a config's options: name and kind, default, meaning and range."""
    module, name = path.rsplit(".", 1)
    rows = ["| option | default | meaning |", "|---|---|---|"]
    for field in dataclasses.fields(getattr(importlib.import_module(module), name)):
        meaning = f"{field.metadata.get('help', '')} {legal(field.metadata)}".strip()
        default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        cells = (f"`{field.name}`: `{field.type}`", f"`{default!r}`", meaning)
        rows.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(rows)


def parameters_table(path: str) -> str:
    """Return a table of what `env_config` may set of an environment: name, default, legal values and meaning."""
    module, name = path.rsplit(".", 1)
    rows = ["| parameter | default | legal | meaning |", "|---|---|---|---|"]
    for key, parameter in getattr(importlib.import_module(module), name).parameters.items():
        rows.append(f"| `{key}` | `{parameter.default:g}` | `{parameter.bounds}` | {parameter.description} |")
    return "\n".join(rows)


def legal(declared: Any) -> str:
    """Return the range or the choices of an option, as `option` declares them."""
    if declared.get("choices"):
        return f"One of {', '.join(f'`{choice!r}`' for choice in declared['choices'])}."
    bounds = [("above", -math.inf, ">"), ("low", -math.inf, "≥"), ("high", math.inf, "≤")]
    told = [f"{sign} {declared[key]:g}" for key, none, sign in bounds if declared.get(key, none) != none]
    return f"Range: {', '.join(told)}." if told else ""
