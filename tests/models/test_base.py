from __future__ import annotations

import numpy as np
import torch
from gymnasium.spaces import Box

from rl8x.models import Model


class Doubler(Model):
    def forward(self, obs, state, starts):
        return obs * 2, obs.sum(-1), state


def test_a_model_needs_forward_alone():
    model = Doubler(Box(-1.0, 1.0, (2,), np.float32), 2)
    obs, starts = torch.randn(3, 4, 2), torch.zeros(3, 4, dtype=torch.bool)
    assert not model.recurrent
    assert model.initial_state(4) == {}
    assert torch.equal(model.values(obs, {}, starts), obs.sum(-1))
    assert (model.num_features, model.observation_space.shape) == (2, (2,))
