"""A try: a run in a process of its own, which is broken or killed and recovers, and all that is wrong in the end."""

import contextlib
import ctypes
import dataclasses
import json
import math
import mmap
import os
import random
import shutil
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil
from tests.faults.truth import Held, LastLines, Points, found_secrets, journals, waiting
from tests.forks import ForkedPython

from rl8x.cli.errors import LOST_ROWS
from rl8x.cli.main import main
from rl8x.tracking import MLflowTracker

ROWS = 24  # of the small run, and as many steps
SMALL = {"num_envs": 4, "horizon": 4, "num_sgd_iters": 1, "seed": 1, "device": "cpu", "num_threads": 1}
RUN: dict[str, Any] = {
    "env": "CartPole",
    "algorithm_config": {**SMALL, "model_config": {"hidden_sizes": [8]}},
    "max_steps": ROWS,
    "steps_per_eval": 10,
    "num_eval_envs": 2,
    "checkpoints": {"every_steps": 4, "every_minutes": None},
    "progress": "none",
}
QUICK = {"interval_s": 0.05, "request_timeout_s": 1, "outage_timeout_s": 0.6, "finish_timeout_s": 5.0}
RECORD_BYTES = 8 << 20


class UsersError(RuntimeError):
    """An error of the user's own code."""


@dataclasses.dataclass
class Ended:
    """What a process ended with (None where it did not end, and was killed; negative for a signal), and said."""

    code: int | None
    said: str

    @property
    def finished(self) -> bool:
        """Whether it came to its end by itself, even if rows of it are lost."""
        return self.code in (0, LOST_ROWS)

    @property
    def last(self) -> str:
        return " | ".join(self.said.strip().splitlines()[-3:])

    @property
    def tracebacks(self) -> int:
        """Count what a user would take for a bug."""
        return sum(self.said.count(text) for text in ("Traceback (most", "Exception ignored", "Exception in thread"))


class Run(ForkedPython):
    """A function in a process of its own that can be killed, and its shipper with it.

    It speaks into a pipe: a disk that is full or gone takes nothing from that. Where it does not fork, its shipper is a
    Python that imports MLflow, as it is for users.
    """

    def __init__(self, function: Callable[[], object], folder: Path, *, forks: bool = True, **env: str) -> None:
        def do() -> None:
            if forks:
                subprocess.Popen = ForkedPython
            function()

        streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        super().__init__(do, cwd=folder, env={**os.environ, **env}, bufsize=0, pipesize=1 << 20, **streams)
        os.set_blocking(self.stdout.fileno(), False)  # what it leaves behind may have it still

    def killed(self, *whom: str, after_s: float) -> None:
        """Send SIGKILL to the "trainer", the "shipper" or both, if it is still there then."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(after_s)
        if self.returncode is None:
            shippers = psutil.Process(self.pid).children() if "shipper" in whom else []
            for pid in [each.pid for each in shippers] + [self.pid] * ("trainer" in whom):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def ended(self, timeout_s: float = 300.0) -> Ended:
        """Wait until it has ended; one that does not is killed."""
        try:
            code = self.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.kill()
            code = self.wait() and None
        with self.stdout as stream:
            return Ended(code, (stream.read() or b"").decode(errors="replace"))


class Record:
    """What a process notes, in memory that outlives it whatever happens to the disk."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, RECORD_BYTES)

    def add(self, **entry: Any) -> None:
        length = int.from_bytes(self._memory[:8], "little")
        line = json.dumps(entry).encode() + b"\n"
        self._memory[8 + length : 8 + length + len(line)] = line
        self._memory[:8] = (length + len(line)).to_bytes(8, "little")

    def entries(self, name: str) -> list[Any]:
        length = int.from_bytes(self._memory[:8], "little")
        entries = map(json.loads, self._memory[8 : 8 + length].splitlines())
        return [entry[name] for entry in entries if name in entry]

    def rows(self) -> list[Points]:
        """List the rows that were logged; what comes again after a resume is there again."""
        return [
            {
                (name, step): {value if value is not None and math.isfinite(value) else None}
                for name, value in row.items()
            }
            for step, row in self.entries("row")
        ]

    def noting(self, function: Callable[[], object], at_row: Callable[[int], None] | None = None) -> None:
        """Do something in a process whose tracker notes its rows, and is quick; and something else before each."""
        defaults = MLflowTracker.__init__.__kwdefaults__
        assert defaults is not None
        defaults.update(QUICK if at_row is not None else {"interval_s": 0.1})
        log_metrics, number = MLflowTracker.log_metrics, 0

        def noted(tracker: Any, metrics: Any, step: int) -> None:
            nonlocal number
            try:
                if at_row is not None:
                    at_row(number)
            except Exception as error:
                if not isinstance(error, UsersError):
                    self.add(instrument=repr(error))
                raise
            number += 1
            log_metrics(tracker, metrics, step)
            self.add(row=[step, {name: float(value) for name, value in metrics.items()}])

        MLflowTracker.log_metrics = noted
        try:
            function()
        finally:
            try:
                self.add(cwd=os.getcwd())
            except OSError:
                self.add(cwd="")


