"""Jobs in other processes: every one is done, also where workers are lost, and a cluster does the same."""

from __future__ import annotations

import contextlib
import importlib.util
import multiprocessing
import os
import signal
import threading
import time
from types import SimpleNamespace

import psutil
import pytest
from tests.studies.lossy import begin, save, work

from rl8x.studies import Study, jobs, table
from rl8x.studies.jobs import StudyProgress, check_backend, do_jobs, threads_of

HERE = {"num_jobs": 2, "backend": "processes", "address": None}


@pytest.fixture
def light_workers(monkeypatch):
    """Let workers import only what the jobs here need; `test_workers_end_with_a_killed_driver` has real ones."""
    monkeypatch.setattr("rl8x.studies.jobs.begin_worker", begin)


def jobs_of(folder, *deaths):
    return [{"key": f"job{index}", "folder": str(folder), "dies": dies} for index, dies in enumerate(deaths)]


def check_a_lost_worker(tmp_path, told, **where):
    said = []
    done = list(do_jobs(jobs_of(tmp_path, 0, 1, 0), work, say=said.append, **where))
    assert sorted(each["key"] for each in done) == ["job0", "job1", "job2"]
    assert all(each["result"] != os.getpid() for each in done)
    (line,) = said
    assert line.startswith(told)
    assert line.endswith("trainings go on from where they were saved")
    assert "\n" not in line


@pytest.mark.usefixtures("light_workers")
def test_a_lost_worker_is_said_in_one_line_and_its_job_is_done_again(tmp_path):
    check_a_lost_worker(tmp_path, "a worker was lost (TerminatedWorkerError", **HERE)


@pytest.mark.long
@pytest.mark.usefixtures("light_workers")
def test_a_job_whose_worker_is_lost_again_and_again_fails_alone(tmp_path):
    """It takes the other's worker with it each time, before that is through."""
    said = []
    fatal, other = jobs_of(tmp_path, 9, 0)
    first, second = do_jobs([fatal, {**other, "after": "job0-2"}], work, say=said.append, **HERE)
    assert first["key"] == "job0"
    assert "3 times in a row: is there enough memory?" in first["error"]
    assert second["key"] == "job1"
    assert "result" in second
    assert len(list(tmp_path.glob("job0-*"))) == 3
    assert len(said) == 2


@contextlib.contextmanager
def a_driver_of(todo, do, marks):
    """A process with two workers that do jobs, once some marks are there; with all three processes."""

    def drive():
        signal.signal(signal.SIGINT, signal.default_int_handler)  # which shells ignore for what runs in the background
        list(do_jobs(todo, do, say=print, **HERE))

    driver = multiprocessing.get_context("fork").Process(target=drive)
    driver.start()
    deadline = time.monotonic() + 120
    while not all(mark.exists() for mark in marks) and time.monotonic() < deadline:
        time.sleep(0.05)
    workers = [each for each in psutil.Process(driver.pid).children() if "LokyProcess" in " ".join(each.cmdline())]
    assert len(workers) == 2
    processes = [psutil.Process(driver.pid), *workers]
    yield processes
    driver.join(120)
    assert psutil.wait_procs(processes, timeout=120)[1] == []


@pytest.mark.long
@pytest.mark.parametrize(("do", "after"), [(work, {"job0-0"}), (save, {"job0-begun", "job0-saved", "lock"})])
def test_workers_end_with_a_killed_driver(tmp_path, do, after):
    """Also one that has got no job, which would wait minutes for one; a training is saved."""
    todo = [{**job, "takes_s": 60.0} for job in jobs_of(tmp_path, 0)]
    with a_driver_of(todo, do, [tmp_path / min(after)]) as (driver, *_):
        driver.kill()
    assert {each.name for each in tmp_path.iterdir()} == after


SLOW_START = """
import os, sys, time
if "LokyProcess" in " ".join(sys.orig_argv):
    try:
        os.open({mark!r}, os.O_CREAT | os.O_EXCL)
    except FileExistsError:
        time.sleep(5)
"""


@pytest.mark.long
@pytest.mark.parametrize("number", [1, 3], ids=["one worker still starts", "a third training waits"])
def test_an_interrupt_waits_until_trainings_are_saved_and_begins_no_other(tmp_path, monkeypatch, number):
    """Ctrl-C at a terminal is all its processes': an idle worker that died of it would take the others along."""
    if number == 1:
        (tmp_path / "sitecustomize.py").write_text(SLOW_START.format(mark=f"{tmp_path / 'first'}"))
        monkeypatch.syspath_prepend(tmp_path)  # given to workers
    todo = [{"key": f"job{index}", "folder": str(tmp_path / f"{index}"), "dies": 0} for index in range(number)]
    marks = [tmp_path / f"{index}" / f"job{index}-begun" for index in range(min(number, 2))]
    with a_driver_of(todo, save, marks) as processes:
        for each in processes:
            each.send_signal(signal.SIGINT)
    found = {f"{each.relative_to(tmp_path)}" for each in tmp_path.glob("*/job*")}
    assert found == {f"{i}/job{i}-{mark}" for i in range(min(number, 2)) for mark in ("begun", "saved")}


