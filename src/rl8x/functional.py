"""Pure tensor functions of RL algorithms: returns, advantages, categorical values, and moments, over ranks too."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import gymnasium
import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor, nn

from rl8x.distributed import ranks
from rl8x.spaces import leaves
from rl8x.trees import flatten_tree, unflatten_tree


@torch.no_grad()
def running_returns(rewards: Tensor, cuts: Tensor, carry: Tensor, gamma: float) -> tuple[Tensor, Tensor]:
    """Compute the discounted sum of *past* rewards at each step of a rollout.

        R_t = r_t + gamma * (1 - cut_{t-1}) * R_{t-1}

    Dividing rewards by the standard deviation of R brings the returns of any task to about unit scale.

    Args:
        rewards: Reward after each action, `[horizon, num_envs]`, horizon at least 1.
        cuts: Where an episode ended, terminated or truncated, `[horizon, num_envs]`, bool.
        carry: The carry of the previous rollout, `[num_envs]`; zeros before the first.
        gamma: Discount of one step, in [0, 1].

    Returns:
        R, `[horizon, num_envs]`, and the carry for the next rollout, `[num_envs]`: the last row, with 0 where an
        episode ended. Both are new tensors.

    Source: Engstrom et al. 2020, arXiv:2005.12729, section 3 (reward scaling).
    """
    _check(rewards, {"cuts": cuts}, gamma=gamma)
    if carry.shape != rewards.shape[1:]:
        raise ValueError(f"`carry` must be shaped {list(rewards.shape[1:])}; got {list(carry.shape)}.")
    returns = rewards.clone()
    goes_on = cuts.logical_not().to(returns.dtype)
    rows, decays = returns.unbind(0), (goes_on * gamma).unbind(0)
    rows[0].add_(carry, alpha=gamma)
    for t in range(1, len(rows)):
        rows[t].addcmul_(rows[t - 1], decays[t - 1])
    return returns, rows[-1] * goes_on[-1]


@torch.no_grad()
def generalized_advantages(
    rewards: Tensor,
    values: Tensor,
    final_values: Tensor,
    terminated: Tensor,
    truncated: Tensor,
    *,
    gamma: float,
    gae_lambda: float,
) -> tuple[Tensor, Tensor]:
    """Estimate advantages as an exponentially weighted sum of temporal-difference errors.

        v'_t    = 0                  where terminated_t
                  final_values_t     where truncated_t and not terminated_t
                  values_{t+1}       elsewhere
        delta_t = r_t + gamma * v'_t - values_t
        cut_t   = terminated_t or truncated_t
        A_t     = delta_t + gamma * gae_lambda * (1 - cut_t) * A_{t+1},    A_horizon = 0

    Args:
        rewards: Reward after each action, `[horizon, num_envs]`, horizon at least 1.
        values: Value of each observation acted on, and of the one after the last step, `[horizon + 1, num_envs]`.
        final_values: Value of the observation that each step led to, before any reset, `[horizon, num_envs]`. Read only
            where an episode is truncated and not terminated; other values, even NaN, have no influence.
        terminated: Where the task ended the episode, so that no reward follows, `[horizon, num_envs]`, bool.
        truncated: Where a time limit or a forced reset cut the episode, `[horizon, num_envs]`, bool.
        gamma: Discount of the reward one step later, in [0, 1].
        gae_lambda: Weight of longer sums of rewards, in [0, 1]: 0 relies on the values alone, 1 on the rewards alone.

    Returns:
        Advantages and returns (advantages + values), new tensors, `[horizon, num_envs]`; the inputs stay untouched.

    Source: Schulman et al. 2016, arXiv:1506.02438, eq. 16; time limits as in Pardo et al. 2018, arXiv:1712.00378.
    """
    others = {"final_values": final_values, "terminated": terminated, "truncated": truncated}
    _check(rewards, others, gamma=gamma, gae_lambda=gae_lambda)
    horizon, *copies = rewards.shape
    if values.shape != (horizon + 1, *copies):
        raise ValueError(
            f"`values` must have one row more than `rewards`: {[horizon + 1, *copies]}; got {list(values.shape)}."
        )
    next_values = torch.where(terminated, 0.0, torch.where(truncated, final_values, values[1:]))
    advantages = next_values.mul_(gamma).add_(rewards).sub_(values[:-1])
    decay = (terminated | truncated).logical_not_().to(advantages.dtype).mul_(gamma * gae_lambda)
    # Views made once: indexing in the loop would cost as much as the arithmetic.
    rows, decays = advantages.unbind(0), decay.unbind(0)
    for t in range(len(rows) - 2, -1, -1):
        rows[t].addcmul_(rows[t + 1], decays[t])
    return advantages, advantages + values[:-1]


def _check(rewards: Tensor, others: Mapping[str, Tensor], **factors: float) -> None:
    """Raise if there is no step, other tensors are not shaped like rewards, or a factor is not in [0, 1]."""
    if not rewards.dim() or not len(rewards):
        raise ValueError(f"`rewards` must be shaped [horizon, num_envs], a step or more; got {list(rewards.shape)}.")
    for name, tensor in others.items():
        if tensor.shape != rewards.shape:
            raise ValueError(
                f"`{name}` must be shaped like `rewards`, {list(rewards.shape)}; got {list(tensor.shape)}."
            )
    for name, factor in factors.items():
        if not 0.0 <= factor <= 1.0:
            raise ValueError(f"`{name}` must be at least 0 and at most 1; got {factor}.")


# -- values as categorical distributions over atoms


def expectation(logits: Tensor, atoms: Tensor) -> Tensor:
    """Return the means of distributions over atoms, `[...]`: softmax(logits) . atoms.

    Args:
        logits: `[..., num_atoms]`.
        atoms: The values that have these probabilities, `[num_atoms]`.
    """
    return logits.softmax(-1) @ atoms


def project(probs: Tensor, values: Tensor, atoms: Tensor) -> Tensor:
    """Project distributions onto fixed atoms: each value's probability is split between its two neighbouring atoms.

        p_i = sum_j clamp(1 - |clamp(x_j, z_1, z_n) - z_i| / dz, 0, 1) p_j

    The result, `[..., num_atoms]`, has the sum of `probs`, and the same mean if no value lies outside of the atoms.
    It is computed by sums, since additions at indices have no fixed order on accelerators.

    Args:
        probs: `[..., num_atoms]`.
        values: The values x that have these probabilities, `[..., num_atoms]`.
        atoms: The fixed atoms z, evenly spaced and ascending, `[num_atoms]`.

    Source: Bellemare et al. 2017, arXiv:1707.06887, eq. 7.
    """
    if atoms.dim() != 1 or len(atoms) < 2 or not probs.shape[-1:] == values.shape[-1:] == atoms.shape:
        raise ValueError(
            "`probs` and `values` must be [..., num_atoms] for `atoms` [num_atoms], at least two; "
            f"got {list(probs.shape)}, {list(values.shape)}, {list(atoms.shape)}."
        )
    low, high = atoms[0], atoms[-1]
    # Places in units of the spacing, so that both shares of a value add up to 1 even in floating point.
    places = (torch.minimum(torch.maximum(values, low), high) - low) * ((len(atoms) - 1) / (high - low))
    index = torch.arange(len(atoms), device=atoms.device, dtype=atoms.dtype).unsqueeze(-1)
    shares = (1.0 - (places.unsqueeze(-2) - index).abs()).clamp(min=0.0)  # [..., atom, value]
    return (shares * probs.unsqueeze(-2)).sum(-1)


# -- moments


class Moments(NamedTuple):
    """Count, mean and variance (over the count, not the count less one) of the rows of a batch, in float64.

    Attributes:
        num_rows: Number of rows, 0-d.
        mean: Their mean, `[*shape]`.
        var: Their variance, `[*shape]`.
    """

    num_rows: Tensor
    mean: Tensor
    var: Tensor


@torch.no_grad()
def moments(batch: Tensor, mask: Tensor | None = None) -> Moments:
    """Return count (0-d), mean and variance (`[*shape]`) over the first axis, float64; without rows 0, the shift, 0.

    The rows are shifted by about their mean before they are squared, so that a large offset costs no digits; the
    rounding error of the mean is corrected afterwards.

    Args:
        batch: Numbers, `[rows, *shape]`.
        mask: Which rows count, `[rows]`, bool; None is all. Other rows, even NaN, have no influence.
    """
    if not batch.dim() or (mask is not None and mask.shape != batch.shape[:1]):
        flags = "" if mask is None else f" and {list(mask.shape)}"
        raise ValueError(f"`batch` must be shaped [rows, ...] and `mask` [rows]; got {list(batch.shape)}{flags}.")
    if batch.dtype not in (torch.float32, torch.float64):
        batch = batch.to(torch.float32 if batch.is_floating_point() else torch.float64)
    if mask is None:
        count = torch.full((), len(batch), dtype=torch.float64, device=batch.device)
    else:
        count = mask.sum(dtype=torch.float64)
        mask = mask.reshape(-1, *[1] * (batch.ndim - 1))
        batch = torch.where(mask, batch, 0.0)
    total = count.clamp(min=1.0)
    shift = (batch.sum(0) / total).to(batch.dtype)
    centred = batch - shift if mask is None else torch.where(mask, batch - shift, 0.0)
    first = centred.sum(0).to(torch.float64) / total
    second = centred.square_().sum(0).to(torch.float64) / total
    return Moments(count, shift.to(torch.float64) + first, (second - first.square()).clamp(min=0.0))


@torch.no_grad()
def pooled_moments(batch: Tensor, mask: Tensor | None = None) -> Moments:
    """Return count, mean and variance of the numbers `[rows]` of all ranks, 0-d each."""
    own = moments(batch, mask)
    if ranks().size == 1:
        return own
    pooled = RunningMoments().to(batch.device)
    for rank_moments in _of_all_ranks(own):
        pooled.merge(*rank_moments)
    return Moments(pooled.count, pooled.mean, pooled.var)


@torch.no_grad()
def explained_variance(values: Tensor, returns: Tensor, mask: Tensor | None = None) -> Tensor:
    """Return the explained variance of the returns by the values, over all ranks, at most 1, 0-d.

        1 - Var[returns - values] / Var[returns]

    1 is perfect, 0 no better than a constant, below 0 worse than one; 0 where the returns do not vary.

    Args:
        values: Estimated values, `[...]`.
        returns: The true returns, of the same shape.
        mask: Which elements count, of the same shape, bool; None is all.
    """
    if values.shape != returns.shape or (mask is not None and mask.shape != returns.shape):
        flags = "" if mask is None else f" and {list(mask.shape)}"
        raise ValueError(
            "`values`, `returns` and `mask` must have one shape; "
            f"got {list(values.shape)}, {list(returns.shape)}{flags}."
        )
    mask = None if mask is None else mask.reshape(-1)
    of_returns = pooled_moments(returns.reshape(-1), mask)
    of_errors = pooled_moments((returns - values).reshape(-1), mask)
    # Returns that are sums of advantages and values differ by rounding where they are all the same.
    rounding = 4 * torch.finfo(returns.dtype).eps * (of_returns.mean.abs() + of_errors.mean.abs())
    varies = of_returns.var > rounding.square()
    return torch.where(varies, 1.0 - of_errors.var / of_returns.var, 0.0).to(returns.dtype)


class RunningMoments(nn.Module):
    """Running mean and variance of all rows seen so far, independent of how they were batched.

    Everything is updated in place, without a copy to the host, so that a captured program keeps reading and writing
    the same memory. Statistics are float64 whatever the dtype of the numbers and of the module.

    Args:
        shape: Shape of one number, observation or other row; `()` for scalars.
        epsilon: Added to the variance before its root, to avoid division by 0 if a feature never varies; at least 0.

    Source: Chan, Golub & LeVeque 1983, "Algorithms for computing the sample variance", eq. 2.1 (pairwise merge).
    """

    # Flat, never 0-d: torch.compile (2.13) silently loses writes to a float64 scalar on the CPU.
    num_rows: Tensor
    means: Tensor
    variances: Tensor

    def __init__(self, shape: Sequence[int] = (), *, epsilon: float = 1e-8) -> None:
        super().__init__()
        self.shape = tuple(shape)
        self.epsilon = epsilon
        size = math.prod(self.shape)
        self.register_buffer("num_rows", torch.zeros(1, dtype=torch.float64))
        self.register_buffer("means", torch.zeros(size, dtype=torch.float64))
        self.register_buffer("variances", torch.ones(size, dtype=torch.float64))

    @property
    def count(self) -> Tensor:
        """Rows seen, 0-d float64."""
        return self.num_rows[0]

    @property
    def mean(self) -> Tensor:
        """Their mean, `[*shape]` float64; 0 before the first."""
        return self.means.view(self.shape)

    @property
    def var(self) -> Tensor:
        """Their variance over the count, `[*shape]` float64; 1 before the first."""
        return self.variances.view(self.shape)

    @torch.no_grad()
    def update(self, batch: Tensor, mask: Tensor | None = None, *, shared: bool = False) -> None:
        """Update with a batch and those of all other ranks, so that all ranks have the same moments.

        Args:
            batch: Rows in any number of leading axes, `[..., *shape]`.
            mask: Which rows count, `[...]`, bool; None is all.
            shared: Whether all ranks have the same batch, which then counts once.
        """
        leading = batch.shape[: batch.ndim - len(self.shape)]
        if batch.shape != (*leading, *self.shape) or not leading:
            needed = ", ".join(map(str, ("...", *self.shape)))
            raise ValueError(f"`batch` must be shaped [{needed}]; got {list(batch.shape)}.")
        if mask is not None and mask.shape != leading:
            raise ValueError(f"`mask` must be shaped {list(leading)}, one a row; got {list(mask.shape)}.")
        rows = batch.reshape(leading.numel(), self.means.numel())
        own = moments(rows, None if mask is None else mask.reshape(-1))
        for rank_moments in [own] if shared else _of_all_ranks(own):
            self.merge(*rank_moments)

    @torch.no_grad()
    def merge(self, count: Tensor, mean: Tensor, var: Tensor) -> None:
        """Merge the moments of other rows.

            M = M_a + M_b + (mean_b - mean_a)^2 * n_a * n_b / n,    M = n * var

        Args:
            count: Number of rows, 0-d.
            mean: Their mean, `[*shape]`.
            var: Their variance over the count, `[*shape]`.
        """
        total = self.num_rows + count
        share = count / total.clamp(min=1.0)  # the new rows' share of all rows; 0 if there are none
        difference = mean.reshape(-1) - self.means
        spread = difference.square() * (share * (1.0 - share))
        self.variances.copy_(self.variances * (1.0 - share) + var.reshape(-1) * share + spread)
        self.means.add_(difference * share)
        self.num_rows.copy_(total)

    @property
    def std(self) -> Tensor:
        """The root of variance plus epsilon, `[*shape]`, float64."""
        return (self.var + self.epsilon).sqrt()

    def normalize(self, values: Tensor, clip: float | None = None, *, center: bool = True) -> Tensor:
        """Return `(values - mean) / std`, `[..., *shape]`, in the dtype of `values`.

        Args:
            values: Rows, `[..., *shape]`.
            clip: The result lies in [-clip, clip]; None does not clip.
            center: Whether the mean is subtracted. Rewards are only scaled: a shift would change the task.
        """
        centred = values - self.mean.to(values.dtype) if center else values
        normalized = centred * self.std.reciprocal().to(values.dtype)
        return normalized if clip is None else normalized.clamp(-clip, clip)

    def denormalize(self, values: Tensor) -> Tensor:
        """Invert `normalize`, except for clipping: `values * std + mean`, `[..., *shape]`.

        Args:
            values: Normalised rows, `[..., *shape]`.
        """
        return values * self.std.to(values.dtype) + self.mean.to(values.dtype)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> RunningMoments:
        """Follow `.to(device)`, but stay float64 under `.to(dtype)`, `.half()` and `.bfloat16()`."""
        for name, buffer in self._buffers.items():
            assert buffer is not None
            self._buffers[name] = buffer.to(fn(buffer).device)
        return self


def _of_all_ranks(own: Moments) -> list[Moments]:
    """Return the moments of every rank's rows, in the order of ranks."""
    if ranks().size == 1:
        return [own]
    gathered = ranks().gather(torch.cat([part.reshape(-1) for part in own]))
    size = own.mean.numel()
    return [Moments(row[0], row[1 : 1 + size], row[1 + size :]) for row in gathered]


