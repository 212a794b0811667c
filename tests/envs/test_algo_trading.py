from __future__ import annotations

import math

import numpy as np
import torch

from rl8x.envs import AlgoTrading
from rl8x.envs.algo_trading import BUY, SELL


def test_the_price_follows_the_equation():
    env = AlgoTrading(4, seed=0)
    obs, _ = env.reset(config={"fee": 0.01})
    state = env.carry["state"]
    km, kc, f = (state[name].double().numpy() for name in ("trend", "cycle", "frequency"))
    price, invested, total = np.ones(4), np.zeros(4, bool), np.zeros(4)
    portfolio = np.ones(4)
    generator = np.random.default_rng(0)
    for t in range(30):
        actions = generator.integers(0, 3, 4)
        held = invested.astype(int)  # nothing else is legal than to buy where nothing is held, and to sell where it is
        assert obs["action_mask"].T.tolist() == [[1] * 4, (1 - held).tolist(), held.tolist()]
        obs, rewards, terminated, _, _ = env.step(torch.as_tensor(actions))
        after = np.where(actions == BUY, True, np.where(actions == SELL, False, invested))
        growth = (1 + km) * (1 + kc * np.sin(f * t))
        portfolio *= np.where(after, growth, 1.0) * np.where(after != invested, 0.99, 1.0)
        price, invested = price * growth, after
        total += rewards.double().numpy()
        np.testing.assert_allclose(total, 100 * np.log(portfolio), atol=1e-3)
        np.testing.assert_allclose(obs["change"][:, 0].numpy(), 100 * np.log(growth), atol=1e-4)
        assert obs["invested"].tolist() == invested.astype(int).tolist()
        assert not terminated.any()
    assert not env.episodic


def test_the_cycle_keeps_its_digits_however_long_it_goes_on():
    env = AlgoTrading(4, seed=0)
    env.reset()
    frequency = env.carry["state"]["frequency"].double()
    for _ in range(2000):
        env.step(torch.zeros(4, dtype=torch.int64))
    state = env.carry["state"]
    assert all(float(value.abs().max()) < 2 * math.pi + 1e-3 for value in state.values())
    np.testing.assert_allclose(state["phase"].double().sin(), (frequency * 2000).sin(), atol=2e-3)


def test_what_is_drawn_lies_in_its_range():
    env = AlgoTrading(2000, seed=0)
    env.reset(config={"min_period": 4.0, "max_period": 8.0, "max_trend": 0.01})
    state = env.carry["state"]
    period, trend = 2 * math.pi / state["frequency"], state["trend"]
    assert 4.0 <= float(period.min()) < 4.1 < 7.9 < float(period.max()) <= 8.001
    assert -0.01 <= float(trend.min()) < -0.0099 < 0.0099 < float(trend.max()) <= 0.01
    assert float(state["cycle"].min()) >= 0.0
