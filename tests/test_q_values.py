from __future__ import annotations

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Discrete
from hypothesis import given, settings
from hypothesis import strategies as st

from rl8x.q_values import QPolicy, q_values

OBS = Box(-1.0, 1.0, (3,), np.float32)


@given(st.data())
@settings(max_examples=50, deadline=None)
def test_values_are_those_of_a_loop_over_the_legal_actions(data):
    n, dueling = data.draw(st.integers(1, 6)), data.draw(st.booleans())
    features = data.draw(st.lists(st.floats(-5, 5, width=32), min_size=n, max_size=n))
    legal = data.draw(st.lists(st.booleans(), min_size=n, max_size=n))
    value = data.draw(st.floats(-5, 5, width=32))
    allowed = [a for a in range(n) if legal[a]] or list(range(n))
    mean = sum(features[a] for a in allowed) / len(allowed)
    expected = [(value + x - mean if dueling else x) if a in allowed else -np.inf for a, x in enumerate(features)]
    found = q_values(torch.tensor([features]), torch.tensor([value]), torch.tensor([legal]), dueling=dueling)
    assert found[0].tolist() == pytest.approx(expected, abs=1e-5)
    if all(legal):
        unmasked = q_values(torch.tensor([features]), torch.tensor([value]), dueling=dueling)
        assert torch.allclose(found, unmasked, atol=1e-6)


def test_no_gradient_reaches_illegal_actions_and_all_are_finite():
    features, values = torch.randn(4, 3).requires_grad_(), torch.randn(4).requires_grad_()
    legal = torch.tensor([[True, False, True]]).expand(4, 3)
    q_values(features, values, legal, dueling=True).amax(-1).sum().backward()
    assert bool((features.grad[:, 1] == 0).all())
    assert bool(features.grad.isfinite().all())
    assert torch.equal(values.grad, torch.ones(4))


def make(dueling, space=OBS, start=0):
    torch.manual_seed(0)
    config = {"hidden_sizes": [8], "policy_gain": 1.0}
    return QPolicy(space, Discrete(3, start=start), model_config=config, dueling=dueling)


@pytest.mark.parametrize("dueling", [False, True])
def test_the_policy_acts_by_the_highest_of_its_values(dueling):
    policy = make(dueling, start=2)
    obs, starts = torch.randn(5, 7, 3), torch.zeros(5, 7, dtype=torch.bool)
    q = policy(obs, {}, starts)
    assert q.shape == (5, 7, 3)
    act = policy.act(obs[1], {}, starts[1])
    assert torch.equal(act.actions, q[1].argmax(-1) + 2)
    assert torch.equal(policy.indices(act.actions), q[1].argmax(-1))
    torch.testing.assert_close(policy.values(obs[1], {}, starts[1]), q[1].amax(-1))
    features, values, _ = policy.predict(obs, {}, starts)
    assert torch.allclose(q.mean(-1), values if dueling else features.mean(-1), atol=1e-5)


@pytest.mark.parametrize("dueling", [False, True])
def test_a_mask_in_the_observation_rules_actions_out_of_values_and_maxima(dueling):
    space = gymnasium.spaces.Dict({"x": OBS, "action_mask": Box(0, 1, (3,), np.int8)})
    policy, starts = make(dueling, space), torch.zeros(1, 2, dtype=torch.bool)
    mask = torch.tensor([[0, 1, 1], [1, 0, 0]], dtype=torch.int8)
    obs = {"x": torch.randn(2, 3), "action_mask": mask}
    q = policy({name: part[None] for name, part in obs.items()}, {}, starts)[0]
    assert torch.equal(q.isfinite(), mask.bool())
    best = [max(q[0, 1:].tolist()), q[1, 0].item()]
    assert policy.values(obs, {}, starts[0]).tolist() == pytest.approx(best)
    assert policy.act(obs, {}, starts[0], torch.rand(2, 1)).values.tolist() == pytest.approx(best)
