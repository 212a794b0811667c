"""A learning rate by KL against rsl_rl's rule, written out with torch's own optimizer."""

import copy
import dataclasses
import math
from typing import NamedTuple

import pytest
import torch
from gymnasium import spaces
from tests.probes import traced_only, weights_of

from rl8x import PPO, BCConfig, DistillationConfig, DQNConfig, PPOConfig, PQNConfig, keys
from rl8x.algorithms.base import LR
from rl8x.algorithms.optimizer import AdaptiveRate
from rl8x.distributions import Distribution, Normal
from rl8x.envs import CartPole, Pendulum
from rl8x.trees import flatten_tree, tree_map

ADAPTIVE = {"kind": "adaptive", "high": 1e-2}


def build(env=Pendulum, **options):
    given = {"num_envs": 8, "horizon": 8, "seed": 2, "device": "cpu", "model_config": {"hidden_sizes": [16]}}
    given |= {"sgd_minibatch_size": 16, "num_sgd_iters": 3, "lr_schedule": ADAPTIVE, "shuffle_minibatches": False}
    return PPOConfig.rl8(**given | options).build(env)


@pytest.mark.parametrize(
    ("kl", "lr", "expected"),
    [
        (0.021, 3e-4, 2e-4),  # above twice the wanted one: over 1.5
        (0.02, 3e-4, 3e-4),
        (0.005, 3e-4, 3e-4),
        (0.0049, 3e-4, 4.5e-4),  # below half of it: times 1.5
        (1.0, 1.2e-5, 1e-5),
        (1e-4, 2.9e-3, 3e-3),
        (0.0, 3e-4, 3e-4),
        (1e-12, 3e-4, 4.5e-4),
        (-1e-3, 3e-4, 3e-4),
        (math.nan, 3e-4, 3e-4),
        (math.inf, 3e-4, 2e-4),
    ],
)
def test_the_rule(kl, lr, expected):
    adapted = AdaptiveRate().adapted(torch.tensor(lr), torch.tensor(kl))
    assert float(adapted) == pytest.approx(expected, rel=1e-6)


def by_hand(algorithm, exact):
    """Make the step's updates of the collected rollout; return rates, norms of gradients, and the weights."""
    config, rollout = algorithm.config, algorithm.rollout
    policy = copy.deepcopy(algorithm.policy)
    horizon = config.horizon
    twin = copy.deepcopy(algorithm)
    twin.step()  # for advantages and targets, which are not what is tested
    packed, _ = twin.pack.gather(torch.arange(twin.pack.num_sequences))
    rows = horizon * config.num_envs
    obs, starts = rollout[keys.OBS][:horizon].reshape(rows, -1), rollout[keys.STARTS][:horizon].reshape(1, rows)
    acting = copy.deepcopy(policy)

    def params_of(policy, part):
        features = policy.predict(obs[part].unsqueeze(0), {}, starts[:, part]).features[0]
        return policy.distribution.from_features(features)

    optimizer = torch.optim.Adam(policy.parameters(), lr=config.lr)
    lr, rates, norms = config.lr, [], []
    for _ in range(config.num_sgd_iters):
        for low in range(0, rows, config.sgd_minibatch_size):
            part = slice(low, low + config.sgd_minibatch_size)
            batch = tree_map(lambda each, part=part: each[:, part], packed)
            evaluation = policy.evaluate(obs[part].unsqueeze(0), batch[keys.ACTIONS], {}, starts[:, part])
            ratio = (evaluation.logp - batch[keys.LOGP]).exp()
            kl = ratio - 1 - ratio.log()
            if exact:
                kl = policy.distribution.kl(params_of(acting, part), params_of(policy, part))
            kl = float(kl.detach().mean())
            if kl > 2 * 0.01:
                lr = max(1e-5, lr / 1.5)
            elif rates and 0 < kl < 0.01 / 2:  # before the first update it is 0 up to rounding
                lr = min(1e-2, lr * 1.5)
            rates.append(lr)
            entropy_coeff = torch.tensor(config.entropy_coeff)
            found = PPO.losses(lambda *_, found=evaluation: found, batch, {}, entropy_coeff, config)
            optimizer.zero_grad()
            (found[3].sum() / config.sgd_minibatch_size).backward()
            norms.append(float(torch.nn.utils.clip_grad_norm_(policy.parameters(), config.max_grad_norm)))
            optimizer.param_groups[0]["lr"] = lr
            optimizer.step()
    return rates, norms, torch.cat([weight.detach().flatten() for weight in policy.parameters()])


class WithoutKL(Normal):
    """A distribution that defines no divergence."""

    kl = Distribution.kl


class SharedParams(NamedTuple):
    """Those of `Normal`, and a number that all rows share."""

    mean: torch.Tensor
    log_std: torch.Tensor
    scale: torch.Tensor


class WithShared(Normal):
    """A distribution with parameters that cannot be kept a row for each observation."""

    def from_features(self, features, mask=None):
        return SharedParams(*super().from_features(features, mask), features.new_ones(()))


BOX = spaces.Box(-1.0, 1.0, (2,))
BOTH = spaces.Dict({"a": BOX, "b": spaces.Discrete(2)})
SPACES = {
    "normal": (BOX, {}, True),
    "estimated": (BOX, {"distribution": WithoutKL}, False),
    "estimated, as a parameter is shared": (BOX, {"distribution": WithShared}, False),
    "dict": (BOTH, {}, True),
    "dict, a part without": (BOTH, {"distribution_config": {"a": {"distribution": WithoutKL}}}, False),
}


