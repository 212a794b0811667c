"""Run jobs one after the other in this process, in processes of this machine, or on a cluster, by joblib."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

from rl8x.distributed import ranks
from rl8x.output import described, say
from rl8x.processes import lending_variables, restore_variables
from rl8x.tracking.store_process import keep_process

Job = Mapping[str, Any]
BACKENDS: Final = ("processes", "dask", "ray")
_PACKAGES: Final = {"dask": "distributed", "ray": "ray"}
# So many losses of workers in a row, without a job done between them, are a job's own.
_LOSSES: Final = 3
CONTACT_S = 20.0
"""How long a scheduler is waited for."""
# Names of the errors of joblib's, Dask's and Ray's own by which they say so
_LOST: Final = frozenset({"BrokenProcessPool", "KilledWorker", "CommClosedError", "FutureCancelledError", "RayError"})


def check_backend(backend: str, address: str | None) -> None:
    """Refuse a back end that does not exist or is not installed.

    Raises:
        ValueError: If it is unknown or not installed, or an address is given without a cluster.
    """
    if backend not in BACKENDS:
        raise ValueError(f"`backend` must be one of {', '.join(BACKENDS)}; got {backend!r}.")
    package = _PACKAGES.get(backend)
    if package is not None and importlib.util.find_spec(package) is None:
        raise ValueError(f"backend={backend!r} needs {package}, which is not installed: pip install 'rl8x[studies]'.")
    if address is not None and backend != "dask":
        raise ValueError("`cluster` is the address of a Dask scheduler: give backend='dask' too.")


def refuse_ranks() -> None:
    """End all ranks where torchrun has started several, once the first has said why."""
    if ranks().size == 1:
        return
    if ranks().is_first:
        say(
            f"rl8x: error: a study shares out its trainings itself and runs in one process; torchrun has started "
            f"{ranks().size}. Start it without torchrun, with `jobs` trainings at a time (--jobs), or a `backend` for "
            "a cluster.",
            err=True,
        )
    # torchrun ends the others as soon as one has ended: none does before it is said, and each does so by itself.
    ranks().share("the refusal of a study", None)
    with contextlib.suppress(ValueError):  # not in the main thread
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise SystemExit(2)


def do_jobs(
    jobs: Sequence[Job],
    work: Callable[[Job], dict[str, Any]],
    *,
    num_jobs: int,
    backend: str,
    address: str | None,
    say: Callable[[str], None],
) -> Iterator[dict[str, Any]]:
    """Run jobs and yield what each returns, in the order in which they end.

    Jobs that were under way in a worker that is lost are run again, and continue where they were. After two losses in a
    row a job is run alone: it fails if its worker is lost too, and the others continue.

    Args:
        jobs: Plain data each, with a `key`.
        work: Does one; it can be imported by its name.
        num_jobs: How many are done at the same time on this machine; a cluster does as many as it has room for.
        backend: One of `BACKENDS`.
        address: Of a Dask scheduler; None is a cluster of this machine.
        say: Tells the user that a worker was lost.
    """
    if not jobs:  # no cluster for that
        return
    if backend == "processes" and num_jobs == 1:
        yield from (work(job) for job in jobs)
        return
    left, losses = {job["key"]: job for job in jobs}, 0
    with lending_variables(), _cluster(backend, num_jobs, address):
        while left:
            try:
                some = list(left.values())[: 1 if losses == _LOSSES - 1 else None]
                for done in _in_parallel(some, work, num_jobs, backend):
                    del left[done["key"]]
                    losses = 0
                    yield done
            except Exception as error:
                if not _is_loss(error):
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


def _in_parallel(
    jobs: Sequence[Job], work: Callable[[Job], dict[str, Any]], num_jobs: int, backend: str
) -> Iterator[dict[str, Any]]:
    import joblib

    tasks = (joblib.delayed(work)(dict(job)) for job in jobs)
    with contextlib.ExitStack() as stack:
        how: dict[str, Any] = {}
        if backend == "processes":
            how["n_jobs"] = num_jobs
            stack.enter_context(joblib.parallel_config("loky", initializer=begin_worker, initargs=(os.getpid(),)))
        # One job after the other to each worker, as they take long: nothing is handed out ahead.
        yield from joblib.Parallel(**how, return_as="generator_unordered", batch_size=1, pre_dispatch="all")(tasks)


def begin_worker(parent: int) -> None:
    """Begin a process that does one job after another: it keeps MLflow's process, and ends with its parent."""
    restore_variables()
    end_with(parent)
    keep_process()


_watched: set[int] = set()


def end_with(parent: int) -> None:
    """End this process when its parent has: a driver that was killed must not leave workers behind."""
    if parent in _watched:
        return
    _watched.add(parent)

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.2)
        os._exit(1)

    if os.getppid() != parent:  # killed while this process began
        os._exit(1)
    threading.Thread(target=watch, name="rl8x-watch", daemon=True).start()


@contextlib.contextmanager
def _cluster(backend: str, num_jobs: int, address: str | None) -> Iterator[None]:
    """Let joblib use a cluster for as long as the context lasts."""
    if backend == "processes":
        yield
        return
    import joblib

    if backend == "ray":
        from ray.util.joblib import register_ray

        register_ray()
        with joblib.parallel_config("ray"):
            yield
        return
    distributed: Any = importlib.import_module("distributed")
    with contextlib.ExitStack() as stack:
        if address is None:
            cluster = distributed.LocalCluster(n_workers=num_jobs, threads_per_worker=1, dashboard_address=None)
            address = stack.enter_context(cluster).scheduler_address
        try:
            stack.enter_context(distributed.Client(address, timeout=CONTACT_S))
        except (OSError, ValueError) as error:
            raise ValueError(f"there is no Dask scheduler at {address}: {error}") from None
        with joblib.parallel_config("dask"):
            yield


def _is_loss(error: Exception) -> bool:
    """Whether a worker has ended in the middle of a job, rather than the job in an error of its own."""
    return bool(_LOST & {cls.__name__ for cls in type(error).__mro__})


def threads_of(num_jobs: int) -> int | None:
    """Return each job's share of this machine's processors; None for one job, which takes as it likes."""
    if num_jobs == 1:
        return None
    return max(1, len(os.sched_getaffinity(0)) // num_jobs)
