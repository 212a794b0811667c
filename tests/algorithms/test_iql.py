import math

import numpy as np
import pytest
import torch
from tests.algorithms.by_hand import Networks, disturb, of_steps, updated
from tests.algorithms.test_conformance import build

from rl8x import keys
from rl8x.algorithms.off_policy.learner import TAU
from rl8x.envs import CartPole


class Plain(Networks):
    """V, the policy and the critics, of one row."""

    def value(self, obs):
        return self.perceptron("policy", obs, "critic", "value_head").item()

    def logp(self, obs, action, std):
        found = self.features("policy", obs)
        if std is None:
            return found.log_softmax(0)[action].item()
        z = (action - found.item()) / std
        return -0.5 * z**2 - math.log(std) - 0.5 * math.log(2 * math.pi)

    def q(self, net, i, obs, action, discrete):
        outputs = self.outputs(net, i, obs if discrete else torch.cat([obs, torch.tensor([action])]))
        return outputs[action if discrete else 0].item()


@pytest.mark.parametrize("case", ["iql from data", "iql from data, continuous"])
@pytest.mark.parametrize("temperature", [3.0, 200.0])
def test_the_losses_are_those_of_the_papers_row_by_row(case, temperature):
    options = {"temperature": temperature, "lr": 1e-9, "expectile": 0.8, "normalize_observations": False}
    algorithm = build(case, batch_size=6, **options)
    disturb(algorithm, 0.2)
    batch = algorithm.replay.gather(torch.tensor([0, 3, 9, 19, 25, 70])) | {TAU: torch.tensor(0.25)}
    nets, discrete = Plain(algorithm), "continuous" not in case
    std = None if discrete else algorithm.policy.distribution.log_std.exp().item()
    policy, value, q, weights = [], [], [], []
    for i in range(6):
        obs, after = batch[keys.OBS][i].double(), batch[keys.NEXT_OBS][i].double()
        action = batch[keys.ACTIONS][i].item()
        advantage = min(nets.q("target", j, obs, action, discrete) for j in (0, 1)) - nets.value(obs)
        weights.append(min(math.exp(min(temperature * advantage, 700)), 100.0))
        policy.append(-weights[-1] * nets.logp(obs, action, std))
        value.append((0.8 if advantage > 0 else 0.2) * advantage**2)
        goal = batch[keys.RETURNS][i].item() + batch[keys.DISCOUNTS][i].item() * nets.value(after)
        q.append(sum((nets.q("q", j, obs, action, discrete) - goal) ** 2 for j in (0, 1)))
    assert batch[keys.DISCOUNTS].tolist() == pytest.approx([0.99, 0.99, 0.0, 0.99, 0.99, 0.99])
    assert (100.0 in weights) == (temperature == 200.0)
    numbers, errors = updated(algorithm, batch)
    assert errors is None
    expected = {"losses/policy": policy, "losses/value": value, "losses/q": q, "monitors/weight": weights}
    for name, rows in expected.items():
        assert numbers[name].item() == pytest.approx(np.mean(rows), rel=1e-4), name


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
