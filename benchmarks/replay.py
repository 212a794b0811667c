"""Speed of algorithms with a replay, beside other libraries on the same work, and beside their own matrix products.

    python benchmarks/replay.py --quick                     # does everything run? (the rates mean nothing)
    python benchmarks/replay.py --passes 4 --threads 1      # the table
    python benchmarks/replay.py --only dqn-64 --peers rl8x  # one work, one library

Every measurement is a fresh process, and the libraries take turns within a pass. Beside them stands how often a second
the matrix products of an update could be done if there were nothing else. `untracked` leaves MLflow out, to which rl8x
gives a row after each block of updates; the other libraries write one a few episodes, or none.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import statistics
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.common import REPLAY_WORKS, Job, ReplayWork
from benchmarks.processes import OWN_MODES, PEERS, ROOT, call, environment, machine, python_of, run, save
from benchmarks.tables import Row, names, precision_of, select, short, table

RESULTS = ROOT / "benchmarks" / "results"
UNTRACKED = "untracked"
# The fields of a job that a variant changes.
VARIANTS: dict[str, Mapping[str, Mapping[str, Any]]] = {
    "rl8x": {**OWN_MODES, f"compile fp32 {UNTRACKED}": {"execution": "compile", "tracks": False}},
    "sb3": {"as it comes": {}},
    "tianshou": {"as it comes": {}},
}
# The libraries beside which a work is measured: Tianshou's file has its SAC alone.
BESIDE = {"dqn": ("rl8x", "sb3"), "sac": ("rl8x", "sb3", "tianshou")}
# How many times as many transitions a second as another library a variant of rl8x is to make.
GOALS = {
    "dqn-64": (("compile fp32", "sb3", 11.0),),
    "dqn-256": (("compile fp32", "sb3", 3.5),),
    "sac-256": (
        ("eager fp32", "sb3", 1.4),
        ("compile fp32", "sb3", 3.0),
        ("compile bf16", "sb3", 4.0),
        ("compile fp32", "tianshou", 3.0),
    ),
}


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=tuple(REPLAY_WORKS), default=list(REPLAY_WORKS))
    parser.add_argument("--peers", nargs="+", choices=tuple(VARIANTS), default=list(VARIANTS))
    parser.add_argument("--variants", nargs="+", metavar="NAME", help="only these, such as 'compile fp32'")
    parser.add_argument("--passes", type=int, default=4, help="fresh processes for each cell (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads of every library (default: %(default)s)")
    parser.add_argument("--timeout", type=float, default=900.0, help="seconds that one process may take")
    parser.add_argument("--quick", action="store_true", help="tiny sizes and one pass, to see that everything runs")
    parser.add_argument("--out", type=Path, help="JSON to write (default: benchmarks/results/replay.json)")
    args = parser.parse_args(argv)
    if args.out is None:
        args.out = RESULTS / ("replay-quick.json" if args.quick else "replay.json")
    if args.quick:
        args.passes = 1
    return args


def quick(work: ReplayWork) -> ReplayWork:
    """Shrink a work to a second, to see that a library runs at all."""
    return dataclasses.replace(work, num_envs=8, hidden=32, warmup_steps=32, blocks=2, iterations=2)


def measure(args: argparse.Namespace) -> Row:
    """Measure what the command line asks for, and write the result after every process."""
    works = {name: quick(REPLAY_WORKS[name]) if args.quick else REPLAY_WORKS[name] for name in args.only}
    result: Row = {
        "machine": machine(),
        "date": datetime.date.today().isoformat(),
        "settings": {"threads": args.threads, "quick": args.quick},
        "works": {name: work.described() for name, work in works.items()},
        "products": {name: products(work, args) for name, work in works.items()},
        "rows": [],
    }
    for index in range(args.passes):
        for name, work in works.items():
            for peer, variant, fields in cells(args, work.algorithm):
                timed = {"warmup_s": 0.0, "timed_s": 0.0} if args.quick else {}
                job = Job(work=work, threads=args.threads, seed=index, **timed, **fields)
                row = {"work": name, "peer": peer, "variant": variant, **run(PEERS[peer], job, {}, args.timeout)}
                result["rows"].append(row)
                save(args.out, result)
                told = row.get("error", row.get("transitions_per_s"))
                print(name, peer, f"({variant})", told, file=sys.stderr, flush=True)
    return result


def cells(args: argparse.Namespace, algorithm: str) -> Iterator[tuple[str, str, Mapping[str, Any]]]:
    """Go through the libraries that are measured with an algorithm, and their variants."""
    for peer in (peer for peer in args.peers if peer in BESIDE[algorithm]):
        for variant, fields in VARIANTS[peer].items():
            if args.variants is None or variant in args.variants:
                yield peer, variant, fields


def products(work: ReplayWork, args: argparse.Namespace) -> Row:
    """Return how often a second the products of an update could be done, by precision."""
    command = [python_of(PEERS["rl8x"]), "-m", "benchmarks.limits"]
    about = {"products": work.products, "threads": args.threads, "device": "cpu", "quick": args.quick}
    found = {}
    for precision in ("fp32", "bf16"):
        text = json.dumps({**about, "precision": precision})
        found[precision] = call(command, text, environment(args.threads, {}), args.timeout).get("per_s")
    return found


def render(result: Row) -> str:
    """Return the tables of a result."""
    settings, about = result["settings"], result["machine"]
    parts = [f"{about['cpu']}, {settings['threads']} threads, {result['date']}."]
    if settings["quick"]:
        parts.append("**A quick run: tiny sizes, the rates mean nothing.**")
    for name in names(result["rows"], "work"):
        parts += [f"### {name}", work_table(result, name)]
        if not settings["quick"]:
            parts.append(goals_table(result, name))
    return "\n\n".join(parts) + "\n"


def work_table(result: Row, name: str) -> str:
    """Return a row for each library and variant: transitions/s, updates/s, and the share of the products' rate."""
    work, lines = result["works"][name], []
    rows = [row for row in result["rows"] if row["work"] == name]
    for peer in names(rows, "peer"):
        for variant in names([row for row in rows if row["peer"] == peer], "variant"):
            rates = select(rows, "transitions_per_s", peer=peer, variant=variant)
            if not rates:
                lines.append([PEERS[peer].title, variant, "failed", "", "", ""])
                continue
            rate = statistics.median(rates)
            updates, limit = rate * work["updates_per_sample"], result["products"][name][precision_of(variant)]
            share = "" if limit is None else f"{updates / limit:.0%} of {short(limit)}"
            spread = f"{short(min(rates))} - {short(max(rates))}"
            lines.append([PEERS[peer].title, variant, short(rate), spread, short(updates), share])
    return table(["library", "variant", "transitions/s", "range", "updates/s", "of the products' rate"], lines)


def goals_table(result: Row, name: str) -> str:
    """Return how many times as many transitions a second rl8x made as other libraries, beside what is wanted.

    And beside the most that could be reached, if there were nothing but the products of the updates.
    """
    rows, lines = [row for row in result["rows"] if row["work"] == name], []
    updates = result["works"][name]["updates_per_sample"]
    for variant, peer, goal in GOALS[name]:
        own = select(rows, "transitions_per_s", peer="rl8x", variant=variant)
        other = select(rows, "transitions_per_s", peer=peer)
        if own and other:
            rate, theirs = statistics.median(own), statistics.median(other)
            limit = result["products"][name][precision_of(variant)]
            most = "" if limit is None else f"{limit / updates / theirs:.1f}"
            lines.append([variant, PEERS[peer].title, f"{rate / theirs:.1f}", f"{goal:g}", most])
    return table(["rl8x", "beside", "times", "wanted", "at most, by the products"], lines)


def main(argv: list[str] | None = None) -> None:
    """Measure and print."""
    print(render(measure(parse(argv))))


if __name__ == "__main__":
    main()
