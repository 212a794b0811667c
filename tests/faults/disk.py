"""File system faults during a run: disks that are full or read-only, folders deleted, moved, copied or replaced."""

import contextlib
import dataclasses
import errno
import glob
import os
import resource
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.faults.tries import ROWS, Ended, Run, Timing, Try, command, obey_permissions
from tests.ports import free_port

from rl8x.tracking.locks import is_locked

PLACES = {
    "runs": "mlruns",
    "checkpoints": "mlruns/checkpoints",
    "database": "mlruns/mlflow.db",
    "work": ".",
    "journal": "mlruns/spool/*",
    "journals": "mlruns/spool",
}
TERM, KILL = signal.SIGTERM, signal.SIGKILL


def disk(attempt: Try) -> int:
    """Break the file system under a run at a random instant."""
    attempt.random.choice(KINDS)(attempt)
    return 1


def send_away(attempt: Try, chance: float) -> bool:
    """Have, by chance, a store that nobody answers at, so that all waits in the journal."""
    if attempt.random.random() >= chance:
        return False
    attempt.secrets = [f"pw{attempt.seed}secret"]
    attempt.uri = f"http://user:{attempt.secrets[0]}@127.0.0.1:{free_port()}"
    attempt.title += ", store away"
    return True


def check(
    attempt: Try, timing: Timing, ended: Ended, *, since: int = 0, mend: Callable[[], object] = lambda: None
) -> None:
    """Check a run that has ended, mend what is broken, send what waits, go on with it, and look at the end.

    `since` is the first row that must be there.
    """
    words = attempt.check_words(ended, since)
    attempt.check_exit(ended, timing)
    mend()
    if not attempt.work.is_dir():
        return
    to = ["--to", f"sqlite:///{attempt.database}", "--yes"] if attempt.uri else []
    # The command that was told, where all of the rest is still where it was.
    told = words.command if words.command is not None and words.journal is not None and words.journal.is_dir() else None
    attempt.sync(*[word for word in told or ["sync"] if word not in ("--to", "URI", "--yes")], *to)
    if not attempt.database.exists():
        attempt.database.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(attempt.template, attempt.database)
    attempt.sync("sync", *to)
    status = None if attempt.store_replaced else "FINISHED" if ended.finished else "KILLED"
    attempt.check_end(status, since=since, lost=words.lost)
    if (
        not ended.finished
        and attempt.uri is None
        and (attempt.work / "run.json").exists()
        and attempt.has_checkpoints()
    ):
        attempt.check_resumed(since, words.lost)


def safe(timing: Timing) -> int:
    """Number the first row that must be there: what was in memory when a process was killed is gone by right."""
    return ROWS * 9 if timing.ends is not None and timing.signal == KILL else 0


def place_of(attempt: Try, name: str) -> Path:
    """Find a place by its name; where there is no journal yet, their folder."""
    found = sorted(glob.glob(str(attempt.work / PLACES[name])))
    return Path(found[0]) if found else attempt.work / PLACES[name].removesuffix("/*")


# A full disk.


def full(attempt: Try) -> None:
    """Have no space, or no file grow beyond a size."""
    away = send_away(attempt, 0.5)
    limited = not away and attempt.random.random() < 0.5
    attempt.title += ", file sizes are limited" if limited else ", no space"
    timing = attempt.timing(None, None, TERM, KILL)
    size = attempt.random.choice([4096, 40_000, 300_000])
    fault, heal = (lambda: limit(size), lambda: limit(resource.RLIM_INFINITY)) if limited else no_space()
    # A kill takes with it what the disk did not.
    check(attempt, timing, attempt.train(timing, fault, heal), since=safe(timing))


def limit(size: int) -> None:
    """Let no file grow beyond a size that some have already, of this process and of its children."""
    family = [os.getpid()]
    for thread in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):
            family += map(int, (thread / "children").read_text().split())
    for pid in family:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))


