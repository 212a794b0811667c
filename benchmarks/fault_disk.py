"""File system faults during a run: disks that are full or read-only, folders deleted, moved, copied or replaced."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import functools
import os
import random
import resource
import shutil
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.fault_process import Child, obey_permissions, side_by_side
from benchmarks.fault_tools import database_template, scratch
from benchmarks.fault_tries import ROWS, Timing, Try, command, totals
from rl8x.tracking.locks import FileLock

TITLE = "file system: full, read-only, gone, moved, copied, replaced"
PLACES = ("spool", "runs", "checkpoints", "database", "work")
BACKUP = "backup"


def disk(tries: int, first: int = 0) -> dict[str, Any]:
    """Break the file system under runs at random instants."""
    with database_template() as template:
        results = side_by_side(tries, functools.partial(_try, template=template), first=first, workers=min(2, tries))
    return totals(TITLE, results)


def _try(seed: int, template: Path) -> dict[str, Any]:
    random.seed(f"disk {seed}")
    kind = random.choice(list(KINDS))
    with scratch() as root:
        return KINDS[kind](seed, root, template)


def _begin(root: Path, template: Path, seed: int, *, away: bool = False) -> Try:
    """Make the folder of a try.

    Args:
        root: The folder.
        template: An empty database.
        seed: The try.
        away: Whether the store is one that nobody answers at, so that all waits in the spool.
    """
    work = root / "work"
    (work / "mlruns").mkdir(parents=True)
    shutil.copy(template, work / "mlruns" / "mlflow.db")
    shutil.copy(template, root / "empty.db")
    if away:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        password = f"pw{seed}secret"
        uri = f"http://user:{password}@127.0.0.1:{port}"
        return Try(root, work / "mlruns" / "mlflow.db", uri=uri, secrets=[password])
    return Try(root, work / "mlruns" / "mlflow.db")


def _finish(
    attempt: Try, title: str, timing: Timing, ended: Any, *, demanded: int = 0, mend: Any = None
) -> dict[str, Any]:
    """Check a run that has ended, mend what is broken, send what waits, go on with it, and look at the end."""
    words = attempt.check_words(ended, demanded)
    attempt.check_exit(ended, words, timing)
    if mend is not None:
        mend()
    if not attempt.work.is_dir():
        return attempt.result(title)
    to = [_to_option(), f"sqlite:///{attempt.database}", "--yes"][: None if _has_yes() else 2] if attempt.uri else []
    # The command that was told, where all of the rest is still where it was.
    told = words.command if words.command is not None and words.spool is not None and words.spool.is_dir() else ["sync"]
    told = [word for word in told if word not in ("--to", "--tracking-uri", "URI", "--yes")] + to
    attempt.sync(told)
    if not attempt.database.exists():
        attempt.database.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(attempt.root / "empty.db", attempt.database)
    attempt.sync(["sync", *to])
    finished = ended.finished
    attempt.check_end(status=_expected(attempt, finished), since=demanded, excused=words.lost)
    if not finished and attempt.uri is None and (attempt.work / "run.json").exists() and _has_checkpoints(attempt):
        again = attempt.resume()
        attempt.check_exit(again, attempt.check_words(again, demanded), Timing(0, None, None, signal.SIGKILL))
        attempt.sync()
        attempt.check_end(status=_expected(attempt, True), since=demanded, excused=words.lost)
    return attempt.result(title)


def _has_checkpoints(attempt: Try) -> bool:
    return any(attempt.work.rglob("0*-step-*"))


def _expected(attempt: Try, finished: bool) -> str | None:
    """Return the status that the run must have; None where its store was taken away with the run in it."""
    return None if attempt.store_replaced else "FINISHED" if finished else "KILLED"


@functools.cache
def _sync_options() -> set[str]:
    from rl8x.cli.tracking import sync

    return {option for parameter in sync.params for option in parameter.opts}


def _to_option() -> str:
    return "--to" if "--to" in _sync_options() else "--tracking-uri"


def _has_yes() -> bool:
    return "--yes" in _sync_options()


# -- a full disk


def _full(seed: int, root: Path, template: Path) -> dict[str, Any]:
    away = random.random() < 0.5
    attempt = _begin(root, template, seed, away=away)
    timing = Timing.drawn(signals=[None, None, signal.SIGTERM, signal.SIGKILL])
    limited = not away and random.random() < 0.5
    fault, heal = (_limit, _unlimit) if limited else _no_space()
    ended = attempt.run(timing, fault, heal)
    what = "file sizes are limited" if limited else "no space"
    # A kill takes with it what the disk did not.
    return _finish(
        attempt, f"seed {seed}: {what}, store away {away}, {timing}", timing, ended, demanded=_safe(attempt, timing)
    )


def _safe(attempt: Try, timing: Timing) -> int:
    """Number the first row that must be there: what was in memory when a process was killed is gone by right."""
    return ROWS * 9 if timing.ends is not None and timing.number == signal.SIGKILL else 0


def _limit() -> None:
    """Let no file grow beyond a size that some have already, of this process and of its children."""
    size = random.choice([4096, 40_000, 300_000])
    for pid in _family():
        with contextlib.suppress(ProcessLookupError, PermissionError):
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))


def _unlimit() -> None:
    for pid in _family():
        with contextlib.suppress(ProcessLookupError, PermissionError):
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


def _family() -> list[int]:
    """List this process and its children."""
    mine = [os.getpid()]
    for thread in Path(f"/proc/{os.getpid()}/task").iterdir():
        with contextlib.suppress(OSError):
            mine += map(int, (thread / "children").read_text().split())
    return mine


def _no_space() -> tuple[Callable[[], None], Callable[[], None]]:
    """Have this process meet a full disk: what a file has of it can be written again, and nothing beyond.

    MLflow's process has another disk.
    """
    write, pwrite, make = os.write, os.pwrite, os.mkdir

    def left(target: int, offset: int) -> int:
        status = os.fstat(target)
        return max(status.st_size, status.st_blocks * 512) - offset

    def full_pwrite(target: int, data: Any, offset: int) -> int:
        room = left(target, offset)
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


# -- folders that cannot be written


def _read_only(seed: int, root: Path, template: Path) -> dict[str, Any]:
    attempt = _begin(root, template, seed, away=random.random() < 0.3)
    timing = Timing.drawn(signals=[None, None, signal.SIGTERM, signal.SIGKILL])
    place = random.choice(["spools", *PLACES])

    def change(mode: int) -> None:
        top = _place(attempt.work, place)
        # With a database its log, which sqlite makes as readable as that is.
        for path in (top, *top.rglob("*")) if top.is_dir() else top.parent.glob(f"{top.name}*"):
            with contextlib.suppress(OSError):
                path.chmod(mode if path.is_dir() else mode & 0o666)

    attempt.prepare = obey_permissions
    ended = attempt.run(timing, lambda: change(0o555), lambda: change(0o755))
    title = f"seed {seed}: read-only {place}, {timing}"
    demanded = _safe(attempt, timing)
    return _finish(attempt, title, timing, ended, demanded=demanded, mend=lambda: change(0o755))


def _place(work: Path, place: str) -> Path:
    runs = work / "mlruns"
    if place == "spool":
        return next(iter(sorted((runs / "spool").glob("*"))), runs / "spool")
    names = {
        "spools": runs / "spool",
        "runs": runs,
        "checkpoints": runs / "checkpoints",
        "database": runs / "mlflow.db",
    }
    return names.get(place, work)


# -- folders and files that go away


def _gone(seed: int, root: Path, template: Path) -> dict[str, Any]:
    place = random.choice(PLACES)
    attempt = _begin(root, template, seed, away=place != "database" and random.random() < 0.3)
    timing = Timing.drawn(signals=[None, None, signal.SIGTERM])
    timing.heals = None

    def remove() -> None:
        path = _place(attempt.work, place)
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        for beside in path.parent.glob(f"{path.name}*"):
            if beside.is_file():
                beside.unlink()

    ended = attempt.run(timing, remove, lambda: None)
    attempt.store_replaced = place != "checkpoints"
    # What was removed with its only copy is gone by right, what came later is not.
    demanded = 0 if place == "checkpoints" else timing.fault
    return _finish(attempt, f"seed {seed}: {place} gone, {timing}", timing, ended, demanded=demanded)


def _replaced(seed: int, root: Path, template: Path) -> dict[str, Any]:
    attempt = _begin(root, template, seed)
    timing = Timing.drawn(signals=[None, None, signal.SIGTERM, signal.SIGKILL])
    timing.heals = None
    what = random.choice(["another", "older", "garbage", "cut"])

    def replace() -> None:
        if what == "cut":
            os.truncate(attempt.database, random.choice([0, 4096, 100_000]))
            return
        beside = root / "new.db"
        shutil.copy(attempt.database if what == "older" else template, beside)
        if what == "garbage":
            beside.write_bytes(random.randbytes(100_000))
        os.replace(beside, attempt.database)

    def mend() -> None:
        if what in ("garbage", "cut"):
            for path in attempt.database.parent.glob("mlflow.db*"):
                path.rename(root / f"damaged-{path.name}")

    ended = attempt.run(timing, replace, lambda: None)
    attempt.store_replaced = True
    return _finish(
        attempt, f"seed {seed}: database replaced by {what}, {timing}", timing, ended, demanded=timing.fault, mend=mend
    )


# -- folders that are moved or copied


def _moved(seed: int, root: Path, template: Path) -> dict[str, Any]:
    attempt = _begin(root, template, seed, away=random.random() < 0.2)
    late = random.random() < 0.6
    timing = Timing.drawn(signals=[signal.SIGKILL] if late else [None, signal.SIGTERM, signal.SIGKILL])
    timing.heals = None
    what = random.choice(["runs", "work"])
    old = attempt.work

    def move() -> None:
        old.rename(root / "moved") if what == "work" else (old / "mlruns").rename(root / "moved-runs")

    ended = attempt.run(timing, (lambda: None) if late else move, lambda: None)
    if late:
        attempt.check_words(ended)
        move()
    title = f"seed {seed}: {what} moved {'after the end' if late else 'in mid-run'}, {timing}"
    if what == "work":
        attempt.work = root / "moved"
    else:
        attempt.work = root / "new"
        attempt.work.mkdir()
        (root / "moved-runs").rename(attempt.work / "mlruns")
        shutil.copy(old / "run.json", attempt.work)
        # What it said of places, as they are by now.
        moved, now = f"{root / 'moved-runs'}/", f"{attempt.work / 'mlruns'}/"
        ended = dataclasses.replace(ended, out=ended.out.replace(moved, now), err=ended.err.replace(moved, now))
    attempt.database = attempt.work / "mlruns" / "mlflow.db"
    before = set(root.rglob("mlflow.db"))
    result = _finish(attempt, title, timing, ended)
    made = [path for path in root.rglob("mlflow.db") if path not in before]
    if made and late:
        result["untrue_messages"] += 1
        result["why"].append(f"{title}: a database was made where the folder had been")
    return result


def _copied(seed: int, root: Path, template: Path) -> dict[str, Any]:
    """Copy a run's folder while it runs, in its process, and have another process sync it and its copy."""
    attempt = _begin(root, template, seed)
    timing = Timing.drawn(signals=[None, None, signal.SIGTERM, signal.SIGKILL])
    timing.heals = None
    how = random.choice(["copytree", "zip", "copy of the checkpoints", "reading"])

    def copy() -> None:
        with contextlib.suppress(OSError):  # files come and go under it
            duplicate()
        for folder in (attempt.work, root / BACKUP):
            if (folder / "mlruns").is_dir():
                sync = Child(lambda folder=folder: command(["sync"]), folder).wait(timeout_s=60)  # type: ignore[misc]
                attempt.record.add({"sync": sync.said, "code": sync.code, "copy": folder.name == BACKUP})

    def duplicate() -> None:
        source = attempt.work / "mlruns"
        if how == "zip":
            shutil.make_archive(str(root / BACKUP), "zip", source)
        elif how == "copytree":
            shutil.copytree(attempt.work, root / BACKUP, ignore_dangling_symlinks=True)
        elif how == "reading":
            for path in source.rglob("*"):
                _ = path.is_file() and path.read_bytes()
        elif (source / "checkpoints").is_dir():
            shutil.copytree(source / "checkpoints", root / BACKUP / "checkpoints")

    ended = attempt.run(timing, copy, lambda: None)
    title = f"seed {seed}: copied by {how} in mid-run, {timing}"
    for entry in attempt._entries("sync"):
        if "Traceback" in entry["sync"]:
            attempt.note("tracebacks", entry["sync"][-300:])
        if not entry["copy"] and "sent " in entry["sync"]:
            attempt.note("wrong_status", f"the spool of a live run is sent by another process: {entry['sync'][-200:]}")
        if entry["code"] not in (0, 1):
            attempt.note("wrong_exit", f"sync of a live run exits with {entry['code']}")
    return _finish(attempt, title, timing, ended)


