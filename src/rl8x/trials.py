"""Tries custom models and distributions on two rows before training, and checks their results."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor

from rl8x.distributions import Distribution
from rl8x.execution.execution import kept_generators
from rl8x.execution.private import tree_flatten
from rl8x.models import Model, State
from rl8x.models.base import TrainingEffects
from rl8x.output import described
from rl8x.trees import Tree, flatten_tree, tree_map

_ROWS: Final = 2


def run_model(model: Model, obs: Any, state: State, starts: Tensor) -> Any:
    """Call a model on sequences of observations, and return its results."""
    shapes = ", ".join(f"{key} {list(part.shape)}" for key, part in flatten_tree("obs", obs).items())
    gets = f"observations [T, B, *obs], here {shapes}, the state before and `starts` [T, B]"
    return _called(f"{type(model).__name__}.forward", gets, lambda: model(obs, state, starts))


def check_model(model: Model, obs: Any, starts: Tensor) -> TrainingEffects:
    """Check a model's results in both modes; return its effects in training mode, and leave it in evaluation mode."""
    name = type(model).__name__
    state = model.initial_state(starts.shape[1])
    if state and not model.recurrent:
        raise ValueError(f"{name}.initial_state gives a state: write `recurrent = True` in the class {name}.")
    draws, writes = _effects(model.eval(), obs, state, starts)
    if draws or writes:
        what, how = ("draws random numbers", "draw") if draws else ("changes its buffers", "change them")
        raise ValueError(
            f"{name}.forward {what} in evaluation mode too, so that evaluations, played episodes and exports could "
            f"not be repeated: {how} only where `self.training` is true, as nn.Dropout and nn.BatchNorm1d do."
        )
    with torch.no_grad():
        once, again = (run_model(model, obs, state, starts)[:2] for _ in range(2))
    if not all(map(functools.partial(torch.allclose, rtol=1e-4, atol=1e-5, equal_nan=True), once, again)):
        raise ValueError(
            f"{name}.forward gives two results for the same arguments: what it remembers from call to call has to be "
            "its state (`recurrent = True`, `initial_state`), which is reset where an episode begins."
        )
    effects = _effects(model.train(), obs, state, starts)
    model.eval()
    return effects


@torch.no_grad()
def _effects(model: Model, obs: Any, state: State, starts: Tensor) -> TrainingEffects:
    """Run a model, check its results, undo its side effects, and return which there were."""
    kept = [buffer.clone() for buffer in model.buffers()]
    random_state = torch.cuda.get_rng_state if starts.device.type == "cuda" else lambda _: torch.get_rng_state()
    with kept_generators(starts.device):
        before = random_state(starts.device)
        given = run_model(model, obs, state, starts)
        draws, writes = not torch.equal(random_state(starts.device), before), False
    for buffer, value in zip(model.buffers(), kept, strict=True):
        writes = writes or not torch.equal(buffer.nan_to_num(), value.nan_to_num())
        buffer.copy_(value)
    function = f"{type(model).__name__}.forward"
    if not isinstance(given, tuple) or len(given) != 3:
        returned = f"{len(given)} values" if isinstance(given, tuple) else f"a {type(given).__name__}"
        raise ValueError(f"{function} must return features, values and the state after; got {returned}.")
    features, values, after = given
    _check(function, "features [T, B, num_features]", features, [*starts.shape, model.num_features])
    _check(function, "values [T, B]", values, [*starts.shape])
    _check(function, "a state like the one before", after, _shapes(state))
    return TrainingEffects(draws, writes)


@torch.no_grad()
def check_distribution(distribution: Distribution, action: Tree, device: torch.device) -> None:
    """Call each function of a distribution twice on features of two rows, and check the results."""
    name, rows, size = type(distribution).__name__, [_ROWS], (_ROWS, distribution.num_noise)
    generator = torch.Generator(device).manual_seed(0)
    features = torch.randn(_ROWS, distribution.num_features, generator=generator, device=device)
    actions_shape = tree_map(lambda part: rows + list(part.shape[1:]), action)

    def call(method: str, gets: str, *arguments: Any) -> Any:
        results = []
        for _ in range(2):
            made = _called(f"{name}.{method}", gets, lambda: getattr(distribution, method)(*arguments))
            results.append([each.clone() for each in tree_flatten(made)[0] if isinstance(each, Tensor)])
        pairs = zip(*results, strict=True)
        if not all(torch.allclose(one.double(), other.double(), equal_nan=True) for one, other in pairs):
            raise ValueError(
                f"{name}.{method} gives two results for the same arguments: it must be a pure function of them, which "
                "changes nothing and draws no random numbers. The noise of `sample` has `num_noise` of them a row."
            )
        return made

    gave = "what from_features gave"
    params = call("from_features", f"features {list(features.shape)}, and a mask or None", features, None)
    noise = distribution.draw(size, generator=generator, device=device)
    drawn = call("sample", f"{gave}, and noise {list(size)}", params, noise)
    if not isinstance(drawn, tuple) or len(drawn) != 2:
        raise ValueError(f"{name}.sample must return actions and log-probabilities; got {_shapes(drawn)} alone.")
    actions, logp = drawn
    _check(f"{name}.sample", "actions [..., *action]", actions, actions_shape)
    _check(f"{name}.sample", "log-probabilities [...]", logp, rows)
    _check(f"{name}.mode", "actions [..., *action]", call("mode", gave, params), actions_shape)
    again = call("logp", f"{gave}, and sampled actions", params, actions)
    _check(f"{name}.logp", "log-probabilities [...]", again, rows)
    if not torch.allclose(logp, again, rtol=1e-3, atol=1e-3, equal_nan=True):
        raise ValueError(
            f"{name}.sample must return the log-probabilities that {name}.logp gives for the same actions, here "
            f"{again.tolist()}; got {logp.tolist()}."
        )
    _check(f"{name}.entropy", "entropies [...]", call("entropy", gave, params), rows)


def _called(function: str, gets: str, call: Callable[[], Any]) -> Any:
    """Make a call; raise its errors as a `ValueError` with the function's name and arguments."""
    try:
        return call()
    except Exception as error:
        raise ValueError(f"{function} raised {described(error)}. It gets {gets}.") from error


def _check(function: str, what: str, given: Any, shapes: Any) -> None:
    if _shapes(given) != shapes:
        raise ValueError(f"{function} must return {what}, here {shapes}; got {_shapes(given)}.")


def _shapes(given: Any) -> Any:
    """Return the shape of a tensor, `[*]`, or the shapes of a dict of tensors; for anything else, its type."""
    if isinstance(given, dict):
        return {key: _shapes(part) for key, part in given.items()}
    return list(given.shape) if isinstance(given, Tensor) else type(given).__name__
