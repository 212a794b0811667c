"""What second formulations of losses start from: data sets and batches made by hand, and one update of them."""

import itertools
from typing import Any, NamedTuple

import numpy as np
import torch
from gymnasium.spaces import Box, Dict, Discrete
from tests.probes import Probe
from torch.nn.functional import linear

from rl8x import keys
from rl8x.algorithms.off_policy.learner import TAU
from rl8x.algorithms.off_policy.updates import ERRORS, SCALE, WEIGHTS
from rl8x.envs import CartPole
from rl8x.replay.dataset import Dataset


def of_steps(env, obs, actions, rewards, **spaces):
    """A data set of episodes of one step each, which end where they began."""
    ends = torch.ones(len(rewards), dtype=torch.bool)
    rows = {"obs": obs, "actions": actions, "rewards": rewards, "terminated": ends, "truncated": ~ends, "next_obs": obs}
    declared = {"observation_space": env.single_observation_space, "action_space": env.single_action_space}
    return Dataset.from_tensors(rows, **declared | spaces)


LEGAL = torch.tensor([[0, 1, 1], [1, 1, 1], [0, 0, 1], [0, 0, 0], [1, 0, 1], [1, 1, 0]], dtype=torch.int8)


class Masked(Probe):
    """Three actions, from 5 on, of which a mask allows others in each step; in some none, where all are legal."""

    single_action_space = Discrete(3, start=5)
    single_observation_space = Dict({"x": Box(-1.0, 1.0, (3,)), "action_mask": Box(0, 1, (3,), np.int8)})
    default_time_limit = 3
    reset_noise = step_noise = 3

    def initial_state(self, parameters, noise):
        return {"x": noise}

    def transition(self, state, actions, parameters, noise):
        return {"x": noise}, noise[:, 0], torch.zeros(self.num_envs, dtype=torch.bool)

    def observe(self, state, parameters):
        return {"x": state["x"], "action_mask": LEGAL[(state["x"].sum(-1) * 20).long() % 6]}


