"""Check the shapes and side effects of a model before training."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from rl8x.execution.threads import kept_generators
from rl8x.models.base import Model, State
from rl8x.output import described
from rl8x.trees import flatten_tree


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

    Args:
        model: The model.
        obs: Observations, `[T, B, *obs]` or a dict of them.
        starts: Where an observation begins an episode, `[T, B]`, bool.

    Returns:
        Its side effects in training mode.

    Raises:
        ValueError: If `initial_state` or `forward` fails or gives something else, or it draws random numbers or changes
            buffers in evaluation mode.
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
    """Call a model, and return what it gives.

    Args:
        model: The model.
        obs: Observations, `[T, B, *obs]` or a dict of such.
        state: The state before the first of them, each `[B, *]`.
        starts: Where an observation begins an episode, `[T, B]`, bool.

    Raises:
        ValueError: If it raises.
    """
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
