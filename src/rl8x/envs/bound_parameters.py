"""Sets bound parameters in one simulator, or in each copy that a Gymnasium vector environment steps.

A copy applies the values of its next episode when it is reset, by any caller. The values are in a table that
processes share, and a wrapper around each copy reads its row before the reset. So the first observation already comes
from the new physics.
"""

from __future__ import annotations

import functools
import math
import shutil
import tempfile
import weakref
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, TypeVar

import gymnasium
import numpy as np
import torch
from gymnasium.vector import SyncVectorEnv, VectorEnv
from torch import Tensor

from rl8x.envs.bindings import Binding, Function, Scale, Value, in_parameter
from rl8x.envs.mujoco_model import derive_constants
from rl8x.envs.parameters import Parameter, ResolvedConfig

Result = TypeVar("Result")


class BoundSimulator:
    """One unwrapped simulator and the bindings of its parameters, by name."""

    def __init__(self, simulator: Any, bindings: Mapping[str, Binding], owner: str = "") -> None:
        self.simulator, self.bindings = simulator, bindings
        self.originals: dict[str, Any] = {}
        self.parameters: dict[str, Parameter] = {}
        for name, binding in bindings.items():
            with in_parameter(name, owner):
                self.originals[name] = binding.read(simulator)
                self.parameters[name] = binding.parameter(self.originals[name])
        self._values: dict[str, Value | None] = dict.fromkeys(bindings)
        self._written: list[str] = []
        # A function need not be called with its default, which changes nothing; what it sets is unknown.
        self._functions = {name for name, binding in bindings.items() if isinstance(binding, Function)}

    def set(self, values: Mapping[str, Value | None]) -> None:
        """Set the values if some differ from those in force; None is the binding's default, or the original value."""
        values = {
            name: self.bindings[name].default if value is None and name not in self._functions else value
            for name, value in values.items()
        }
        if all(_same(value, self._values[name]) for name, value in values.items()):
            return
        # All that were ever set are set again, originals first: as bindings may overlap, only the values then count.
        written = [name for name, value in values.items() if value is not None or name in self._written]
        self._written = sorted(written, key=lambda name: values[name] is not None)
        for name in self._written:
            with in_parameter(name):
                self.bindings[name].write(self.simulator, self.originals[name], values[name])
        derive_constants(self.simulator, [self.bindings[name] for name in self._written])
        self._values = values

    def reset_under(self, values: Mapping[str, Value | None], reset: Callable[[], Result]) -> Result:
        """Set the values, call `reset` and return its result; raise `RuntimeError` if the reset overwrites a value."""
        self.set(values)
        watched = [name for name in self._written if name not in self._functions]
        written = {name: self.bindings[name].read(self.simulator) for name in watched}
        result = reset()
        for name in watched:
            binding = self.bindings[name]
            both = (
                each if isinstance(each, list) else [each] for each in (written[name], binding.read(self.simulator))
            )
            if not all(map(np.array_equal, *both)):
                raise RuntimeError(
                    f"parameters[{name!r}]: reset() of {type(self.simulator).__name__} sets {binding} itself, so that "
                    "the value has no effect. Set what it is computed from."
                )
        return result


def _same(value: Value | None, other: Value | None) -> bool:
    if isinstance(value, Tensor) and isinstance(other, Tensor):
        return value is other or torch.equal(value, other)
    return not isinstance(value, Tensor) and not isinstance(other, Tensor) and value == other


class SharedTable(np.memmap[Any, np.dtype[np.float64]]):
    """A table in a file that processes map into memory: cloudpickle tells Gymnasium's processes its path."""

    def __reduce__(self) -> tuple[Any, ...]:
        return np.memmap, (self.filename, self.dtype, "r", 0, self.shape)