def random_rows(seen, space, size, generator):
    """Draw observations and legal actions on them, by flat names."""
    masked = isinstance(seen, Dict)
    rows = {
        f"{name}/x" if masked else name: torch.randn(size, *(seen["x"] if masked else seen).shape, generator=generator)
        for name in (keys.OBS, keys.NEXT_OBS)
    }
    if isinstance(space, Box):
        low, high = torch.tensor(space.low), torch.tensor(space.high)
        for name in (keys.ACTIONS, keys.NEXT_ACTIONS):
            rows[name] = torch.rand(size, *space.shape, generator=generator) * (high - low) + low
        return rows
    legal = LEGAL.repeat(size // 6, 1) if masked else torch.ones(size, int(space.n), dtype=torch.int8)
    masks = {keys.OBS: legal, keys.NEXT_OBS: legal.roll(2, 0)}
    rows |= {f"{name}/action_mask": mask for name, mask in masks.items() if masked}
    for name, mask in zip((keys.ACTIONS, keys.NEXT_ACTIONS), masks.values(), strict=True):
        allowed = torch.where(mask.any(1, keepdim=True), mask, 1).double()
        rows[name] = allowed.multinomial(1, generator=generator)[:, 0] + int(space.start)
    return rows


def dataset(env_class=CartPole, size=120, seed=3):
    """Transitions of no environment, in episodes of 10 of which every other one terminates."""
    env, generator = env_class(1), torch.Generator().manual_seed(seed)
    rows = random_rows(env.single_observation_space, env.single_action_space, size, generator)
    del rows[keys.NEXT_ACTIONS]
    ends = torch.arange(1, size + 1) % 10 == 0
    terminated = ends & (torch.arange(size) % 20 < 10)
    for name in [name for name in rows if name.startswith(keys.NEXT_OBS)]:
        after = rows[name.removeprefix("next_")].roll(-1, 0)
        rows[name] = torch.where(ends.unsqueeze(1), rows[name], after)
    rows |= {"rewards": torch.rand(size, generator=generator)}
    rows |= {"terminated": terminated, "truncated": ends & ~terminated}
    declared = {"observation_space": env.single_observation_space, "action_space": env.single_action_space}
    return Dataset.from_tensors(rows, **declared)


def seen(batch, key):
    """Observations in float64, `[rows, numbers]`, and which actions are legal there; all where no mask says so."""
    if key in batch:
        return batch[key].double(), torch.ones(*batch[key].shape[:-1], 1, dtype=torch.bool)
    mask = batch[f"{key}/action_mask"].bool()
    return batch[f"{key}/x"].double(), mask | ~mask.any(-1, keepdim=True)


def projected(probs, values, atoms):
    """Probabilities of values as those of the two atoms beside each, `[rows, num_atoms]`, one by one."""
    found, step = torch.zeros_like(probs), atoms[1] - atoms[0]
    for row, j in itertools.product(*map(range, probs.shape)):
        place = (values[row, j].clamp(atoms[0], atoms[-1]) - atoms[0]) / step
        low = min(int(place), len(atoms) - 2)
        found[row, low] += probs[row, j] * (1 - (place - low))
        found[row, low + 1] += probs[row, j] * (place - low)
    return found


class Networks:
    """Networks in float64, from their weights by name, which second formulations may differentiate."""

    def __init__(self, algorithm):
        optimizers = algorithm.nets.trained
        vectors = {name: (each, each.weights) for name, each in optimizers.items()}
        vectors |= {name: (optimizers[of], vector) for name, (of, vector) in algorithm.nets.targets.items()}
        self.config, self.weights = algorithm.config, {}
        self.targets = {name: of for name, (of, _) in algorithm.nets.targets.items()}
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

    def follow(self, tau):
        """Move the target networks."""
        for target, of in self.targets.items():
            for part, other in zip(self.weights[target].values(), self.weights[of].values(), strict=True):
                part.data.lerp_(other.data, float(tau))

    def compare(self, algorithm, rtol=1e-4, atol=1e-5):
        """Compare all weights with those of an algorithm, after the update of both."""
        for net, parts in Networks(algorithm).weights.items():
            for name, part in parts.items():
                torch.testing.assert_close(part, self.weights[net][name], rtol=rtol, atol=atol, msg=f"{net} {name}")


class ActorCritic(Networks):
    """What critics of a batch are moved to, and how far they are from it, as in the papers."""

    def __init__(self, algorithm, batch):
        super().__init__(algorithm)
        self.batch = {name: part.double() if part.is_floating_point() else part for name, part in batch.items()}
        self.atoms = torch.linspace(self.config.v_min, self.config.v_max, self.config.num_atoms).double()

    def critics(self, net, *inputs):
        """The values of critics, `[num_critics, rows]`, and the logits of their atoms."""
        x = torch.cat(inputs, -1)
        outputs = torch.stack([self.outputs(net, i, x) for i in range(self.config.num_critics)])
        return outputs[..., 0] if len(self.atoms) == 1 else outputs.softmax(-1) @ self.atoms, outputs

    def goals(self, values, outputs=None, bonus=0.0):
        """What the critics' values are moved to, `[rows]`, and the probabilities of atoms, if there are such."""
        returns = self.batch[keys.RETURNS] * self.batch.get(SCALE, 1.0)
        bonus = torch.as_tensor(bonus).expand(6)
        if len(self.atoms) == 1:
            return (returns + self.batch[keys.DISCOUNTS] * (values.min(0).values + bonus)).detach(), None
        after = self.atoms + bonus.unsqueeze(-1)
        places = returns.unsqueeze(-1) + self.batch[keys.DISCOUNTS].unsqueeze(-1) * after
        probs = projected(outputs.softmax(-1)[values.argmin(0), range(6)].detach(), places.detach(), self.atoms)
        return probs @ self.atoms, probs

    def errors(self, values, outputs, goals, probs):
        """The loss of the critics, and the errors of the rows."""
        losses = (values - goals) ** 2 / 2 if probs is None else -(probs * outputs.log_softmax(-1)).sum(-1)
        return self.weighted(losses.sum(0)), (values - goals).abs().mean(0).detach()

    def weighted(self, losses):
        return (losses * self.batch.get(WEIGHTS, 1.0)).mean()


def batch_of(algorithm, tau=0.5):
    """Make six rows, terminations among them, and what an update draws beside its rows."""
    generator = torch.Generator().manual_seed(5)
    drawn = {name: each[0] for name, each in algorithm.draw(0, 1).items()}
    return drawn | {
        **random_rows(algorithm.observation_space, algorithm.action_space, 6, generator),
        keys.RETURNS: torch.randn(6, generator=generator) * 3,
        keys.DISCOUNTS: torch.tensor([0.9, 0.0, 0.81, 0.9, 0.0, 0.9]),
        TAU: torch.tensor(tau),
        WEIGHTS: torch.tensor([1.0, 0.2, 0.5, 2.0, 0.25, 0.7]),
        SCALE: torch.tensor(0.7),
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
