import threading

import pytest
import torch

from rl8x.algorithms import DQNConfig, PPOConfig
from rl8x.envs import CartPole
from rl8x.execution import Execution
from rl8x.execution.execution import flushed_denormals

CPU = torch.device("cpu")


@pytest.fixture
def _two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    assert torch.get_num_threads() == 2  # whatever was set for a while
    torch.set_num_threads(before)


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

    with Execution("eager", "fp32", CPU).threads.workers_for(10**9) as workers:
        (zero, mine, name), (one, others, other) = workers.share([lambda: job(0), lambda: job(1)])
        assert (zero, one, mine, others) == (0, 1, 1, 1)
        assert name != other
        with pytest.raises(ZeroDivisionError):
            workers.share([lambda: 1, lambda: 1 // 0])


def flushes():
    return torch.tensor(1e-39).mul(1.0).item() == 0.0


@pytest.mark.parametrize("already", [False, True])
def test_denormals_are_0_within_and_after_it_what_they_were(already):
    torch.set_flush_denormal(already)
    try:
        with flushed_denormals(CPU):
            assert flushes()
            assert torch.tensor(1e-37).mul(1.0).item() > 0.0
        assert flushes() == already
        with pytest.raises(KeyError), flushed_denormals(CPU):
            raise KeyError
        assert flushes() == already
        with flushed_denormals(torch.device("meta")):
            assert flushes() == already
    finally:
        torch.set_flush_denormal(False)


@pytest.mark.parametrize("kind", [DQNConfig, PPOConfig])
def test_moments_of_weights_without_gradient_end_at_0(kind):
    options = {"n_step": 1, "warmup_steps": 0} if kind is DQNConfig else {"horizon": 4}
    algorithm = kind(num_envs=8, seed=1, device="cpu", execution="eager", **options).build(CartPole)
    optimizer = algorithm.optimizer if kind is PPOConfig else algorithm.nets.trained["q"].optimizer
    mean = optimizer.moments["exp_avg"]
    mean.fill_(1e-39)  # between the weights, and of dead units, no gradient ever comes
    algorithm.collect()
    algorithm.step()
    assert not ((mean != 0) & (mean.abs() < 1e-38)).any()
    assert (mean != 0).any()
    assert not flushes()
