"""`rl8x doctor`: prints installed versions, the machine, and missing packages by feature."""

from __future__ import annotations

import contextlib
import importlib.metadata
import itertools
import json
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import click

from rl8x import __version__, trusted
from rl8x.cli.errors import hidden
from rl8x.disk import exposure
from rl8x.output import counted, described, table
from rl8x.processes import python_process

# Purposes of the package's extras.
FEATURES: Final = {
    "video": "films of episodes",
    "export": "policies as ONNX programs",
    "studies": "searches by Optuna",
    "dask": "studies on a cluster of Dask",
    "ray": "studies on a cluster of Ray",
    "mujoco": "Gymnasium's MuJoCo tasks",
    "envpool": "EnvPool's tasks",
    "vmas": "VMAS's tasks",
    "pettingzoo": "PettingZoo's tasks of several agents",
    "brax": "Brax's tasks",
    "mjlab": "mjlab's tasks",
    "hdf5": "data sets in HDF5",
    "minari": "Minari's data sets",
    "docs": "building the documentation",
}
_FOR_DEVELOPERS: Final = ("dev", "test-all")
# Distributions whose module has another name.
_MODULES: Final = {"PyYAML": "yaml", "pillow": "PIL"}
_IMPORT_S: Final = 180.0
_COMPILER_S: Final = 60.0
_UNTRIED: Final = "not tried, as"
# Runs in a separate process, as a broken package may end it or hang.
_PROBE: Final = """
import importlib, json, sys
for name in sys.argv[1:]:
    try:
        importlib.import_module(name)
        error = None
    except BaseException as caught:
        error = f"{type(caught).__name__}: {caught}"
    print(json.dumps([name, error]), flush=True)
try:
    import torch
    gpus = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    machine = {"threads": torch.get_num_threads(), "cuda": torch.version.cuda or torch.version.hip}
    machine["gpus"] = [f"cuda:{index} {gpu.name}, {gpu.total_memory / 1e9:.0f} GB" for index, gpu in enumerate(gpus)]
    machine["mps"] = torch.backends.mps.is_available()
    print(json.dumps(["", machine]), flush=True)
except BaseException:
    pass
"""
_PROGRAM: Final = '#include <cmath>\n#include <vector>\nextern "C" double root(double x) { return std::sqrt(x); }\n'


@click.command("doctor")
def doctor() -> int:
    """Print versions, devices, threads, compiler, cache and store, and what is missing for which feature.

    The exit code is 1 where something is broken without which nothing trains.
    """
    broken: list[str] = []
    requirements = _requirements()
    essential = requirements.get("", [])
    probed, machine = _probe([_MODULES.get(each.name, each.name) for each in essential] or ["torch", "mlflow"])
    sections: dict[str, Callable[[], list[str]]] = {
        "rl8x": lambda: [f"{__version__}, in {Path(__file__).parents[1]}"],
        "python": lambda: [f"{platform.python_version()}, {sys.executable}", platform.platform()],
        "packages": lambda: _packages(essential, probed, broken),
        "devices": lambda: _devices(machine),
        "threads": lambda: [_threads(machine)],
        "compiler": _compiler,
        "cache": _cache,
        "trust": _trust,
        "tracking": lambda: _tracking(broken),
    }
    for name, lines in sections.items():
        for head, line in itertools.zip_longest([name], _lines_or_error(lines), fillvalue=""):
            click.echo(f"{head:<10}{line}")
    click.echo("\n".join(["", *_lines_or_error(lambda: _features(requirements)), ""]))
    for line in broken:
        click.echo(f"broken: {hidden(line)}")
    click.echo("something essential is broken" if broken else "everything essential works")
    return 1 if broken else 0


def _lines_or_error(lines: Callable[[], list[str]]) -> list[str]:
    """Return the lines of one section, or a line with its error, so that the other sections are still printed."""
    try:
        return [hidden(line) for line in lines()]
    except Exception as error:  # anything may fail on an unusual machine
        return [f"cannot be found out: {' '.join(hidden(described(error)).split()):.200}"]


# -- packages


def _requirements() -> dict[str, list[Any]]:
    """Return the requirements of the package by extra, "" for those without one; empty if they are not known."""
    with contextlib.suppress(Exception):  # a source tree on the path has no metadata
        extras = importlib.metadata.metadata("rl8x").get_all("Provides-Extra") or []
        return {extra: _required("rl8x", extra) for extra in ("", *extras)}
    return {}


