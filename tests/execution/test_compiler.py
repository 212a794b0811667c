import contextlib
import ctypes
import functools
import gc
import os
import queue
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest
import torch
from tests.probes import described

from rl8x.execution import compiler, lowering
from rl8x.execution.artifacts import Artifacts, key_of, surroundings
from rl8x.execution.compiler import CompiledProgram, Compiler
from rl8x.execution.programs import Loop, ProgramError
from rl8x.execution.verification import Check


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    """A compiler on a cache of its own, whose process these tests share: a Python of its own, as users have it."""
    made = Compiler(Artifacts(tmp_path_factory.mktemp("cache")))
    made.start = functools.partial(Compiler.start.__wrapped__, made)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(made.artifacts.folder / "inductor"))  # empty, as at a first run
        yield made
    made.stop()


@pytest.fixture
def own(shared, monkeypatch):
    monkeypatch.setattr(compiler, "compiler", lambda: shared)
    return shared


@pytest.fixture
def mortal(monkeypatch, tmp_path):
    """A compiler that may be killed, on an empty cache."""
    made = Compiler(Artifacts(tmp_path / "cache"))
    monkeypatch.setattr(compiler, "compiler", lambda: made)
    yield made
    made.stop()


X = torch.tensor([1.0, 2.0])


def affine(scale, offset):
    offset = torch.tensor([offset])

    def apply(x, total):
        total.add_(x.sum())
        return [x * scale + offset, total * 1.0]

    return CompiledProgram(apply)


def run(program):
    total = torch.tensor(5.0)
    scaled, after = program(X, total)
    return scaled.tolist(), after.item(), total.item()


@pytest.mark.long
def test_programs_are_compiled_once_and_found_by_other_processes_by_their_traces(own, monkeypatch):
    said = []
    own.say = said.append
    assert run(affine(2.0, 10.0)) == ([12.0, 14.0], 8.0, 8.0)
    assert run(affine(2.5, 10.0)) == ([12.5, 15.0], 8.0, 8.0)
    assert said == ["waiting for the compiler; later runs like this one find what it makes in the cache"]
    loop = lambda: CompiledProgram(Loop(lambda total, item: [total.add_(item) + 0.0], 1))  # noqa: E731
    items = torch.tensor([2.0, 3.0])
    assert loop()(torch.tensor(1.0), items)[0].tolist() == [3.0, 6.0]
    later = Compiler(own.artifacts)  # of another process
    monkeypatch.setattr(compiler, "compiler", lambda: later)
    monkeypatch.setattr(later, "start", lambda: pytest.fail("compiled again"))
    monkeypatch.setattr(compiler, "verdict", lambda *_, **__: pytest.fail("verified again"))
    assert run(affine(2.0, 10.0)) == ([12.0, 14.0], 8.0, 8.0)
    assert run(affine(2.0, -1.0)) == ([1.0, 3.0], 8.0, 8.0)  # what it reads is read, not remembered
    assert loop()(torch.tensor(2.0), items)[0].tolist() == [4.0, 7.0]
    with pytest.raises(pytest.fail.Exception, match="compiled again"):
        run(affine(3.0, 10.0))
    # Inductor would probe the vector instructions of a processor with AVX-512, which takes a second or two.
    assert list((own.artifacts.folder / "inductor").rglob("*.so")) == []


@pytest.mark.long
def test_a_program_that_differs_is_refused_with_one_warning_and_later_runs_know(mortal, monkeypatch):
    """Another program is put in its place, as a compiler that makes mistakes would."""
    function = lambda x: [x * 7.0]  # noqa: E731
    right, wrong = (described(each, X)[0] for each in (function, lambda x: [x * 7.1]))
    mortal.library(wrong)
    key, copy = key_of(right), mortal.artifacts.beside("so")
    shutil.copy(mortal.artifacts.library(key_of(wrong)), copy)
    mortal.artifacts.put(key, copy)
    expected = r"a compiled program differs from .*, so it runs eagerly: sevenfold: result 0 is off by 0\.01"
    for known in ({}, {}, {key: "sevenfold: result 0 is off by 0.01"}):
        program = CompiledProgram(function, Check("sevenfold", verdicts=known))
        with pytest.warns(RuntimeWarning, match=expected) as told:
            results = [program(X)[0].tolist() for _ in range(2)]
        assert results == [[7.0, 14.0]] * 2
        assert len(told) == 1
        assert known.keys() == {key}
        monkeypatch.setattr(compiler, "verdict", lambda *_, **__: pytest.fail("verified again"))


_ANSWERS_AT_ONCE = """import json, sys
keys = [json.loads(sys.stdin.readline())["key"] for _ in range(2)]
print("\\n".join(json.dumps({"key": key, "error": "not " + key}) for key in keys), flush=True)
sys.stdin.read()
"""


def test_threads_that_wait_for_programs_get_their_answers_whichever_of_them_reads_both(tmp_path, monkeypatch):
    monkeypatch.setattr(Compiler, "start", Compiler.start.__wrapped__)
    monkeypatch.setattr(compiler, "_CODE", _ANSWERS_AT_ONCE)
    shared = Compiler(Artifacts(tmp_path / "cache"))
    programs, errors = ["first", "second"], queue.SimpleQueue()

    def wait(program):
        with pytest.raises(RuntimeError, match="not ") as refused:
            shared.library(program)
        errors.put(str(refused.value))

    for program in programs:
        threading.Thread(target=wait, args=(program,), daemon=True).start()
    assert {errors.get(timeout=60) for _ in programs} == {f"not {key_of(program)}" for program in programs}
    shared.stop()


