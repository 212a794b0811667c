"""Measure rl8x beside other libraries on the same work: speed, seconds to a return, memory, scaling, a long run.

Every measurement is a fresh process. The libraries take turns within a pass (A B C ... A B C ...), so that a machine
that changes its speed changes it for all of them. Each runs in a virtual environment of its own, made at the
first call.

    python benchmarks/throughput.py --quick                          # does everything run? (the rates mean nothing)
    python benchmarks/throughput.py --passes 4                       # the table; about two hours on two cores
    python benchmarks/throughput.py --only small --peers rl8x sb3    # one work, two libraries
    python benchmarks/throughput.py --measure return --seeds 10      # seconds to CartPole 475 and Pendulum -200
    python benchmarks/throughput.py --render                         # docs/benchmarks.md and README.md, from the JSON
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import report
from benchmarks.common import MALLOC_SETTINGS, TARGETS, WORKS, Job, Work, quick
from benchmarks.processes import PEERS, ROOT, STORES, call, environment, machine, python_of, run, save

RESULTS = ROOT / "benchmarks" / "results"
TUNED = ROOT / "benchmarks" / "tuned.json"
SCALING_ENVS = (1024, 4096, 16384, 65536)
MEASURES = ("limits", "throughput", "return", "scaling", "soak", "tracking")


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--measure",
        nargs="+",
        choices=MEASURES,
        default=["limits", "throughput"],
        help="what to measure (default: %(default)s)",
    )
    parser.add_argument(
        "--only",
        nargs="+",
        choices=tuple(WORKS),
        default=list(WORKS),
        metavar="WORK",
        help=f"works, of {', '.join(WORKS)}",
    )
    parser.add_argument(
        "--peers",
        nargs="+",
        choices=tuple(PEERS),
        default=list(PEERS),
        metavar="PEER",
        help=f"libraries, of {', '.join(PEERS)}",
    )
    parser.add_argument(
        "--variants", nargs="+", metavar="NAME", help="only these variants, such as 'as it comes' or 'eager fp32'"
    )
    parser.add_argument("--passes", type=int, default=4, help="fresh processes for each cell (default: %(default)s)")
    parser.add_argument(
        "--seeds", type=int, default=10, help="seeds of each library for --measure return (default: %(default)s)"
    )
    parser.add_argument(
        "--soak-steps", type=int, default=2000, help="iterations of --measure soak (default: %(default)s)"
    )
    parser.add_argument("--threads", type=int, default=2, help="CPU threads of every library (default: %(default)s)")
    parser.add_argument("--device", default="cpu", help="device of the torch libraries (default: %(default)s)")
    parser.add_argument(
        "--timeout", type=float, default=900.0, help="seconds that one process may take (default: %(default)s)"
    )
    parser.add_argument("--quick", action="store_true", help="tiny sizes and one pass, to see that everything runs")
    parser.add_argument(
        "--out", type=Path, help="JSON to write, and to add to where it exists (default: benchmarks/results/cpu.json)"
    )
    parser.add_argument("--install", action="store_true", help="only make the libraries' virtual environments")
    parser.add_argument("--render", action="store_true", help="only write the tables of the pages from the JSON")
    args = parser.parse_args(argv)
    if args.out is None:
        args.out = RESULTS / ("quick.json" if args.quick else "cpu.json" if args.device == "cpu" else "cuda.json")
    if args.quick:
        args.passes, args.seeds = 1, 1
    return args


def cells(args: argparse.Namespace) -> Iterator[tuple[str, str, dict[str, Any], dict[str, str]]]:
    """Go through the libraries and their variants: name, variant, fields of the job, the process's environment."""
    for name in args.peers:
        for variant, changes in PEERS[name].variants.items():
            if args.variants is None or variant in args.variants:
                fields = {key: value for key, value in changes.items() if key != "env"}
                yield name, variant, fields, changes.get("env", {})


class Session:
    """The result so far, written after every process."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.unsupported: set[tuple[str, str]] = set()
        self.result: dict[str, Any] = json.loads(args.out.read_text()) if args.out.exists() else {}
        self.result.update(
            machine=machine(),
            date=datetime.date.today().isoformat(),
            settings={"threads": args.threads, "device": args.device, "malloc": MALLOC_SETTINGS, "quick": args.quick},
            works={name: work.described() for name, work in WORKS.items()},
        )

    def save(self) -> None:
        """Write the result."""
        save(self.args.out, self.result)

    def measure(
        self, group: str, peer: str, variant: str, job: Job, extra: dict[str, str], **tags: Any
    ) -> dict[str, Any]:
        """Do a job, add what it measured to a group, and say so."""
        if (peer, variant) in self.unsupported:
            return {}
        row = run(PEERS[peer], job, extra, self.args.timeout)
        if "unsupported" in row.get("error", ""):
            self.unsupported.add((peer, variant))
            print(f"{peer} ({variant}): {row['error']}", file=sys.stderr)
            return row
        row = {"peer": peer, "variant": variant, **tags, **row}
        self.result.setdefault(group, []).append(row)
        self.save()
        told = {
            key: row[key]
            for key in ("error", "transitions_per_s", "seconds", "reached", "first_iteration_s", "peak_rss_mb")
            if key in row
        }
        print(group, peer, f"({variant})", *tags.values(), told, file=sys.stderr, flush=True)
        return row

    def job(self, work: Work, **fields: Any) -> Job:
        """Return a job under this session's settings."""
        if self.args.quick:
            work, fields = quick(work), {"warmup_s": 0.0, "timed_s": 0.0, **fields}
        return Job(work=work, threads=self.args.threads, device=self.args.device, **fields)


