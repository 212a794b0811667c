"""The interface of models, and models by name."""

from __future__ import annotations

import copy
import inspect
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Final, NamedTuple

import gymnasium
from torch import Tensor, nn

from rl8x.models.encoders import is_image
from rl8x.models.layers import check_widths
from rl8x.names import check_arguments, class_named
from rl8x.plain import thawed
from rl8x.spaces import leaves

State = dict[str, Tensor]


class Model(nn.Module):
    """A network from observations to the features of an action distribution and to values.

    A model of your own is a subclass with `__init__(self, observation_space, num_features, **model_config)` that calls
    this one's, and with `forward`. `build` runs it on an observation of the space, and reports results that do not
    fit. It acts in evaluation mode, and computes training losses in training mode. With `precision="bf16"` its matmuls
    are bfloat16, except in `Head` layers.

    Args:
        observation_space: Space of one copy's observation.
        num_features: Width of the features that the action distribution needs, at least 1.
    """

    recurrent: ClassVar[bool] = False
    """Whether the model carries a state from step to step."""

    def __init__(self, observation_space: gymnasium.Space[Any], num_features: int) -> None:
        super().__init__()
        check_widths(num_features=num_features)
        self.observation_space = observation_space
        self.num_features = num_features

    def initial_state(self, num_envs: int) -> State:
        """Return the initial state, tensors by name, each `[num_envs, *]`; empty when feedforward.

        Args:
            num_envs: Copies of the environment.
        """
        return {}

    def actor_state(self, state: State) -> State:
        """Return the part of a state that `policy_features` needs for actions, without the critic's.

        Args:
            state: A whole state, each `[B, *]`.
        """
        return state

    @abstractmethod
    def forward(self, obs: Any, state: State, starts: Tensor) -> tuple[Tensor, Tensor, State]:
        """Read sequences; return features `[T, B, num_features]`, values `[T, B]`, and the state after, each `[B, *]`.

        Args:
            obs: Observations, `[T, B, *obs]`, or a dict of such tensors.
            state: The state before the first of them, each `[B, *]`.
            starts: Where an observation begins an episode, `[T, B]`, bool. A recurrent model resets its state there,
                before it reads the observation.
        """

    def values(self, obs: Any, state: State, starts: Tensor) -> Tensor:
        """Return the values alone, `[T, B]`, given the arguments of `forward`; a subclass may skip the actor's work."""
        values: Tensor = self(obs, state, starts)[1]
        return values

    def policy_features(self, obs: Any, state: State, starts: Tensor) -> tuple[Tensor, State]:
        """Return features and state without values; a subclass may skip the critic's work.

        It takes the arguments of `forward`; the state, each `[B, *]`, may be what `actor_state` returns.
        """
        features, _, state = self(obs, state, starts)
        return features, state


BUILTIN: Final[dict[str, type[Model]]] = {}
"""The built-in models by name, which the package fills."""


def make_model(
    spec: str | type[Model] | Model | None,
    observation_space: gymnasium.Space[Any],
    num_features: int,
    model_config: Mapping[str, Any] | None = None,
) -> Model:
    """Make a model, or copy a given instance, so that algorithms built from one config share no weights.

    Args:
        spec: Built-in name, a subclass of `Model`, or an instance, which stays as it is; None: `"cnn"` where there are
            images, else `"mlp"`.
        observation_space: Space of one copy's observation.
        num_features: Width of the features that the action distribution needs.
        model_config: Further arguments of the model's class; none may be given with an instance.

    Raises:
        TypeError: If `spec` is none of these, or an instance cannot be copied.
        ValueError: If the name or an argument is unknown, or an instance does not fit the action distribution.
    """
    config = thawed(dict(model_config or {}))
    if isinstance(spec, Model):
        name = type(spec).__name__
        if config:
            given = ", ".join(config)
            raise ValueError(f"`model_config` ({given}) needs a model's name or class, not an instance of {name}.")
        if spec.num_features != num_features:
            features = f"num_features={spec.num_features}"
            raise ValueError(f"the {name} given has {features}, but the action distribution needs {num_features}.")
        try:
            return copy.deepcopy(spec)
        except Exception as error:
            raise TypeError(
                f"what is built trains a copy of the {name} given, which cannot be copied "
                f"({str(error).splitlines()[0]:.200}): give the class, and its arguments as `model_config`."
            ) from error
    cls = model_class(spec, observation_space)
    check_arguments(cls, config, "model_config", num_positional=2)
    return cls(observation_space, num_features, **config)


def model_class(spec: str | type[Model] | None, observation_space: gymnasium.Space[Any]) -> type[Model]:
    """Return the class of a model that is not an instance.

    Args:
        spec: Built-in name or a subclass of `Model`; None: as in `make_model`.
        observation_space: Space of one copy's observation.

    Raises:
        TypeError: If `spec` is neither.
        ValueError: If the name is unknown.
    """
    named = default_model(observation_space) if spec is None else spec
    return class_named("model", named, BUILTIN, Model, ", a subclass of Model or an instance")


def default_model(observation_space: gymnasium.Space[Any]) -> str:
    """Return the name of the model for observations of a space: `"cnn"` where there are images, else `"mlp"`."""
    return "cnn" if any(is_image(leaf) for _, leaf in leaves(observation_space)) else "mlp"


def config_with_critic_obs(
    names: Sequence[str], spec: Any, space: gymnasium.Space[Any], model_config: Mapping[str, Any]
) -> dict[str, Any]:
    """Return a model's arguments with critic-only parts of the observation, and with separate networks."""
    listed = ", ".join(map(repr, names))
    cls = model_class(spec, space) if not isinstance(spec, Model) else None
    if cls is None or not {"critic_obs", "shared"} <= inspect.signature(cls).parameters.keys():
        raise ValueError(
            f"the environment shows {listed} to the critic alone (observe_parameters='critic'), which "
            f"{type(spec).__name__ if cls is None else cls.__name__} cannot: give a model with the arguments "
            "`critic_obs` and `shared` by name or class, or use observe_parameters='all'."
        )
    given = model_config.get("critic_obs", ())
    if isinstance(given, str):
        return dict(model_config)  # the model itself rejects it
    return {"shared": False, **model_config, "critic_obs": [*given, *(name for name in names if name not in given)]}


class TrainingEffects(NamedTuple):
    """The side effects of a model in training mode."""

    draws: bool = False  # from torch's own generators, as dropout does
    writes: bool = False  # into its buffers, as batch normalisation does
