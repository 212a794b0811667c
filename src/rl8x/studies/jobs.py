"""Runs jobs in this process, in processes of this machine, or on a cluster of Dask or Ray, and shows their progress."""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import math
import os
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any, Final

import joblib

from rl8x.distributed import ranks
from rl8x.output import Unfailing, described, measured, say, short, shown
from rl8x.processes import lending_variables, restore_variables
from rl8x.studies.definition import Training
from rl8x.tracking.locks import is_locked
from rl8x.trainers.ranks import end_saved
from rl8x.trainers.rows import Bar, check_progress, counter_name

Job = Mapping[str, Any]
Work = Callable[[Job], dict[str, Any]]
BACKENDS: Final = {"processes": None, "dask": "distributed", "ray": "ray"}  # with the package that each needs
_LOSSES: Final = 3  # after so many losses of workers in a row without a finished job, the job fails
RAY_ADDRESS: Final = "RAY_ADDRESS"  # the environment variable with the address of Ray's cluster
_SAVING_S: Final = 10.0  # how long a worker may take to save its training once its driver is gone
CONTACT_S = 20.0  # timeout of the connection to a scheduler
# Names of the errors by which joblib, Dask and Ray report a lost worker
_LOST: Final = frozenset({"BrokenProcessPool", "KilledWorker", "CommClosedError", "FutureCancelledError", "RayError"})


def check_backend(backend: str, address: str | None) -> None:
    """Raise if a back end is unknown or not installed, an address is given without Dask, or there are several ranks."""
    if ranks().size > 1:
        raise ValueError(
            f"a study is one process, and torchrun has started {ranks().size}: start it without torchrun, with `jobs` "
            "trainings at a time (--jobs), or a `backend` for a cluster."
        )
    if not isinstance(backend, str) or backend not in BACKENDS:
        raise ValueError(f"`backend` must be one of {', '.join(BACKENDS)}; got {shown(backend)}.")
    if (package := BACKENDS[backend]) is not None and importlib.util.find_spec(package) is None:
        raise ValueError(f"backend={backend!r} needs {package}, which is not installed: pip install 'rl8x[{backend}]'.")
    if address is not None and backend != "dask":
        raise ValueError("`cluster` is the address of a Dask scheduler: give backend='dask' too.")


def do_jobs(
    jobs: Sequence[Job], work: Work, *, num_jobs: int, backend: str, address: str | None, say: Callable[[str], None]
) -> Iterator[dict[str, Any]]:
    """Run jobs, each plain data with a `key`, and yield the result of `work` for each, in the order of completion.

    Jobs whose worker is lost continue from where they were saved. After two losses in a row the next job runs alone,
    and fails at a third. This machine runs `num_jobs` at the same time, a cluster as many as it has room for.
    """
    if not jobs or (backend == "processes" and num_jobs == 1):
        yield from map(work, jobs)
        return
    left, losses = {job["key"]: job for job in jobs}, 0
    with lending_variables(), _cluster(backend, num_jobs, address, jobs) as in_turn:
        while left:
            try:
                for done in in_turn(list(left.values())[: 1 if losses == _LOSSES - 1 else None], work):
                    del left[done["key"]]
                    losses = 0
                    yield done
            except Exception as error:
                names = {cls.__name__ for cls in type(error).__mro__}
                if not _LOST & names or "RayTaskError" in names:  # an error of the job's own
                    raise
                losses += 1
                loss = f"a worker was lost ({' '.join(described(error).split())[:120]})"
                if losses == _LOSSES:
                    key = next(iter(left))
                    del left[key]
                    yield {"key": key, "error": f"{loss}, {losses} times in a row: is there enough memory?"}
                    losses = 0
                else:
                    say(f"{loss}; {len(left)} trainings go on from where they were saved")


