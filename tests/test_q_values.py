from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rl8x.q_values import q_values


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