class _Allocated(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_size_t) for name in ("arena", *"abc", "mapped", *"de", "used", *"fg"))


def _bytes_in_use():
    gc.collect()
    mallinfo = ctypes.CDLL(None).mallinfo2
    mallinfo.restype = _Allocated
    return mallinfo().used + mallinfo().mapped


@pytest.mark.long
@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="tells what glibc's malloc has given away")
def test_a_program_keeps_its_buffers_from_call_to_call_and_from_thread_to_thread_until_it_goes(own):
    x, rows = torch.rand(512, 640), torch.arange(512).flip(0).unsqueeze(1).expand(512, 640).contiguous()
    # 1.25 MB that are written before they are read; a large product may be in memory of torch's, by the processor.
    program = CompiledProgram(lambda x: [x.new_zeros(512, 640).scatter_add(0, rows, x).exp().sum()])
    with ThreadPoolExecutor(1) as other:
        expected = program(x)
        kept = _bytes_in_use()
        for _ in range(3):
            assert torch.equal(program(x)[0], expected[0])
            assert torch.equal(other.submit(program, x).result()[0], expected[0])
        assert abs(_bytes_in_use() - kept) < 2**19
    kept = _bytes_in_use()
    del program
    assert kept - _bytes_in_use() > 2**20


@pytest.mark.long
@pytest.mark.parametrize("name", ["no-such-compiler", "clang++"])
def test_another_c_compiler_is_taken_and_one_that_is_not_there_is_said_in_one_line(name, mortal, monkeypatch, request):
    if name == "clang++" and shutil.which(name) is None:
        pytest.skip("this machine has no clang++")
    request.addfinalizer(surroundings.cache_clear)  # it knows the compiler
    monkeypatch.setenv("CXX", name)
    surroundings.cache_clear()
    mortal.start = functools.partial(Compiler.start.__wrapped__, mortal)  # this process knows its compiler by now
    program = affine(2.0, 10.0)
    if name == "clang++":
        assert run(program) == ([12.0, 14.0], 8.0, 8.0)
        return
    for _ in range(2):
        with pytest.raises(ProgramError, match=r"^execution='compile' is not possible here: .+ execution='eager'.*$"):
            run(program)
    assert not list(mortal.artifacts.folder.glob("*.so"))


@pytest.mark.parametrize("whole", [False, pytest.param(True, marks=pytest.mark.long)])
def test_a_compiler_that_is_killed_is_an_error_and_the_next_program_has_a_new_one(mortal, whole):
    text, loaded = described(lambda x: [x * 2.0], X)
    said = []
    mortal.say, mortal.artifacts.left = said.append, "another folder is full"
    mortal.request(text)
    if whole:
        os.killpg(mortal._process.pid, signal.SIGKILL)
    else:
        wait_until(lambda: worker_of(psutil.Process(mortal._process.pid))).kill()
    with pytest.raises(RuntimeError, match="compiler's process ended" if whole else "compiler ended with status 9"):
        mortal.library(text)
    assert ["each run like this one will, since another folder is full: set" in each for each in said] == [True]
    if whole:
        assert loaded(mortal.library(text))(X)[0].tolist() == [2.0, 4.0]


def worker_of(process):
    """Return what was forked, of what was forked, to compile a program."""
    with contextlib.suppress(psutil.NoSuchProcess):
        workers = [worker for watcher in process.children() for worker in watcher.children()]
        return next((worker for worker in workers if worker.cmdline() == process.cmdline()), None)


def wait_until(condition):
    limit = time.monotonic() + 240
    while not (found := condition()):
        assert time.monotonic() < limit
        time.sleep(0.01)
    return found


@pytest.mark.long
def test_nothing_is_left_running_when_a_process_that_compiles_is_killed(tmp_path):
    code = textwrap.dedent("""
        import time, torch
        from rl8x.execution.compiler import CompiledProgram
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

    def is_gone():
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return True

    wait_until(is_gone)


def test_its_process_has_a_low_priority_in_the_session_of_the_run(mortal):
    """In a session of its own it would be as urgent as the run where the kernel schedules by sessions (autogroup)."""
    mortal.start()
    pid = mortal._process.pid
    assert os.getsid(pid) == os.getsid(0)
    assert os.getpgid(pid) == pid != os.getpgid(0)  # so that Ctrl-C is the run's alone
    lowest = min(os.getpriority(os.PRIO_PROCESS, 0) + 10, 19)
    wait_until(lambda: os.getpriority(os.PRIO_PROCESS, pid) >= lowest)


def test_what_several_processes_ask_for_is_compiled_once(tmp_path, monkeypatch):
    compiled_for = []

    def lower(description, path):
        compiled_for.append(description)
        time.sleep(0.2)  # the other asks meanwhile
        path.write_bytes(b"library")

    monkeypatch.setattr(lowering, "lower", lower)
    artifacts, key = Artifacts(tmp_path), "ab" * 16
    with ThreadPoolExecutor(2) as processes:
        answers = processes.map(lambda _: compiler._compile(artifacts, key, "a program"), range(2))
    assert [*answers] == [None, None]
    assert compiled_for == ["a program"]
    assert artifacts.find(key) is not None
    assert not [path for path in tmp_path.iterdir() if path.name.endswith(".lock")]
