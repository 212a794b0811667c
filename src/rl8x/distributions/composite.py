"""Actions of several parts, each with a distribution of its own."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import gymnasium
import torch
from gymnasium import spaces
from torch import Tensor, nn

from rl8x.distributions.base import Actions, Distribution, make_distribution
from rl8x.names import unknown_name
from rl8x.spaces import describe_space, named_parts

CompositeParams = dict[str, Any]
"""The parameters of each part's distribution, by the part's key."""


class Composite(Distribution):
    """Independent distributions over the parts of a `Dict` or `Tuple` space.

    Actions are a dict of tensors for both kinds of space; a `Tuple`'s keys are "0", "1", ... Features and noise of the
    parts lie side by side, in the space's order. Log-probabilities, entropies and divergences are sums over the parts.

    Args:
        space: The `Dict` or `Tuple` space; its parts may also be `Dict` or `Tuple` spaces.
        parts: Arguments of the parts' distributions by key, with `"distribution"` for a name or class other than the
            default one, such as `{"steer": {"distribution": "squashed_normal"}}`.
    """

    default_for = (spaces.Dict, spaces.Tuple)

    def __init__(self, space: gymnasium.Space[Any], **parts: Mapping[str, Any]) -> None:
        super().__init__(space)
        if not isinstance(space, spaces.Dict | spaces.Tuple):
            raise TypeError(f"Composite needs a Dict or Tuple action space; got {describe_space(space)}.")
        named = dict(named_parts(space))
        for key, options in parts.items():
            if key not in named:
                raise ValueError(unknown_name("part", key, named, " of the action space in `distribution_config`"))
            if not isinstance(options, Mapping):
                raise TypeError(f"`distribution_config[{key!r}]` must map names to values; got {options!r}.")
        self.named: dict[str, Distribution] = {}
        for key, part in named.items():
            options = dict(parts.get(key, {}))
            self.named[key] = make_distribution(options.pop("distribution", None), part, options)
        self.parts = nn.ModuleList(self.named.values())
        self.num_features = sum(part.num_features for part in self.named.values())
        self.num_noise = sum(part.num_noise for part in self.named.values())

    def from_features(self, features: Tensor, mask: Mapping[str, Any] | None = None) -> CompositeParams:
        """Compute each part's parameters by key, from joined features `[..., num_features]` and masks by key."""
        pieces = torch.split(features, [part.num_features for part in self.named.values()], -1)
        named = zip(self.named.items(), pieces, strict=True)
        return {key: part.from_features(piece, (mask or {}).get(key)) for (key, part), piece in named}

    def sample(self, params: CompositeParams, noise: Tensor) -> tuple[Actions, Tensor]:
        """Draw the actions of each part from noise `[..., num_noise]`, with their log-probabilities `[...]`."""
        return _joined({key: part.sample(params[key], piece) for key, part, piece in self._with_noise(noise)})

    def rsample(self, params: CompositeParams, noise: Tensor) -> tuple[Actions, Tensor]:
        """Draw actions as `sample` does, from noise `[..., num_noise]`, with gradients; parts must be continuous."""
        return _joined({key: part.rsample(params[key], piece) for key, part, piece in self._with_noise(noise)})

    def mode(self, params: CompositeParams) -> Actions:
        """Return the most likely actions of each part, `[..., *action]`."""
        return {key: part.mode(params[key]) for key, part in self.named.items()}

    def logp(self, params: CompositeParams, actions: Actions) -> Tensor:
        """Return the log-probabilities of actions, each `[..., *action]`, summed over the parts, `[...]`."""
        return _total([part.logp(params[key], actions[key]) for key, part in self.named.items()])

    def entropy(self, params: CompositeParams) -> Tensor:
        """Return the sum of the parts' entropies, `[...]`."""
        return _total([part.entropy(params[key]) for key, part in self.named.items()])

    def kl(self, params: CompositeParams, other: CompositeParams) -> Tensor:
        """Return the sum of the parts' divergences, `[...]`."""
        return _total([part.kl(params[key], other[key]) for key, part in self.named.items()])

    @property
    def has_kl(self) -> bool:
        """Whether all parts' distributions have a `kl`."""
        return all(part.has_kl for part in self.named.values())

    @property
    def clips(self) -> bool:
        """Whether `env_actions` of any part may change actions."""
        return any(part.clips for part in self.named.values())

    def env_actions(self, actions: Actions) -> Actions:
        """Return the environment's actions for each part, `[..., *action]`."""
        return {key: part.env_actions(actions[key]) for key, part in self.named.items()}

    def draw(self, size: Sequence[int], **options: Any) -> Tensor:
        """Draw each part's own kind of noise, side by side: float32, `[..., num_noise]`.

        Args:
            size: Shape of the noise; its last number is replaced by `num_noise`.
            options: Further arguments of `torch.rand` and `torch.randn`, such as `generator` and `device`.
        """
        return torch.cat([part.draw((*size[:-1], part.num_noise), **options) for part in self.named.values()], -1)

    def _with_noise(self, noise: Tensor) -> Iterator[tuple[str, Distribution, Tensor]]:
        pieces = torch.split(noise, [part.num_noise for part in self.named.values()], -1)
        return zip(self.named, self.named.values(), pieces, strict=True)


def _joined(drawn: dict[str, tuple[Actions, Tensor]]) -> tuple[Actions, Tensor]:
    return {key: actions for key, (actions, _) in drawn.items()}, _total([logp for _, logp in drawn.values()])


def _total(terms: list[Tensor]) -> Tensor:
    return functools.reduce(torch.add, terms)
