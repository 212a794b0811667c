import copy
import functools
import threading
import warnings
from unittest import mock

import pytest
import torch
from tests.probes import record_once, weights_of

from rl8x.algorithms import PPOConfig
from rl8x.envs import CartPole
from rl8x.execution import Execution
from rl8x.execution import execution as module
from rl8x.execution.compiler import CompiledProgram
from rl8x.execution.execution import flushed_denormals
from rl8x.execution.programs import CapturedProgram, Loop, ProgramError

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _captures(monkeypatch):
    monkeypatch.setattr("rl8x.execution.programs.capture_cuda", record_once)


def build(env=CartPole, *, mode="graph", **options):
    """Build PPO whose execution is set from outside: a CPU refuses the mode 'graph'."""
    defaults = {"num_envs": 8, "horizon": 6, "seed": 2, "device": "cpu", "model_config": {"hidden_sizes": [8]}}
    defaults["execution"] = "eager" if mode == "eager" else "compile"
    algorithm = PPOConfig.rl8(**{**defaults, "sgd_minibatch_size": 16, "num_sgd_iters": 2, **options}).build(env)
    algorithm.execution.mode = algorithm.execution.target = mode
    algorithm.execution.host_looks = mode == "eager"
    return algorithm


@pytest.mark.parametrize(("has", "precision"), [(False, "bf16"), (False, "fp32"), (True, "bf16")])
def test_emulated_bfloat16_is_announced(has, precision, monkeypatch, recwarn):
    monkeypatch.setattr(module, "has_bfloat16", lambda: has)
    Execution("eager", precision, CPU)
    told = [str(each.message).startswith("precision='bf16' is emulated, since") for each in recwarn]
    assert told == ([True] if not has and precision == "bf16" else [])


# -- captured programs


@pytest.mark.parametrize("make", [CapturedProgram, functools.partial(CompiledProgram, compiles=False)])
def test_a_program_is_made_again_for_other_shapes_and_types(make):
    program = make(lambda values: [values + 1])
    for values in (torch.zeros(2), torch.zeros(3), torch.tensor([2**53 + 1, 0]), torch.zeros(2), torch.zeros(3)):
        assert torch.equal(program(values)[0], values + 1)


def test_a_captured_horizon_and_limited_updates_equal_eager_ones():
    """Other algorithms are captured in `simulated_cuda`."""
    eager, captured = (build(mode=mode, target_kl_div=0.01) for mode in ("eager", "graph"))
    for _ in range(3):
        for algorithm in (eager, captured):
            algorithm.collect()
            algorithm.step()
        for name, value in eager.rollout.tensors.items():
            torch.testing.assert_close(captured.rollout[name], value, atol=1e-5, rtol=1e-4, msg=name)
        torch.testing.assert_close(weights_of(captured), weights_of(eager), atol=1e-5, rtol=1e-5)
    assert captured.counters == eager.counters
    assert (eager.tags["rl8x.execution"], captured.tags["rl8x.execution"]) == ("eager", "graph")


def test_an_environment_that_cannot_be_captured_runs_eagerly_around_a_captured_policy(monkeypatch):
    algorithm, captured = build(), []

    def capture(function):
        captured.append(function)
        if len(captured) == 1:  # the horizon
            raise RuntimeError("operation not permitted when stream is capturing")
        return record_once(function)

    monkeypatch.setattr("rl8x.execution.programs.capture_cuda", capture)
    expected = "CartPole runs eagerly around a captured policy: .*operation not permitted"
    with pytest.warns(RuntimeWarning, match=expected):
        algorithm.collect()
    assert algorithm.tags["rl8x.execution"] == "graph, environment eager"
    assert len(captured) == 2
    algorithm.step()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        algorithm.collect()


# -- falling back


def test_what_falls_back_while_it_prepares_programs_stays_eager():
    execution = Execution("auto", "fp32", CPU)
    execution.mode = execution.target = "compile"
    with pytest.warns(RuntimeWarning, match="no compiler found"), execution.ahead():
        execution.give_up(ProgramError("compile", OSError("no compiler found")))
    assert (execution.mode, execution.target) == ("eager", "eager")


def test_a_failed_capture_leaves_no_trace(monkeypatch):
    def capture(function):
        function()
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr("rl8x.execution.programs.capture_cuda", capture)
    total = torch.zeros(2)
    with pytest.raises(ProgramError, match="execution='graph' is not possible here: operation not permitted"):
        CapturedProgram(lambda total: [total.add_(1)], 1)(total)
    assert total.tolist() == [0.0, 0.0]