def _by_joblib(jobs: Sequence[Job], work: Work, queued: str = "n_jobs") -> Iterator[dict[str, Any]]:
    tasks = (joblib.delayed(work)(dict(job)) for job in jobs)
    # Workers inherit the mask: one that died of Ctrl-C while it imports would take the others along.
    resource_tracker.ensure_running()  # before Python 3.14, its first start unblocks the signal
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        # One job at a time to each worker, as jobs take long and none may start after an interrupt.
        done = joblib.Parallel(return_as="generator_unordered", batch_size=1, pre_dispatch=queued)(tasks)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    yield from done


def _by_ray(jobs: Sequence[Job], work: Work) -> Iterator[dict[str, Any]]:
    ray: Any = importlib.import_module("ray")
    path, module, name = list(sys.path), work.__module__, work.__name__

    # Sent by value, so that a worker extends its search path before it imports modules.
    def do(job: Job) -> Any:
        import importlib
        import sys

        sys.path += [folder for folder in path if folder not in sys.path]
        return getattr(importlib.import_module(module), name)(job)

    # No retries by Ray, as `do_jobs` continues a lost job from where it was saved.
    left = [ray.remote(max_retries=0)(do).remote(dict(job)) for job in jobs]
    try:
        while left:
            (first, *_), left = ray.wait(left, num_returns=1)
            yield ray.get(first)
    finally:
        for each in left:
            ray.cancel(each, force=True)


def begin_worker(parent: int, stop: Path) -> None:
    """Prepare a worker process: it saves and ends when its parent ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles it, and makes the file `stop`
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # for processes that a training starts
    restore_variables()
    threading.Thread(target=end_saved, args=(parent, stop, _SAVING_S), name="rl8x-watch", daemon=True).start()


def _save_at_interrupt(stack: contextlib.ExitStack, jobs: Sequence[Job], stop: Path) -> None:
    """Make Ctrl-C wait until the workers have saved their trainings and unlocked the folders; a second one ends."""

    def end(number: int, frame: object) -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        say("rl8x: SIGINT: saving the trainings; Ctrl-C ends at once", err=True)
        stop.touch()
        until = time.monotonic() + _SAVING_S
        while any(is_locked(Path(job["folder"])) for job in jobs) and time.monotonic() < until:
            time.sleep(0.05)
        raise KeyboardInterrupt

    before = signal.getsignal(signal.SIGINT)
    if before not in (signal.SIG_IGN, None) and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, end)
        stack.callback(signal.signal, signal.SIGINT, before)


@contextlib.contextmanager
def _cluster(
    backend: str, num_jobs: int, address: str | None, jobs: Sequence[Job] = ()
) -> Iterator[Callable[..., Iterator[dict[str, Any]]]]:
    """Yield a function that runs jobs in processes or on a cluster; these end with the context."""
    with contextlib.ExitStack() as stack:
        if backend == "ray":
            _begin_ray(stack, num_jobs)
            yield _by_ray
        elif backend == "dask":
            distributed: Any = importlib.import_module("distributed")
            if address is None:
                cluster = distributed.LocalCluster(n_workers=num_jobs, threads_per_worker=1, dashboard_address=None)
                address = stack.enter_context(cluster).scheduler_address
            try:
                stack.enter_context(distributed.Client(address, timeout=CONTACT_S))
            except (OSError, ValueError) as error:
                raise ValueError(f"there is no Dask scheduler at {address}: {error}") from None
            stack.enter_context(joblib.parallel_config("dask"))
            yield functools.partial(_by_joblib, queued="all")  # more workers may join
        else:
            stop = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="rl8x-")), "stop")
            own = {"n_jobs": num_jobs, "initializer": begin_worker, "initargs": (os.getpid(), stop)}
            stack.enter_context(joblib.parallel_config("loky", **own))
            _save_at_interrupt(stack, jobs, stop)
            yield _by_joblib


def _begin_ray(stack: contextlib.ExitStack, num_jobs: int) -> None:
    """Use the process's Ray, else connect to RAY_ADDRESS, else start Ray on this machine."""
    ray: Any = importlib.import_module("ray")
    if ray.is_initialized():
        return
    address = os.environ.get(RAY_ADDRESS, "")
    host, _, port = address.removeprefix("ray://").rpartition(":")
    # Otherwise workers would search the working directory first, whose modules may be untrusted.
    config = importlib.import_module("ray.job_config").JobConfig(_client_job=True)
    local = {} if address else {"num_cpus": num_jobs, "include_dashboard": False}
    try:
        if host:  # fail early, as Ray itself retries for minutes
            socket.create_connection((host, int(port)), CONTACT_S).close()
        ray.init(job_config=config, log_to_driver=False, logging_level="ERROR", **local)
    except Exception as error:  # Ray raises a plain one where it has no answer in time
        raise ValueError(f"there is no Ray cluster at {address or 'this machine'}: {error}") from None
    stack.callback(ray.shutdown)


