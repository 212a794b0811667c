"""What second formulations of losses start from: data sets and batches made by hand, and one update of them."""

from typing import Any, NamedTuple

import torch
from gymnasium.spaces import Discrete
from torch.nn.functional import linear

from rl8x import keys
from rl8x.algorithms.off_policy.learner import TAU
from rl8x.algorithms.off_policy.updates import ERRORS
from rl8x.envs import CartPole
from rl8x.replay.dataset import Dataset


def of_steps(env, obs, actions, rewards, **spaces):
    """A data set of episodes of one step each, which end where they began."""
    ends = torch.ones(len(rewards), dtype=torch.bool)
    rows = {"obs": obs, "actions": actions, "rewards": rewards, "terminated": ends, "truncated": ~ends, "next_obs": obs}
    declared = {"observation_space": env.single_observation_space, "action_space": env.single_action_space}
    return Dataset.from_tensors(rows, **declared | spaces)


def dataset(env_class=CartPole, size=120, seed=3):
    """Transitions of no environment, in episodes of 10 of which every other one terminates."""
    env, generator = env_class(1), torch.Generator().manual_seed(seed)
    obs = torch.randn(size, *env.single_observation_space.shape, generator=generator)
    ends = torch.arange(1, size + 1) % 10 == 0
    terminated = ends & (torch.arange(size) % 20 < 10)
    box = 4 * torch.rand(size, 1, generator=generator) - 2
    next_obs = torch.where(ends.unsqueeze(1), torch.randn(obs.shape, generator=generator), obs.roll(-1, 0))
    discrete = isinstance(env.single_action_space, Discrete)
    actions = torch.randint(2, (size,), generator=generator) if discrete else box
    rows = {"obs": obs, "actions": actions, "rewards": torch.rand(size, generator=generator), "next_obs": next_obs}
    rows |= {"terminated": terminated, "truncated": ends & ~terminated}
    declared = {"observation_space": env.single_observation_space, "action_space": env.single_action_space}
    return Dataset.from_tensors(rows, **declared)


class Networks:
    """Networks in float64, from their weights by name, which second formulations may differentiate."""

    def __init__(self, algorithm):
        optimizers = algorithm.nets.trained
        vectors = {name: (each, each.weights) for name, each in optimizers.items()}
        vectors |= {name: (optimizers[of], vector) for name, (of, vector) in algorithm.nets.targets.items()}
        self.config, self.weights = algorithm.config, {}
        for net, (optimizer, vector) in vectors.items():
            names = [name.rpartition("model.")[2] for name in optimizer.names]
            parts = [part.detach().double().clone().requires_grad_() for part in optimizer.split(vector)]
            self.weights[net] = dict(zip(names, parts, strict=True))

    def perceptron(self, net, x, hidden, head):
        w = self.weights[net]
        x = torch.relu(linear(x, w[f"{hidden}.0.weight"], w[f"{hidden}.0.bias"]))
        return linear(x, w[f"{head}.weight"], w[f"{head}.bias"])

    def features(self, net, obs):
        """What the policy's distribution is made of, `[..., num_features]`."""
        return self.perceptron(net, obs, "actor", "policy_head")

    def outputs(self, net, i, x):
        """All numbers of the i-th critic, of observations, or of such with actions, `[..., num_outputs]`."""
        w = self.weights[net]
        hidden = torch.relu(x @ w["hidden.0.weight"][i] + w["hidden.0.bias"][i, 0])
        return hidden @ w["head.weight"][i] + w["head.bias"][i, 0]

    def descend(self, net, loss, lr=0.1):
        """Make a step of gradient descent."""
        parts = self.weights[net].values()
        for part, gradient in zip(parts, torch.autograd.grad(loss, list(parts), allow_unused=True), strict=True):
            if gradient is not None:
                part.data.sub_(lr * gradient)


def batch_of(algorithm, tau=0.5):
    """Make six rows, terminations among them, and what an update draws beside its rows."""
    generator = torch.Generator().manual_seed(5)
    shape, space = algorithm.observation_space.shape, algorithm.action_space

    def actions():
        if isinstance(space, Discrete):
            return torch.randint(int(space.n), (6,), generator=generator)
        low, high = torch.tensor(space.low), torch.tensor(space.high)
        return torch.rand(6, *space.shape, generator=generator) * (high - low) + low

    drawn = {name: each[0] for name, each in algorithm.draw(0, 1).items()}
    return drawn | {
        keys.OBS: torch.randn(6, *shape, generator=generator),
        keys.NEXT_OBS: torch.randn(6, *shape, generator=generator),
        keys.ACTIONS: actions(),
        keys.NEXT_ACTIONS: actions(),
        keys.RETURNS: torch.randn(6, generator=generator) * 3,
        keys.DISCOUNTS: torch.tensor([0.9, 0.0, 0.81, 0.9, 0.0, 0.9]),
        TAU: torch.tensor(tau),
    }


def disturb(algorithm, size=0.3):
    """Move all trained weights, so that targets differ from networks and policies are far from uniform."""
    generator = torch.Generator().manual_seed(8)
    for each in algorithm.nets.trained.values():
        for view in each.views:
            view.data.add_(torch.randn(view.shape, generator=generator) * size)


class Updated(NamedTuple):
    """The results of an update by name, and the errors of its rows, if it has them."""

    metrics: dict[str, Any]
    errors: Any


def updated(algorithm, batch, turn=-1):
    """Make one update, by default one of all phases; return its results and the errors of the rows."""
    found = algorithm.cycle[turn].update(algorithm.nets.bind(algorithm.nets.state, algorithm.nets.rates), batch)
    return Updated(found, found.get(ERRORS))
