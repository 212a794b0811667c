"""Faults of HTTP between a run and MLflow's server, by a proxy between them."""

from __future__ import annotations

import functools
import random
import shutil
import signal
from pathlib import Path
from typing import Any

from benchmarks.fault_process import side_by_side
from benchmarks.fault_proxy import Fault, Proxy
from benchmarks.fault_tools import database_template, scratch
from benchmarks.fault_tries import Timing, Try, totals
from benchmarks.fault_truth import found_secrets
from benchmarks.servers import free_port, kill_server, start_server

TITLE = "HTTP between a run and MLflow's server"


def http(tries: int, first: int = 0) -> dict[str, Any]:
    """Break HTTP under runs at random instants."""
    with database_template() as template, scratch() as root:
        database = root / "server.db"
        shutil.copy(template, database)
        port = free_port()
        server = start_server(f"sqlite:///{database}", root / "server.log", port, root / "artifacts")
        try:
            do = functools.partial(_try, port=port, database=database)
            results = side_by_side(tries, do, first=first, workers=min(2, tries))
        finally:
            kill_server(server)
        # What went over to the server: tags, params, artifacts.
        secrets = [form for number in range(first, first + tries) for form in (_password(number), _token(number))]
        leaked = found_secrets(root, (), secrets)
    row = totals(TITLE, results)
    row["secrets"] += len(leaked)
    row["ok"] = row["ok"] and not leaked
    row["offenders"] += [f"the server has a password in {name}" for name in leaked[:3]]
    return row


def _password(seed: int) -> str:
    return f"pw{seed:04}secret"


def _token(seed: int) -> str:
    return f"token{seed:04}secret"


def _try(seed: int, port: int, database: Path) -> dict[str, Any]:
    random.seed(f"http {seed}")
    fault = Fault.drawn()
    timing = Timing.drawn(signals=[None, None, None, signal.SIGTERM, signal.SIGKILL])
    timing.fault = random.choice([0, timing.fault])
    with scratch() as root:
        proxy = Proxy(port, fault)
        try:
            return _broken(seed, root, proxy, f"seed {seed}: {fault}, {timing}", timing, database)
        finally:
            proxy.close()


def _broken(seed: int, root: Path, proxy: Proxy, title: str, timing: Timing, database: Path) -> dict[str, Any]:
    """Train while HTTP is broken, then sync while it is, mend it, sync and go on."""
    # The address with its password comes on the command line or by the environment, or the token does.
    how = random.choice(["option", "environment", "token"])
    address = (
        f"http://127.0.0.1:{proxy.port}" if how == "token" else f"http://user:{_password(seed)}@127.0.0.1:{proxy.port}"
    )
    env = {"MLFLOW_TRACKING_TOKEN": _token(seed)} if how == "token" else {}
    if how != "option":
        env["MLFLOW_TRACKING_URI"] = address
    attempt = Try(
        root,
        database,
        experiment=f"try {seed}",
        env=env,
        uri=address if how == "option" else None,
        secrets=[_password(seed), _token(seed)],
    )
    ended = attempt.run(timing, proxy.break_it, proxy.mend)
    words = attempt.check_words(ended)
    attempt.check_exit(ended, words, timing)
    attempt.env.setdefault("MLFLOW_TRACKING_URI", address)  # without its password no store can be reached
    attempt.env.update(MLFLOW_HTTP_REQUEST_TIMEOUT="1", MLFLOW_HTTP_REQUEST_MAX_RETRIES="0")
    if random.random() < 0.3:
        proxy.break_it()
        attempt.sync()
    proxy.mend()
    del attempt.env["MLFLOW_HTTP_REQUEST_TIMEOUT"]
    attempt.sync(words.command if words.command is not None else ["sync"])
    attempt.sync()
    finished = ended.finished
    attempt.check_end(status="FINISHED" if finished else "KILLED", excused=words.lost)
    if not finished and list(attempt.work.rglob("0*-step-*")):
        again = attempt.resume()
        attempt.check_exit(again, attempt.check_words(again), Timing(0, None, None, signal.SIGKILL))
        attempt.sync()
        attempt.check_end(status="FINISHED", excused=words.lost)
    return attempt.result(title)
