"""Files of results, what they were measured on, and Markdown of them. The standard library alone."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import platform
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
Row = dict[str, Any]


def machine() -> Row:
    """Describe this machine, without its name."""
    model = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    return {
        "cpu": next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), model),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9, 1),
        "system": platform.system(),
        "python": platform.python_version(),
    }


def about(*packages: str) -> Row:
    """Say on what a result is measured: the machine and what else it has to do, the day, and versions of packages."""
    made = {"machine": machine(), "date": datetime.date.today().isoformat(), "load": round(os.getloadavg()[0], 1)}
    return {**made, "versions": {name: version(name) for name in packages}}


def version(distribution: str) -> str:
    """Return the version of an installed distribution, without a local build's mark."""
    try:
        return importlib.metadata.version(distribution).split("+")[0]
    except importlib.metadata.PackageNotFoundError:  # it may lie beside
        return getattr(sys.modules.get(distribution), "__version__", "absent")


def held(path: Path) -> Row:
    """Return what a file holds; nothing where it is not there."""
    return json.loads(path.read_text()) if path.exists() else {}


def save(path: Path, result: Mapping[str, Any] | str) -> None:
    """Write a result, or its text, beside its place and move it there, so that there never is half of one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_suffix(".writing")
    beside.write_text(result if isinstance(result, str) else json.dumps(result, indent=1) + "\n")
    beside.replace(path)


def table(header: str | Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table; a header may be one text, `a | b | c`."""
    heads = header.split(" | ") if isinstance(header, str) else header
    lines = ["| " + " | ".join(line) + " |" for line in (heads, *rows)]
    return "\n".join([lines[0], "|---" * len(heads) + "|", *lines[1:]])


def names(rows: Sequence[Row], key: str, **tags: Any) -> list[Any]:
    """Return the different values of a key in the rows with these tags, in the order of their first row."""
    return list(dict.fromkeys(select(rows, key, **tags)))


def select(rows: Sequence[Row], key: str, **tags: Any) -> list[Any]:
    """Return the values of a key in the rows with these tags."""
    return [row[key] for row in rows if key in row and row.items() >= tags.items()]


def short(rate: float) -> str:
    """Write a rate: 3.2M, 412k, 4.7k, 83."""
    for unit, size in (("M", 1e6), ("k", 1e3)):
        if rate >= size:
            return f"{rate / size:.{1 if rate < 10 * size else 0}f}{unit}"
    return f"{rate:.0f}"
