"""Search the settings with which each library reaches a return fastest, for `throughput.py --measure return`.

    python benchmarks/tune.py --minutes 10 [--peers rl8x rejax ...] [--envs cartpole pendulum]

The search is the same for every library, with as much time for each: what an earlier search found, then settings that
solved the tasks with rl8x, then settings drawn at random or changes of the best in two places. Every try is a fresh
process for each of a few seeds, none of which the measurement uses, and fails with the first seed that does not reach
the return. The result goes to `benchmarks/tuned.json`; what is there of other libraries stays.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import random
import statistics
import sys
import time
from pathlib import Path
from typing import Any

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.common import TARGETS, WORKS, Job
from benchmarks.processes import PEERS, run
from benchmarks.throughput import TUNED

SEEDS = range(6)
# A try that takes this many times as long as the best is given up.
PATIENCE = 1.5
SPACES: dict[str, dict[str, tuple[Any, ...]]] = {
    "cartpole": {
        "num_envs": (32, 64, 128, 256),
        "horizon": (16, 32, 64),
        "hidden": (32, 64),
        "minibatches": (1, 2, 4, 8),
        "passes": (2, 4, 6, 10),
        "lr": (3e-3, 5e-3, 7e-3, 1e-2, 1.5e-2),
        "gamma": (0.97, 0.98, 0.99),
        "gae_lambda": (0.8, 0.9, 0.95),
        "clip": (0.2, 0.3),
        "entropy_coeff": (0.0, 0.01),
        "max_grad_norm": (0.5, 1.0, 5.0),
        "normalize_rewards": (False, True),
    },
    "pendulum": {
        "num_envs": (64, 128, 256, 512),
        "horizon": (16, 25, 32, 50),
        "hidden": (32, 64),
        "minibatches": (1, 2, 4, 8),
        "passes": (2, 4, 6, 10),
        "lr": (2e-3, 3e-3, 5e-3, 7e-3, 1e-2),
        "gamma": (0.9, 0.95, 0.97),
        "gae_lambda": (0.8, 0.9, 0.95),
        "clip": (0.2, 0.3),
        "entropy_coeff": (0.0,),
        "max_grad_norm": (0.5, 1.0, 5.0),
        "normalize_rewards": (False, True),
    },
}
# Settings that solved the tasks with rl8x for sixteen seeds, the fastest in the slowest seeds too.
FIRST: dict[str, dict[str, Any]] = {
    "cartpole": {
        "num_envs": 32,
        "horizon": 32,
        "hidden": 32,
        "minibatches": 4,
        "passes": 4,
        "lr": 1e-2,
        "gamma": 0.99,
        "gae_lambda": 0.95,
        "clip": 0.3,
        "entropy_coeff": 0.01,
        "max_grad_norm": 1.0,
        "normalize_rewards": True,
    },
    "pendulum": {
        "num_envs": 128,
        "horizon": 25,
        "hidden": 64,
        "minibatches": 2,
        "passes": 4,
        "lr": 7e-3,
        "gamma": 0.97,
        "gae_lambda": 0.95,
        "clip": 0.3,
        "entropy_coeff": 0.0,
        "max_grad_norm": 0.5,
        "normalize_rewards": True,
    },
}


def drawn(env: str, rng: random.Random, best: dict[str, Any] | None) -> dict[str, Any]:
    """Draw settings: anywhere, or half of the time the best ones with two changed."""
    space = SPACES[env]
    settings = {name: rng.choice(values) for name, values in space.items()}
    if best is not None and rng.random() < 0.5:
        changed = rng.sample(sorted(space), 2)
        settings = {name: settings[name] if name in changed else best[name] for name in space}
    return settings


def seconds_of(peer: str, env: str, settings: dict[str, Any], budget_s: float, threads: int) -> list[float] | None:
    """Return the seconds that each seed took, or None where one did not reach the return."""
    work = dataclasses.replace(WORKS[f"{env}-64"], **settings)
    seconds = []
    for seed in SEEDS:
        job = Job(work=work, threads=threads, seed=seed, target=TARGETS[env], budget_s=budget_s)
        row = run(PEERS[peer], job, {}, 120.0 + budget_s)
        if not row.get("reached"):
            return None
        seconds.append(row["seconds"])
    return seconds


def search(peer: str, env: str, minutes: float, threads: int, earlier: dict[str, Any] | None = None) -> dict[str, Any]:
    """Search the settings of a library for a task."""
    rng, end = random.Random(0), time.monotonic() + 60.0 * minutes
    best: dict[str, Any] = {}
    begin = [settings for settings in (FIRST[env], earlier) if settings]
    tries = 0
    while begin or time.monotonic() < end:
        settings = begin.pop() if begin else drawn(env, rng, best.get("settings"))
        tries += 1
        budget = PATIENCE * max(best["seconds"]) if best else 20.0
        seconds = seconds_of(peer, env, settings, budget, threads)
        if seconds and (not best or statistics.median(seconds) < statistics.median(best["seconds"])):
            best = {"settings": settings, "seconds": seconds}
            print(peer, env, tries, seconds, settings, file=sys.stderr, flush=True)
    return {**(best or {"settings": FIRST[env], "seconds": []}), "tries": tries, "minutes": minutes}


def tuned_settings() -> dict[str, Any]:
    """Return what earlier searches found, by library and task."""
    found: dict[str, Any] = json.loads(TUNED.read_text()) if TUNED.exists() else {}
    return found


def main(argv: list[str] | None = None) -> None:
    """Search what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", nargs="+", choices=tuple(PEERS), default=list(PEERS))
    parser.add_argument("--envs", nargs="+", choices=tuple(SPACES), default=list(SPACES))
    parser.add_argument("--minutes", type=float, default=10.0, help="for each library and task (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads (default: %(default)s)")
    args = parser.parse_args(argv)
    for env in args.envs:
        for peer in args.peers:
            if peer == "rl8" and env == "cartpole":
                continue  # it knows no terminations
            earlier = tuned_settings().get(peer, {}).get(env, {}).get("settings")
            found = search(peer, env, args.minutes, args.threads, earlier)
            tuned = tuned_settings()
            tuned.setdefault(peer, {})[env] = found
            beside = TUNED.with_suffix(".writing")
            beside.write_text(json.dumps(tuned, indent=1) + "\n")
            beside.replace(TUNED)


if __name__ == "__main__":
    main()
