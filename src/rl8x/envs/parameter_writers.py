"""Setting parameters in simulators: in one, or in each of the copies that a Gymnasium vector environment steps.

A copy takes the values of an episode over when it is reset, whoever resets it: they lie ready in a table, which
processes share, and a wrapper around each copy reads its row before the reset. So the first observation is of the new
physics.
"""

from __future__ import annotations

import math
import os
import weakref
from collections.abc import Collection, Mapping, Sequence
from multiprocessing import resource_tracker
from multiprocessing.shared_memory import SharedMemory
from typing import Any, Protocol

import gymnasium
import numpy as np
import torch
from gymnasium.vector import SyncVectorEnv, VectorEnv
from torch import Tensor

from rl8x.envs.mujoco_model import ModelField, derive_constants
from rl8x.envs.parameters import Parameter, ResolvedConfig
from rl8x.envs.setter_base import Setter, Value
from rl8x.envs.setters import Function
from rl8x.processes import lending_variables


class Simulator:
    """One simulator and what is set in it.

    Args:
        simulator: The unwrapped environment.
        setters: A setter for each parameter, by its name.

    Raises:
        ValueError: If something of it is not there.
    """

    def __init__(self, simulator: Any, setters: Mapping[str, Setter]) -> None:
        self.simulator, self.setters = simulator, setters
        self.originals: dict[str, Any] = {}
        self.parameters: dict[str, Parameter] = {}
        for name, setter in setters.items():
            try:
                self.originals[name] = setter.read(simulator)
                self.parameters[name] = setter.parameter(self.originals[name])
            except ValueError as error:
                raise ValueError(f"parameters[{name!r}]: {error}") from None
        self._values: dict[str, Value | None] = dict.fromkeys(setters)
        self._written: dict[str, Value | None] = {}

    def set(self, values: Mapping[str, Value | None]) -> None:
        """Set the values that differ from those in force; None is the simulator's own, exactly.

        What one setter writes may be part of what another does, as a mass and a total mass: where anything changes, all
        that was ever set is set again, in the order of the mapping, so that the result depends on the values alone.
        """
        values = {name: self.setters[name].unset if value is None else value for name, value in values.items()}
        if all(_same(value, self._values[name]) for name, value in values.items()):
            return
        names = [name for name, value in values.items() if value is not None or name in self._written]
        self._written = {name: values[name] for name in names}
        for name in names:
            try:
                self.setters[name].write(self.simulator, self.originals[name], values[name])
            except ValueError as error:
                raise ValueError(f"parameters[{name!r}]: {error}") from None
        if any(_sets_model(self.setters[name]) for name in names):
            derive_constants(self.simulator)
        self._values = values

    def check(self) -> None:
        """Raise where a reset has undone what was set.

        Raises:
            RuntimeError: If it has.
        """
        for name, value in self._written.items():
            if not self.setters[name].holds(self.simulator, self.originals[name], value):
                raise RuntimeError(
                    f"parameters[{name!r}]: reset() of {type(self.simulator).__name__} sets {self.setters[name]} "
                    "itself, so that the value has no effect. Set what it is computed from."
                )


class SharedTable:
    """Numbers that processes share by name, which Gymnasium can take along however it starts them.

    It hands things over by cloudpickle, which `multiprocessing.Array` does not go through. The memory is released when
    the table of the process that made it is gone.
    """

    def __init__(self, values: Sequence[float]) -> None:
        self.length = len(values)
        with lending_variables():
            resource_tracker.ensure_running()  # a Python process, which shared memory would start
        self.memory = SharedMemory(create=True, size=8 * self.length)
        weakref.finalize(self, _release, self.memory, os.getpid())
        self[:] = values

    def __getitem__(self, rows: slice) -> list[float]:
        values: list[float] = self._array()[rows].tolist()
        return values

    def __setitem__(self, rows: slice, values: Sequence[float]) -> None:
        self._array()[rows] = values

    def __reduce__(self) -> tuple[Any, ...]:
        return _attached, (self.memory.name, self.length)

    def _array(self) -> np.ndarray:
        assert self.memory.buf is not None
        return np.frombuffer(self.memory.buf, np.float64, self.length)


def _attached(name: str, length: int) -> SharedTable:
    """Return the table in another process."""
    table = SharedTable.__new__(SharedTable)
    table.length, table.memory = length, SharedMemory(name)
    return table


def _release(memory: SharedMemory, maker: int) -> None:
    if os.getpid() == maker:
        memory.close()
        memory.unlink()


