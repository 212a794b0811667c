"""Environments without a state in the carry: simulators keep their state elsewhere, and a stand-in has none."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Mapping
from typing import Any, ClassVar, Final, NoReturn

import gymnasium
import gymnasium.spaces as spaces
import numpy as np
import torch
from torch import Tensor

from rl8x.envs.base import MAX_EVAL_ENVS, Carry, Env, Step
from rl8x.envs.bound_parameters import BoundBatch, BoundCopies
from rl8x.envs.checks import narrow_seed
from rl8x.envs.episode_metrics import EpisodeMetrics
from rl8x.envs.parameters import ResolvedConfig
from rl8x.envs.team import Team
from rl8x.plain import frozen, thawed
from rl8x.spaces import WIDER

_DTYPES: Final = {np.float32: torch.float32, np.bool_: torch.bool}


class SimulatorEnv(Env):
    """Base class of the adapters to simulators, which are not compiled, captured or saved.

    A subclass defines `restart` and `advance`, which change the simulator, and sets the attributes declared here.
    """

    terminates: ClassVar[bool] = True
    capturable: ClassVar[bool] = False
    resumable: ClassVar[bool] = False

    takes_render_mode: ClassVar[bool] = False
    """Whether it renders frames if it is made with `render_mode="rgb_array"`."""
    _bound: BoundCopies | BoundBatch | None = None
    """The bound simulators in which parameters are set; None without parameters."""
    made_from: tuple[Any, Mapping[str, Any]] | None = None
    """The constructor's first argument and the others by name, frozen; None if it cannot be made again."""
    next_seed: int | None = None
    """The narrowed seed for the simulator's next reset, after `set_seed`; None continues its random numbers."""

    def set_seed(self, seed: int | None) -> None:
        """Seed the generator, and the simulator at its next reset."""
        super().set_seed(seed)
        self.next_seed = None if seed is None else narrow_seed(seed)

    @functools.cached_property
    def episode_metrics(self) -> EpisodeMetrics:
        """The values of `info` that are averaged over episodes; none unless `_make_from` sets some."""
        return EpisodeMetrics(())

    def _make_from(self, source: Any, metrics: Any, options: Mapping[str, Any]) -> None:
        """Store the constructor's arguments, and which values of `info` are averaged over episodes."""
        self.made_from = source, frozen({"metrics": metrics, **options})
        self.episode_metrics = EpisodeMetrics(metrics)
        self.metric_names = tuple(self.episode_metrics.reductions)

    def _put(self, parameters: Mapping[str, Tensor]) -> None:
        """Set the parameters of the episodes that start next, `[num_envs]` each."""
        if self.team is not None:
            parameters = {name: value[: self.num_copies] for name, value in parameters.items()}
        if self._bound is not None:
            self._bound.put(parameters, self.parameter_state.current.config)

    def check_config(self, resolved: ResolvedConfig, owner: str) -> None:
        """Raise `ValueError` for values that cannot be set, and for parameters that move with episode returns."""
        for each in resolved.curricula:
            if each.metric is not None:
                raise ValueError(
                    f"{owner}[{each.names[0]!r}] moves with the returns of episodes, and a simulator does not say "
                    "under which parameters they were played. Use Scheduled, or a distribution that stands still."
                )
        if isinstance(self._bound, BoundBatch):
            self._bound.check(resolved, owner)

    def state_dict(self) -> dict[str, Any]:
        """Return the seeding and the configuration; the simulator's own state cannot be saved."""
        return super().state_dict() | {"carry": None}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore the seeding and the configuration; new episodes start, seeded by the restored generator."""
        super().load_state_dict(state_dict)
        self.next_seed = int(torch.randint(2**31 - self.num_envs, (), generator=self.generator, device=self.device))
        why = f"{type(self).__name__}: a simulator's state cannot be saved, so all copies start new episodes."
        warnings.warn(why, RuntimeWarning, stacklevel=2)

    def another(self, num_envs: int | None = None, *, seed: int | None = None, **kwargs: Any) -> Env | None:
        """Make an environment with the same arguments, at most 128 copies by default; `kwargs` override arguments."""
        if self.made_from is None:
            return super().another(num_envs, seed=seed)
        source, options = self.made_from
        options = {"device": self.device, "time_limit": self.time_limit, **thawed(options), **kwargs}
        make: Any = type(self)
        made: Env = make(source, num_envs or min(self.num_copies, MAX_EVAL_ENVS), seed=seed, **options)
        return made

    def finish(
        self,
        carry: Carry,
        parameters: Mapping[str, Tensor],
        info: Mapping[str, Any],
        done: Tensor,
        *results: Any,
        valid: Tensor | None = None,
        final: Tensor | None = None,
        any_done: bool = True,
    ) -> tuple[Carry, Step]:
        """Return the result of `advance`: the next carry, and the step.

        Args:
            carry: The carry before the step.
            parameters: Parameters of the episodes that continue or have begun, `[num_envs]` each.
            info: What the simulator reported, for the metrics of episodes.
            done: Where an episode ended, `[num_envs]`, bool.
            *results: The first fields of `Step`, up to `final_obs`.
            valid: The field of that name of `Step`.
            final: As `EpisodeMetrics.update` takes it.
            any_done: Whether an episode may have ended; False spares work.
        """
        returns, elapsed = carry["returns"] + results[1], carry["elapsed"] + 1
        metrics = carry.get("metrics", {})
        if info:
            metrics = self.episode_metrics.update(
                metrics, info, final, torch.ones_like(done) if valid is None else valid
            )
        fields: Any = (*results, returns, elapsed, valid, self.episode_metrics.values(metrics))
        if any_done:
            self.episode_metrics.check_reported(metrics, info, done)
            metrics = self.episode_metrics.restarted(metrics, done)
            elapsed, returns = elapsed.masked_fill(done, 0), returns.masked_fill(done, 0.0)
        following = {"state": {}, "parameters": parameters, "elapsed": elapsed, "returns": returns, "metrics": metrics}
        return following, Step(*fields)

    def _tensor(self, value: Any, dtype: Any = None) -> Tensor:
        """Copy an array or tensor to the device, as `dtype` or float64 as float32; simulators reuse their memory."""
        if isinstance(value, Tensor):
            kept = torch.float32 if value.dtype == torch.float64 else value.dtype
            return value.to(self.device, kept if dtype is None else _DTYPES[dtype], copy=True)
        if dtype is None:
            value = np.asarray(value)
            native = value.dtype.newbyteorder("=")
            dtype = np.float32 if native == np.float64 else native
            if native.kind == "u":  # the name of a type takes a microsecond
                dtype = WIDER.get(native.name, native)
        return torch.from_numpy(np.array(value, dtype)).to(self.device)

    @staticmethod
    def _redrawn(begun: Tensor, parameters: Mapping[str, Tensor], fresh: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the parameters in force, fresh ones where an episode has begun, `[num_envs]` each."""
        return {
            name: value if value is parameters[name] else torch.where(begun, value, parameters[name])
            for name, value in fresh.items()
        }


