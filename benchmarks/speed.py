"""Measure rl8x beside other libraries on the same work: speed, seconds to a return, memory, scaling, a long run.

    python -m benchmarks.speed --quick                          # does everything run? (the rates mean nothing)
    python -m benchmarks.speed --only small --peers rl8x sb3    # one work, two libraries

docs/benchmarks.md has the other commands, also for a GPU. Every measurement is a fresh process. The libraries take
turns within a pass (A B C ... A B C ...), so that a machine that changes its speed changes it for all of them. Each
runs in a virtual environment of its own, made at the first call; for a GPU in this interpreter, where it can be
imported there.

Results go to benchmarks/results, and from there into the pages by `python -m benchmarks.pages`. What a file has is not
measured again: a measurement that was cut off goes on, and more `--passes` add to it.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks import speed_tables
from benchmarks.processes import (
    MALLOC,
    MALLOC_SETTINGS,
    PEERS,
    UNTRACKED,
    ask,
    carried,
    environment,
    is_there,
    run,
    variants_of,
)
from benchmarks.results import RESULTS, ROOT, Row, about, held, save, version
from benchmarks.works import ALL_WORKS, CUDA_WORKS, REPLAY_WORKS, TARGETS, WORKS, AnyWork, Job, Work, quick

TUNED = ROOT / "benchmarks" / "tuned.json"
SCALING_ENVS = (1024, 4096, 16384, 65536)
TOLD = ("error", "transitions_per_s", "seconds", "reached", "first_iteration_s", "peak_rss_mb")
# Transitions of `--measure starting`.
TRANSITIONS = {"small": 1_000_000, "pendulum-64": 20_000_000, "pendulum-256": 5_000_000, "rl8-defaults": 5_000_000}
# Name, execution, which has a cache of programs of its own that is empty at first, and the part of the transitions that
# is trained for: what runs at one speed from the second iteration on is measured for a part, and the rest is reckoned.
CASES = (
    ("eager", "eager", 0.1),
    ("compile, cold", "compile", 1.0),
    ("compile, warm", "compile", 0.25),
    ("auto, cold", "auto", 1.0),
)
_IMPORT = """
import time, torch
begin = time.perf_counter()
from rl8x import PPOConfig, Trainer
print(time.perf_counter() - begin)
"""


class Session:
    """The result so far, written after every process, and added to where its file exists."""

    def __init__(self, args: argparse.Namespace, out: Path | None, works: Mapping[str, AnyWork]) -> None:
        self.args, self.out, self.on_gpu, self.quick = args, out, args.device != "cpu", args.quick
        self.works = {name: quick(work) if args.quick else work for name, work in works.items()}
        before = held(out) if out else {}
        settings = {"threads": args.threads, "device": args.device, "malloc": MALLOC_SETTINGS, "quick": args.quick}
        described = {name: work.described() for name, work in self.works.items()}
        self.result = {**before, **about("rl8x", "torch"), "settings": settings, "works": described}
        self.result["machine"] |= {name: gpu for name, gpu in before.get("machine", {}).items() if name == "gpu"}
        self.carried = carried() if self.on_gpu else {}

    def keep(self, group: str, row: Row) -> None:
        """Add a row to a group of the result, and say so."""
        self.result.setdefault(group, []).append(row)
        if self.out is not None:
            save(self.out, self.result)
        tags = [str(row[name]) for name in ("work", "peer", "variant", "store", "case") if name in row]
        told = {key: row[key] for key in TOLD if key in row}
        print(group, *tags, told or row, file=sys.stderr, flush=True)

    def chosen(self) -> dict[str, AnyWork]:
        """Return the works that are asked for, by default all."""
        return {name: self.works[name] for name in self.args.only or self.works}

    def turns(self, group: str, works: Mapping[Any, AnyWork], **fields: Any) -> None:
        """Do each of some works as `each` does, in so many passes."""
        for index in range(self.args.passes):
            for name, work in works.items():
                self.each(group, name, work, index, seed=index, **fields)

    def each(
        self,
        group: str,
        name: str | int,
        work: AnyWork,
        index: int,
        *,
        peers: list[str] | None = None,
        left_out: tuple[str, ...] = (UNTRACKED,),
        **fields: Any,
    ) -> None:
        """Do a work by each library in each of its variants but some, the libraries in turn, where it was not done."""
        if self.quick:
            fields = {"warmup_s": 0.0, "timed_s": 0.0, **fields}
        for peer, variant, changes in self.ways(work, peers, left_out):
            cell = {"peer": peer, "variant": variant, "work": name, "run": index}
            if any(cell.items() <= row.items() and "error" not in row for row in self.result.get(group, [])):
                continue
            if time.monotonic() > self.args.end:
                self.result.setdefault("left_out", []).append(f"{name} {peer} {variant}")
                continue
            changed = {key: value for key, value in changes.items() if key != "env"}
            job = Job(work=work, threads=self.args.threads, device=self.args.device, **fields, **changed)
            extra = {**changes.get("env", {}), **self.carried}
            self.keep(group, cell | run(PEERS[peer], job, extra, self.args.timeout, here=self.on_gpu))

    def ways(
        self, work: AnyWork, peers: list[str] | None, left_out: tuple[str, ...]
    ) -> Iterator[tuple[str, str, Mapping[str, Any]]]:
        """Yield the libraries that can do a work, with the variants that are asked for, and what these change."""
        for peer in peers or self.args.peers:
            if work.algorithm not in PEERS[peer].algorithms or (self.on_gpu and not is_there(peer)):
                continue
            for variant, changes in variants_of(peer, self.args.device).items():
                is_wanted = not self.args.variants or variant in self.args.variants
                if is_wanted and not any(each in variant for each in left_out):
                    yield peer, variant, changes

    def ask(self, module: str, **question: Any) -> Row:
        """Ask a module in a fresh process of rl8x's environment."""
        question = {"threads": self.args.threads, "device": self.args.device, "quick": self.quick, **question}
        env = environment(self.args.threads, self.carried)
        return ask(sys.executable, module, json.dumps(question), env, self.args.timeout)


