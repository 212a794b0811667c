"""Environments: `num_envs` copies of one task, stepped together as tensors on one device.

An author writes the dynamics (`steps.py`). The base class adds time limits, automatic resets in the same step, the
observation before each reset, episode statistics, randomised parameters, seeding and snapshots. It does so twice:
`restart` and `advance` are pure functions of what changes (the carry) and of noise, for programs that are compiled or
captured; `reset` and `step` are Gymnasium's stateful API over them. Noise is an argument because a compiled program
cannot take a generator, and because equal noise makes different ways of execution comparable.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable, Mapping
from types import EllipsisType
from typing import Any, ClassVar, Final, TypeVar

import gymnasium
import torch
from gymnasium.vector import AutoresetMode
from gymnasium.vector.utils import batch_space
from torch import Tensor

from rl8x.distributed import resolve_device
from rl8x.envs.canvas import copy_of, host_arrays, numbers_of, picture_of
from rl8x.envs.checks import (
    check_declared,
    check_obs,
    check_restored,
    check_rows,
    check_time_limit,
    refuse_observing,
    taken_actions,
    whole_number,
)
from rl8x.envs.parameter_state import ParameterState
from rl8x.envs.parameters import EnvConfig, Parameter, ResolvedConfig, plain
from rl8x.envs.steps import Actions, Carry, Dynamics, Observation, Outcome, Parameters, State, Step
from rl8x.envs.team import Team
from rl8x.spaces import in_dtypes, tree_of
from rl8x.trees import as_tensor, tree_map

__all__ = ["Actions", "Carry", "Env", "Observation", "Outcome", "Parameter", "Parameters", "State", "Step"]

Function = TypeVar("Function", bound=Callable[..., Any])

MAX_EVAL_ENVS: Final = 128
"""Default limit on the copies, and so the episodes, of an environment that is made for evaluations."""


class Env(Dynamics, gymnasium.vector.VectorEnv[Any, Any, Tensor]):
    """Batched environment of torch tensors; a Gymnasium vector environment with same-step autoreset.

    A subclass declares `single_observation_space` and `single_action_space`, of one copy, and defines `initial_state`,
    `transition` and `observe`.

    Raises:
        TypeError: If `num_envs`, `time_limit` or `seed` is not a whole number, or the subclass declares no spaces.
        ValueError: If one of them is out of its range.
    """

    capturable: ClassVar[bool] = True
    """Whether `restart` and `advance` are pure, so that they can be compiled or captured."""
    resumable: ClassVar[bool] = True
    """Whether `load_state_dict` restores the exact state; if not, call `reset` after it."""
    gives_final_obs: bool = True
    """Whether `Step.final_obs` is the observation before the reset."""
    parameters: Mapping[str, Parameter] = {}
    """The parameters that `env_config` may set, by name."""
    team: Team | None = None
    """The agents of a copy, if there are several: each row of a tensor belongs to one agent. See `envs/team.py`."""
    max_num_envs: ClassVar[int | None] = None
    max_horizon: ClassVar[int | None] = None
    metadata: dict[str, Any] = {"autoreset_mode": AutoresetMode.SAME_STEP, "render_modes": []}  # noqa: RUF012

    observe_parameters: str = "none"
    """Who sees the parameters: nobody, except in the wrapper `ObservedParameters`."""
    carry: Carry | None = None
    """The carry after the last `reset` or `step`; a caller of `advance` writes the new one here."""

    def __init__(
        self,
        num_envs: int,
        *,
        device: torch.device | str = "cpu",
        seed: int | None = None,
        time_limit: int | EllipsisType | None = ...,
        observe_parameters: str = "none",
    ) -> None:
        """Make `num_envs` copies.

        Args:
            num_envs: Number of copies. With several agents, the attribute `num_envs` is copies times agents, the
                number of rows of tensors.
            device: Where their tensors live.
            seed: Seeds the environment's own generator; None takes one from the operating system.
            time_limit: Steps until truncation, None for never; by default the class's own.
            observe_parameters: Must be "none" here. `build` and `env_kwargs` accept other values for every environment
                and wrap it; see `ObservedParameters`.
        """
        name = type(self).__name__
        refuse_observing(observe_parameters, name)
        copies = whole_number(num_envs, name, "num_envs")
        most = 2**31 - 1 if self.max_num_envs is None else self.max_num_envs
        if not 1 <= copies <= most:
            limit = "" if copies < 1 and self.max_num_envs is None else f" and at most {most:,}"
            raise ValueError(f"{name}: num_envs must be at least 1{limit}; got {num_envs}.")
        self.num_envs = copies * self.num_agents
        self.time_limit = self.default_time_limit if isinstance(time_limit, EllipsisType) else time_limit
        check_time_limit(self.time_limit, name)
        self.device = resolve_device(device)
        self.generator = torch.Generator(self.device)
        self.set_seed(seed)
        check_declared(self)
        self.observation_space = batch_space(self.single_observation_space, self.num_envs)
        self.action_space = batch_space(self.single_action_space, self.num_envs)
        self._no_noise = torch.empty(self.num_envs, 0, device=self.device)
        self.parameter_state = ParameterState(self)
        if self.draws:
            self.render_mode = "rgb_array"
            self.metadata = {**self.metadata, "render_modes": ["rgb_array"], "render_fps": self.render_fps}

    @property
    def params(self) -> dict[str, Any]:
        """Extra params of a run, besides class and time limit; if empty, the constructor's arguments are logged."""
        return {}

    @property
    def num_agents(self) -> int:
        """Agents of a copy."""
        return 1 if self.team is None else len(self.team.names)

    @property
    def num_copies(self) -> int:
        """Copies of the environment: the number of rows of its tensors divided by the number of agents."""
        return self.num_envs // self.num_agents

    # ---- pure, for programs that are compiled or captured

    @property
    def episodic(self) -> bool:
        """Whether episodes can end."""
        return self.time_limit is not None or self.terminates

    @property
    def noise_width(self) -> int:
        """Uniform numbers per copy and step: for the transition, for a reset, and for drawn parameters."""
        return self.step_noise + self.reset_noise + self.parameter_state.current.noise_width

    @property
    def program_key(self) -> Hashable:
        """The constants of a compiled or captured `advance`; other constants need another program."""
        team = () if self.team is None else (self.team.names, self.team.agent_id, self.team.state)
        config = self.parameter_state.current.key
        return type(self), self.num_envs, str(self.device), self.time_limit, config, *team

    def noise(self, horizon: int) -> Tensor:
        """Draw the noise of `horizon` steps, float32 `[horizon, num_envs, noise_width]` in [0, 1).

        On the CPU, a horizon at once and step by step give the same numbers. On CUDA they differ, because each launch
        takes its own part of the generator's stream.

        Args:
            horizon: Steps of each copy.
        """
        shape = (horizon, self.num_envs, self.noise_width)
        return torch.rand(shape, generator=self.generator, device=self.device)

    def restart(self, noise: Tensor) -> tuple[Carry, Observation]:
        """Start an episode in every copy, under the configuration in force.

        Args:
            noise: `[num_envs, noise_width]` in [0, 1).

        Returns:
            The carry and the first observation, `[num_envs, ...]`.
        """
        parameters = self.starting_parameters(noise)
        state = self.initial_state(parameters, self._columns(noise, self.step_noise, self.reset_noise))
        sources = self._draw(noise)[1]
        carry = self.first_carry(state, parameters) | ({"sources": sources} if sources else {})
        return carry, self.observe(state, parameters)

    def advance(self, carry: Carry, actions: Actions, noise: Tensor) -> tuple[Carry, Step]:
        """Take one step in every copy and start a new episode where one ended.

        Args:
            carry: The carry that `restart` or the last `advance` returned; not changed.
            actions: `[num_envs, ...]`, as `transition` takes them.
            noise: `[num_envs, noise_width]` in [0, 1).

        Returns:
            The next carry and the step. The two may share tensors, so change neither in place.
        """
        parameters = carry["parameters"]
        state, rewards, terminated = self.outcome(carry, actions, noise)
        returns, elapsed = carry["returns"] + rewards, carry["elapsed"] + 1
        sources = carry.get("sources", {})
        carry = carry | {"state": state, "parameters": parameters, "elapsed": elapsed, "returns": returns}
        obs = final_obs = self.observe(state, parameters)
        metrics = self.measure(state, parameters) if self.metric_names else {}
        truncated = terminated
        if self.episodic:
            if self.time_limit is None:
                truncated, done = torch.zeros_like(terminated), terminated
            else:
                truncated = elapsed >= self.time_limit
                done = truncated | terminated if self.terminates else truncated
            carry = self._reset_where(done, carry, noise)
            obs = self.observe(carry["state"], carry["parameters"])
        return carry, Step(obs, rewards, terminated, truncated, final_obs, returns, elapsed, None, metrics, sources)

    def outcome(self, carry: Carry, actions: Actions, noise: Tensor) -> Outcome:
        """Return the outcome of a step, as `transition` does, before any reset; it takes the arguments of `advance`."""
        return self.transition(carry["state"], actions, carry["parameters"], self._columns(noise, 0, self.step_noise))

    def starting_parameters(self, noise: Tensor) -> dict[str, Tensor]:
        """Return parameters of episodes that start now, float32 `[num_envs]`; it takes the arguments of `restart`."""
        return {**self.parameter_state.current.fixed, **self._draw(noise)[0]}

    def first_carry(self, state: State, parameters: dict[str, Tensor]) -> Carry:
        """Return the carry of episodes that all start now.

        Args:
            state: The first states of episodes, `[num_envs, ...]` each.
            parameters: Their parameters, float32 `[num_envs]` each.
        """
        elapsed = torch.zeros(self.num_envs, dtype=torch.int64, device=self.device)
        returns = torch.zeros(self.num_envs, device=self.device)
        return {"state": state, "parameters": parameters, "elapsed": elapsed, "returns": returns}

    @property
    def takes_elapsed(self) -> bool:
        """Whether `set_elapsed` moves time limits; it cannot if a simulator's own step count is out of reach."""
        return True

    def set_elapsed(self, elapsed: Tensor) -> None:
        """Set the elapsed steps of the current episodes, so that their time limits come sooner.

        Args:
            elapsed: int64 `[num_envs]`, each at least 0 and below the time limit.
        """
        assert self.carry is not None
        self.carry = self.carry | {"elapsed": elapsed}

    def _reset_where(self, done: Tensor, carry: Carry, noise: Tensor) -> Carry:
        """Return the carry with a new episode where `done`; chosen by `torch.where`, without a host sync."""
        parameters = carry["parameters"]
        drawn, fresh_sources = self._draw(noise)
        if drawn:
            drawn = {name: torch.where(done, value, parameters[name]) for name, value in drawn.items()}
            parameters = {**parameters, **drawn}
        sources = {label: torch.where(done, new, carry["sources"][label]) for label, new in fresh_sources.items()}
        fresh = self.initial_state(parameters, self._columns(noise, self.step_noise, self.reset_noise))
        return {
            "state": {
                name: torch.where(done.view(-1, *(1,) * (old.ndim - 1)) if old.ndim > 1 else done, fresh[name], old)
                for name, old in carry["state"].items()
            },
            "parameters": parameters,
            "elapsed": carry["elapsed"].masked_fill(done, 0),
            "returns": carry["returns"].masked_fill(done, 0.0),
            **({"sources": sources} if sources else {}),
        }

    def _columns(self, noise: Tensor, first: int, width: int) -> Tensor:
        """Return `width` columns of the noise from `first` on; slice only if necessary."""
        if width == noise.shape[-1]:
            return noise
        return noise[:, first : first + width] if width else self._no_noise

    def _draw(self, noise: Tensor) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Draw parameters and sources by noise `[num_envs, noise_width]`; see `ResolvedConfig.draw`."""
        config = self.parameter_state.current
        if not config.noise_width:
            return {}, {}
        return config.draw(self._columns(noise, self.step_noise + self.reset_noise, config.noise_width))

    # ---- stateful: Gymnasium's API

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None, config: EnvConfig | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        """Start an episode in every copy; return the first observation, `[num_envs, ...]`, and an empty info.

        Args:
            seed: Seeds the environment's generator; None continues its stream.
            options: Part of Gymnasium's signature; ignored.
            config: The `env_config` from now on: names of parameters to a number, `num_envs` numbers, a distribution
                or its JSON form, in the parameters' units; `{}` for the defaults, None for no change.

        Raises:
            TypeError: If `config` is not a mapping, or `seed` not a whole number.
            ValueError: If a name is unknown or a value out of bounds; the message has the legal names and bounds.
        """
        self.parameter_state.configure(config)
        self.parameter_state.adopt()
        if seed is not None:
            self.set_seed(seed)
        self.parameter_state.begin()
        self.carry, obs = restarted(self, self.noise(1)[0])
        return obs, {}

    def step(self, actions: Any) -> tuple[Observation, Tensor, Tensor, Tensor, dict[str, Any]]:
        """Take one step in every copy; copies whose episode ended have already started the next one.

        Args:
            actions: `[num_envs, ...]`, a tensor or an array, or a dict or tuple of them.

        Returns:
            Observation, rewards, terminated, truncated, `[num_envs, ...]`, and an info with the observations before the
            resets (`final_obs`, for every copy) and the episodes so far (`episode`: `r` and `l`), with masks of the
            copies whose episode ended. If some rows are not experience, `valid` is there too, and False for those.

        Raises:
            RuntimeError: If `reset` was not called before.
            ValueError: If actions have another shape, or a part of them is missing.
        """
        if self.carry is None:
            raise RuntimeError(f"{type(self).__name__}: call reset() before step().")
        actions = tree_of(actions, lambda part: as_tensor(part, self.device, name="actions"))
        actions = taken_actions(actions, self.single_action_space, self.num_envs, type(self).__name__)
        self.carry, step = advanced(self, self.carry, actions, self.noise(1)[0])
        # Rows that are not experience, such as those of masked autoreset steps, end no episode.
        truncated = step.truncated if step.valid is None else step.truncated & step.valid
        done = step.terminated | truncated
        info = {
            "final_obs": _apart(step.final_obs, self.carry["state"]),
            "_final_obs": done,
            "final_info": {},
            "_final_info": done,
            "episode": {"r": step.episode_returns.clone(), "l": step.episode_lengths.clone(), "_r": done, "_l": done},
            "_episode": done,
        }
        for name, value in step.metrics.items():
            info |= {name: value, f"_{name}": ~value.isnan()}
        if step.valid is not None:
            info["valid"] = step.valid
        return _apart(step.obs, self.carry["state"]), step.rewards, step.terminated, truncated, info

    @property
    def draws(self) -> bool:
        """Whether the class defines `draw`."""
        return type(self).draw is not Dynamics.draw

    def render(self) -> Any:
        """Return a picture of the present state of each copy, `[height, width, 3]`, uint8.

        Raises:
            ValueError: If the class does not define `draw`.
            RuntimeError: If there was no `reset` yet.
        """
        if not self.draws:
            raise ValueError(f"{type(self).__name__} cannot be rendered: give it a `draw`; see docs/playing.md.")
        if self.carry is None:
            raise RuntimeError(f"{type(self).__name__}: call reset() before render().")
        states, parameters = host_arrays(self.carry["state"], self.team), host_arrays(self.carry["parameters"])
        return tuple(picture_of(self, copy_of(states, i), numbers_of(parameters, i)) for i in range(self.num_copies))

    # ---- parameters; algorithms and trainers use `parameter_state`

    @property
    def config(self) -> dict[str, Any]:
        """The `env_config` in force, in plain JSON form; empty for the defaults."""
        return plain(self.parameter_state.current.config)

    def plain_config(self, config: EnvConfig, called: str = "env_config", copies: str = "num_envs") -> dict[str, Any]:
        """Check an `env_config` as `reset` does and return its plain JSON form, without applying it.

        Args:
            config: Names of parameters to values, distributions or their JSON forms.
            called: Its name in error messages.
            copies: The argument that sets the number of copies, for error messages.
        """
        return plain(self.parameter_state.resolve(config, called, copies).config)

    def steer_config(self, config: EnvConfig) -> None:
        """Play each copy's next episode under an `env_config`; those in progress keep the values that they began with.

        Programs are recompiled if the kind of a parameter's distribution changes, but not if only its numbers do.

        Args:
            config: As `reset` takes it, with distributions that do not move by themselves.
        """
        self.parameter_state.steer(config)
        if self.carry is not None:
            self.carry = {name: value for name, value in self.carry.items() if name != "sources"}

    def check_config(self, resolved: ResolvedConfig, owner: str) -> None:
        """Raise `ValueError` for a configuration that the environment does not support.

        Args:
            resolved: The configuration, whose names and values are legal.
            owner: Its name in error messages.
        """

    def present_config(self) -> dict[str, Any]:
        """Return the configuration of the next reset in plain JSON form, with the present form of moving distributions.

        An evaluation under the training's configuration draws from it. The call copies values from the device.
        """
        return plain(self.parameter_state.present())

    def parameter_support(self) -> dict[str, tuple[float, float]]:
        """Return the smallest and the largest value of each parameter that evaluations draw now, in its own unit."""
        state = self.parameter_state
        return state.resolve(state.present()).support(self.parameters)

    # ---- saving and copying

    def state_dict(self) -> dict[str, Any]:
        """Return the complete state: once it is loaded, the same actions give bitwise the same results."""
        carry = self.carry
        if carry is not None:
            # Fixed parameters are left out, as the configuration has them.
            names = self.parameter_state.current.drawn_names
            drawn = {name: value for name, value in carry["parameters"].items() if name in names}
            carry = tree_map(Tensor.clone, carry | {"parameters": drawn})
        device = {"generator": self.generator.get_state(), "generator_device": self.device.type}
        return device | {"carry": carry, **self.parameter_state.state_dict()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore a snapshot.

        Args:
            state_dict: A snapshot; its tensors are copied. Another number of copies, another kind of device, or a state
                with other parts or shapes than that of `initial_state` raises `ValueError`.
        """
        name, carry, kind = type(self).__name__, state_dict["carry"], state_dict["generator_device"]
        if carry is not None and len(carry["elapsed"]) != self.num_envs:
            raise ValueError(
                f"{name}: the snapshot has {len(carry['elapsed'])} copies, this environment {self.num_envs}; make it "
                "with the same num_envs."
            )
        if kind != self.device.type:
            raise ValueError(
                f"{name}: the snapshot's generator is on {kind!r}, this environment on {self.device.type!r}; random "
                "streams differ between them. Make it on the same device."
            )
        self.parameter_state.load_state_dict(state_dict)
        if carry is not None:
            carry = tree_map(lambda tensor: tensor.to(self.device, copy=True), carry)
            if type(self).initial_state is not Env.initial_state:
                noise = torch.zeros(self.num_envs, self.noise_width, device=self.device)
                own = self._columns(noise, self.step_noise, self.reset_noise)
                check_restored(name, carry["state"], self.initial_state(self.starting_parameters(noise), own))
            carry["parameters"] = {**self.parameter_state.current.fixed, **carry["parameters"]}
        self.carry = carry
        self.generator.set_state(state_dict["generator"].cpu())

    def another(self, num_envs: int | None = None, *, seed: int | None = None) -> Env | None:
        """Make an environment of the same configuration that shares nothing with this one and is not reset yet.

        Return None if this one cannot be copied, or not with another number of copies.

        Args:
            num_envs: Its copies of the task; None lets the environment choose their number.
            seed: Seeds its generator; None takes a seed from the operating system.
        """
        if num_envs is not None and whole_number(num_envs, type(self).__name__, "num_envs") != self.num_copies:
            return None
        apart: dict[int, Any] = {id(self.carry): None, id(self.generator): torch.Generator(self.device)}
        try:
            twin = copy.deepcopy(self, apart)
        except Exception:  # a simulator that cannot be copied may raise anything
            return None
        twin.carry = None
        twin.set_seed(seed)
        return twin

    def set_seed(self, seed: int | None) -> None:
        """Seed the generator, as `reset` with a seed does.

        Args:
            seed: A whole number; None takes one from the operating system.
        """
        if seed is None:
            self.generator.seed()
        else:
            self.generator.manual_seed(whole_number(seed, type(self).__name__, "seed") % 2**64)