def _required(package: str, extra: str) -> list[Any]:
    """Return an installed package's requirements for an extra alone; for "" those without an extra."""
    from packaging.requirements import Requirement

    def applies(requirement: Requirement, to: str) -> bool:
        return requirement.marker is None or requirement.marker.evaluate({"extra": to})

    needed = map(Requirement, importlib.metadata.requires(package) or [])
    return [each for each in needed if applies(each, extra) and not (extra and applies(each, ""))]


def _fault(requirement: Any) -> str | None:
    """Return what is wrong with a requirement: missing or of another version; None if it is met."""
    try:
        version = importlib.metadata.version(requirement.name)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"
    if not requirement.specifier.contains(version, prereleases=True):
        return f"{version}, but {requirement.specifier} is needed"
    for extra in requirement.extras:
        for needed in _required(requirement.name, extra):
            if fault := _fault(needed):
                return f"{needed.name} {fault}"
    return None


def _probe(modules: list[str]) -> tuple[dict[str, str | None], dict[str, Any]]:
    """Import modules in another process; return an error or None for each, and torch's facts about the machine."""
    process = python_process("-c", _PROBE, *modules, variables=os.environ | {"MLFLOW_DISABLE_TELEMETRY": "true"})
    try:
        done = subprocess.run(**process, capture_output=True, text=True, timeout=_IMPORT_S)
        output, end = done.stdout, f"ends Python (exit status {done.returncode})"
    except subprocess.TimeoutExpired as expired:
        output, end = (expired.stdout or b"").decode(), f"is not imported within {_IMPORT_S:.0f} s"
    answers: dict[str, Any] = {}
    for line in output.splitlines():
        with contextlib.suppress(ValueError, TypeError):  # a line that a package printed
            name, answer = json.loads(line)
            answers[name] = answer
    last, *untried = [name for name in modules if name not in answers] or [""]
    errors = answers | {last: end} | dict.fromkeys(untried, f"{_UNTRIED} {last} {end}")
    return {name: errors[name] for name in modules}, answers.get("", {})


def _packages(requirements: list[Any], probed: dict[str, str | None], broken: list[str]) -> list[str]:
    """Return a line on each essential package's version; append those that do not work to `broken`."""
    if not requirements:
        broken += [f"{name}: {error}; pip install {name}" for name, error in probed.items() if error is not None]
        lines = [f"{name} {'works' if error is None else error}" for name, error in probed.items()]
        return [*lines, "rl8x is not installed, only found: what else it needs is not known"]
    lines = []
    for requirement in requirements:
        error = _fault(requirement) or probed.get(_MODULES.get(requirement.name, requirement.name))
        if error is None:
            lines.append(f"{requirement.name} {importlib.metadata.version(requirement.name)}")
        else:
            lines.append(f"{requirement.name}: {' '.join(error.split()):.200}")
            broken += [] if error.startswith(_UNTRIED) else [f"{lines[-1]}; {_install([requirement])}"]
    return lines


def _install(requirements: list[Any]) -> str:
    """Return the command that installs requirements."""
    wanted = (str(requirement).partition(";")[0].strip() for requirement in requirements)
    return f"pip install {' '.join(map(shlex.quote, wanted))}"


def _features(requirements: dict[str, list[Any]]) -> list[str]:
    """Return a table of the extras: the purpose of each, and whether it is installed or how to install it."""
    rows = [("extra", "for", "")]
    for extra in (extra for extra in requirements if extra not in ("", *_FOR_DEVELOPERS)):
        missing = [requirement for requirement in requirements[extra] if _fault(requirement) is not None]
        rows.append((extra, FEATURES.get(extra, ""), _install(missing) if missing else "installed"))
    return table(rows).splitlines() if len(rows) > 1 else ["what is missing for which feature is not known"]


# -- the machine


def _devices(machine: dict[str, Any]) -> list[str]:
    import psutil

    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    memory = psutil.virtual_memory()
    free = f"{memory.total / 1e9:.1f} GB memory, {memory.available / 1e9:.1f} free"
    lines = [f"cpu, {allowed} of {os.cpu_count()} processors ({platform.machine()}), {free}", *machine.get("gpus", [])]
    if machine and not machine["gpus"]:
        lines.append("no GPU that torch can use" + ("" if machine["cuda"] else ": this build of torch is for CPUs"))
    return lines + ["mps (Apple)"] * bool(machine.get("mps"))


