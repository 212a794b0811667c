from __future__ import annotations

import pytest
import torch

from rl8x.nn import ACTIVATIONS, activation


def test_values_by_hand():
    x = torch.tensor([-2.0, 0.0, 3.0])
    assert activation("relu")(x).tolist() == [0.0, 0.0, 3.0]
    assert activation("squared_relu")(x).tolist() == [0.0, 0.0, 9.0]
    assert activation("identity")(x).tolist() == [-2.0, 0.0, 3.0]
    assert activation("silu")(x).tolist() == pytest.approx([-2 * 0.1192029, 0.0, 3 * 0.9525741], abs=1e-6)
    assert activation("tanh")(x).tolist() == pytest.approx([-0.9640276, 0.0, 0.9950548], abs=1e-6)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_every_activation_is_elementwise_and_has_gradients(name):
    x = torch.randn(3, 5, requires_grad=True)
    y = activation(name)(x)
    assert y.shape == x.shape
    assert torch.allclose(activation(name)(x[1, 2]), y[1, 2])
    y.sum().backward()
    assert bool(x.grad.isfinite().all())


def test_an_unknown_name_gets_the_nearest():
    with pytest.raises(ValueError, match=r"no activation 'squared-relu'. Did you mean 'squared_relu'"):
        activation("squared-relu")
