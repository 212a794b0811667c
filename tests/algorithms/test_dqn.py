"""DQN: its loss in all forms against a second formulation, its clock of targets and epsilon, and its defaults."""

import dataclasses
import itertools
import math
from fractions import Fraction

import pytest
import torch
from tests.algorithms.by_hand import Masked, Networks, batch_of, disturb, projected, seen, updated
from tests.algorithms.test_conformance import build as build_case
from tests.algorithms.test_conformance import train
from torch import nn

from rl8x import keys
from rl8x.algorithms import DQNConfig, dqn
from rl8x.algorithms.off_policy.learner import TAU
from rl8x.algorithms.off_policy.updates import WEIGHTS
from rl8x.distributed import Ranks
from rl8x.envs import CartPole
from rl8x.trees import tree_map, unflatten_tree

PLAIN = {"hidden_sizes": [16], "layer_norm": False}
SMALL = {"num_envs": 8, "horizon": 2, "n_step": 1, "seed": 1, "device": "cpu", "model_config": PLAIN}
ATOMS = {"num_atoms": 7, "v_min": -3.0, "v_max": 3.0}
QUANTILES = {"num_quantiles": 5, "huber_delta": 1.0}


def build(**options):
    return DQNConfig(**{**SMALL, "warmup_steps": 16, "batch_size": 16, "buffer_size": 200, **options}).build(CartPole)


def build_offline(**options):
    return build_case("dqn from data", batch_size=6, model_config=PLAIN, **options)


# -- one update, row by row


def huber(u, delta):
    return torch.where(u.abs() <= delta, u * u / 2, delta * (u.abs() - delta / 2))


class Plain(Networks):
    """Losses as in the papers."""

    def __init__(self, algorithm):
        super().__init__(algorithm)
        self.atoms = torch.linspace(self.config.v_min, self.config.v_max, self.config.num_atoms).double()

    def outputs(self, net, batch, key):
        """The numbers of each action, `[rows, num_actions, num_outputs]`, and their means, of those that are legal."""
        obs, legal = seen(batch, key)
        num_outputs = max(self.config.num_atoms, self.config.num_quantiles)
        table = self.perceptron(net, obs, "actor", "policy_head").unflatten(-1, (-1, num_outputs))
        value = None
        if self.config.dueling and num_outputs > 1:
            value, table = table[:, :1], table[:, 1:]
        elif self.config.dueling:
            value = self.perceptron(net, obs, "actor", "value_head").unsqueeze(1)
        if value is not None:
            shares = legal.double() / legal.expand(table.shape[:2]).sum(1, keepdim=True)
            table = value + table - (shares.unsqueeze(-1) * table).sum(1, keepdim=True)
        return table, self.means(table).masked_fill(~legal, -torch.inf)

    def means(self, outputs):
        return outputs.mean(-1) if self.config.num_atoms == 1 else outputs.softmax(-1) @ self.atoms

    def losses(self, outputs, following, returns, discounts):
        """Return the losses and the means of what outputs are moved to, `[rows]` each."""
        delta = self.config.huber_delta
        if self.config.num_atoms > 1:
            goals = projected(following.softmax(-1).detach(), returns + discounts * self.atoms, self.atoms)
            return -(goals * outputs.log_softmax(-1)).sum(-1), goals @ self.atoms
        goals, total, n = returns + discounts * following, 0.0, outputs.shape[-1]
        if n == 1:
            return huber(outputs - goals, 1e30 if delta is None else delta)[:, 0], goals[:, 0]
        for i, j in itertools.product(range(n), range(n)):  # equations 9 and 10
            u = goals[:, j] - outputs[:, i]
            size = u.abs() if delta is None else huber(u, delta) / delta
            total = total + ((i + 0.5) / n - (u < 0).double()).abs() * size / n
        return total, goals.mean(-1)


