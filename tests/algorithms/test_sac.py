import math

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Discrete
from tests.algorithms.by_hand import ActorCritic, Masked, batch_of, disturb, seen, updated
from tests.algorithms.test_conformance import build as build_case
from tests.probes import OneStep

from rl8x import SACConfig, keys
from rl8x.algorithms.off_policy.learner import TAU
from rl8x.algorithms.sac import CQL_NOISE, NOISE
from rl8x.envs import CartPole, Pendulum

SMALL = {"num_envs": 8, "horizon": 2, "seed": 1, "device": "cpu", "model_config": {"hidden_sizes": [16]}}
SMALL |= {"warmup_steps": 16, "batch_size": 6, "buffer_size": 200, "critic_hidden_sizes": [16]}


def build(env=Pendulum, **options):
    return SACConfig(**{**SMALL, "execution": "eager", **options}).build(env)


class Plain(ActorCritic):
    """One update with SGD of rate 0.1, by autograd and torch.distributions, as in the papers."""

    def __init__(self, algorithm, batch):
        super().__init__(algorithm, batch)
        self.discrete, self.space = isinstance(algorithm.action_space, Discrete), algorithm.action_space
        self.noise = batch.get(NOISE, (None, None))

    @property
    def alpha(self):
        fixed = self.config.alpha
        return self.weights["alpha"]["log_alpha"].exp()[0] if fixed is None else torch.tensor(fixed)

    def critics(self, net, *inputs):
        """Of discrete actions the values of each, `[num_critics, rows, num_actions]`."""
        values, outputs = super().critics(net, *inputs)
        return (outputs, outputs) if self.discrete else (values, outputs)

    def taken(self):
        """The values of the actions of the batch."""
        (obs, _), actions = seen(self.batch, keys.OBS), self.batch[keys.ACTIONS]
        if self.discrete:
            return self.critics("q", obs)[0][:, range(6), actions - int(self.space.start)], None
        return self.critics("q", obs, actions)

    def sampled(self, key, noise):
        """Actions of the box, and log-densities of them as shares of it, `[..., rows]`."""
        mean, log_std = self.features("policy", seen(self.batch, key)[0]).chunk(2, -1)
        u = mean + log_std.exp() * noise
        logp = torch.distributions.Normal(mean, log_std.exp()).log_prob(u) - torch.log(1 - torch.tanh(u) ** 2)
        return torch.tensor(self.space.high) * torch.tanh(u), logp.sum(-1)

    def valued(self, net, key, noise):
        """Values and logits of the policy's actions by each critic, and its entropies."""
        obs, legal = seen(self.batch, key)
        if not self.discrete:
            actions, logp = self.sampled(key, noise)
            return *self.critics(net, obs, actions), -logp
        logits = self.features("policy", obs).masked_fill(~legal, -torch.inf)
        if f"{key}/action_mask" in self.batch:  # where it allows nothing, all are as likely
            logits = torch.where(self.batch[f"{key}/action_mask"].any(-1, keepdim=True), logits, 0.0)
        probs = logits.softmax(-1)
        least = self.critics(net, obs)[0].min(0).values
        return (probs * least).sum(-1).unsqueeze(0), None, -(probs * probs.clamp(min=1e-300).log()).sum(-1)

    def conservatism(self):
        """The penalty, with densities of actions scaled to [-1, 1]."""
        obs, legal = seen(self.batch, keys.OBS)
        if self.discrete:
            sums = (self.critics("q", obs)[0].exp() * legal).sum(-1)
        else:
            uniform, now, after = self.batch[CQL_NOISE]
            high = torch.tensor(self.space.high)
            tried = [(high * torch.erf(uniform / math.sqrt(2)), torch.full(uniform.shape[:-1], math.log(0.5)))]
            tried += [self.sampled(key, noise) for key, noise in ((keys.OBS, now), (keys.NEXT_OBS, after))]
            actions, logp = (torch.cat(each) for each in zip(*tried, strict=True))
            values = torch.stack([self.critics("q", obs, each)[0] for each in actions], 1)
            sums = (values.exp() / logp.exp()).mean(1)
        return (sums.log() - self.taken()[0]).mean(-1).sum()

    def target_entropies(self):
        """Of each row, by the actions that are legal there."""
        _, legal = seen(self.batch, keys.OBS)
        if self.config.target_entropy is not None or not self.discrete:
            return -1.0 if self.config.target_entropy is None else self.config.target_entropy
        return self.config.target_entropy_frac * legal.expand(-1, int(self.space.n)).sum(-1).log()

    def update(self, *, trains):
        """Return what is logged, and the errors of the rows."""
        alpha, (*after, entropies) = self.alpha.detach(), self.valued("target", keys.NEXT_OBS, self.noise[0])
        q_loss, errors = self.errors(*self.taken(), *self.goals(*after, alpha * entropies))
        penalty = self.config.cql_coeff * self.conservatism() if self.config.cql_coeff else 0.0
        self.descend("q", q_loss + penalty)
        found = {"losses/q": q_loss, "monitors/td_error": errors.mean()}
        values, _, entropies = self.valued("q", keys.OBS, self.noise[1])
        policy_loss = -self.weighted(values.min(0).values + alpha * entropies)
        if trains:
            self.descend("policy", policy_loss)
            alpha_loss = (self.alpha * (entropies.detach() - self.target_entropies())).mean()
            if self.config.alpha is None:
                self.descend("alpha", alpha_loss)
            found |= {"losses/policy": policy_loss, "losses/alpha": alpha_loss}
            found |= {"monitors/entropy": entropies.mean(), "coefficients/alpha": alpha}
        self.follow(self.batch[TAU])
        return found, errors


