"""What models and encoders refuse, each in a line that says what is legal."""

import numpy as np
import pytest
from gymnasium.spaces import Box, Dict, Text

from rl8x.models import AttentionModel, CNNModel, GRUModel, MLPModel
from rl8x.models.encoders import FlatObservations

OBS, IMAGE = Box(-1.0, 1.0, (5,), np.float32), Box(0, 255, (8, 9, 3), np.uint8)
REFUSED = [
    *(
        ("hidden_sizes", lambda sizes=sizes: MLPModel(OBS, 2, hidden_sizes=sizes))
        for sizes in (3, "64", (64, 0), (True,))
    ),
    ("Did you mean 'relu'", lambda: MLPModel(OBS, 2, activation="relou")),
    *(("hidden_size", lambda size=size: GRUModel(OBS, 2, hidden_size=size)) for size in (0, "8")),
    ("encoder_sizes", lambda: GRUModel(OBS, 2, encoder_sizes=8)),
    *(("window", lambda window=window: AttentionModel(OBS, 3, window=window)) for window in (1, 0, 2.5)),
    ("rank 3", lambda: CNNModel(OBS, 2)),
    ("kernel of 9 does not fit the 8 x 9", lambda: CNNModel(IMAGE, 2, convolutions=[(4, 9, 1)])),
    ("channels, kernel, stride", lambda: CNNModel(IMAGE, 2, convolutions=[(4, 3)])),
    ("'auto', 'first' or 'last'", lambda: CNNModel(IMAGE, 2, channels="middle")),
    ("Pass a Model of your own", lambda: FlatObservations(Text(5))),
    ("Text", lambda: FlatObservations(Dict({"a": Text(5)}))),
]


@pytest.mark.parametrize(("message", "make"), REFUSED)
def test_what_is_not_legal_is_refused_with_what_is(message, make):
    with pytest.raises((ValueError, TypeError), match=message):
        make()
