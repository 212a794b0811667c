"""The interface of action distributions, distributions by name and by action space, and their check before training."""

from __future__ import annotations

import numbers
from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Final, TypeAlias

import gymnasium
import torch
from torch import Tensor, nn

from rl8x.names import check_arguments, class_named
from rl8x.output import described
from rl8x.plain import thawed
from rl8x.spaces import describe_space
from rl8x.trees import Tree, flatten_tree

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


BUILTIN: Final[dict[str, type[Distribution]]] = {}
"""The built-in distributions by name; the package fills it, since one of them makes its parts by this table."""


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
    named = _default_name(action_space) if spec is None else spec
    cls = class_named("distribution", named, BUILTIN, Distribution, " or a subclass of Distribution")
    config = thawed(dict(config or {}))
    check_arguments(cls, config, "distribution_config", num_positional=1)
    made: Distribution = cls(action_space, **config)
    for name in ("num_features", "num_noise"):
        number = getattr(made, name, None)
        if not isinstance(number, numbers.Integral) or number < 0:
            raise ValueError(
                f"{cls.__name__}.{name} must be a whole number, at least 0, set by the class or its __init__; got "
                f"{number!r}."
            )
    return made


def _default_name(action_space: gymnasium.Space[Any]) -> str:
    for name, distribution in BUILTIN.items():
        if isinstance(action_space, distribution.default_for):
            return name
    legal = ", ".join(kind.__name__ for distribution in BUILTIN.values() for kind in distribution.default_for)
    given = describe_space(action_space)
    raise ValueError(f"no built-in distribution for the action space {given}; there are for {legal}. Pass your own.")


_ROWS = 2


def check_distribution(distribution: Distribution, action: Tree, device: torch.device) -> None:
    """Call each function of a distribution on features of two rows, and check the results."""
    name, rows = type(distribution).__name__, [_ROWS]
    generator = torch.Generator(device).manual_seed(0)
    features = torch.randn(_ROWS, distribution.num_features, generator=generator, device=device)
    size = (_ROWS, distribution.num_noise)
    wanted = {path: rows + list(part.shape[1:]) for path, part in flatten_tree("actions", action).items()}
    gave = "what from_features gave"
    with torch.no_grad():
        told = f"features {list(features.shape)}, and a mask or None"
        params = _call(name, "from_features", told, lambda: distribution.from_features(features, None))
        noise = distribution.draw(size, generator=generator, device=device)
        drawn = _call(name, "sample", f"{gave}, and noise {list(size)}", lambda: distribution.sample(params, noise))
        if not isinstance(drawn, tuple) or len(drawn) != 2:
            raise ValueError(f"{name}.sample must return actions and log-probabilities; got {_shapes(drawn)} alone.")
        actions, logp = drawn
        _check_actions(f"{name}.sample", actions, wanted)
        _check(f"{name}.sample", "log-probabilities [...]", logp, rows)
        _check_actions(f"{name}.mode", _call(name, "mode", gave, lambda: distribution.mode(params)), wanted)
        again = _call(name, "logp", f"{gave}, and sampled actions", lambda: distribution.logp(params, actions))
        _check(f"{name}.logp", "log-probabilities [...]", again, rows)
        if not torch.allclose(logp, again, rtol=1e-3, atol=1e-3, equal_nan=True):
            raise ValueError(
                f"{name}.sample must return the log-probabilities that {name}.logp gives for the same actions, here "
                f"{again.tolist()}; got {logp.tolist()}."
            )
        entropy = _call(name, "entropy", gave, lambda: distribution.entropy(params))
        _check(f"{name}.entropy", "entropies [...]", entropy, rows)


def _call(name: str, method: str, gets: str, function: Callable[[], Any]) -> Any:
    """Call a function of the distribution; raise errors with its name and arguments."""
    try:
        return function()
    except Exception as error:
        raise ValueError(f"{name}.{method} raised {described(error)}. It gets {gets}.") from error


def _check_actions(function: str, given: Any, wanted: dict[str, list[int]]) -> None:
    parts = flatten_tree("actions", given) if isinstance(given, Tensor | dict) else {}
    got = {path: list(part.shape) for path, part in parts.items()}
    if got != wanted:
        whole = list(wanted) == ["actions"]
        shape = wanted["actions"] if whole else wanted
        raise ValueError(f"{function} must return actions [..., *action], here {shape}; got {_shapes(given)}.")


def _check(function: str, what: str, given: Any, shape: list[int]) -> None:
    if not isinstance(given, Tensor) or list(given.shape) != shape:
        raise ValueError(f"{function} must return {what}, here {shape}; got {_shapes(given)}.")


def _shapes(given: Any) -> Any:
    if isinstance(given, dict):
        return {key: _shapes(part) for key, part in given.items()}
    return list(given.shape) if isinstance(given, Tensor) else type(given).__name__
