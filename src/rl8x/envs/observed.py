"""Parameters of an environment as a part of its observation: `observe_parameters="none" | "critic" | "all"`.

Nobody who writes an environment writes anything for it. `ShowsParameters` wraps four methods where a class defines
them: `__init__`, which takes the keyword whether the class's own knows it or not; `restart` and `advance`, where
observations leave the environment; and `another`. The carry's parameters are those of the episode that an observation
is of: the one after a reset has the new episode's, `final_obs` the old one's, also where a simulator keeps its state
outside of the carry.

Source: Pinto et al. 2018, arXiv:1710.06542 (a critic that sees more than the actor); Lee et al. 2020, arXiv:2010.11251
(a teacher that sees the physics).
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any, Final, Literal, TypeAlias

import gymnasium.spaces as spaces
import numpy as np
import torch
from gymnasium.vector.utils import batch_space
from torch import Tensor

from rl8x import keys
from rl8x.envs.parameters import Parameter
from rl8x.names import did_you_mean
from rl8x.spaces import AsymmetricDict, critic_only

ObserveParameters: TypeAlias = Literal["none", "critic", "all"]
MODES: Final = ("none", "critic", "all")
PARAMETERS: Final = "parameters"
"""The part of an observation that has the parameters."""

_NAME: Final = "observe_parameters"
# A side of the default is logarithmic from this ratio of its bound to the default.
_DECADE: Final = 10.0
_TINY: Final = 1e-30
# A slope that float32 has.
_LARGEST: Final = 1e30


class ScaledParameters:
    """The parameters of an environment as one vector, each scaled by its default and its legal bounds.

    The default is 0, the lower bound -1 and the upper bound 1, each side of the default by itself. A side is linear,
    or logarithmic where its bound has the default's sign and they differ by a factor of 10 or more, so that
    [0.05, 50] around 1 is in equal steps for equal factors:

        s(x) = (x - d) / (high - d)          x >= d,  linear
        s(x) = log(x / d) / log(high / d)    x >= d,  logarithmic
        s(x) = z / (1 + z),  z = (x - d) / |d|    x >= d,  no upper bound; |d| is 1 for a default of 0

    and with opposite sign likewise below d. Where the default is a bound, that side is empty. What is observed is
    decided by the declaration alone, and not by the `env_config` in force, so that it means the same in all of them.

    Args:
        parameters: The declared parameters; the vector has them in this order.
        device: Where the values are.
    """

    def __init__(self, parameters: Mapping[str, Parameter], device: torch.device) -> None:
        self.names = tuple(parameters)
        declared = parameters.values()
        # The side above the default, then the one below; of each parameter slope, whether logarithmic, whether open.
        sides = [
            [_side(each.default, each.high, 1.0) for each in declared],
            [_side(each.default, each.low, -1.0) for each in declared],
        ]
        self.has_log = any(is_log for side in sides for _, is_log, _ in side)
        self.has_open = any(is_open for side in sides for _, _, is_open in side)
        (above, log_above, open_above), (below, log_below, open_below) = (
            [torch.tensor(column, device=device) for column in zip(*side, strict=True)] for side in sides
        )
        self.slopes, self.logs, self.opens = (above, below), (log_above, log_below), (open_above, open_below)
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
    """Return the slope of one side of a default, whether that is one of logarithms, and whether it has no bound."""
    if math.isinf(bound):
        return 1.0 / (abs(default) or 1.0), False, True
    if bound == default:
        return 0.0, False, False
    ratio = bound / default if default else 0.0
    if ratio > 0.0 and max(ratio, 1.0 / ratio) >= _DECADE:
        return sign / math.log(ratio), True, False
    return min(sign / (bound - default), _LARGEST), False, False


def shown_space(space: spaces.Space[Any], num_parameters: int, mode: ObserveParameters, owner: str) -> spaces.Dict:
    """Return the space of observations with parameters: a `Dict` with them as a part beside the rest.

    Raises:
        ValueError: If there is a part of that name already; `owner` names the environment.
    """
    parts = dict(space.spaces) if isinstance(space, spaces.Dict) else {keys.OBS: space}
    if PARAMETERS in parts:
        raise ValueError(
            f"{owner}: observe_parameters={mode!r} needs the name {PARAMETERS!r} in the observation, which has such a "
            "part already. Rename that part."
        )
    parts[PARAMETERS] = spaces.Box(-1.0, 1.0, (num_parameters,), np.float32)
    hidden = critic_only(space)
    if mode == "critic":
        hidden = (*hidden, PARAMETERS)
    return AsymmetricDict(parts, critic_only=hidden) if hidden else spaces.Dict(parts)


def check_mode(mode: object, parameters: Mapping[str, Parameter], owner: str) -> None:
    """Raise `ValueError` for an unknown mode, or an environment without parameters to show; `owner` names it."""
    if mode not in MODES:
        listed = ", ".join(map(repr, MODES))
        raise ValueError(f"{owner}: {_NAME} must be one of {listed}; got {mode!r}.{did_you_mean(mode, MODES)}")
    if mode != "none" and not parameters:
        raise ValueError(
            f"{owner}: {_NAME}={mode!r} shows the parameters that `env_config` may set, and this environment has none. "
            "Declare some in `parameters`, or leave it at 'none'."
        )


def joined(obs: Any, parameters: Tensor) -> Any:
    """Return an observation `[num_envs, *obs]`, or a dict of them, with parameters `[num_envs, num_parameters]`."""
    parts = obs if isinstance(obs, dict) else {keys.OBS: obs}
    return {**parts, PARAMETERS: parameters}


# Wrappers of the methods that make an environment and return observations. A class that overrides one of these may
# call its parent's: only the outermost one adds the parameters.


def taking_mode(method: Callable[..., None]) -> Callable[..., None]:
    """Have an `__init__` take `observe_parameters`, and show the parameters at its end where that is asked for."""
    signature = inspect.signature(method)
    knows_it = _NAME in signature.parameters

    @functools.wraps(method)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807 - it stands for one
        if type(self).__init__ is not __init__:
            method(self, *args, **kwargs)
            return
        given = kwargs.get(_NAME, ...)
        if not knows_it:
            kwargs.pop(_NAME, None)
        method(self, *args, **kwargs)
        try:
            self.show_parameters(self.observe_parameters if given is ... else given)
        except ValueError:
            self.close()
            raise

    __init__.__signature__ = signature if knows_it else _with_mode(signature)  # type: ignore[attr-defined]
    return __init__


def _with_mode(signature: inspect.Signature) -> inspect.Signature:
    """Return a signature with `observe_parameters` after its other arguments."""
    parameters = list(signature.parameters.values())
    last = parameters[-1].kind is inspect.Parameter.VAR_KEYWORD
    where = len(parameters) - 1 if last else len(parameters)
    parameters.insert(where, inspect.Parameter(_NAME, inspect.Parameter.KEYWORD_ONLY, default="none"))
    return signature.replace(parameters=parameters)


def showing_restart(method: Callable[..., Any]) -> Callable[..., Any]:
    """Have a `restart` show the parameters of the carry that it returns."""

    @functools.wraps(method)
    def restart(self: Any, *args: Any, **kwargs: Any) -> Any:
        carry, obs = method(self, *args, **kwargs)
        if self.scaled_parameters is not None and type(self).restart is restart:
            obs = joined(obs, self.scaled_parameters(carry["parameters"]))
        return carry, obs

    return restart


def showing_advance(method: Callable[..., Any]) -> Callable[..., Any]:
    """Have an `advance` show the parameters of the carry that it returns, and before a reset those of the one given."""

    @functools.wraps(method)
    def advance(self: Any, carry: Any, *args: Any, **kwargs: Any) -> Any:
        after, step = method(self, carry, *args, **kwargs)
        if self.scaled_parameters is None or type(self).advance is not advance:
            return after, step
        old, new = carry["parameters"], after["parameters"]
        final = shown = self.scaled_parameters(old)
        if new is not old:
            shown = self.scaled_parameters(new)
        return after, step._replace(obs=joined(step.obs, shown), final_obs=joined(step.final_obs, final))

    return advance


def showing_another(method: Callable[..., Any]) -> Callable[..., Any]:
    """Have what `another` makes show what this one shows."""

    @functools.wraps(method)
    def another(self: Any, *args: Any, **kwargs: Any) -> Any:
        twin = method(self, *args, **kwargs)
        if twin is not None and twin.observe_parameters != self.observe_parameters:
            twin.show_parameters(self.observe_parameters)
        return twin

    return another


_SHOWING: Final[Mapping[str, Callable[[Callable[..., Any]], Callable[..., Any]]]] = {
    "__init__": taking_mode,
    "restart": showing_restart,
    "advance": showing_advance,
    "another": showing_another,
}


class ShowsParameters:
    """The part of an environment that shows its parameters in its observations; `Env` is one.

    Attributes:
        observe_parameters: Who sees them: nobody, the critic alone, or all.
        scaled_parameters: Makes the part of an observation that has them; None where nobody sees them.
    """

    parameters: Mapping[str, Parameter]
    num_envs: int
    device: torch.device
    single_observation_space: spaces.Space[Any]
    observation_space: spaces.Space[Any]

    observe_parameters: ObserveParameters = "none"
    scaled_parameters: ScaledParameters | None = None

    def __init_subclass__(cls, **options: Any) -> None:
        """Have what a class defines of its own show the parameters too."""
        super().__init_subclass__(**options)
        for name, showing in _SHOWING.items():
            if name in vars(cls):
                setattr(cls, name, showing(vars(cls)[name]))

    @property
    def own_observation_space(self) -> spaces.Space[Any]:
        """The space of what the environment itself observes of one copy, without the parameters."""
        return self.single_observation_space if self._own_space is None else self._own_space

    _own_space: spaces.Space[Any] | None = None

    def show_parameters(self, mode: ObserveParameters) -> None:
        """Show the parameters from now on; called once.

        Args:
            mode: Whom: `"none"`, `"critic"` or `"all"`.

        Raises:
            ValueError: If there are none, or there is no such mode.
        """
        owner = type(self).__name__
        check_mode(mode, self.parameters, owner)
        self.observe_parameters = mode
        if mode == "none":
            return
        # A tensor's device has its index ("cuda:0"), by which constants are found again.
        device = torch.empty(0, device=self.device).device
        self.scaled_parameters = ScaledParameters(self.parameters, device)
        self._own_space = self.single_observation_space
        self.single_observation_space = shown_space(self._own_space, len(self.parameters), mode, owner)
        self.observation_space = batch_space(self.single_observation_space, self.num_envs)
