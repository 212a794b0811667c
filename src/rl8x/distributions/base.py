"""The interface of action distributions, and distributions by name and by action space."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Final, TypeAlias

import gymnasium
import torch
from torch import Tensor, nn

from rl8x.names import check_arguments, class_named
from rl8x.plain import thawed
from rl8x.spaces import describe_space

Params: TypeAlias = Any
"""The distribution's parameters: a named tuple of tensors, whose fields are the subclass's own."""

Actions: TypeAlias = Any
"""A tensor `[..., *action]`, or a dict of such tensors where the action space is a `Dict` or a `Tuple`."""


class Distribution(nn.Module):
    """Distributions over an action space, one for each row of a model's features.

    It is built once, from the action space. All methods except `draw` are pure functions of tensors without host syncs,
    so that they can be compiled or captured; the noise for sampling is drawn outside, for a whole horizon at once.

    Args:
        space: Space of one copy's action.

    Attributes:
        num_features: Width of the model's features for one row.
        num_noise: Random numbers that one sample needs.
        by_copy: Whether copies of the environment have different distributions, so that the first axis of features must
            be that of the copies; in minibatches it is not.
        default_for: Kinds of action space for which the distribution is the default; built-in ones only.
    """

    default_for: ClassVar[tuple[type[gymnasium.Space[Any]], ...]] = ()

    draw: Callable[..., Tensor] = staticmethod(torch.rand)
    """Draws the noise for sampling, float32 `[..., num_noise]`: `torch.rand`, `torch.randn`, or a similar function."""

    num_features: int
    num_noise: int
    by_copy: bool = False

    def __init__(self, space: gymnasium.Space[Any]) -> None:
        super().__init__()
        self.space = space

    @abstractmethod
    def from_features(self, features: Tensor, mask: Any = None) -> Params:
        """Compute the distributions' parameters from a model's features: the `params` of the other methods.

        Args:
            features: The model's output, `[..., num_features]`.
            mask: True where an action is legal, `[..., num_actions]`, bool; only for discrete actions. None: all are.
        """

    @abstractmethod
    def sample(self, params: Params, noise: Tensor) -> tuple[Actions, Tensor]:
        """Draw actions, `[..., *action]`; return them and their log-probabilities, bit-identical to `logp`, `[...]`.

        Args:
            params: From `from_features`, `[...]`.
            noise: A slice of the noise of `draw`, `[..., num_noise]`.
        """

    @abstractmethod
    def mode(self, params: Params) -> Actions:
        """Return the most likely actions, `[..., *action]`.

        Args:
            params: From `from_features`, `[...]`.
        """

    @abstractmethod
    def logp(self, params: Params, actions: Actions) -> Tensor:
        """Return the log-probabilities (or log-densities) of actions in nats, `[...]`.

        Args:
            params: From `from_features`, `[...]`.
            actions: `[..., *action]`, legal ones.
        """

    @abstractmethod
    def entropy(self, params: Params) -> Tensor:
        """Return the entropies in nats, `[...]`.

        Args:
            params: From `from_features`, `[...]`.
        """

    def kl(self, params: Params, other: Params) -> Tensor:
        """Return the Kullback-Leibler divergences KL(params || other) in nats, `[...]`.

        Only distillation and an adaptive learning rate use it.

        Args:
            params: From `from_features`, `[...]`.
            other: Likewise, of the same shape.

        Raises:
            NotImplementedError: If the subclass does not define it.
        """
        raise NotImplementedError(f"{type(self).__name__} defines no `kl`.")

    def rsample(self, params: Params, noise: Tensor) -> tuple[Actions, Tensor]:
        """Draw actions through which gradients flow to `params`; return them and log-probabilities, as `sample` does.

        Args:
            params: From `from_features`, `[...]`.
            noise: A slice of the noise of `draw`, `[..., num_noise]`.

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
        """Return the actions for the environment, `[..., *action]`: those sampled, or clipped to bounds.

        Args:
            actions: Sampled actions, `[..., *action]`.
        """
        return actions


BUILTIN: Final[dict[str, type[Distribution]]] = {}
"""The built-in distributions by name. The package fills this table, from which `Composite` makes its parts."""


def make_distribution(
    spec: str | type[Distribution] | None,
    action_space: gymnasium.Space[Any],
    config: Mapping[str, Any] | None = None,
) -> Distribution:
    """Make the distribution over an action space.

    Args:
        spec: Built-in name or a subclass of `Distribution`; None picks by the space.
        action_space: Space of one copy's action.
        config: Further arguments of its class.

    Raises:
        TypeError: If `spec` is none of these, or the class is not for such a space.
        ValueError: If the name, the space or an argument is unknown.
    """
    if spec is None:
        spec = next((name for name, each in BUILTIN.items() if isinstance(action_space, each.default_for)), None)
        if spec is None:
            legal = ", ".join(kind.__name__ for each in BUILTIN.values() for kind in each.default_for)
            given = describe_space(action_space)
            raise ValueError(
                f"no built-in distribution for the action space {given}; there are for {legal}. Pass your own."
            )
    cls = class_named("distribution", spec, BUILTIN, Distribution, " or a subclass of Distribution")
    config = thawed(dict(config or {}))
    check_arguments(cls, config, "distribution_config", num_positional=1)
    made: Distribution = cls(action_space, **config)
    return made
