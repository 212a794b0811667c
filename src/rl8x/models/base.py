"""The interface of models, models by name, and the check of their shapes and side effects before training."""

from __future__ import annotations

import copy
import inspect
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Final, NamedTuple

import gymnasium
import torch
from torch import Tensor, nn

from rl8x.execution.execution import kept_generators
from rl8x.models.encoders import is_image
from rl8x.models.layers import check_widths
from rl8x.names import check_arguments, class_named
from rl8x.output import described
from rl8x.plain import thawed
from rl8x.spaces import leaves
from rl8x.trees import flatten_tree

State = dict[str, Tensor]


class Model(nn.Module):
    """A network from observations to the features of an action distribution and to values.

    A model of your own is a subclass with `__init__(self, observation_space, num_features, **model_config)` that calls
    this one's, and `forward`. `build` runs it on an observation of the space, and says what of its results does not
    fit. It acts in evaluation mode, and is in training mode for the losses that train it. With `precision="bf16"` its
    matmuls are bfloat16, but for layers of kind `Head`.

    Args:
        observation_space: Space of one copy's observation.
        num_features: Width of the features that the action distribution needs.

    Raises:
        ValueError: If `num_features` is not a whole number of at least 1.
    """

    recurrent: ClassVar[bool] = False
    """Whether the model carries a state from step to step."""

    def __init__(self, observation_space: gymnasium.Space[Any], num_features: int) -> None:
        super().__init__()
        check_widths(num_features=num_features)
        self.observation_space = observation_space
        self.num_features = num_features

    def initial_state(self, num_envs: int) -> State:
        """Return the state before anything was seen; none when feedforward.

        Args:
            num_envs: Copies of the environment.

        Returns:
            Tensors by name, each `[num_envs, *]`.
        """
        return {}

    def actor_state(self, state: State) -> State:
        """Return the part of a state that `policy_features` needs for actions alone, without the critic's.

        Args:
            state: A whole state, each `[B, *]`.

        Returns:
            Some of these tensors.
        """
        return state

    @abstractmethod
    def forward(self, obs: Any, state: State, starts: Tensor) -> tuple[Tensor, Tensor, State]:
        """Read sequences of observations.

        Args:
            obs: Observations, `[T, B, *obs]`, or a dict of such tensors.
            state: The state before the first of them, each `[B, *]`.
            starts: Where an observation begins an episode, `[T, B]`, bool. A recurrent model resets its
                state there, before it reads the observation.

        Returns:
            Features `[T, B, num_features]`, values `[T, B]`, and the state after the last observation, each `[B, *]`.
        """

    def values(self, obs: Any, state: State, starts: Tensor) -> Tensor:
        """Return the values alone; a subclass may skip the actor's work.

        Args:
            obs: Observations, `[T, B, *obs]`, or a dict of such tensors.
            state: The state before the first of them, each `[B, *]`.
            starts: Where an observation begins an episode, `[T, B]`, bool.

        Returns:
            Values, `[T, B]`.
        """
        values: Tensor = self(obs, state, starts)[1]
        return values

    def policy_features(self, obs: Any, state: State, starts: Tensor) -> tuple[Tensor, State]:
        """Return features and state without values, as `forward` does; a subclass may skip the critic's work.

        Args:
            obs: Observations, `[T, B, *obs]`, or a dict of such tensors.
            state: The state before the first of them, each `[B, *]`, whole or as `actor_state` returns it.
            starts: Where an observation begins an episode, `[T, B]`, bool.

        Returns:
            Features `[T, B, num_features]`, and the state after the last observation, each `[B, *]`.
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
        return _copied(spec)
    cls = model_class(spec, observation_space)
    check_arguments(cls, config, "model_config", num_positional=2)
    return cls(observation_space, num_features, **config)


def _copied(model: Model) -> Model:
    """Return a model with the same weights in memory of its own."""
    try:
        return copy.deepcopy(model)
    except Exception as error:
        raise TypeError(
            f"what is built trains a copy of the {type(model).__name__} given, which cannot be copied "
            f"({str(error).splitlines()[0]:.200}): give the class, and its arguments as `model_config`."
        ) from error


def model_class(spec: str | type[Model] | None, observation_space: gymnasium.Space[Any]) -> type[Model]:
    """Return the class of a model that is not an instance.

    Args:
        spec: Built-in name or a subclass of `Model`; None: as in `make_model`.
        observation_space: Space of one copy's observation.

    Raises:
        TypeError: If `spec` is none of these.
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
    """Return a model's arguments with parts of the observation for the critic alone, and separate networks."""
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
        return dict(model_config)  # the model itself refuses it
    return {"shared": False, **model_config, "critic_obs": [*given, *(name for name in names if name not in given)]}


