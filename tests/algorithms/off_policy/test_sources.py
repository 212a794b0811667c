"""What SAC and TD3 share: the scale of returns, and what cuts the sums of rewards that it is of."""

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box
from tests.probes import Forever

from rl8x import NullTracker, Trainer, keys
from rl8x.algorithms import TD3, SACConfig, TD3Config
from rl8x.algorithms.off_policy.updates import SCALE
from rl8x.checkpoint.tree import clone

CONFIGS = {"sac": SACConfig, "td3": TD3Config}
SMALL = {"num_envs": 8, "horizon": 4, "seed": 1, "device": "cpu", "model_config": {"hidden_sizes": [16]}}
SMALL |= {"warmup_steps": 16, "batch_size": 6, "buffer_size": 200, "critic_hidden_sizes": [16], "execution": "eager"}


class Hundreds(Forever):
    """Rewards of 100 for three steps, then a time limit: sums are 100, 150, 175 with gamma 0.5."""

    single_action_space = Box(-1.0, 1.0, (1,), dtype=np.float32)

    def transition(self, state, actions, parameters, noise):
        state, rewards, ends = super().transition(state, actions, parameters, noise)
        return state, 100 * rewards, ends


def build(name, **options):
    return CONFIGS[name](**{**SMALL, "gamma": 0.5, "return_bound": 5.0, **options}).build(Hundreds)


@pytest.mark.parametrize("name", CONFIGS)
def test_rewards_are_scaled_to_the_bound_of_returns(name):
    algorithm = build(name)
    wide, unscaled = build(name, return_bound=50.0), build(name, return_bound=None)
    for _ in range(3):
        algorithm.collect()
        wide.collect()
    std = np.std([100, 150, 175])
    assert algorithm.source.return_scale.scale.item() == pytest.approx(1 / max(std, 175 / 5), rel=1e-5)
    assert algorithm.source.items(torch.zeros(3, 1, dtype=torch.int64))[SCALE].tolist() == pytest.approx(
        [1 / 35] * 3, rel=1e-5
    )
    assert wide.source.return_scale.scale.item() == pytest.approx(1 / std, rel=1e-5)
    assert SCALE not in unscaled.draw(0, 3)
    with pytest.raises(ValueError, match=r"the run had a `return_bound`, which .* got None. Resume it as it was"):
        unscaled.load_state_dict(algorithm.state_dict())
    with pytest.raises(ValueError, match=r"the run had no `return_bound`, which .* got 5.0"):
        build(name).load_state_dict(unscaled.state_dict())


def spoilt(algorithm):
    """Have a horizon with a number that is not finite between two others."""
    rewards, fill = algorithm.rollout.tensors[keys.REWARDS], algorithm.horizons.collector.fill

    def fill_with_nan(rollout, *meanwhile):
        fill(rollout, *meanwhile)
        rewards[0, 3] = torch.nan

    algorithm.horizons.collector.fill = fill_with_nan
    algorithm.collect()
    algorithm.horizons.collector.fill = fill


@pytest.mark.parametrize("gap", [TD3.evaluate, TD3.discard_experience, spoilt])
def test_no_sum_of_rewards_reaches_across_a_gap(gap):
    """Two steps come before a gap, two after it: the sums of each are 100 and 150."""
    algorithm = build("td3", horizon=2)
    algorithm.collect()
    gap(algorithm)
    algorithm.collect()
    assert algorithm.source.return_scale.largest.item() == 150.0
    assert algorithm.source.return_scale.moments.count.item() == 32.0
    algorithm.horizons.reset_if_due(None)
    algorithm.collect()
    assert algorithm.source.return_scale.moments.count.item() == 48.0
    assert torch.isfinite(algorithm.source.return_scale.scale).all()


def test_an_update_that_is_taken_back_or_of_another_rank_leaves_the_rewards_behind_an_episode():
    """Four steps end an episode and begin one: each has a reward of 100 behind it, after the next four 150."""
    algorithm = build("td3")
    algorithm.collect()
    before = clone(algorithm.learned_state())
    algorithm.collect()
    algorithm.load_learned_state(before)
    assert algorithm.source.return_scale.carry.tolist() == [150.0] * 8
    joined = build("td3", seed=2)
    joined.join(algorithm.state_dict())
    assert joined.source.return_scale.largest.item() == algorithm.source.return_scale.largest.item() == 175.0
    assert not joined.source.return_scale.carry.any()
    restored = build("td3")
    restored.load_state_dict(algorithm.state_dict())
    assert restored.source.return_scale.carry.tolist() == [150.0] * 8


class ActionIsReward(Hundreds):
    def transition(self, state, actions, parameters, noise):
        return dict(state), actions.squeeze(1), torch.zeros(self.num_envs, dtype=torch.bool)


def test_evaluations_sample_from_the_policy_also_while_the_warm_up_is_random():
    config = TD3Config(**{**SMALL, "warmup_steps": 1000, "exploration_noise": 1e-6})
    trainer = Trainer(config.build(ActionIsReward), tracker=NullTracker(), num_eval_envs=64)
    assert trainer.step()["rewards/std"] > 0.3
    sampled = trainer.eval(deterministic=False)
    assert sampled["eval/rewards/std"] < 1e-5
    assert sampled["eval/rewards/mean"] == pytest.approx(trainer.eval()["eval/rewards/mean"], abs=1e-5)
