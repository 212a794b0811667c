"""What every test needs: MLflow without telemetry and the user's settings, on a database copied from a template."""

import atexit
import base64
import functools
import gc
import json
import multiprocessing
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import zlib
from pathlib import Path
from typing import ClassVar
from unittest import mock

import hypothesis
import pytest
from tests.forks import ForkedPython

from rl8x.tracking import shipping
from rl8x.tracking.shipper import Shipper
from rl8x.tracking.store import MLflowStore
from rl8x.trusted import memory

pytest_plugins = ["tests.skips"]
# Where it is set, as in images of containers, each process would translate all of rl8x and of its tests anew.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
# Python 3.14's own way to start a process cannot import the tests' classes, which vector environments of theirs have.
multiprocessing.set_start_method("fork", force=True)
# A machine that is busy is no fault of what is tested. Developers' runs draw new examples, CI's the same for the same
# code: what they would find is no fault of the change that it is asked about.
hypothesis.settings.register_profile(
    "rl8x",
    deadline=None,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
    derandomize="RL8X_TESTS_REPEATABLE" in os.environ,
)
hypothesis.settings.load_profile("rl8x")
# What is imported and collected stays: looking through it for garbage takes a tenth of the time of Python's own 700.
gc.set_threshold(50_000, 10, 20)
# Two workers on two cores: a second thread in each would only wait for the other worker's.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["MLFLOW_DISABLE_TELEMETRY"] = "true"
# Compiled programs are shared by all workers, and by nothing else; trust is not even remembered between workers.
for _name in ("XDG_CONFIG_HOME", *([] if "PYTEST_XDIST_WORKER" in os.environ else ["RL8X_CACHE_DIR"])):
    os.environ[_name] = tempfile.mkdtemp(prefix="rl8x-tests-")
    atexit.register(shutil.rmtree, os.environ[_name], ignore_errors=True)
for _name in ("MLFLOW_TRACKING_URI", "MLFLOW_RUN_ID", "MLFLOW_EXPERIMENT_NAME", "MLFLOW_EXPERIMENT_ID"):
    os.environ.pop(_name, None)


DOT = base64.b64decode("iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAAAAAA6fptVAAAACklEQVR4nGNgAAAAAgABSK+kcQAAAABJRU5ErkJggg==")

# These wait, for time-outs and for what is killed: one worker does them in turn, beside others that compute.
WAITING = ("tests/test_faults.py", "tests/ranks/test_failures.py")
# Then come those that take longest, so that no worker begins one of them when the others are at their end.
LONGEST = (
    "tests/combinations/test_runs.py",
    "tests/execution/test_lowering.py",
    "tests/simulated_cuda/test_simulated_cuda.py",
    "tests/ranks/test_equality.py",
    "tests/execution/test_compiler.py",
    "tests/trainers/test_resume.py",
    "tests/algorithms/test_conformance.py",
    "tests/test_readme.py",
    "tests/studies/test_jobs.py",
    "tests/studies/test_study.py",
    "tests/test_export.py",
    "tests/test_examples.py",
    "tests/ranks/test_decisions.py",
    "tests/test_processes.py",
    "tests/test_reference.py",
    "tests/checkpoint/test_load.py",
    "tests/test_importing.py",
    "tests/trainers/test_artifacts.py",
    "tests/trainers/test_record.py",
    "tests/tracking/test_shipping.py",
)