def _threads(machine: dict[str, Any]) -> str:
    """Return a line on the number of torch's threads, and the variables that set it."""
    set_by = [f"{name}={os.environ[name]}" for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS") if name in os.environ]
    said = f"torch takes {machine['threads']}" if machine else "torch does not say"
    return f"{said}{', by ' * bool(set_by)}{', '.join(set_by)}; num_threads sets another number"


def _compiler() -> list[str]:
    """Compile a shared library like a program of `execution="compile"`; return a line on the result."""
    name = os.environ.get("CXX") or "g++"
    words = [*shlex.split(name), "-O2", "-shared", "-fPIC", "-std=c++17"]
    lacking = 'without it runs are eager and execution="compile" is refused'
    if shutil.which(words[0]) is None:
        return [f"{words[0]} is not there: {lacking}; install g++ (Debian: apt install g++), or set CXX"]
    with tempfile.TemporaryDirectory(prefix="rl8x-doctor-") as folder:
        source = Path(folder) / "program.cpp"
        source.write_text(_PROGRAM)
        command = [*words, str(source), "-o", str(source.with_suffix(".so"))]
        done = subprocess.run(command, capture_output=True, text=True, timeout=_COMPILER_S, cwd=folder)
    version = subprocess.run([words[0], "--version"], capture_output=True, text=True, timeout=_COMPILER_S).stdout
    first = (version.splitlines() or [words[0]])[0]
    if done.returncode:
        return [f"{first} does not compile ({' '.join(done.stderr.split()):.120}): {lacking}"]
    return [f'{first}, for execution="compile" on the CPU']


def _cache() -> list[str]:
    """Return a line on the cache of compiled programs, read without importing torch."""
    import platformdirs

    folder = Path(os.environ.get("RL8X_CACHE_DIR") or platformdirs.user_cache_dir("rl8x", appauthor=False))
    if not folder.is_dir():
        is_file = os.path.lexists(folder)
        return [f"{folder}, {'which is no folder: each run compiles for itself' if is_file else 'not made yet'}"]
    files = [path for path in folder.iterdir() if path.is_file()]
    size = sum(path.stat().st_size for path in files) / 1e6
    programs = sum(path.suffix == ".so" for path in files)
    why = exposure(folder) or (None if os.access(folder, os.W_OK | os.X_OK) else "it is not writable")
    note = "" if why is None else f", not used, since {why}: each run compiles for itself"
    return [f"{folder}, {counted(programs, 'program')}, {size:.1f} MB{note} (`rl8x cache`)"]


def _trust() -> list[str]:
    """Return lines on the modules that the user has trusted, and the file that lists them."""
    known, why = trusted.entries(), trusted.unsafe()
    if why is not None:
        return [f"{trusted.memory()} is not used, since {why}: files that name your modules need --trust each time"]
    first = f"{counted(len(known), 'module')}, by {trusted.memory()}, which may be deleted"
    changed = ", which has changed, so that rl8x asks again"
    return [first, *(f"{path}{'' if trusted.is_intact(entry) else changed}" for path, entry in known.items())]


def _tracking(broken: list[str]) -> list[str]:
    """Return lines on the store of runs and the number of unsent runs; append an unusable store to `broken`."""
    from rl8x.tracking import MLflowTracker, TrackingError
    from rl8x.tracking.journal import is_sent
    from rl8x.tracking.location import locate, mlruns_dir
    from rl8x.tracking.runs import journal_folders

    try:
        location = locate()
        MLflowTracker().check()
    except TrackingError as error:
        broken.append(f"tracking: {error}")
        return [str(error)]
    database, note = location.database, ""
    if database is not None:
        size = f", {database.stat().st_size / 1e6:.1f} MB" if database.exists() else ", not made yet"
        there = next(path for path in (database, *database.parents) if path.exists())
        note = f"{size}, {shutil.disk_usage(there).free / 1e9:.1f} GB free on its disk"
    waiting = sum(not is_sent(folder) for folder in journal_folders(mlruns_dir() / "spool"))
    unsent = [f"runs that have not arrived, or go on: {waiting} (`rl8x sync`)"] if waiting else []
    return [f"{location.shown}{note}", *unsent]
