"""Parameters of mjlab's tasks: event terms that draw nothing, but set the values that `env_config` gives."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Final

import torch
from torch import Tensor

from rl8x.envs.mujoco_model import ModelField
from rl8x.envs.parameters import Parameter
from rl8x.envs.setter_base import Setter
from rl8x.envs.setters import Scale
from rl8x.names import unknown_name

# What a field belongs to, by its first part: how mjlab's entities name it
_NAMES: Final = {
    "body": "body_names",
    "geom": "geom_names",
    "jnt": "joint_names",
    "dof": "joint_names",
    "site": "site_names",
    "actuator": "actuator_names",
    "tendon": "tendon_names",
}
_NEUTRAL: Final = {"scale": 1.0, "add": 0.0}
"""The value with which each operation of an event changes nothing."""


@dataclasses.dataclass(frozen=True)
class Event(Setter):
    """A term of the task's events that draws from a range: what it would draw is the parameter.

    It happens at each reset, also where the task has it once at the start. Its operation says what the value is: a
    factor of the default (`scale`), something added (`add`), or the value itself (`abs`, which needs a `default`).

    Attributes:
        name: The term's name in the task's `events`.
    """

    kind: ClassVar[str] = "event"
    name: str

    def read(self, simulator: Any) -> Any:
        """Return the default that `Events` has found for it."""
        return self.default


class Events:
    """The events of a task that set parameters.

    Args:
        setters: A setter for each parameter, by its name.
        config: The task's config, whose events are changed.

    Raises:
        ValueError: If there is no such event or field, or it cannot be set.
    """

    def __init__(self, setters: Mapping[str, Setter], config: Any) -> None:
        self.setters: dict[str, Setter] = {}
        self.values: dict[str, Tensor] = {}
        """Of the episodes that begin, one for each copy in `begin`, by the parameters' names."""
        for name, setter in setters.items():
            try:
                self.setters[name] = self._joined(name, setter, config)
            except ValueError as error:
                raise ValueError(f"MjlabEnv: parameters[{name!r}] {error}") from None

    def parameters(self, simulation: Any) -> dict[str, Parameter]:
        """Return defaults, read from the compiled model, and bounds."""
        declared = {}
        for name, setter in self.setters.items():
            try:
                declared[name] = setter.parameter(setter.read(simulation))
            except ValueError as error:
                raise ValueError(f"MjlabEnv: parameters[{name!r}] {error}") from None
        return declared

    def begin(self, copies: Tensor, parameters: Mapping[str, Tensor]) -> None:
        """Say which copies are reset next, `[count]`, and with which values, `[num_envs]` each."""
        self.values = {name: parameters[name][copies] for name in self.setters}

    def _joined(self, name: str, setter: Any, config: Any) -> Setter:
        """Give the value to an event of the task, or add one; return the setter with its default."""
        if isinstance(setter, Event):
            if setter.name not in config.events:
                raise ValueError(
                    f"is an event that the task has not: {unknown_name('event', setter.name, config.events)}"
                )
            term = config.events[setter.name]
            operation = self._take_over(name, term, setter.name)
            if setter.default is None and operation not in _NEUTRAL:
                raise ValueError(f"sets what the event {setter.name!r} sets, which has no default; give `default`.")
            return dataclasses.replace(
                setter, default=_NEUTRAL.get(operation, 0.0) if setter.default is None else setter.default
            )
        parts = setter.parts if isinstance(setter, Scale) else [setter]
        for i, part in enumerate(parts):
            if not isinstance(part, ModelField):
                raise ValueError(f"must be an Event, a ModelField or a Scale of such; got {setter}.")
            term = _event_of(part, "scale" if isinstance(setter, Scale) else "abs", config)
            config.events[f"rl8x_{name}_{i}"] = term
            self._take_over(name, term, part.field)
        joined: Setter = setter
        return joined

    def _take_over(self, name: str, term: Any, called: str) -> str:
        """Make an event set the parameter's value in place of what it would draw; return its operation."""
        from mjlab.envs.mdp import dr

        takes = inspect.signature(term.func).parameters
        if not {"distribution", "operation", "ranges"} <= set(takes):
            raise ValueError(f"is set by {called!r}, which does not draw from `ranges` by a `distribution`.")
        if term.mode not in ("startup", "reset"):
            raise ValueError(f"is set by {called!r}, which happens in mode {term.mode!r}, and not at a reset.")
        term.mode, term.min_step_count_between_reset = "reset", 0
        term.params["distribution"] = dr.Distribution(name=f"rl8x {name}", sample=self._drawing(name))
        term.params.setdefault("ranges", (0.0, 0.0))
        operation = term.params.get("operation", takes["operation"].default)
        return operation if isinstance(operation, str) else str(operation.name)

    def _drawing(self, name: str) -> Callable[..., Tensor]:
        """Return a function that gives the values as mjlab samples, `[copies, elements]` or `[copies, elements, 1]`.

        No bound method: mjlab copies its config, and would copy this object with it.
        """
        events = self

        def sample(low: Tensor, high: Tensor, shape: tuple[int, ...], device: str) -> Tensor:
            values = events.values[name]
            assert len(values) == shape[0], "an event was applied to other copies than those that are reset"
            return values.to(torch.device(device)).reshape(-1, *(1,) * (len(shape) - 1)).expand(shape)

        return sample


def _event_of(field: ModelField, operation: str, config: Any) -> Any:
    """Make the event that sets a field of the model, by mjlab's own function for it."""
    from mjlab.envs.mdp import dr
    from mjlab.managers.event_manager import EventTermCfg
    from mjlab.managers.scene_entity_config import SceneEntityCfg

    prefix = field.field.partition("_")[0]
    legal = [name for name in dir(dr) if name.partition("_")[0] in _NAMES and callable(getattr(dr, name))]
    if field.field not in legal:
        raise ValueError(f"names what mjlab cannot set: {unknown_name('field', field.field, legal)}")
    names = [field.of] if isinstance(field.of, str) else list(field.of or ())
    entities = {name.partition("/")[0] for name in names}
    if len(entities) != 1 or not all("/" in name for name in names):
        example = f"{next(iter(config.scene.entities), 'robot')}/..."
        raise ValueError(f"must say what of one entity has the field, `of={example!r}`; got {field.of!r}.")
    (entity,) = entities
    if entity not in config.scene.entities:
        raise ValueError(unknown_name("entity", entity, config.scene.entities, " of the task"))
    named: dict[str, Any] = {_NAMES[prefix]: tuple(name.partition("/")[2] for name in names)}
    axes = {} if field.index is None else {"axes": [field.index]}
    params = {"asset_cfg": SceneEntityCfg(entity, **named), "operation": operation, **axes}
    return EventTermCfg(func=getattr(dr, field.field), mode="reset", params=params)
