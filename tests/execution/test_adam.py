"""A step of Adam by the formula that programs have, and by the kernel that algorithms/test_optimizer.py checks."""

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


@pytest.mark.parametrize("options", OPTIONS)
def test_the_formula_computes_what_the_kernel_does(options):
    def step(weights, gradient, first, second, count, lr):
        Adam(**options).apply(weights, gradient, [first, second, count], lr)
        return [weights, first, second, count]

    traced = make_fx(step)(*given())
    lowered = make_fx(traced, decomposition_table=kernels.ADAM)(*given())
    assert ("fused_adam" in traced.code, "fused_adam" in lowered.code) == (True, False)
    mine, its = given(), given()
    for i, gradient in enumerate((*GRADIENTS, GRADIENTS[0])):
        for function, each in ((lowered, mine), (step, its)):
            each[1] = gradient.clone()
            each[-1].fill_(0.1 if i < 5 else 0.0)  # at last only the moments are moved
            function(*each)
        torch.testing.assert_close(mine, its, rtol=1e-5, atol=1e-6)
