"""A model that attends to a rolling window of the latest observations.

The window is the model's state, so that the model is used and recomputed like a recurrent one: what it needs of the
steps before a sequence is stored with the sequence, and inside of a sequence windows are views of one tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import gymnasium
import torch
from torch import Tensor, nn

from rl8x.models.base import State
from rl8x.models.encoders import FlatObservations, visible_columns
from rl8x.models.mlp import ActorCritic
from rl8x.nn.attention import PositionalEmbedding, SelfAttentionStack
from rl8x.plain import own_values


class WindowTrunk(nn.Module):
    """Self-attention over windows, of which the last element's output is taken."""

    def __init__(
        self, num_inputs: int, window: int, width: int, num_heads: int, num_layers: int, activation: str
    ) -> None:
        super().__init__()
        self.window = window
        self.embedding = nn.Linear(num_inputs, width)
        self.positions = PositionalEmbedding(window, width)
        self.stack = SelfAttentionStack(width, num_heads, num_layers, activation=activation)
        self.norm = nn.LayerNorm(width)

    def forward(self, history: Tensor, lengths: Tensor) -> Tensor:
        """Read a history `[window - 1 + T, B, num_inputs]`, each window back to its length; return `[T, B, width]`."""
        steps, batch = lengths.shape
        # Embedded once, however many windows an observation is in.
        windows = self.embedding(history).unfold(0, self.window, 1).movedim(-1, 2)  # [T, B, window, width]
        windows = windows.flatten(0, 1)
        ages = torch.arange(self.window - 1, -1, -1, device=lengths.device)
        mask = (ages <= lengths.reshape(-1, 1)).unsqueeze(1)
        read: Tensor = self.norm(self.stack(self.positions(windows), mask)[:, -1])
        return read.reshape(steps, batch, -1)


class AttentionModel(ActorCritic):
    """Self-attention over the latest observations of the episode, actor and critic apart unless `shared`.

    The state is `history`, the observations before the present one, `[num_envs, window - 1, width of an observation]`,
    and `length`, how many of them are of the same episode, `[num_envs]`.

    Arguments that are not listed here are those of `ActorCritic`.

    Args:
        observation_space: Space of one copy's observation, of any kind that `MLPModel` reads.
        num_features: Width of the features that the action distribution needs.
        window: Observations that the model sees at a time, the present one included; at least 2.
        width: Width of the embeddings, a multiple of `num_heads`.
        num_heads: Heads of each attention, at least 1.
        num_layers: Blocks of attention, at least 1.
        activation: Name of the activation in the blocks' perceptrons.

    Raises:
        TypeError: If an observation has a part of another kind.
        ValueError: If a number is out of its range, or `critic_obs` does not fit the space.

    Source: Vaswani et al. 2017, arXiv:1706.03762; normalised before each part: Xiong et al. 2020, arXiv:2002.04745.
    """

    recurrent: ClassVar[bool] = True

    visible: Tensor | None

    def __init__(
        self,
        observation_space: gymnasium.Space[Any],
        num_features: int,
        *,
        window: int = 16,
        width: int = 64,
        num_heads: int = 4,
        num_layers: int = 1,
        activation: str = "gelu",
        shared: bool = False,
        critic_obs: Sequence[str] = (),
        policy_gain: float = 0.01,
        value_gain: float = 1.0,
    ) -> None:
        super().__init__(observation_space, num_features)
        window = own_values(window)
        if not isinstance(window, int) or window < 2:
            raise ValueError(f"`window` must be a whole number of at least 2; got {window!r}.")
        self.flat = FlatObservations(observation_space)
        self.window = window
        visible = visible_columns(observation_space, self.flat.leaf_widths, critic_obs, shared)
        self.register_buffer("visible", visible, persistent=False)
        options = (self.flat.width, window, width, num_heads, num_layers, activation)
        self.actor = WindowTrunk(*options)
        self.critic = None if shared else WindowTrunk(*options)
        self.add_heads(width, width, policy_gain, value_gain)

    def initial_state(self, num_envs: int) -> State:
        """Return an empty history `[num_envs, window - 1, width of an observation]` and its length `[num_envs]`."""
        weight = self.policy_head.weight
        return {
            "history": weight.new_zeros(num_envs, self.window - 1, self.flat.width),
            "length": weight.new_zeros(num_envs),
        }

    def trunk_inputs(self, obs: Any, state: State, starts: Tensor) -> tuple[tuple[Any, ...], tuple[Any, ...], State]:
        """Return for actor and critic the history with observations `[T, B, *obs]` after it, and how far each may look.

        At `starts` `[T, B]` the history before is out of reach.
        """
        history = torch.cat([state["history"].transpose(0, 1), self.flat(obs)])
        steps = torch.arange(len(starts), device=starts.device, dtype=state["length"].dtype).unsqueeze(-1)
        # The step of the latest start; before the first one the episode began `length` steps before the sequence.
        latest = torch.where(starts, steps, -1.0)
        if len(starts) > 1:  # of one step it would be the same, and ONNX has no such operator
            latest = latest.cummax(0).values
        begin = torch.where(latest < 0, -state["length"], latest)
        lengths = (steps - begin).clamp(max=self.window - 1)
        seen = history if self.visible is None else torch.where(self.visible, history, 0.0)
        after = {
            "history": history[1 - self.window :].transpose(0, 1),
            "length": (lengths[-1] + 1.0).clamp(max=self.window - 1),
        }
        return (seen, lengths), (history, lengths), after
