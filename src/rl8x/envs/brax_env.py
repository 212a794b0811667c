"""Brax and MuJoCo Playground environments as rl8x environments; JAX arrays become tensors through DLPack.

    BraxEnv(brax.envs.get_environment("ant"), num_envs=1024, time_limit=1000)

Such an environment has pure functions `reset(key)` and `step(state, action)` of one copy. The adapter applies time
limits and resets in the step that ends an episode, and so keeps the observation before the reset, which their own
wrappers lose. `parameters` replace fields of each copy's system, as arguments of the one program:

    BraxEnv(env, 1024, parameters={"mass": SystemField("link.inertia.mass", "torso"), "gravity": Scale("gravity")})
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from types import EllipsisType
from typing import Any, ClassVar, Final

import gymnasium.spaces as spaces
import numpy as np
import torch
from torch import Tensor

from rl8x.envs.base import Carry, Observation, Step
from rl8x.envs.bindings import Binding, Function, Scale, bindings_of
from rl8x.envs.bound_parameters import BoundSimulator
from rl8x.envs.mujoco_model import ModelField, rows_of
from rl8x.envs.simulator import SimulatorEnv
from rl8x.names import unknown_name
from rl8x.plain import frozen
from rl8x.spaces import tree_of

_WRAPPERS: Final = ("brax.envs.wrappers.training", "mujoco_playground._src.wrapper")


class BraxEnv(SimulatorEnv):
    """Copies of an unwrapped Brax or Playground environment, simulated as one JAX program.

    A copy whose episode ends continues from the state that `reset` returns for a fresh key. Arguments that are not
    listed here are those of `Env`.

    Args:
        env: An environment of `brax.envs.get_environment`, or its name there, or of Playground's `registry.load`.
        device: Device of the tensors; JAX simulates on its own default device.
        seed: Seeds the keys.
        parameters: Parameters of `env_config`: names to the path of a field of the system, `SystemField`,
            `ModelField` (of an MJX model), `Scale`, their plain forms, or a pure function `(system, value) ->
            system` with a default, `Function(f, default=...)`.

    Raises:
        RuntimeError: If JAX is not installed.
        TypeError: If `env` is not such an environment, or has a wrapper that batches, truncates or resets it.
        ValueError: If there is no such field or name.
    """

    default_time_limit: ClassVar[int | None] = 1000

    def __init__(
        self,
        env: Any,
        num_envs: int,
        *,
        device: torch.device | str = "cpu",
        seed: int | None = None,
        time_limit: int | EllipsisType | None = ...,
        parameters: Mapping[str, Any] | None = None,
    ) -> None:
        try:
            import jax
        except ImportError as error:
            raise RuntimeError("BraxEnv needs JAX. Install it with: pip install 'rl8x[brax]'") from error
        self.jax = jax
        if isinstance(env, str):
            env = _named(env)
        if not hasattr(env, "observation_size"):
            raise TypeError(f"BraxEnv: env must be an environment of Brax or Playground, or a name; got {env!r}.")
        _check_unwrapped(env)
        self.made_from = env, frozen({"parameters": parameters})
        systems = Systems(bindings_of(parameters, (SystemField, ModelField, Scale, Function), "BraxEnv"), env)
        self.parameters = systems.bound.parameters
        self.single_observation_space = _observation_space(env.observation_size)
        self.single_action_space = spaces.Box(-1.0, 1.0, (int(env.action_size),), np.float32)
        super().__init__(num_envs, device=device, seed=seed, time_limit=time_limit)
        reset, step = jax.vmap(systems.applied(env.reset)), jax.vmap(systems.applied(env.step))
        self._reset, self._advance = _programs(jax, reset, step, num_envs)
        self._simulated: Any = None
        self._values: dict[str, tuple[Tensor, Any]] = {}

    def restart(self, noise: Tensor) -> tuple[Carry, Observation]:
        """Reset all copies by a key drawn from the generator; the first observation is `[num_envs, *]`."""
        parameters = self.starting_parameters(noise)
        self._simulated = self._reset(self._arrays_of(parameters), self._key())
        return self.first_carry({}, parameters), tree_of(self._simulated.obs, self._tensor_of)

    def advance(self, carry: Carry, actions: Any, noise: Tensor) -> tuple[Carry, Step]:
        """Step the simulators by actions `[num_envs, size]`; not pure, unlike the base class's, as it changes them."""
        truncated = torch.zeros(self.num_envs, dtype=torch.bool, device=self.device)
        if self.time_limit is not None:
            truncated = carry["elapsed"] + 1 >= self.time_limit
        before, fresh = carry["parameters"], self.starting_parameters(noise)
        values = self._arrays_of(before), self._arrays_of(fresh)
        given, over = self._array_of(actions.detach().to(torch.float32)), self._array_of(truncated)
        self._simulated, stepped, ended = self._advance(self._simulated, *values, given, over, self._key())
        rewards, terminated = self._tensor_of(stepped.reward), self._tensor_of(ended).bool()
        obs, final_obs = tree_of(self._simulated.obs, self._tensor_of), tree_of(stepped.obs, self._tensor_of)
        done = terminated | truncated
        parameters = self._redrawn(done, before, fresh)
        return self.finish(carry, parameters, {}, done, obs, rewards, terminated, truncated, final_obs)

    def _key(self) -> Any:
        seed = torch.randint(2**31 - 1, (), generator=self.generator, device=self.device)
        return self.jax.random.PRNGKey(int(seed))

    def _array_of(self, tensor: Tensor) -> Any:
        # A copy: on the CPU, JAX may keep using the array's memory.
        return self.jax.numpy.array(tensor.cpu().numpy())

    def _arrays_of(self, parameters: Mapping[str, Tensor]) -> dict[str, Any]:
        """Return parameters, `[num_envs]` each, as JAX arrays; unchanged ones are not copied again."""
        for name, value in parameters.items():
            if name not in self._values or self._values[name][0] is not value:
                self._values[name] = value, self._array_of(value)
        return {name: self._values[name][1] for name in parameters}

    def _tensor_of(self, array: Any) -> Tensor:
        """Copy an array to a tensor: JAX may reuse the memory once it has freed the array."""
        # Booleans are not part of JAX's DLPack everywhere.
        return self._tensor(torch.utils.dlpack.from_dlpack(array.astype("uint8") if array.dtype == bool else array))