class Wide(Pendulum):
    """Of whose units entropies do not depend."""

    single_action_space = Box(-200.0, 200.0, (1,), dtype=np.float32)


OPTIONS = {
    "twin": {},
    "three critics": {"num_critics": 3},
    "a fixed temperature": {"alpha": 0.25},
    "a given target": {"target_entropy": -0.5},
    "policy waits": {"policy_delay": 3},
    "conservative": {"cql_coeff": 0.7, "cql_samples": 3},
}
ATOMS = {"num_atoms": 7, "v_min": -3.0, "v_max": 4.0}
CASES = {f"{env.__name__}, {name}": (env, OPTIONS[name]) for env in (Pendulum, CartPole, Masked) for name in OPTIONS}
CASES |= {"other units": (Wide, {}), "atoms": (Pendulum, ATOMS)}
CASES |= {"atoms, conservative": (Pendulum, ATOMS | OPTIONS["conservative"])}


@pytest.mark.parametrize(("env", "options"), CASES.values(), ids=CASES)
def test_an_update_is_that_of_the_papers(env, options):
    """Targets follow after the step, and only the error of `losses/q` is logged, without the conservative term."""
    case = "sac from data" if "cql_coeff" in options else "sac"
    options = {"optimizer": "sgd", "lr": 0.1, "max_grad_norm": None, "normalize_observations": False} | options
    given = {} if "alpha" in options else {"initial_alpha": 0.3}
    algorithm = build_case(case, env=env, batch_size=6, **given, **options)
    disturb(algorithm)
    batch, trains = batch_of(algorithm), "policy_delay" not in options
    plain = Plain(algorithm, batch)
    expected, errors = plain.update(trains=trains)
    numbers, found = updated(algorithm, batch, -1 if trains else 0)
    assert ("losses/policy" in numbers) == trains
    for name, number in expected.items():
        assert numbers[name].item() == pytest.approx(number.item(), rel=1e-3), name
    torch.testing.assert_close(found.double(), errors, rtol=1e-3, atol=1e-4)
    plain.compare(algorithm, rtol=1e-3, atol=1e-4)


class SixNumbers(OneStep):
    single_action_space = Box(-1.0, 1.0, (2, 3))


def test_the_target_entropy_is_in_the_units_of_the_paper():
    assert build().target_entropy == -1.0
    assert build(SixNumbers).target_entropy == -6.0
    assert build(CartPole).target_entropy == pytest.approx(0.98 * math.log(2))
    assert build(target_entropy=-0.5).params["target_entropy"] == -0.5
