"""`rl8x bench`: how fast the user's own problem trains in each execution mode of the device."""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import click
import torch

from rl8x._version import __version__
from rl8x.algorithms import PPOConfig
from rl8x.algorithms.hyperparameters import resolve_device
from rl8x.cli.bench_table import render, short, summarize
from rl8x.cli.errors import UserError, users_mistakes
from rl8x.cli.options import GroupedCommand, field_options, given, trust_option
from rl8x.cli.train import read_run
from rl8x.config import RunConfig

# What each kind of device has
MODES: Final = {"cpu": ("eager", "compile"), "cuda": ("eager", "compile", "graph")}
PRECISIONS: Final = {"cpu": ("fp32", "bf16"), "cuda": ("fp32", "tf32", "bf16")}
# What makes the problem; where the user keeps runs does not
_PROBLEM: Final = ("env", "env_kwargs", "env_config", "algorithm", "algorithm_config", "seed", "tracking")
_OWN_FORM: Final = ("execution", "precision", "num_threads")
_FIELDS: Final = [field for field in dataclasses.fields(PPOConfig) if field.name not in _OWN_FORM]
_RUN_FIELDS: Final = [field for field in dataclasses.fields(RunConfig) if field.name == "tracking"]
_TIMEOUT_S: Final = 1800.0
_EXAMPLES: Final = """\b
rl8x bench CartPole
rl8x bench CartPole num_envs=4096 model_config.hidden_sizes='[64, 64]' sgd_minibatch_size=16384 --precisions fp32 bf16
rl8x bench -f run.yaml --modes eager compile --passes 3 --json bench.json
rl8x bench my_module.MyEnv --num-envs 64 --seconds 10

\b
Every mode is measured in a fresh process with an empty compiler cache, logging to MLflow in a database that is thrown
away. Evaluations, stop conditions and checkpoints of a run file are left out.
"""


class BenchCommand(GroupedCommand):
    """A command that takes several words after `--modes` and `--precisions`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Join the words after those options by commas: no environment has a name of small letters alone."""
        joined: list[str] = []
        rest = list(args)
        while rest:
            word = rest.pop(0)
            joined.append(word)
            if word in ("--modes", "--precisions"):
                names = []
                while rest and re.fullmatch(r"[a-z]+[0-9]*(,[a-z]+[0-9]*)*", rest[0]):
                    names.append(rest.pop(0))
                joined += [",".join(names)] if names else []
        return super().parse_args(ctx, joined)


def _groups() -> dict[str, str]:
    names = ("file", "modes", "precisions", "passes", "seconds", "threads", "device", "tracking", "json_file", "trust")
    return dict.fromkeys(names, "The measurement") | {
        field.name: "The problem" for field in _FIELDS if field.name != "device"
    }


@click.command(
    "bench", cls=BenchCommand, groups=_groups(), epilog=_EXAMPLES, context_settings={"max_content_width": 120}
)
@click.argument("words", nargs=-1, metavar="[ENV] [KEY=VALUE]...")
@click.option("-f", "--file", metavar="FILE", help="Run file: YAML, TOML or JSON. What stands after it wins.")
@click.option(
    "--modes", metavar="MODE...", help="Execution modes to measure.  [default: eager compile, on CUDA also graph]"
)
@click.option(
    "--precisions",
    metavar="PRECISION...",
    help="Precisions to measure: fp32, bf16, on CUDA also tf32.  [default: the run's, fp32]",
)
@click.option(
    "--passes", type=click.IntRange(1), default=1, show_default=True, help="Fresh processes for each row, in turn."
)
@click.option(
    "--seconds",
    type=click.FloatRange(0.0),
    default=5.0,
    show_default=True,
    help="Seconds of iterations that each process times, after the first.",
)
@click.option("--threads", type=click.IntRange(1), help="CPU threads.  [default: torch's own choice]")
@trust_option
@click.option(
    "--json", "json_file", metavar="FILE", help="Write every measurement with machine and settings to a file."
)
def bench(
    words: tuple[str, ...],
    file: str | None,
    modes: str | None,
    precisions: str | None,
    passes: int,
    seconds: float,
    threads: int | None,
    json_file: str | None,
    trust: bool,
    **options: Any,
) -> int:
    """Measure how fast ENV trains in each execution mode, update and logging included.

    ENV and KEY=VALUE are as in `rl8x train`. The exit code is 1 if every mode failed.
    """
    with users_mistakes():
        chosen = given(options) | ({} if threads is None else {"num_threads": threads})
        run = read_run(words, file, (), chosen, trust=trust)
        device, pairs = _plan(run, modes, precisions)
    out = None if json_file is None else _writable(json_file)
    rows = _measure(run, pairs, passes, seconds)
    summary = summarize(rows)
    for warning in dict.fromkeys(text for row in rows for text in row.get("warnings", ())):
        click.echo(f"note: {warning}", err=True)
    click.echo(render(summary))
    if out is not None:
        settings = {"run": _problem(run), "passes": passes, "seconds": seconds, "device": device.type}
        _write(out, {"machine": machine(device), "settings": settings, "summary": summary, "rows": rows})
    return 0 if any("transitions_per_s" in row for row in rows) else 1


bench.params.extend(field_options(_FIELDS))
bench.params.extend(field_options(_RUN_FIELDS))


