import math

import gymnasium
import numpy as np
import pytest
import torch
from tests.algorithms.by_hand import disturb, updated
from tests.algorithms.off_policy.test_offline import dataset

from rl8x import keys
from rl8x.algorithms import IQLConfig
from rl8x.algorithms.off_policy.learner import TAU
from rl8x.envs import CartPole, Pendulum
from rl8x.replay.dataset import Dataset

SMALL = {"seed": 1, "device": "cpu", "batch_size": 6, "execution": "eager", "critic_hidden_sizes": [8]}


def build(data, **options):
    return IQLConfig(**{**SMALL, "model_config": {"hidden_sizes": [8]}, **options}).build(dataset=data)


def perceptron(weights, x, *layers):
    for i, (weight, bias) in enumerate(layers):
        x = weights[weight] @ x + weights[bias]
        x = np.maximum(x, 0) if i < len(layers) - 1 else x
    return x


def plain(tensor):
    return tensor.detach().double().numpy().copy()


class Plain:
    """Networks row by row, in NumPy, from the weights by name, as they are now."""

    def __init__(self, algorithm):
        self.discrete = isinstance(algorithm.action_space, gymnasium.spaces.Discrete)
        self.model = {name: plain(each) for name, each in algorithm.policy.model.state_dict().items()}
        if not self.discrete:
            self.std = algorithm.policy.distribution.log_std.exp().item()
        followed, vector = algorithm.nets.targets["target"]
        optimizer = algorithm.nets.trained[followed].optimizer
        self.critics = [
            dict(zip(optimizer.names, map(plain, optimizer.split(each)), strict=True))
            for each in (optimizer.weights, vector)
        ]

    def value(self, obs):
        names = [("critic.0.weight", "critic.0.bias"), ("value_head.weight", "value_head.bias")]
        return perceptron(self.model, obs, *names)[0]

    def logp(self, obs, action):
        names = [("actor.0.weight", "actor.0.bias"), ("policy_head.weight", "policy_head.bias")]
        found = perceptron(self.model, obs, *names)
        if self.discrete:
            return found[action] - math.log(np.exp(found).sum())
        return -0.5 * ((action - found[0]) / self.std) ** 2 - math.log(self.std) - 0.5 * math.log(2 * math.pi)

    def q(self, i, obs, action, *, target):
        weights = self.critics[target]
        x = obs if self.discrete else np.append(obs, action)
        hidden = np.maximum(x @ weights["hidden.0.weight"][i] + weights["hidden.0.bias"][i, 0], 0)
        values = hidden @ weights["head.weight"][i] + weights["head.bias"][i, 0]
        return values[action if self.discrete else 0]


@pytest.mark.parametrize("env_class", [CartPole, Pendulum])
@pytest.mark.parametrize("temperature", [3.0, 200.0])
def test_the_losses_are_those_of_the_papers_row_by_row(env_class, temperature):
    algorithm = build(dataset(env_class), temperature=temperature, lr=1e-9, expectile=0.8)
    disturb(algorithm)
    batch = algorithm.replay.gather(torch.tensor([0, 3, 9, 19, 25, 70])) | {TAU: torch.tensor(0.25)}
    nets = Plain(algorithm)
    policy, value, q = [], [], []
    weights = []
    for i in range(6):
        obs, after = (batch[key][i].double().numpy() for key in (keys.OBS, keys.NEXT_OBS))
        action = batch[keys.ACTIONS][i].item()
        advantage = min(nets.q(j, obs, action, target=True) for j in (0, 1)) - nets.value(obs)
        weights.append(min(math.exp(min(temperature * advantage, 700)), 100.0))
        policy.append(-weights[-1] * nets.logp(obs, action))
        value.append((0.8 if advantage > 0 else 0.2) * advantage**2)
        goal = batch[keys.RETURNS][i].item() + batch[keys.DISCOUNTS][i].item() * nets.value(after)
        q.append(sum((nets.q(j, obs, action, target=False) - goal) ** 2 for j in (0, 1)))
    assert batch[keys.DISCOUNTS].tolist() == pytest.approx([0.99, 0.99, 0.0, 0.99, 0.99, 0.99])
    assert (100.0 in weights) == (temperature == 200.0)
    numbers, errors = updated(algorithm, batch)
    assert errors is None
    assert numbers["losses/policy"].item() == pytest.approx(np.mean(policy), rel=1e-4)
    assert numbers["losses/value"].item() == pytest.approx(np.mean(value), rel=1e-4)
    assert numbers["losses/q"].item() == pytest.approx(np.mean(q), rel=1e-4)
    assert numbers["monitors/weight"].item() == pytest.approx(np.mean(weights), rel=1e-4)


def bandit(rewards, counts):
    """A data set of one observation and steps that end: each action with its reward, so many times."""
    actions = torch.cat([torch.full((count,), action) for action, count in enumerate(counts)])
    obs = torch.zeros(len(actions), 4)
    env = CartPole(1)
    return Dataset.from_tensors(
        {
            "obs": obs,
            "actions": actions,
            "rewards": torch.tensor(rewards)[actions],
            "terminated": torch.ones(len(actions)),
            "truncated": torch.zeros(len(actions)),
            "next_obs": obs,
        },
        observation_space=env.single_observation_space,
        action_space=env.single_action_space,
    )


def test_it_prefers_the_better_action_though_it_is_rare_and_by_how_much_the_temperature_says():
    data = bandit([0.0, 1.0], [90, 10])
    options = {"batch_size": 64, "lr": 1e-2, "tau": 0.1, "expectile": 0.7, "temperature": 3.0}
    algorithm = build(data, updates_per_step=500, execution="eager", **options)
    algorithm.step()
    starts = torch.zeros(1, 1, dtype=torch.bool)
    with torch.no_grad():
        found = algorithm.policy.predict(torch.zeros(1, 1, 4), {}, starts)
    # V = v with 0.7 * 0.1 * (1 - v) = 0.3 * 0.9 * v; pi(a) is proportional to data(a) exp(3 (r(a) - v)).
    v = 0.07 / (0.07 + 0.27)
    odds = 0.1 / 0.9 * math.exp(3.0)
    assert found.values.item() == pytest.approx(v, abs=0.05)
    assert found.features[0, 0].softmax(-1)[1].item() == pytest.approx(odds / (1 + odds), abs=0.06)
