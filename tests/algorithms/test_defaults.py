"""What is there where nothing but the environment is given: PPO learns, and numbers that nobody gave fit each other."""

import pytest

from rl8x.algorithms import PPOConfig
from rl8x.envs import CartPole


@pytest.mark.parametrize(
    ("given", "size"),
    [
        ({}, 256),
        ({"num_envs": 16}, 256),
        ({"num_envs": 4, "horizon": 8}, 32),  # all that there is
        ({"num_envs": 128, "horizon": 64}, 512),  # a 16th
        ({"num_envs": 8192, "horizon": 32}, 16384),
        ({"num_envs": 20, "horizon": 20}, 200),  # a divisor of 400
        ({"num_envs": 18, "horizon": 16, "seq_len": 16}, 288),  # of whole sequences: 288 = 18 * 16
        ({"num_envs": 7, "horizon": 9}, 63),
        ({"num_envs": 27, "horizon": 32}, 288),  # 864 / 3, of sequences of 4, as a memory has them
        ({"sgd_minibatch_size": 64}, 64),
        ({"sgd_minibatch_size": None}, None),
    ],
)
def test_a_minibatch_that_is_not_given_fits(given, size):
    assert PPOConfig(**given).sgd_minibatch_size == size


@pytest.mark.parametrize("model", ["gru", "lstm", "attention", "mlp", None])
def test_the_default_width_is_that_of_the_mlp_alone(model):
    algorithm = PPOConfig(model=model, num_envs=2, horizon=4, device="cpu").build(CartPole)
    algorithm.collect()
    algorithm.step()
    assert algorithm.params.get("model.hidden_sizes") == ((64, 64) if model in ("mlp", None) else None)
