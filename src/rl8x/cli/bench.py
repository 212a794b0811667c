"""`rl8x bench`: measures how fast the user's problem trains in each execution mode, each in a fresh process."""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import os
import platform
import re
import resource
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import click
import torch

from rl8x import __version__, keys
from rl8x.cli.errors import FiniteRange, UserError, WholeRange, check_file, is_users_mistake, users_mistakes
from rl8x.cli.options import RunCommand, read_run
from rl8x.config import RunSpec
from rl8x.disk import replace_synced
from rl8x.distributed import resolve_device
from rl8x.execution.artifacts import cpu_info
from rl8x.importing import Trust, find_modules_here
from rl8x.output import described, message_of, short, table
from rl8x.processes import python_process, restore_variables
from rl8x.tracking import MLflowTracker, NullTracker, Tracker
from rl8x.tracking.secrets import hide_in_data
from rl8x.trainers import Trainer, TrainStats
from rl8x.trainers.rows import counter_name

# Caches to leave empty, then modes and precisions by kind of device.
_CACHES: Final = ("RL8X_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
_MODES: Final = {"cpu": ["eager", "compile"], "cuda": ["eager", "compile", "graph"]}
_PRECISIONS: Final = {"cpu": ["fp32", "bf16"], "cuda": ["fp32", "tf32", "bf16"]}
# Keys of a run that define the problem, without the place where runs are stored.
_PROBLEM: Final = ("env", "env_kwargs", "env_config", "algorithm", "preset", "algorithm_config", "seed", "tracking")
_COLUMNS: Final = {
    "mode": "{execution}",
    "precision": "{precision}",
    "transitions/s": "{transitions_per_s}",
    "range": "{lowest} - {highest}",
    "first iteration s": "{first_iteration_s:.2f}",
    "collect ms": "{collect_ms:.1f}",
    "step ms": "{step_ms:.1f}",
    "tracking ms": "{tracking_ms:.2f}",
    "peak memory MB": "{peak_memory_mb:.0f}",
    "peak device MB": "{peak_device_mb:.0f}",
}
_PARTS: Final = ("collect_ms", "step_ms", "tracking_ms")
_TIMES: Final = ("transitions_per_s", "first_iteration_s", *_PARTS)
_EXAMPLES: Final = """\b
rl8x bench CartPole
rl8x bench CartPole num_envs=4096 model_config.hidden_sizes='[64, 64]' sgd_minibatch_size=16384 --precisions fp32 bf16
rl8x bench -f run.yaml --modes eager compile --passes 3 --json bench.json
rl8x bench my_module.MyEnv --num-envs 64 --seconds 10

\b
Every mode is measured in a fresh process with an empty compiler cache, logging to MLflow in a database that is thrown
away. Evaluations, stop conditions and checkpoints of a run file are left out.
"""


class _BenchCommand(RunCommand):
    """A command that takes several words after `--modes` and `--precisions`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Join the words after these options by commas; no environment's name is all in lower case."""
        joined: list[str] = []
        takes_more = False
        for word in args:
            if takes_more and re.fullmatch(r"[a-z]+[0-9]*(,[a-z]+[0-9]*)*,?", word):
                joined[-1] += f"{word},"
            else:
                takes_more = word in ("--modes", "--precisions")
                joined.append(f"{word}=" if takes_more else word)
        return super().parse_args(ctx, joined)


@click.command(
    "bench",
    cls=_BenchCommand,
    title="The measurement",
    run_fields=("algorithm", "preset", "tracking"),
    left_out=("execution", "precision", "num_threads"),  # this command has its own options for them
    group_of=lambda field, _: "The measurement" if field.name == "device" else "The problem",
    epilog=_EXAMPLES,
)
@click.option("--modes", metavar="MODE...", help="Execution modes.  [default: eager compile, on CUDA also graph]")
@click.option(
    "--precisions",
    metavar="PRECISION...",
    help="Precisions to measure: fp32, bf16, on CUDA also tf32.  [default: the run's, fp32]",
)
@click.option("--passes", type=WholeRange(1), default=1, help="Fresh processes for each row, in turn.")
@click.option("--seconds", type=FiniteRange(0.0), default=5.0, help="Seconds that each times, after a first iteration.")
@click.option("--threads", type=WholeRange(1), help="CPU threads.  [default: torch's own choice]")
@click.option("--json", "path", metavar="FILE", help="Write every measurement with machine and settings to a file.")
def bench(passes: int, seconds: float, threads: int | None, path: str | None, **run: Any) -> int:
    """Measure how fast ENV trains in each execution mode, update and logging included.

    ENV and KEY=VALUE are as in `rl8x train`. The exit code is 1 if every mode failed.
    """
    asked = {"--precisions": run.pop("precisions"), "--modes": run.pop("modes")}
    with users_mistakes():
        config = read_run(run if threads is None else run | {"num_threads": threads})
        device, cells = _plan(config, asked)
        if path is not None:
            check_file(path, "--json")
    problem = {name: value for name, value in config.to_plain().items() if name in _PROBLEM}
    rows = _measure(problem, config.trust, cells, passes, seconds)
    summary = summarize(rows)
    for warning in dict.fromkeys(text for row in rows for text in row.get("warnings", ())):
        click.echo(f"note: {warning}", err=True)
    click.echo(render(summary))
    if path is not None:
        settings = {"run": problem, "passes": passes, "seconds": seconds, "device": device.type}
        document = {"machine": _machine(device), "settings": settings, "summary": summary, "rows": rows}
        try:  # atomically, and without passwords
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            replace_synced(Path(path), (json.dumps(hide_in_data(document), indent=1, default=str) + "\n").encode())
        except OSError as error:
            raise UserError(f"--json {path}: cannot be written: {error.strerror}.") from None
    return 0 if any("transitions_per_s" in row for row in rows) else 1


def _plan(run: RunSpec, asked: Mapping[str, str | None]) -> tuple[torch.device, list[dict[str, str]]]:
    """Return the device, and the modes and precisions to measure on it."""
    config: Any = run.config
    device, wanted = resolve_device(config.device), {}
    if device.type not in _MODES:
        raise UserError(f"rl8x bench measures on {' and '.join(_MODES)}; got the device {device}.")
    legal = {"--precisions": _PRECISIONS[device.type], "--modes": _MODES[device.type]}
    defaults = {"--precisions": [config.precision], "--modes": _MODES[device.type]}
    for option, words in asked.items():
        names = defaults[option] if words is None else re.findall(r"[^\s,]+", words) or [""]
        wanted[option] = list(dict.fromkeys(names))
        for name in names:
            if name not in legal[option]:
                raise UserError(f"{option}: on {device} there are {', '.join(legal[option])}; got {name!r}.")
    cells = itertools.product(wanted["--precisions"], wanted["--modes"])
    return device, [{"execution": mode, "precision": precision} for precision, mode in cells]


def _measure(
    problem: Mapping[str, Any], trusted: Trust, cells: Sequence[Mapping[str, str]], passes: int, seconds: float
) -> list[dict[str, Any]]:
    """Measure in fresh processes, with modes in turn, so that changes of the machine's speed affect all modes."""
    rows: list[dict[str, Any]] = []
    options = {"trust": trusted if isinstance(trusted, bool) else sorted(trusted), "seconds": seconds}
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        for number, cell in itertools.product(range(passes), cells):
            run = {**problem, "algorithm_config": {**problem.get("algorithm_config", {}), **cell}}
            job = options | {"run": run, "folder": folder, "answer": f"{folder}/{len(rows)}.json"}
            row = _in_fresh_process(job, 1800.0 + 4 * seconds)
            if row.pop("mistake", False):
                raise UserError(row["error"])
            rows.append({**cell, "pass": number, **row})
            result = "failed" if "error" in row else f"{short(row['transitions_per_s'])} {row['unit']}/s"
            click.echo(f"{' '.join(cell.values())}, pass {number + 1} of {passes}: {result}", err=True)
    return rows


def _in_fresh_process(job: Mapping[str, Any], timeout_s: float) -> dict[str, Any]:
    """Run a job in a fresh process with an empty compiler cache; it answers by a file, as user code may print."""
    variables = {name: value for name, value in os.environ.items() if not name.startswith("MLFLOW_")}
    variables |= {name: f"{job['answer']}.{name}" for name in _CACHES} | {"MLFLOW_DISABLE_TELEMETRY": "true"}
    # As in the command itself, modules of the working directory are found last, and only if they are trusted.
    process = python_process("-m", "rl8x.cli.bench", variables=variables)
    try:
        done = subprocess.run(**process, input=json.dumps(job), capture_output=True, text=True, timeout=timeout_s)
    except subprocess.TimeoutExpired:
        return {"error": f"took more than {timeout_s:.0f} s"}
    if done.returncode < 0:
        killed = " (is there too little memory?)" if -done.returncode == signal.SIGKILL else ""
        return {"error": f"the process was ended by {signal.Signals(-done.returncode).name}{killed}"}
    if done.returncode > 0:
        return {"error": [f"the process ended with exit code {done.returncode}", *done.stderr.strip().splitlines()][-1]}
    row: dict[str, Any] = json.loads(Path(job["answer"]).read_text())
    return row


def _machine(device: torch.device) -> dict[str, Any]:
    """Return a description of this machine and of installed versions, without its name."""
    cpu = re.search(r"^model name\s*:\s*(.+?)\s*$", cpu_info(), re.MULTILINE)
    machine = {
        "cpu": cpu[1] if cpu else platform.processor() or platform.machine(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "system": platform.system(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "rl8x": __version__,
    }
    if device.type == "cuda":
        machine |= {"gpu": torch.cuda.get_device_name(device), "cuda": torch.version.cuda}
    return machine


def measure(job: Mapping[str, Any]) -> dict[str, Any]:
    """Return the measurements of a job's `run`; or `error`, a line, and `mistake`, whether the user made it."""
    trainer = None
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        try:
            run = RunSpec.from_plain(job["run"], trust=job["trust"])
            trainer = _make_trainer(run, job["folder"])
            row = _time_iterations(trainer, run, job["seconds"])
        except Exception as error:
            traceback.print_exc()
            mistake = is_users_mistake(error)
            ours = mistake or type(error).__module__.startswith("rl8x.")
            early = trainer is None or not any(trainer.state.values())
            return {"error": _shown(message_of(error) if ours else described(error)), "mistake": early and mistake}
    texts = [_shown(str(warning.message)) for warning in caught if issubclass(warning.category, RuntimeWarning)]
    return row | {"warnings": list(dict.fromkeys(texts))}


def _shown(message: str) -> str:
    """Return a message's first line, with paths cut to file names, so that results can be passed on."""
    return re.sub(r"(?:/[\w.@+-]+)+/([\w.@+-]+)", r"\1", " ".join(message.strip().partition("\n")[0].split()))


def _make_trainer(run: RunSpec, folder: str) -> Trainer:
    tracker: Tracker = NullTracker()
    if run.trainer.tracking:
        tracker = MLflowTracker("bench", tracking_uri=f"sqlite:///{folder}/mlflow.db", spool_dir=f"{folder}/spool")
        # Wait until MLflow is imported and its database made in the background, so that iterations are not slowed.
        tracker.start(params={}, tags={})
        tracker.flush(120.0)
        tracker.finish("FINISHED")
    trainer = Trainer(run.make_algorithm(), tracker=tracker, eval_env=False, checkpoints=False)
    trainer.check_run(env_config=run.run.env_config)
    return trainer


def _peak_memory() -> int:
    """Return the peak of this process's resident memory in bytes; Linux's `ru_maxrss` includes its parent's."""
    with contextlib.suppress(OSError, LookupError):
        return int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def _time_iterations(trainer: Trainer, run: RunSpec, seconds: float) -> dict[str, Any]:
    """Time the first iteration and at least two more, as a row has the tracking time of the previous row."""
    algorithm, rows, times = trainer.algorithm, list[Mapping[str, float]](), list[float]()
    # A replay's warm-up is part of the first iteration, as it makes no updates and waits for no compilation.
    warmup_steps = None if algorithm.env is None else getattr(algorithm.config, "warmup_steps", None)
    while len(times) <= 2 or sum(times[1:]) < seconds:
        begin = time.perf_counter()
        while trainer.state[keys.ENV_STEPS] < (warmup_steps or 0):
            trainer.step(env_config=run.run.env_config)
        rows.append(_iterate(trainer, run, until_updated=warmup_steps is not None))
        if algorithm.device.type == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - begin)
    trainer.close()
    timed, clock = times[1:], algorithm.clock
    # The mean, as a simulator's iterations differ: steps that only reset are not transitions.
    transitions = round((rows[-1][clock] - rows[0][clock]) / len(timed))
    row = {
        "unit": counter_name(clock),
        "transitions": transitions,
        "transitions_per_s": transitions / statistics.median(timed),
        "first_iteration_s": times[0],
        "iterations": len(timed),
        "seconds": timed[:: 1 + len(timed) // 200],
        "slowest_s": max(timed),
        "fastest_s": min(timed),
        "peak_memory_mb": round(_peak_memory() / 1e6, 1),
        "tracker": type(trainer.tracker).__name__,
        "threads": torch.get_num_threads(),
        "ran_as": algorithm.params.get("execution"),
    }
    for part, first in zip(_PARTS, (1, 1, 2), strict=True):
        row[part] = round(statistics.median(row[f"profiling/{part}"] for row in rows[first:]), 4)
    if algorithm.device.type == "cuda":
        row["peak_device_mb"] = round(torch.cuda.max_memory_allocated(algorithm.device) / 1e6, 1)
    return row


def _iterate(trainer: Trainer, run: RunSpec, *, until_updated: bool) -> dict[str, float]:
    """Step once, or until updates were made, whose cost includes the steps before; return the row with summed times."""
    updates, rows = trainer.state[keys.UPDATES], list[TrainStats]()
    while not rows or (until_updated and trainer.state[keys.UPDATES] == updates):
        rows.append(trainer.step(env_config=run.run.env_config))
    return {**rows[-1], **{name: sum(row[name] for row in rows) for name in (f"profiling/{part}" for part in _PARTS)}}


def summarize(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Aggregate the passes of each mode and precision: medians, the range of rates, the `error` of a failed pass."""
    summaries = []
    for mode, precision in dict.fromkeys((row["execution"], row["precision"]) for row in rows):
        cell = [row for row in rows if (row["execution"], row["precision"]) == (mode, precision)]
        failures, good = ([row for row in cell if ("error" in row) is failed] for failed in (True, False))
        summary: dict[str, Any] = {"execution": mode, "precision": precision}
        if failures:
            summary |= {"error": failures[0]["error"], "failures": len(failures)}
        if good:
            first = good[0]
            rates = [row["transitions_per_s"] for row in good]
            if len(good) == 1:  # the range of its iterations
                rates = [first["transitions"] / first[name] for name in ("slowest_s", "fastest_s")]
            summary |= {"passes": len(good), "unit": first["unit"], "transitions": first["transitions"]}
            summary |= {"lowest": min(rates), "highest": max(rates)}
            summary |= {name: statistics.median(row[name] for row in good) for name in _TIMES}
            summary |= {name: max(row[name] for row in good) for name in first if name.startswith("peak_")}
        summaries.append(summary)
    return summaries


def render(summary: Sequence[Mapping[str, Any]]) -> str:
    """Return the table, followed by the reasons of failures, modes that need much memory, and the fastest mode."""
    on_device = any("peak_device_mb" in row for row in summary)
    unit = next((row["unit"] for row in summary if "unit" in row), "transitions")
    columns = {title: form for title, form in _COLUMNS.items() if on_device or "device" not in title}
    lines, failed, heavy = [tuple(title.replace("transitions", unit) for title in columns)], list[str](), list[str]()
    eager = {row["precision"]: row for row in summary if row["execution"] == "eager" and "transitions_per_s" in row}
    for row in summary:
        name = f"{row['execution']} {row['precision']}"
        failed += [f"{name} failed: {row['error']}"] if "error" in row else []
        if "transitions_per_s" not in row:
            lines.append((row["execution"], row["precision"], "failed", *[""] * (len(columns) - 3)))
            continue
        counts = {each: short(row[each]) for each in ("transitions_per_s", "lowest", "highest")}
        lines.append(tuple(form.format_map({"peak_device_mb": 0, **row, **counts}) for form in columns.values()))
        more = row["peak_memory_mb"] / eager.get(row["precision"], row)["peak_memory_mb"]
        heavy += [f"{name} takes {more:.1f} times the memory of eager {row['precision']}."] if more >= 2 else []
    notes = [*failed, *heavy]
    return "\n".join([table(lines), *([""] if notes else []), *notes, "", verdict(summary)])


def verdict(summary: Sequence[Mapping[str, Any]]) -> str:
    """Return a line with the fastest mode, and after how many transitions it has made up for its compilation."""
    # n iterations take `first_iteration_s + (n - 1) * each` with `each = transitions / transitions_per_s`. So it breaks
    # even with eager at `n = 1 + (first' - first) / (each - each')`.
    measured = {(row["execution"], row["precision"]): row for row in summary if "transitions_per_s" in row}
    if not measured:
        return "No mode could be measured."
    (mode, precision), best = max(measured.items(), key=lambda item: float(item[1]["transitions_per_s"]))
    fastest = f"Fastest: {mode} {precision}, {short(best['transitions_per_s'])} {best['unit']}/s"
    eager = measured.get(("eager", precision), best)
    if eager is best:
        return f"{fastest}."
    fastest += f", {best['transitions_per_s'] / eager['transitions_per_s']:.2f} times eager {precision}"
    transitions, first = int(best["transitions"]), best["first_iteration_s"]
    behind, each = first - eager["first_iteration_s"], transitions / best["transitions_per_s"]
    gained = transitions / eager["transitions_per_s"] - each
    if behind <= 0:
        return f"{fastest}; it is ahead from the first iteration on."
    if gained <= 0:
        return f"{fastest}; its longer first iteration is never earned back."
    more = math.ceil(behind / gained - 1e-9)  # no further iteration for a rounding error
    earned = f"{short((1 + more) * transitions)} {best['unit']}, {first + more * each:.1f} s of training"
    return f"{fastest}; its first iteration is earned back after {earned}."


if __name__ == "__main__":
    restore_variables()
    _job = json.loads(sys.stdin.read())
    find_modules_here(_job["trust"])
    Path(_job["answer"]).write_text(json.dumps(measure(_job)))
