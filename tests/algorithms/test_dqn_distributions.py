"""DQN with categorical distributions of returns (C51) and with quantiles (QR-DQN)."""

import math

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Dict, Discrete
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.algorithms.off_policy.test_offline import build as build_offline
from tests.algorithms.test_dqn import Surprise, batch_of, build, learned

from rl8x import keys
from rl8x.algorithms import DQNConfig
from rl8x.algorithms.dqn import of_actions, quantile_loss
from rl8x.algorithms.off_policy.updates import WEIGHTS
from rl8x.q_values import GreedyInMeans, QPolicy

ATOMS = {"num_atoms": 7, "v_min": -3.0, "v_max": 3.0}
QUANTILES = {"num_quantiles": 5, "huber_delta": 1.0}
KINDS = {"atoms": ATOMS, "quantiles": QUANTILES}


def plain_outputs(algorithm, obs):
    """The numbers of each action, row by row, in NumPy, from the weights by name; `[num_actions, num_outputs]`."""
    weights = {name: value.detach().double().numpy() for name, value in algorithm.policy.model.state_dict().items()}
    hidden = np.maximum(weights["actor.0.weight"] @ obs.double().numpy() + weights["actor.0.bias"], 0)
    features = weights["policy_head.weight"] @ hidden + weights["policy_head.bias"]
    table = features.reshape(-1, algorithm.policy.distribution.num_outputs)
    if algorithm.config.dueling:
        table = table[0] + table[1:] - table[1:].mean(0)
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


def disturb(algorithm):
    """Move the trained weights away from the target's; return the target's outputs for the batch's next rows."""
    generator = torch.Generator().manual_seed(8)
    views = algorithm.nets.trained["q"].optimizer.views
    for view in views:
        view.data.add_(torch.randn(view.shape, generator=generator) * 0.5)
    algorithm.nets.targets["target"][1].copy_(algorithm.nets.trained["q"].optimizer.weights)
    target = [plain_outputs(algorithm, obs) for obs in batch_of(algorithm)[keys.NEXT_OBS]]
    for view in views:
        view.data.add_(torch.randn(view.shape, generator=generator) * 0.5)
    return target


@pytest.mark.parametrize("double", [False, True])
@pytest.mark.parametrize("dueling", [False, True])
@pytest.mark.parametrize(
    "kind", [ATOMS, QUANTILES, QUANTILES | {"huber_delta": 0.3}, {"num_quantiles": 4, "huber_delta": None}]
)
def test_the_loss_is_that_of_the_papers_row_by_row(kind, double, dueling):
    algorithm = build_offline("dqn", double=double, dueling=dueling, cql_coeff=0.5, **kind)
    target, config, batch = disturb(algorithm), algorithm.config, batch_of(algorithm)
    weights = torch.tensor([1.0, 0.2, 0.5, 2.0, 0.25, 0.7])
    losses, errors = [], []
    for i in range(6):
        online = plain_outputs(algorithm, batch[keys.NEXT_OBS][i])
        best = np.argmax(plain_means(algorithm, online if double else target[i]))
        returns, discount = batch[keys.RETURNS][i].item(), batch[keys.DISCOUNTS][i].item()
        outputs = plain_outputs(algorithm, batch[keys.OBS][i])[batch[keys.ACTIONS][i]]
        if config.num_atoms > 1:
            loss, goal = plain_categorical(config, outputs, target[i][best], returns, discount)
        else:
            goals = returns + discount * target[i][best]
            loss, goal = plain_quantile(config.huber_delta, outputs, goals), goals.mean()
        losses.append(loss)
        errors.append(abs(plain_means(algorithm, outputs) - goal))
    nets = algorithm.nets.bind(algorithm.nets.state, algorithm.nets.rates)
    numbers, found = algorithm.cycle[-1].update(nets, batch | {WEIGHTS: weights})
    assert numbers["losses/q"].item() == pytest.approx(np.mean(losses * weights.numpy()), rel=1e-5)
    assert numbers["monitors/td_error"].item() == pytest.approx(np.mean(errors), rel=1e-4)
    np.testing.assert_allclose(found.numpy(), errors, rtol=1e-3, atol=1e-5)


