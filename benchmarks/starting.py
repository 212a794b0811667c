"""Measure how soon a run is fast: imports, first iterations, and seconds to so many transitions, by execution mode.

Every measurement is a fresh process; a cold one has an empty cache of programs, a warm one the cache of the cold one.
Seconds count from the start of the process's own code, imports included, to the end of the run or of the iteration.

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

from benchmarks.common import WORKS, Work, quick
from benchmarks.processes import ROOT, machine, save

RESULT = ROOT / "benchmarks" / "results" / "starting.json"
TRANSITIONS = {"small": 1_000_000, "pendulum-64": 20_000_000, "pendulum-256": 5_000_000, "rl8-defaults": 5_000_000}
# Name, execution, whether the cache is filled before.
CASES = (
    ("eager", "eager", False),
    ("compile, cold", "compile", False),
    ("compile, warm", "compile", True),
    ("auto, cold", "auto", False),
    ("auto, warm", "auto", True),
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
    from rl8x import HitsUpperBound, NullTracker, PPOConfig, Trainer, keys
    from rl8x.envs import CartPole, Pendulum

    config = PPOConfig(
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
    trainer.run(stop_conditions=[HitsUpperBound(keys.ENV_STEPS, transitions)], progress="none")
    changed = algorithm.execution.starts_at
    return {
        "seconds": ends[-1],
        "first_iteration": ends[0],
        "changed_at": changed,
        "mode_at_end": algorithm.execution.mode,
        # Between the end of the step before and that of the first compiled one: what was waited for.
        "change_s": ends[changed] - ends[changed - 1] if 0 < changed < len(ends) else None,
    }


def call(arguments: list[str], cache: Path) -> Any:
    """Run this file in a process of its own, and return what it prints."""
    environment = os.environ | {"RL8X_CACHE_DIR": str(cache), "TORCHINDUCTOR_CACHE_DIR": str(cache / "inductor")}
    command = [sys.executable, str(Path(__file__).resolve()), *arguments]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def measured(work: str, args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Measure a work in each case; the warm ones take the caches of the cold ones."""
    with tempfile.TemporaryDirectory(prefix="rl8x-starting-") as folder:
        for name, execution, warm in CASES:
            arguments = ["--child", work, execution, "--threads", str(args.threads)]
            found = call([*arguments, *(["--quick"] if args.quick else [])], Path(folder) / execution)
            row = {"work": work, "case": name, "execution": execution, "warm": warm, **found}
            wait = "" if row["change_s"] is None else f", step {row['changed_at']} took {row['change_s']:.1f}"
            print(f"{work:13} {name:14} {row['seconds']:7.1f} s, first {row['first_iteration']:.2f}{wait}", flush=True)
            yield row


def commands() -> dict[str, float]:
    """Measure the imports of a script, and the shortest run from the shell, in seconds."""
    with tempfile.TemporaryDirectory(prefix="rl8x-starting-") as folder:
        imports = [
            float(subprocess.run([sys.executable, "-c", _IMPORT], capture_output=True, text=True, check=True).stdout)
            for _ in range(5)
        ]
        shell = []
        for _ in range(3):
            begin = time.perf_counter()
            command = [sys.executable, "-m", "rl8x.cli.main", "train", "CartPole", "--max-steps", "1"]
            subprocess.run(command, cwd=folder, capture_output=True, check=True)
            shell.append(time.perf_counter() - begin)
    found = {"import_s": min(imports), "train_one_step_s": min(shell)}
    print(f"import of Trainer and PPOConfig after torch: {found['import_s']:.2f} s")
    print(f"rl8x train CartPole --max-steps 1: {found['train_one_step_s']:.2f} s", flush=True)
    return found


def main() -> None:
    """Measure all, or be the process that trains."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=tuple(TRANSITIONS), default=list(TRANSITIONS), help="works")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads (default: %(default)s)")
    parser.add_argument("--quick", action="store_true", help="tiny works, to see that everything runs")
    parser.add_argument("--out", type=Path, help=f"where the result is written (default: {RESULT.name}, unless quick)")
    parser.add_argument("--child", nargs=2, metavar=("WORK", "EXECUTION"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        work, execution = WORKS[args.child[0]], args.child[1]
        count = TRANSITIONS[args.child[0]]
        found = train(quick(work), execution, 5000, 1) if args.quick else train(work, execution, count, args.threads)
        print(json.dumps(found))
        return
    import torch

    result: dict[str, Any] = {
        "date": datetime.date.today().isoformat(),
        "machine": machine() | {"threads": args.threads, "torch": torch.__version__},
        "transitions": TRANSITIONS,
        "commands": commands(),
        "rows": [row for work in args.only for row in measured(work, args)],
    }
    out = args.out or (None if args.quick else RESULT)
    if out is not None:
        save(out, result)


if __name__ == "__main__":
    main()