def no_space() -> tuple[Callable[[], None], Callable[[], None]]:
    """Have this process meet a full disk: what a file has of it can be written again, and nothing beyond.

    The shipper has another disk.
    """
    write, pwrite, make = os.write, os.pwrite, os.mkdir

    def full_pwrite(target: int, data: Any, offset: int) -> int:
        status = os.fstat(target)
        room = max(status.st_size, status.st_blocks * 512) - offset
        if room <= 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return pwrite(target, bytes(data)[:room], offset)

    def full_write(target: int, data: Any) -> int:
        if not os.readlink(f"/proc/self/fd/{target}").startswith("/"):
            return write(target, data)  # a pipe or a socket
        return full_pwrite(target, data, os.lseek(target, 0, os.SEEK_CUR))

    def full_make(*args: Any, **kwargs: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def fault() -> None:
        os.write, os.pwrite, os.mkdir = full_write, full_pwrite, full_make

    def heal() -> None:
        os.write, os.pwrite, os.mkdir = write, pwrite, make

    return fault, heal


# Places that cannot be written, that go away, or that are replaced.


def read_only(attempt: Try) -> None:
    """Take the right to write."""
    name = attempt.random.choice(list(PLACES))
    send_away(attempt, 0.3)
    attempt.title += f", read-only {name}"
    timing = attempt.timing(None, None, TERM, KILL)

    def change(mode: int) -> None:
        top = place_of(attempt, name)
        # With a database its log, which sqlite makes as readable as that is.
        for path in (top, *top.rglob("*")) if top.is_dir() else top.parent.glob(f"{top.name}*"):
            with contextlib.suppress(OSError):
                path.chmod(mode if path.is_dir() else mode & 0o666)

    attempt.prepare = obey_permissions
    ended = attempt.train(timing, lambda: change(0o555), lambda: change(0o755))
    check(attempt, timing, ended, since=safe(timing), mend=lambda: change(0o755))


def gone(attempt: Try) -> None:
    """Delete a folder, or the database."""
    name = attempt.random.choice([name for name in PLACES if name != "journals"])
    send_away(attempt, 0.0 if name == "database" else 0.3)
    attempt.title += f", {name} gone"
    timing = attempt.timing(None, None, TERM, heals=False)

    def remove() -> None:
        path = place_of(attempt, name)
        for beside in path.parent.glob(f"{path.name}*"):
            shutil.rmtree(beside, ignore_errors=True) if beside.is_dir() else beside.unlink()

    ended = attempt.train(timing, remove)
    attempt.store_replaced = name != "checkpoints"
    # What was removed with its only copy is gone by right, what came later is not.
    check(attempt, timing, ended, since=0 if name == "checkpoints" else timing.fault)


def replaced(attempt: Try) -> None:
    """Put another database in the place of the run's."""
    what = attempt.random.choice(["another", "older", "garbage", "cut"])
    attempt.title += f", database replaced by {what}"
    timing = attempt.timing(None, None, TERM, KILL, heals=False)
    size, garbage = attempt.random.choice([0, 4096, 100_000]), attempt.random.randbytes(100_000)

    def replace() -> None:
        if what == "cut":
            os.truncate(attempt.database, size)
            return
        beside = attempt.root / "new.db"
        shutil.copy(attempt.database if what == "older" else attempt.template, beside)
        if what == "garbage":
            beside.write_bytes(garbage)
        os.replace(beside, attempt.database)

    def mend() -> None:
        if what in ("garbage", "cut"):
            for path in attempt.database.parent.glob("mlflow.db*"):
                path.rename(attempt.root / f"damaged-{path.name}")

    ended = attempt.train(timing, replace)
    attempt.store_replaced = True
    check(attempt, timing, ended, since=timing.fault, mend=mend)


# Folders that are moved or copied.


def moved(attempt: Try) -> None:
    """Move the folder of runs, or the working directory, within the run or after its kill."""
    send_away(attempt, 0.2)
    late, runs = attempt.random.random() < 0.6, attempt.random.random() < 0.5
    attempt.title += f", {'runs' if runs else 'work'} moved {'after the end' if late else 'in mid-run'}"
    timing = attempt.timing(*([KILL] if late else [None, TERM, KILL]), heals=False)
    root, old = attempt.root, attempt.work
    away = root / ("moved-runs" if runs else "moved")

    def move() -> None:
        (old / "mlruns" if runs else old).rename(away)

    ended = attempt.train(timing, (lambda: None) if late else move)
    if late:
        attempt.check_words(ended)
        move()
    attempt.work = root / ("new" if runs else "moved")
    if runs:
        attempt.work.mkdir()
        away.rename(attempt.work / "mlruns")
        shutil.copy(old / "run.json", attempt.work)
        # What it said of places, as they are by now; a journal is told of where it was, as docs/tracking.md says.
        runs_now = f"{attempt.work / 'mlruns'}/"
        said = ended.said.replace(f"{away}/", runs_now).replace(" mlruns/spool/", f" {runs_now}spool/")
        ended = dataclasses.replace(ended, said=said)
    attempt.database = attempt.work / "mlruns" / "mlflow.db"
    before = set(root.rglob("mlflow.db"))
    check(attempt, timing, ended)
    if late and set(root.rglob("mlflow.db")) - before:
        attempt.note("untrue", "a database was made where the folder had been")


def copied(attempt: Try) -> None:
    """Copy a run's folder while it runs, in its process, and have another process sync it and its copy."""
    how = attempt.random.choice(["copytree", "zip", "copy of the checkpoints"])
    attempt.title += f", copied by {how} in mid-run"
    timing = attempt.timing(None, None, TERM, KILL, heals=False)
    source, backup = attempt.work / "mlruns", attempt.root / "backup"

    def duplicate() -> None:
        if how == "zip":
            shutil.make_archive(str(backup), "zip", source)
        elif how == "copytree":
            shutil.copytree(attempt.work, backup, ignore_dangling_symlinks=True)
        elif (source / "checkpoints").is_dir():
            shutil.copytree(source / "checkpoints", backup / "checkpoints")

    def copy() -> None:
        with contextlib.suppress(OSError):  # files come and go under it
            duplicate()
        for folder in (attempt.work, backup):
            if (folder / "mlruns").is_dir():
                sync = Run(lambda: command("sync"), folder).ended()
                attempt.record.add(sync=[sync.said, sync.code, folder == backup])

    ended = attempt.train(timing, copy)
    for said, code, is_copy in attempt.record.entries("sync"):
        if not is_copy and "sent " in said:
            attempt.note("status", f"the journal of a live run is sent by another process: {said[-200:]}")
        if code not in (0, 1) or "Traceback" in said:
            attempt.note("exit code", f"sync of a live run exits with {code}: {said[-300:]}")
    check(attempt, timing, ended)


def copied_after(attempt: Try) -> None:
    """Copy a killed run's folder, and go on in the copy: the original has to stay as it is."""
    attempt.title += ", copied after a kill"
    timing = attempt.timing(KILL, heals=False)
    attempt.train(timing, lambda: None)
    rows, held = attempt.record.rows(), None
    # Its own shipper goes on for a while.
    while held != (held := attempt.held()) or any(map(is_locked, attempt.work.glob("mlruns/spool/*/ack.json"))):
        time.sleep(1)
    work, database = attempt.work, attempt.database
    shutil.copytree(work, attempt.root / "copy")
    original = {path: path.read_bytes() for path in work.rglob("*") if path.is_file()}
    attempt.work = attempt.root / "copy"
    attempt.database = attempt.work / "mlruns" / "mlflow.db"
    attempt.sync()
    if attempt.has_checkpoints() and attempt.random.random() < 0.7:
        attempt.check_resumed()
    else:
        attempt.check_end("KILLED" if rows else None)
    attempt.work, attempt.database = work, database
    changed = [path for path in original if not path.exists() or path.read_bytes() != original[path]]
    # That process may still move sqlite's log into the database: what is in it counts.
    changed = [path for path in changed if path.name != "lock" and not path.name.startswith("mlflow.db")]
    if changed or attempt.held() != held:
        attempt.note("lost", f"what is done in a copy changes {changed[:3] or 'mlflow.db'} of the original")
    attempt.sync()
    attempt.check_end("KILLED" if attempt.held().tracked else None, rows=rows)


KINDS = (full, read_only, gone, replaced, moved, copied, copied_after)