def measure_checks(session: Session) -> None:
    """Check that captured execution does what eager execution does, and waits for nothing."""
    sizes = {"num_envs": 8, "horizon": 8} if session.quick else {"num_envs": 512, "horizon": 32}
    answer = session.ask("cuda_checks", sizes=sizes)
    if "gpu" in answer:
        session.result["machine"]["gpu"] = answer["gpu"]
    failed = {"name": "all checks", "case": "", "passed": False, "told": answer.get("error", "")}
    session.result["checks"] = []
    for row in answer.get("checks", [failed]):
        session.keep("checks", row)


def measure_limits(session: Session) -> None:
    """Measure what the matrix product allows."""
    session.keep("limits", session.ask("limits"))


def measure_throughput(session: Session) -> None:
    """Time iterations of every work, library and variant."""
    session.result.pop("left_out", None)
    times = {"warmup_s": 1.0, "timed_s": 1.5} if session.on_gpu and not session.quick else {}
    session.turns("throughput", session.chosen(), **times)


def measure_return(session: Session) -> None:
    """Time training until a deterministic evaluation reaches the target, on settings tuned for each library."""
    budget = {"budget_s": 2.0} if session.quick else {}
    for seed in range(session.args.seeds):
        for env, target in TARGETS.items():
            for peer in session.args.peers:
                if (peer, env) == ("rl8", "cartpole"):
                    continue  # rl8 knows no terminations: a pole that falls costs it nothing
                choice = held(TUNED).get(peer, {}).get(env, {}).get("settings", {})
                work = dataclasses.replace(WORKS[f"{env}-64"], **choice)
                fields = {"target": target, "seed": 100 + seed, **budget}
                session.each("return", env, work, seed, peers=[peer], left_out=(UNTRACKED, MALLOC), **fields)


