"""Multilayer perceptrons, feedforward models for vectors and images, and the heads that built-in models share."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, Final

import gymnasium
import torch
from torch import Tensor, nn

from rl8x.models.base import Model, State
from rl8x.models.encoders import Channels, Convolution, FlatObservations, ObservationEncoder, actor_space, is_image
from rl8x.models.layers import (
    HIDDEN_GAIN,
    HeadStack,
    LayerNormStack,
    LinearStack,
    check_sizes,
    hidden_gain,
    linear,
    perceptron,
    plain_layers,
)
from rl8x.models.layers import activation as make_activation
from rl8x.spaces import describe_space, leaves

# From this many activations on, about a core's cache, `perceptron` saves more time than its Python code takes.
_MANY_ACTIVATIONS: Final = 2**17


class MLP(nn.Sequential):
    """Linear layers with an activation after each, `[..., sizes[0]]` to `[..., sizes[-1]]`.

    Args:
        sizes: Width of the input, of each hidden layer and of the output. One size alone makes an identity.
        activation: Name of the activation between layers.
        activate_last: Whether the last layer is followed by an activation too.
        gain: Gain of the hidden layers' orthogonal weights; None: weights are uniform, as in `linear`.
        last_gain: Gain of the last layer; None: that of the hidden ones.
        layer_norm: Whether to normalise the output of each layer before its activation, if it has one.

    Attributes:
        num_inputs: Width of the input.
        num_outputs: Width of the output.

    Source: Ba et al. 2016, arXiv:1607.06450 (layer normalisation).
    """

    def __init__(
        self,
        sizes: Sequence[int],
        *,
        activation: str = "relu",
        activate_last: bool = False,
        gain: float | None = HIDDEN_GAIN,
        last_gain: float | None = None,
        layer_norm: bool = False,
    ) -> None:
        check_sizes("sizes", sizes)
        if not sizes:
            raise ValueError("`sizes` must have at least the width of the input; got none.")
        layers: list[nn.Module] = []
        for i, (num_inputs, num_outputs) in enumerate(itertools.pairwise(sizes)):
            last = i == len(sizes) - 2
            layers.append(linear(num_inputs, num_outputs, last_gain if last and last_gain is not None else gain))
            if not last or activate_last:
                if layer_norm:
                    layers.append(nn.LayerNorm(num_outputs))
                layers.append(make_activation(activation))
        super().__init__(*layers)
        self.num_inputs, self.num_outputs = sizes[0], sizes[-1]
        self.num_activations = sum(sizes[1:])

    def forward(self, x: Tensor) -> Tensor:
        """Apply the layers to every row; return `[..., sizes[-1]]`.

        Args:
            x: `[..., sizes[0]]`.
        """
        if x.shape[-1:] != (self.num_inputs,):
            raise ValueError(f"this MLP reads rows [..., {self.num_inputs}]; got {list(x.shape)}.")
        # As a matrix: with more axes torch would copy non-contiguous batches, and add the bias separately.
        flat = x.reshape(-1, x.shape[-1])
        layers = plain_layers(self, flat) if are_many(flat, self.num_activations) else None
        rows: Tensor = super().forward(flat) if layers is None else perceptron(flat, layers)  # type: ignore[no-untyped-call]
        return rows.view(*x.shape[:-1], rows.shape[-1])


def are_many(x: Tensor, num_activations: int) -> bool:
    """Whether rows `[..., inputs]`, with `num_activations` each, are enough for `perceptron` to save time."""
    if torch.compiler.is_compiling():  # before rows are counted: an export would fix their number
        return False
    return x.numel() // x.shape[-1] * num_activations >= _MANY_ACTIVATIONS


def layer_stack(
    size: int, sizes: Sequence[int], *, activation: str, layer_norm: bool, gain: float | None
) -> list[nn.Module]:
    """Return the hidden layers of `size` perceptrons side by side; `sizes` are those of `MLP`."""
    layers: list[nn.Module] = []
    for num_inputs, num_outputs in itertools.pairwise(sizes):
        layers.append(LinearStack(size, num_inputs, num_outputs, gain))
        layers += [LayerNormStack(size, num_outputs)] if layer_norm else []
        layers.append(make_activation(activation))
    return layers


class MLPStack(nn.Sequential):
    """Layers of `size` perceptrons; the i-th reads the i-th part of the rows `[T, size * rows, *]`."""

    def __init__(self, size: int, *layers: nn.Module) -> None:
        super().__init__(*layers)
        self.size = size
        self.num_activations = sum(layer.weight.shape[-1] for layer in layers if isinstance(layer, LinearStack))

    def forward(self, x: Tensor) -> Tensor:
        """Apply each perceptron to its rows, `[T, size * rows, inputs]` to `[T, size * rows, outputs]`."""
        steps, rows = x.shape[:2]
        if torch.compiler.is_compiling():  # an export would fix the number of rows of a part
            each: Tensor = super().forward(x.flatten(0, 1).expand(self.size, -1, -1))  # type: ignore[no-untyped-call]
            every: Tensor = each.unflatten(1, (steps, rows))  # type: ignore[no-untyped-call]
            agents = (torch.arange(rows, device=x.device) * self.size).div(rows, rounding_mode="floor")
            own = agents == torch.arange(self.size, device=x.device).unsqueeze(1)  # [size, rows]
            chosen: Tensor = torch.where(own[:, None, :, None], every, 0.0).sum(0)
            return chosen
        if rows % self.size:
            raise ValueError(
                f"each of {self.size} agents has weights of its own (`separate`), by the place of its row: give "
                f"observations of all agents, one agent after the other; got {rows}."
            )
        apart = x.reshape(steps, self.size, -1, x.shape[-1]).transpose(0, 1).flatten(1, 2)  # [size, T * rows, inputs]
        layers = plain_layers(self, apart) if are_many(apart, self.num_activations) else None
        result: Tensor = super().forward(apart) if layers is None else perceptron(apart, layers)  # type: ignore[no-untyped-call]
        return result.view(self.size, steps, -1, result.shape[-1]).transpose(0, 1).flatten(1, 2)


class Head(nn.Linear):
    """A linear layer that computes in float32, even under autocast to bfloat16.

    Values of 500 would be multiples of 2 in bfloat16, which has 8 significant bits.
    """

    def forward(self, x: Tensor) -> Tensor:
        """Apply the layer to every row; return `[..., out_features]`, in the weight's dtype under autocast.

        Args:
            x: `[..., in_features]`.
        """
        device = x.device.type
        if not torch.amp.is_autocast_available(device) or not torch.is_autocast_enabled(device):
            return super().forward(x)
        with torch.autocast(device, enabled=False):
            return super().forward(x.to(self.weight.dtype))


class ActorCritic(Model):
    """An actor and a critic with linear heads for features and values, which are float32 in any precision.

    The built-in models share these arguments, beside those of `Model`.

    Args:
        activation: Name of the activation after each layer, a key of `rl8x.nn.ACTIVATIONS`.
        shared: Whether actor and critic share all layers except the heads.
        critic_obs: Parts of a `Dict` observation that only the critic sees; not with `shared`.
        policy_gain: Gain of the head of features, small so that a policy begins near uniform.
        value_gain: Gain of the head of values.
    """

    actor: nn.Module
    critic: nn.Module | None
    policy_head: Any
    value_head: Any

    def add_heads(self, width: int, critic_width: int, policy_gain: float | None, value_gain: float | None) -> None:
        """Make the heads of features and of values.

        Args:
            width: Width of the actor's output.
            critic_width: Width of the critic's output.
            policy_gain: Gain of the head of features; None: its weights are uniform.
            value_gain: Gain of the head of values; None: its weights are uniform.
        """
        self.policy_head = linear(width, self.num_features, policy_gain, kind=Head)
        self.value_head = linear(critic_width, 1, value_gain, kind=Head)

    def forward(self, obs: Any, state: State, starts: Tensor) -> tuple[Tensor, Tensor, State]:
        """Return features `[T, B, num_features]`, values `[T, B]` and the state after observations `[T, B, *obs]`."""
        hidden, critic_hidden, state = self.hidden(obs, state, starts)
        return self.policy_head(hidden), self.value_head(critic_hidden).squeeze(-1), state

    def values(self, obs: Any, state: State, starts: Tensor) -> Tensor:
        """Return the values alone, `[T, B]`, of observations `[T, B, *obs]`."""
        values: Tensor = self.value_head(self.hidden(obs, state, starts, values_only=True)[1]).squeeze(-1)
        return values

    def policy_features(self, obs: Any, state: State, starts: Tensor) -> tuple[Tensor, State]:
        """Return features `[T, B, num_features]` and the state, without the critic's work."""
        seen, _, state = self.trunk_inputs(obs, state, starts)
        return self.policy_head(self.actor(*seen)), state

    def hidden(
        self, obs: Any, state: State, starts: Tensor, *, values_only: bool = False
    ) -> tuple[Tensor, Tensor, State]:
        """Return the heads' inputs of actor and critic, `[T, B, width]` each, and the state after, each `[B, *]`.

        Args:
            obs: As in `Model.forward`.
            state: As in `Model.forward`.
            starts: As in `Model.forward`.
            values_only: Whether only the second result is used, so that the actor need not run.
        """
        seen, critic_seen, state = self.trunk_inputs(obs, state, starts)
        if self.critic is None:
            hidden = self.actor(*seen)
            return hidden, hidden, state
        critic_hidden = self.critic(*critic_seen)
        return critic_hidden if values_only else self.actor(*seen), critic_hidden, state

    def trunk_inputs(self, obs: Any, state: State, starts: Tensor) -> tuple[tuple[Any, ...], tuple[Any, ...], State]:
        """Return the arguments for `actor` and for `critic`, and the state after the observations, each `[B, *]`.

        It takes the arguments of `Model.forward`.
        """
        return (obs,), (obs,), state


