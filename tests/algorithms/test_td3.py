import numpy as np
import pytest
import torch
from gymnasium.spaces import Box
from tests.algorithms.by_hand import ActorCritic, batch_of, disturb, of_steps, updated
from tests.algorithms.test_conformance import build as build_case
from tests.probes import Probe

from rl8x import TD3Config, keys
from rl8x.algorithms.off_policy.learner import TAU
from rl8x.algorithms.td3 import NOISE

SMALL = {"num_envs": 8, "horizon": 2, "seed": 1, "device": "cpu", "model_config": {"hidden_sizes": [16]}}
SMALL |= {"warmup_steps": 16, "batch_size": 6, "buffer_size": 200, "critic_hidden_sizes": [16]}


class TwoJoints(Probe):
    """Two actions of other ranges; the reward is their sum."""

    terminates = True
    single_action_space = Box(np.array([-2.0, 0.0], np.float32), np.array([2.0, 10.0], np.float32))

    def transition(self, state, actions, parameters, noise):
        return dict(state), actions.sum(1), torch.ones(self.num_envs, dtype=torch.bool)


def build(**options):
    return TD3Config(**{**SMALL, "execution": "eager", **options}).build(TwoJoints)


def build_offline(**options):
    """TD3 on uniform actions, one step each."""
    made, space = TwoJoints(60), TwoJoints.single_action_space
    low, high = torch.tensor(space.low), torch.tensor(space.high)
    obs, _ = made.reset(seed=3)
    actions = torch.rand(60, 2, generator=torch.Generator().manual_seed(4)) * (high - low) + low
    data = of_steps(made, obs, actions, actions.sum(1))
    return build_case("td3 from data", dataset=data, batch_size=6, normalize_observations=False, **options)


def noisy(algorithm):
    """A batch whose noise brings actions beyond their bounds."""
    space = algorithm.action_space
    spread = torch.randn(6, *space.shape, generator=torch.Generator().manual_seed(6))
    return batch_of(algorithm, 0.25) | {NOISE: spread * torch.tensor(space.high - space.low) / 2}


class Plain(ActorCritic):
    """One update with SGD of rate 0.1, as in the papers."""

    def __init__(self, algorithm, batch):
        super().__init__(algorithm, batch)
        self.low, self.high = (
            torch.tensor(each).double() for each in (algorithm.action_space.low, algorithm.action_space.high)
        )

    def act(self, net, obs):
        return self.low + (self.high - self.low) * (torch.tanh(self.features(net, obs)) + 1) / 2

    def distance(self, action, other):
        return (((action - other) / ((self.high - self.low) / 2)) ** 2).sum(-1)

    def policy_loss(self):
        actions = self.act("policy", self.batch[keys.OBS])
        values, coeff = self.critics("q", self.batch[keys.OBS], actions)[0][0], self.config.actor_bc_coeff
        if coeff is None:
            return -values.mean()
        distances = self.distance(actions, self.batch[keys.ACTIONS])
        return -values.mean() / values.abs().mean().item() + coeff * distances.mean()

    def update(self, *, trains):
        """Return both losses, and the critics' errors of each row."""
        batch = self.batch
        action = self.act("target_policy", batch[keys.NEXT_OBS]) + batch[NOISE]
        action = torch.maximum(torch.minimum(action, self.high), self.low)
        penalty = self.config.critic_bc_coeff * self.distance(action, batch[keys.NEXT_ACTIONS])
        goals = self.goals(*self.critics("target_q", batch[keys.NEXT_OBS], action), -penalty)
        q_loss, errors = self.errors(*self.critics("q", batch[keys.OBS], batch[keys.ACTIONS]), *goals)
        self.descend("q", q_loss)
        policy_loss = self.policy_loss()
        if trains:
            self.descend("policy", policy_loss)
        self.follow(batch[TAU])
        return q_loss.item(), policy_loss.item(), errors


