"""Check and measure rl8x on a machine with a CUDA device, in under ten minutes, without a network.

The machine needs torch; gymnasium, tensordict and what they need are carried along in a folder on PYTHONPATH:

    pip install --no-deps --target carried gymnasium farama-notifications cloudpickle tensordict pyvers psutil tqdm
    pip install --no-deps --target carried platformdirs PyYAML
    PYTHONPATH=carried python benchmarks/cuda.py            # writes benchmarks/results/cuda.json
    python benchmarks/cuda.py --device cpu --quick          # does the script run? (the rates mean nothing)
    python benchmarks/throughput.py --render                # docs/benchmarks.md, from the JSON

Where MLflow is not installed nothing is tracked. rl8 1.0, rsl_rl and skrl are measured beside rl8x where they can be
imported. Checks come first, then the limits of matrix product and memory, then every work in every mode, the important
ones first: what there is no time for is left out and named.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import importlib.util
import itertools
import os
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import json

from benchmarks import report
from benchmarks.common import MALLOC_SETTINGS, WORKS, Job, Work, quick
from benchmarks.processes import ROOT, call, environment, machine, save

LARGE = dataclasses.replace(WORKS["rl8-defaults"], num_envs=65536)
ALL_WORKS: dict[str, Work] = {
    "rl8-defaults": WORKS["rl8-defaults"],
    "pendulum-64": WORKS["pendulum-64"],
    "pendulum-256": WORKS["pendulum-256"],
    "small": WORKS["small"],
    "rl8-defaults-65536": LARGE,
}
# Measured beside rl8x where they can be imported.
PEERS = ("rl8", "rsl_rl", "skrl")
# The important first; compiling takes longest, so it is left out first.
MODES = {"cuda": ("graph", "eager", "compile"), "cpu": ("eager", "compile")}
PRECISIONS = {"cuda": ("fp32", "tf32", "bf16"), "cpu": ("fp32", "bf16")}


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=tuple(MODES), default="cuda", help="(default: %(default)s)")
    parser.add_argument("--works", nargs="+", choices=tuple(ALL_WORKS), default=list(ALL_WORKS), metavar="WORK")
    parser.add_argument("--modes", nargs="+", choices=MODES["cuda"], help="(default: all of the device)")
    parser.add_argument("--precisions", nargs="+", choices=PRECISIONS["cuda"], help="(default: all of the device)")
    parser.add_argument("--threads", type=int, default=4, help="CPU threads (default: %(default)s)")
    parser.add_argument("--budget", type=float, default=540.0, help="seconds for everything (default: %(default)s)")
    parser.add_argument("--quick", action="store_true", help="tiny sizes, to see that everything runs")
    parser.add_argument("--out", type=Path, help="JSON to write (default: benchmarks/results/cuda.json)")
    args = parser.parse_args(argv)
    for name, legal in (("modes", MODES[args.device]), ("precisions", PRECISIONS[args.device])):
        chosen = getattr(args, name) or list(legal)
        wrong = [value for value in chosen if value not in legal]
        if wrong:
            parser.error(f"--{name}: on {args.device} there are {', '.join(legal)}; got {wrong[0]}")
        setattr(args, name, chosen)
    if args.out is None:
        args.out = ROOT / "benchmarks" / "results" / ("quick-cuda.json" if args.quick else f"{args.device}.json")
        if args.device == "cpu" and not args.quick:
            parser.error("--device cpu is there to try the script: give --quick, or a file by --out")
    return args


class Session:
    """What was measured so far, written after every process, and the time that is left."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.end = time.monotonic() + args.budget
        settings = {"threads": args.threads, "device": args.device, "malloc": MALLOC_SETTINGS, "quick": args.quick}
        self.works = {name: quick(work) if args.quick else work for name, work in ALL_WORKS.items()}
        self.result: dict[str, Any] = {
            "machine": machine(),
            "date": datetime.date.today().isoformat(),
            "settings": settings,
            "works": {name: work.described() for name, work in self.works.items()},
        }

    @property
    def left_s(self) -> float:
        """Seconds that are left."""
        return self.end - time.monotonic()

    def call(self, module: str, question: str, most_s: float) -> dict[str, Any]:
        """Ask a module in a fresh process of this interpreter, with what was carried along on its path."""
        env = environment(self.args.threads, {})
        carried = os.environ.get("PYTHONPATH", "")
        env["PYTHONPATH"] = os.pathsep.join(part for part in (str(ROOT), str(ROOT / "src"), absolute(carried)) if part)
        return call([sys.executable, "-m", module], question, env, max(1.0, min(most_s, self.left_s)))

    def save(self) -> None:
        """Write the result."""
        save(self.args.out, self.result)


