"""A step of Adam by torch's kernel, by the formula that programs have in its place, and by torch.optim."""

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from rl8x.algorithms.optimizer import Adam
from rl8x.execution import kernels

OPTIONS = [
    {"betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0, "decoupled": False},
    {"betas": (0.5, 0.9), "eps": 1e-3, "weight_decay": 0.1, "decoupled": False},
    {"betas": (0.0, 0.95), "eps": 1e-5, "weight_decay": 0.2, "decoupled": True},
]
GRADIENTS = torch.randn(5, 40, generator=torch.Generator().manual_seed(0))


def given():
    """Return weights, a gradient, moments with the count of steps, and the learning rate."""
    return [torch.linspace(-1.0, 1.0, 40), GRADIENTS[0], *torch.zeros(2, 40), torch.zeros(1), torch.tensor(0.1)]


def by_kernel(options):
    def step(weights, gradient, first, second, count, lr):
        Adam(**options).apply(weights, gradient, [first, second, count], lr)
        return [weights, first, second, count]

    return step


def by_formula(options):
    traced = make_fx(by_kernel(options))(*given())
    lowered = make_fx(traced, decomposition_table=kernels.ADAM)(*given())
    assert "fused_adam" in traced.code
    assert "fused_adam" not in lowered.code
    assert all(map(torch.equal, traced(*given()), by_kernel(options)(*given())))
    return lowered


@pytest.mark.parametrize("make", [by_kernel, by_formula])
@pytest.mark.parametrize("options", OPTIONS)
def test_steps_are_those_of_torch_optim(options, make):
    parameter = torch.nn.Parameter(torch.linspace(-1.0, 1.0, 40))
    rest = {name: value for name, value in options.items() if name != "decoupled"}
    reference = (torch.optim.AdamW if options["decoupled"] else torch.optim.Adam)([parameter], lr=0.1, **rest)
    step, (weights, _, first, second, count, lr) = make(options), given()
    for gradient in GRADIENTS:
        parameter.grad = gradient.clone()
        reference.step()
        step(weights, gradient.clone(), first, second, count, lr)
    state = reference.state[parameter]
    for one, other in zip((weights, first, second), (parameter, state["exp_avg"], state["exp_avg_sq"]), strict=True):
        torch.testing.assert_close(one, other.detach(), rtol=1e-5, atol=1e-6)
    assert count.tolist() == [5.0]
    before, means = weights.clone(), second.clone()
    step(weights, gradient.clone(), first, second, count, torch.tensor(0.0))  # moves the moments alone
    assert torch.equal(weights, before)
    assert not torch.equal(second, means)