def as_gymnasium(space: Any) -> Any:
    """Convert another package's space, identified by its attributes, to Gymnasium's, with floats as float32."""
    if hasattr(space, "spaces"):
        return spaces.Dict({name: as_gymnasium(part) for name, part in space.spaces.items()})
    if hasattr(space, "nvec"):
        return spaces.MultiDiscrete(space.nvec)
    if hasattr(space, "n"):
        return spaces.Discrete(int(space.n))
    dtype: Any = np.float32 if np.issubdtype(space.dtype, np.floating) else np.dtype(space.dtype).type
    low, high = (np.broadcast_to(np.asarray(bound, dtype), space.shape) for bound in (space.low, space.high))
    return spaces.Box(low, high, space.shape, dtype)


class StandIn(Env):
    """An environment with only the spaces of one copy: no episode can begin, for the reason that `problem` states."""

    capturable = False

    def __init__(
        self,
        num_envs: int,
        observation_space: gymnasium.Space[Any],
        action_space: gymnasium.Space[Any],
        *,
        episodic: bool,
        problem: str,
        device: torch.device | str = "cpu",
        team: Team | None = None,
    ) -> None:
        self.single_observation_space, self.single_action_space, self.team = observation_space, action_space, team
        self.terminates, self.problem = episodic, problem  # type: ignore[misc] # other classes always do, or never
        super().__init__(num_envs, device=device)

    def initial_state(self, *_: Any) -> NoReturn:
        """Raise `RuntimeError`, as episodes cannot begin."""
        raise RuntimeError(
            f"this algorithm was loaded to act, without its environment: {self.problem}. Give load_algorithm `env`."
        )