VARIANTS = {
    "td3": {},
    "policy waits": {"trains": False},
    "three critics": {"num_critics": 3},
    "one critic": {"num_critics": 1},
    "categorical": {"num_atoms": 11},
    "categorical rebrac": {"num_atoms": 7, "v_max": 3.0, "actor_bc_coeff": 0.01, "critic_bc_coeff": 0.05},
    "td3+bc": {"actor_bc_coeff": 0.4, "critic_bc_coeff": 0.0},
    "rebrac": {"actor_bc_coeff": 0.01, "critic_bc_coeff": 0.05},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_an_update_is_that_of_the_papers(variant):
    options = dict(VARIANTS[variant])
    trains = options.pop("trains", True)
    made = build_offline if "actor_bc_coeff" in options else build
    algorithm = made(optimizer="sgd", lr=0.1, **options)
    disturb(algorithm)
    batch = noisy(algorithm)
    plain = Plain(algorithm, batch)
    q_loss, policy_loss, errors = plain.update(trains=trains)
    numbers, found = updated(algorithm, batch, -1 if trains else 0)
    assert numbers["losses/q"].item() == pytest.approx(q_loss, rel=1e-4)
    assert ("losses/policy" in numbers) == trains
    if trains:
        assert numbers["losses/policy"].item() == pytest.approx(policy_loss, rel=1e-4)
    assert numbers["monitors/td_error"].item() == pytest.approx(errors.mean().item(), rel=1e-4)
    torch.testing.assert_close(found.double(), errors, rtol=1e-4, atol=1e-5)
    plain.compare(algorithm)


# -- what is drawn


def test_the_noise_of_targets_is_normal_in_half_ranges_and_clipped():
    algorithm = build(batch_size=5000, target_noise=0.4, target_noise_clip=0.5)
    noise = algorithm.draw(0, 4)[NOISE]
    assert noise.shape == (4, 5000, 2)
    scaled = noise / torch.tensor([2.0, 5.0])
    assert scaled.abs().max().item() == pytest.approx(0.5)
    # Of a normal distribution 21.1% lies beyond 1.25 standard deviations.
    assert (scaled.abs() > 0.4999).float().mean().item() == pytest.approx(0.2113, abs=0.01)
    assert (scaled.abs() < 0.4).float().mean().item() == pytest.approx(0.6827, abs=0.01)
    assert not torch.equal(noise, algorithm.draw(0, 4)[NOISE])
    assert not build(target_noise=0.0).draw(0, 2)[NOISE].any()


def test_policy_and_targets_move_in_their_turns_whatever_the_blocks():
    algorithm = build(policy_delay=3, target_interval=2, tau=0.1)
    critics, both = algorithm.cycle[0], algorithm.cycle[2]
    assert list(algorithm._runs(4, 7)) == [(critics, 1), (both, 1), (critics, 2), (both, 1), (critics, 2)]  # 5 to 11
    shares = torch.cat([algorithm.draw(first, 4)[TAU] for first in (0, 4, 8)])
    assert shares.tolist() == pytest.approx([0.0, 0.1] * 6)


def test_actions_are_uniform_in_the_warm_up_and_then_near_the_policys():
    sizes = {"warmup_steps": 4000, "num_envs": 1000, "buffer_size": 20_000}
    algorithm = build(**sizes, exploration_noise=0.05, updates_per_sample=1e-3)
    scaled = []
    for _ in range(3):
        algorithm.collect()
        actions = algorithm.rollout[keys.ACTIONS][:2]
        scaled.append((actions / torch.tensor([2.0, 5.0]) - torch.tensor([0.0, 1.0])).flatten(0, 1))
    for each in scaled[:2]:
        counts = torch.histc(each, 10, -1, 1)
        # 9 degrees of freedom: mean 9, variance 18; 5 standard deviations.
        assert ((counts - 400).square() / 400).sum().item() < 9 + 5 * 18**0.5
    assert scaled[2].std(0).tolist() == pytest.approx([0.05, 0.05], rel=0.1)


def test_distances_of_actions_without_axes_are_those_of_one_dimension():
    """A `Box` of shape () has actions `[batch_size]`."""
    found = []
    for shape in ((), (1,)):
        generator, env = torch.Generator().manual_seed(4), TwoJoints(24)
        obs, rewards, actions = (torch.randn(24, *size, generator=generator) for size in ((1,), (), shape))
        data = of_steps(env, obs, actions.tanh(), rewards, action_space=Box(-1.0, 2.0, shape))
        found.append(dict(build_case("td3 from data", dataset=data, batch_size=6).step()))
    assert found[0] == pytest.approx(found[1], rel=1e-5)
