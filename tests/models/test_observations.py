from __future__ import annotations

import numpy as np
import pytest
import torch
from gymnasium import spaces

from rl8x.models.observations import FlatObservations


def test_a_vector_is_returned_as_it_is():
    obs = torch.randn(2, 3, 4)
    flat = FlatObservations(spaces.Box(-1, 1, (4,), np.float32))
    assert flat.width == 4
    assert flat(obs) is obs


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


def keyed(sample, space):
    """Turn a sample of a space into tensors of `[1, 1, ...]`, tuples into dicts."""
    if isinstance(space, spaces.Dict):
        return {key: keyed(sample[key], part) for key, part in space.spaces.items()}
    if isinstance(space, spaces.Tuple):
        return {str(i): keyed(sample[i], part) for i, part in enumerate(space.spaces)}
    return torch.as_tensor(np.asarray(sample))[None, None]


def test_every_kind_of_space_agrees_with_gymnasiums_flattening():
    SPACE.seed(0)
    flat = FlatObservations(SPACE)
    for _ in range(20):
        sample = SPACE.sample()
        vector = flat(keyed(sample, SPACE))
        # Gymnasium too one-hot encodes, and joins the parts in the order of the space.
        assert vector[0, 0].tolist() == pytest.approx(spaces.flatten(SPACE, sample).tolist(), abs=1e-6)
        assert vector.shape == (1, 1, flat.width)
        assert vector.dtype == torch.float32


def test_one_hot_by_hand():
    flat = FlatObservations(spaces.Discrete(3, start=1))
    assert flat(torch.tensor([[1, 3]])).tolist() == [[[1.0, 0.0, 0.0], [0.0, 0.0, 1.0]]]
    many = FlatObservations(spaces.MultiDiscrete([[2, 2], [1, 2]]))
    assert many.width == 7
    assert many(torch.tensor([[1, 0], [0, 1]])).tolist() == [0.0, 1.0, 1.0, 0.0, 1.0, 0.0, 1.0]


def test_a_space_without_a_flat_form_is_refused():
    with pytest.raises(TypeError, match="Pass a Model of your own"):
        FlatObservations(spaces.Text(5))
    with pytest.raises(TypeError, match="Text"):
        FlatObservations(spaces.Dict({"a": spaces.Text(5)}))
