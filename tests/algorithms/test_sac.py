import math

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Dict, Discrete
from tests.algorithms.by_hand import batch_of, disturb, of_steps, updated
from tests.algorithms.test_conformance import train
from tests.probes import OneStep, Probe

from rl8x import keys
from rl8x.algorithms import SACConfig
from rl8x.algorithms.sac import CQL_NOISE, NOISE
from rl8x.envs import CartPole, Pendulum

SMALL = {"num_envs": 8, "horizon": 2, "seed": 1, "device": "cpu", "model_config": {"hidden_sizes": [16]}}
SMALL |= {"warmup_steps": 16, "batch_size": 6, "buffer_size": 200, "critic_hidden_sizes": [16]}


def build(env=Pendulum, **options):
    return SACConfig(**{**SMALL, "execution": "eager", **options}).build(env)


class Plain:
    """One update by autograd and torch.distributions, row after row as in the papers."""

    def __init__(self, algorithm):
        self.algorithm, self.critics, self.policy = algorithm, algorithm.critics, algorithm.policy
        self.log_alpha = algorithm.nets.trained["alpha"].module.log_alpha
        self.discrete = isinstance(algorithm.action_space, Discrete)

    def under_target(self, function):
        """Call a function while the critics have the target's weights."""
        optimizer = self.algorithm.nets.trained["q"]
        kept = [view.data.clone() for view in optimizer.views]
        target = self.algorithm.nets.targets["target"][1]
        for view, values in zip(optimizer.views, optimizer.split(target), strict=True):
            view.data.copy_(values)
        result = function().detach()
        for view, values in zip(optimizer.views, kept, strict=True):
            view.data.copy_(values)
        return result

    def value(self, obs, noise):
        """V(s) of one observation, and -log pi or its expectation."""
        alpha = self.log_alpha.exp().detach()[0]
        hidden = torch.relu(self.policy.model.actor[0](obs))
        features = self.policy.model.policy_head(hidden)
        if self.discrete:
            distribution = torch.distributions.Categorical(logits=features)
            q = self.critics(obs[None])[:, 0].min(0).values
            logs = distribution.probs.log()
            return (distribution.probs * (q - alpha * logs)).sum(), distribution.entropy()
        mean, log_std = features.chunk(2)
        distribution = torch.distributions.Normal(mean, log_std.exp())
        u = mean + log_std.exp() * noise
        logp = (distribution.log_prob(u) - torch.log(1 - torch.tanh(u) ** 2)).sum()
        q = self.critics(obs[None], 2 * torch.tanh(u)[None])[:, 0].min()
        return q - alpha * logp, -logp

    def goals(self, batch):
        return self.under_target(lambda: torch.stack([self.goal(batch, i) for i in range(len(batch[keys.RETURNS]))]))

    def goal(self, batch, i):
        noise = None if self.discrete else batch[NOISE][0, i]
        after = self.value(batch[keys.NEXT_OBS][i], noise)[0]
        return batch[keys.RETURNS][i] + batch[keys.DISCOUNTS][i] * after

    def q_loss(self, batch, goals):
        losses = []
        for i, goal in enumerate(goals):
            obs, action = batch[keys.OBS][i : i + 1], batch[keys.ACTIONS][i : i + 1]
            q = self.critics(obs)[:, 0, action.item()] if self.discrete else self.critics(obs, action)[:, 0]
            losses.append(sum(0.5 * (each - goal) ** 2 for each in q))
        return torch.stack(losses).mean()

    def policy_loss(self, batch):
        noise = [None] * 6 if self.discrete else batch[NOISE][1]
        both = [self.value(obs, each) for obs, each in zip(batch[keys.OBS], noise, strict=True)]
        return -torch.stack([value for value, _ in both]).mean(), torch.stack([each for _, each in both]).detach()


def stepped(loss, parameters, lr=0.1):
    parameters = list(parameters)
    for each, gradient in zip(parameters, torch.autograd.grad(loss, parameters, allow_unused=True), strict=True):
        if gradient is not None:
            each.data.sub_(lr * gradient)


@pytest.mark.parametrize("options", [{}, {"num_critics": 3, "critic_layer_norm": True}], ids=["twin", "three"])
@pytest.mark.parametrize("env", [Pendulum, CartPole], ids=["continuous", "discrete"])
def test_an_update_is_that_of_the_papers(env, options):
    made = {"optimizer": "sgd", "lr": 0.1, "initial_alpha": 0.3, **options}
    algorithm, other = build(env, **made), build(env, **made)
    for each in (algorithm, other):
        disturb(each)
    batch, plain = batch_of(algorithm), Plain(other)
    q_loss = plain.q_loss(batch, plain.goals(batch))
    stepped(q_loss, other.critics.parameters())
    policy_loss, entropies = plain.policy_loss(batch)
    stepped(policy_loss, other.policy.parameters())
    alpha = math.exp(other.nets.trained["alpha"].module.log_alpha.item())
    alpha_loss = (plain.log_alpha.exp() * (entropies - other.target_entropy)).mean()
    stepped(alpha_loss, [plain.log_alpha])
    numbers, errors = updated(algorithm, batch)
    expected = {"losses/q": q_loss, "losses/policy": policy_loss, "losses/alpha": alpha_loss}
    expected |= {"monitors/entropy": entropies.mean(), "coefficients/alpha": torch.tensor(alpha)}
    for name, number in expected.items():
        assert numbers[name].item() == pytest.approx(number.item(), rel=1e-4), name
    assert errors.shape == (6,)
    for name in ("q", "policy", "alpha"):
        mine, wanted = (list(each.nets.trained[name].module.parameters()) for each in (algorithm, other))
        for one, two in zip(mine, wanted, strict=True):
            torch.testing.assert_close(one.detach(), two.detach(), rtol=1e-4, atol=1e-5)


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


def test_a_learned_temperature_keeps_an_entropy_that_the_mask_leaves_possible():
    options = {"warmup_steps": 64, "lr": 0.01, "tau": 0.05, "updates_per_sample": 1.0, "gamma": 0.9}
    options |= {"batch_size": 32, "critic_hidden_sizes": [32], "target_entropy_frac": 0.9}
    *_, row = train(build(FewLegal, **options), 26)
    assert row["monitors/entropy"] == pytest.approx(0.9 * math.log(2), abs=0.05)
    assert row["coefficients/alpha"] < 2.0


# -- conservative Q-learning


def offline(env, **options):
    """SAC on 40 rows of no environment."""
    made, generator = env(1), torch.Generator().manual_seed(3)
    obs = torch.randn(40, *made.single_observation_space.shape, generator=generator)
    box = torch.rand(40, 1, generator=generator) * 4 - 2
    discrete = isinstance(made.single_action_space, Discrete)
    actions = torch.randint(2, (40,), generator=generator) if discrete else box
    kept = {name: SMALL[name] for name in ("seed", "device", "model_config", "batch_size", "critic_hidden_sizes")}
    data = of_steps(made, obs, actions, obs[:, 0])
    return SACConfig(dataset=data, **{**kept, "execution": "eager", **options}).build()


def conservatism(plain, batch, coeff):
    """The penalty, row after row and action after action, with densities of actions scaled to [-1, 1]."""
    total = 0.0
    for i in range(6):
        obs = batch[keys.OBS][i]
        if plain.discrete:
            table = plain.critics(obs[None])[:, 0]
            gaps = [each.exp().sum().log() - each[batch[keys.ACTIONS][i]] for each in table]
            total = total + coeff * sum(gaps) / 6
            continue
        tried = []
        for kind, key in enumerate((None, keys.OBS, keys.NEXT_OBS)):
            for noise in batch[CQL_NOISE][kind, :, i]:
                if key is None:
                    tried.append((2 * math.erf(noise.item() / math.sqrt(2)), 0.5))
                    continue
                hidden = torch.relu(plain.policy.model.actor[0](batch[key][i]))
                mean, log_std = plain.policy.model.policy_head(hidden).tolist()
                u = mean + math.exp(log_std) * noise.item()
                normal = math.exp(-0.5 * noise.item() ** 2) / math.sqrt(2 * math.pi) / math.exp(log_std)
                tried.append((2 * math.tanh(u), normal / (1 - math.tanh(u) ** 2)))
        of_data = plain.critics(obs[None], batch[keys.ACTIONS][i : i + 1])[:, 0]
        for c in range(2):
            q = [plain.critics(obs[None], torch.tensor([[a]]))[c, 0].exp() / density for a, density in tried]
            total = total + coeff * ((sum(q) / len(q)).log() - of_data[c]) / 6
    return total


@pytest.mark.parametrize("env", [Pendulum, CartPole], ids=["continuous", "discrete"])
def test_values_of_actions_that_the_data_do_not_have_are_held_down(env):
    algorithm, other = (offline(env, optimizer="sgd", lr=0.1, cql_coeff=0.7, cql_samples=3) for _ in range(2))
    for each in (algorithm, other):
        disturb(each)
    batch, plain = batch_of(algorithm), Plain(other)
    drawn = algorithm.draw(0, 2)
    assert (CQL_NOISE in drawn) == (env is Pendulum)
    if env is Pendulum:
        assert drawn[CQL_NOISE].shape == (2, 3, 3, 6, 1)
    q_loss = plain.q_loss(batch, plain.goals(batch))
    stepped(q_loss + conservatism(plain, batch, 0.7), other.critics.parameters())
    numbers, _ = updated(algorithm, batch)
    assert numbers["losses/q"].item() == pytest.approx(q_loss.item(), rel=1e-4)
    for one, two in zip(algorithm.critics.parameters(), other.critics.parameters(), strict=True):
        torch.testing.assert_close(one.detach(), two.detach(), rtol=1e-3, atol=1e-4)


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
