"""Any Gymnasium environment as an rl8x environment: ids, factories and vector environments.

GymnasiumEnv("LunarLander-v3", num_envs=16)                        # one process, copies in turn
GymnasiumEnv("LunarLander-v3", num_envs=16, vectorization="async") # one process a copy
GymnasiumEnv(lambda: MyWrapper(gymnasium.make("Ant-v5")), num_envs=16)
GymnasiumEnv(my_vector_env)                                        # any gymnasium.vector.VectorEnv, in its own mode
GymnasiumEnv("Ant-v5", 16, parameters={"mass": Scale(ModelField("body_mass", "torso"))})    # for `env_config`
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from types import EllipsisType
from typing import Any, ClassVar, Final

import gymnasium.spaces as spaces
import numpy as np
import torch
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv
from torch import Tensor

from rl8x.envs.base import Actions, Carry, Env, Observation, Step, apart
from rl8x.envs.bindings import Attribute, Function, Scale, bindings_of
from rl8x.envs.bound_parameters import BoundBatch, BoundCopies
from rl8x.envs.checks import (
    check_latest,
    check_obs,
    check_reset,
    check_step,
    check_time_limit,
    is_vectorised,
    refuse_observing,
)
from rl8x.envs.mujoco_model import ModelField
from rl8x.envs.simulator import SimulatorEnv
from rl8x.envs.vectorised import (
    OF_MAKE_VEC,
    Source,
    ask_for_final_obs,
    autoreset_mode_of,
    copies_of,
    copy_results,
    spec_of,
    time_limit_of,
    vectorised,
)
from rl8x.plain import frozen
from rl8x.spaces import check_supported, element_of, in_tensor_types, map_spaces, tree_of, where_rows
from rl8x.trees import first_tensor, flatten_tree, tree_map, without_ends

_ELAPSED: Final = "_elapsed_steps"
"""The attribute in which Gymnasium's `TimeLimit` counts steps."""


