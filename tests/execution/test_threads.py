import pytest
import torch

from rl8x.algorithms import DQNConfig, PPOConfig
from rl8x.envs import CartPole
from rl8x.execution.threads import flushed_denormals

CPU = torch.device("cpu")


def flushes():
    return torch.tensor(1e-39).mul(1.0).item() == 0.0


def test_denormals_are_0_within_and_numbers_again_after():
    assert not flushes()
    with flushed_denormals(CPU):
        assert flushes()
        assert torch.tensor(1e-37).mul(1.0).item() > 0.0
    assert not flushes()
    with pytest.raises(KeyError), flushed_denormals(CPU):
        raise KeyError
    assert not flushes()
    with flushed_denormals(torch.device("meta")):
        assert not flushes()


def test_a_user_who_has_them_flushed_keeps_that():
    torch.set_flush_denormal(True)
    try:
        with flushed_denormals(CPU):
            assert flushes()
        assert flushes()
    finally:
        torch.set_flush_denormal(False)


@pytest.mark.parametrize(
    ("make", "moment"),
    [
        (lambda: DQNConfig(num_envs=8, warmup_steps=0, seed=1, device="cpu", execution="eager"), "q"),
        (lambda: PPOConfig.rl8(num_envs=8, horizon=4, seed=1, device="cpu", execution="eager"), None),
    ],
    ids=["dqn", "ppo"],
)
def test_moments_of_weights_without_gradient_end_at_0(make, moment):
    algorithm = make().build(CartPole)
    optimizer = algorithm.optimizer if moment is None else algorithm.nets.trained[moment].optimizer
    mean = optimizer.moments["exp_avg"]
    mean.fill_(1e-39)  # between the weights, and of dead units, no gradient ever comes
    algorithm.collect()
    algorithm.step()
    assert not ((mean != 0) & (mean.abs() < 1e-38)).any()
    assert (mean != 0).any()
    assert not flushes()
