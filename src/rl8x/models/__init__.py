"""Models: networks from observations to features and values."""

from rl8x.models.base import BUILTIN, Model, State, make_model, model_class
from rl8x.models.mlp import CNNModel, Head, MLPModel
from rl8x.models.recurrent import AttentionModel, GRUModel, LSTMModel, RecurrentModel

BUILTIN.update(mlp=MLPModel, lstm=LSTMModel, gru=GRUModel, cnn=CNNModel, attention=AttentionModel)

__all__ = [
    "BUILTIN",
    "AttentionModel",
    "CNNModel",
    "GRUModel",
    "Head",
    "LSTMModel",
    "MLPModel",
    "Model",
    "RecurrentModel",
    "State",
    "make_model",
    "model_class",
]
