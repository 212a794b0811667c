import numpy as np
import pytest
import torch
from gymnasium.spaces import Box
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from tests.probes import Steps

from rl8x import Policy, keys
from rl8x.envs import GymnasiumEnv
from rl8x.execution import Execution
from rl8x.rollouts.collector import Collector
from rl8x.rollouts.step import Rollout, under


def test_a_metric_that_a_step_lacks_is_nan_there_in_each_horizon():
    rollout, name = Rollout(2, 3), f"{keys.METRICS}/success"
    rewards = {keys.REWARDS: torch.ones(3)}
    rollout.write_slot(0, rewards)
    rollout.write_slot(1, rewards | {name: torch.ones(3)})
    assert under(keys.METRICS, rollout.tensors, 2)["success"].isnan().all(1).tolist() == [True, False]
    rollout.write_slot(0, rewards | {name: torch.zeros(3)})
    rollout.write_slot(1, rewards)  # such as after a reset, until the simulator reports it again
    assert under(keys.METRICS, rollout.tensors, 2)["success"].isnan().all(1).tolist() == [False, True]


def test_episodes_that_are_cut_at_a_horizons_end_bootstrap_from_what_their_last_step_led_to():
    rollout, done = Rollout(2, 3), torch.tensor([True, False, False])
    for t in range(3):
        numbers = {keys.VALUES: torch.full((3,), 1.0 * t), keys.FINAL_VALUES: torch.full((3,), 10.0 + t)}
        rollout.write_slot(t, numbers | {keys.TERMINATED: done, keys.TRUNCATED: torch.zeros_like(done)})
    rollout.truncate()
    assert rollout[keys.TRUNCATED][1].tolist() == [False, True, True]
    assert rollout[keys.FINAL_VALUES][1].tolist() == [11.0, 2.0, 2.0]


def collector_of(env):
    policy = Policy(env.single_observation_space, env.single_action_space, model_config={"hidden_sizes": [8]})
    return Collector(env, policy, torch.Generator().manual_seed(2), Execution("eager", "fp32", torch.device("cpu")))


class Clock(Steps):
    """Shows the number of the episode and its steps; raises in the step of all copies that `interrupted_at` says."""

    observation_space = Box(0, 1e6, (2,), np.float32)
    length = 7
    episode = taken = interrupted_at = 0

    def observation(self):
        return np.array([self.episode, self.time], np.float32)

    def reset(self, **options):
        self.episode += 1
        return super().reset(**options)

    def step(self, action):
        Clock.taken += 1
        if Clock.taken == Clock.interrupted_at:
            raise KeyboardInterrupt
        return super().step(action)


@pytest.mark.parametrize("mode", AutoresetMode)
@pytest.mark.parametrize("play", [Collector.fill, lambda collector, _: collector.evaluate(5, deterministic=True)])
def test_a_simulator_that_was_interrupted_begins_anew(mode, play):
    Clock.taken, Clock.interrupted_at = 0, 16
    env = GymnasiumEnv(SyncVectorEnv([Clock] * 2, autoreset_mode=mode))
    collector, rollout = collector_of(env), Rollout(5, 2)
    collector.fill(rollout)
    with pytest.raises(KeyboardInterrupt):  # in the third step
        play(collector, rollout)
    for _ in range(3):
        collector.fill(rollout)
        shown, after = rollout[keys.OBS][:5], rollout[keys.OBS][1:]
        ended = (rollout[keys.TERMINATED] | rollout[keys.TRUNCATED])[:5]
        lasted = rollout[keys.EPISODE_LENGTHS][:5]
        assert torch.equal(after[~ended], shown[~ended] + torch.tensor([0.0, 1.0]))
        counted = rollout.tensors.get(keys.VALID, torch.ones(6, 2, dtype=torch.bool))[:5]
        assert torch.equal(lasted[counted], shown[..., 1][counted].long() + 1)
