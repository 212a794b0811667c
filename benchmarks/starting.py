"""Measure how soon a run is fast: imports, first iterations, and seconds to so many transitions, by execution mode.

Every measurement is a fresh process; a cold one has an empty cache of programs, a warm one the cache of the cold one.
Seconds to a number of transitions are of training, the first iteration and all compiling in it included, imports
apart. What runs at one speed from the second iteration on is measured for a part of the transitions, and the rest
is reckoned from it: eager and warm runs, and other libraries at their defaults.

    python benchmarks/starting.py --quick     # does everything run?
    python benchmarks/starting.py             # the table; about half an hour on two cores
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.common import TARGETS, WORKS, Job, Work, quick
from benchmarks.processes import PEERS, ROOT, machine, run, save
from benchmarks.tables import table

RESULT = ROOT / "benchmarks" / "results" / "starting.json"
TRANSITIONS = {"small": 1_000_000, "pendulum-64": 20_000_000, "pendulum-256": 5_000_000, "rl8-defaults": 5_000_000}
# Name, execution, whether the cache is filled before, and the part of the transitions that is trained for.
CASES = (
    ("eager", "eager", False, 0.1),
    ("compile, cold", "compile", False, 1.0),
    ("compile, warm", "compile", True, 0.25),
    ("auto, cold", "auto", False, 1.0),
)
_IMPORT = """
import time, torch
begin = time.perf_counter()
from rl8x import PPOConfig, Trainer
print(time.perf_counter() - begin)
"""


def train(work: Work, execution: str, transitions: int, threads: int) -> dict[str, Any]:
    """Train in this process for so many transitions, as a script of a user's would; return the seconds."""
    begin = time.perf_counter()
    import torch  # noqa: F401

    torch_s = time.perf_counter() - begin
    from rl8x import HitsUpperBound, NullTracker, PPOConfig, Trainer, keys
    from rl8x.envs import CartPole, Pendulum

    config = PPOConfig.rl8(
        num_envs=work.num_envs,
        horizon=work.horizon,
        model_config={"hidden_sizes": [work.hidden, work.hidden]},
        sgd_minibatch_size=None if work.minibatches == 1 else work.minibatch_size,
        num_sgd_iters=work.passes,
        gamma=work.gamma,
        vf_clip_param=None,
        normalize_rewards=work.normalize_rewards,
        lr=work.lr,
        num_threads=threads,
        device="cpu",
        seed=0,
        execution=execution,  # type: ignore[arg-type]
    )
    ends: list[float] = []

    def note(trainer: Any, stats: Any) -> None:
        ends.append(time.perf_counter() - begin)

    algorithm = config.build({"cartpole": CartPole, "pendulum": Pendulum}[work.env])
    trainer = Trainer(algorithm, tracker=NullTracker(), checkpoints=False, eval_env=False, callbacks=[note])
    built = time.perf_counter() - begin
    trainer.run(stop_conditions=[HitsUpperBound(keys.ENV_STEPS, transitions)], progress="none")
    changed, mode = algorithm.execution.starts_at, algorithm.execution.mode
    return {
        "import_torch_s": torch_s,
        "import_and_build_s": built - torch_s,
        "first_iteration_s": ends[0] - built,
        "seconds": ends[-1] - built,
        "transitions": len(ends) * work.transitions,
        "mode_at_end": mode,
        "changed_at": changed,
        # The first compiled step: what was waited for is in it.
        "change_s": ends[changed] - ends[changed - 1] if 0 < changed < len(ends) else None,
    }


def to_all(row: dict[str, Any], work: Work, transitions: int) -> float:
    """Return the seconds to all transitions, from those to a part of them: the rest goes on as after the first."""
    rate = (row["transitions"] - work.transitions) / (row["seconds"] - row["first_iteration_s"])
    return float(row["seconds"] + max(0, transitions - row["transitions"]) / rate)


