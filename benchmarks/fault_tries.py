"""One trial of a fault: break a command-line run at a row, let it recover, and list the errors in the result."""

from __future__ import annotations

import dataclasses
import inspect
import json
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.fault_process import Child, Ended, Record
from benchmarks.fault_truth import Kept, Row, Told, found_secrets, lost, spools, told, untrue, waiting
from rl8x.cli.errors import LOST_ROWS

ROWS = 24  # of a run, and as many steps
DEFECTS = (
    "rows_lost",
    "rows_doubled",
    "rows_stuck",
    "untrue_messages",
    "wrong_status",
    "wrong_exit",
    "tracebacks",
    "secrets",
    "hung",
)


@dataclasses.dataclass
class Timing:
    """At which rows something happens, counted from 0; None is never.

    Attributes:
        fault: When it breaks.
        heals: When it is mended, while the run goes on.
        ends: When the process gets a signal.
        number: Which one.
    """

    fault: int
    heals: int | None
    ends: int | None
    number: int

    def __str__(self) -> str:
        """Write it in a few words."""
        heals = "" if self.heals is None else f", mended at {self.heals}"
        return f"at row {self.fault}{heals}" + ("" if self.ends is None else f", signal {self.number:d} at {self.ends}")

    @classmethod
    def drawn(cls, *, signals: Sequence[int | None]) -> Timing:
        """Draw instants; `signals` are what may end the run, None for its own end."""
        fault = random.randrange(ROWS)
        number = random.choice(signals)
        end = None if number is None else random.randrange(min(fault + 1, ROWS - 1), ROWS)
        heals = random.randrange(fault + 1, ROWS + 8)
        return cls(fault, heals if heals < ROWS else None, end, signal.SIGKILL if number is None else number)


class UsersError(RuntimeError):
    """An error of the user's own code."""


