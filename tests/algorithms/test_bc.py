import math

import gymnasium
import numpy as np
import pytest
import torch
from tests.algorithms.by_hand import updated
from tests.algorithms.off_policy.test_offline import dataset
from tests.plain import PlainLearner

from rl8x import keys
from rl8x.algorithms import BCConfig
from rl8x.envs import CartPole, Pendulum
from rl8x.policy import Policy
from rl8x.replay.dataset import Dataset

SMALL = {"seed": 1, "device": "cpu", "batch_size": 16, "execution": "eager", "model_config": {"hidden_sizes": [16]}}


def build(data, **options):
    return BCConfig(**{**SMALL, **options}).build(dataset=data)


def features(policy, obs):
    """The policy's features row by row, in NumPy, from the weights by name."""
    weights = {name: value.detach().double().numpy() for name, value in policy.model.state_dict().items()}
    hidden = np.maximum(weights["actor.0.weight"] @ obs.double().numpy() + weights["actor.0.bias"], 0)
    return weights["policy_head.weight"] @ hidden + weights["policy_head.bias"]


def log_density(x, mean, std):
    return -0.5 * ((x - mean) / std) ** 2 - math.log(std) - 0.5 * math.log(2 * math.pi)


def plain_logp(policy, obs, action, kind):
    found = features(policy, obs)
    if kind == "categorical":
        return found[action] - math.log(np.exp(found).sum())
    u = np.arctanh(action / 2) if kind == "squashed_normal" else action  # the box is [-2, 2]
    std = math.exp(found[1]) if kind == "squashed_normal" else math.exp(policy.distribution.log_std.item())
    change = math.log(2 * (1 - math.tanh(u) ** 2)) if kind == "squashed_normal" else 0.0
    return log_density(u, found[0], std) - change


@pytest.mark.parametrize("kind", ["categorical", "normal", "squashed_normal"])
def test_the_loss_is_the_mean_of_the_actions_negative_log_probabilities(kind):
    data = dataset(CartPole if kind == "categorical" else Pendulum)
    algorithm = build(data, distribution=kind)
    with torch.no_grad():
        algorithm.policy.model.policy_head.weight.mul_(50)
    batch = algorithm.replay.gather(torch.arange(6))
    expected = [
        plain_logp(algorithm.policy, obs, action.item(), kind)
        for obs, action in zip(batch[keys.OBS], batch[keys.ACTIONS], strict=True)
    ]
    numbers, _ = updated(algorithm, batch)
    assert np.std(expected) > 0.05
    assert numbers["losses/bc"].item() == pytest.approx(-np.mean(expected), rel=1e-4)


@pytest.mark.parametrize("env_class", [CartPole, Pendulum])
def test_forty_updates_are_those_of_the_loss_written_plainly(env_class, monkeypatch):
    data = dataset(env_class)
    algorithm = build(data, lr=3e-3, max_grad_norm=0.5, updates_per_step=20)
    plain, drawn, sample = PlainLearner(algorithm.policy, 3e-3, 0.5), [], algorithm.replay.sample
    monkeypatch.setattr(algorithm.replay, "sample", lambda *given: drawn.append(sample(*given)) or drawn[-1])
    before = {name: weight.detach().clone() for name, weight in algorithm.policy.named_parameters()}
    for _ in range(2):
        algorithm.step()
    rows = data.transitions
    for batch in torch.cat(drawn):
        features, actions = plain.features(rows["obs"][batch]), rows["actions"][batch]
        if env_class is CartPole:  # -log of the softmax at the action
            picked = features.gather(1, actions[:, None])[:, 0]
            losses = features.exp().sum(1).log() - picked
        else:  # -log of the normal density
            log_std = plain.weights["distribution.log_std"]
            errors = (actions.double() - features) / log_std.exp()
            losses = (errors.square() / 2 + log_std + math.log(2 * math.pi) / 2).sum(1)
        plain.descend(losses.mean())
    assert len(torch.cat(drawn)) == 40
    moved = max((weight - before[name]).abs().max().item() for name, weight in algorithm.policy.named_parameters())
    assert moved > 0.05
    assert plain.furthest(algorithm.policy) < 1e-3


def test_actions_of_several_parts_are_cloned():
    space = gymnasium.spaces.Dict({"a": gymnasium.spaces.Discrete(3), "b": gymnasium.spaces.Box(-1, 1, (2,))})
    generator, env = torch.Generator().manual_seed(1), CartPole(1)
    parts = {"a": torch.randint(3, (60,), generator=generator), "b": torch.rand(60, 2, generator=generator)}
    base = dataset(size=60).transitions
    data = Dataset.from_tensors(
        {**{name: base[name] for name in base if name != "actions"}, "actions": parts},
        observation_space=env.single_observation_space,
        action_space=space,
    )
    algorithm = build(data, updates_per_step=3)
    batch = algorithm.replay.gather(torch.arange(20))
    policy: Policy = algorithm.policy
    both = {"a": batch["actions/a"][None], "b": batch["actions/b"][None]}
    expected = -policy.evaluate(batch["obs"][None], both, {}, torch.zeros(1, 20, dtype=torch.bool)).logp.mean().item()
    numbers, _ = updated(algorithm, batch)
    assert numbers["losses/bc"].item() == pytest.approx(expected)