# The module name of an observation without parts, or of the part with the key "".
_WHOLE = "observation"


class ObsMoments(nn.ModuleDict):
    """The running moments of every float `Box` of an observation, by path."""

    def __init__(self, space: gymnasium.Space[Any]) -> None:
        floats = {
            _module_name("/".join(path)): leaf.shape
            for path, leaf in leaves(space)
            if isinstance(leaf, spaces.Box) and np.issubdtype(leaf.dtype, np.floating)
        }
        super().__init__({name: RunningMoments(shape) for name, shape in floats.items()})

    def of_part(self, name: str) -> RunningMoments | None:
        """Return the moments of a part, by its name in `flatten_tree("", obs)`; None if it is not normalised."""
        path = _module_name(name.removeprefix("/"))
        if path not in self:
            return None
        moments = self[path]
        assert isinstance(moments, RunningMoments)
        return moments

    def normalize(self, obs: Any) -> Any:
        """Normalise the float parts of observations, `[..., *obs]` or a dict without an action mask, to [-10, 10]."""

        def normalized(name: str, part: Tensor) -> Tensor:
            moments = self.of_part(name)
            return part if moments is None else moments.normalize(part.float(), 10.0)

        if isinstance(obs, Tensor):
            return normalized("", obs)
        flat = flatten_tree("", obs)
        return unflatten_tree("", {name: normalized(name, part) for name, part in flat.items()})

    def observe(self, parts: Mapping[str, Tensor], valid: Tensor | None, *, shared: bool = False) -> None:
        """Update the moments with observations, named as in `of_part`; see `Policy.observe`."""
        for name, part in sorted(parts.items()):  # ranks exchange them in one order
            if (moments := self.of_part(name)) is not None:
                moments.update(part, valid, shared=shared)


@functools.cache
def _module_name(path: str) -> str:
    """Return a unique module name for the moments at a path, without dots and not an attribute of the module."""
    name = path.replace("%", "%25").replace(".", "%2E")
    # A "%" at the end is no escape, so that no other part has this name.
    return f"{name}%" if name == _WHOLE or hasattr(ObsMoments(spaces.Dict({})), name) else name or _WHOLE
