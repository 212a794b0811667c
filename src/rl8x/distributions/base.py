"""The interface of action distributions: parameters from features, samples, log-probabilities, entropies."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar, TypeAlias

import gymnasium
import torch
from torch import Tensor, nn

Params: TypeAlias = Any
"""The distribution's parameters: a named tuple of tensors, whose fields are the subclass's own."""

Actions: TypeAlias = Any
"""A tensor `[..., *action]`, or a dict of such tensors where the action space is a `Dict` or a `Tuple`."""


class Distribution(nn.Module):
    """A family of distributions over an action space, one member for each row of a model's features.

    It is built once, from the action space. Everything but `draw` is a pure function of tensors without a copy to the
    host, so that it can be compiled or captured; the noise that sampling needs is drawn outside, a whole horizon at
    once.

    Args:
        space: Space of one copy's action.

    Attributes:
        num_features: Width of the features that it is made from.
        num_noise: Random numbers that one sample needs.
        by_copy: Whether the first axis of features has to be that of the environment's copies, which differ; in
            minibatches it is another.
        default_for: Kinds of action space for which the distribution is the default; built-in ones only.
    """

    default_for: ClassVar[tuple[type[gymnasium.Space[Any]], ...]] = ()

    draw: Callable[..., Tensor] = staticmethod(torch.rand)
    """Draws what sampling needs, float32 `[..., num_noise]`: `torch.rand` or `torch.randn`, or called as they are."""

    num_features: int
    num_noise: int
    by_copy: bool = False

    def __init__(self, space: gymnasium.Space[Any]) -> None:
        super().__init__()
        self.space = space

    @abstractmethod
    def from_features(self, features: Tensor, mask: Any = None) -> Params:
        """Make the distributions that a model's features stand for, once a batch.

        Args:
            features: The model's output, `[..., num_features]`.
            mask: True where an action is legal, `[..., num_actions]`, bool; only for discrete actions. None: all are.

        Returns:
            What the other methods take as `params`.
        """

    @abstractmethod
    def sample(self, params: Params, noise: Tensor) -> tuple[Actions, Tensor]:
        """Draw actions.

        Args:
            params: From `from_features`, `[...]`.
            noise: A slice of what `draw` gave, `[..., num_noise]`.

        Returns:
            Actions, `[..., *action]`, and their log-probabilities, `[...]`: the same bits as `logp` gives for them.
        """

    @abstractmethod
    def mode(self, params: Params) -> Actions:
        """Return the most likely actions.

        Args:
            params: From `from_features`, `[...]`.

        Returns:
            `[..., *action]`.
        """

    @abstractmethod
    def logp(self, params: Params, actions: Actions) -> Tensor:
        """Return the log-probability (or log-density) of actions.

        Args:
            params: From `from_features`, `[...]`.
            actions: `[..., *action]`, legal ones.

        Returns:
            `[...]`, in nats.
        """

    @abstractmethod
    def entropy(self, params: Params) -> Tensor:
        """Return the entropy.

        Args:
            params: From `from_features`, `[...]`.

        Returns:
            `[...]`, in nats.
        """

    def kl(self, params: Params, other: Params) -> Tensor:
        """Return the Kullback-Leibler divergence KL(params || other).

        Distillation and an adaptive learning rate use it; other training does without it.

        Args:
            params: From `from_features`, `[...]`.
            other: Likewise, of the same shape.

        Returns:
            `[...]`, in nats.

        Raises:
            NotImplementedError: If the subclass does not define it.
        """
        raise NotImplementedError(f"{type(self).__name__} defines no `kl`.")

    def rsample(self, params: Params, noise: Tensor) -> tuple[Actions, Tensor]:
        """Draw actions through which gradients flow to `params`.

        Args:
            params: From `from_features`, `[...]`.
            noise: A slice of what `draw` gave, `[..., num_noise]`.

        Returns:
            Actions, `[..., *action]`, and their log-probabilities, `[...]`.

        Raises:
            TypeError: If the distribution is over discrete actions.
        """
        raise TypeError(f"{type(self).__name__} has no reparameterised samples: its actions are discrete.")

    @property
    def has_kl(self) -> bool:
        """Whether `kl` is defined."""
        return type(self).kl is not Distribution.kl

    @property
    def clips(self) -> bool:
        """Whether `env_actions` may change actions; read once, when a policy is built."""
        return type(self).env_actions is not Distribution.env_actions

    def env_actions(self, actions: Actions) -> Actions:
        """Return the actions for the environment: those sampled, or clipped to bounds.

        Args:
            actions: Sampled actions, `[..., *action]`.

        Returns:
            `[..., *action]`.
        """
        return actions