def _is_being_sent(work: Path) -> bool:
    """Return whether a process has the lock on sending of a run."""
    for path in work.glob("mlruns/spool/*/ack.json"):
        lock = FileLock(path, signs=False)
        if not lock.acquire():
            return True
        lock.release()
    return False


def _copied_after(seed: int, root: Path, template: Path) -> dict[str, Any]:
    """Copy a killed run's folder, and go on in the copy: the original has to stay as it is."""
    attempt = _begin(root, template, seed)
    timing = Timing.drawn(signals=[signal.SIGKILL])
    timing.heals = None
    attempt.run(timing, lambda: None, lambda: None)
    rows = attempt.rows()
    kept = None
    while _is_being_sent(attempt.work) or kept != (kept := attempt.kept()):  # by its own process for MLflow
        time.sleep(2)
    shutil.copytree(attempt.work, root / "copy")
    original = {path: path.read_bytes() for path in attempt.work.rglob("*") if path.is_file()}
    title = f"seed {seed}: copied after a kill, {timing}"
    twin = Try(root, root / "copy" / "mlruns" / "mlflow.db")
    twin.work, twin.record = root / "copy", attempt.record
    twin.sync()
    if _has_checkpoints(twin) and random.random() < 0.7:
        again = twin.resume()
        twin.check_exit(again, twin.check_words(again), Timing(0, None, None, signal.SIGKILL))
        twin.sync()
        twin.check_end(status="FINISHED")
    else:
        twin.check_end(status="KILLED" if twin.rows() else None)
    changed = [path for path in original if not path.exists() or path.read_bytes() != original[path]]
    # That process may still move sqlite's log into the database: what is in it counts.
    changed = [path.name for path in changed if path.name != "lock" and not path.name.startswith("mlflow.db")]
    if attempt.kept() != kept:
        changed.append("mlflow.db")
    if changed:
        twin.note("rows_lost", f"what is done in a copy changes {', '.join(changed[:3])} of the original")
    attempt.wrong, attempt.why, attempt.said = twin.wrong, twin.why, [*attempt.said, *twin.said]
    attempt.sync()
    attempt.check_end(status="KILLED" if attempt.kept().tracked else None, rows=rows)
    return attempt.result(title)


KINDS: dict[str, Callable[[int, Path, Path], dict[str, Any]]] = {
    "full": _full,
    "read-only": _read_only,
    "gone": _gone,
    "replaced": _replaced,
    "moved": _moved,
    "copied": _copied,
    "copied after": _copied_after,
}