def measure_limits(session: Session) -> None:
    """Measure what the matrix product allows."""
    args = session.args
    text = json.dumps({"threads": args.threads, "device": args.device, "quick": args.quick})
    command = [python_of(PEERS["rl8x"]), "-m", "benchmarks.limits"]
    row = call(command, text, environment(args.threads, {}), args.timeout)
    session.result.setdefault("limits", []).append(row)
    session.save()
    print("limits", row, file=sys.stderr, flush=True)


def measure_throughput(session: Session) -> None:
    """Time iterations of every work, library and variant, the libraries in turn."""
    for index in range(session.args.passes):
        for name in session.args.only:
            for peer, variant, fields, extra in cells(session.args):
                job = session.job(WORKS[name], seed=index, **fields)
                session.measure("throughput", peer, variant, job, extra, work=name, run=index)


def measure_return(session: Session) -> None:
    """Time training until a deterministic evaluation reaches the target, on settings tuned for each library."""
    tuned = json.loads(TUNED.read_text()) if TUNED.exists() else {}
    base = {"cartpole": WORKS["cartpole-64"], "pendulum": WORKS["pendulum-64"]}
    for seed in range(session.args.seeds):
        for env, target in TARGETS.items():
            for peer, variant, fields, extra in cells(session.args):
                if variant == "malloc" or (peer == "rl8" and env == "cartpole"):
                    continue  # rl8 knows no terminations: a pole that falls costs it nothing
                choice = tuned.get(peer, {}).get(env, {})
                work = dataclasses.replace(base[env], **choice.get("settings", {}))
                job = Job(
                    work=work,
                    threads=session.args.threads,
                    device=session.args.device,
                    seed=100 + seed,
                    target=target,
                    **fields,
                )
                if session.args.quick:
                    job = dataclasses.replace(job, budget_s=2.0)
                session.measure("return", peer, variant, job, extra, work=env, run=seed)


def measure_scaling(session: Session) -> None:
    """Time iterations over the number of environments, the minibatches growing with it."""
    for index in range(session.args.passes):
        for num_envs in SCALING_ENVS:
            work = dataclasses.replace(WORKS["pendulum-64"], num_envs=num_envs, iterations=4)
            for peer, variant, fields, extra in cells(session.args):
                job = session.job(work, seed=index, **fields)
                session.measure("scaling", peer, variant, job, extra, work=num_envs, run=index)


def measure_soak(session: Session) -> None:
    """Time many iterations in one process: the last as fast as the first, and no more memory."""
    steps = 5 if session.args.quick else session.args.soak_steps
    work = dataclasses.replace(WORKS["pendulum-64"], num_envs=1024, iterations=steps)
    for index in range(session.args.passes):
        for peer, variant, fields, extra in cells(session.args):
            job = session.job(work, seed=index, fresh=0 if session.args.quick else 4, **fields)
            session.measure("soak", peer, variant, job, extra, work="soak", run=index)


def measure_tracking(session: Session) -> None:
    """Measure what logging a row takes of rl8x's training thread, with each store."""
    args = session.args
    for store in STORES:
        measured = {"store": store, "steps": 3 if args.quick else 300}
        text = json.dumps({"threads": args.threads, "measured": measured})
        command = [python_of(PEERS["rl8x"]), "-m", "benchmarks.tracking_cost"]
        row = {"store": store, **call(command, text, environment(args.threads, {}), args.timeout)}
        session.result.setdefault("tracking", []).append(row)
        session.save()
        print("tracking", row, file=sys.stderr, flush=True)


def main(argv: list[str] | None = None) -> None:
    """Measure what the command line asks for."""
    args = parse(argv)
    if args.install:
        for name in args.peers:
            print(name, python_of(PEERS[name]))
        return
    if not args.render:
        session = Session(args)
        steps = {
            "limits": measure_limits,
            "throughput": measure_throughput,
            "return": measure_return,
            "scaling": measure_scaling,
            "soak": measure_soak,
            "tracking": measure_tracking,
        }
        for name in args.measure:
            steps[name](session)
        print(report.render(session.result))
    if args.render or not args.quick:
        report.write_pages(ROOT, RESULTS)


if __name__ == "__main__":
    main()