def test_back_ends_that_are_not_there_are_refused(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    for backend, package in (("dask", "distributed"), ("ray", "ray")):
        says = rf"needs {package}, which is not installed: pip install 'rl8x\[{backend}\]'"
        with pytest.raises(ValueError, match=says):
            check_backend(backend, None)


def test_the_beginning_of_a_training_is_told_before_its_end(tmp_path, monkeypatch):
    """Also where the thread that looks for the beginning comes to print it only when the end is known."""
    said, training = [], SimpleNamespace(key="a", label="a")
    with contextlib.closing(StudyProgress("lines", tmp_path)) as progress:
        begins = threading.Thread(target=progress._note, args=(training,))
        ends = threading.Thread(target=progress.end, args=(training, {"error": "none"}))

        def say(message):
            if threading.current_thread() is begins:
                ends.start()
                ends.join(0.5)
            said.append(message)

        monkeypatch.setattr(progress, "say", say)
        begins.start()
        begins.join()
        ends.join()
    assert said == ["a: begins", "a: failed: none (1/0)"]


def test_processors_are_shared():
    processors = len(os.sched_getaffinity(0))
    assert threads_of(1) is None
    assert threads_of(2) == max(1, processors // 2)
    assert threads_of(10 * processors) == 1


def needs(package):
    missing = importlib.util.find_spec(package) is None
    return pytest.mark.skipif(missing, reason=f"{package} is not installed")


@pytest.fixture(scope="module")
def ray_here(tmp_path_factory):
    """A Ray of this machine, begun in a folder with modules that nothing may import."""
    folder = tmp_path_factory.mktemp("sent")
    for name in ("rl8x", "json", "queue", "psutil", "joblib"):
        (folder / f"{name}.py").write_text(f"open({str(folder / 'imported')!r}, 'w')")
    with contextlib.chdir(folder), contextlib.ExitStack() as stack:
        for tries_left in (2, 1, 0):
            try:
                stack.enter_context(jobs._cluster("ray", 2, None))
                break
            except Exception:  # Ray gives up after 30 s, which it may take to start on a busy machine
                if not tries_left:
                    raise
        yield folder


STUDY = {"train": {"fixed": {"length": 0.5}}, "test": {"length": [0.25, 0.5]}, "seeds": 2, "episodes": 2}
STUDY |= {"env": "CartPole", "max_steps": 2, "tracking": False, "progress": "none"}
SMALL = {"num_envs": 8, "horizon": 8, "device": "cpu", "num_threads": 1, "model_config": {"hidden_sizes": [8]}}


@needs("distributed")
def test_a_scheduler_that_is_named_has_the_jobs_done(tmp_path):
    """Here by threads of this process, which start at once."""
    distributed = importlib.import_module("distributed")
    with distributed.LocalCluster(2, threads_per_worker=1, processes=False, dashboard_address=None) as cluster:
        where = {"num_jobs": 2, "backend": "dask", "address": cluster.scheduler_address}
        done = list(do_jobs(jobs_of(tmp_path, 0, 0), work, say=print, **where))
    assert sorted((each["key"], each["result"]) for each in done) == [("job0", os.getpid()), ("job1", os.getpid())]


@pytest.mark.long
@pytest.mark.parametrize(
    "backend", [pytest.param("dask", marks=needs("distributed")), pytest.param("ray", marks=needs("ray"))]
)
def test_a_cluster_of_two_workers_gives_the_same_table(backend, tmp_path, monkeypatch, request):
    sent = request.getfixturevalue("ray_here") if backend == "ray" else None
    monkeypatch.chdir(tmp_path)
    here = Study(name="here", algorithm_config=SMALL, **STUDY).run()
    there = Study(name="there", algorithm_config=SMALL, **STUDY)
    frame = there.run(2, backend=backend)
    assert there.failed == {}
    assert frame.equals(here)
    assert set(frame[table.SEED]) == {0, 1}
    assert sent is None or not (sent / "imported").exists()


@needs("ray")
def test_ray_does_again_what_a_lost_worker_did_and_gives_errors_of_the_work_itself(ray_here, tmp_path):
    check_a_lost_worker(tmp_path, "a worker was lost (WorkerCrashedError", **HERE | {"backend": "ray"})
    with pytest.raises(KeyError, match="folder"):
        list(do_jobs([{"key": "x"}], work, num_jobs=2, backend="ray", address=None, say=print))


@needs("ray")
def test_a_ray_that_is_not_there_is_said_in_one_line(monkeypatch):
    """Ray itself would try for minutes."""
    monkeypatch.setattr("ray.is_initialized", lambda: False)
    for address, told in (("127.0.0.1:9", "Connection refused"), ("nowhere", "nowhere")):
        monkeypatch.setenv("RAY_ADDRESS", address)
        with pytest.raises(ValueError, match=rf"there is no Ray cluster at {address}: .*{told}"):
            list(do_jobs([{"key": "x"}], work, num_jobs=1, backend="ray", address=None, say=print))


@needs("distributed")
def test_a_scheduler_that_is_not_there_is_said_in_one_line(monkeypatch):
    monkeypatch.setattr("rl8x.studies.jobs.CONTACT_S", 0.5)
    with pytest.raises(ValueError, match=r"there is no Dask scheduler at tcp://127\.0\.0\.1:9"):
        list(do_jobs([{"key": "x"}], work, num_jobs=1, backend="dask", address="tcp://127.0.0.1:9", say=print))
