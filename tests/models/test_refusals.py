"""What models and encoders refuse, each in a line that says what is legal."""

import threading

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Dict, Text

from rl8x.models import AttentionModel, CNNModel, GRUModel, MLPModel, Model, make_model
from rl8x.models.encoders import FlatObservations

OBS, IMAGE = Box(-1.0, 1.0, (5,), np.float32), Box(0, 255, (8, 9, 3), np.uint8)


class Mine(Model):
    def __init__(self, observation_space, num_features, width=3):
        super().__init__(observation_space, num_features)
        self.width = width


LOCKED = Mine(OBS, 2)
LOCKED.lock = threading.Lock()
REFUSED = [
    ("Did you mean 'lstm'.*mlp, lstm, gru, cnn, attention", lambda: make_model("lsmt", OBS, 2)),
    ("Did you mean 'lstm'", lambda: make_model("LSTM", OBS, 2)),
    ("'hidden_size' of MLPModel.* It is 'hidden_sizes' here", lambda: make_model("mlp", OBS, 2, {"hidden_size": 3})),
    ("It is 'hidden_size' here", lambda: make_model("lstm", OBS, 2, {"hidden_sizes": 3})),
    ("width", lambda: make_model(Mine, OBS, 2, {"depth": 3})),
    ("not an instance of Mine", lambda: make_model(Mine(OBS, 2), OBS, 2, {"width": 3})),
    ("num_features=3.*needs 2", lambda: make_model(Mine(OBS, 3), OBS, 2)),
    (r"a copy of the Mine given, .*lock.*: give the class, and its arguments", lambda: make_model(LOCKED, OBS, 2)),
    *(("subclass of Model", lambda spec=spec: make_model(spec, OBS, 2)) for spec in (torch.nn.Linear, 5)),
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
