"""mjlab, Isaac Lab's API on MuJoCo Warp, as an rl8x environment.

    MjlabEnv("Mjlab-Cartpole-Balance", num_envs=1024, device="cuda", parameters={"gear": "randomize_gear"})

mjlab's own reset within a step is off. The adapter resets copies in the step that ends their episode, so that it keeps
the observation before the reset and sets new parameters for it. Needs the extra `mjlab`.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import importlib.metadata
import inspect
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from types import EllipsisType
from typing import Any, ClassVar, Final

import gymnasium.spaces as spaces
import torch
from torch import Tensor

from rl8x.envs.base import Carry, Observation, Step
from rl8x.envs.bindings import Binding, Scale, bindings_of, in_parameter
from rl8x.envs.bound_parameters import BoundSimulator
from rl8x.envs.mujoco_model import ModelField
from rl8x.envs.simulator import SimulatorEnv, as_gymnasium
from rl8x.execution.execution import kept_generators
from rl8x.names import unknown_name
from rl8x.spaces import tree_of, where_rows

_OLDEST: Final = (1, 6)
"""The release whose partial resets leave the other copies alone (its pull requests 1139 and 1141)."""
_NEVER_S: Final = 1e9
# mjlab's arguments for the names of a field's owners, by the field's prefix
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


class MjlabEnv(SimulatorEnv):
    """Copies of an mjlab task, which simulates all of them at once.

    The observation has the groups `actor` and `critic` where the task has both; `model_config={"critic_obs":
    ["critic"]}` keeps the latter from the policy. mjlab's draws from torch's generators use a state of this environment
    alone. Arguments that are not listed here are those of `Env`.

    Args:
        task: A registered task, or a `ManagerBasedRlEnvCfg`, which is copied.
        seed: Seeds the task; None draws one.
        time_limit: By default the task's `episode_length_s`.
        metrics: Values of `extras` to average over the episodes that end, as `EpisodeMetrics` takes them, such as
            `log/Episode_Reward/upright`.
        groups: The groups of observations to take, if the task has them.
        parameters: Parameters of `env_config`: names to an event term's name or `Event`, `ModelField`, `Scale` of
            one, or their plain forms.

    Raises:
        RuntimeError: If mjlab is not installed, or too old.
        TypeError: If `task` is neither a name nor a config.
        ValueError: If there is no such task, group, event or field.
    """

    default_time_limit: ClassVar[int | None] = None

    def __init__(
        self,
        task: Any,
        num_envs: int,
        *,
        device: torch.device | str = "cpu",
        seed: int | None = None,
        time_limit: int | EllipsisType | None = ...,
        metrics: str | Sequence[str] | Mapping[str, str] = (),
        groups: Sequence[str] = ("actor", "critic"),
        parameters: Mapping[str, Any] | None = None,
    ) -> None:
        _check_version()
        from mjlab.envs import ManagerBasedRlEnv

        self._make_from(task, metrics, {"groups": groups, "parameters": parameters})
        config = _config_of(task)
        config.scene.num_envs, config.auto_reset, config.seed = num_envs, False, None
        step_s = config.sim.mujoco.timestep * config.decimation
        if not isinstance(time_limit, EllipsisType):
            # Half a step less, against rounding errors: mjlab rounds up.
            config.episode_length_s = _NEVER_S if time_limit is None else (time_limit - 0.5) * step_s
        self._events = Events(bindings_of(parameters, (Event, ModelField, Scale), "MjlabEnv"), config)
        self._random_state: Tensor | None = None
        with self._separate_random(device):
            self.simulator = ManagerBasedRlEnv(config, device=str(device))
        self.parameters = BoundSimulator(self.simulator.sim, self._events.bindings, "MjlabEnv").parameters
        offered = self.simulator.single_observation_space.spaces
        self._groups = [name for name in groups if name in offered]
        if not self._groups:
            raise ValueError(f"MjlabEnv: the task has no group {' or '.join(groups)}; there are {', '.join(offered)}.")
        seen = spaces.Dict({name: as_gymnasium(offered[name]) for name in self._groups})
        self.single_observation_space = seen if len(self._groups) > 1 else seen[self._groups[0]]
        self.single_action_space = as_gymnasium(self.simulator.single_action_space)
        steps = math.ceil(config.episode_length_s / step_s)
        limit = steps if config.episode_length_s < _NEVER_S else None
        super().__init__(num_envs, device=device, seed=seed, time_limit=limit)

    def restart(self, noise: Tensor) -> tuple[Carry, Observation]:
        """Reset all copies; the first observation is `[num_envs, *]`."""
        parameters = self.starting_parameters(noise)
        everyone = torch.arange(self.num_envs, device=self.device)
        obs, _ = self._reset(everyone, parameters, self.next_seed)
        self.next_seed = None
        return self.first_carry({}, parameters), obs

    def advance(self, carry: Carry, actions: Any, noise: Tensor) -> tuple[Carry, Step]:
        """Step the copies by actions `[num_envs, size]`; not pure, unlike the base class's, as it changes them."""
        with self._separate_random(self.device):
            raw_obs, raw_rewards, ended, timed_out, extras = self.simulator.step(actions.detach())
        final_obs = obs = self._observation(raw_obs)
        rewards, terminated, truncated = raw_rewards.to(torch.float32, copy=True), ended.clone(), timed_out.clone()
        if self.simulator.cfg.is_finite_horizon:  # the task defines its time limit as a termination
            terminated, truncated = terminated | truncated, torch.zeros_like(truncated)
        done, parameters, log = terminated | truncated, carry["parameters"], dict(extras["log"])
        if bool(done.any()):
            parameters = self._redrawn(done, parameters, self.starting_parameters(noise))
            fresh, reset_log = self._reset(done.nonzero().squeeze(1), parameters, None)
            # A reset redraws the observation noise of every copy: the others keep the step's observation.
            obs, log = where_rows(done, fresh, obs), log | reset_log
        info = {**extras, "log": log}
        return self.finish(carry, parameters, info, done, obs, rewards, terminated, truncated, final_obs)

    def set_elapsed(self, elapsed: Tensor) -> None:
        """Set the simulator's step counts of the current episodes, `[num_envs]`."""
        super().set_elapsed(elapsed)
        self.simulator.episode_length_buf.copy_(elapsed)

    def close_extras(self, **kwargs: Any) -> None:
        """Close the task."""
        self.simulator.close()

    def _reset(
        self, copies: Tensor, parameters: Mapping[str, Tensor], seed: int | None
    ) -> tuple[Observation, dict[str, Any]]:
        """Reset some copies under parameters `[num_envs]` each; return all observations and the resets' log."""
        self._events.values = {name: parameters[name][copies] for name in self._events.bindings}
        with self._separate_random(self.device), _kept_variable("PYTHONHASHSEED"):
            obs, extras = self.simulator.reset(seed=seed, env_ids=copies)
        return self._observation(obs), dict(extras["log"])

    @contextlib.contextmanager
    def _separate_random(self, device: torch.device | str) -> Iterator[None]:
        """Give mjlab its own state of torch's global generators within the context; evaluations have another."""
        device = torch.device(device)
        cuda = device.type == "cuda"
        read = torch.cuda.get_rng_state if cuda else torch.get_rng_state
        with kept_generators(device):
            if self._random_state is not None:
                torch.cuda.set_rng_state(self._random_state) if cuda else torch.set_rng_state(self._random_state)
            yield
            self._random_state = read()

    def _observation(self, raw: Mapping[str, Any]) -> Observation:
        """Copy the selected groups to tensors, floats as float32; a single group is returned without a dict."""
        groups = {name: tree_of(raw[name], self._tensor) for name in self._groups}
        return groups if len(groups) > 1 else groups[self._groups[0]]


