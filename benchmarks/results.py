"""Files of results, and the machine they are of. The standard library alone: all measured processes can import this."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"


def machine() -> dict[str, Any]:
    """Describe this machine, without its name."""
    model = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    names = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    return {
        "cpu": next((line.split(":", 1)[1].strip() for line in names if line.startswith("model name")), model),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9, 1),
        "system": platform.system(),
        "python": platform.python_version(),
    }


def version(distribution: str) -> str:
    """Return the version of an installed distribution, without a local build's mark."""
    try:
        return importlib.metadata.version(distribution).split("+")[0]
    except importlib.metadata.PackageNotFoundError:
        return "absent"


def held(path: Path) -> dict[str, Any]:
    """Return what a file holds; nothing where it is not there."""
    return json.loads(path.read_text()) if path.exists() else {}


def save(path: Path, result: Mapping[str, Any] | str) -> None:
    """Write a result, or its text, beside its place and move it there, so that there never is half of one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_suffix(".writing")
    beside.write_text(result if isinstance(result, str) else json.dumps(result, indent=1) + "\n")
    beside.replace(path)
