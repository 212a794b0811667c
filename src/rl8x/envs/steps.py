"""An environment's step, and its types: state, actions, parameters, the carry between steps, the step's result."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeAlias, TypeVar

from torch import Tensor

from rl8x.envs.results import check_rows
from rl8x.trees import tree_map

State: TypeAlias = dict[str, Tensor]
"""The physics' state between two steps: tensors by name, each `[num_envs, ...]`."""
Parameters: TypeAlias = Mapping[str, Tensor]
"""The values of the environment's parameters, float32 `[num_envs]` each, also where all copies have the same."""
Outcome: TypeAlias = tuple[State, Tensor, Tensor]
"""The result of a transition: the next state, rewards float32 `[num_envs]` and terminated bool `[num_envs]`."""
Observation: TypeAlias = "Tensor | dict[str, Observation]"
"""A tensor `[num_envs, *shape]`, or nested dicts of them for `Dict` and `Tuple` spaces."""
Actions: TypeAlias = "Tensor | dict[str, Actions]"
"""A tensor `[num_envs, *shape]`, or nested dicts of them; the parts of a `Tuple` have the keys "0", "1", ..."""
Carry: TypeAlias = dict[str, Any]
"""All that changes from step to step: `state`, `parameters`, `elapsed` (int64 `[num_envs]`), `returns` (float32).

Where parameters move with the returns of episodes, `sources` too: as `Step` has them, of the episode that goes on."""


Function = TypeVar("Function", bound=Callable[..., Any])


class Step(NamedTuple):
    """The result of one step of all copies; every field is `[num_envs, ...]`."""

    obs: Observation
    """The next observation, after the reset where an episode ended."""
    rewards: Tensor
    """float32."""
    terminated: Tensor
    """bool: the task ended the episode."""
    truncated: Tensor
    """bool: the time limit was reached; both can be true in one step, as in Gymnasium."""
    final_obs: Observation
    """The observation before any reset, for every copy; that of `obs` where nothing ended."""
    episode_returns: Tensor
    """float32: the sum of the episode's rewards up to this step, before the reset."""
    episode_lengths: Tensor
    """int64: the episode's steps up to this one, before the reset."""
    valid: Tensor | None = None
    """bool, false for masked autoreset steps, which are not experience; None where every row is experience."""
    metrics: dict[str, Tensor] = {}  # noqa: RUF012 - `advance` passes its own, this one stays empty
    """Further metrics of the episode up to this step, before the reset, float32; NaN if there is none."""
    sources: dict[str, Tensor] = {}  # noqa: RUF012 - as above
    """The source of the episode's parameters, int64, by the label of each group that moves with returns."""


def advanced(env: Any, carry: Carry, actions: Actions, noise: Tensor) -> tuple[Carry, Step]:
    """Step an environment; arguments and results are those of `Env.advance`.

    One with a state of its own may be anybody's code, which writes into the actions that it gets and into the tensors
    that it gave: it gets copies, and copies of its results go on, unless its `advance` is known to be `apart`.
    """
    is_apart = env.capturable or getattr(env.advance, "is_apart", False)  # `validate` has looked at a pure one
    step: Step
    carry, step = env.advance(carry, actions if is_apart else tree_map(Tensor.clone, actions), noise)
    shapes = step.rewards.shape, step.terminated.shape, step.truncated.shape
    if not env.capturable and shapes != ((env.num_envs,),) * 3:
        flags = {"terminated": step.terminated, "truncated": step.truncated}
        check_rows(f"{type(env).__name__}.advance", env.num_envs, rewards=step.rewards, **flags)
    if is_apart:
        return carry, step
    parts: Any = (part if part is None else tree_map(Tensor.clone, part) for part in step)
    return carry, Step(*parts)


def apart(advance: Function) -> Function:
    """Mark an `advance` whose simulator gets copies of the actions, and gives none of the tensors that are returned."""
    advance.is_apart = True  # type: ignore[attr-defined]
    return advance
