"""What the models without a memory compute, and what encodes their observations."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.spaces import Box, Dict, Discrete, Tuple
from torch.nn import functional

from rl8x.models import CNNModel, MLPModel
from rl8x.models.encoders import FlatObservations, ImageEncoder, ObservationEncoder, is_image
from rl8x.spaces import tree_of

OBS = Box(-1.0, 1.0, (5,), np.float32)
STARTS = torch.zeros(3, 4, dtype=torch.bool)


@pytest.mark.parametrize("hidden_sizes", [(7, 6), ()], ids=["two layers", "linear"])
def test_the_arithmetic_is_two_perceptrons(hidden_sizes):
    model = MLPModel(OBS, 3, hidden_sizes=hidden_sizes, activation="tanh", policy_gain=1.0)
    obs = torch.randn(3, 4, 5)
    features, values, state = model(obs, {}, STARTS)
    weights = dict(model.named_parameters())

    def perceptron(trunk: str, head: str) -> torch.Tensor:
        x = obs
        for i in range(len(hidden_sizes)):
            x = torch.tanh(functional.linear(x, weights[f"{trunk}.{2 * i}.weight"], weights[f"{trunk}.{2 * i}.bias"]))
        return functional.linear(x, weights[f"{head}.weight"], weights[f"{head}.bias"])

    assert torch.equal(features, perceptron("actor", "policy_head"))
    assert torch.equal(values, perceptron("critic", "value_head")[..., 0])
    assert state == {}


def test_values_alone_skip_the_actor():
    model = MLPModel(OBS, 3, hidden_sizes=(8,))
    model.actor.forward = model.policy_head.forward = None
    model.values(torch.randn(3, 4, 5), {}, STARTS)


def test_initial_weights_are_orthogonal_with_the_stated_gains():
    model = MLPModel(OBS, 3, hidden_sizes=(32, 16))
    trained = [model.actor[0], model.actor[2], model.critic[0], model.critic[2], model.policy_head, model.value_head]
    for layer, gain in zip(trained, [*[math.sqrt(2)] * 4, 0.01, 1.0], strict=True):
        weight = layer.weight if layer.out_features <= layer.in_features else layer.weight.T
        torch.testing.assert_close(weight @ weight.T / gain**2, torch.eye(len(weight)), atol=1e-5, rtol=0.0)
        assert not layer.bias.any()


@pytest.mark.parametrize("separate", [0, 3])
def test_uniform_weights_begin_as_those_of_pytorchs_layers(separate):
    model = MLPModel(OBS, 400, hidden_sizes=(300, 200), init="uniform", separate=separate)
    model_weights = [weight for name, weight in model.named_parameters() if name.endswith("weight")]
    own = [torch.nn.Linear(*ends).weight for ends in [(5, 300), (300, 200)] * 2 + [(200, 400), (200, 1)]]
    for weights, expected in zip(model_weights, own, strict=True):
        assert weights.abs().max() <= expected.shape[1] ** -0.5
        if len(expected) > 1:
            torch.testing.assert_close(weights.std(), expected.std(), rtol=0.1, atol=0.0)
            torch.testing.assert_close(weights.abs().max(), expected.abs().max(), rtol=0.01, atol=0.0)
    assert all(not weight.any() for name, weight in model.named_parameters() if name.endswith("bias"))
    with pytest.raises(ValueError, match="`init` must be 'orthogonal' or 'uniform'; got 'xavier'"):
        MLPModel(OBS, 3, init="xavier")


# -- convolutions


IMAGE = Box(0, 255, (8, 9, 3), np.uint8)
TWO_STEPS = torch.zeros(2, 3, dtype=torch.bool)


def images(*shape: int) -> torch.Tensor:
    return torch.randint(256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("layer_norm", [True, False])
def test_the_arithmetic_is_convolutions_and_a_perceptron(shared, layer_norm):
    options = {"convolutions": [(5, 3, 2), (4, 2, 1)], "hidden_sizes": (6,), "shared": shared, "policy_gain": 1.0}
    model = CNNModel(IMAGE, 4, layer_norm=layer_norm, **options)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.3 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(2)))
    obs = images(2, 3, 8, 9, 3)

    def hidden(trunk):
        """With all channels of an image normalised together before each activation, if at all."""
        convolutions, x = [*trunk[0].parts[0].convolutions], obs.float().flatten(0, 1).permute(0, 3, 1, 2) / 255
        for stride in (2, 1):
            layer = convolutions.pop(0)
            x = functional.conv2d(x, layer.weight, layer.bias, stride=stride)
            if layer_norm:
                scale = convolutions.pop(0)
                mean, variance = x.mean((1, 2, 3), keepdim=True), x.var((1, 2, 3), correction=0, keepdim=True)
                x = (x - mean) / (variance + 1e-5).sqrt() * scale.weight.view(-1, 1, 1) + scale.bias.view(-1, 1, 1)
            convolutions.pop(0)
            x = torch.relu(x)
        x = trunk[1][0](x.flatten(1))
        x = functional.layer_norm(x, (6,), trunk[1][1].weight, trunk[1][1].bias) if layer_norm else x
        return torch.relu(x).unflatten(0, (2, 3))

    features, values, state = model(obs, {}, TWO_STEPS)
    torch.testing.assert_close(features, model.policy_head(hidden(model.actor)), atol=1e-5, rtol=1e-5)
    expected = model.value_head(hidden(model.actor if shared else model.critic))[..., 0]
    torch.testing.assert_close(values, expected, atol=1e-5, rtol=1e-5)
    assert torch.allclose(model.values(obs, {}, TWO_STEPS), values, atol=1e-6)
    assert (state, features.shape) == ({}, (2, 3, 4))
    # 84 -> (84 - 8) / 4 + 1 = 20 -> (20 - 4) / 2 + 1 = 9 -> 9 - 3 + 1 = 7; 64 x 7 x 7 = 3136.
    assert CNNModel(Box(0, 255, (4, 84, 84), np.uint8), 4).actor[0].width == 3136


def test_other_parts_join_what_the_convolutions_give():
    space = Dict({"image": IMAGE, "speed": Box(-1, 1, (2,), np.float32)})
    model = CNNModel(space, 4, convolutions=[(5, 3, 2)], hidden_sizes=(6,), shared=False, critic_obs=["speed"])
    # 8 x 9 by 3 x 3 with stride 2 is 3 x 4, of 5 channels 60; the critic has 2 numbers more.
    assert (model.actor[0].width, model.critic[0].width) == (60, 62)
    obs = {"image": images(2, 3, 8, 9, 3), "speed": torch.randn(2, 3, 2)}
    features, values, _ = model(obs, {}, TWO_STEPS)
    others = model(obs | {"speed": obs["speed"] + 1}, {}, TWO_STEPS)
    assert torch.equal(features, others[0])
    assert not torch.allclose(values, others[1])


# -- encoders


def encoder_of(space, channels):
    return ImageEncoder(space, [(4, 2, 1)], "relu", channels)


def test_channels_first_last_and_by_their_number():
    assert encoder_of(Box(0, 1, (5, 6, 7), np.float32), "last").shape == (7, 5, 6)
    assert encoder_of(Box(0, 1, (7, 6, 5), np.float32), "first").shape == (7, 6, 5)
    assert encoder_of(Box(0, 1, (7, 6, 3), np.float32), "auto").shape == (3, 7, 6)
    assert encoder_of(Box(0, 1, (3, 7, 6), np.float32), "auto").shape == (3, 7, 6)
    assert encoder_of(Box(0, 255, (7, 6), np.uint8), "auto").shape == (1, 7, 6)


def test_floats_are_taken_as_they_are_and_whole_numbers_scaled():
    obs = torch.randn(2, 3, 8, 9, 3)
    encoder = encoder_of(Box(-1.0, 1.0, (8, 9, 3), np.float32), "auto")
    assert torch.equal(encoder.images(obs), obs.flatten(0, 1).permute(0, 3, 1, 2))
    whole = torch.tensor([0, 51, 255], dtype=torch.uint8).expand(1, 1, 5, 5, 3)
    scaled = encoder_of(Box(0, 255, (5, 5, 3), np.uint8), "auto").images(whole)
    assert scaled[0, :, 0, 0].tolist() == pytest.approx([0.0, 0.2, 1.0])
    for low, high, numbers, expected in (
        (10, 20, [10, 20], [0.0, 1.0]),
        (-np.inf, np.inf, [0, 1, 5], [0.0, 1.0, 5.0]),  # without bounds they stay as they are
        (0, np.inf, [0, 1, 5], [0.0, 1.0, 5.0]),
        (3, 3, [3, 3], [0.0, 0.0]),
    ):
        flat = torch.tensor(numbers).expand(1, 1, 6, len(numbers))
        encoder = encoder_of(Box(low, high, (6, len(numbers)), np.int64), "auto")
        assert encoder.images(flat)[0, 0, 0].tolist() == expected


@pytest.mark.parametrize(
    ("space", "image"),
    [
        (Box(0, 255, (84, 84, 3), np.uint8), True),
        (Box(0, 1, (4, 84, 84), np.float32), True),
        (Box(0, 255, (84, 84), np.uint8), True),
        (Box(0, 1, (84, 84), np.float32), False),  # a matrix
        (Box(0, 255, (3, 4, 3), np.uint8), False),  # too small for two kernels of 3 x 3
        (Box(0, 255, (84,), np.uint8), False),
        (Discrete(5), False),
    ],
)
def test_which_spaces_are_images(space, image):
    assert is_image(space) is image


def test_parts_are_joined_in_the_order_of_the_space():
    space = Dict({"a": Box(-1, 1, (2,), np.float32), "b": Tuple([Box(0, 255, (5, 6, 3), np.uint8), Discrete(3)])})
    encoder = ObservationEncoder(space, convolutions=[(4, 5, 1)], activation="tanh")
    # 5 x 6 by 5 x 5 is 1 x 2, of 4 channels 8.
    assert encoder.leaf_widths == [2, 8, 3]
    image = torch.randint(256, (2, 3, 5, 6, 3), dtype=torch.uint8)
    obs = {"a": torch.randn(2, 3, 2), "b": {"0": image, "1": torch.tensor([[0, 1, 2], [2, 1, 0]])}}
    encoded = encoder(obs)
    assert encoded.shape == (2, 3, encoder.width) == (2, 3, 13)
    assert torch.equal(encoded[..., :2], obs["a"])
    layer = encoder.parts[1].convolutions[0]
    patch = image[1, 2, :, :5].permute(2, 0, 1).float() / 255
    by_hand = torch.tanh((layer.weight * patch).sum((1, 2, 3)) + layer.bias)
    assert torch.allclose(encoded[1, 2, 2:10:2], by_hand, atol=1e-5)
    assert encoded[0, :, 10:].argmax(-1).tolist() == [0, 1, 2]


SPACE = spaces.Dict(
    {
        "vector": spaces.Box(-1, 1, (2,), np.float32),
        "grid": spaces.Box(-1, 1, (2, 3), np.float32),
        "number": spaces.Box(0, 9, (), np.float64),
        "one": spaces.Discrete(3, start=5),
        "many": spaces.MultiDiscrete([2, 3], start=[0, 1]),
        "bits": spaces.MultiBinary(3),
        "pair": spaces.Tuple([spaces.Discrete(2), spaces.Box(-1, 1, (1,), np.float32)]),
    }
)


def test_every_kind_of_space_agrees_with_gymnasiums_flattening():
    SPACE.seed(0)
    flat = FlatObservations(SPACE)
    for _ in range(20):
        sample = SPACE.sample()
        vector = flat(tree_of(sample, lambda part: torch.as_tensor(np.asarray(part))[None, None]))
        # Gymnasium too one-hot encodes, and joins the parts in the order of the space.
        assert vector[0, 0].tolist() == pytest.approx(spaces.flatten(SPACE, sample).tolist(), abs=1e-6)
        assert vector.shape == (1, 1, flat.width)
        assert vector.dtype == torch.float32
    obs, vector = torch.randn(2, 3, 4), FlatObservations(Box(-1, 1, (4,), np.float32))
    assert (vector.width, vector(obs) is obs) == (4, True)  # which is a vector already