class MLPModel(ActorCritic):
    """Perceptrons for actor and critic, separate unless `shared`.

    Arguments that are not listed here are those of `ActorCritic`.

    Args:
        observation_space: Space of one copy's observation: `Box`, `Discrete`, `MultiDiscrete`, `MultiBinary`, or a
            `Dict` or `Tuple` of these, laid out flat as numbers and one-hot codes.
        hidden_sizes: Widths of the hidden layers; none makes the model linear.
        layer_norm: Whether the outputs of hidden layers are normalised before their activations, row by row.
        init: Initial weights: "orthogonal", with gain sqrt(2) in hidden layers and the heads' gains there, or
            "uniform", within 1 / sqrt(inputs) in all layers, as in PyTorch. Biases begin at 0.
        separate: Number of agents with weights of their own, found by the place of their rows; 0: all rows share the
            weights. PPO replaces `true` by the number of agents of its environment.

    Source: Andrychowicz et al. 2021, arXiv:2006.05990, on initial weights.
    """

    def __init__(
        self,
        observation_space: gymnasium.Space[Any],
        num_features: int,
        *,
        hidden_sizes: Sequence[int] = (256, 256),
        layer_norm: bool = False,
        init: str = "orthogonal",
        separate: int = 0,
        activation: str = "relu",
        shared: bool = False,
        critic_obs: Sequence[str] = (),
        policy_gain: float = 0.01,
        value_gain: float = 1.0,
    ) -> None:
        super().__init__(observation_space, num_features)
        check_sizes("hidden_sizes", hidden_sizes)
        self.separate = separate
        self.flat = FlatObservations(observation_space)
        # Separate if the actor sees less than the critic; None: both read the same flat observation.
        self.actor_flat = FlatObservations(actor_space(observation_space, critic_obs, shared)) if critic_obs else None
        sizes, critic_sizes = [(self.actor_flat or self.flat).width, *hidden_sizes], [self.flat.width, *hidden_sizes]
        gain = hidden_gain(init)
        policy, value = (None, None) if gain is None else (policy_gain, value_gain)
        options: Any = {"activation": activation, "layer_norm": layer_norm, "gain": gain}

        def make(sizes: list[int]) -> nn.Module:
            if separate:
                return MLPStack(separate, *layer_stack(separate, sizes, **options))
            return MLP(sizes, activate_last=True, **options)

        self.actor = make(sizes)
        self.critic = None if shared else make(critic_sizes)
        if separate:
            self.policy_head = MLPStack(separate, HeadStack(separate, sizes[-1], num_features, policy))
            self.value_head = MLPStack(separate, HeadStack(separate, critic_sizes[-1], 1, value))
        else:
            self.add_heads(sizes[-1], critic_sizes[-1], policy, value)

    def trunk_inputs(self, obs: Any, state: State, starts: Tensor) -> tuple[tuple[Tensor], tuple[Tensor], State]:
        """Lay observations `[T, B, *obs]` out flat, `[T, B, width]`; no state."""
        flat = obs.float() if self.flat.is_vector else self.flat(obs)
        return (flat if self.actor_flat is None else self.actor_flat(obs),), (flat,), state


