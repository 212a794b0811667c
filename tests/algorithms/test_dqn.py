"""DQN: its loss in all forms against a second formulation, its clock of targets and epsilon, and its defaults."""

import dataclasses
import itertools
import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Dict, Discrete
from tests.algorithms.by_hand import batch_of, disturb, updated
from tests.algorithms.test_conformance import build as build_case
from tests.algorithms.test_conformance import train
from torch import nn

from rl8x import keys
from rl8x.algorithms import DQNConfig, dqn
from rl8x.algorithms.dqn import q_loss
from rl8x.algorithms.off_policy.updates import WEIGHTS
from rl8x.distributed import Ranks
from rl8x.envs import CartPole
from rl8x.q_values import QPolicy

PLAIN = {"hidden_sizes": [16], "layer_norm": False}
SMALL = {"num_envs": 8, "horizon": 2, "n_step": 1, "seed": 1, "device": "cpu", "model_config": PLAIN}
ATOMS = {"num_atoms": 7, "v_min": -3.0, "v_max": 3.0}
QUANTILES = {"num_quantiles": 5, "huber_delta": 1.0}
KINDS = {"atoms": ATOMS, "quantiles": QUANTILES}


def build(**options):
    return DQNConfig(**{**SMALL, "warmup_steps": 16, "batch_size": 16, "buffer_size": 200, **options}).build(CartPole)


def build_offline(**options):
    return build_case("dqn from data", batch_size=6, model_config=PLAIN, **options)


# -- one update, row by row


def plain_outputs(algorithm, obs):
    """The numbers of each action, row by row, in NumPy, from the weights by name; `[num_actions, num_outputs]`."""
    weights = {name: value.detach().double().numpy() for name, value in algorithm.policy.model.state_dict().items()}
    hidden = np.maximum(weights["actor.0.weight"] @ obs.double().numpy() + weights["actor.0.bias"], 0)
    features = weights["policy_head.weight"] @ hidden + weights["policy_head.bias"]
    table = features.reshape(-1, max(algorithm.config.num_atoms, algorithm.config.num_quantiles))
    if algorithm.config.dueling and table.shape[-1] > 1:
        table = table[0] + table[1:] - table[1:].mean(0)
    elif algorithm.config.dueling:
        value = weights["value_head.weight"] @ hidden + weights["value_head.bias"]
        table = value + table - table.mean(0)
    return table


def softmax(logits):
    shares = np.exp(logits - logits.max(-1, keepdims=True))
    return shares / shares.sum(-1, keepdims=True)


def plain_means(algorithm, table):
    config = algorithm.config
    if config.num_atoms == 1:
        return table.mean(-1)
    return softmax(table) @ np.linspace(config.v_min, config.v_max, config.num_atoms)


def plain_categorical(config, outputs, following, returns, discount):
    """Algorithm 1 of the paper: each atom's probability goes to its neighbours, then the cross-entropy."""
    atoms = np.linspace(config.v_min, config.v_max, config.num_atoms)
    step, target = atoms[1] - atoms[0], np.zeros(config.num_atoms)
    for atom, prob in zip(atoms, softmax(following), strict=True):
        place = (np.clip(returns + discount * atom, config.v_min, config.v_max) - config.v_min) / step
        low, high = int(np.floor(place)), int(np.ceil(place))
        target[low] += prob * (high - place if high > low else 1.0)
        target[high] += prob * (place - low)
    assert target.sum() == pytest.approx(1)
    return -(target * np.log(softmax(outputs))).sum(), target @ atoms


def plain_huber(u, delta):
    return u * u / 2 if abs(u) <= delta else delta * (abs(u) - delta / 2)


def plain_quantile(delta, outputs, goals):
    """Equations 9 and 10 of the paper, pair by pair."""
    total = 0.0
    for i, theta in enumerate(outputs):
        tau = (i + 0.5) / len(outputs)
        for y in goals:
            u = y - theta
            size = abs(u) if delta is None else plain_huber(u, delta) / delta
            total += abs(tau - (u < 0)) * size / len(goals)
    return total