class GymnasiumEnv(SimulatorEnv):
    """Adapter from Gymnasium's vector environments to tensors.

    Copies that it makes itself are reset in the step that ends an episode. A given vector environment keeps its own
    autoreset mode. In NEXT_STEP mode the step after an episode's end only resets: its row is not experience, so
    `Step.valid` is false; the row has reward 0 and is marked truncated, so that the next row begins an episode. In
    DISABLED mode the adapter resets the copies whose episode ended, in the same step.

    Float64 becomes float32, uint16 int32, and uint32 int64. `close` closes the copies, even those of a given vector
    environment.

    Arguments that are not listed here are those of `Env`.

    Args:
        env: A registered id, a function that makes one copy, or a vector environment; also a plain environment of
            many copies that resets them in the same step, as Isaac Lab's do.
        num_envs: Number of copies; may be left out for a vector environment.
        seed: Seeds the copies at the first reset.
        time_limit: By default that of the id.
        vectorization: "sync", "async" (a process each), or "vector" (the id's own vectorised form).
        metrics: Values of `info` to average over episodes, as `EpisodeMetrics` takes them; "auto" is `success` and
            `is_success` at the episode's end.
        parameters: Parameters of `env_config`: names to an attribute's path, `Attribute`,
            `ModelField` (of MuJoCo), `Scale`, a function `(unwrapped env, value) -> None`, or the plain forms of
            the first three.
        **kwargs: For the id's constructor; with `vector_kwargs` for the vectoriser.

    Raises:
        TypeError: If `env` cannot make environments.
        ValueError: If no such id is registered, an argument does not fit `env`, or a space has no tensor form.
    """

    takes_render_mode: ClassVar[bool] = True

    def __init__(
        self,
        env: Source,
        num_envs: int | None = None,
        *,
        device: torch.device | str = "cpu",
        seed: int | None = None,
        time_limit: int | EllipsisType | None = ...,
        vectorization: str = "sync",
        metrics: str | Sequence[str] | Mapping[str, str] = "auto",
        parameters: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        if not isinstance(time_limit, EllipsisType):
            check_time_limit(time_limit, "GymnasiumEnv")
        refuse_observing(kwargs.pop("observe_parameters", "none"), "GymnasiumEnv")
        self._bindings = bindings_of(parameters, (Attribute, ModelField, Scale, Function), "GymnasiumEnv")
        options = {"device": device, "time_limit": time_limit, "vectorization": vectorization, "parameters": parameters}
        self._make_from(env, metrics, options | kwargs)
        if is_vectorised(env):
            self.made_from = None
        self._kwargs = frozen(kwargs)
        processes = vectorization == "async"
        copies = BoundCopies(self._bindings, num_envs or 0, processes=processes) if self._bindings else None
        self.vector_env = vectorised(env, num_envs, time_limit, vectorization, kwargs, copies)
        self._vectorization = vectorization if self.made_from else type(env).__name__
        self._source = env if isinstance(env, str) else getattr(env, "__name__", type(env).__name__)
        self.autoreset_mode = autoreset_mode_of(self.vector_env)
        self.metadata = {**(self.vector_env.metadata or {}), "autoreset_mode": self.autoreset_mode}
        if self.autoreset_mode == AutoresetMode.DISABLED:
            self.metadata["autoreset_mode"] = AutoresetMode.SAME_STEP
        ask_for_final_obs(self.vector_env)
        copy_results(
            self.vector_env, self.metric_names if metrics == "auto" and self._vectorization == "sync" else None
        )
        self._source_action_space = self.vector_env.single_action_space
        self._takes_tensors = False
        self._is_known = False  # whether its results have been checked
        try:
            self.single_observation_space = map_spaces(self.vector_env.single_observation_space, in_tensor_types)
            self.single_action_space = map_spaces(self._source_action_space, policy_space)
            check_supported(self.single_observation_space, f"{self._source}.single_observation_space")
            check_supported(self.single_action_space, f"{self._source}.single_action_space")
            self._bound = self._bind(copies)
            self.parameters = {} if self._bound is None else self._bound.parameters
            limit = time_limit_of(self.vector_env) if isinstance(time_limit, EllipsisType) else time_limit
            super().__init__(self.vector_env.num_envs, device=device, seed=seed, time_limit=limit)
        except BaseException:
            self.vector_env.close()
            raise
        self.spec, self.render_mode = self.vector_env.spec, self.vector_env.render_mode

    @property
    def params(self) -> dict[str, Any]:
        """The id or the name of the source, the vectorization, and the arguments of the copies."""
        spec = spec_of(self.vector_env)
        source, given = (self._source, {}) if spec is None else (spec.id, spec.kwargs)
        kwargs = {name: value for name, value in given.items() if name not in OF_MAKE_VEC} | self._kwargs
        params = {"id": source, "vectorization": self._vectorization, "kwargs": kwargs}
        bound = {name: str(binding) for name, binding in self._bindings.items()}
        return params | ({"parameters": bound} if bound else {})

    def _bind(self, copies: BoundCopies | None) -> BoundCopies | BoundBatch | None:
        """Bind parameters to each copy's environment, or to the simulator that steps all copies; None without any."""
        if copies is None:
            return None
        inner = self.vector_env.unwrapped
        if isinstance(inner, AsyncVectorEnv) and self.made_from is None:
            raise ValueError(
                "GymnasiumEnv: the processes of an AsyncVectorEnv run already, and cannot be told of `parameters`. "
                "Give the id or function that makes a copy, with vectorization='async'."
            )
        if isinstance(inner, SyncVectorEnv) and self.made_from is None:
            copies = BoundCopies(self._bindings, self.vector_env.num_envs, processes=False)
        if isinstance(inner, SyncVectorEnv | AsyncVectorEnv):
            copies.adopt(self.vector_env)
            return copies
        advice = "Set what has a row for each copy, or let GymnasiumEnv make the copies ('sync' or 'async')."
        resets_itself = self.autoreset_mode == AutoresetMode.SAME_STEP
        return BoundBatch(self._bindings, inner, resets_itself=resets_itself, advice=advice)

    def restart(self, noise: Tensor) -> tuple[Carry, Observation]:
        """Reset all copies, copy i with seed + i after `set_seed`; the first observation is `[num_envs, *]`."""
        parameters = self.starting_parameters(noise)
        self._put(parameters)
        result = self.vector_env.reset(seed=self.next_seed)
        if not self._is_known:
            check_reset(self.vector_env, result, self.vector_env.single_observation_space, num_envs=self.num_envs)
        obs, _ = result
        self.next_seed = None
        self._takes_tensors = isinstance(first_tensor(tree_of(obs, lambda part: part)), Tensor)
        masked = torch.zeros(self.num_envs, dtype=torch.bool, device=self.device)
        return self.first_carry({}, parameters) | {"masked": masked}, self._observation(obs)

    @apart
    def advance(self, carry: Carry, actions: Actions, noise: Tensor) -> tuple[Carry, Step]:
        """Step the copies by actions `[num_envs, *action]`; not pure, unlike the base class's, as it changes them."""
        masked, parameters = carry["masked"], carry["parameters"]
        fresh = self.starting_parameters(noise) if parameters else parameters
        if self.autoreset_mode == AutoresetMode.NEXT_STEP:
            parameters = self._redrawn(masked, parameters, fresh)
            self._put(parameters)
        elif self.autoreset_mode == AutoresetMode.SAME_STEP:
            self._put(fresh)  # copies whose episode ends apply them within the step
        raw_actions = element_of(self._source_action_space, actions, self._raw_actions)
        try:
            result: Any = self.vector_env.step(raw_actions)
        except (ValueError, TypeError, LookupError):
            check_latest(copies_of(self.vector_env.unwrapped))  # raises for what could not be put beside the others
            raise
        if not self._is_known:
            check_step(self.vector_env, result, self.vector_env.single_observation_space, num_envs=self.num_envs)
            self._is_known = True
        raw_obs, raw_rewards, raw_terminated, raw_truncated, info = result
        obs = self._observation(raw_obs)
        rewards = self._tensor(raw_rewards, np.float32)
        terminated, truncated = self._tensor(raw_terminated, np.bool_), self._tensor(raw_truncated, np.bool_)
        done = terminated | truncated
        shown, valid, any_done = obs, None, bool(done.any())
        waits = self.autoreset_mode == AutoresetMode.NEXT_STEP
        if waits:
            valid = ~masked
            rewards, truncated = rewards.masked_fill(masked, 0.0), truncated | masked
            carry = carry | {"elapsed": carry["elapsed"].masked_fill(masked, -1)}  # a masked step is in no episode
            shown, masked = without_ends(obs, done), done  # the next step only resets, whatever the action
        elif any_done:
            parameters = self._redrawn(done, parameters, fresh)
        final = done if self.autoreset_mode == AutoresetMode.SAME_STEP else None
        results, ends = (shown, rewards, terminated, truncated, obs), {"valid": valid, "final": final}
        following, step = self.finish(carry, parameters, info, done, *results, any_done=any_done, **ends)
        if any_done and not waits:  # after the metrics, which a reset may overwrite
            shown, final_obs = self._reset_done(obs, done, info, parameters)
            step = step._replace(obs=shown, final_obs=final_obs)
        return following | {"masked": masked}, step

    def _reset_done(
        self, obs: Observation, done: Tensor, info: Mapping[str, Any], parameters: Mapping[str, Tensor]
    ) -> tuple[Observation, Observation]:
        """Return the observations after and before the reset of the copies whose episode ended."""
        if self.autoreset_mode == AutoresetMode.DISABLED:
            self._put(parameters)
            fresh, _ = self.vector_env.reset(options=_PartialReset(reset_mask=done.cpu().numpy()))
            return where_rows(done, self._observation(fresh), obs), obs
        final = info.get("final_obs", info.get("final_observation"))
        if final is None:
            if self.gives_final_obs:
                warnings.warn(
                    f"{self.vector_env} resets in the same step but does not give the observation before it: the value "
                    "of a truncated episode's end is taken from the next episode's start.",
                    RuntimeWarning,
                    stacklevel=2,
                )
            self.gives_final_obs = False
            return obs, obs
        about = f"{self._source}.step", "the final observation"
        space = self.vector_env.single_observation_space
        if not isinstance(final, np.ndarray) or final.dtype != object:
            check_obs(*about, final, space, self.num_envs)
            return obs, where_rows(done, self._observation(final), obs)
        final_obs = tree_map(Tensor.clone, obs)
        parts = flatten_tree("obs", final_obs)
        for row in done.nonzero().squeeze(1).tolist():
            check_obs(*about, final[row], space, None)
            for name, value in flatten_tree("obs", self._observation(final[row])).items():
                parts[name][row] = value
        return obs, final_obs

    @property
    def takes_elapsed(self) -> bool:
        """Whether each copy has Gymnasium's `TimeLimit`, in this process or in its own."""
        inner: Any = self.vector_env.unwrapped
        return isinstance(inner, SyncVectorEnv | AsyncVectorEnv) and all(inner.call("has_wrapper_attr", _ELAPSED))

    def set_elapsed(self, elapsed: Tensor) -> None:
        """Set the step counts of the copies' `TimeLimit`, `[num_envs]`."""
        super().set_elapsed(elapsed)
        inner: Any = self.vector_env.unwrapped
        inner.set_attr(_ELAPSED, elapsed.tolist())

    def another(self, num_envs: int | None = None, *, seed: int | None = None, **kwargs: Any) -> Env | None:
        """Make new copies; None for a given vector environment, or for a simulator that can exist only once.

        A subclass with a constructor of its own is deep-copied.
        """
        if self.made_from is None:
            return None
        if type(self).__init__ is not GymnasiumEnv.__init__:
            return None if kwargs else Env.another(self, num_envs, seed=seed)
        try:
            twin: Any = super().another(num_envs, seed=seed, **kwargs)
        except Exception:  # a simulator that can exist only once may raise anything
            return None
        # A function that returns the same environment each time cannot make a second one to play in.
        own, others = ({id(copy.unwrapped) for copy in copies_of(each.vector_env)} for each in (self, twin))
        return None if own & others else twin

    def close_extras(self, **kwargs: Any) -> None:
        """Close the copies and their processes."""
        self.vector_env.close(**kwargs)

    def render(self) -> Any:
        """Render the copies, if they were made with a `render_mode`."""
        return self.vector_env.render()

    def _observation(self, raw: Any) -> Observation:
        """Copy an observation to the device, a tuple as a dict with the keys "0", "1", ..."""
        return tree_of(raw, self._tensor, self.single_observation_space)  # type: ignore[no-any-return]

    def _raw_actions(self, space: spaces.Space[Any], actions: Tensor) -> Any:
        """Copy actions, as simulators may write into them: to arrays of the space's type, or for some to tensors."""
        return actions.detach().clone() if self._takes_tensors else actions.detach().cpu().numpy().astype(space.dtype)


class _PartialReset(dict[str, Any]):
    """Options of a reset of some copies: `RecordEpisodeStatistics` looks for the mask after inner layers popped it."""

    pop = dict.get


def policy_space(space: spaces.Space[Any]) -> spaces.Space[Any]:
    """Return an action space in float32, of bounds no wider than the simulator's: 0.1 in float32 is more than 0.1."""
    rounded = in_tensor_types(space)
    if isinstance(space, spaces.Box) and isinstance(rounded, spaces.Box) and rounded.dtype == np.float32 != space.dtype:
        low, high = rounded.low, rounded.high
        low = np.where(low < space.low, np.nextafter(low, np.float32(np.inf)), low)
        high = np.where(high > space.high, np.nextafter(high, np.float32(-np.inf)), high)
        return spaces.Box(low, np.maximum(low, high), space.shape, np.float32)
    return rounded