def _apart(obs: Observation, state: State) -> Any:
    """Copy tensors that an observation shares with the state, so that changing them does not change the physics."""
    shared = {value.untyped_storage().data_ptr() for value in state.values()}
    return tree_map(lambda part: part.clone() if part.untyped_storage().data_ptr() in shared else part, obs)


def restarted(env: Env, noise: Tensor) -> tuple[Carry, Observation]:
    """Start an episode in every copy; arguments and results are those of `Env.restart`, in the form of `advanced`."""
    with torch.no_grad():  # restores gradients' mode, which a simulator may change
        carry, obs = env.restart(noise)
    obs = tree_map(Tensor.clone, obs)  # it may share memory with the state
    return carry, obs if env.capturable else _in_space(env, "restart", obs)


def advanced(env: Env, carry: Carry, actions: Actions, noise: Tensor) -> tuple[Carry, Step]:
    """Step an environment; arguments and results are those of `Env.advance`.

    A simulator may be third-party code that writes into the actions it gets and into the tensors it returned, and that
    returns other types of numbers than it declares. So it gets copies of the actions, and its results are copied,
    unless its `advance` is marked as `apart`, and converted to the types that `Step` and the observation space say.
    """
    if env.capturable:  # `validate` has checked it
        return env.advance(carry, actions, noise)
    is_apart = getattr(env.advance, "is_apart", False)
    with torch.no_grad():  # restores gradients' mode, as in `restarted`
        carry, step = env.advance(carry, actions if is_apart else tree_map(Tensor.clone, actions), noise)
    if (step.rewards.shape, step.terminated.shape, step.truncated.shape) != ((env.num_envs,),) * 3:
        flags = {"terminated": step.terminated, "truncated": step.truncated}
        check_rows(f"{type(env).__name__}.advance", env.num_envs, rewards=step.rewards, **flags)
    if not is_apart:
        parts: Any = (part if part is None else tree_map(Tensor.clone, part) for part in step)
        step = Step(*parts)
    obs = _in_space(env, "advance", step.obs)
    return carry, step._replace(
        obs=obs,
        rewards=step.rewards.float(),
        terminated=step.terminated.bool(),
        truncated=step.truncated.bool(),
        final_obs=obs if step.final_obs is step.obs else _in_space(env, "advance", step.final_obs),
        episode_returns=step.episode_returns.float(),
    )


def _in_space(env: Env, function: str, obs: Observation) -> Any:
    """Return what a simulator's function observed, `[num_envs, *]`, in the types of numbers of its space."""
    space = env.single_observation_space
    check_obs(f"{type(env).__name__}.{function}", "the observation", obs, space, env.num_envs)
    return in_dtypes(space, obs)


def apart(advance: Function) -> Function:
    """Mark an `advance` that shares no memory with its simulator: it copies the actions and the results."""
    advance.is_apart = True  # type: ignore[attr-defined]
    return advance