class ParameterWrapper(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Sets a copy's parameters before each of its resets."""

    copy_index: int = 0
    """Which row of the table is this copy's."""

    def __init__(self, env: gymnasium.Env[Any, Any], setters: Mapping[str, Setter], table: Any) -> None:
        super().__init__(env)
        self.table = table
        self.set_in = Simulator(env.unwrapped, setters)
        self.parameters = self.set_in.parameters

    def reset(self, **kwargs: Any) -> Any:
        """Reset under the values in the copy's row of the table."""
        names = list(self.set_in.setters)
        first = self.copy_index * len(names)
        row = zip(names, self.table[first : first + len(names)], strict=True)
        self.set_in.set({name: None if math.isnan(value) else value for name, value in row})
        result = self.env.reset(**kwargs)
        self.set_in.check()
        return result


class ParameterWriter(Protocol):
    """Sets the parameters of all copies."""

    parameters: Mapping[str, Parameter]

    def check(self, resolved: ResolvedConfig, owner: str) -> None:
        """Raise ValueError where a configuration cannot be set here."""

    def put(self, values: Mapping[str, Tensor], named: Collection[str]) -> None:
        """Set the values, float32 `[num_envs]` each, of the parameters that are named; the others stay at defaults."""


class PerCopyWriter:
    """The copies of a vector environment, each an environment of its own; they take values over when they are reset."""

    def __init__(self, setters: Mapping[str, Setter], num_envs: int, *, processes: bool) -> None:
        self.setters, size = setters, num_envs * len(setters)
        nothing = [math.nan] * size
        self.table: SharedTable | list[float] = SharedTable(nothing) if processes else nothing
        self.parameters: Mapping[str, Parameter] = {}

    def wrapped(self, env: gymnasium.Env[Any, Any]) -> ParameterWrapper:
        """Wrap one copy."""
        return ParameterWrapper(env, self.setters, self.table)

    def adopt(self, vector_env: VectorEnv[Any, Any, Any]) -> None:
        """Give each copy its index, and read the parameters; copies in this process are wrapped here."""
        inner: Any = vector_env.unwrapped
        if isinstance(inner, SyncVectorEnv):
            inner.envs = [self.wrapped(env) for env in inner.envs]
        inner.set_attr("copy_index", list(range(vector_env.num_envs)))
        self.parameters = inner.get_attr("parameters")[0]

    def check(self, resolved: ResolvedConfig, owner: str) -> None:
        """Take anything."""

    def put(self, values: Mapping[str, Tensor], named: Collection[str]) -> None:
        """Lay values ready, `[num_envs]` each; a copy takes its own at its next reset."""
        columns = [
            value.cpu().double() if name in named else torch.full(value.shape, math.nan, dtype=torch.float64)
            for name, value in ((name, values[name]) for name in self.setters)
        ]
        self.table[:] = torch.stack(columns, 1).flatten().tolist()


class BatchedWriter:
    """A simulator that steps all copies itself.

    Its attributes serve all of them, but for those with a row for each copy and what functions set. Where it resets
    copies in the step that ends an episode, nothing can be set between the two, so that values hold from one reset of
    all copies to the next.
    """

    def __init__(self, setters: Mapping[str, Setter], simulator: Any, *, resets_itself: bool, advice: str) -> None:
        self.advice = advice
        self.simulator, self.resets_itself = Simulator(simulator, setters), resets_itself
        self.parameters: Mapping[str, Parameter] = self.simulator.parameters
        self._by_function: set[str] = set()

    def check(self, resolved: ResolvedConfig, owner: str) -> None:
        """Raise where a value is not for all copies, or changes when nothing can be set.

        Raises:
            ValueError: If there is such a value.
        """
        for name in resolved.given:
            setter, fixed = self.simulator.setters[name], resolved.fixed.get(name)
            if not setter.by_copy and (fixed is None or bool((fixed != fixed[0]).any())):
                raise ValueError(
                    f"{owner}[{name!r}] must be a number for all copies: {setter} serves all of them. {self.advice}"
                )
            if fixed is None and self.resets_itself:
                raise ValueError(
                    f"{owner}[{name!r}] must be a number, one for each copy or a Grid: the simulator starts episodes "
                    "within its step, before values drawn for them could be set."
                )

    def put(self, values: Mapping[str, Tensor], named: Collection[str]) -> None:
        """Set values, `[num_envs]` each, at once."""
        self._by_function |= {name for name in named if isinstance(self.simulator.setters[name], Function)}
        put: dict[str, Value | None] = {}
        for name, setter in self.simulator.setters.items():
            if name in named or name in self._by_function:  # a function gets its default as it gets other values
                put[name] = values[name] if setter.by_copy else float(values[name][0])
            else:
                put[name] = None
        self.simulator.set(put)


def _same(value: Value | None, other: Value | None) -> bool:
    if isinstance(value, Tensor) and isinstance(other, Tensor):
        return value is other or torch.equal(value, other)
    return not isinstance(value, Tensor) and not isinstance(other, Tensor) and value == other


def _sets_model(setter: Any) -> bool:
    parts = getattr(setter, "parts", [setter])
    return any(isinstance(part, ModelField) for part in parts)
