"""Critics Q(s, a): several networks as one.

Source: Fujimoto et al. 2018, arXiv:1802.09477 (the smaller one of two critics).
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import gymnasium
import torch
from torch import Tensor, nn

from rl8x.models.encoders import FlatObservations
from rl8x.nn.layers import LayerNormStack, LinearStack
from rl8x.nn.layers import activation as make_activation
from rl8x.nn.mlp import HIDDEN_GAIN, check_sizes, perceptron, plain_layers


class Critics(nn.Module):
    """Perceptrons Q_1 to Q_n of observations and actions, with a batched product for each layer of all of them.

    For a `Discrete` action space they read observations alone and give the values of all actions. Weights begin as
    those of the built-in models do. The heads compute in float32 whatever the precision. Actions are read in the units
    of the action space, not scaled to its bounds.

    Args:
        observation_space: Space of one copy's observation, without an action mask; it is laid out flat.
        action_space: Space of one copy's action, a `Box` or a `Discrete`.
        num_critics: How many.
        hidden_sizes: Widths of the hidden layers of each.
        activation: Name of the activation after each hidden layer.
        layer_norm: Whether the outputs of hidden layers are normalised before it.
        num_outputs: Numbers for each value: 1, or the logits of a categorical distribution's atoms.

    Attributes:
        autocast: Makes the context in which hidden layers run; set where they run in another precision.
    """

    def __init__(
        self,
        observation_space: gymnasium.Space[Any],
        action_space: gymnasium.Space[Any],
        *,
        num_critics: int = 2,
        hidden_sizes: Sequence[int] = (256, 256),
        activation: str = "relu",
        layer_norm: bool = False,
        num_outputs: int = 1,
    ) -> None:
        super().__init__()
        check_sizes("critic_hidden_sizes", hidden_sizes)
        self.autocast: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext
        self.num_critics = num_critics
        self.flat = FlatObservations(observation_space)
        discrete = isinstance(action_space, gymnasium.spaces.Discrete)
        self.flat_actions = None if discrete else FlatObservations(action_space)
        width = self.flat.width + (self.flat_actions.width if self.flat_actions else 0)
        # The axes of a result after those of critics and rows.
        self.shape = [int(action_space.n)] if isinstance(action_space, gymnasium.spaces.Discrete) else []
        self.shape += [num_outputs] if num_outputs > 1 else []
        layers: list[nn.Module] = []
        for num_inputs, size in itertools.pairwise([width, *hidden_sizes]):
            layers.append(LinearStack(num_critics, num_inputs, size, HIDDEN_GAIN))
            if layer_norm:
                layers.append(LayerNormStack(num_critics, size))
            layers.append(make_activation(activation))
        self.hidden = nn.Sequential(*layers)
        num_heads = int(torch.Size(self.shape).numel())
        self.num_activations = sum(hidden_sizes) + num_heads
        self.head = LinearStack(num_critics, [width, *hidden_sizes][-1], num_heads, 1.0)

    def forward(self, obs: Any, actions: Tensor | None = None) -> Tensor:
        """Return the values of all critics.

        Args:
            obs: Observations as the policy's model sees them (`Policy.model_inputs`), `[batch_size, *obs]` or a dict.
            actions: Those of the environment, `[batch_size, *action]`; None for a `Discrete` space.

        Returns:
            `[num_critics, batch_size]`, with further axes `num_actions` where actions are discrete and `num_outputs`
            where there are several for a value.
        """
        x = self.flat(obs)
        if self.flat_actions is not None:
            x = torch.cat([x, self.flat_actions(actions)], -1)
        x = x.expand(self.num_critics, *x.shape)
        with self.autocast():
            layers = plain_layers([*self.hidden, self.head], x, self.num_activations)
            x = x if layers else self.hidden(x)
        values: Tensor = perceptron(x, layers) if layers else self.head(x.float())
        return values.view(*values.shape[:-1], *self.shape)


def action_values(
    critics: Callable[..., Tensor], obs: Any, actions: Tensor, action_space: gymnasium.Space[Any]
) -> Tensor:
    """Return Q_i(s, a) of recorded actions, `[num_critics, batch_size]`, or with atoms `[..., num_atoms]`.

    Args:
        critics: A `Critics`, or a call of one under other weights.
        obs: Observations, `[batch_size, *obs]` or a dict of such.
        actions: Those of the environment, `[batch_size, *action]`.
        action_space: Space of one copy's action.
    """
    if not isinstance(action_space, gymnasium.spaces.Discrete):
        return critics(obs, actions)
    values = critics(obs)  # [num_critics, batch_size, num_actions]
    index = actions - int(action_space.start)
    return values.gather(-1, index.expand(values.shape[:-1]).unsqueeze(-1)).squeeze(-1)