def _programs(
    jax: Any, reset: Callable[..., Any], step: Callable[..., Any], num_envs: int
) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Compile the reset of all copies, and a step with the resets that follow it; parameters are arguments."""

    def advance(state: Any, values: Any, fresh: Any, actions: Any, over: Any, key: Any) -> tuple[Any, Any, Any]:
        stepped = step(values, state, actions)
        done = jax.numpy.logical_or(stepped.done > 0, over)
        begun = jax.lax.cond(done.any(), lambda: reset(fresh, jax.random.split(key, num_envs)), lambda: stepped)

        def choose(new: Any, old: Any) -> Any:
            shaped = done.reshape(done.shape + (1,) * (old.ndim - 1)) if old.ndim else done.any()
            chosen = jax.numpy.where(shaped, new, old)
            # Strongly typed like the result of a reset, or the second step would be recompiled.
            return jax.lax.convert_element_type(chosen, chosen.dtype) if chosen.weak_type else chosen

        return jax.tree.map(choose, begun, stepped), stepped, stepped.done > 0

    return jax.jit(lambda values, key: reset(values, jax.random.split(key, num_envs))), jax.jit(advance)


def _named(name: str) -> Any:
    """Make an environment of Brax by its name."""
    try:
        from brax import envs
    except ImportError as error:
        raise RuntimeError(f"Brax makes {name!r}. Install it with: pip install 'rl8x[brax]'") from error
    try:
        return envs.get_environment(name)
    except KeyError:
        raise ValueError(f"BraxEnv: Brax has no environment {name!r}, such as 'ant'.") from None


def _check_unwrapped(env: Any) -> None:
    """Raise `TypeError` for an environment in a training wrapper, whose time limit would look like a termination."""
    inner = env
    while inner is not None:
        for cls in type(inner).__mro__:
            if cls.__module__ in _WRAPPERS and cls.__name__ != "Wrapper":
                raise TypeError(
                    f"BraxEnv: env has the wrapper {cls.__name__}, and copies, time limits and resets are made here. "
                    "Give what brax.envs.get_environment(name) or Playground's registry.load(name) makes, and "
                    "`time_limit`."
                )
        inner = getattr(inner, "__dict__", {}).get("env")


def _observation_space(size: Any) -> Any:
    """Return the space of Brax's observations, a width, or of Playground's dicts, whose values are widths or shapes."""
    if isinstance(size, dict):
        return spaces.Dict({name: _observation_space(part) for name, part in size.items()})
    shape = (int(size),) if isinstance(size, int | np.integer) else tuple(size)
    return spaces.Box(-np.inf, np.inf, shape, np.float32)


# -- the system that is simulated, and its fields


@dataclasses.dataclass(frozen=True)
class SystemField(Binding):
    """A field of a Brax `System`, or of an MJX model.

    Values that the environment's constructor derived from the field do not change.

    Attributes:
        path: Names joined by dots, such as `gravity`, `link.inertia.mass` or `geom_friction`.
        of: The name, or names, whose rows are set: links for `link.*`, else the owners of MuJoCo's field.
        index: The number within a row, or in a single vector such as `gravity`; None for all.
    """

    kind: ClassVar[str] = "system_field"
    path: str
    of: str | Sequence[str] | None = None
    index: int | None = None

    def read(self, simulator: Systems) -> Any:
        """Return a copy of the field's elements in the system that the environment came with."""
        array = np.asarray(self.array(simulator.system))
        if array.dtype.kind not in "iuf":
            raise ValueError(f"sets {self.path!r}, which must be numbers; it is {array.dtype}.")
        return array[self.where(simulator)].copy()

    def array(self, system: Any) -> Any:
        """Return the whole field; raise `ValueError` if there is none."""
        value = system
        for name in self.path.split("."):
            if not hasattr(value, name):
                legal = [field.name for field in dataclasses.fields(value)] if dataclasses.is_dataclass(value) else []
                raise ValueError(unknown_name("field", name, legal, f" of {type(value).__name__}"))
            value = getattr(value, name)
        return value

    def where(self, simulator: Systems) -> Any:
        """Return the index of the elements within the field; raise `ValueError` if there is no such name."""
        last = () if self.index is None else (self.index,)
        if self.of is None:
            return (..., *last)
        if not self.path.startswith("link."):
            return (np.array(rows_of(simulator.model, self.path, self.of)), ..., *last)
        links = list(simulator.system.link_names)
        names = [self.of] if isinstance(self.of, str) else self.of
        for name in names:
            if name not in links:
                raise ValueError(unknown_name("link", name, links, " of the system"))
        return (np.array([links.index(name) for name in names]), ..., *last)


