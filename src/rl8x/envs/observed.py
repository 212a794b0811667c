"""A wrapper that puts the parameters of an environment into its observations, by `observe_parameters`.

Source: Pinto et al. 2018, arXiv:1710.06542 (a critic that sees more than the actor); Lee et al. 2020, arXiv:2010.11251
(a teacher that sees the physics).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final, Literal, TypeAlias

import gymnasium.spaces as spaces
import numpy as np
import torch
from gymnasium.vector.utils import batch_space
from torch import Tensor

from rl8x.envs.base import Env, advanced, apart, restarted
from rl8x.envs.parameters import Parameter
from rl8x.envs.steps import Actions, Carry, Observation, Step, by_part
from rl8x.names import did_you_mean
from rl8x.spaces import AsymmetricDict, critic_only

ObserveParameters: TypeAlias = Literal["none", "critic", "all"]
MODES: Final = ("none", "critic", "all")
PARAMETERS: Final = "parameters"
"""The part of an observation that contains the parameters."""

# One side of the default is logarithmic if its bound and the default differ by at least this factor.
_DECADE: Final = 10.0
_TINY: Final = 1e-30
# The largest slope, which float32 can represent.
_LARGEST: Final = 1e30


class ScaledParameters:
    """The parameters of an environment as one vector, each scaled by its default and its legal bounds.

    The default becomes 0, the lower bound -1 and the upper bound 1; each side of the default has its own scale. A side
    is linear, or logarithmic if its bound has the default's sign and they differ by a factor of 10 or more, so that
    in [0.05, 50] around 1 equal factors are equal steps:

        s(x) = (x - d) / (high - d)          x >= d,  linear
        s(x) = log(x / d) / log(high / d)    x >= d,  logarithmic
        s(x) = z / (1 + z),  z = (x - d) / |d|    x >= d,  no upper bound; |d| is 1 for a default of 0

    and likewise below d with opposite sign. If the default is a bound, that side is empty. The scales depend on the
    declared parameters alone, not on the `env_config` in force, so that observations always mean the same.
    """

    def __init__(self, parameters: Mapping[str, Parameter], device: torch.device) -> None:
        self.names = tuple(sorted(parameters))  # whichever order they are declared in
        declared = [parameters[name] for name in self.names]
        above = [_side(each.default, each.high, 1.0) for each in declared]
        below = [_side(each.default, each.low, -1.0) for each in declared]
        # For each side: the slopes of all parameters, whether they are logarithmic, and whether they are unbounded.
        self.slopes, self.logs, self.opens = (
            [torch.tensor([each[i] for each in side], device=device) for side in (above, below)] for i in range(3)
        )
        self.has_log, self.has_open = (any(each[i] for each in above + below) for i in (1, 2))
        self.default = torch.tensor([float(each.default) for each in declared], device=device)
        # No side of a default of 0 is logarithmic.
        self.divisor = torch.tensor([float(each.default or 1.0) for each in declared], device=device)

    def __call__(self, values: Mapping[str, Tensor]) -> Tensor:
        """Return values `[num_envs]` each as `[num_envs, num_parameters]`, float32 in [-1, 1]."""
        x = torch.stack([values[name] for name in self.names], -1)
        above = x >= self.default
        slope = torch.where(above, self.slopes[0], self.slopes[1])
        scaled = (x - self.default) * slope
        if self.has_log:
            logs = (x / self.divisor).clamp(min=_TINY).log() * slope
            scaled = torch.where(torch.where(above, self.logs[0], self.logs[1]), logs, scaled)
        if self.has_open:
            is_open = torch.where(above, self.opens[0], self.opens[1])
            scaled = torch.where(is_open, scaled / (1.0 + scaled.abs()), scaled)
        return scaled.clamp(-1.0, 1.0)


def _side(default: float, bound: float, sign: float) -> tuple[float, bool, bool]:
    """Return the slope of one side of a default, whether it is logarithmic, and whether it has no bound."""
    if math.isinf(bound):
        return 1.0 / (abs(default) or 1.0), False, True
    if bound == default:
        return 0.0, False, False
    ratio = bound / default if default else 0.0
    if ratio > 0.0 and max(ratio, 1.0 / ratio) >= _DECADE:
        return sign / math.log(ratio), True, False
    return min(sign / (bound - default), _LARGEST), False, False


class ObservedParameters(Env):
    """An environment with its parameters in the observation, scaled to [-1, 1], as the part "parameters" of a `Dict`.

    The environment's own observation is the part "obs", or the other parts if it is a `Dict`. Each observation has the
    parameters of its own episode: `obs` after a reset those of the new one, `final_obs` those of the one that ended.
    Everything else, including the state, is the environment's.

    Args:
        env: The environment, any subclass of `Env`; the wrapper takes it over.
        observe_parameters: Who sees the parameters: the `"critic"` alone, or `"all"`.

    Raises:
        ValueError: If there is no such mode, the environment has no parameters, or its observation has a part of that
            name already.
    """

    env: Env
    observe_parameters: ObserveParameters
    scaled: ScaledParameters

    def __init__(self, env: Env, observe_parameters: ObserveParameters) -> None:
        self.env, self.observe_parameters = env, observe_parameters
        owner = f"{type(env).__name__}: observe_parameters"
        if observe_parameters not in MODES[1:]:
            hint = did_you_mean(observe_parameters, MODES)
            raise ValueError(f"{owner} must be one of {', '.join(map(repr, MODES))}; got {observe_parameters!r}.{hint}")
        if not env.parameters:
            raise ValueError(
                f"{owner}={observe_parameters!r} shows the parameters that `env_config` may set, and this environment "
                "has none. Declare some in `parameters`, or leave it at 'none'."
            )
        space = env.single_observation_space
        parts = by_part(space, space)
        if PARAMETERS in parts:
            raise ValueError(
                f"{owner}={observe_parameters!r} needs the name {PARAMETERS!r} in the observation, which has such a "
                "part already. Rename that part."
            )
        parts[PARAMETERS] = spaces.Box(-1.0, 1.0, (len(env.parameters),), np.float32)
        hidden = (*critic_only(space), *([PARAMETERS] if observe_parameters == "critic" else ()))
        self.single_observation_space = AsymmetricDict(parts, critic_only=hidden) if hidden else spaces.Dict(parts)
        self.observation_space = batch_space(self.single_observation_space, env.num_envs)
        # The device of a tensor includes its index ("cuda:0"); constants are looked up by that.
        self.scaled = ScaledParameters(env.parameters, torch.empty(0, device=env.device).device)

    # Attributes and methods that are neither defined in this class nor in `_SET` are the environment's.

    def __getattribute__(self, name: str) -> Any:
        if name in _OWN or name.startswith("__"):
            return object.__getattribute__(self, name)
        return getattr(object.__getattribute__(self, "env"), name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _SET:
            object.__setattr__(self, name, value)
        else:
            setattr(self.env, name, value)

    def __del__(self) -> None:
        """Do nothing: the environment closes itself."""

    @property
    def program_key(self) -> Any:
        """The environment's key, and who sees the parameters."""
        return self.observe_parameters, self.env.program_key

    def restart(self, noise: Tensor) -> tuple[Carry, Observation]:
        """Start an episode in every copy."""
        carry, obs = restarted(self.env, noise)
        return carry, self._joined(obs, self.scaled(carry["parameters"]))

    @apart
    def advance(self, carry: Carry, actions: Actions, noise: Tensor) -> tuple[Carry, Step]:
        """Take one step in every copy."""
        after, step = advanced(self.env, carry, actions, noise)
        obs, final_obs = self._shown(step.obs, step.final_obs, carry["parameters"], after["parameters"])
        return after, step._replace(obs=obs, final_obs=final_obs)

    def _shown(self, obs: Any, final_obs: Any, old: Mapping[str, Tensor], new: Mapping[str, Tensor]) -> tuple[Any, Any]:
        """Return the observations after and before a reset, each with the parameters of its episode."""
        final = self.scaled(old)
        return self._joined(obs, final if new is old else self.scaled(new)), self._joined(final_obs, final)

    def _joined(self, obs: Any, parameters: Tensor) -> Any:
        """Return an observation `[num_envs, *obs]`, or a dict of them, with parameters `[num_envs, num_parameters]`."""
        return {**by_part(self.env.single_observation_space, obs), PARAMETERS: parameters}

    def reset(self, **options: Any) -> tuple[Observation, dict[str, Any]]:
        """Start an episode in every copy; see `Env.reset`."""
        obs, info = self.env.reset(**options)
        assert self.env.carry is not None
        return self._joined(obs, self.scaled(self.env.carry["parameters"])), info

    def step(self, actions: Any) -> tuple[Observation, Tensor, Tensor, Tensor, dict[str, Any]]:
        """Take one step in every copy; see `Env.step`."""
        before: Any = self.env.carry
        obs, *outcome, info = self.env.step(actions)
        after: Any = self.env.carry
        obs, info["final_obs"] = self._shown(obs, info["final_obs"], before["parameters"], after["parameters"])
        return obs, *outcome, info

    def another(self, *args: Any, **kwargs: Any) -> Env | None:
        """Make another environment and wrap it too; see `Env.another`."""
        twin = self.env.another(*args, **kwargs)
        return None if twin is None else ObservedParameters(twin, self.observe_parameters)


_SET: Final = frozenset({"env", "observe_parameters", "scaled", "single_observation_space", "observation_space"})
_OWN: Final = frozenset({*_SET, *vars(ObservedParameters)})