def with_target(algorithm):
    """Move all weights, and the trained ones away from the target's; return the target's outputs for the next rows."""
    disturb(algorithm, 0.5)
    algorithm.nets.targets["target"][1].copy_(algorithm.nets.trained["q"].weights)
    target = [plain_outputs(algorithm, obs) for obs in batch_of(algorithm)[keys.NEXT_OBS]]
    disturb(algorithm, -1.0)
    return target


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
def test_the_loss_is_that_of_the_papers_row_by_row(kind, double, dueling):
    algorithm = build_offline(double=double, dueling=dueling, cql_coeff=0.5, **kind)
    target, config, batch = with_target(algorithm), algorithm.config, batch_of(algorithm)
    weights = torch.tensor([1.0, 0.2, 0.5, 2.0, 0.25, 0.7])
    losses, errors, disagree = [], [], 0
    for i in range(6):
        online = plain_outputs(algorithm, batch[keys.NEXT_OBS][i])
        greedy = [np.argmax(plain_means(algorithm, table)) for table in (target[i], online)]
        disagree, best = disagree + (greedy[0] != greedy[1]), greedy[double]
        returns, discount = batch[keys.RETURNS][i].item(), batch[keys.DISCOUNTS][i].item()
        outputs = plain_outputs(algorithm, batch[keys.OBS][i])[batch[keys.ACTIONS][i]]
        if config.num_atoms > 1:
            loss, goal = plain_categorical(config, outputs, target[i][best], returns, discount)
        elif config.num_quantiles > 1:
            goals = returns + discount * target[i][best]
            loss, goal = plain_quantile(config.huber_delta, outputs, goals), goals.mean()
        else:
            goal = returns + discount * target[i][best][0]
            loss = plain_huber(abs(outputs[0] - goal), config.huber_delta or math.inf)
        losses.append(loss)
        errors.append(abs(plain_means(algorithm, outputs) - goal))
    assert disagree
    numbers, found = updated(algorithm, batch | {WEIGHTS: weights})
    assert numbers["losses/q"].item() == pytest.approx(np.mean(losses * weights.numpy()), rel=1e-5)
    assert numbers["monitors/td_error"].item() == pytest.approx(np.mean(errors), rel=1e-4)
    np.testing.assert_allclose(found.numpy(), errors, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("coeff", [0.0, 0.5])
def test_a_step_goes_down_the_gradient_of_the_loss_and_of_the_conservative_term(coeff):
    """The targets have no gradient, and the loss that is logged is the error alone."""
    options = {"optimizer": "sgd", "lr": 0.1, "max_grad_norm": None, "double": False, "huber_delta": 1.0}
    algorithm = build_offline(cql_coeff=coeff, **options)
    batch, policy = batch_of(algorithm), algorithm.policy
    starts = torch.zeros(1, 6, dtype=torch.bool)
    with torch.no_grad():
        goals = policy(batch[keys.NEXT_OBS][None], {}, starts)[0].amax(-1)
        goals = batch[keys.RETURNS] + batch[keys.DISCOUNTS] * goals
    table = policy(batch[keys.OBS][None], {}, starts)[0]
    values = table[torch.arange(6), batch[keys.ACTIONS]]
    terms = []
    for obs, action in zip(batch[keys.OBS], batch[keys.ACTIONS], strict=True):
        row = plain_outputs(algorithm, obs)[:, 0]
        terms.append(math.log(sum(math.exp(q) for q in row)) - row[action])
    gap = (table.logsumexp(-1) - values).mean()
    assert gap.item() == pytest.approx(np.mean(terms), rel=1e-5)
    parameters, error = list(policy.parameters()), q_loss(values, goals, 1.0).mean()
    gradients = torch.autograd.grad(error + coeff * gap, parameters, allow_unused=True)
    moves = [torch.zeros_like(each) if g is None else -0.1 * g for each, g in zip(parameters, gradients, strict=True)]
    expected = [each.detach() + move for each, move in zip(parameters, moves, strict=True)]
    assert updated(algorithm, batch).metrics["losses/q"].item() == pytest.approx(error.item(), rel=1e-5)
    for each, wanted in zip(parameters, expected, strict=True):
        torch.testing.assert_close(each.detach(), wanted)


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("dueling", [False, True])
def test_the_policy_acts_by_the_means_under_a_mask_too(name, dueling):
    kind = KINDS[name]
    space = Dict({"x": Box(-1, 1, (3,), np.float32), "action_mask": Box(0, 1, (3,), np.int8)})
    torch.manual_seed(0)
    support = (-3.0, 3.0) if name == "atoms" else None
    num_outputs = max(kind.get("num_atoms", 1), kind.get("num_quantiles", 1))
    config = {"hidden_sizes": [8], "policy_gain": 3.0}
    policy = QPolicy(
        space, Discrete(3, start=2), model_config=config, dueling=dueling, num_outputs=num_outputs, support=support
    )
    mask = torch.tensor([[0, 1, 1], [1, 0, 0], [0, 0, 0], [1, 1, 1]], dtype=torch.int8)
    obs, starts = {"x": torch.randn(4, 3), "action_mask": mask}, torch.zeros(1, 4, dtype=torch.bool)
    sequence = {part: value[None] for part, value in obs.items()}
    q = policy(sequence, {}, starts)
    values, outputs = policy(sequence, {}, starts, True)
    assert torch.equal(values, q)
    assert q.shape == (1, 4, 3)
    assert outputs.shape == (1, 4, 3, num_outputs)
    legal = mask.bool() | ~mask.bool().any(-1, keepdim=True)
    assert torch.equal(q[0].isfinite(), legal)
    # a second formulation, from the features
    features = policy.predict(sequence, {}, starts).features[0].unflatten(-1, (-1, num_outputs))
    for row, allowed in enumerate(legal):
        table = features[row]
        if dueling:
            table = table[0] + table[1:] - table[1:][allowed].mean(0)
        means = table.mean(-1) if support is None else table.softmax(-1) @ torch.linspace(*support, num_outputs)
        torch.testing.assert_close(q[0, row][allowed], means[allowed])
    act = policy.act(obs, {}, starts[0])
    assert torch.equal(act.actions, q[0].argmax(-1) + 2)
    torch.testing.assert_close(policy.values(obs, {}, starts[0]), q[0].amax(-1))
    (q[0].amax(-1).sum() + outputs.sum()).backward()
    assert all(each.grad.isfinite().all() for each in policy.parameters() if each.grad is not None)


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