class TrainingEffects(NamedTuple):
    """The side effects of a model in training mode.

    Attributes:
        draws: Whether it draws from torch's own generators, as dropout does.
        writes: Whether it changes its buffers, as batch normalisation does.
    """

    draws: bool = False
    writes: bool = False


def check_model(model: Model, obs: Any, starts: Tensor) -> TrainingEffects:
    """Run a model in evaluation mode and in training mode, and check its results.

    Neither its buffers nor torch's generators change. It is left in evaluation mode.
    """
    name = type(model).__name__
    state = model.initial_state(starts.shape[1])
    if state and not model.recurrent:
        raise ValueError(f"{name}.initial_state gives a state: write `recurrent = True` in the class {name}.")
    model.eval()
    given, acting = _tried(model, obs, state, starts)
    _check_result(model, given, state, starts)
    for does, what, how in (
        (acting.draws, "draws random numbers", "draw"),
        (acting.writes, "changes its buffers", "change them"),
    ):
        if does:
            raise ValueError(
                f"{name}.forward {what} in evaluation mode too, so that evaluations, played episodes and exports could "
                f"not be repeated: {how} only where `self.training` is true, as nn.Dropout and nn.BatchNorm1d do."
            )
    model.train()
    given, effects = _tried(model, obs, state, starts)
    _check_result(model, given, state, starts)
    model.eval()
    return effects


@torch.no_grad()
def _tried(model: Model, obs: Any, state: State, starts: Tensor) -> tuple[Any, TrainingEffects]:
    """Run a model and undo its side effects; return its results and these effects."""
    kept = [buffer.clone() for buffer in model.buffers()]
    on_cuda = starts.device.type == "cuda"

    def drawn() -> Tensor:
        return torch.cuda.get_rng_state(starts.device) if on_cuda else torch.get_rng_state()

    with kept_generators(starts.device):
        before = drawn()
        given = run_model(model, obs, state, starts)
        draws, writes = not torch.equal(drawn(), before), False
    for buffer, value in zip(model.buffers(), kept, strict=True):
        writes = writes or not torch.equal(buffer.nan_to_num(), value.nan_to_num())
        buffer.copy_(value)
    return given, TrainingEffects(draws, writes)


def run_model(model: Model, obs: Any, state: State, starts: Tensor) -> Any:
    """Call a model, and return what it gives."""
    try:
        return model(obs, state, starts)
    except Exception as error:
        shapes = ", ".join(f"{key} {list(part.shape)}" for key, part in flatten_tree("obs", obs).items())
        raise ValueError(
            f"{type(model).__name__}.forward raised {described(error)}. It gets observations [T, B, *obs], here "
            f"{shapes}, the state before and `starts` [T, B]."
        ) from error


def _check_result(model: Model, given: Any, state: State, starts: Tensor) -> None:
    """Check the shapes of a model's results."""
    name = type(model).__name__
    if not isinstance(given, tuple) or len(given) != 3:
        returned = f"{len(given)} values" if isinstance(given, tuple) else f"a {type(given).__name__}"
        raise ValueError(f"{name}.forward must return features, values and the state after; got {returned}.")
    features, values, after = given
    _check_shape(name, "features [T, B, num_features]", features, [*starts.shape, model.num_features])
    _check_shape(name, "values [T, B]", values, [*starts.shape])
    if _shapes(after) != _shapes(state):
        raise ValueError(
            f"{name}.forward must return a state like the one before, {_shapes(state)}; got {_shapes(after)}."
        )


def _check_shape(name: str, what: str, given: Any, shape: list[int]) -> None:
    got = list(given.shape) if isinstance(given, Tensor) else type(given).__name__
    if got != shape:
        raise ValueError(f"{name}.forward must return {what}, here {shape}; got {got}.")


def _shapes(state: State) -> Any:
    return {key: list(part.shape) for key, part in state.items()} if isinstance(state, dict) else type(state).__name__
