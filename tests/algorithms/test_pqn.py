from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box
from tests import probes
from tests.algorithms.by_hand import Masked, seen

from rl8x import PQNConfig, keys
from rl8x.envs import CartPole
from rl8x.functional import generalized_advantages


def tiny(env=CartPole, time_limit=5, **options):
    defaults = {"num_envs": 4, "horizon": 8, "seed": 3, "device": "cpu", "model_config": {"hidden_sizes": [16]}}
    small = {"sgd_minibatch_size": 16, "num_sgd_iters": 2, "execution": "eager"}
    return PQNConfig(**(defaults | small | options)).build(env, time_limit=time_limit)


# -- targets

ENDS = (keys.FINAL_VALUES, keys.TERMINATED, keys.TRUNCATED)


def lambda_return(t, rewards, values, final_values, terminated, truncated, gamma, weight):
    """Mix n-step returns of one copy by their weights, n by n: the forward view, without recursion."""
    mixed = discounted = 0.0
    for n, i in enumerate(range(t, len(rewards))):
        discounted += gamma**n * rewards[i]
        after = 0.0 if terminated[i] else final_values[i] if truncated[i] else values[i + 1]
        last = terminated[i] or truncated[i] or i == len(rewards) - 1
        mixed += weight**n * (1.0 if last else 1.0 - weight) * (discounted + gamma ** (n + 1) * after)
        if last:
            return mixed
    raise AssertionError


@pytest.mark.parametrize(("q_lambda", "gamma"), [(0.0, 0.9), (0.5, 0.9), (0.95, 1.0), (1.0, 0.9)])
def test_targets_are_the_mixture_of_all_n_step_returns(q_lambda, gamma):
    algorithm = tiny(q_lambda=q_lambda, gamma=gamma, reward_scale=0.5, num_envs=16)
    algorithm.collect()
    generator, tensors = torch.Generator().manual_seed(1), {n: t[:8] for n, t in algorithm.rollout.tensors.items()}
    values = algorithm.rollout[keys.VALUES]
    for tensor in (tensors[keys.REWARDS], values, tensors[keys.FINAL_VALUES]):
        tensor.normal_(generator=generator)
    for name in (keys.TERMINATED, keys.TRUNCATED):
        tensors[name].copy_(torch.rand(8, 16, generator=generator) < 0.2)
    tensors[keys.FINAL_VALUES][~tensors[keys.TRUNCATED]] = torch.nan  # never read there
    made, _ = algorithm.targets(tensors)
    named = (0.5 * tensors[keys.REWARDS], values, *(tensors[name] for name in ENDS))
    for copy in range(16):
        columns = [each[:, copy].tolist() for each in named]
        expected = [lambda_return(t, *columns, gamma, q_lambda) for t in range(8)]
        assert made[keys.RETURNS][:, copy].tolist() == pytest.approx(expected, abs=1e-4)


# -- the update


@pytest.mark.parametrize("dueling", [False, True])
@pytest.mark.parametrize("env", [CartPole, Masked])
def test_one_update_equals_plain_autograd_and_torchs_radam(env, dueling):
    options = {"gamma": 0.9, "q_lambda": 0.7, "lr": 1e-3, "dueling": dueling}
    algorithm = tiny(env, num_sgd_iters=1, sgd_minibatch_size=None, max_grad_norm=0.1, **options)
    algorithm.collect()
    twin = tiny(env, dueling=dueling).policy
    twin.load_state_dict(algorithm.policy.state_dict())
    rollout, model = algorithm.rollout, twin.model
    rewards, *ends = (rollout[name][:8] for name in (keys.REWARDS, *ENDS))
    obs, legal = seen(rollout.tensors, keys.OBS)
    hidden = model.actor(obs.float())
    q = model.policy_head(hidden)
    if dueling:
        q = q - torch.where(legal, q, 0.0).sum(-1, keepdim=True) / legal.expand_as(q).sum(-1, keepdim=True)
        q = q + model.value_head(hidden)
    torch.testing.assert_close(rollout[keys.VALUES], q.masked_fill(~legal, -torch.inf).amax(-1).detach())
    _, returns = generalized_advantages(rewards, rollout[keys.VALUES], *ends, gamma=0.9, gae_lambda=0.7)
    optimizer = torch.optim.RAdam(twin.parameters(), lr=1e-3)
    actions = rollout[keys.ACTIONS][:8] - int(env.single_action_space.start)
    taken = q[:8].gather(-1, actions.unsqueeze(-1)).squeeze(-1)
    loss = 0.5 * (taken - returns).square().mean()
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_([w for w in twin.parameters() if w.grad is not None], 0.1)
    optimizer.step()
    stats = algorithm.step()
    expected = {"losses/q": loss, "monitors/q_values": taken.mean(), "monitors/grad_norm": norm}
    expected |= {"monitors/td_error": (taken - returns).abs().mean()}
    for name, number in expected.items():
        assert stats[name] == pytest.approx(number.item(), rel=1e-4), name
    for weight, wanted in zip(algorithm.policy.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(weight, wanted, atol=1e-6, rtol=1e-4)


# -- the algorithm


def test_epsilon_and_learning_rate_follow_the_clock():
    points = [[0, 1.0], [64, 0.0]]
    schedule = {"kind": "interp", "points": points}
    algorithm = tiny(epsilon_schedule=schedule, lr_schedule=schedule)
    assert algorithm.params["epsilon_schedule"] == schedule
    for collected in range(3):
        algorithm.collect()
        row = algorithm.step()
        assert row["coefficients/epsilon"] == pytest.approx(max(0.0, 1.0 - 32 * collected / 64))
        assert row["coefficients/lr"] == pytest.approx(max(0.0, 1.0 - 32 * (collected + 1) / 64))
    # Without randomness left, actions are greedy.
    algorithm.collect()
    rollout = algorithm.rollout
    q = algorithm.policy(rollout[keys.OBS][:8], {}, rollout[keys.STARTS][:8])
    assert torch.equal(rollout[keys.ACTIONS][:8], q.argmax(-1))


class Pixels(probes.ActionDecides):
    single_observation_space = Box(0, 255, (6, 6, 1), dtype=np.uint8)

    def observe(self, state, parameters):
        return state["x"].view(-1, 1, 1, 1).expand(-1, 6, 6, 1).to(torch.uint8)


def test_images_are_read_by_normalised_layers_unless_it_is_said_otherwise():
    algorithm = tiny(Pixels, model_config={"hidden_sizes": [8], "convolutions": [(2, 3, 2)]})
    kinds = [type(module).__name__ for module in algorithm.policy.modules()]
    assert (kinds.count("GroupNorm"), kinds.count("LayerNorm")) == (1, 1)
    algorithm.collect()
    assert math.isfinite(algorithm.step()["losses/q"])
    plain = tiny(Pixels, model_config={"hidden_sizes": [8], "convolutions": [(2, 3, 2)], "layer_norm": False})
    assert plain.params["model.layer_norm"] is False
    assert not any("Norm" in type(module).__name__ for module in plain.policy.modules())
