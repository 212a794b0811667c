"""Check the shapes and log-probabilities of a distribution before training."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from rl8x.distributions.base import Distribution
from rl8x.output import described
from rl8x.trees import Tree, flatten_tree

_ROWS = 2


def check_distribution(distribution: Distribution, action: Tree, device: torch.device) -> None:
    """Call each function of a distribution on features of two rows, and check the results.

    Args:
        distribution: The distribution, over the space of `action`.
        action: One action, `[1, *action]` or a dict of them.
        device: Where its tensors live.

    Raises:
        ValueError: If a function fails, or gives something else.
    """
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