def pytest_collection_modifyitems(items) -> None:
    """Begin with the files that take longest; the others follow in the order of their names."""
    places = {name: place for place, name in enumerate((*WAITING, *LONGEST))}
    items.sort(key=lambda item: places.get(item.nodeid.partition("::")[0], len(places)))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Give each worker whole files, in the order of the collection: xdist's own begins with those of most tests."""
    if config.getvalue("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class Files(LoadFileScheduling):
        def _split_scope(self, nodeid):
            file = super()._split_scope(nodeid)
            return WAITING[0] if file in WAITING else file

    config.option.loadscopereorder = False
    return Files(config, log)


def pytest_collection_finish() -> None:
    """Leave what was collected out of each search for garbage, such as that of a refusal for want of memory."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def tables_are_made_once(tmp_path_factory):
    """Have all pytest-xdist workers share what MLflow makes of an empty database: it takes seconds for it."""
    from rl8x.tracking import private
    from rl8x.tracking.locks import FileLock

    base, make = tmp_path_factory.getbasetemp(), private._migrated
    tables = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "tables.db"

    @functools.wraps(make)
    def made() -> bytes:
        with FileLock(tables.with_suffix(".lock")):
            if not tables.exists():
                tables.write_bytes(make())
            return tables.read_bytes()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(private, "_migrated", made)
        yield


@pytest.fixture(scope="session")
def mlflow_template(tmp_path_factory) -> Path:
    """An empty MLflow database."""
    from rl8x.tracking.location import Location
    from rl8x.tracking.store import ensure_database

    folder = tmp_path_factory.mktemp("mlflow-template")
    database = folder / "mlflow.db"
    ensure_database(Location(f"sqlite:///{database}", database, folder / "artifacts"))
    return database


@pytest.fixture(scope="session", autouse=True)
def compilers_are_forks():
    """Make each compiler's process a fork of this one, which imports torch's compiler once for all of them.

    A test that needs a Python of its own calls `Compiler.start.__wrapped__`.
    """
    from rl8x.execution.compiler import Compiler

    start = Compiler.start

    @functools.wraps(start)
    def fork(compiler: Compiler) -> None:
        from rl8x.execution import lowering, private  # noqa: F401, what its process imports

        private.inductor()
        with mock.patch.object(subprocess, "Popen", ForkedPython):
            start(compiler)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Compiler, "start", fork)
        yield


@pytest.fixture(scope="session", autouse=True)
def own_environments_are_checked_once():
    """Check rl8x's own environments when a worker first builds for one of their kind, not each of thousands of times.

    Those of tests, and of simulators, are checked whenever they are built for, as users' are.
    """
    from rl8x.algorithms.off_policy import learner
    from rl8x.algorithms.on_policy import algorithm
    from rl8x.envs.validation import validate

    checked = set()

    def check(env) -> None:
        state = env.parameter_state
        own = type(env).__module__.startswith("rl8x.") and env.capturable and state.next is state.current
        key = env.program_key, repr(env.single_observation_space), repr(env.single_action_space)
        if not own or key not in checked:
            validate(env)
            checked.add(key)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(algorithm, "validate", check)
        patch.setattr(learner, "validate", check)
        yield


@pytest.fixture
def mlruns(mlflow_template, tmp_path, monkeypatch) -> Path:
    """Work in an empty folder whose `mlruns/mlflow.db` is there already; returns that `mlruns`."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "mlruns"
    folder.mkdir()
    shutil.copyfile(mlflow_template, folder / "mlflow.db")
    return folder


@pytest.fixture
def mlflow_client(mlruns):
    """MLflow's own client on the store of `mlruns`, to read back what arrived."""
    from mlflow import MlflowClient

    return MlflowClient(tracking_uri=f"sqlite:///{mlruns}/mlflow.db")


@pytest.fixture
def default_signals():
    """The dispositions of a process started at a terminal, here and in processes started from here.

    A script's background job, such as `make test &`, begins with SIGINT ignored, one under nohup
    with SIGHUP, and so would all that it starts.
    """
    handlers = {signal.SIGINT: signal.default_int_handler}
    handlers |= dict.fromkeys((signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1), signal.SIG_DFL)
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


class InProcess:
    """What the shipper is, without the process: MLflow is imported once for all tests, not once for each run."""

    running: ClassVar = []
    is_used = True

    def __init__(self, database):
        self.running.append(self)
        self.popen = mock.Mock(pid=os.getpid(), returncode=None)
        self.shipper = Shipper(os.getpid())
        # It has this one's variables. What its calls of MLflow set for their time, and a message told it, would stay.
        self.shipper._adopt = lambda wanted: None
        self.ended = False
        threading.Thread(target=self.beat, daemon=True).start()

    def beat(self):
        while self.shipper.beat_once(orphaned=False) or not self.ended:
            time.sleep(0.1)

    def send(self, message):
        told = json.loads(json.dumps(message, default=os.fspath))
        with mock.patch.object(sys, "argv", sys.argv):
            self.shipper.handle(told)

    def pump(self):
        pass

    def is_gone(self):
        return False

    def is_busy(self):
        return False

    def end(self):
        self.ended = True

    @classmethod
    def stop_all(cls):
        """Forget the runs that a test leaves open: threads would look for more of each until the last test ends."""
        ship, shipping._shared = shipping._shared, None
        if isinstance(ship, cls):
            shipping._open.clear()
        elif ship is not None:
            ship.end()
        tails = [tail for ship in cls.running for tail in ship.shipper._tails.values()]
        while cls.running:
            cls.running.pop().ended = True
        for tail in tails:
            tail._try = lambda: -1.0
            tail.wake.set()
        for tail in tails:  # what is forked while one is within SQLite would wait for its mutex for ever
            tail.join(10.0)

    close_in_child = end
    process = shipping._ShipperProcess


def intercepted(patch, before):
    """Have each call of the store by the shipper in this process begin with `before`, given its name and arguments."""

    class Intercepted(MLflowStore):
        def __getattribute__(self, name):
            found = super().__getattribute__(name)
            if name.startswith("_") or not callable(found):
                return found
            return lambda *args, **options: (before(name, *args), found(*args, **options))[1]

    def connect(location, **options):
        before("connect")
        return Intercepted(location, **options)

    patch.setattr("rl8x.tracking.shipper.MLflowStore", connect)


def a_dot(figure, theme, *, titled=False):
    """Draw a figure, and return one dot: the layout and the pixels of a picture take ten times as long as its lines."""
    from rl8x import drawing

    drawing.drawn(figure, theme, titled=titled)
    return DOT


@pytest.fixture(autouse=True)
def apart(request, monkeypatch):
    """Let nothing of a test reach the next one, and leave out what takes seconds unless a mark asks for it.

    Threads that an algorithm's `num_threads` sets for the process, trust that is remembered, and passwords that are
    hidden end with the test. Learning curves are drawn, and figures are more than one dot, with `draws_figures` alone;
    journals are shipped by a process of its own with `store_process`; a wait at the end of a run, which is longer on a
    busy machine, is not told. In CI runs without a seed draw what they drew there before: by chance one may learn at
    once, or not at all. So do tests by torch's own generator, whatever their worker has drawn before.
    """
    import torch  # no sooner than OMP_NUM_THREADS is set

    from rl8x.algorithms import hyperparameters

    threads = torch.get_num_threads()
    memory().unlink(missing_ok=True)
    monkeypatch.setattr("rl8x.tracking.secrets._given", {})
    monkeypatch.setattr("rl8x.trainers.rows._SECONDS_OF_SILENCE", 60.0)
    if "draws_figures" not in request.keywords:
        monkeypatch.setattr("rl8x.tracking.store.draw_curves", lambda *args: None)
        monkeypatch.setattr("rl8x.drawing.png", a_dot)
    if "store_process" not in request.keywords:
        monkeypatch.setattr("rl8x.tracking.shipping._ShipperProcess", InProcess)
    if "RL8X_TESTS_REPEATABLE" in os.environ:
        monkeypatch.setattr(hyperparameters.secrets, "randbelow", random.Random(request.node.nodeid).randrange)
        torch.manual_seed(zlib.crc32(request.node.nodeid.encode()))
    yield
    torch.set_num_threads(threads)
    InProcess.stop_all()