class Try:
    """What happens in one folder.

    Args:
        root: The folder of the try; the run's working directory is `work` in it.
        database: The database of the store that has to have the rows in the end.
        experiment: The experiment of the run there, where the database has other runs too.
        env: Additions to the environment of all processes.
        uri: A tracking URI, on the command line; None is the default store.
        secrets: What no file and no message may have.

    Attributes:
        prepare: What each process of the try does first.
        store_replaced: Whether the run's store was taken away with the run in it.
    """

    def __init__(
        self,
        root: Path,
        database: Path,
        *,
        experiment: str | None = None,
        env: dict[str, str] | None = None,
        uri: str | None = None,
        secrets: Sequence[str] = (),
    ) -> None:
        self.root, self.database, self.experiment = root, database, experiment
        self.work = root / "work"
        self.env, self.uri, self.secrets = env or {}, uri, list(secrets)
        self.prepare: Callable[[], None] = lambda: None
        self.store_replaced = False
        self.record = Record()
        self.said: list[Ended] = []
        self.wrong: Counter[str] = Counter()
        self.why: list[str] = []

    # -- what happens

    def run(self, timing: Timing, fault: Callable[[], Any], heal: Callable[[], Any]) -> Ended:
        """Train on the command line until the end, or until the signal of the timing."""
        self.work.mkdir(exist_ok=True)
        config = {"num_envs": 4, "horizon": 4, "num_sgd_iters": 1, "seed": 1, "device": "cpu", "num_threads": 1}
        run = {
            "env": "CartPole",
            "algorithm_config": {**config, "model_config": {"hidden_sizes": [8]}},
            "max_steps": ROWS,
            "steps_per_eval": 10,
            "num_eval_envs": 2,
            "checkpoints": {"every_steps": 4, "every_minutes": None},
            "progress": random.choice(["none", "lines"]),
        }
        if self.experiment is not None:
            run["experiment_name"] = self.experiment
        (self.work / "run.json").write_text(json.dumps(run))
        pauses = [random.uniform(0.0, 0.025) for _ in range(ROWS * 2)]

        def at_row(number: int) -> None:
            time.sleep(pauses[min(number, len(pauses) - 1)])
            for instant, do in ((timing.fault, fault), (timing.heals, heal)):
                if number == instant:
                    do()
            if number == timing.ends:
                os.kill(os.getpid(), timing.number)

        words = ["train", "-f", "run.json", *self._address("--tracking-uri")]
        return self._child(lambda: instrumented(words, self.record, at_row))

    def resume(self) -> Ended:
        """Start the same command again, as a job is that was preempted."""
        words = ["train", "-f", "run.json", "--resume", "auto", *self._address("--tracking-uri")]
        return self._child(lambda: instrumented(words, self.record, lambda number: None))

    def command(self, *words: str, folder: Path | None = None) -> Ended:
        """Call `rl8x` in a folder, by default the run's working directory."""
        return self._child(lambda: command(words), folder)

    def sync(self, words: Sequence[str] = ("sync",), folder: Path | None = None) -> Ended:
        """Send what waits; the exit code is compared with what is left."""
        words = [self.uri or word if word == "URI" else word for word in words]
        before = self._left(folder)
        ended = self.command(*words, folder=folder)
        after = self._left(folder)
        if ended.code == 0 and after:
            self.note("untrue_messages", f"sync exits with 0, and {len(after)} rows wait: {_last(ended)}")
        if ended.code not in (0, 1) and not (ended.code == 2 and before == after and "rl8x: error" in ended.err):
            self.note("wrong_exit", f"sync exits with {ended.code}: {_last(ended)}")
        return ended

    def _left(self, folder: Path | None) -> list[Row]:
        root = (folder or self.work) / "mlruns" / "spool"
        return [row for spool in spools(root) for row in waiting(spool)] if root.is_dir() else []

    def _address(self, option: str) -> list[str]:
        return [] if self.uri is None else [option, self.uri]

    def _child(self, function: Callable[[], Any], folder: Path | None = None) -> Ended:
        def do() -> None:
            self.prepare()
            function()

        ended = Child(do, folder or self.work, **self.env).wait(timeout_s=60)
        self.said.append(ended)
        return ended

    # -- what is wrong

    def note(self, defect: str, why: str, number: int = 1) -> None:
        """Count a defect."""
        self.wrong[defect] += number
        self.why.append(f"{defect}: {why}")

    def kept(self) -> Kept:
        """Read what the store has."""
        return Kept.read(self.database, self.experiment)

    def rows(self, since: int = 0) -> list[Row]:
        """List the rows that were logged, from one on, each once."""
        unique = {(row["s"], *row["m"]): row for row in self._entries("m")[since:]}
        return list(unique.values())

    def _entries(self, name: str) -> list[Any]:
        return [entry for entry in self.record.entries() if name in entry]

    def check_words(self, ended: Ended, since: int = 0) -> Told:
        """Compare a run's last lines with what there is; call it as soon as the run has ended."""
        cwd = self._entries("cwd")
        words = told(ended.said, Path(cwd[-1]["cwd"]) if cwd and cwd[-1]["cwd"] else self.work)
        if ended.code is not None and ended.code != -signal.SIGKILL:
            for text in untrue(words, self.rows(since), self.kept()):
                self.note("untrue_messages", f"{text} ({_last(ended)})")
        return words

    def check_exit(self, ended: Ended, words: Told, timing: Timing) -> None:
        """A run ends with its signal's code, or with 0, or with `LOST_ROWS` where it tells that something is lost."""
        signalled = timing.ends is not None and not ended.finished
        come_to_end = (LOST_ROWS,) if " has lost " in ended.said else (0,)
        by_signal = (-signal.SIGKILL,) if timing.number == signal.SIGKILL else (128 + timing.number,)
        legal = by_signal if signalled else come_to_end
        # A run that is in no store any more cannot go on there: one line says so.
        refused = self.store_replaced and ended.code == 2 and "rl8x: error" in ended.err and not ended.tracebacks
        if ended.code not in legal and not refused:
            self.note("wrong_exit", f"the run exits with {ended.code} instead of {legal[0]}: {_last(ended)}")

    def check_end(
        self, *, status: str | None, since: int = 0, excused: int = 0, rows: Sequence[Row] | None = None
    ) -> None:
        """Look at what is there when all is over.

        Args:
            status: What the one run must be in the store; None is not looked at.
            since: The first row that must be there.
            excused: How many rows may be missing, since the run said so.
            rows: The rows instead.
        """
        kept, folders = self.kept(), spools(self.root)
        rows = self.rows(since) if rows is None else rows
        gone = lost(rows, [kept], folders)
        if len(gone) > excused:
            self.note("rows_lost", f"{len(gone)} of {len(rows)} rows, {excused} said to be", len(gone) - excused)
        stuck = [row for row in rows if not kept.has(row) and row not in gone]
        if stuck:
            self.note(
                "rows_stuck", f"{len(stuck)} rows of {len(rows)} are not sent: {_last(self.said[-1])}", len(stuck)
            )
        if kept.doubled:
            self.note("rows_doubled", f"{kept.doubled} points", kept.doubled)
        if status is not None and kept.tracked != [status]:
            self.note("wrong_status", f"{kept.tracked} instead of {status}: {_last(self.said[-1])}")

    def result(self, title: str) -> dict[str, Any]:
        """Search for tracebacks and passwords, and return the counts of all defects."""
        for ended in self.said:
            if ended.tracebacks:
                self.note("tracebacks", ended.said[ended.said.find("Traceback") :][-400:])
            if ended.code is None:
                self.note("hung", _last(ended))
        for entry in self._entries("instrument"):
            raise RuntimeError(f"the instrument failed in {title}: {entry['instrument']}")
        where = found_secrets(self.root, [part for ended in self.said for part in (ended.out, ended.err)], self.secrets)
        if where:
            self.note("secrets", ", ".join(where[:4]), len(where))
        self.record.close()
        return {**{name: self.wrong[name] for name in DEFECTS}, "why": [f"{title}: {text:.500}" for text in self.why]}


