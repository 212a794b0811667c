import contextlib
import ctypes
import functools
import gc
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import psutil
import pytest
import torch
from tests.probes import described

from rl8x.execution import compiled, compiler_process
from rl8x.execution.artifacts import Artifacts, key_of
from rl8x.execution.compiled import CompiledProgram
from rl8x.execution.compiler import Compiler, load
from rl8x.execution.loops import Loop
from rl8x.execution.programs import ProgramError
from rl8x.execution.verification import Check


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    """A compiler on a cache of its own, whose process these tests share: a Python of its own, as users have it."""
    made = Compiler(Artifacts(tmp_path_factory.mktemp("cache")))
    made._start = functools.partial(Compiler._start.__wrapped__, made)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(made.artifacts.folder / "inductor"))  # empty, as at a first run
        yield made
    made.stop()


@pytest.fixture
def own(shared, monkeypatch):
    """What programs are compiled by."""
    monkeypatch.setattr(compiled, "compiler", lambda: shared)
    return shared


@pytest.fixture
def mortal(shared, monkeypatch, tmp_path):
    """A compiler that may be killed, on an empty cache."""
    made = Compiler(Artifacts(tmp_path / "cache"))
    monkeypatch.setattr(compiled, "compiler", lambda: made)
    yield made
    made.stop()


@pytest.fixture
def found_only(own, monkeypatch):
    """Return what makes this process a later one, which can neither compile nor verify."""

    def make():
        later = Compiler(own.artifacts)
        monkeypatch.setattr(compiled, "compiler", lambda: later)
        monkeypatch.setattr(later, "start", lambda: pytest.fail("compiled again"))
        monkeypatch.setattr(compiled, "verdict", lambda *_, **__: pytest.fail("verified again"))

    return make


class Affine:
    """An object whose method is compiled."""

    def __init__(self, scale, offset):
        self.scale = scale
        self.offset = torch.tensor([offset])

    def apply(self, x, total):
        total.add_(x.sum())
        return [x * self.scale + self.offset, total * 1.0]

    def program(self):
        return CompiledProgram(self.apply)


X = torch.tensor([1.0, 2.0])


def run(program):
    total = torch.tensor(5.0)
    scaled, after = program(X, total)
    return scaled.tolist(), after.item(), total.item()


def test_a_cache_that_cannot_be_written_to_is_told_of(own, monkeypatch, tmp_path):
    said = []
    monkeypatch.setattr(own, "say", said.append)
    monkeypatch.setattr(own.artifacts, "unwritable", tmp_path)
    monkeypatch.setattr(own, "request", lambda program: own._requested.add(program) or program)
    monkeypatch.setattr(own, "missing", lambda _: own._requested.clear())
    own.library("key")
    assert said == [
        f"waiting for the compiler; each run like this one will, since {tmp_path} cannot be written to: set "
        "RL8X_CACHE_DIR to another folder"
    ]


def test_answers_are_taken_as_they_come_and_the_end_of_the_process_is_noticed(tmp_path):
    own, (reads, writes) = Compiler(Artifacts(tmp_path)), os.pipe()
    own._process = SimpleNamespace(stdout=os.fdopen(reads, "rb"), pid=-1, wait=lambda: None)
    own._owner, own._requested = os.getpid(), {"a", "b", "c"}
    assert own.missing() == 3
    os.write(writes, b'{"key": "a", "error": null}\n{"key": "b", "err')
    assert [own.missing(), own.missing()] == [2, 2]
    os.write(writes, b'or": "too old"}\n')
    assert (own.missing(None), own._failed) == (1, {"b": "too old"})
    os.close(writes)
    own._process.pid = 2**22  # of no process
    with pytest.raises(RuntimeError, match="the compiler's process ended"):
        own.missing()
    assert own.missing() == 0


