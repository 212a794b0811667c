"""Values in units of the running moments of their targets; and what the observation normaliser may learn from."""

import copy

import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from tests.algorithms.ppo.test_ppo import train
from tests.probes import Steps
from torch.nn import functional as F

from rl8x import keys
from rl8x.algorithms import PPOConfig
from rl8x.envs import GymnasiumEnv, Pendulum
from rl8x.functional import generalized_advantages


def build(env=Pendulum, **options):
    defaults = {"num_envs": 4, "horizon": 6, "seed": 2, "device": "cpu", "model_config": {"hidden_sizes": [8]}}
    fields = {**defaults, "normalize_values": True, "vf_clip_param": None, "num_sgd_iters": 1, **options}
    return PPOConfig.rl8(**fields).build(env)


def test_values_are_given_in_the_units_of_the_rewards():
    policy = build().policy
    obs, starts = torch.randn(5, 3), torch.zeros(5, dtype=torch.bool)
    with torch.no_grad():
        raw = policy.model.values(obs.unsqueeze(0), {}, starts.unsqueeze(0))[0]
        assert torch.equal(policy.values(obs, {}, starts), policy.value_moments.denormalize(raw))
        torch.testing.assert_close(policy.values(obs, {}, starts), raw)  # moments of nothing are 0 and 1
        policy.value_moments.update(torch.tensor([1.0, 5.0]))  # mean 3, variance 4
        torch.testing.assert_close(policy.values(obs, {}, starts), 2.0 * raw + 3.0)
        noise = policy.noise(1, 5, torch.Generator())[0]
        torch.testing.assert_close(policy.act(obs, {}, starts, noise).values, 2.0 * raw + 3.0)
        evaluated = policy.evaluate(obs.unsqueeze(0), torch.zeros(1, 5, 1), {}, starts.unsqueeze(0))
        torch.testing.assert_close(evaluated.values[0], raw)


def test_moments_learn_from_the_targets_before_the_update_and_the_loss_is_in_their_units():
    algorithm = build(normalize_rewards=False, gamma=0.9, gae_lambda=0.8)
    for _ in range(2):
        algorithm.collect()
        rollout, moments = algorithm.rollout, copy.deepcopy(algorithm.policy.value_moments)
        names = (keys.REWARDS, keys.FINAL_VALUES, keys.TERMINATED, keys.TRUNCATED)
        rewards, *ends = (rollout[name][:6] for name in names)
        _, targets = generalized_advantages(rewards, rollout[keys.VALUES], *ends, gamma=0.9, gae_lambda=0.8)
        moments.update(targets)
        with torch.no_grad():
            raw = algorithm.policy.model.values(rollout[keys.OBS][:6], {}, rollout[keys.STARTS][:6])
        stats = algorithm.step()
        for found, expected in zip(algorithm.policy.value_moments.buffers(), moments.buffers(), strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=0.0)
        expected = F.smooth_l1_loss(raw, (targets - moments.mean) / moments.var.sqrt())
        assert stats["losses/vf"] == pytest.approx(expected.item(), rel=1e-4)


class Flagged(Steps):
    """Shows 0 while an episode goes on and 1000 at its end, after two steps."""

    length = 2

    def observation(self):
        return np.full(1, 1000.0 * (self.time == self.length), np.float32)


@pytest.mark.parametrize("mode", [AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP])
def test_normalisers_do_not_learn_from_filler_rows(mode):
    env = GymnasiumEnv(SyncVectorEnv([Flagged] * 4, autoreset_mode=mode))
    algorithm = train(build(env, normalize_observations=True, normalize_rewards=True), 2)
    moments = algorithm.policy.obs_moments["observation"]
    # Of six steps in NEXT_STEP mode two are fillers, whose observation is the one at the episode's end.
    rows = 2 * 4 * (4 if mode == AutoresetMode.NEXT_STEP else 6)
    assert (moments.count, moments.mean.item(), moments.var.item()) == (rows, 0.0, 0.0)
    assert algorithm.return_moments.count == algorithm.policy.value_moments.count == rows
