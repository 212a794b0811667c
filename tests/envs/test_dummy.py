from __future__ import annotations

import torch

from rl8x.envs.dummy import ContinuousDummy, DiscreteDummy


def test_discrete_moves_by_one_and_pays_the_distance():
    env = DiscreteDummy(3, seed=0)
    env.reset()
    start = env.carry["state"]["position"]
    obs, rewards, terminated, truncated, _ = env.step(torch.tensor([0, 1, 1]))
    expected = start + torch.tensor([-1.0, 1.0, 1.0])
    assert torch.equal(obs, expected.unsqueeze(1))
    assert torch.equal(rewards, -expected.abs())
    assert not terminated.any()
    assert not truncated.any()


def test_continuous_moves_by_the_action():
    env = ContinuousDummy(2, seed=0)
    start, _ = env.reset()
    obs, rewards, _, _, _ = env.step(-start)
    assert obs.tolist() == [[0.0], [0.0]]
    assert rewards.tolist() == [0.0, 0.0]


def test_start_is_uniform_within_bounds():
    env = DiscreteDummy(20_000, seed=0)
    obs, _ = env.reset()
    quantiles = torch.tensor([0.05, 0.5, 0.95])
    torch.testing.assert_close(torch.quantile(obs[:, 0], quantiles), torch.tensor([-90.0, 0.0, 90.0]), atol=2.5, rtol=0)
    obs, _ = env.reset(config={"bounds": 0.5})
    assert 0.45 < float(obs.abs().max()) <= 0.5


def test_never_ends():
    env = DiscreteDummy(2, seed=0)
    assert not env.episodic
    env.reset()
    for _ in range(600):
        _, _, terminated, truncated, _ = env.step(torch.tensor([0, 1]))
        assert not (terminated | truncated).any()
    assert env.carry["elapsed"].tolist() == [600, 600]