def call(arguments: list[str], cache: Path) -> Any:
    """Run this file in a process of its own, and return what it prints."""
    environment = os.environ | {"RL8X_CACHE_DIR": str(cache), "TORCHINDUCTOR_CACHE_DIR": str(cache / "inductor")}
    command = [sys.executable, str(Path(__file__).resolve()), *arguments]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def measured(name: str, args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Measure a work in each case; the warm ones take the caches of the cold ones."""
    work, transitions = (quick(WORKS[name]), 5000) if args.quick else (WORKS[name], TRANSITIONS[name])
    with tempfile.TemporaryDirectory(prefix="rl8x-starting-") as folder:
        for case, execution, warm, part in CASES:
            # An eager run of `auto` has to be asked for all transitions to know how long it will be.
            count = max(int(part * transitions), 3 * work.transitions)
            child = ["--child", name, execution, str(count), "--threads", str(args.threads)]
            row = call([*child, *(["--quick"] if args.quick else [])], Path(folder) / execution)
            row = {"work": name, "case": case, "execution": execution, "warm": warm, **row}
            row["seconds_to_all"] = to_all(row, work, transitions)
            wait = "" if row["change_s"] is None else f", step {row['changed_at']} took {row['change_s']:.1f}"
            print(
                f"{name:13} {case:14} {row['seconds_to_all']:7.1f} s, first {row['first_iteration_s']:.2f}{wait}",
                flush=True,
            )
            yield row
    for peer in args.peers:
        job = Job(work=work, threads=args.threads, warmup_s=1.0, timed_s=2.0)
        found = run(PEERS[peer], job, {}, 600.0)
        row = {"work": name, "case": PEERS[peer].title, **found}
        if "error" not in found:
            rest = (transitions - work.transitions) / found["transitions_per_s"]
            row["seconds_to_all"] = found["first_iteration_s"] + rest
        print(f"{name:13} {peer:14} {row.get('seconds_to_all', row.get('error'))}", flush=True)
        yield row


def to_return(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Train CartPole to a return of 475, eagerly, compiled with an empty cache, and with the cache of that."""
    tuned = json.loads((ROOT / "benchmarks" / "tuned.json").read_text())["rl8x"]["cartpole"]["settings"]
    with tempfile.TemporaryDirectory(prefix="rl8x-starting-") as folder:
        for case, execution in (("eager", "eager"), ("compile, cold", "compile"), ("compile, warm", "compile")):
            rows = []
            for seed in range(1 if case.endswith("cold") else 3):
                work = Work(env="cartpole", iterations=1, **tuned)
                job = Job(
                    work=work,
                    threads=args.threads,
                    seed=seed,
                    target=TARGETS["cartpole"],
                    budget_s=120.0,
                    execution=execution,
                )
                rows.append(run(PEERS["rl8x"], job, {"RL8X_CACHE_DIR": folder}, 300.0))
            seconds = [row.get("seconds") for row in rows]
            print(f"CartPole to 475, {case}: {seconds}", flush=True)
            yield {"case": case, "seconds": seconds, "reached": [row.get("reached") for row in rows]}


def commands() -> dict[str, float]:
    """Measure the imports of a script, and the shortest run from the shell, in seconds."""
    with tempfile.TemporaryDirectory(prefix="rl8x-starting-") as folder:
        imports = [
            float(subprocess.run([sys.executable, "-c", _IMPORT], capture_output=True, text=True, check=True).stdout)
            for _ in range(5)
        ]
        shell = []
        for _ in range(2):
            begin = time.perf_counter()
            words = ["train", "CartPole", "--preset", "rl8", "--max-steps", "1"]
            command = [sys.executable, "-m", "rl8x.cli.main", *words]
            subprocess.run(command, cwd=folder, capture_output=True, check=True)
            shell.append(time.perf_counter() - begin)
    found = {"import_s": min(imports), "train_one_step_s": min(shell)}
    print(f"import of Trainer and PPOConfig after torch: {found['import_s']:.2f} s")
    print(f"rl8x train CartPole --preset rl8 --max-steps 1: {found['train_one_step_s']:.2f} s", flush=True)
    return found


def main() -> None:
    """Measure all, or be the process that trains."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=tuple(TRANSITIONS), default=list(TRANSITIONS), help="works")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads (default: %(default)s)")
    parser.add_argument("--quick", action="store_true", help="tiny works, to see that everything runs")
    parser.add_argument("--out", type=Path, help=f"where the result is written (default: {RESULT.name}, unless quick)")
    parser.add_argument("--peers", nargs="*", choices=tuple(PEERS), default=[p for p in PEERS if p != "rl8x"])
    parser.add_argument("--child", nargs=3, metavar=("WORK", "EXECUTION", "TRANSITIONS"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        name, execution, count = args.child
        work = quick(WORKS[name]) if args.quick else WORKS[name]
        print(json.dumps(train(work, execution, int(count), args.threads)))
        return
    import torch

    out = args.out or (None if args.quick else RESULT)
    rows: list[dict[str, Any]] = []
    result: dict[str, Any] = {
        "date": datetime.date.today().isoformat(),
        "machine": machine() | {"threads": args.threads, "torch": torch.__version__},
        "starting": {name: TRANSITIONS[name] for name in args.only},
        "commands": commands(),
        "to_return": list(to_return(args)),
        "rows": rows,
    }
    for name in args.only:
        for row in measured(name, args):
            rows.append(row)
            if out is not None:
                save(out, result)


def render(result: dict[str, Any]) -> str:
    """Lay a result out as Markdown."""
    machine, commands = result["machine"], result["commands"]
    rows = {(row["work"], row["case"]): row for row in result["rows"]}
    cases = list(dict.fromkeys(row["case"] for row in result["rows"]))
    shown = [
        [f"{work}: {count / 1e6:g}M", *(_shown(rows.get((work, case), {})) for case in cases)]
        for work, count in result["starting"].items()
    ]
    returns = ", ".join(
        f"{row['case']} {' / '.join(f'{seconds:.1f}' for seconds in row['seconds'])} s" for row in result["to_return"]
    )
    return "\n\n".join(
        [
            f"{machine['cpu']}, {machine['cores']} cores, torch {machine['torch']}; {machine['threads']} threads, "
            f"{result['date']}.",
            "Seconds of training to so many transitions; in brackets those of the first iteration.",
            table(["transitions", *cases], shown),
            f"Importing Trainer and PPOConfig after torch: {commands['import_s']:.2f} s. "
            "`rl8x train CartPole --preset rl8 --max-steps 1`, 262,144 transitions: "
            f"{commands['train_one_step_s']:.1f} s. CartPole to a return of 475, by seed: {returns}.",
        ]
    )


def _shown(row: dict[str, Any]) -> str:
    seconds = row.get("seconds_to_all")
    return "-" if seconds is None else f"{seconds:.0f} ({row['first_iteration_s']:.1f})"


if __name__ == "__main__":
    main()