class AnyActions(Pendulum):
    """A pendulum that only the observation's first number and any actions move."""

    def transition(self, state, actions, parameters, noise):
        parts = flatten_tree("", actions).values()
        total = sum(part.float().flatten(1).sum(1) if part.dim() > 1 else part.float() for part in parts)
        return super().transition(state, total.unsqueeze(1), parameters, noise)


def environment(space):
    return type("AnyActions", (AnyActions,), {"single_action_space": space})


@pytest.mark.parametrize("name", SPACES)
def test_rates_and_weights_are_those_of_rsl_rls_rule(name):
    space, options, exact = SPACES[name]
    algorithm = build(environment(space), lr=2e-3, entropy_coeff=0.05, **options)
    assert algorithm.policy.shows_params == exact
    algorithm.collect()
    rates, norms, expected = by_hand(algorithm, exact)
    row = algorithm.step()
    assert len(set(rates)) > 1
    assert row[LR] == pytest.approx(rates[-1], rel=1e-5)
    assert row["monitors/grad_norm"] == pytest.approx(sum(norms) / len(norms), rel=1e-3)
    torch.testing.assert_close(weights_of(algorithm), expected, rtol=1e-3, atol=2e-5)


def test_updates_after_the_limit_leave_the_rate():
    algorithm = build(lr=1e-4, target_kl_div=1e-9)
    algorithm.collect()
    row = algorithm.step()
    # The second of twelve is refused, for a divergence that is above the limit and below half of the wanted one.
    assert (row["monitors/refused_updates"], algorithm.counters[keys.UPDATES]) == (11, 1)
    assert row[LR] == pytest.approx(1.5e-4)


# -- in a run


@pytest.mark.parametrize("execution", ["eager", "compile"])
def test_a_rate_that_is_set_takes_the_place_of_one_that_adapts(execution, monkeypatch):
    if execution == "compile":
        traced_only(monkeypatch)
    algorithm, constant = build(CartPole, execution=execution), build(CartPole, lr=1e-4, lr_schedule=None)
    algorithm.collect()
    algorithm.step()
    adapted = float(algorithm.optimizer.lr)
    assert adapted != pytest.approx(1e-3)
    before = copy.deepcopy(algorithm.state_dict())
    algorithm.set_lr(1e-4)
    constant.load_state_dict(before | {"lr": None})
    for _ in range(2):
        rows = []
        for one in (algorithm, constant):
            one.collect()
            rows.append(one.step()[LR])
        assert rows == pytest.approx([1e-4, 1e-4])
    torch.testing.assert_close(weights_of(algorithm), weights_of(constant), atol=1e-5, rtol=1e-5)
    assert algorithm.params["lr_schedule"] == {"kind": "step", "points": [[0, 1e-4]]}
    # An older state has the rate that it had come to; None begins anew.
    algorithm.load_state_dict(before)
    assert float(algorithm.optimizer.lr) == adapted
    algorithm.set_lr(None)
    assert float(algorithm.optimizer.lr) == pytest.approx(1e-3)
    assert algorithm.params["lr_schedule"] == {"kind": "adaptive", "kl": 0.01, "low": 1e-5, "high": 1e-2}


def test_it_is_the_default_which_lr_begins_and_another_schedule_replaces():
    assert PPOConfig(lr=3e-4).adaptive_rate == AdaptiveRate()
    assert PPOConfig(lr=0.5).adaptive_rate == AdaptiveRate(high=0.5)  # a bound that nobody gave gives way
    assert PPOConfig(lr=1e-6).adaptive_rate == AdaptiveRate(low=1e-6)
    config = dataclasses.replace(PPOConfig(lr=2e-3), lr_schedule=ADAPTIVE | {"kl": 0.02})
    assert config.adaptive_rate == AdaptiveRate(kl=0.02, high=1e-2)
    assert config.schedule("lr")(10**9) == 2e-3
    assert PPOConfig(lr=0.5).without_effect() == config.without_effect() == {}
    for schedule in (None, [[0, 1e-3]]):
        assert PPOConfig(lr_schedule=schedule).adaptive_rate is None
    assert list(PPOConfig(lr=3e-4, lr_schedule=[[0, 1e-3]]).without_effect()) == ["lr=0.0003"]


# -- what is refused


OTHER_SCHEDULES = "only PPO's lr_schedule can be of kind 'adaptive'"
REFUSED = [
    ({"kl": 0.0}, "kl must be a number greater than 0; got 0.0"),
    ({"low": True}, "low must be a number greater than 0; got True"),
    ({"high": math.inf}, "high must be a number greater than 0; got inf"),
    ({"low": 1e-2, "high": 1e-3}, "low must be at most high; got 0.01 and 0.001"),
    ({"low": 2e-3}, "begins at `lr`, which must be from 0.002 to 0.01, its low and high; got 0.001"),
    ({"desired_kl": 0.01}, "has no option 'desired_kl'. There are kind, kl, low, high"),
]
REFUSED = [(PPOConfig, "lr_schedule", *each) for each in REFUSED]
REFUSED += [(each, "lr_schedule", {}, OTHER_SCHEDULES) for each in (PQNConfig, DQNConfig, BCConfig, DistillationConfig)]
REFUSED += [(PPOConfig, "entropy_coeff_schedule", {}, OTHER_SCHEDULES)]


@pytest.mark.parametrize(("config", "name", "spec", "why"), REFUSED)
def test_other_values_and_other_schedules_of_its_kind_are_refused(config, name, spec, why):
    with pytest.raises(ValueError, match=name) as error:
        config(**{name: ADAPTIVE | spec})
    assert why in str(error.value)
    assert "\n" not in str(error.value)