@pytest.mark.parametrize("fails", [True, False])
@pytest.mark.parametrize("mode", ["compile", "graph"])
def test_loops_of_an_accelerator_are_made_in_their_mode(mode, fails, monkeypatch):
    def make(function, *rest):
        if fails:
            raise OSError("no compiler found\nmore lines")
        return {"compile": CompiledProgram._interpret, "graph": record_once}[mode](function, *rest)

    made = mock.Mock(side_effect=make)
    monkeypatch.setattr("rl8x.execution.programs.capture_cuda", made)
    monkeypatch.setattr(CompiledProgram, "_compile", lambda *given: made(*given))
    execution = Execution("eager", "fp32", CPU)
    execution.mode = execution.target = mode
    execution.device = torch.device("cuda")

    def step(total, item, slot):
        slot.copy_(total)
        return [total.add_(item) + 0.0]

    program = execution.program(Loop(step, 1, num_items=2, num_written=1))
    total, items, slots = torch.zeros(2), torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.zeros(3, 2, 2)
    if fails:
        with pytest.raises(ProgramError, match=f"execution='{mode}' is not possible here: no compiler found"):
            program(total, items, slots[0])
        return
    for i, start in enumerate((0.0, 10.0, 20.0)):  # state and what is written may be other tensors in each call
        total = torch.full((2,), start)
        (found,) = program(total, items, slots[i])
        assert total.tolist() == [start + 4.0, start + 6.0]
        assert found.tolist() == [[start + 1.0, start + 2.0], total.tolist()]
        assert slots[i].tolist() == [[start, start], [start + 1.0, start + 2.0]]
    assert made.call_count == (3 if mode == "graph" else 1)


# -- threads


@pytest.fixture
def _two_threads():
    torch.set_num_threads(2)  # until the test ends
    yield
    assert torch.get_num_threads() == 2  # whatever was set for a while


@pytest.mark.usefixtures("_two_threads")
@pytest.mark.parametrize(
    ("mode", "work", "threads", "workers"),
    [("eager", 10**3, 1, 1), ("eager", 10**7, 2, 1), ("eager", 10**9, 2, 2), ("compile", 10**7, 2, 2)],
)
def test_small_work_uses_one_thread_and_one_worker(mode, work, threads, workers):
    chosen = Execution(mode, "fp32", CPU).threads
    with chosen.for_work(work):
        assert torch.get_num_threads() == threads
    with chosen.workers_for(work) as made:
        assert made.count == workers


@pytest.mark.usefixtures("_two_threads")
def test_workers_do_jobs_at_once_each_on_one_thread_and_keep_their_order():
    meeting = threading.Barrier(2, timeout=60)

    def job(number):
        meeting.wait()  # passes only if both are under way
        return number, torch.get_num_threads(), threading.current_thread().name

    threads = Execution("eager", "fp32", CPU).threads
    with threads.workers_for(10**9) as workers:
        (zero, mine, name), (one, others, other) = workers.share([lambda: job(0), lambda: job(1)])
        assert (zero, one, mine, others) == (0, 1, 1, 1)
        assert name != other
        with pytest.raises(ZeroDivisionError):
            workers.share([lambda: 1, lambda: 1 // 0])
        assert copy.deepcopy(workers).share([lambda: 1, lambda: 2]) == [1, 2]  # as a copy of an algorithm has them
    with mock.patch.object(module, "Workers") as made, threads.workers_for(10**9) as again:
        assert again is workers
    made.assert_not_called()  # an update asks each time, and a pool is dear


@pytest.mark.parametrize("already", [False, True])
def test_denormals_are_0_within_and_after_it_what_they_were(already, request):
    flushes = lambda: torch.tensor(1e-39).mul(1.0).item() == 0.0  # noqa: E731
    request.addfinalizer(lambda: torch.set_flush_denormal(False))
    torch.set_flush_denormal(already)
    with pytest.raises(KeyError), flushed_denormals(CPU):  # noqa: PT012
        assert flushes()
        assert torch.tensor(1e-37).mul(1.0).item() > 0.0
        raise KeyError
    assert flushes() == already
    with flushed_denormals(torch.device("meta")):
        assert flushes() == already
