"""Test cells: the environments in which policies are evaluated, and whether training could draw them.

A cell is one value for each test parameter; other parameters have their defaults. A cell is inside the support of the
training if training can draw it, parameter by parameter. So results in contexts of the training are kept apart from
results that need generalisation beyond them (Kirk et al. 2021, arXiv:2111.09794, section 3.1).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from rl8x import randomization
from rl8x.envs.base import Env
from rl8x.envs.parameters import EnvConfig, Parameter, ResolvedConfig, parsed, resolve_config
from rl8x.names import did_you_mean
from rl8x.output import shown
from rl8x.randomization import Choice, ParameterDistribution

MAX_CELLS: Final = 100_000
SPACINGS: Final[dict[str, Any]] = {"linspace": np.linspace, "geomspace": np.geomspace}
# Relative tolerance: 0.6 in a linspace, in a file and in float32 differ slightly.
_EQUAL: Final = 1e-6

Cells = dict[str, NDArray[np.float64]]
"""The value of each test parameter in each cell, `[cells]`."""
Support = dict[str, list[float]]
"""The smallest and the largest value of each parameter that training draws; equal for a fixed one."""


def make_cells(test: Mapping[str, Any], num_cells: int | None = None, seed: int = 0, *, called: str = "test") -> Cells:
    """Make the cells of a test: the grid of all combinations of listed values, or a sample from distributions."""
    if not isinstance(test, Mapping) or not test:
        raise ValueError(
            f"`{called}` must give values to one parameter of the environment at least, as in {{length: [0.25, 0.5]}}; "
            f"got {shown(test)}. `rl8x envs NAME` lists the parameters, `parameters` in `env_kwargs` a simulator's."
        )
    values = {name: _values(f"{called}[{name!r}]", value) for name, value in test.items()}
    drawn = [name for name, value in values.items() if isinstance(value, ParameterDistribution)]
    if not drawn:
        if num_cells is not None:
            raise ValueError("`test_cells` is of a test that samples: without it, listed values are crossed.")
        size = math.prod(len(value) for value in values.values())
        if size > MAX_CELLS:
            raise ValueError(f"`{called}` has {size:,} cells; at most {MAX_CELLS:,}. Take fewer values.")
        crossed = np.meshgrid(*values.values(), indexing="ij")
        return {name: each.reshape(-1).astype(np.float64) for name, each in zip(values, crossed, strict=True)}
    for name, value in values.items():
        if name not in drawn and len(value) > 1:
            raise ValueError(
                f"`{called}` lists values of {name!r} and draws {drawn[0]!r}: list them all, which crosses them, or "
                "draw them all."
            )
    if num_cells is None:
        how = "say by `test_cells` how many cells to draw." if called == "test" else "list its values."
        raise ValueError(f"`{called}` draws {drawn[0]!r}: {how}")
    if not 1 <= num_cells <= MAX_CELLS:
        raise ValueError(f"`test_cells` must be from 1 to {MAX_CELLS:,}; got {num_cells!r}.")
    generator = torch.Generator().manual_seed(seed)
    return {
        name: value.draw(torch.rand(num_cells, generator=generator)).double().numpy()
        if name in drawn
        else np.full(num_cells, value[0])
        for name, value in values.items()
    }


def _values(owner: str, value: Any) -> Any:
    """Return the listed values of a test parameter as an array, or its distribution."""
    if isinstance(value, Mapping):
        kinds = [kind for kind, cls in randomization.KINDS.items() if not (cls.fixed or cls.moves)]
        kind = next(iter(value), None)
        if len(value) == 1 and kind in SPACINGS:
            return _spaced(owner, str(kind), value[kind])
        if len(value) != 1 or kind not in kinds:
            known = [*SPACINGS, *kinds]
            raise ValueError(
                f"{owner} must be a list of numbers, or one of {', '.join(known)}; got {dict(value)!r}."
                f"{did_you_mean(kind, known)}"
            )
        try:
            return randomization.from_dict(value)
        except ValueError as error:
            raise ValueError(f"{owner}: {error}") from None
    value = value.tolist() if isinstance(value, np.ndarray | torch.Tensor) else value
    numbers = list(value) if isinstance(value, Sequence) and not isinstance(value, str) else [value]
    if not numbers:
        raise ValueError(f"{owner} has no values, so that there is no cell to test in. List at least one.")
    for number in numbers:
        if isinstance(number, bool) or not isinstance(number, Real) or not math.isfinite(number):
            raise ValueError(f"{owner} must have finite numbers; got {number!r}.")
        if numbers.count(number) > 1:
            raise ValueError(f"{owner} has {number!r} twice.")
    return np.asarray(numbers, dtype=np.float64)


def _spaced(owner: str, kind: str, arguments: Any) -> NDArray[np.float64]:
    try:
        low, high, count = arguments
        ends = float(low), float(high)
        whole = int(count)
    except (TypeError, ValueError):
        raise ValueError(f"{owner}: {kind!r} takes [low, high, count]; got {arguments!r}.") from None
    if whole != count or whole < 1:
        raise ValueError(f"{owner}: {kind!r} needs a count of at least 1; got {count!r}: there would be no cell.")
    if whole > MAX_CELLS:
        raise ValueError(f"{owner}: {whole:,} values are too many; at most {MAX_CELLS:,} cells. Take fewer values.")
    if not (math.isfinite(ends[0]) and math.isfinite(ends[1]) and ends[0] < ends[1]) or (
        kind == "geomspace" and ends[0] <= 0
    ):
        raise ValueError(
            f"{owner}: {kind!r} needs low < high" + (" and low > 0" * (kind == "geomspace")) + f"; got {ends}."
        )
    return np.asarray(SPACINGS[kind](*ends, whole), dtype=np.float64)


def num_cells(cells: Cells) -> int:
    """Return how many cells there are."""
    return len(next(iter(cells.values())))


def check_test(env: Env, cells: Cells, episodes: int, *, name: str, called: str = "test") -> None:
    """Raise `ValueError` if cells cannot be tested: episodes never end, too few copies, or illegal parameters."""
    if not env.episodic:
        raise ValueError(
            f"the episodes of {name} never end, so that there are none to test by. Give it a `time_limit` in "
            "env_kwargs."
        )
    if env.max_num_envs is not None and episodes > env.max_num_envs:
        raise ValueError(
            f"`episodes` is {episodes}, which are played at once, and {name} has at most {env.max_num_envs} copies: "
            "give as many, or fewer."
        )
    values, owner = {name: each.tolist() for name, each in cells.items()}, f"{type(env).__name__}: {called}"
    _resolved(values, env.parameters, num_cells(cells), owner=owner, copies="cells")


def inside(cells: Cells, config: EnvConfig, parameters: Mapping[str, Parameter], num_envs: int) -> NDArray[np.bool_]:
    """Return which cells training can draw, bool `[cells]`; a parameter that either does not name has its default."""
    resolved = _resolved(config, parameters, num_envs)
    wanted = {name: cells.get(name, np.full(num_cells(cells), each.default)) for name, each in parameters.items()}
    # Values for each copy are drawn together: copy i has the i-th of each. Equal copies are compared once.
    rows = [values.double().numpy() for values in resolved.fixed.values()]
    is_inside = np.zeros(num_cells(cells), dtype=bool)
    for row in np.unique(np.stack(rows, axis=1), axis=0) if rows else np.zeros((1, 0)):
        same = [_is_equal(wanted[name], value) for name, value in zip(resolved.fixed, row, strict=True)]
        is_inside |= np.all(same, axis=0)
    for name, distribution in resolved.drawn.items():
        if isinstance(distribution, Choice):
            is_inside &= np.any([_is_equal(wanted[name], value) for value in distribution.possible], axis=0)
        else:
            is_inside &= _is_between(wanted[name], *distribution.support)
    return is_inside


def support(config: EnvConfig, parameters: Mapping[str, Parameter], num_envs: int) -> Support:
    """Return the smallest and largest value of each parameter that training draws under an `env_config`."""
    ends = _resolved(config, parameters, num_envs).support(parameters)
    return {name: list(pair) for name, pair in ends.items()}


def why_none_is_inside(cells: Cells, trained: Mapping[str, Sequence[float]]) -> str:
    """Explain why no cell is in the training's support; name a parameter whose trained values no cell has, if any."""
    for name, values in cells.items():
        low, high = trained[name]
        if not np.any(_is_between(values, low, high)):
            between = f"{low:g}" if low == high else f"from {low:g} to {high:g}"
            return f"no test cell is inside of what it is trained on: none has {name} {between}"
    return (
        "no test cell is inside of what it is trained on: none has all of it at once (a parameter that the test does "
        "not name has its default)"
    )


def _resolved(
    config: EnvConfig,
    parameters: Mapping[str, Parameter],
    num_envs: int,
    owner: str = "env_config",
    copies: str = "num_envs",
) -> ResolvedConfig:
    options: Any = {"owner": owner, "num_envs": num_envs, "device": torch.device("cpu"), "copies": copies}
    return resolve_config(parsed(config), parameters, **options)


def _is_equal(values: NDArray[np.float64], value: float) -> NDArray[np.bool_]:
    return np.isclose(values, value, rtol=_EQUAL, atol=_EQUAL * 1e-3)


def _is_between(values: NDArray[np.float64], low: float, high: float) -> NDArray[np.bool_]:
    return ((values >= low) & (values <= high)) | _is_equal(values, low) | _is_equal(values, high)
