import gymnasium
import pytest
import torch
from tests.algorithms.by_hand import dataset, updated
from tests.algorithms.test_conformance import build

from rl8x import keys
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