def test_the_quantile_loss_by_hand():
    # tau = 1/4, 3/4; u = [[1, 3], [-1, 1]]; |tau - [u < 0]| = [[1/4, 1/4], [1/4, 3/4]]
    quantiles, goals = torch.tensor([[0.0, 2.0]]), torch.tensor([[1.0, 3.0]])
    # (1/4 + 3/4) / 2 + (1/4 + 3/4) / 2 = 1
    assert quantile_loss(quantiles, goals, None).tolist() == [1.0]
    # huber with delta 2, over 2: 1/4, (2 (3 - 1)) / 2 = 2, 1/4, 1/4: (1/16 + 1/2) / 2 + (1/16 + 3/16) / 2 = 13/32
    assert quantile_loss(quantiles, goals, 2.0).tolist() == [13 / 32]
    assert quantile_loss(quantiles, goals, 1e-4).item() == pytest.approx(1.0, abs=1e-3)


@given(st.lists(st.integers(-20, 20).map(float), min_size=1, max_size=9))
@settings(max_examples=30, deadline=None)
def test_the_quantile_loss_is_least_at_the_quantiles(draws):
    goals, num = torch.tensor([draws], dtype=torch.float64), 4
    # The least number that at least a share tau of the draws does not exceed.
    best = torch.tensor([[sorted(draws)[math.ceil((i + 0.5) / num * len(draws)) - 1] for i in range(num)]]).double()
    least = quantile_loss(best, goals, None)
    for shift in (-1.0, -0.1, 0.1, 1.0):
        for i in range(num):
            moved = best.clone()
            moved[0, i] += shift
            assert quantile_loss(moved, goals, None) >= least - 1e-9


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


def test_what_a_table_has_for_the_actions_of_its_rows():
    table, actions = torch.arange(12.0).view(2, 3, 2), torch.tensor([2, 0])
    assert of_actions(table, actions).tolist() == [[4, 5], [6, 7]]
    assert of_actions(table[..., 0], actions).tolist() == [4, 6]


@pytest.mark.parametrize("name", KINDS)
def test_the_whole_distribution_of_a_return_is_learned(name):
    """A reward of +2 or -2 by chance where the observation is 1, and of 0 where it is -1."""
    options = {
        "atoms": {"num_atoms": 5, "v_min": -4.0, "v_max": 4.0},
        "quantiles": {"num_quantiles": 4, "huber_delta": None},
    }[name]
    options |= {
        "buffer_size": 1000,
        "batch_size": 64,
        "lr_schedule": {"kind": "interp", "points": [[0, 0.01], [960, 0]]},
    }
    algorithm = learned(Surprise, steps=60, **options)
    obs = torch.tensor([1.0, -1.0]).view(1, 2, 1)
    outputs = algorithm.policy(obs, {}, torch.zeros(1, 2, dtype=torch.bool), True)[1][0].detach()  # [2, actions, k]
    expected = {"atoms": [[0, 0.5, 0, 0.5, 0], [0, 0, 1, 0, 0]], "quantiles": [[-2, -2, 2, 2], [0, 0, 0, 0]]}[name]
    found = outputs.softmax(-1) if name == "atoms" else outputs
    for action in (0, 1):
        assert (found[:, action] - torch.tensor(expected)).abs().max() < (0.12 if name == "atoms" else 0.4)


def test_one_number_is_the_plain_algorithm_and_the_head_is_as_wide_as_it_must_be():
    plain, one = build(), build(num_atoms=1, num_quantiles=1, v_min=-1.0)
    assert not isinstance(one.policy.distribution, GreedyInMeans)
    assert all(map(torch.equal, plain.nets.state, one.nets.state))
    assert build(**ATOMS).policy.model.num_features == 14
    assert build(**QUANTILES, dueling=True).policy.model.num_features == 15
    assert build(**ATOMS).policy.atoms.tolist() == [-3, -2, -1, 0, 1, 2, 3]


@pytest.mark.parametrize("name", KINDS)
def test_it_learns_from_a_data_set_too(name):
    algorithm = build_offline("dqn", cql_coeff=0.5, n_step=2, **KINDS[name])
    before = algorithm.nets.state[0].clone()
    assert math.isfinite(algorithm.step()["losses/q"])
    assert not torch.equal(algorithm.nets.state[0], before)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_atoms": 51, "num_quantiles": 200}, "`num_atoms` and `num_quantiles` exclude each other; got 51 and 200"),
        ({"num_atoms": 51, "v_min": 1.0, "v_max": 1.0}, "`v_min` must be less than `v_max`, both finite; got 1.0"),
        ({"num_atoms": 51, "v_max": float("inf")}, "`v_max` must be finite; got inf"),
        ({"num_atoms": 0}, "`num_atoms` must be at least 1 and at most 1000; got 0"),
        ({"num_quantiles": -1}, "`num_quantiles` must be at least 1"),
    ],
)
def test_options_that_contradict_each_other_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        DQNConfig(**options)
