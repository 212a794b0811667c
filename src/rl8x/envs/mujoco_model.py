"""Bindings to fields of MuJoCo models; finds a simulator's model, and the rows that belong to a name."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar, Final

import numpy as np

from rl8x.envs.bindings import Binding, Value, fitted
from rl8x.names import did_you_mean
from rl8x.plain import frozen

# By the prefix of a field's name: the accessor of the field's owner, and the attribute that counts these owners
_OWNERS: Final = {
    "body": ("body", "nbody"),
    "geom": ("geom", "ngeom"),
    "site": ("site", "nsite"),
    "tendon": ("tendon", "ntendon"),
    "pair": ("pair", "npair"),
    "sensor": ("sensor", "nsensor"),
    "jnt": ("joint", "njnt"),
    "dof": ("joint", "njnt"),
    "actuator": ("actuator", "nu"),
    "cam": ("camera", "ncam"),
    "light": ("light", "nlight"),
    "mat": ("material", "nmat"),
    "eq": ("equality", "neq"),
}
_DOFS: Final = (6, 3, 1, 1)
"""Degrees of freedom of the kinds of joints: free, ball, slide, hinge."""


@dataclasses.dataclass(frozen=True)
class ModelField(Binding):
    """A field of a MuJoCo model, of bodies, geoms, joints and so on by their names.

    Constants derived from masses, inertias and positions are recomputed (`mj_setConst`). The inertia of a body is
    a field of its own: `Scale([ModelField("body_mass", "torso"), ModelField("body_inertia", "torso")])`.

    Attributes:
        field: Its name in `mjModel`, such as `body_mass`, `geom_friction` or `dof_damping` (by the joint's name).
        of: The name, or the names, whose rows are set; None for all.
        index: The number within a row, such as 0 for sliding in `geom_friction`; None for all.
    """

    kind: ClassVar[str] = "model_field"
    field: str
    of: str | Sequence[str] | None = None
    index: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "of", frozen(self.of))

    def read(self, simulator: Any) -> Any:
        """Return a copy of the field's elements."""
        array, where = self._elements(simulator)
        return array[where].copy()

    def write(self, simulator: Any, original: Any, value: Value | None) -> None:
        """Set the elements; `derive_constants` must follow."""
        array, where = self._elements(simulator)
        array[where] = original if value is None else fitted(value, original, self.field)

    def _elements(self, simulator: Any) -> tuple[np.ndarray, Any]:
        """Return the field of the simulator's model, and the index of the elements in it."""
        model = model_of(simulator)
        array = getattr(model, self.field, None)
        if not isinstance(array, np.ndarray):
            legal = [name for name in dir(model) if name.startswith(self.field.partition("_")[0] + "_")]
            raise ValueError(f"a MuJoCo model has no field {self.field!r}.{did_you_mean(self.field, legal)}")
        rows = slice(None) if self.of is None else rows_of(model, self.field, self.of)
        if self.index is None:
            return array, rows
        width = array.shape[1] if array.ndim > 1 else 0
        if not 0 <= self.index < width:
            raise ValueError(f"`index` of {self.field!r} must lie in a row of {width or 1}; got {self.index}.")
        return array, (rows, self.index)


def model_of(simulator: Any) -> Any:
    """Return a simulator's `mujoco.MjModel`, which it has as `model` or `mj_model`; raise `ValueError` without one."""
    for name in ("model", "mj_model"):
        model = getattr(simulator, name, None)
        if isinstance(getattr(model, "body_mass", None), np.ndarray):  # mjlab has another `model` beside it
            return model
    raise ValueError(f"{type(simulator).__name__} has no MuJoCo model (`model` or `mj_model`).")


def rows_of(model: Any, field: str, names: str | Sequence[str]) -> list[int]:
    """Return the rows of a field that belong to names; for joints, those of all their degrees of freedom."""
    prefix = field.partition("_")[0]
    if prefix not in _OWNERS:
        raise ValueError(f"the rows of {field!r} have no names; leave `of` out.")
    accessor, count = _OWNERS[prefix]
    known = {getattr(model, accessor)(i).name: i for i in range(getattr(model, count))}
    rows: list[int] = []
    for name in [names] if isinstance(names, str) else names:
        if name not in known:
            legal = [each for each in known if each]
            raise ValueError(
                f"the model has no {accessor} {name!r}.{did_you_mean(name, legal)} There are {', '.join(legal)}."
            )
        row, length = known[name], 1
        if prefix == "dof":
            row, length = int(model.jnt_dofadr[row]), _DOFS[int(model.jnt_type[row])]
        rows += range(row, row + length)
    return rows


def derive_constants(simulator: Any, bindings: Iterable[Binding]) -> None:
    """Recompute MuJoCo's derived constants if a binding sets a field; the simulator's data must be reset after."""
    if any(isinstance(part, ModelField) for each in bindings for part in getattr(each, "parts", [each])):
        sys.modules["mujoco"].mj_setConst(model_of(simulator), simulator.data)
