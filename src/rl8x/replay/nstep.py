"""Rows of a replay from horizons of steps: n-step returns that never cross the end of an episode or a gap."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import torch
from torch import Tensor

from rl8x import keys
from rl8x.trees import names_of

_READ: Final = (
    *(keys.REWARDS, keys.TERMINATED, keys.TRUNCATED, keys.VALID),
    *(keys.OBS, keys.ACTIONS, keys.NEXT_OBS, keys.NEXT_ACTIONS),
)


class NStep:
    """Makes rows whose target is `returns + discounts * V(next_obs)`.

        returns_t   = sum_{j < m} gamma^j r_{t+j}
        discounts_t = gamma^m (1 - terminated_{t+m-1})
        next_obs_t  = the observation that step t + m - 1 led to, before any reset

    m is n, or fewer steps if an episode ends with step t + m - 1, or a gap or a masked step follows it. The last n - 1
    slots of a horizon wait for the next one, so that from the second on, each horizon makes as many rows as steps.

    Source: Sutton & Barto 2018, section 7.1; time limits as in Pardo et al. 2018, arXiv:1712.00378.
    """

    def __init__(self, n: int, gamma: float) -> None:
        if n < 1:
            raise ValueError(f"`n` must be at least 1 step; got {n}.")
        if not 0.0 <= gamma <= 1.0:
            raise ValueError(f"`gamma` must be in [0, 1]; got {gamma}.")
        self.n = n
        self.gamma = gamma
        # Pending slots, from which no rows have been made yet, [at most n - 1, num_envs, ...].
        self._waiting: dict[str, Tensor] = {}

    def rows(self, rollout_tensors: Mapping[str, Tensor], horizon: int) -> dict[str, Tensor]:
        """Make rows of the pending slots and a horizon's slots, except its last n - 1, which become pending."""
        names, length = tuple(rollout_tensors), horizon
        block = {name: rollout_tensors[name] for name in names_of(names, *_READ)}
        if self._waiting:
            length += len(self._waiting[keys.REWARDS])
            # Slots from a checkpoint are on the CPU.
            block = {name: torch.cat([self._waiting[name].to(tensor.device), tensor]) for name, tensor in block.items()}
        complete = max(0, length - (self.n - 1))
        # Copied, since the rollout's memory is reused; none are pending if n is 1.
        self._waiting = {name: tensor[complete:length].clone() for name, tensor in block.items() if complete < length}
        return self._complete(block, complete) if complete else {}

    def cut(self) -> None:
        """Cut pending returns at the last step, before a reset: they bootstrap from that step's `next_obs`."""
        if self._waiting:
            self._waiting[keys.TRUNCATED][-1] = True

    def _complete(self, block: Mapping[str, Tensor], complete: int) -> dict[str, Tensor]:
        """Make rows of the first slots of a block, `[slots, num_envs, ...]`, each followed by n - 1 others."""
        returns, discounts, last = self._returns(block, complete)
        rows = {name: block[name] for name in names_of(tuple(block), keys.OBS, keys.ACTIONS)}
        rows |= {keys.RETURNS: returns, keys.DISCOUNTS: discounts}
        following = {name: block[name] for name in names_of(tuple(block), keys.NEXT_OBS, keys.NEXT_ACTIONS)}
        if last is None:
            rows |= following
        # A single slot takes one operator instead of two, which saves time in a step of one copy.
        rows = {name: tensor[0] if complete == 1 else tensor[:complete].flatten(0, 1) for name, tensor in rows.items()}
        if last is not None:
            rows |= {name: tensor.flatten(0, 1)[last.flatten()] for name, tensor in following.items()}
        if keys.VALID in block:
            index = block[keys.VALID][:complete].flatten().nonzero().squeeze(1)
            rows = {name: tensor[index] for name, tensor in rows.items()}
        return rows

    def _returns(self, block: Mapping[str, Tensor], complete: int) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return sums of rewards, discounts, and the flat index of each sum's last step, `[complete, num_envs]`."""
        rewards, terminated = block[keys.REWARDS], block[keys.TERMINATED]
        if self.n == 1:  # of the whole block, and no index, which would be the slot itself
            return rewards, torch.full_like(rewards, self.gamma).masked_fill_(terminated, 0.0), None
        ends, valid = terminated | block[keys.TRUNCATED], block.get(keys.VALID)
        returns = rewards[:complete]
        discounts = torch.full_like(returns, self.gamma)
        slots = torch.arange(rewards.numel(), device=rewards.device).view_as(rewards)
        last = slots[:complete]
        goes_on = torch.ones_like(ends[:complete])
        for j in range(1, self.n):
            later = slice(j, complete + j)
            goes_on = goes_on & ~ends[j - 1 : complete + j - 1]
            if valid is not None:
                goes_on = goes_on & valid[later]
            # Not a product, since values after the end of an episode may be NaN.
            returns = torch.where(goes_on, returns + self.gamma**j * rewards[later], returns)
            discounts = torch.where(goes_on, self.gamma ** (j + 1), discounts)
            last = torch.where(goes_on, slots[later], last)
        return returns, discounts.masked_fill(terminated.flatten()[last], 0.0), last

    def state_dict(self) -> dict[str, Any]:
        """Return the pending slots."""
        return {"waiting": dict(self._waiting)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state of `state_dict`, which may be of another `n`."""
        self._waiting = {name: tensor.clone() for name, tensor in state["waiting"].items()}
