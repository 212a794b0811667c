"""Models with a state: LSTM and GRU, with resets within a sequence, and attention to the latest observations.

Actor and critic are two trunks of one shape, so that the weights of both are one tensor,
`[num_trunks, inputs, outputs]`, and their products are one batched product. Only products with the hidden state are
computed step by step. The window of the attention is the model's state; within a sequence, windows are views of one
tensor.
"""

from __future__ import annotations

import itertools
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

import gymnasium
import torch
from torch import Tensor, nn

from rl8x.models.attention import PositionalEmbedding, SelfAttentionStack
from rl8x.models.base import Model, State
from rl8x.models.encoders import FlatObservations, ObservationEncoder, visible_columns
from rl8x.models.layers import HIDDEN_GAIN, LinearStack, check_sizes
from rl8x.models.layers import activation as make_activation
from rl8x.models.mlp import ActorCritic
from rl8x.plain import own_values

_TRUNKS = ("actor", "critic")
_ALL = slice(None)


class RecurrentModel(ActorCritic):
    """A recurrent cell each for actor and critic, one for both if `shared`; optional layers before the cell.

    Images go through convolutions first, the same for actor and critic. A subclass defines the number of gates of a
    unit and one step of the state, a dict with one `[num_envs, hidden_size]` tensor for each of `state_names`, prefixed
    `actor_` and `critic_` where they are apart. Arguments that are not listed here are those of `ActorCritic`.

    Args:
        observation_space: Space of one copy's observation: images, and the spaces of `MLPModel`.
        hidden_size: Units of the cell, at least 1.
        encoder_sizes: Widths of the layers before the cell, each at least 1.

    Attributes:
        num_gates: Gates of one unit.
        state_names: Names of the parts of a state, the cell's output first.
    """

    recurrent: ClassVar[bool] = True
    num_gates: ClassVar[int]
    state_names: ClassVar[tuple[str, ...]]

    visible: Tensor | None

    def __init__(
        self,
        observation_space: gymnasium.Space[Any],
        num_features: int,
        *,
        hidden_size: int = 256,
        encoder_sizes: Sequence[int] = (),
        activation: str = "relu",
        shared: bool = False,
        critic_obs: Sequence[str] = (),
        policy_gain: float = 0.01,
        value_gain: float = 1.0,
    ) -> None:
        super().__init__(observation_space, num_features)
        check_sizes("hidden_size", [hidden_size])
        check_sizes("encoder_sizes", encoder_sizes)
        self.hidden_size = hidden_size
        self.num_trunks = 1 if shared else len(_TRUNKS)
        self.observations = ObservationEncoder(observation_space, activation=activation)
        # Columns of an encoded observation that each trunk sees, `[num_trunks, 1, width]`; None: each sees all.
        visible = visible_columns(observation_space, self.observations.leaf_widths, critic_obs, shared)
        if visible is not None:
            visible = torch.stack([visible, torch.ones_like(visible)]).unsqueeze(1)
        self.register_buffer("visible", visible, persistent=False)
        sizes = [self.observations.width, *encoder_sizes]
        self.encoder = nn.ModuleList(
            LinearStack(self.num_trunks, *pair, HIDDEN_GAIN) for pair in itertools.pairwise(sizes)
        )
        self.activation = make_activation(activation)
        gates, width = self.num_gates, self.num_gates * hidden_size
        self.inputs = LinearStack(self.num_trunks, sizes[-1], width, 1.0, num_blocks=gates)
        self.recurrence = LinearStack(self.num_trunks, hidden_size, width, 1.0, num_blocks=gates).weight
        self.add_heads(hidden_size, hidden_size, policy_gain, value_gain)
        self._prepare()

    def initial_state(self, num_envs: int) -> State:
        """Return zeros, each `[num_envs, hidden_size]`."""
        return {name: self.recurrence.new_zeros(num_envs, self.hidden_size) for name in self._keys(_ALL)}

    def actor_state(self, state: State) -> State:
        """Leave out the critic's part of the state, if it is separate."""
        return {name: state[name] for name in self._keys(slice(1))}

    def policy_features(self, obs: Any, state: State, starts: Tensor) -> tuple[Tensor, State]:
        """Return features and state as `forward` does; the critic runs only if its state is given."""
        if len(state) == len(self._keys(_ALL)):
            return Model.policy_features(self, obs, state, starts)
        outputs, state = self._run(obs, state, starts, slice(1))
        return self.policy_head(outputs[0]), state

    def hidden(
        self, obs: Any, state: State, starts: Tensor, *, values_only: bool = False
    ) -> tuple[Tensor, Tensor, State]:
        """Return the outputs of actor and critic, `[T, B, hidden_size]`; with `values_only` the critic alone runs."""
        trunks = slice(self.num_trunks - 1, self.num_trunks) if values_only else _ALL
        outputs, state = self._run(obs, state, starts, trunks)
        return outputs[0], outputs[-1], state

    def _prepare(self) -> None:
        """Add parameters of the cell, and set biases that do not begin at 0."""

    @abstractmethod
    def _weights(self, trunks: slice) -> tuple[Tensor, ...]:
        """Return the weights of one step for some trunks, sliced once per sequence."""

    @abstractmethod
    def _move(self, parts: Sequence[Tensor], inputs: Tensor, weights: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Return the state after one step; its first part is the output."""

    def _run(self, obs: Any, state: State, starts: Tensor, trunks: slice) -> tuple[Tensor, State]:
        """Return the outputs of some trunks, `[trunks, T, B, hidden_size]`, and their state after the last step."""
        steps, batch = starts.shape
        keys = self._keys(trunks)
        num_parts = len(self.state_names)
        x = self.observations(obs).flatten(0, 1).unsqueeze(0).expand(len(keys) // num_parts, -1, -1)
        if self.visible is not None:
            x = torch.where(self.visible[trunks], x, 0.0)
        for layer in self.encoder:
            x = self.activation(layer(x, trunks))
        inputs = self.inputs(x, trunks).unflatten(1, (steps, batch)).unbind(1)
        resets = starts.unsqueeze(-1).unbind(0)
        weights = self._weights(trunks)
        parts = tuple(torch.stack([state[key] for key in keys[i::num_parts]]) for i in range(num_parts))
        outputs = []
        for t in range(steps):
            parts = self._move([part.masked_fill(resets[t], 0.0) for part in parts], inputs[t], weights)
            outputs.append(parts[0])
        tensors = [part[k] for k in range(parts[0].shape[0]) for part in parts]
        return torch.stack(outputs, 1), dict(zip(keys, tensors, strict=True))

    def _keys(self, trunks: slice) -> list[str]:
        if self.num_trunks == 1:
            return list(self.state_names)
        return [f"{trunk}_{name}" for trunk in _TRUNKS[trunks] for name in self.state_names]


class LSTMModel(RecurrentModel):
    """Long short-term memory for actor and critic; arguments are those of `RecurrentModel`.

        i, f, o = sigmoid(W x + U h + b),  g = tanh(W_g x + U_g h + b_g),  gates in the order i, f, g, o
        c' = f c + i g,  h' = o tanh(c')

    Source: Hochreiter and Schmidhuber 1997, doi:10.1162/neco.1997.9.8.1735; forget gates, with a bias of 1 at first, as
    in Gers et al. 2000, doi:10.1162/089976600300015015.
    """

    num_gates: ClassVar[int] = 4
    state_names: ClassVar[tuple[str, ...]] = ("h", "c")

    def _prepare(self) -> None:
        nn.init.ones_(self.inputs.bias.detach()[..., self.hidden_size : 2 * self.hidden_size])

    def _weights(self, trunks: slice) -> tuple[Tensor, ...]:
        return (self.recurrence[trunks],)

    def _move(self, parts: Sequence[Tensor], inputs: Tensor, weights: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        hidden, cell = parts
        # The backward of one split into equal parts is one concatenation; slices would each fill a whole gradient.
        write, keep, candidate, show = torch.baddbmm(inputs, hidden, weights[0]).to(cell.dtype).chunk(4, -1)
        cell = torch.addcmul(keep.sigmoid() * cell, write.sigmoid(), candidate.tanh())
        return show.sigmoid() * cell.tanh(), cell


class GRUModel(RecurrentModel):
    """Gated recurrent units for actor and critic; arguments are those of `RecurrentModel`.

        r, z = sigmoid(W x + U h + b),  n = tanh(W_n x + b_n + r (U_n h + c_n))
        h' = (1 - z) n + z h

    Source: Cho et al. 2014, arXiv:1406.1078, with the reset gate after the product as in cuDNN and torch.
    """

    num_gates: ClassVar[int] = 3
    state_names: ClassVar[tuple[str, ...]] = ("h",)

    def _prepare(self) -> None:
        self.candidate_bias = nn.Parameter(torch.zeros(self.num_trunks, 1, self.hidden_size))

    def _weights(self, trunks: slice) -> tuple[Tensor, ...]:
        bias = torch.nn.functional.pad(self.candidate_bias[trunks], (2 * self.hidden_size, 0))
        return self.recurrence[trunks], bias

    def _move(self, parts: Sequence[Tensor], inputs: Tensor, weights: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        (hidden,) = parts
        weight, bias = weights
        reset, update, candidate = torch.baddbmm(bias, hidden, weight).to(hidden.dtype).chunk(3, -1)
        reset_input, update_input, candidate_input = inputs.to(hidden.dtype).chunk(3, -1)
        candidate = torch.addcmul(candidate_input, (reset + reset_input).sigmoid(), candidate).tanh()
        return (torch.lerp(candidate, hidden, (update + update_input).sigmoid()),)


# -- attention


class WindowTrunk(nn.Module):
    """Self-attention over windows; returns the output of each window's last element."""

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
        """Read windows of a history `[window - 1 + T, B, num_inputs]` back to their lengths; return `[T, B, width]`."""
        steps, batch = lengths.shape
        # Each observation is embedded once, although several windows contain it.
        windows = self.embedding(history).unfold(0, self.window, 1).movedim(-1, 2)  # [T, B, window, width]
        windows = windows.flatten(0, 1)
        ages = torch.arange(self.window - 1, -1, -1, device=lengths.device)
        mask = (ages <= lengths.reshape(-1, 1)).unsqueeze(1)
        read: Tensor = self.norm(self.stack(self.positions(windows), mask)[:, -1])
        return read.reshape(steps, batch, read.shape[-1])


class AttentionModel(ActorCritic):
    """Self-attention over the latest observations of the episode, separate for actor and critic unless `shared`.

    The state is `history`, the observations before the present one, `[num_envs, window - 1, width of an observation]`,
    and `length`, the number of those in the same episode, `[num_envs]`. Arguments that are not listed here are those
    of `ActorCritic`.

    Args:
        observation_space: Space of one copy's observation, of any kind that `MLPModel` reads.
        window: Observations that the model sees at a time, including the present one; at least 2.
        width: Width of the embeddings, a multiple of `num_heads`.
        num_heads: Heads of each attention, at least 1.
        num_layers: Blocks of attention, at least 1.
        activation: Name of the activation in the blocks' perceptrons.

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
        """Return the history with observations `[T, B, *obs]` appended, and window lengths, for actor and for critic.

        Windows do not reach back beyond `starts`, `[T, B]`.
        """
        history = torch.cat([state["history"].transpose(0, 1), self.flat(obs)])
        steps = torch.arange(len(starts), device=starts.device, dtype=state["length"].dtype).unsqueeze(-1)
        # The step of the latest start; before the first one the episode began `length` steps before the sequence.
        latest = torch.where(starts, steps, -1.0)
        if len(starts) > 1:  # one step needs none, and ONNX has no such operator
            latest = latest.cummax(0).values
        begin = torch.where(latest < 0, -state["length"], latest)
        lengths = (steps - begin).clamp(max=self.window - 1)
        seen = history if self.visible is None else torch.where(self.visible, history, 0.0)
        after = {
            "history": history[1 - self.window :].transpose(0, 1),
            "length": (lengths[-1] + 1.0).clamp(max=self.window - 1),
        }
        return (seen, lengths), (history, lengths), after