def measure_scaling(session: Session) -> None:
    """Time iterations over the number of environments, the minibatches growing with it."""
    sizes = {count: {} if session.quick else {"num_envs": count, "iterations": 4} for count in SCALING_ENVS}
    work = session.works["pendulum-64"]
    session.turns("scaling", {count: dataclasses.replace(work, **size) for count, size in sizes.items()})


def measure_soak(session: Session) -> None:
    """Time many iterations in one process: the last as fast as the first, and no more memory."""
    steps, fresh = (5, 0) if session.quick else (session.args.soak_steps, 4)
    work = dataclasses.replace(session.works["pendulum-64"], num_envs=1024, iterations=steps)
    session.turns("soak", {"soak": work}, fresh=fresh)


def measure_tracking(session: Session) -> None:
    """Measure what logging a row takes of rl8x's training thread, with each store."""
    for store in ("sqlite", "http"):
        session.keep("tracking", {"store": store, **session.ask("tracking_cost", store=store)})


def measure_replay(session: Session) -> None:
    """Time DQN and SAC, and how often a second the matrix products of an update alone could be done."""
    works = session.chosen()
    for name, work in works.items():
        rates = {kind: session.ask("limits", products=work.products, precision=kind) for kind in ("fp32", "bf16")}
        per_s = {kind: rate.get("per_s") for kind, rate in rates.items()}
        session.result.setdefault("products", {})[name] = per_s
    session.turns("rows", works, left_out=(MALLOC,))


def measure_starting(session: Session) -> None:
    """Measure imports, and seconds of training to so many transitions from an empty cache of programs."""
    names = session.args.only or list(TRANSITIONS)
    counts = {name: TRANSITIONS[name] for name in names}
    session.result.update(starting=counts, torch=version("torch"), commands=commands(), rows=[])
    session.result["to_return"] = list(to_return(session))
    for name in names:
        work, transitions = session.works[name], 5000 if session.quick else TRANSITIONS[name]
        job = Job(work=work, threads=session.args.threads, warmup_s=1.0, timed_s=2.0)
        for case, row in own_cases(job, transitions, session.args.timeout):
            if "error" not in row:
                rate = (row["transitions"] - work.transitions) / (row["seconds"] - row["first_iteration_s"])
                row["seconds_to_all"] = row["seconds"] + max(0, transitions - row["transitions"]) / rate
            session.keep("rows", {"work": name, "case": case, **row})
        for peer in session.args.peers:
            if peer == "rl8x" or work.algorithm not in PEERS[peer].algorithms:
                continue
            row = run(PEERS[peer], job, {}, session.args.timeout)
            if "error" not in row:
                rest = (transitions - work.transitions) / row["transitions_per_s"]
                row["seconds_to_all"] = row["first_iteration_s"] + rest
            session.keep("rows", {"work": name, "case": PEERS[peer].title, **row})


def own_cases(job: Job, transitions: int, timeout_s: float) -> Iterator[tuple[str, Row]]:
    """Train rl8x in each of `CASES` for its part of the transitions; each execution has a cache of its own."""
    with tempfile.TemporaryDirectory(prefix="rl8x-starting-") as folder:
        for case, execution, part in CASES:
            # An eager run of `auto` has to be asked for all transitions to know how long it will be.
            count = max(int(part * transitions), 3 * job.work.transitions)
            caches = {f"{kind}_CACHE_DIR": f"{folder}/{execution}/{kind}" for kind in ("RL8X", "TORCHINDUCTOR")}
            own = dataclasses.replace(job, transitions=count, execution=execution, tracks=False)
            yield case, run(PEERS["rl8x"], own, caches, timeout_s)