@contextlib.contextmanager
def _kept_variable(name: str) -> Iterator[None]:
    """Restore an environment variable that mjlab sets when it is seeded and that later processes would inherit."""
    value = os.environ.get(name)
    try:
        yield
    finally:
        os.environ.pop(name, None)
        if value is not None:
            os.environ[name] = value


def _check_version() -> None:
    """Raise `RuntimeError` if mjlab is missing, or so old that its partial resets disturb other copies."""
    try:
        version = importlib.metadata.version("mjlab")
    except importlib.metadata.PackageNotFoundError as error:
        raise RuntimeError("MjlabEnv needs mjlab. Install it with: pip install 'rl8x[mjlab]'") from error
    if tuple(int(part) for part in version.split(".")[:2]) < _OLDEST:
        oldest = ".".join(map(str, _OLDEST))
        raise RuntimeError(
            f"MjlabEnv needs mjlab {oldest} or newer, in which resetting some copies leaves the others alone; this is "
            f"{version}. Install it with: pip install -U 'rl8x[mjlab]'"
        )


def _config_of(task: Any) -> Any:
    """Return a new config of a task, from its registered name or as a copy of a config."""
    if not isinstance(task, str):
        if not hasattr(task, "scene"):
            raise TypeError(f"MjlabEnv: task must be a registered name or a ManagerBasedRlEnvCfg; got {task!r}.")
        return copy.deepcopy(task)
    from mjlab.tasks.registry import list_tasks, load_env_cfg

    if task not in list_tasks():
        raise ValueError(f"MjlabEnv: {unknown_name('task', task, list_tasks())}")
    return load_env_cfg(task)


