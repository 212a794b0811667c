import math

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Dict, Discrete
from tests.algorithms.by_hand import Networks, batch_of, disturb, of_steps, updated
from tests.algorithms.test_conformance import build as build_case
from tests.algorithms.test_conformance import train
from tests.probes import OneStep, Probe

from rl8x import SACConfig, keys
from rl8x.algorithms.sac import CQL_NOISE, NOISE
from rl8x.envs import CartPole, Pendulum

SMALL = {"num_envs": 8, "horizon": 2, "seed": 1, "device": "cpu", "model_config": {"hidden_sizes": [16]}}
SMALL |= {"warmup_steps": 16, "batch_size": 6, "buffer_size": 200, "critic_hidden_sizes": [16]}


def build(env=Pendulum, **options):
    return SACConfig(**{**SMALL, "execution": "eager", **options}).build(env)


class Plain(Networks):
    """One update, by autograd and torch.distributions, as in the papers."""

    def __init__(self, algorithm):
        super().__init__(algorithm)
        self.discrete = isinstance(algorithm.action_space, Discrete)
        self.target_entropy = algorithm.target_entropy

    def q(self, net, obs, action=None):
        """The critics' values, `[num_critics, rows]`; of discrete actions `[num_critics, rows, num_actions]`."""
        x = obs if self.discrete else torch.cat([obs, action], -1)
        outputs = torch.stack([self.outputs(net, i, x) for i in range(self.config.num_critics)])
        return outputs if self.discrete else outputs[..., 0]

    def taken(self, batch):
        """The critics' values of the actions of a batch, `[num_critics, rows]`."""
        obs, actions = batch[keys.OBS].double(), batch[keys.ACTIONS]
        return self.q("q", obs)[:, range(6), actions] if self.discrete else self.q("q", obs, actions.double())

    def sampled(self, obs, noise):
        """Actions of a box from -2 to 2, and log-densities of them as shares of it, `[..., rows]`."""
        mean, log_std = self.features("policy", obs).chunk(2, -1)
        u = mean + log_std.exp() * noise
        logp = torch.distributions.Normal(mean, log_std.exp()).log_prob(u) - torch.log(1 - torch.tanh(u) ** 2)
        return 2 * torch.tanh(u), logp.sum(-1)

    def value(self, net, obs, noise):
        """V(s), and -log pi or its expectation, `[rows]` each."""
        alpha = self.weights["alpha"]["log_alpha"].exp().detach()
        if self.discrete:
            distribution = torch.distributions.Categorical(logits=self.features("policy", obs))
            q, logs = self.q(net, obs).min(0).values, distribution.probs.log()
            return (distribution.probs * (q - alpha * logs)).sum(-1), distribution.entropy()
        actions, logp = self.sampled(obs, noise)
        return self.q(net, obs, actions).min(0).values - alpha * logp, -logp

    def q_loss(self, batch):
        after, _ = self.value("target", batch[keys.NEXT_OBS].double(), None if self.discrete else batch[NOISE][0])
        goals = batch[keys.RETURNS] + batch[keys.DISCOUNTS] * after.detach()
        return (0.5 * (self.taken(batch) - goals) ** 2).mean(-1).sum()

    def policy_loss(self, batch):
        values, entropies = self.value("q", batch[keys.OBS].double(), None if self.discrete else batch[NOISE][1])
        return -values.mean(), entropies.detach()

    def conservatism(self, batch):
        """The penalty, with densities of actions scaled to [-1, 1]."""
        obs = batch[keys.OBS].double()
        if self.discrete:
            sums = self.q("q", obs).exp().sum(-1)
        else:
            uniform, now, after = batch[CQL_NOISE].double()
            tried = [(2 * torch.erf(uniform / math.sqrt(2)), torch.full(uniform.shape[:-1], math.log(0.5)))]
            tried += [
                self.sampled(batch[key].double(), noise) for key, noise in ((keys.OBS, now), (keys.NEXT_OBS, after))
            ]
            actions, logp = (torch.cat(each) for each in zip(*tried, strict=True))
            sums = (self.q("q", obs.expand(len(actions), -1, -1), actions).exp() / logp.exp()).mean(1)
        return (sums.log() - self.taken(batch)).mean(-1).sum()


@pytest.mark.parametrize("options", [{}, {"num_critics": 3}], ids=["twin", "three"])
@pytest.mark.parametrize("env", [Pendulum, CartPole], ids=["continuous", "discrete"])
def test_an_update_is_that_of_the_papers(env, options):
    algorithm = build(env, optimizer="sgd", lr=0.1, initial_alpha=0.3, **options)
    disturb(algorithm)
    batch, plain = batch_of(algorithm), Plain(algorithm)
    alpha = plain.weights["alpha"]["log_alpha"].exp().item()
    q_loss = plain.q_loss(batch)
    plain.descend("q", q_loss)
    policy_loss, entropies = plain.policy_loss(batch)
    plain.descend("policy", policy_loss)
    alpha_loss = (plain.weights["alpha"]["log_alpha"].exp() * (entropies - plain.target_entropy)).mean()
    plain.descend("alpha", alpha_loss)
    numbers, errors = updated(algorithm, batch)
    expected = {"losses/q": q_loss, "losses/policy": policy_loss, "losses/alpha": alpha_loss}
    expected |= {"monitors/entropy": entropies.mean(), "coefficients/alpha": torch.tensor(alpha)}
    for name, number in expected.items():
        assert numbers[name].item() == pytest.approx(number.item(), rel=1e-4), name
    assert errors.shape == (6,)
    found = Networks(algorithm)
    for net in ("q", "policy", "alpha"):
        for name, part in found.weights[net].items():
            torch.testing.assert_close(part, plain.weights[net][name], rtol=1e-4, atol=1e-5)


