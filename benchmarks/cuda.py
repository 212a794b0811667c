"""Check and measure rl8x on a machine with a CUDA device, in under ten minutes, without a network.

The machine needs torch; gymnasium, tensordict and what they need are carried along in a folder on PYTHONPATH:

    pip install --no-deps --target carried gymnasium farama-notifications cloudpickle tensordict pyvers psutil tqdm
    pip install --no-deps --target carried platformdirs PyYAML
    PYTHONPATH=carried python benchmarks/cuda.py            # writes benchmarks/results/cuda.json
    python benchmarks/cuda.py --device cpu --quick          # does the script run? (the rates mean nothing)

Where MLflow is not installed nothing is tracked. rl8 1.0, rsl_rl and skrl are measured beside rl8x where they can be
imported. Checks come first, then the limits of matrix product and memory, then every work in every mode, the important
ones first: what there is no time for is left out and named.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import itertools
import json
import os
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import speed, speed_tables
from benchmarks.processes import ask, environment
from benchmarks.results import RESULTS, ROOT
from benchmarks.works import WORKS, Job, Work

NAMES = ("rl8-defaults", "pendulum-64", "pendulum-256", "small")
LARGE = dataclasses.replace(WORKS["rl8-defaults"], num_envs=65536)
CUDA_WORKS: dict[str, Work] = {**{name: WORKS[name] for name in NAMES}, "rl8-defaults-65536": LARGE}
# Measured beside rl8x where they can be imported.
PEERS = ("rl8", "rsl_rl", "skrl")
# The important first; compiling takes longest, so it is left out first.
MODES = {"cuda": ("graph", "eager", "compile"), "cpu": ("eager", "compile")}
PRECISIONS = {"cuda": ("fp32", "tf32", "bf16"), "cpu": ("fp32", "bf16")}


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--device", choices=tuple(MODES), default="cuda", help="(default: %(default)s)")
    add("--works", nargs="+", choices=tuple(CUDA_WORKS), default=list(CUDA_WORKS), metavar="WORK")
    add("--modes", nargs="+", choices=MODES["cuda"], help="(default: all of the device)")
    add("--precisions", nargs="+", choices=PRECISIONS["cuda"], help="(default: all of the device)")
    add("--threads", type=int, default=4, help="CPU threads (default: %(default)s)")
    add("--budget", type=float, default=540.0, help="seconds for everything (default: %(default)s)")
    add("--quick", action="store_true", help="tiny sizes, to see that everything runs; no file but --out")
    add("--out", type=Path, help="JSON to write (default: benchmarks/results/cuda.json)")
    args = parser.parse_args(argv)
    for name, legal in (("modes", MODES[args.device]), ("precisions", PRECISIONS[args.device])):
        chosen = getattr(args, name) or list(legal)
        wrong = [value for value in chosen if value not in legal]
        if wrong:
            parser.error(f"--{name}: on {args.device} there are {', '.join(legal)}; got {wrong[0]}")
        setattr(args, name, chosen)
    if args.out is None and not args.quick:
        if args.device == "cpu":
            parser.error("--device cpu is there to try the script: give --quick, or a file by --out")
        args.out = RESULTS / "cuda.json"
    return args


class Session(speed.Session):
    """A measurement of its own, in this interpreter with what was carried along, as long as there is time."""

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__(args, args.out, CUDA_WORKS)
        self.end = time.monotonic() + args.budget
        for group in ("checks", "limits", "throughput", "left_out"):
            self.result[group] = []

    @property
    def left_s(self) -> float:
        """Seconds that are left."""
        return self.end - time.monotonic()

    def call(self, module: str, question: str, most_s: float) -> dict[str, Any]:
        """Ask a module in a fresh process; processes run in folders of their own, so paths are absolute."""
        env = environment(self.args.threads, {})
        carried = [str(Path(part).resolve()) for part in os.environ.get("PYTHONPATH", "").split(os.pathsep) if part]
        env["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "src"), *carried])
        return ask(sys.executable, module, question, env, max(1.0, min(most_s, self.left_s)))


def check(session: Session) -> bool:
    """Do the checks, and return whether all hold."""
    args = session.args
    modes = [mode for mode in ("eager", "compile", "graph") if mode in args.modes]
    sizes = {"num_envs": 8, "horizon": 8} if args.quick else {"num_envs": 512, "horizon": 32}
    question = json.dumps({"device": args.device, "modes": modes, "sizes": sizes})
    answer = session.call("cuda_checks", question, 180.0)
    failed = {"name": "all checks", "case": "", "passed": False, "told": answer.get("error", "")}
    if "gpu" in answer:
        session.result["machine"]["gpu"] = answer["gpu"]
    rows = [session.keep("checks", row) for row in answer.get("checks", [failed])]
    return all(row["passed"] is not False for row in rows)


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
    args = session.args
    times = {"warmup_s": 0.0, "timed_s": 0.0} if args.quick else {"warmup_s": 1.0, "timed_s": 1.5}
    for work, peer, mode, precision in cells(args):
        variant = f"{mode} {precision}" if peer == "rl8x" else "as it comes"
        if session.left_s < 15.0:
            session.result["left_out"].append(f"{work} {peer} {variant}")
            continue
        fields: dict[str, Any] = {"execution": mode, "precision": precision, **times}
        job = Job(work=session.works[work], threads=args.threads, device=args.device, **fields)
        row = session.call(f"peers.{peer}", job.to_json(), 150.0)
        if row.get("version") == "absent":  # rl8x is not installed but lies beside
            text = (ROOT / "src" / "rl8x" / "_version.py").read_text()
            row["version"] = re.findall(r'__version__ = "([^"]+)"', text)[0]
        session.keep("throughput", {"peer": peer, "variant": variant, "work": work, "run": 0, **row})
    session.save()


def main(argv: list[str] | None = None) -> int:
    """Check and measure; return 1 if a check did not hold or nothing could be measured."""
    session = Session(parse(argv))
    held = check(session)
    limits = {name: getattr(session.args, name) for name in ("threads", "device", "quick")}
    session.keep("limits", session.call("limits", json.dumps(limits), 60.0))
    measure(session)
    print(speed_tables.render(session.result))
    measured = any("transitions_per_s" in row for row in session.result["throughput"])
    return 0 if held and measured else 1


if __name__ == "__main__":
    sys.exit(main())
