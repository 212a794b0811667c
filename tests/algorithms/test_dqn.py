import dataclasses
import itertools
import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from tests.algorithms.off_policy.test_offline import build as build_offline
from tests.probes import ActionDecides, Probe
from torch import nn

from rl8x import NullTracker, Trainer, keys
from rl8x.algorithms import DQNConfig
from rl8x.algorithms.dqn import q_loss
from rl8x.algorithms.off_policy.learner import TAU
from rl8x.algorithms.off_policy.updates import WEIGHTS
from rl8x.envs import CartPole

PLAIN = {"hidden_sizes": [16], "layer_norm": False}
SMALL = {"num_envs": 8, "horizon": 2, "n_step": 1, "seed": 1, "device": "cpu", "model_config": PLAIN}


def build(env=CartPole, **options):
    return DQNConfig(**{**SMALL, "warmup_steps": 16, "batch_size": 16, "buffer_size": 200, **options}).build(env)


def batch_of(algorithm, size=6):
    """Make a batch by hand, terminations among it."""
    generator = torch.Generator().manual_seed(5)
    shape = algorithm.observation_space.shape
    return {
        keys.OBS: torch.randn(size, *shape, generator=generator),
        keys.NEXT_OBS: torch.randn(size, *shape, generator=generator),
        keys.ACTIONS: torch.randint(2, (size,), generator=generator),
        keys.RETURNS: torch.randn(size, generator=generator) * 3,
        keys.DISCOUNTS: torch.tensor([0.9, 0.0, 0.81, 0.9, 0.0, 0.9])[:size],
        TAU: torch.tensor(0.5),
    }


def plain_q(algorithm, obs):
    """Values of actions row by row, in NumPy, from the weights by name."""
    weights = {name: value.detach().double().numpy() for name, value in algorithm.policy.model.state_dict().items()}
    hidden = np.maximum(weights["actor.0.weight"] @ obs.double().numpy() + weights["actor.0.bias"], 0)
    q = weights["policy_head.weight"] @ hidden + weights["policy_head.bias"]
    if algorithm.config.dueling:
        value = (weights["value_head.weight"] @ hidden + weights["value_head.bias"])[0]
        q = value + q - q.mean()
    return q


def disturb(algorithm):
    """Move the trained weights away from the target's; return the target's values as a function."""
    target = {}
    batch = batch_of(algorithm)
    for i, obs in enumerate(batch[keys.NEXT_OBS]):
        target[i] = plain_q(algorithm, obs)
    optimizer = algorithm.nets.trained["q"].optimizer
    generator = torch.Generator().manual_seed(8)
    for view in optimizer.views:
        view.data.add_(torch.randn(view.shape, generator=generator) * 0.5)
    return target


@pytest.mark.parametrize("double", [False, True])
@pytest.mark.parametrize("dueling", [False, True])
@pytest.mark.parametrize("delta", [None, 1.0, 0.3])
def test_the_loss_is_that_of_the_papers_row_by_row(double, dueling, delta):
    algorithm = build(double=double, dueling=dueling, huber_delta=delta)
    target = disturb(algorithm)
    batch = batch_of(algorithm)
    losses, errors, chosen = [], [], []
    for i in range(6):
        after = target[i]
        best = np.argmax(plain_q(algorithm, batch[keys.NEXT_OBS][i]) if double else after)
        goal = batch[keys.RETURNS][i].item() + batch[keys.DISCOUNTS][i].item() * after[best]
        value = plain_q(algorithm, batch[keys.OBS][i])[batch[keys.ACTIONS][i]]
        error = abs(value - goal)
        is_square = delta is None or error <= delta
        losses.append(error**2 / 2 if is_square else delta * (error - delta / 2))
        errors.append(error)
        chosen.append(value)
    numbers, found = algorithm.cycle[-1].update(algorithm.nets.bind(algorithm.nets.state, algorithm.nets.rates), batch)
    assert numbers["losses/q"].item() == pytest.approx(np.mean(losses), rel=1e-5)
    assert numbers["monitors/td_error"].item() == pytest.approx(np.mean(errors), rel=1e-5)
    assert numbers["monitors/q"].item() == pytest.approx(np.mean(chosen), rel=1e-5)
    np.testing.assert_allclose(found.numpy(), errors, rtol=1e-4)


def test_the_two_networks_disagree_about_the_best_action_in_the_test_above():
    algorithm = build()
    target = disturb(algorithm)
    obs = batch_of(algorithm)[keys.NEXT_OBS]
    assert any(np.argmax(plain_q(algorithm, obs[i])) != np.argmax(target[i]) for i in (0, 2, 3, 5))