def threads_of(num_jobs: int) -> int | None:
    """Return the number of threads of each job, its share of this machine's processors; None, no limit, for one job."""
    return None if num_jobs == 1 else max(1, len(os.sched_getaffinity(0)) // num_jobs)


class StudyProgress:
    """Shows a line for each training that begins or ends, and a bar on a terminal, unless the mode is `"none"`."""

    def __init__(self, mode: Any, folder: Path) -> None:
        check_progress(mode)
        self._stream = Unfailing(sys.stderr)
        self._quiet, self._folder = mode == "none", folder
        has_bar = mode in ("auto", "bar") and self._stream.isatty()
        self._bar: Any = Bar(total=0, unit="training", dynamic_ncols=True, file=self._stream, disable=not has_bar)
        self._round_began, self._round = 0.0, list[Training]()
        self._begun: dict[str, float] = {}  # start times by the trainings' keys
        self._guard, self._end = threading.Lock(), threading.Event()
        if not self._quiet:
            threading.Thread(target=self._watch, name="rl8x-study", daemon=True).start()

    def begin(self, total: int, left: Iterable[Training]) -> None:
        """Begin a round of `total` trainings, of which those in `left` are not done."""
        self._round_began, self._round = time.time(), list(left)
        done = total - len(self._round)
        self._bar.total += total
        self._bar.n += done  # `update` does not count if no bar is shown
        if done:
            self.say(f"{done} of {total} trainings are done already")
        self._bar.refresh()

    def _watch(self) -> None:
        """Print which trainings have begun, by the locks in their folders."""
        while not self._end.wait(0.5):
            for training in self._round:
                if training.key not in self._begun and self._locked_since(training) >= self._round_began - 1.0:
                    self._note(training)

    def _locked_since(self, training: Training) -> float:
        with contextlib.suppress(OSError):
            return (self._folder / training.key / "lock").stat().st_mtime
        return -math.inf

    def _note(self, training: Training) -> None:
        """Print, once, that a training has begun."""
        with self._guard:  # also while it prints, so that the end is not told first
            if training.key in self._begun:
                return
            self._begun[training.key] = max(self._locked_since(training), self._round_began)
            self.say(f"{training.label}: begins")

    def end(self, training: Training, done: Mapping[str, Any]) -> None:
        """Print the result of a training, or its error."""
        self._note(training)
        if "error" in done:
            text = f"failed: {done['error']}"
        else:
            result = done["result"]
            means = {name.rpartition("/")[2]: measured(value) for name, value in result["means"].items()}
            parts = [f"return {means['mean']} in all cells"]
            parts += [f"{name} {means[name]}" for name in ("inside", "outside") if name in means]
            parts += [f"{short(result['at'])} {counter_name(result['clock'])}"]
            parts += [f"{time.time() - self._begun[training.key]:.0f} s", *["pruned"] * result["pruned"]]
            text = ", ".join(parts)
        self._bar.n += 1
        self.say(f"{training.label}: {text} ({self._bar.n}/{self._bar.total})")

    def say(self, message: str) -> None:
        """Print a line above the bar, unless the mode is `"none"`."""
        if not self._quiet:
            self._bar.write(f"rl8x: {message}", file=self._stream)

    def close(self) -> None:
        """Close the bar, which stays visible, and stop watching."""
        self._end.set()
        self._bar.close()
