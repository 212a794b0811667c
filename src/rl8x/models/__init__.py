"""Models: networks from observations to features and values."""

from rl8x.models.base import BUILTIN as BUILTIN
from rl8x.models.base import Model as Model
from rl8x.models.base import State as State
from rl8x.models.base import make_model as make_model
from rl8x.models.base import model_class as model_class
from rl8x.models.mlp import CNNModel as CNNModel
from rl8x.models.mlp import Head as Head
from rl8x.models.mlp import MLPModel as MLPModel
from rl8x.models.recurrent import AttentionModel as AttentionModel
from rl8x.models.recurrent import GRUModel as GRUModel
from rl8x.models.recurrent import LSTMModel as LSTMModel
from rl8x.models.recurrent import RecurrentModel as RecurrentModel

BUILTIN.update(mlp=MLPModel, lstm=LSTMModel, gru=GRUModel, cnn=CNNModel, attention=AttentionModel)