@dataclasses.dataclass
class Timing:
    """At which rows it breaks, is mended while the run goes on, and the process gets a signal; None is never."""

    fault: int
    heals: int | None
    ends: int | None
    signal: int


class Try:
    """One try in a folder, with an empty database, by a seed."""

    def __init__(self, root: Path, kind: str, seed: int, template: Path) -> None:
        self.root, self.work, self.template = root, root / "work", template  # `work` is the run's working directory
        self.seed, self.random, self.title = seed, random.Random(f"{kind} {seed}"), f"{kind} --seed {seed}"
        (self.work / "mlruns").mkdir(parents=True)
        self.database = self.work / "mlruns" / "mlflow.db"  # of the store that has to have the rows in the end
        shutil.copy(template, self.database)
        self.experiment: str | None = None  # of the run, where the database has other runs too
        self.uri: str | None = None  # on the command line; None is the default store
        self.env: dict[str, str] = {}  # for all processes
        self.secrets: list[str] = []  # what no file and no message may have
        self.prepare: Callable[[], object] = lambda: None  # what each process does first
        self.store_replaced = False  # whether the run's store was taken away with the run in it
        self.record = Record()
        self.said: list[Ended] = []
        self.wrong: Counter[str] = Counter()  # how often there was what is wrong; `why` says what it was
        self.why: list[str] = []

    # What happens.

    def timing(self, *signals: int | None, heals: bool = True) -> Timing:
        """Draw instants; `signals` are what may end the run, None for its own end."""
        fault, number = self.random.randrange(ROWS), self.random.choice(signals)
        end = None if number is None else self.random.randrange(min(fault + 1, ROWS - 1), ROWS)
        mended = self.random.randrange(fault + 1, ROWS + 8)
        timing = Timing(fault, mended if heals and mended < ROWS else None, end, number or signal.SIGKILL)
        self.title += f": {timing}"
        return timing

    def train(self, timing: Timing, fault: Callable[[], Any], heal: Callable[[], Any] = lambda: None) -> Ended:
        """Train on the command line until the end, or until the signal of the timing."""
        pauses = [self.random.uniform(0.0, 0.025) for _ in range(ROWS)]

        def at_row(number: int) -> None:
            time.sleep(pauses[number % ROWS])
            for instant, do in ((timing.fault, fault), (timing.heals, heal)):
                if number == instant:
                    do()
            if number == timing.ends:
                os.kill(os.getpid(), timing.signal)

        self.said.append(ended := self.begin(at_row).ended())
        return ended

    def begin(self, at_row: Callable[[int], None]) -> Run:
        """Begin the small run on the command line, which does something before each row."""
        named = {} if self.experiment is None else {"experiment_name": self.experiment}
        run = {**RUN, **named, "progress": self.random.choice(["none", "lines"])}
        (self.work / "run.json").write_text(json.dumps(run))
        return self._start("train", "-f", "run.json", at_row=at_row)

    def resume(self) -> Ended:
        """Start the same command again, as a job is that was preempted."""
        return self.command("train", "-f", "run.json", "--resume", "auto", at_row=lambda number: None)

    def command(self, *words: str, at_row: Callable[[int], None] | None = None) -> Ended:
        """Call `rl8x` in the run's working directory; with `at_row` its rows are noted."""
        self.said.append(ended := self._start(*words, at_row=at_row).ended())
        return ended

    def _start(self, *words: str, at_row: Callable[[int], None] | None) -> Run:
        if at_row is not None and self.uri is not None:
            words = (*words, "--tracking-uri", self.uri)

        def do() -> None:
            self.prepare()
            command(*words) if at_row is None else self.record.noting(lambda: command(*words), at_row)

        return Run(do, self.work, **self.env)

    def sync(self, *words: str) -> Ended:
        """Send what waits; the exit code is compared with what is left."""
        before = self._left()
        ended = self.command(*([self.uri or word if word == "URI" else word for word in words] or ["sync"]))
        after = self._left()
        if ended.code == 0 and after:
            self.note("untrue", f"sync exits with 0, and {len(after)} rows wait: {ended.last}")
        if ended.code not in (0, 1) and not (ended.code == 2 and before == after and "rl8x: error" in ended.said):
            self.note("exit code", f"sync exits with {ended.code}: {ended.last}")
        return ended

    def sync_all(self) -> None:
        """Send what waits to a server, which on a busy machine may not answer in time."""
        for _ in range(10):
            if self.sync().code == 0:
                return

    def _left(self) -> list[Any]:
        return [row for journal in journals(self.work / "mlruns" / "spool") for row in waiting(journal)]

    # What is wrong.

    def note(self, what: str, why: str, number: int = 1) -> None:
        self.wrong[what] += number
        self.why.append(f"{what}: {why}")

    def held(self) -> Held:
        return Held.read(self.database, self.experiment)

    def has_checkpoints(self) -> bool:
        return any(self.work.rglob("0*-step-*"))

    def check_words(self, ended: Ended, since: int = 0) -> LastLines:
        """Compare a run's last lines with what there is; call it as soon as the run has ended."""
        cwd = self.record.entries("cwd")
        words = LastLines(ended.said, Path(cwd[-1]) if cwd and cwd[-1] else self.work)
        if ended.code is not None and ended.code != -signal.SIGKILL:
            for text in words.untrue(self.record.rows()[since:], self.held()):
                self.note("untrue", f"{text} ({ended.last})")
        return words

    def check_exit(self, ended: Ended, timing: Timing | None = None) -> None:
        """A run ends with its signal's code, or with 0, or with `LOST_ROWS` where it tells that something is lost."""
        legal = LOST_ROWS if " has lost " in ended.said else 0
        if timing is not None and timing.ends is not None and not ended.finished:
            legal = -signal.SIGKILL if timing.signal == signal.SIGKILL else 128 + timing.signal
        # A run that is in no store any more cannot go on there: one line says so.
        refused = self.store_replaced and ended.code == 2 and "rl8x: error" in ended.said and not ended.tracebacks
        if ended.code != legal and not refused:
            self.note("exit code", f"the run exits with {ended.code} instead of {legal}: {ended.last}")

    def check_resumed(self, since: int = 0, lost: int = 0) -> None:
        """Resume the run, send what waits, and look at the end."""
        again = self.resume()
        self.check_words(again, since)
        self.check_exit(again)
        self.sync()
        self.check_end(None if self.store_replaced else "FINISHED", since=since, lost=lost)

    def check_end(
        self, status: str | None, *, since: int = 0, lost: int = 0, rows: Sequence[Points] | None = None
    ) -> None:
        """Look at what is there when all is over: one run of a status, and all rows but so many that it said are lost.

        `rows` are those from the row `since` on, or others.
        """
        rows = self.record.rows()[since:] if rows is None else rows
        held, points = self.held(), merged(rows)
        missing = held.missing(points) - {
            key for folder in journals(self.root) for row in waiting(folder) for key in row
        }
        gone = {min(row) for row in rows if row.keys() & missing}
        if len(gone) > lost:
            self.note("lost", f"{len(gone)} of {len(rows)} rows, {lost} said to be", len(gone) - lost)
        self.check_held(held, {key: values for key, values in points.items() if key not in missing}, status)

    def check_held(self, held: Held, points: Points, status: str | None) -> None:
        """Compare what MLflow holds with the points that it is to have, in one run of a status."""
        last = self.said[-1].last if self.said else ""
        for what, found in held.compared(points).items():
            if found:
                self.note(what, f"{len(found)} of {len(points)} points: {sorted(found)[:3]}; {last}", len(found))
        if status is not None and held.tracked != [status]:
            extra = len(held.tracked) - 1
            why = f"{held.tracked} instead of {status}: {last}"
            self.note("second runs" if extra > 0 else "status", why, max(1, extra))

    def finish(self) -> None:
        for ended in self.said:
            if ended.tracebacks:
                self.note("traceback", ended.said[ended.said.find("Traceback") :][-400:])
            if ended.code is None:
                self.note("hung", ended.last)
        for error in self.record.entries("instrument"):
            raise RuntimeError(f"the instrument failed in {self.title}: {error}")
        where = found_secrets(self.root, [each.said for each in self.said], self.secrets)
        if where:
            self.note("secret", ", ".join(where[:4]), len(where))


def merged(rows: Sequence[Points]) -> Points:
    """Return the points of rows, each with all values that were logged."""
    points: Points = {}
    for row in rows:
        for key, values in row.items():
            points[key] = points.get(key, set()) | values
    return points


def command(*words: str) -> None:
    raise SystemExit(main(list(words)))


def obey_permissions() -> None:
    """Have this process and its children obey permissions, which root does not; of no effect for others."""
    if os.geteuid():
        return
    libc = ctypes.CDLL(None, use_errno=True)
    for capability in (1, 2):  # CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH: PR_CAPBSET_DROP
        libc.prctl(24, capability, 0, 0, 0)
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)
    data = (ctypes.c_uint32 * 6)()
    libc.capget(header, data)
    for index in (0, 1):  # effective and permitted
        data[index] &= ~0b110
    libc.capset(header, data)


def end_with_parent() -> None:
    """Have Linux kill this process when the one that forked it ends."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG
