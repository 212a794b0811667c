"""Behaviour cloning and implicit Q-learning, by torch's own distributions."""

import math

import gymnasium
import pytest
import torch
from tests.algorithms.by_hand import Networks, dataset, disturb, of_steps, updated
from tests.algorithms.test_conformance import build

from rl8x import keys
from rl8x.algorithms.off_policy.learner import TAU
from rl8x.envs import CartPole, Pendulum
from rl8x.replay.dataset import Dataset


@pytest.mark.parametrize("env_class", [CartPole, Pendulum])
def test_updates_are_those_of_torchs_own_likelihood_and_optimizer(env_class):
    options = {"lr": 3e-3, "max_grad_norm": 0.5, "normalize_observations": False}
    algorithm, twin = (build("bc from data", env=env_class, **options) for _ in range(2))
    model, adam = twin.policy.model, torch.optim.Adam(twin.policy.parameters(), 3e-3)
    for first in range(0, 60, 6):
        batch = algorithm.replay.gather(torch.arange(first, first + 6))
        features = model.policy_head(torch.relu(model.actor[0](batch[keys.OBS])))
        if env_class is CartPole:
            likelihood = torch.distributions.Categorical(logits=features).log_prob(batch[keys.ACTIONS])
        else:
            normal = torch.distributions.Normal(features, twin.policy.distribution.log_std.exp())
            likelihood = normal.log_prob(batch[keys.ACTIONS]).sum(1)
        adam.zero_grad()
        (-likelihood.mean()).backward()
        norm = torch.nn.utils.clip_grad_norm_([w for w in twin.policy.parameters() if w.grad is not None], 0.5)
        adam.step()
        numbers, _ = updated(algorithm, batch)
        assert numbers["losses/bc"].item() == pytest.approx(-likelihood.mean().item(), rel=1e-4)
        assert numbers["monitors/grad_norm"].item() == pytest.approx(norm.item(), rel=1e-3)
    for mine, theirs in zip(algorithm.policy.parameters(), twin.policy.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-4, rtol=1e-3)


def test_actions_of_several_parts_are_cloned():
    space = gymnasium.spaces.Dict({"a": gymnasium.spaces.Discrete(3), "b": gymnasium.spaces.Box(-1, 1, (2,))})
    generator, base = torch.Generator().manual_seed(1), dataset(size=60).transitions
    parts = {"actions/a": torch.randint(3, (60,), generator=generator), "actions/b": torch.rand(60, 2)}
    rows = {name: part for name, part in base.items() if name != "actions"} | parts
    data = Dataset(rows, observation_space=CartPole.single_observation_space, action_space=space)
    algorithm = build("bc from data", dataset=data, normalize_observations=False)
    batch = algorithm.replay.gather(torch.arange(20))
    both = {"a": batch["actions/a"][None], "b": batch["actions/b"][None]}
    found = algorithm.policy.evaluate(batch["obs"][None], both, {}, torch.zeros(1, 20, dtype=torch.bool))
    expected = -found.logp.mean().item()
    assert updated(algorithm, batch)[0]["losses/bc"].item() == pytest.approx(expected)


@pytest.mark.parametrize("case", ["iql from data", "iql from data, continuous"])
@pytest.mark.parametrize("temperature", [3.0, 200.0])
def test_the_losses_are_those_of_the_papers(case, temperature):
    options = {"temperature": temperature, "lr": 1e-9, "expectile": 0.8, "normalize_observations": False}
    algorithm = build(case, batch_size=6, **options)
    disturb(algorithm, 0.2)
    batch = algorithm.replay.gather(torch.tensor([0, 3, 9, 19, 25, 70])) | {TAU: torch.tensor(0.25)}
    nets, discrete, actions = Networks(algorithm), "continuous" not in case, batch[keys.ACTIONS]
    obs, after = batch[keys.OBS].double(), batch[keys.NEXT_OBS].double()
    value, next_value = (nets.perceptron("policy", each, "critic", "value_head")[:, 0] for each in (obs, after))

    def critics(net):
        outputs = [nets.outputs(net, i, obs if discrete else torch.cat([obs, actions], -1)) for i in (0, 1)]
        return torch.stack(outputs)[:, range(6), actions if discrete else 0]

    if discrete:
        logp = nets.features("policy", obs).log_softmax(-1)[range(6), actions]
    else:
        std = algorithm.policy.distribution.log_std.exp()
        logp = torch.distributions.Normal(nets.features("policy", obs), std).log_prob(actions)[:, 0]
    advantage = critics("target").min(0).values - value
    weights = (temperature * advantage).exp().clamp(max=100.0)
    goals = batch[keys.RETURNS] + batch[keys.DISCOUNTS] * next_value
    assert batch[keys.DISCOUNTS].tolist() == pytest.approx([0.99, 0.99, 0.0, 0.99, 0.99, 0.99])
    assert (100.0 in weights) == (temperature == 200.0)
    numbers, errors = updated(algorithm, batch)
    assert errors is None
    expected = {
        "losses/policy": -weights * logp,
        "losses/value": torch.where(advantage > 0, 0.8, 0.2) * advantage**2,
        "losses/q": ((critics("q") - goals) ** 2).sum(0),
        "monitors/weight": weights,
    }
    for name, rows in expected.items():
        assert numbers[name].item() == pytest.approx(rows.mean().item(), rel=1e-4), name


def test_it_prefers_the_better_action_though_it_is_rare_and_by_how_much_the_temperature_says():
    actions = torch.cat([torch.zeros(90), torch.ones(10)]).long()
    data = of_steps(CartPole(1), torch.zeros(100, 4), actions, actions.float())
    options = {"batch_size": 64, "lr": 1e-2, "tau": 0.1, "expectile": 0.7, "temperature": 3.0, "updates_per_step": 500}
    algorithm = build("iql from data", dataset=data, **options)
    algorithm.step()
    starts = torch.zeros(1, 1, dtype=torch.bool)
    with torch.no_grad():
        found = algorithm.policy.predict(torch.zeros(1, 1, 4), {}, starts)
    # V = v with 0.7 * 0.1 * (1 - v) = 0.3 * 0.9 * v; pi(a) is proportional to data(a) exp(3 (r(a) - v)).
    v = 0.07 / (0.07 + 0.27)
    odds = 0.1 / 0.9 * math.exp(3.0)
    assert found.values.item() == pytest.approx(v, abs=0.05)
    assert found.features[0, 0].softmax(-1)[1].item() == pytest.approx(odds / (1 + odds), abs=0.06)
