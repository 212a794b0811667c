"""Search the settings with which each library reaches a return fastest, for `speed.py --measure return`.

    python -m benchmarks.tune --minutes 10 [--peers rl8x rejax ...] [--envs cartpole pendulum]

The search is the same for every library, with as much time for each: what an earlier search found, for the library
and for rl8x, then settings drawn at random or changes of the best in two places. Every try is a fresh
process for each of a few seeds, none of which the measurement uses, and fails with the first seed that does not reach
the return. The result goes to `benchmarks/tuned.json`; what is there of other libraries stays.
"""

from __future__ import annotations

import argparse
import dataclasses
import random
import statistics
import sys
import time
from typing import Any

from benchmarks.processes import PEERS, run
from benchmarks.results import held, save
from benchmarks.speed import TUNED
from benchmarks.works import TARGETS, WORKS, Job

SEEDS = range(6)
# A try that takes this many times as long as the best is given up.
PATIENCE = 1.5
Space = dict[str, tuple[Any, ...]]
SHARED: Space = {"hidden": (32, 64), "minibatches": (1, 2, 4, 8), "passes": (2, 4, 6, 10)}
SHARED |= {"gae_lambda": (0.8, 0.9, 0.95), "clip": (0.2, 0.3), "max_grad_norm": (0.5, 1.0, 5.0)}
SHARED |= {"normalize_rewards": (False, True)}
CARTPOLE: Space = {"num_envs": (32, 64, 128, 256), "horizon": (16, 32, 64), "lr": (3e-3, 5e-3, 7e-3, 1e-2, 1.5e-2)}
CARTPOLE |= {"gamma": (0.97, 0.98, 0.99), "entropy_coeff": (0.0, 0.01)}
PENDULUM: Space = {"num_envs": (64, 128, 256, 512), "horizon": (16, 25, 32, 50), "lr": (2e-3, 3e-3, 5e-3, 7e-3, 1e-2)}
PENDULUM |= {"gamma": (0.9, 0.95, 0.97), "entropy_coeff": (0.0,)}
SPACES = {"cartpole": SHARED | CARTPOLE, "pendulum": SHARED | PENDULUM}


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


def search(peer: str, env: str, minutes: float, threads: int) -> dict[str, Any]:
    """Search the settings of a library for a task."""
    rng, end = random.Random(0), time.monotonic() + 60.0 * minutes
    begin = [
        settings for name in ("rl8x", peer) if (settings := held(TUNED).get(name, {}).get(env, {}).get("settings"))
    ]
    best: dict[str, Any] = {}
    tries = 0
    while begin or time.monotonic() < end:
        settings = begin.pop() if begin else drawn(env, rng, best.get("settings"))
        tries += 1
        budget = PATIENCE * max(best["seconds"]) if best else 20.0
        seconds = seconds_of(peer, env, settings, budget, threads)
        if seconds and (not best or statistics.median(seconds) < statistics.median(best["seconds"])):
            best = {"settings": settings, "seconds": seconds}
            print(peer, env, tries, seconds, settings, file=sys.stderr, flush=True)
    return {**(best or {"settings": {}, "seconds": []}), "tries": tries, "minutes": minutes}


def main(argv: list[str] | None = None) -> None:
    """Search what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", nargs="+", choices=tuple(PEERS), default=[*PEERS])
    parser.add_argument("--envs", nargs="+", choices=tuple(SPACES), default=list(SPACES))
    parser.add_argument("--minutes", type=float, default=10.0, help="for each library and task (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads (default: %(default)s)")
    args = parser.parse_args(argv)
    for env in args.envs:
        for peer in args.peers:
            if "ppo" in PEERS[peer].algorithms and (peer, env) != ("rl8", "cartpole"):  # it knows no terminations
                found = search(peer, env, args.minutes, args.threads)
                tuned = held(TUNED)
                tuned.setdefault(peer, {})[env] = found
                save(TUNED, tuned)


if __name__ == "__main__":
    main()