def absolute(search_path: str) -> str:
    """Make the folders of a search path absolute: processes run in folders of their own."""
    return os.pathsep.join(str(Path(part).resolve()) for part in search_path.split(os.pathsep) if part)


def check(session: Session) -> bool:
    """Do the checks, and say which do not hold."""
    args = session.args
    modes = [mode for mode in ("eager", "compile", "graph") if mode in args.modes]
    sizes = {"num_envs": 8, "horizon": 8} if args.quick else {"num_envs": 512, "horizon": 32}
    question = json.dumps({"device": args.device, "modes": modes, "sizes": sizes})
    answer = session.call("benchmarks.cuda_checks", question, 180.0)
    failed = {"name": "all checks", "case": "", "passed": False, "told": answer.get("error", "")}
    session.result["checks"] = answer.get("checks", [failed])
    if "gpu" in answer:
        session.result["machine"]["gpu"] = answer["gpu"]
    session.save()
    for row in session.result["checks"]:
        print("check", row, file=sys.stderr, flush=True)
    return all(row["passed"] is not False for row in session.result["checks"])


def measure_limits(session: Session) -> None:
    """Measure what matrix product and memory allow."""
    args = session.args
    question = json.dumps({"threads": args.threads, "device": args.device, "quick": args.quick})
    row = session.call("benchmarks.limits", question, 60.0)
    session.result["limits"] = [row]
    session.save()
    print("limits", row, file=sys.stderr, flush=True)


def cells(args: argparse.Namespace) -> Iterator[tuple[str, str, str, str]]:
    """Go through what is to be measured, the important first: work, library, execution, precision."""
    peers = [name for name in PEERS if importlib.util.find_spec(name) is not None]
    modes = [mode for mode in MODES[args.device] if mode in args.modes]
    for mode, work in itertools.product(modes, args.works):
        if mode == modes[0]:
            yield from ((work, peer, "eager", "fp32") for peer in peers)
        for precision in args.precisions:
            yield work, "rl8x", mode, precision


def measure(session: Session) -> None:
    """Time iterations of every work in every mode, each in a fresh process, while there is time."""
    args, rows, left_out = session.args, [], []
    session.result.update(throughput=rows, left_out=left_out)
    times = {"warmup_s": 0.0, "timed_s": 0.0} if args.quick else {"warmup_s": 1.0, "timed_s": 1.5}
    for work, peer, mode, precision in cells(args):
        variant = f"{mode} {precision}" if peer == "rl8x" else "as it comes"
        if session.left_s < 15.0:
            left_out.append(f"{work} {peer} {variant}")
            continue
        fields: dict[str, Any] = {"execution": mode, "precision": precision, **times}
        job = Job(work=session.works[work], threads=args.threads, device=args.device, **fields)
        row = session.call(f"benchmarks.peers.{peer}", job.to_json(), 150.0)
        if row.get("version") == "absent":
            row["version"] = version_of_checkout()
        rows.append({"peer": peer, "variant": variant, "work": work, "run": 0, **row})
        session.save()
        told = {key: row[key] for key in ("error", "transitions_per_s", "first_iteration_s") if key in row}
        print(work, peer, f"({variant})", told, f"{session.left_s:.0f} s left", file=sys.stderr, flush=True)
    session.save()


def version_of_checkout() -> str:
    """Return rl8x's version where it is not installed but lies beside."""
    found = re.search(r'__version__ = "([^"]+)"', (ROOT / "src" / "rl8x" / "_version.py").read_text())
    return found[1] if found else "absent"


def main(argv: list[str] | None = None) -> int:
    """Check and measure; return 1 if a check did not hold or nothing could be measured."""
    session = Session(parse(argv))
    held = check(session)
    measure_limits(session)
    measure(session)
    print(report.render(session.result))
    measured = any("transitions_per_s" in row for row in session.result["throughput"])
    return 0 if held and measured else 1


if __name__ == "__main__":
    sys.exit(main())
