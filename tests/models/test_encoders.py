"""Encoders and what they encode."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.spaces import Box, Dict, Discrete, Tuple

from rl8x.models.encoders import FlatObservations, ImageEncoder, ObservationEncoder, is_image
from rl8x.spaces import tree_of


def images(space, channels):
    return ImageEncoder(space, [(4, 2, 1)], "relu", channels)


def test_channels_first_last_and_by_their_number():
    assert images(Box(0, 1, (5, 6, 7), np.float32), "last").shape == (7, 5, 6)
    assert images(Box(0, 1, (7, 6, 5), np.float32), "first").shape == (7, 6, 5)
    assert images(Box(0, 1, (7, 6, 3), np.float32), "auto").shape == (3, 7, 6)
    assert images(Box(0, 1, (3, 7, 6), np.float32), "auto").shape == (3, 7, 6)
    assert images(Box(0, 255, (7, 6), np.uint8), "auto").shape == (1, 7, 6)


def test_floats_are_taken_as_they_are_and_whole_numbers_scaled():
    obs = torch.randn(2, 3, 8, 9, 3)
    encoder = images(Box(-1.0, 1.0, (8, 9, 3), np.float32), "auto")
    assert torch.equal(encoder.images(obs), obs.flatten(0, 1).permute(0, 3, 1, 2))
    whole = torch.tensor([0, 51, 255], dtype=torch.uint8).expand(1, 1, 5, 5, 3)
    scaled = images(Box(0, 255, (5, 5, 3), np.uint8), "auto").images(whole)
    assert scaled[0, :, 0, 0].tolist() == pytest.approx([0.0, 0.2, 1.0])
    for low, high, numbers, expected in (
        (10, 20, [10, 20], [0.0, 1.0]),
        (-np.inf, np.inf, [0, 1, 5], [0.0, 1.0, 5.0]),  # without bounds they stay as they are
        (0, np.inf, [0, 1, 5], [0.0, 1.0, 5.0]),
        (3, 3, [3, 3], [0.0, 0.0]),
    ):
        flat = torch.tensor(numbers).expand(1, 1, 6, len(numbers))
        encoder = images(Box(low, high, (6, len(numbers)), np.int64), "auto")
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
