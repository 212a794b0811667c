import itertools

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from tests.probes import Steps, traced_only

from rl8x import keys
from rl8x.envs import CartPole, CartPoleInfinite, GymnasiumEnv
from rl8x.execution import Execution
from rl8x.policy import Policy
from rl8x.rollouts.collector import Collector
from rl8x.rollouts.step import Rollout, experience, under

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _traced_only(monkeypatch):
    """Run the traced graph itself, without the half minute that compiling takes."""
    traced_only(monkeypatch)


def final_observations(cursor, act, step):
    """What a replay buffer stores: the true observation after each step, but no value of an actor-critic."""
    return experience(cursor, act, step) | {"final_obs": step.final_obs}


def make(mode, env_class=CartPole, **options):
    torch.manual_seed(0)
    env = env_class(4, seed=1, time_limit=5) if env_class is CartPole else env_class(4, seed=1)
    policy = Policy(env.single_observation_space, env.single_action_space, model_config={"hidden_sizes": [8]})
    generator = torch.Generator().manual_seed(2)
    return Collector(env, policy, generator, Execution(mode, "fp32", CPU), **options)


def test_a_slot_holds_what_the_algorithm_says_eager_and_compiled():
    rollout, compiled = Rollout(12, 4), Rollout(12, 4)
    make("eager", slot=final_observations).fill(rollout)
    make("compile", slot=final_observations).fill(compiled)
    assert rollout.tensors.keys() == compiled.tensors.keys()
    for name, stored in rollout.tensors.items():
        torch.testing.assert_close(compiled[name], stored, msg=name)
    assert {keys.LOGP, keys.VALUES, keys.FINAL_VALUES}.isdisjoint(rollout.tensors)
    obs, final = rollout[keys.OBS], rollout["final_obs"][:12]
    ended = (rollout[keys.TERMINATED] | rollout[keys.TRUNCATED])[:12]
    assert ended.any()
    # The observation that a step led to is the next slot's, unless an episode ended: then that is one after the reset.
    assert torch.equal(final[~ended], obs[1:][~ended])
    assert not (final == obs[1:]).all(-1)[ended].any()
    # The time limit: the fifth step of an episode is its last.
    assert (rollout[keys.EPISODE_LENGTHS][:12][rollout[keys.TRUNCATED][:12]] == 5).all()


def test_a_forced_end_of_episodes_keeps_their_true_final_observation():
    collector, rollout = make("eager", CartPoleInfinite, slot=final_observations), Rollout(3, 4)
    collector.fill(rollout)
    rollout.truncate()
    assert rollout[keys.TRUNCATED][2].all()
    assert torch.equal(rollout["final_obs"][2], rollout[keys.OBS][3])


def test_a_metric_that_a_step_lacks_is_nan_there_in_each_horizon():
    rollout, name = Rollout(2, 3), f"{keys.METRICS}/success"
    rewards = {keys.REWARDS: torch.ones(3)}
    rollout.write_slot(0, rewards)
    rollout.write_slot(1, rewards | {name: torch.ones(3)})
    assert under(keys.METRICS, rollout.tensors, 2)["success"].isnan().all(1).tolist() == [True, False]
    rollout.write_slot(0, rewards | {name: torch.zeros(3)})
    rollout.write_slot(1, rewards)  # such as after a reset, until the simulator reports it again
    assert under(keys.METRICS, rollout.tensors, 2)["success"].isnan().all(1).tolist() == [False, True]


def test_an_evaluation_keeps_no_observations_of_its_horizon():
    played = make("eager").evaluate(12, deterministic=True)
    assert (played[keys.REWARDS][:12] == 1.0).all()
    assert keys.OBS not in played.tensors


def test_play_draws_its_noise_ahead_and_leaves_environment_and_cursor_where_it_stopped():
    played, filled = make("eager"), make("eager")
    steps = list(itertools.islice(played.play(played.noises(4, deterministic=False)), 8))
    rollout = Rollout(8, 4)
    filled.fill(rollout)
    for t in range(4):  # the same noise for as long as it was drawn at once
        assert torch.equal(steps[t].step.rewards, rollout[keys.REWARDS][t])
    assert torch.equal(played.cursor.obs, steps[-1].step.obs)
    assert played.env.carry is steps[-1].carry


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
    policy = Policy(env.single_observation_space, env.single_action_space, model_config={"hidden_sizes": [8]})
    collector, rollout = Collector(env, policy, torch.Generator(), Execution("eager", "fp32", CPU)), Rollout(5, 2)
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