# -- parameters: events of the task that set the values of `env_config` instead of drawing their own


@dataclasses.dataclass(frozen=True)
class Event(Binding):
    """A term of the task's events that draws from a range; the parameter replaces the drawn value.

    It runs at each reset, even if the task runs it once at startup. Its operation defines the value's meaning: a factor
    of the default (`scale`), an offset (`add`), or the value itself (`abs`, which needs a `default`).

    Attributes:
        name: The term's name in the task's `events`.
    """

    kind: ClassVar[str] = "event"
    name: str

    def read(self, simulator: Any) -> Any:
        """Return the default that `Events` has found for it."""
        return self.default


class Events:
    """The events of a task's config that set parameters, by their bindings; the constructor changes the config."""

    def __init__(self, bindings: Mapping[str, Binding], config: Any) -> None:
        self.bindings: dict[str, Binding] = {}
        self.values: dict[str, Tensor] = {}
        """Values for the copies that are reset next, one per copy, by parameter name."""
        for name, binding in bindings.items():
            with in_parameter(name, "MjlabEnv"):
                self.bindings[name] = self._joined(name, binding, config)

    def _joined(self, name: str, binding: Any, config: Any) -> Binding:
        """Make an event of the task, or an added one, set the parameter; return the binding with its default."""
        if isinstance(binding, Event):
            if binding.name not in config.events:
                raise ValueError(
                    f"is an event that the task has not: {unknown_name('event', binding.name, config.events)}"
                )
            operation = self._take_over(name, config.events[binding.name], binding.name)
            default = _NEUTRAL.get(operation) if binding.default is None else binding.default
            if default is None:
                raise ValueError(f"sets what the event {binding.name!r} sets, which has no default; give `default`.")
            return dataclasses.replace(binding, default=default)
        for i, part in enumerate(getattr(binding, "parts", [binding])):
            if not isinstance(part, ModelField):
                raise ValueError(f"must be an Event, a ModelField or a Scale of such; got {binding}.")
            term = _event_of(part, "scale" if isinstance(binding, Scale) else "abs", config)
            config.events[f"rl8x_{name}_{i}"] = term
            self._take_over(name, term, part.field)
        joined: Binding = binding
        return joined

    def _take_over(self, name: str, term: Any, called: str) -> str:
        """Make an event set the parameter's value instead of drawing one; return its operation."""
        from mjlab.envs.mdp import dr

        takes = inspect.signature(term.func).parameters
        if not {"distribution", "operation", "ranges"} <= set(takes):
            raise ValueError(f"is set by {called!r}, which does not draw from `ranges` by a `distribution`.")
        if term.mode not in ("startup", "reset"):
            raise ValueError(f"is set by {called!r}, which happens in mode {term.mode!r}, and not at a reset.")

        # No bound method: mjlab copies its config, and would copy this object with it.
        def sample(low: Tensor, high: Tensor, shape: tuple[int, ...], device: str) -> Tensor:
            """Return the values as mjlab samples, `[copies, elements]` or `[copies, elements, 1]`."""
            values = self.values[name]
            assert len(values) == shape[0], "an event was applied to other copies than those that are reset"
            return values.to(torch.device(device)).reshape(-1, *(1,) * (len(shape) - 1)).expand(shape)

        term.mode, term.min_step_count_between_reset = "reset", 0
        term.params["distribution"] = dr.Distribution(name=f"rl8x {name}", sample=sample)
        term.params.setdefault("ranges", (0.0, 0.0))
        operation = term.params.get("operation", takes["operation"].default)
        return operation if isinstance(operation, str) else str(operation.name)


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
