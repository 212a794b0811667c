"""Check a model before training: what it gives for observations, each fault named with both shapes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rl8x.models.base import Model, State
from rl8x.output import described
from rl8x.trees import flatten_tree


def check_model(model: Model, obs: Any, starts: Tensor) -> None:
    """Run a model once, and compare what it gives with what it must.

    Neither its buffers nor torch's generators change.

    Args:
        model: The model.
        obs: Observations, `[T, B, *obs]` or a dict of such.
        starts: Where an observation begins an episode, `[T, B]`, bool.

    Raises:
        ValueError: If `initial_state` or `forward` fails or gives something else.
    """
    name, kept = type(model).__name__, [buffer.clone() for buffer in model.buffers()]
    devices = [starts.device] if starts.device.type == "cuda" else []
    with torch.no_grad(), torch.random.fork_rng(devices=devices):
        state = model.initial_state(starts.shape[1])
        if state and not model.recurrent:
            raise ValueError(f"{name}.initial_state gives a state: write `recurrent = True` in the class {name}.")
        try:
            given: Any = model(obs, state, starts)
        except Exception as error:
            shapes = ", ".join(f"{key} {list(part.shape)}" for key, part in flatten_tree("obs", obs).items())
            raise ValueError(
                f"{name}.forward raised {described(error)}. It gets observations [T, B, *obs], here {shapes}, the "
                "state before and `starts` [T, B]."
            ) from error
        for buffer, before in zip(model.buffers(), kept, strict=True):
            buffer.copy_(before)
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