@pytest.mark.parametrize("env", [CartPole, Masked])
@pytest.mark.parametrize("double", [False, True])
@pytest.mark.parametrize("dueling", [False, True])
@pytest.mark.parametrize(
    "kind",
    [
        *({"huber_delta": delta} for delta in (None, 1.0, 0.3)),
        ATOMS,
        QUANTILES,
        QUANTILES | {"huber_delta": 0.3},
        {"num_quantiles": 4, "huber_delta": None},
    ],
)
def test_a_step_goes_down_the_gradient_of_the_papers_losses(kind, double, dueling, env):
    """The targets have no gradient, and the loss that is logged is the error alone, without the conservative term."""
    options, coeff = {"optimizer": "sgd", "lr": 0.1, "max_grad_norm": None}, 0.5 * (kind != QUANTILES)
    algorithm = build_offline(env=env, double=double, dueling=dueling, cql_coeff=coeff, **kind, **options)
    disturb(algorithm, 0.5)
    algorithm.nets.targets["target"][1].copy_(algorithm.nets.trained["q"].weights)
    disturb(algorithm, -1.0)
    plain, batch = Plain(algorithm), batch_of(algorithm)
    (target, values), (_, online) = (plain.outputs(net, batch, keys.NEXT_OBS) for net in ("target", "q"))
    greedy = [means.argmax(-1) for means in (values, online)]
    assert not torch.equal(*greedy)
    table, means = plain.outputs("q", batch, keys.OBS)
    start, policy, obs = int(env.single_action_space.start), algorithm.policy, unflatten_tree(keys.OBS, batch)
    none = torch.zeros(6, dtype=torch.bool)
    assert torch.equal(policy.act(obs, {}, none).actions, means.argmax(-1) + start)
    sequence = policy(tree_map(lambda part: part[None], obs), {}, none[None])[0]
    for found, expected in ((sequence, means), (policy.values(obs, {}, none), means.amax(-1))):
        torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-5)
    outputs = table[range(6), batch[keys.ACTIONS] - start]
    given = target[range(6), greedy[double]], batch[keys.RETURNS].unsqueeze(1), batch[keys.DISCOUNTS].unsqueeze(1)
    losses, goals = plain.losses(outputs, *given)
    errors = (plain.means(outputs) - goals).abs().detach()
    gap, loss = means.exp().sum(-1).log() - plain.means(outputs), (losses * batch[WEIGHTS]).mean()
    plain.descend("q", loss + coeff * gap.mean())
    plain.follow(batch[TAU])
    numbers, found = updated(algorithm, batch)
    assert numbers["losses/q"].item() == pytest.approx(loss.item(), rel=1e-5)
    assert numbers["monitors/td_error"].item() == pytest.approx(errors.mean().item(), rel=1e-4)
    torch.testing.assert_close(found.double(), errors, rtol=1e-3, atol=1e-5)
    plain.compare(algorithm)


# -- what is drawn, and when targets and epsilon move


def test_priorities_are_written_after_each_group_of_updates(monkeypatch):
    algorithm = build(prioritized=True, updates_per_sample=2.0, n_step=2, batch_size=4)
    groups = []

    def note(index, errors):
        groups.append(tuple(index.shape))
        assert (errors >= 0).all()
        update(index, errors)

    update = algorithm.replay.update
    monkeypatch.setattr(algorithm.replay, "update", note)
    train(algorithm, 4)
    assert groups == [(16, 4)] * 6
    assert algorithm.counters["algorithm/updates"] == 96


@pytest.mark.parametrize(("interval", "ratio"), [(1000, 0.25), (8, 1 / 3), (3, 0.5), (1, 0.25), (1, 2.0), (10, 1.0)])
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_the_target_moves_once_in_each_interval_of_transitions(interval, ratio, num_ranks, monkeypatch):
    monkeypatch.setattr(dqn, "ranks", lambda: Ranks(size=num_ranks))
    config = DQNConfig(target_interval=interval, updates_per_sample=ratio)
    moves = [config.tau_of(update) for update in range(1, 3001)]
    exact = Fraction(ratio).limit_denominator(10**9) / num_ranks  # of the transitions of all ranks
    intervals = [math.floor(count / exact / interval) for count in range(3001)]  # that have ended by then
    assert moves == [float(after > before) for before, after in itertools.pairwise(intervals)]
    assert sum(moves) == min(3000 / exact // interval, 3000)


def test_with_a_data_set_intervals_are_of_updates():
    config = DQNConfig(dataset="recorded", target_interval=10, updates_per_sample=0.25)
    assert [update for update in range(1, 31) if config.tau_of(update)] == [10, 20, 30]


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ({"epsilon_decay_steps": 96}, [1.0, 0.875, 0.75, 0.625, 0.5, 0.5]),
        ({"epsilon_decay_steps": 0}, [1.0, *[0.5] * 5]),
        ({"epsilon_schedule": {"kind": "interp", "points": [[0, 1.0], [96, 0.0]]}}, [1.0, 0.75, 0.5, 0.25, 0.0, 0.0]),
    ],
)
def test_epsilon_is_1_in_the_warm_up_and_follows_the_transitions(options, wanted):
    given = {} if "epsilon_schedule" in options else {"epsilon": 0.5}
    algorithm = build(warmup_steps=20, num_envs=12, horizon=2, **given, **options)
    epsilons = [row["coefficients/epsilon"] for row in train(algorithm, 6)]
    assert epsilons == pytest.approx(wanted, abs=1e-6)
    assert algorithm.policy.distribution.epsilon.item() == pytest.approx(wanted[-1])


# -- defaults


@pytest.mark.parametrize(
    ("given", "with_env", "with_data"),
    [({}, 3, 1), ({"n_step": 3}, 3, 3), ({"n_step": 1}, 1, 1), ({"n_step": 5}, 5, 5)],
)
def test_the_default_of_n_step_gives_way_where_another_policy_acted(given, with_env, with_data):
    config = DQNConfig(**given)
    assert (config.n_step, dataclasses.replace(config, dataset="recorded").n_step) == (with_env, with_data)


@pytest.mark.parametrize(
    ("given", "norms", "width"), [({}, 2, 128), ({"hidden_sizes": [8]}, 1, 8), ({"layer_norm": False}, 0, 128)]
)
def test_the_default_network_is_normalised(given, norms, width):
    modules = list(DQNConfig(num_envs=2, model_config=given).build(CartPole).policy.model.actor)
    assert sum(isinstance(module, nn.LayerNorm) for module in modules) == norms
    assert modules[0].out_features == width