class ParameterWrapper(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Sets a copy's parameters before each of its resets, from its row of a table."""

    copy_index: int = 0

    def __init__(self, env: gymnasium.Env[Any, Any], bindings: Mapping[str, Binding], table: Any) -> None:
        super().__init__(env)
        self.table = table
        self.bound = BoundSimulator(env.unwrapped, bindings)
        self.parameters = self.bound.parameters

    def reset(self, **kwargs: Any) -> Any:
        """Reset under the values in the copy's row of the table."""
        row = zip(self.bound.bindings, self.table[self.copy_index].tolist(), strict=True)
        values = {name: None if math.isnan(value) else value for name, value in row}
        return self.bound.reset_under(values, lambda: self.env.reset(**kwargs))


class BoundCopies:
    """The bound copies of a vector environment, each with its own simulator; they apply values at their resets."""

    def __init__(self, bindings: Mapping[str, Binding], num_envs: int, *, processes: bool) -> None:
        self.bindings, shape = bindings, (num_envs, len(bindings))
        self.table: Any = np.empty(shape)
        if processes:
            folder = tempfile.mkdtemp(prefix="rl8x-")
            weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
            path = Path(folder, "table")
            path.write_bytes(bytes(8 * math.prod(shape)))  # a full disk refuses it here, and not by SIGBUS later
            self.table = SharedTable(path, np.float64, "r+", shape=shape)
        self.wrapped = functools.partial(ParameterWrapper, bindings=bindings, table=self.table)
        self.put({}, ())
        self.parameters: Mapping[str, Parameter] = {}

    def adopt(self, vector_env: VectorEnv[Any, Any, Any]) -> None:
        """Give each copy its index, and read the parameters; copies in this process are wrapped here."""
        inner: Any = vector_env.unwrapped
        if isinstance(inner, SyncVectorEnv):
            inner.envs = [self.wrapped(env) for env in inner.envs]
        inner.set_attr("copy_index", list(range(vector_env.num_envs)))
        self.parameters = inner.get_attr("parameters")[0]

    def put(self, values: Mapping[str, Tensor], named: Collection[str]) -> None:
        """Write the values of the `named` parameters, `[num_envs]` each, to the table, for the copies' next resets."""
        rows = np.full(self.table.shape, np.nan)
        for i, name in enumerate(self.bindings):
            if name in named:
                rows[:, i] = values[name].cpu().numpy()
        self.table[:] = rows


class BoundBatch(BoundSimulator):
    """A bound simulator that steps all copies itself; only rows and functions set different values for copies."""

    def __init__(self, bindings: Mapping[str, Binding], simulator: Any, *, resets_itself: bool, advice: str) -> None:
        super().__init__(simulator, bindings)
        self._resets_itself, self._advice = resets_itself, advice

    def check(self, resolved: ResolvedConfig, owner: str) -> None:
        """Raise `ValueError` if copies get different values of a shared attribute, or a value cannot be set in time."""
        for name in resolved.config:
            binding, fixed = self.bindings[name], resolved.fixed.get(name)
            if not _is_by_copy(binding) and (fixed is None or bool((fixed != fixed[0]).any())):
                raise ValueError(
                    f"{owner}[{name!r}] must be a number for all copies: {binding} serves all of them. {self._advice}"
                )
            if fixed is None and self._resets_itself:
                raise ValueError(
                    f"{owner}[{name!r}] must be a number, one for each copy or a Grid: the simulator starts episodes "
                    "within its step, before values drawn for them could be set."
                )

    def put(self, values: Mapping[str, Tensor], named: Collection[str]) -> None:
        """Set the values of the `named` parameters, `[num_envs]` each, immediately; the others get their defaults."""
        put: dict[str, Value | None] = dict.fromkeys(self.bindings)
        # Once a function has been called, it is also called with its default.
        for name in {*named, *self._functions.intersection(self._written)}:
            put[name] = values[name] if _is_by_copy(self.bindings[name]) else float(values[name][0])
        self.set(put)


def _is_by_copy(binding: Any) -> bool:
    """Whether a binding can set a different value for each copy: by rows of an array, or by a function."""
    if isinstance(binding, Scale):
        return all(map(_is_by_copy, binding.parts))
    return isinstance(binding, Function) or getattr(binding, "per_copy", False)