class Systems:
    """The system of an environment, and the systems that replace it under each copy's parameters."""

    def __init__(self, bindings: Mapping[str, Binding], env: Any) -> None:
        self.owner = getattr(env, "unwrapped", env)
        self.attribute = "sys" if hasattr(self.owner, "sys") else "_mjx_model"
        if bindings and not hasattr(self.owner, self.attribute):
            raise ValueError(f"BraxEnv: {type(self.owner).__name__} has neither `sys` nor `_mjx_model` to set.")
        self.system: Any = getattr(self.owner, self.attribute, None)
        self.model = getattr(self.system, "mj_model", None) or getattr(self.owner, "mj_model", None)
        fields = {name: _of_system(binding) for name, binding in bindings.items()}
        self.bound = BoundSimulator(self, fields, "BraxEnv")

    def applied(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a method of the environment so that its first argument is one copy's parameter values, by name."""

        def under(values: Mapping[str, Any], *arguments: Any) -> Any:
            if not self.bound.bindings:
                return function(*arguments)
            system = self.system
            for name, binding in self.bound.bindings.items():
                system = self._replaced(binding, system, self.bound.originals[name], values[name])
            setattr(self.owner, self.attribute, system)
            try:
                return function(*arguments)
            finally:
                setattr(self.owner, self.attribute, self.system)

        return under

    def _replaced(self, binding: Any, system: Any, original: Any, value: Any) -> Any:
        """Return the system with the binding's field set to the value, or to the original if the value is None."""
        if isinstance(binding, Scale):
            for part, base in zip(binding.parts, original, strict=True):
                system = self._replaced(part, system, base * value, None)
            return system
        if isinstance(binding, Function):
            return binding.function(system, value)
        import jax

        elements = original if value is None else value
        array = jax.numpy.asarray(binding.array(system)).at[binding.where(self)].set(elements)
        return system.tree_replace({binding.path: array})


def _of_system(binding: Any) -> Any:
    """Replace each `ModelField` of a binding by a `SystemField`; the description stays the same."""
    described: dict[str, Any] = {"description": binding.description or str(binding)}
    if isinstance(binding, Scale):
        return dataclasses.replace(binding, of=tuple(map(_of_system, binding.parts)), **described)
    if not isinstance(binding, ModelField):
        return binding
    shared = {each.name: getattr(binding, each.name) for each in dataclasses.fields(Binding)}
    return SystemField(binding.field, binding.of, binding.index, **shared | described)
