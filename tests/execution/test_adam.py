"""A step of Adam by torch's kernel, by the formula, and by torch.optim."""

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from rl8x.execution import adam, private

OPTIONS = [
    {"betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0, "decoupled": False},
    {"betas": (0.5, 0.9), "eps": 1e-3, "weight_decay": 0.1, "decoupled": False},
    {"betas": (0.0, 0.95), "eps": 1e-5, "weight_decay": 0.2, "decoupled": True},
]
GRADIENTS = torch.randn(5, 40, generator=torch.Generator().manual_seed(0))


def steps(options, lr=0.1):
    """Return weights and moments after five steps."""
    weights = torch.linspace(-1.0, 1.0, 40)
    moments = [torch.zeros(40), torch.zeros(40), torch.zeros(1)]
    for gradient in GRADIENTS:
        adam.apply_adam(weights, gradient.clone(), moments, torch.tensor(lr), **options)
    return [weights, *moments]


@pytest.mark.parametrize("kernel", [True, False])
@pytest.mark.parametrize("options", OPTIONS)
def test_steps_are_those_of_torch_optim(options, kernel, monkeypatch):
    if not kernel:
        monkeypatch.setattr(private, "fused_adam", lambda decoupled: None)
    weights = torch.nn.Parameter(torch.linspace(-1.0, 1.0, 40))
    given = {name: value for name, value in options.items() if name != "decoupled"}
    reference = (torch.optim.AdamW if options["decoupled"] else torch.optim.Adam)([weights], lr=0.1, **given)
    for gradient in GRADIENTS:
        weights.grad = gradient.clone()
        reference.step()
    found = steps(options)
    state = reference.state[weights]
    for one, other in zip(found, (weights.detach(), state["exp_avg"], state["exp_avg_sq"]), strict=False):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
    assert found[3].tolist() == [5.0]


@pytest.mark.parametrize("options", OPTIONS)
def test_a_trace_has_the_kernel_and_lowering_the_formula(options, monkeypatch):
    assert len(adam.DECOMPOSITIONS) == 2

    def step(weights, gradient, first, second, count, lr):
        adam.apply_adam(weights, gradient, [first, second, count], lr, **options)
        return [weights, first, second, count]

    def given():
        return [torch.linspace(-1.0, 1.0, 40), GRADIENTS[0], *GRADIENTS[1:3].abs(), torch.ones(1), torch.tensor(0.1)]

    traced = make_fx(step)(*given())
    lowered = make_fx(traced, decomposition_table=adam.DECOMPOSITIONS)(*given())
    assert "fused_adam" in traced.code
    assert "fused_adam" not in lowered.code
    assert all(map(torch.equal, traced(*given()), step(*given())))
    monkeypatch.setattr(private, "fused_adam", lambda decoupled: None)
    assert all(map(torch.equal, lowered(*given()), step(*given())))


def test_no_learning_moves_the_moments_alone():
    weights, *moments = steps(OPTIONS[0], lr=0.0)
    assert torch.equal(weights, torch.linspace(-1.0, 1.0, 40))
    assert all(bool(moment.any()) for moment in moments)


def test_this_torch_has_the_kernels_and_another_may_lack_them(monkeypatch):
    assert private.fused_adam(False) is not None
    assert private.fused_adam(True) is not None
    monkeypatch.setattr(torch.ops, "aten", object())
    assert private.fused_adam(False) is None
