"""Behaviour cloning and implicit Q-learning, by torch's own distributions."""

import gymnasium
import pytest
import torch
from tests.algorithms.by_hand import Networks, dataset, disturb, updated
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
def test_a_step_goes_down_the_gradient_of_the_papers_losses(case, temperature):
    options = {"temperature": temperature, "expectile": 0.8, "normalize_observations": False}
    algorithm = build(case, batch_size=6, optimizer="sgd", lr=0.01, max_grad_norm=None, **options)
    disturb(algorithm, 0.2)
    batch = algorithm.replay.gather(torch.tensor([0, 3, 9, 19, 25, 70])) | {TAU: torch.tensor(0.25)}
    nets, discrete, actions = Networks(algorithm), "continuous" not in case, batch[keys.ACTIONS]
    obs, after = batch[keys.OBS].double(), batch[keys.NEXT_OBS].double()

    def values(obs):
        return nets.perceptron("policy", obs, "critic", "value_head")[:, 0]

    def critics(net):
        outputs = [nets.outputs(net, i, obs if discrete else torch.cat([obs, actions], -1)) for i in (0, 1)]
        return torch.stack(outputs)[:, range(6), actions if discrete else 0]

    if discrete:
        logp = nets.features("policy", obs).log_softmax(-1)[range(6), actions]
    else:
        std = nets.weights["policy"]["policy.distribution.log_std"].exp()
        logp = torch.distributions.Normal(nets.features("policy", obs), std).log_prob(actions)[:, 0]
    advantage = critics("target").min(0).values - values(obs)
    weights = (temperature * advantage).exp().clamp(max=100.0).detach()
    assert batch[keys.DISCOUNTS].tolist() == pytest.approx([0.99, 0.99, 0.0, 0.99, 0.99, 0.99])
    assert (100.0 in weights) == (temperature == 200.0)
    expected = {
        "losses/policy": -weights * logp,
        "losses/value": torch.where(advantage > 0, 0.8, 0.2) * advantage**2,
        "monitors/weight": weights,
    }
    nets.descend("policy", (expected["losses/policy"] + expected["losses/value"]).mean(), lr=0.01)
    goals = batch[keys.RETURNS] + batch[keys.DISCOUNTS] * values(after)  # by the value that has learned already
    expected["losses/q"] = ((critics("q") - goals) ** 2).sum(0)
    nets.descend("q", expected["losses/q"].mean(), lr=0.01)
    numbers, errors = updated(algorithm, batch)
    assert errors is None
    for name, rows in expected.items():
        assert numbers[name].item() == pytest.approx(rows.mean().item(), rel=1e-4), name
    nets.follow(0.25)
    nets.compare(algorithm)
