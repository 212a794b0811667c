import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rl8x.functional import expectation, project


@settings(max_examples=60, deadline=None)
@given(st.integers(2, 30), st.floats(-20, 0), st.floats(0.5, 20), st.integers(0, 2**30))
def test_projected_distributions_sum_to_1_and_keep_the_mean(num_atoms, low, width, seed):
    generator = torch.Generator().manual_seed(seed)
    atoms = torch.linspace(low, low + width, num_atoms)
    probs = torch.rand(4, num_atoms, generator=generator).softmax(-1)
    inside = low + width * torch.rand(4, num_atoms, generator=generator)
    result = project(probs, inside, atoms)
    assert (result >= 0).all()
    torch.testing.assert_close(result.sum(-1), torch.ones(4), atol=1e-5, rtol=0)
    torch.testing.assert_close(result @ atoms, (probs * inside).sum(-1), atol=1e-4 * max(1, abs(low) + width), rtol=0)
    anywhere = 100 * torch.randn(4, num_atoms, generator=generator)
    outside = project(probs, anywhere, atoms)
    torch.testing.assert_close(outside.sum(-1), torch.ones(4), atol=1e-5, rtol=0)


def test_probability_is_shared_by_the_two_atoms_beside_a_value():
    """By hand: 0.25 lies between 0 and 1, 3 beyond the last atom, -1 is one itself."""
    atoms = torch.tensor([-1.0, 0.0, 1.0])
    result = project(torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.25, 3.0, -1.0]), atoms)
    torch.testing.assert_close(result, torch.tensor([0.2, 0.375, 0.125 + 0.3]))


def test_the_expectation_is_the_mean():
    logits = torch.tensor([[0.0, 0.0, 0.0], [0.0, -1e9, 0.0], [-1e9, 0.0, 0.0]])
    torch.testing.assert_close(expectation(logits, torch.tensor([-1.0, 0.0, 4.0])), torch.tensor([1.0, 1.5, 2.0]))