def _plan(run: RunConfig, modes: str | None, precisions: str | None) -> tuple[torch.device, list[tuple[str, str]]]:
    """Return the device, and the modes and precisions to measure on it."""
    config: Any = run.make_algorithm_config()
    known = {field.name for field in dataclasses.fields(config)}
    if not {"execution", "precision"} <= known:
        raise UserError(f"{type(config).__name__} has no `execution` and `precision`: there are no modes to compare.")
    device = resolve_device(config.device)
    wanted_modes = _chosen("--modes", modes, MODES, device) or MODES[device.type]
    wanted_precisions = _chosen("--precisions", precisions, PRECISIONS, device) or _chosen(
        "precision", config.precision, PRECISIONS, device
    )
    return device, [(mode, precision) for precision in wanted_precisions for mode in wanted_modes]


def _chosen(
    option: str, text: str | None, legal: Mapping[str, tuple[str, ...]], device: torch.device
) -> tuple[str, ...]:
    """Read names in a text, each once."""
    if device.type not in legal:
        raise UserError(f"rl8x bench measures on {' and '.join(legal)}; got the device {device}.")
    names = tuple(dict.fromkeys(name for name in re.split(r"[\s,]+", text or "") if name))
    for name in names:
        if name not in legal[device.type]:
            raise UserError(f"{option}: on {device} there are {', '.join(legal[device.type])}; got {name!r}.")
    return names


def _problem(run: RunConfig) -> dict[str, Any]:
    """Return what of a run makes the problem that is measured."""
    return {name: value for name, value in run.to_dict().items() if name in _PROBLEM}


def _measure(run: RunConfig, pairs: Sequence[tuple[str, str]], passes: int, seconds: float) -> list[dict[str, Any]]:
    """Measure every pair in a fresh process, in turn, so that a machine that changes its speed does so for all."""
    rows: list[dict[str, Any]] = []
    trust = run.trusted if isinstance(run.trusted, bool) else sorted(run.trusted)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        for index in range(passes):
            for execution, precision in pairs:
                job = {"run": _problem(run), "execution": execution, "precision": precision, "seconds": seconds}
                job |= {"folder": folder, "trust": trust}
                row = _in_fresh_process(job, _TIMEOUT_S + 4 * seconds)
                if row.pop("mistake", False):
                    raise UserError(row["error"])
                rows.append({"execution": execution, "precision": precision, "pass": index, **row})
                told = "failed" if "error" in row else f"{short(row['transitions_per_s'])} transitions/s"
                click.echo(f"{execution} {precision}, pass {index + 1} of {passes}: {told}", err=True)
    return rows


def _in_fresh_process(job: dict[str, Any], timeout_s: float) -> dict[str, Any]:
    """Do a job in a process of its own, with nothing in the compiler's cache."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as cache:
        kept = {name: value for name, value in os.environ.items() if not name.startswith("MLFLOW_")}
        caches = {"TORCHINDUCTOR_CACHE_DIR": f"{cache}/inductor", "TRITON_CACHE_DIR": f"{cache}/triton"}
        settings = {**caches, "MLFLOW_DISABLE_TELEMETRY": "true"}
        # -P: modules of the working directory are found last, and where they are trusted, as by the command itself.
        command = [sys.executable, "-P", "-m", "rl8x.cli.bench_process"]
        try:
            done = subprocess.run(
                command,
                input=json.dumps(job),
                env=kept | settings,
                capture_output=True,
                text=True,
                timeout=timeout_s,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return {"error": f"took more than {timeout_s:.0f} s"}
    if done.returncode:
        return {"error": _death(done.returncode, done.stderr)}
    row: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return row


def _death(code: int, stderr: str) -> str:
    """Say how a process ended that gave no answer."""
    if code < 0:
        killed = " (is there too little memory?)" if -code == signal.SIGKILL else ""
        return f"the process was ended by {signal.Signals(-code).name}{killed}"
    lines = stderr.strip().splitlines()
    return lines[-1] if lines else f"the process ended with exit code {code}"


def _writable(name: str) -> Path:
    """Refuse a file that could not be written, before anything is measured."""
    path = Path(name)
    if path.is_dir():
        raise UserError(f"--json names a file to write; {name} is a folder.")
    if not os.access(path.absolute().parent, os.W_OK):
        raise UserError(f"--json {name}: there is no folder to write it to. Make {path.parent} first.")
    return path


def _write(path: Path, document: Mapping[str, Any]) -> None:
    """Write a document beside its place and move it there, so that there never is half of one; without passwords."""
    from rl8x.tracking.secrets import hide_in_data

    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        beside.write_text(json.dumps(hide_in_data(document), indent=1, default=str) + "\n")
        beside.replace(path)
    except OSError as error:
        beside.unlink(missing_ok=True)
        raise UserError(f"--json {path}: cannot be written: {error.strerror}.") from None


def machine(device: torch.device) -> dict[str, Any]:
    """Describe this machine and what is installed, without its name."""
    try:
        found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        found = None
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    described = {
        "cpu": found[1].strip() if found else platform.processor() or platform.machine(),
        "cores": cores,
        "system": platform.system(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "rl8x": __version__,
    }
    if device.type == "cuda":
        described |= {"gpu": torch.cuda.get_device_name(device), "cuda": torch.version.cuda}
    return described