def to_return(session: Session) -> Iterator[Row]:
    """Train CartPole to a return of 475, eagerly, compiled with an empty cache, and with the cache of that."""
    settings = held(TUNED)["rl8x"]["cartpole"]["settings"]
    fields: dict[str, Any] = {"threads": session.args.threads, "target": TARGETS["cartpole"], "budget_s": 120.0}
    with tempfile.TemporaryDirectory(prefix="rl8x-starting-") as folder:
        for case, execution, _ in CASES[:3]:
            rows = []
            for seed in range(1 if case.endswith("cold") else 3):
                work = Work(env="cartpole", iterations=1, **settings)
                job = Job(work=work, seed=seed, execution=execution, **fields)
                rows.append(run(PEERS["rl8x"], job, {"RL8X_CACHE_DIR": folder}, 300.0))
            yield {"case": case, **{name: [row.get(name) for row in rows] for name in ("seconds", "reached")}}


def commands() -> dict[str, float]:
    """Measure the imports of a script, and the shortest run from the shell, in seconds."""
    options: dict[str, Any] = {"capture_output": True, "text": True, "check": True}
    imports = [float(subprocess.run([sys.executable, "-c", _IMPORT], **options).stdout) for _ in range(5)]
    command = [sys.executable, "-m", "rl8x.cli.main", "train", "CartPole", "--preset", "rl8", "--max-steps", "1"]
    shell = []
    with tempfile.TemporaryDirectory(prefix="rl8x-starting-") as folder:
        for _ in range(2):
            begin = time.perf_counter()
            subprocess.run(command, cwd=folder, **options)
            shell.append(time.perf_counter() - begin)
    return {"import_s": min(imports), "train_one_step_s": min(shell)}


MEASURES = {
    "checks": measure_checks,
    "limits": measure_limits,
    "throughput": measure_throughput,
    "return": measure_return,
    "scaling": measure_scaling,
    "soak": measure_soak,
    "tracking": measure_tracking,
    "replay": measure_replay,
    "starting": measure_starting,
}


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--measure", nargs="+", choices=MEASURES, default=["limits", "throughput"], help="(default: %(default)s)")
    add("--only", nargs="+", choices=ALL_WORKS, metavar="WORK", help=f"works, of {', '.join(ALL_WORKS)}")
    add("--peers", nargs="+", choices=PEERS, default=list(PEERS), metavar="PEER", help=f"of {', '.join(PEERS)}")
    add("--variants", nargs="+", metavar="NAME", help="only these, such as 'as it comes' or 'eager fp32'")
    add("--passes", type=int, default=4, help="fresh processes for each cell (default: %(default)s)")
    add("--seeds", type=int, default=10, help="seeds of each library for `return` (default: %(default)s)")
    add("--soak-steps", type=int, default=2000, help="iterations of `soak` (default: %(default)s)")
    add("--threads", type=int, default=2, help="CPU threads of every library (default: %(default)s)")
    add("--timeout", type=float, default=900.0, help="seconds that one process may take (default: %(default)s)")
    add("--quick", action="store_true", help="tiny sizes and one pass, to see that everything runs; no file but --out")
    add("--out", type=Path, help="JSON to write, and to add to where it exists (default: in benchmarks/results)")
    add("--device", choices=("cpu", "cuda"), default="cpu", help="(default: %(default)s)")
    add("--minutes", type=float, default=float("inf"), help="what is not begun by then is left out, and named")
    args = parser.parse_args(argv)
    if args.quick:
        args.passes, args.seeds = 1, 1
    args.end = time.monotonic() + 60.0 * args.minutes
    return args


def main(argv: list[str] | None = None) -> int:
    """Measure what the command line asks for; returns 1 if a check did not hold."""
    args, failed = parse(argv), 0
    for name in args.measure:
        on_cpu = args.device == "cpu"
        file = name if on_cpu and name in ("replay", "starting") else args.device
        out = args.out or (None if args.quick else RESULTS / f"{file}.json")
        session = Session(args, out, REPLAY_WORKS if name == "replay" else WORKS if on_cpu else CUDA_WORKS)
        MEASURES[name](session)
        print(speed_tables.render(session.result))
        failed += name == "checks" and any(row["passed"] is False for row in session.result["checks"])
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