def test_gradients_are_those_of_plain_autograd():
    algorithm = build(optimizer="sgd", lr=0.1, max_grad_norm=None, double=False, huber_delta=1.0)
    batch, policy = batch_of(algorithm), algorithm.policy
    starts = torch.zeros(1, 6, dtype=torch.bool)
    with torch.no_grad():
        goals = policy(batch[keys.NEXT_OBS][None], {}, starts)[0].amax(-1)
        goals = batch[keys.RETURNS] + batch[keys.DISCOUNTS] * goals
    values = policy(batch[keys.OBS][None], {}, starts)[0][torch.arange(6), batch[keys.ACTIONS]]
    parameters = list(policy.parameters())
    gradients = torch.autograd.grad(q_loss(values, goals, 1.0).mean(), parameters, allow_unused=True)
    expected = [
        each.detach().clone() if gradient is None else each.detach() - 0.1 * gradient
        for each, gradient in zip(parameters, gradients, strict=True)
    ]
    algorithm.cycle[-1].update(algorithm.nets.bind(algorithm.nets.state, algorithm.nets.rates), batch)
    for each, wanted in zip(parameters, expected, strict=True):
        torch.testing.assert_close(each.detach(), wanted)


def test_rows_count_by_their_importance_weights():
    algorithm, other = build(huber_delta=1.0), build(huber_delta=1.0)
    batch, weights = batch_of(algorithm), torch.tensor([1.0, 0.0, 0.5, 0.0, 0.25, 0.0])
    numbers, errors = algorithm.cycle[-1].update(
        algorithm.nets.bind(algorithm.nets.state, algorithm.nets.rates), batch | {WEIGHTS: weights}
    )
    _, plain = other.cycle[-1].update(other.nets.bind(other.nets.state, other.nets.rates), batch)
    torch.testing.assert_close(errors, plain)
    each = torch.where(errors <= 1, errors**2 / 2, errors - 0.5)
    assert numbers["losses/q"].item() == pytest.approx((each * weights).mean().item(), rel=1e-5)
    assert not torch.equal(algorithm.nets.state[0], other.nets.state[0])


def test_priorities_are_written_after_each_group_of_updates(monkeypatch):
    algorithm = build(prioritized=True, updates_per_sample=2.0, n_step=2, batch_size=4)
    groups = []

    def note(index, errors):
        groups.append(tuple(index.shape))
        assert (errors >= 0).all()
        update(index, errors)

    update = algorithm.replay.update
    monkeypatch.setattr(algorithm.replay, "update", note)
    for _ in range(4):
        algorithm.collect()
        algorithm.step()
    assert groups == [(16, 4)] * 6
    assert algorithm.counters["algorithm/updates"] == 96


def test_surprising_rows_are_drawn_more_often():
    """One observation in many has a reward that cannot be known, so that its error stays."""
    algorithm = learned(Surprise, steps=60, prioritized=True, priority_alpha=1.0)
    index = algorithm.replay.sample(200, 16, torch.Generator().manual_seed(0))
    obs = algorithm.replay.gather(index)[keys.OBS]
    share = (algorithm.replay.as_tensordict()[keys.OBS] > 0.5).float().mean().item()
    assert (obs > 0.5).float().mean().item() > 1.5 * share


class Surprise(Probe):
    """A reward of +2 or -2 by chance where the observation is 1, and of 0 where it is -1; then the end."""

    terminates = True
    step_noise = 1

    def initial_state(self, parameters, noise):
        return {"x": (noise < 0.25).float() * 2 - 1}

    def transition(self, state, actions, parameters, noise):
        sign = (noise.squeeze(1) < 0.5).float() * 4 - 2
        rewards = torch.where(state["x"].squeeze(1) > 0, sign, 0.0)
        return dict(state), rewards, torch.ones(self.num_envs, dtype=torch.bool)


def test_the_target_follows_after_the_step():
    algorithm = build()
    before = algorithm.nets.targets["target"][1].clone()
    algorithm.cycle[-1].update(algorithm.nets.bind(algorithm.nets.state, algorithm.nets.rates), batch_of(algorithm))
    trained = algorithm.nets.trained["q"].optimizer.weights
    torch.testing.assert_close(algorithm.nets.targets["target"][1], (before + trained) / 2)