def test_programs_are_compiled_once_and_found_by_other_processes_by_their_traces(own, found_only):
    said = []
    own.say = said.append
    assert run(Affine(2.0, 10.0).program()) == ([12.0, 14.0], 8.0, 8.0)
    assert len(said) >= 1
    assert "waiting for the compiler" in said[0]
    loop = lambda: CompiledProgram(Loop(lambda total, item: [total.add_(item) + 0.0], 1))  # noqa: E731
    items = torch.tensor([2.0, 3.0])
    assert loop()(torch.tensor(1.0), items)[0].tolist() == [3.0, 6.0]
    found_only()
    assert run(Affine(2.0, 10.0).program()) == ([12.0, 14.0], 8.0, 8.0)
    assert run(Affine(2.0, -1.0).program()) == ([1.0, 3.0], 8.0, 8.0)  # what it reads is read, not remembered
    assert loop()(torch.tensor(2.0), items)[0].tolist() == [4.0, 7.0]
    with pytest.raises(pytest.fail.Exception, match="compiled again"):
        run(Affine(3.0, 10.0).program())


def test_a_program_that_differs_is_refused_with_one_warning_and_later_runs_know(own, monkeypatch):
    """Another program is put in its place, as a compiler that makes mistakes would."""
    function = lambda x: [x * 7.0]  # noqa: E731
    right, wrong = (described(each, X)[0] for each in (function, lambda x: [x * 7.1]))
    own.library(wrong)
    key = key_of(right)
    copy = own.artifacts.beside("so")
    shutil.copy(own.artifacts.library(key_of(wrong)), copy)
    own.artifacts.put(key, copy)
    expected = r"a compiled program differs from .*, so it runs eagerly: sevenfold: result 0 is off by 0\.01"
    for known in ({}, {}, {key: "sevenfold: result 0 is off by 0.01"}):
        program = CompiledProgram(function, Check("sevenfold", verdicts=known))
        with pytest.warns(RuntimeWarning, match=expected) as told:
            results = [program(X)[0].tolist() for _ in range(2)]
        assert results == [[7.0, 14.0]] * 2
        assert len(told) == 1
        assert known.keys() == {key}
        monkeypatch.setattr(compiled, "verdict", lambda *_, **__: pytest.fail("verified again"))


def test_nothing_is_built_but_programs(own):
    """Inductor would probe the vector instructions of a processor with AVX-512, which takes a second or two."""
    assert run(Affine(2.0, 4.0).program()) == ([6.0, 8.0], 8.0, 8.0)
    assert list((own.artifacts.folder / "inductor").rglob("*.so")) == []


class _Allocated(ctypes.Structure):
    """What glibc's `mallinfo2` returns."""

    _fields_ = tuple((name, ctypes.c_size_t) for name in ("arena", *"abc", "mapped", *"de", "used", *"fg"))


def _bytes_in_use():
    gc.collect()
    mallinfo = ctypes.CDLL(None).mallinfo2
    mallinfo.restype = _Allocated
    return mallinfo().used + mallinfo().mapped


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="tells what glibc's malloc has given away")
def test_a_program_keeps_its_buffers_from_call_to_call_and_from_thread_to_thread_until_it_goes(own):
    x = torch.rand(512, 512)  # 1 MB, as each product
    program = CompiledProgram(lambda x: [((x @ x).exp() @ x).sum()])
    with ThreadPoolExecutor(1) as other:
        other.submit(torch.mm, x, x).result()  # MKL has buffers for each thread
        expected = program(x)
        kept = _bytes_in_use()
        for _ in range(3):
            assert torch.equal(program(x)[0], expected[0])
            assert torch.equal(other.submit(program, x).result()[0], expected[0])
        assert abs(_bytes_in_use() - kept) < 2**19
    del program
    assert kept - _bytes_in_use() > 2**20