def instrumented(words: Sequence[str], record: Record, at_row: Callable[[int], None]) -> None:
    """Call the command line in a process that notes its rows, and does something before each."""
    from rl8x.tracking import MLflowTracker

    legal = inspect.signature(MLflowTracker.__init__).parameters
    quick = {"interval_s": 0.05, "request_timeout_s": 1, "outage_timeout_s": 0.6, "finish_timeout_s": 5.0}
    assert MLflowTracker.__init__.__kwdefaults__ is not None
    MLflowTracker.__init__.__kwdefaults__.update({name: value for name, value in quick.items() if name in legal})
    log_metrics, number = MLflowTracker.log_metrics, 0

    def noted(self: Any, metrics: Any, step: int) -> None:
        nonlocal number
        try:
            at_row(number)
        except BaseException as error:
            if not isinstance(error, SystemExit | KeyboardInterrupt | UsersError):
                record.add({"instrument": repr(error)})
            raise
        number += 1
        log_metrics(self, metrics, step)
        record.add({"s": step, "m": sorted(metrics)})

    MLflowTracker.log_metrics = noted  # type: ignore[method-assign]
    try:
        command(words)
    finally:
        try:
            record.add({"cwd": os.getcwd()})
        except OSError:
            record.add({"cwd": ""})


def command(words: Sequence[str]) -> None:
    """Call the command line in this process."""
    from rl8x.cli.main import main

    raise SystemExit(main(list(words)))


def _last(ended: Ended) -> str:
    lines = ended.said.strip().splitlines()
    return " | ".join(line for line in lines[-3:])


def totals(fault: str, results: Sequence[dict[str, Any]], more: int = 8) -> dict[str, Any]:
    """Put the results of tries into one row of the table."""
    figures = {name: sum(result[name] for result in results) for name in DEFECTS}
    bad = [result for result in results if result["why"]]
    offenders = [why for result in bad for why in result["why"][:2]]
    row = {"fault": fault, "tries": len(results), "ok": not bad, "bad_tries": len(bad)}
    return row | figures | {"offenders": offenders[:more]}