@pytest.mark.parametrize(("interval", "ratio"), [(1000, 0.25), (8, 1 / 3), (3, 0.5), (1, 0.25), (1, 2.0), (10, 1.0)])
def test_the_target_moves_once_in_each_interval_of_transitions(interval, ratio):
    updates = torch.arange(1, 3001)
    moves = DQNConfig(target_interval=interval, updates_per_sample=ratio).taus(updates).tolist()
    exact = Fraction(ratio).limit_denominator(10**9)
    intervals = [math.floor(count / exact / interval) for count in range(3001)]  # that have ended by then
    assert moves == [float(after > before) for before, after in itertools.pairwise(intervals)]
    assert sum(moves) == min(3000 / exact // interval, 3000)


def test_with_a_data_set_intervals_are_of_updates():
    moves = DQNConfig(dataset="recorded", target_interval=10, updates_per_sample=0.25).taus(torch.arange(1, 31))
    assert moves.nonzero().flatten().tolist() == [9, 19, 29]


@pytest.mark.parametrize(("decay", "wanted"), [(96, [1.0, 0.875, 0.75, 0.625, 0.5, 0.5]), (0, [1.0, *[0.5] * 5])])
def test_epsilon_decays_from_1_over_transitions(decay, wanted):
    algorithm = build(warmup_steps=20, epsilon=0.5, epsilon_decay_steps=decay, num_envs=12, horizon=2)
    epsilons = []
    for _ in range(6):
        epsilons.append(algorithm.collect()["coefficients/epsilon"])
        algorithm.step()
    assert epsilons == pytest.approx(wanted)


def learned(env, steps=80, **options):
    settings = {"warmup_steps": 64, "lr": 0.01, "target_interval": 20, "updates_per_sample": 1.0, "gamma": 0.9}
    settings |= {"epsilon": 0.5, "epsilon_decay_steps": 0}
    algorithm = build(env, **{**settings, "execution": "eager", **options})
    for _ in range(steps):
        algorithm.collect()
        algorithm.step()
    return algorithm


def test_actions_are_random_in_the_warm_up_and_epsilon_follows_its_schedule():
    schedule = {"kind": "interp", "points": [[0, 1.0], [160, 0.0]]}
    algorithm = build(ActionDecides, warmup_steps=64, epsilon_schedule=schedule, num_envs=16, horizon=1)
    epsilons = []
    for _ in range(12):
        epsilons.append(algorithm.collect()["coefficients/epsilon"])
        algorithm.step()
    assert epsilons == pytest.approx([1.0] * 4 + [0.6, 0.5, 0.4, 0.3, 0.2, 0.1, 0.0, 0.0], abs=1e-6)
    assert algorithm.policy.distribution.epsilon.item() == 0.0


def test_the_params_say_what_is_in_force():
    params = build(epsilon=0.1, epsilon_decay_steps=500).params
    assert params["algorithm"] == "DQN"
    assert params["epsilon_schedule"] == {"kind": "interp", "points": [[0, 1.0], [500, 0.1]]}
    assert params["double"] is True
    assert params["horizons_per_env_reset"] == -1
    assert params["distribution.class"] == "EpsilonGreedy"


def test_cartpole_is_learned():
    """Twice what random actions reach, after few steps; benchmarks/learning.py has the whole task."""
    algorithm = DQNConfig(
        seed=0,
        device="cpu",
        execution="eager",
        updates_per_sample=0.5,
        model_config={"hidden_sizes": [64, 64]},
        buffer_size=10_000,
    ).build(CartPole)
    trainer = Trainer(algorithm, tracker=NullTracker(), eval_env=True, num_eval_envs=16)
    trainer.run(max_steps=48, progress="none")
    assert trainer.eval()["eval/returns/mean"] > 45


# -- offline


@pytest.mark.parametrize("coeff", [0.0, 0.5])
def test_the_conservative_term_by_hand(coeff):
    plain, algorithm = (
        build_offline("dqn", optimizer="sgd", lr=0.1, max_grad_norm=None, cql_coeff=each) for each in (0.0, coeff)
    )
    batch, policy = batch_of(algorithm), algorithm.policy
    terms = []
    for obs, action in zip(batch[keys.OBS], batch[keys.ACTIONS], strict=True):
        row = plain_q(algorithm, obs)
        terms.append(math.log(sum(math.exp(q) for q in row)) - row[action])
    values = policy(batch[keys.OBS][None], {}, torch.zeros(1, 6, dtype=torch.bool))[0]
    gap = torch.logsumexp(values, -1) - values[torch.arange(6), batch[keys.ACTIONS]]
    assert gap.mean().item() == pytest.approx(np.mean(terms), rel=1e-5)
    parameters = list(policy.parameters())
    gradients = torch.autograd.grad(gap.mean(), parameters, allow_unused=True)
    both = (plain, algorithm)
    numbers = [each.cycle[-1].update(each.nets.bind(each.nets.state, each.nets.rates), batch).metrics for each in both]
    # The loss that is logged is the error alone; the step has the term's gradient beside the error's.
    assert numbers[0]["losses/q"] == numbers[1]["losses/q"]
    for one, other, gradient in zip(plain.policy.parameters(), parameters, gradients, strict=True):
        moved = 0.0 if gradient is None else -0.1 * coeff * gradient
        torch.testing.assert_close(other.detach() - one.detach(), torch.zeros_like(one) + moved, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize(
    ("given", "with_env", "with_data"),
    [({}, 3, 1), ({"n_step": 3}, 3, 3), ({"n_step": 1}, 1, 1), ({"n_step": 5}, 5, 5)],
)
def test_the_default_of_n_step_gives_way_where_another_policy_acted(given, with_env, with_data):
    config = DQNConfig(**given)
    assert (config.n_step, dataclasses.replace(config, dataset="recorded").n_step) == (with_env, with_data)


@pytest.mark.parametrize(
    ("given", "norms", "width"),
    [({}, 2, 128), ({"hidden_sizes": [8]}, 1, 8), ({"layer_norm": False}, 0, 128)],
)
def test_the_default_network_is_normalised(given, norms, width):
    modules = list(DQNConfig(num_envs=2, model_config=given).build(CartPole).policy.model.actor)
    assert sum(isinstance(module, nn.LayerNorm) for module in modules) == norms
    assert modules[0].out_features == width