class CNNModel(ActorCritic):
    """Convolutions over each image, then a perceptron; actor and critic share both unless `shared` is False.

    Arguments that are not listed here are those of `ActorCritic`.

    Args:
        observation_space: A `Box` of rank 3 and at least 5 x 5, or a `Dict` or `Tuple` with such parts; the others are
            laid out flat and joined to the outputs of the convolutions.
        convolutions: Channels, side of the kernel and stride of each; None: those of Mnih et al. for images of at least
            36 x 36, two of 3 x 3 for smaller ones.
        hidden_sizes: Widths of the layers after the convolutions.
        layer_norm: Whether the outputs of convolutions and hidden layers are normalised before their activations, those
            of a convolution over the whole image.
        channels: Which axis the channels are: `"first"`, `"last"`, or `"auto"`, the shorter of the two.

    Source: Mnih et al. 2015, doi:10.1038/nature14236.
    """

    def __init__(
        self,
        observation_space: gymnasium.Space[Any],
        num_features: int,
        *,
        convolutions: Sequence[Convolution] | None = None,
        hidden_sizes: Sequence[int] = (512,),
        layer_norm: bool = False,
        activation: str = "relu",
        channels: Channels = "auto",
        shared: bool = True,
        critic_obs: Sequence[str] = (),
        policy_gain: float = 0.01,
        value_gain: float = 1.0,
    ) -> None:
        super().__init__(observation_space, num_features)
        check_sizes("hidden_sizes", hidden_sizes)

        def trunk(space: gymnasium.Space[Any]) -> tuple[nn.Sequential, int]:
            options: Any = {"activation": activation, "layer_norm": layer_norm}
            encoder = ObservationEncoder(space, convolutions=convolutions, channels=channels, **options)
            sizes = [encoder.width, *hidden_sizes]
            return nn.Sequential(encoder, MLP(sizes, activate_last=True, **options)), sizes[-1]

        if not any(is_image(leaf) for _, leaf in leaves(observation_space)):
            raise TypeError(
                f"the model for images needs a Box of rank 3 of at least 5 x 5; got "
                f"{describe_space(observation_space)}. Try 'mlp'."
            )
        self.actor, width = trunk(actor_space(observation_space, critic_obs, shared))
        self.critic, critic_width = (None, width) if shared else trunk(observation_space)
        self.add_heads(width, critic_width, policy_gain, value_gain)
