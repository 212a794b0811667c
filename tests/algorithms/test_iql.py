import math

import pytest
import torch
from tests.algorithms.by_hand import Networks, disturb, of_steps, updated
from tests.algorithms.test_conformance import build

from rl8x import keys
from rl8x.algorithms.off_policy.learner import TAU
from rl8x.envs import CartPole


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
