"""Measure how long `rl8x compare` takes on 20 runs of 2,000 steps, with a local database and with an MLflow server.

python benchmarks/compare_runs.py [--runs 20] [--steps 2000] [--server]
"""

from __future__ import annotations

import argparse
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

from rl8x.tracking.location import locate
from rl8x.tracking.store import MLflowStore, NewRun, Point

METRICS = ("eval/returns/mean", "losses/total", "env/steps")
LEARNING_RATES = ("0.01", "0.001", "0.0001", "0.00001")


def fill(uri: str, num_runs: int, num_steps: int) -> list[str]:
    """Log runs that differ by learning rate and seed; returns their IDs."""
    store = MLflowStore(locate(uri), request_timeout_s=60)
    ids = []
    for number in range(num_runs):
        run_id = store.create_run(NewRun(f"spool{number}", "bench", None, f"run-{number}", 1 + number))
        store.log_params(run_id, {"lr": LEARNING_RATES[number % 4], "seed": str(number // 4), "env": "CartPole"})
        points = [
            Point(name, float(step % (97 + number)) + number, 1 + step, 512 * step)
            for step in range(num_steps)
            for name in METRICS
        ]
        for start in range(0, len(points), 1000):
            store.log_points(run_id, points[start : start + 1000])
        ids.append(run_id)
    return ids


def measure(uri: str, ids: list[str], folder: Path) -> tuple[float, float]:
    """Return the seconds of the whole command, with Python's start, and those of the processor that it used."""
    command = [sys.executable, "-m", "rl8x.cli.main", "compare", *ids, "--group-by", "lr"]
    options = ["--tracking-uri", uri, "--output", str(folder)]
    start, before = time.perf_counter(), os.times()
    subprocess.run([*command, *options], check=True, stdout=subprocess.DEVNULL)
    after = os.times()
    used = after.children_user + after.children_system - before.children_user - before.children_system
    return time.perf_counter() - start, used


def report(what: str, uri: str, ids: list[str], folder: Path) -> None:
    """Print the median of three times."""
    seconds, used = sorted(measure(uri, ids, folder) for _ in range(3))[1]
    print(f"{what}: {seconds:.1f} s, {used:.1f} s of processor", flush=True)


def serve(uri: str, folder: Path) -> tuple[subprocess.Popen[bytes], str]:
    """Start an MLflow server on a database; returns it and its address."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = os.environ | {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
    command = [sys.executable, "-m", "mlflow", "server", "--workers", "1", "--port", str(port)]
    server = subprocess.Popen(
        [*command, "--backend-store-uri", uri, "--artifacts-destination", str(folder)],
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    address = f"http://127.0.0.1:{port}"
    for _ in range(600):
        try:
            urllib.request.urlopen(f"{address}/health", timeout=1).close()
            return server, address
        except OSError:
            time.sleep(0.2)
    server.terminate()
    raise SystemExit("the server did not start")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--server", action="store_true", help="also by an MLflow server on this machine")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        uri = f"sqlite:///{folder}/mlruns/mlflow.db"
        ids = fill(uri, options.runs, options.steps)
        report("local database", uri, ids, folder / "local")
        if options.server:
            server, address = serve(uri, folder / "artifacts")
            try:
                report("server", address, ids, folder / "remote")
            finally:
                server.terminate()
                server.wait()


if __name__ == "__main__":
    main()