def test_what_cannot_be_compiled_says_why_in_one_line_and_is_asked_for_once(mortal, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    mortal._start = functools.partial(Compiler._start.__wrapped__, mortal)  # this process knows its compiler by now
    program = Affine(2.0, 10.0).program()
    messages = []
    for _ in range(2):
        with pytest.raises(
            ProgramError, match=r"execution='compile' is not possible here: .+ execution='eager'"
        ) as error:
            run(program)
        messages.append(str(error.value))
    assert messages[0] == messages[1]
    assert "\n" not in messages[0]
    assert not list(mortal.artifacts.folder.glob("*.so"))


def doubling():
    """Return the description of a program."""
    return described(lambda x: [x * 2.0], X)[0]


def test_a_compiler_that_is_killed_while_one_waits_is_an_error_and_the_next_has_a_new_one(mortal):
    mortal.request(doubling())
    os.killpg(mortal._process.pid, signal.SIGKILL)
    with pytest.raises(RuntimeError, match="the compiler's process ended"):
        mortal.library(doubling())
    assert load(mortal.library(doubling()))(X)[0].tolist() == [2.0, 4.0]


def test_a_program_whose_compilation_is_killed_is_an_error(mortal):
    mortal.request(doubling())
    _worker(psutil.Process(mortal._process.pid)).kill()
    with pytest.raises(RuntimeError, match=r"the compiler ended with status 9"):
        mortal.library(doubling())


def _worker(process):
    """Return what was forked, of what was forked, to compile a program."""
    limit = time.monotonic() + 240
    while time.monotonic() < limit:
        with contextlib.suppress(psutil.NoSuchProcess):
            for child in (child for watcher in process.children() for child in watcher.children()):
                if child.cmdline() == process.cmdline():
                    return child
        time.sleep(0.01)
    raise AssertionError("nothing compiles")


def test_nothing_is_left_running_when_a_process_that_compiles_is_killed(tmp_path):
    code = textwrap.dedent("""
        import time, torch
        from rl8x.execution.compiled import CompiledProgram
        from rl8x.execution.compiler import compiler
        CompiledProgram(lambda x: [(x * 3.0).sin()]).prepare(torch.ones(100))
        print(compiler()._process.pid, flush=True)
        time.sleep(60)
    """)
    environment = os.environ | {"RL8X_CACHE_DIR": str(tmp_path / "another")}
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=environment)
    group = int(child.stdout.readline())
    child.kill()
    child.wait()
    limit = time.monotonic() + 240
    while _runs(group) and time.monotonic() < limit:
        time.sleep(0.1)
    assert not _runs(group)


def _runs(group):
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


RUN = """
import hashlib, torch
from rl8x import NullTracker, PPOConfig, Trainer
from rl8x.envs import CartPole
# The programs of trainers/test_resume.py.
options = dict(num_envs=4, horizon=8, sgd_minibatch_size=16, num_sgd_iters=2, model_config={"hidden_sizes": [8]})
algorithm = PPOConfig.rl8(seed=3, device="cpu", execution="compile", **options).build(CartPole)
trainer = Trainer(algorithm, tracker=NullTracker(), checkpoints=False)
for _ in range(3):
    trainer.step()
weights = torch.cat([weight.detach().flatten() for weight in algorithm.policy.parameters()])
print(hashlib.sha256(weights.numpy().tobytes()).hexdigest())
"""


def test_a_run_with_a_warm_cache_has_the_same_bits():
    options = {"env": os.environ.copy(), "stdout": subprocess.PIPE, "text": True}
    found = []
    for _ in range(2):
        with subprocess.Popen([sys.executable, "-c", RUN], **options) as process:
            found.append(process.communicate()[0])
        assert process.returncode == 0
    assert found[0] == found[1]


# -- its process


def test_its_process_has_a_low_priority_in_the_session_of_the_run(shared):
    """In a session of its own it would be as urgent as the run where the kernel schedules by sessions (autogroup)."""
    shared.start()
    pid = shared._process.pid
    assert os.getsid(pid) == os.getsid(0)
    assert os.getpgid(pid) == pid != os.getpgid(0)  # so that Ctrl-C is the run's alone
    deadline = time.monotonic() + 240
    lowest = 19  # niceness has no more
    while os.getpriority(os.PRIO_PROCESS, pid) < min(os.getpriority(os.PRIO_PROCESS, 0) + 10, lowest):
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_what_several_processes_ask_for_is_compiled_once(tmp_path, monkeypatch):
    compiled_for = []

    def lower(description, path):
        compiled_for.append(description)
        time.sleep(0.2)  # the other asks meanwhile
        path.write_bytes(b"library")

    monkeypatch.setattr(compiler_process, "lower", lower)
    artifacts, answers = Artifacts(tmp_path), []
    request = {"key": "ab" * 16, "program": "a program"}
    ask = lambda: answers.append(compiler_process._compile(artifacts, **request))  # noqa: E731
    threads = [threading.Thread(target=ask) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert compiled_for == ["a program"]
    assert answers == [None, None]
    assert artifacts.find(request["key"]) is not None
    assert not [path for path in tmp_path.iterdir() if path.name.endswith(".lock")]
