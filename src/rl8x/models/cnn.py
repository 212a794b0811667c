"""The feedforward model for images, alone or among other observations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import gymnasium
from torch import nn

from rl8x.models.encoders import Channels, Convolution, ObservationEncoder, actor_space
from rl8x.models.mlp import ActorCritic
from rl8x.nn.mlp import MLP, check_sizes
from rl8x.spaces import describe_space


class CNNModel(ActorCritic):
    """Convolutions over each image, then a perceptron; the same for actor and critic unless `shared` is False.

    Arguments that are not listed here are those of `ActorCritic`.

    Args:
        observation_space: A `Box` of rank 3 and at least 5 x 5, or a `Dict` or `Tuple` with such among its parts; the
            others are laid out flat beside what the convolutions give.
        num_features: Width of the features that the action distribution needs.
        convolutions: Channels, side of the kernel and stride of each; None: those of Mnih et al. for images of at least
            36 x 36, two of 3 x 3 for smaller ones.
        hidden_sizes: Widths of the layers after the convolutions.
        layer_norm: Whether the outputs of convolutions and hidden layers are normalised before their activations, those
            of a convolution over the whole image.
        channels: Which axis the channels are: `"first"`, `"last"`, or `"auto"`, the shorter of the two.

    Raises:
        TypeError: If there is no image among the observations, or a part that no built-in model reads.
        ValueError: If a kernel is larger than what is left of an image, a number is less than 1, `channels` or the
            activation is unknown, or `critic_obs` does not fit the space.

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

        self.actor, width = trunk(actor_space(observation_space, critic_obs, shared))
        self.critic: nn.Sequential | None = None
        critic_width = width
        if not shared:
            self.critic, critic_width = trunk(observation_space)
        encoder = (self.critic or self.actor)[0]
        assert isinstance(encoder, ObservationEncoder)
        if not encoder.has_images:
            raise TypeError(
                f"the model for images needs a Box of rank 3 of at least 5 x 5; got "
                f"{describe_space(observation_space)}. Try 'mlp'."
            )
        self.add_heads(width, critic_width, policy_gain, value_gain)
