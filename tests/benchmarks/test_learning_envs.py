"""The environments that exist for the learning benchmark alone: legal, and solved by who does what they ask for."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.learning_envs import Catch, MaskedCartPole, Traps  # noqa: E402

from rl8x.envs import validate  # noqa: E402


@pytest.mark.parametrize("env", [Catch, MaskedCartPole, Traps])
def test_are_legal(env):
    validate(env(8, seed=0))


def test_a_ball_is_drawn_where_it_is_and_caught_by_who_follows_it():
    env = Catch(64, seed=1)
    obs, _ = env.reset()
    assert obs.shape == (64, 1, 16, 16)
    assert ((obs == 255).sum((1, 2, 3)) >= 3).all()  # a pixel for the ball, two or three for the paddle
    total = torch.zeros(64)
    for t in range(15):
        image = obs[:, 0] == 255
        assert image[:, t].any(1).all()  # the ball is in row t
        ball = image[:, t].float().argmax(1)
        paddle = torch.where(
            image[:, 15].float().argmax(1) > 0, image[:, 15].float().argmax(1) + 1, image[:, 15].sum(1) - 2
        )
        actions = (ball - paddle).sign() + 1
        obs, rewards, terminated, _, _ = env.step(actions.long())
        total += rewards
        assert terminated.all() == (t == 14)
    assert (total == 1).float().mean() > 0.95


def test_a_ball_that_nobody_follows_is_mostly_missed():
    env = Catch(512, seed=2)
    env.reset()
    for _ in range(15):
        _, rewards, _, _, _ = env.step(torch.ones(512, dtype=torch.int64))
    assert -0.75 < rewards.mean() < -0.5  # three columns of sixteen: 2 * 3 / 16 - 1 = -0.63


def test_who_respects_the_mask_takes_12_48_and_who_does_not_takes_traps():
    env = Traps(4096, seed=3)
    obs, _ = env.reset()
    returns = torch.zeros(4096)
    for _ in range(16):
        legal = obs["action_mask"].bool()
        assert legal.any(1).all()
        assert (obs["worth"][~legal] >= 1).all()
        obs, rewards, _, truncated, info = env.step(torch.where(legal, obs["worth"], -1.0).argmax(1))
        returns += rewards
    assert truncated.all()
    assert (info["invalid"] == 0).all()
    assert returns.mean().item() == pytest.approx(12.48, abs=0.05)
    for _ in range(16):
        obs, rewards, _, _, info = env.step(obs["worth"].argmax(1))
    # The best looking one is a trap unless all eight are legal, 1 in 256.
    assert info["invalid"].mean().item() == pytest.approx(16 * 255 / 256, abs=0.05)