class SixNumbers(OneStep):
    single_action_space = Box(-1.0, 1.0, (2, 3))


def test_the_target_entropy_is_in_the_units_of_the_paper():
    assert build().target_entropy == -1.0
    assert build(SixNumbers).target_entropy == -6.0
    assert build(CartPole).target_entropy == pytest.approx(0.98 * math.log(2))
    assert build(target_entropy=-0.5).params["target_entropy"] == -0.5


def test_entropies_do_not_depend_on_the_units_of_actions():
    class Wide(Pendulum):
        single_action_space = Box(-200.0, 200.0, (1,), dtype=np.float32)

    found = []
    for env in (Pendulum, Wide):
        algorithm = build(env)
        found.append(updated(algorithm, batch_of(algorithm)).metrics["monitors/entropy"].item())
    assert found[0] == pytest.approx(found[1], rel=1e-5)


def test_policy_and_temperature_wait_for_their_turn():
    algorithm = build(policy_delay=3)
    batch = batch_of(algorithm)
    for turn, trains in ((0, False), (2, True)):
        before = {name: each.weights.clone() for name, each in algorithm.nets.trained.items()}
        updated(algorithm, batch, turn)
        moved = {n: not torch.equal(before[n], each.weights) for n, each in algorithm.nets.trained.items()}
        assert moved == {"q": True, "policy": trains, "alpha": trains}


def test_a_fixed_temperature_stays():
    algorithm = build(alpha=0.25)
    assert set(algorithm.nets.trained) == {"q", "policy"}
    assert updated(algorithm, batch_of(algorithm)).metrics["coefficients/alpha"].item() == 0.25


class FewLegal(Probe):
    """Two of eight actions are legal: no policy has an entropy of more than log 2."""

    terminates = True
    single_action_space = Discrete(8)
    single_observation_space = Dict(
        {"x": Box(-1.0, 1.0, (1,), dtype=np.float32), "action_mask": Box(0, 1, (8,), dtype=np.int8)}
    )

    def observe(self, state, parameters):
        return {"x": state["x"], "action_mask": (torch.arange(8) < 2).to(torch.int8).expand(self.num_envs, 8)}

    def transition(self, state, actions, parameters, noise):
        return dict(state), actions.float(), torch.ones(self.num_envs, dtype=torch.bool)


def test_the_temperature_goes_towards_an_entropy_that_the_mask_leaves_possible():
    algorithm = build(FewLegal, updates_per_sample=1 / 16, target_entropy_frac=0.9, initial_alpha=0.3)
    *_, row = train(algorithm, 3)
    gap = row["monitors/entropy"] - 0.9 * math.log(2)
    assert row["losses/alpha"] == pytest.approx(row["coefficients/alpha"] * gap, rel=1e-4)
    assert algorithm.counters[keys.UPDATES] <= 3


# -- conservative Q-learning


@pytest.mark.parametrize("env", [Pendulum, CartPole], ids=["continuous", "discrete"])
def test_values_of_actions_that_the_data_do_not_have_are_held_down(env):
    case = "sac from data" if env is Pendulum else "sac from data, discrete"
    options = {"normalize_observations": False, "cql_coeff": 0.7, "cql_samples": 3}
    algorithm = build_case(case, optimizer="sgd", lr=0.1, batch_size=6, **options)
    disturb(algorithm)
    batch, plain = batch_of(algorithm), Plain(algorithm)
    drawn = algorithm.draw(0, 2)
    assert (CQL_NOISE in drawn) == (env is Pendulum)
    if env is Pendulum:
        assert drawn[CQL_NOISE].shape == (2, 3, 3, 6, 1)
    q_loss = plain.q_loss(batch)
    plain.descend("q", q_loss + 0.7 * plain.conservatism(batch))
    numbers, _ = updated(algorithm, batch)
    assert numbers["losses/q"].item() == pytest.approx(q_loss.item(), rel=1e-4)
    for name, part in Networks(algorithm).weights["q"].items():
        torch.testing.assert_close(part, plain.weights["q"][name], rtol=1e-3, atol=1e-4)


def test_illegal_actions_are_not_in_the_sum():
    space = Dict({"x": Box(-1.0, 1.0, (1,), dtype=np.float32), "action_mask": Box(0, 1, (3,), dtype=np.int8)})
    rows = {"x": torch.zeros(6, 1), "action_mask": torch.tensor([0, 1, 1], dtype=torch.int8).expand(6, 3)}
    declared = {"observation_space": space, "action_space": Discrete(3, start=1)}
    data = of_steps(CartPole(1), rows, torch.full((6,), 2), torch.zeros(6), **declared)
    algorithm = SACConfig(dataset=data, cql_coeff=1.0, device="cpu", seed=1, batch_size=6).build()
    batch = {name: tensor[0] for name, tensor in algorithm._items(torch.arange(6).unsqueeze(0)).items()}
    penalty = algorithm._conservatism({}, batch | algorithm.replay.columns.views(batch))
    with torch.no_grad():
        table = algorithm.critics({"x": torch.zeros(1, 1)})[:, 0]
        found = penalty(algorithm.critics, torch.zeros(2, 6))
    assert found.item() == pytest.approx(table[:, 1:].logsumexp(-1).sum().item(), rel=1e-5)
