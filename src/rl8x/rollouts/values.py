"""Values of a rollout's observations under weights that have changed since they were collected."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from rl8x import keys
from rl8x.execution.threads import Workers
from rl8x.models import State
from rl8x.rollouts.buffer import Rollout
from rl8x.rollouts.step import Stepper
from rl8x.trees import tree_map


@torch.no_grad()
def present_values(
    stepper: Stepper, rollout: Rollout, seq_len: int, workers: Workers, chunk: int
) -> tuple[Tensor, Tensor]:
    """Compute the values of a rollout's observations again, without host syncs unless they are free.

    A recurrent policy begins each sequence with the state that was stored when it was collected, as updates do.
    Workers share chunks of at most so many sequences.

    Returns:
        Values `[horizon + 1, num_envs]`, and those of the observations before resets, read only where an episode was
        truncated, `[horizon, num_envs]`, both in units of rewards.
    """
    horizon, num_envs = rollout.horizon, rollout.num_envs
    values = torch.zeros_like(rollout[keys.VALUES])
    finals = torch.zeros_like(values[:horizon])
    rows = torch.split(torch.arange(horizon // seq_len * num_envs, device=values.device), chunk)
    count = min(workers.count, len(rows))

    def of(worker: int) -> list[State]:
        return [_of_sequences(stepper, rollout, seq_len, each, values, finals) for each in rows[worker::count]]

    shares = workers.share([functools.partial(of, worker) for worker in range(count)])
    ends = [shares[i % count][i // count] for i in range(len(rows))]
    state = {name: torch.cat([end[name] for end in ends])[-num_envs:] for name in ends[0]}
    last = tree_map(lambda part: part[horizon], rollout.tree(keys.OBS))
    values[horizon] = stepper.policy.values(last, state, rollout[keys.STARTS][horizon])
    return values, finals


def _of_sequences(
    stepper: Stepper, rollout: Rollout, seq_len: int, rows: Tensor, values: Tensor, finals: Tensor
) -> State:
    """Write the values of some sequences, by number, `[rows]`; return the policy's state after them."""
    policy = stepper.policy
    sequences, copies = rows.div(rollout.num_envs, rounding_mode="floor"), rows.remainder(rollout.num_envs)
    state = {name: rollout.states[name][sequences, copies] for name in policy.initial_state(1)}
    for step in range(seq_len):
        slots = sequences * seq_len + step
        obs, starts = _at(rollout, keys.OBS, slots, copies), rollout[keys.STARTS][slots, copies]
        if policy.recurrent:
            _, values[slots, copies], state = policy.respond(obs, state, starts)
        else:
            values[slots, copies] = policy.values(obs, state, starts)
        where, after = (slots, copies), state
        if stepper.execution.host_looks:  # on an accelerator, asking which were cut would be a host sync
            cut = (rollout[keys.TRUNCATED] & ~rollout[keys.TERMINATED])[where]
            where, after = (slots[cut], copies[cut]), {name: value[cut] for name, value in state.items()}
        if len(where[0]):  # not every model accepts an empty batch
            finals[where] = stepper.final_obs_values(_at(rollout, keys.FINAL_OBS, *where), after)
    return state


def _at(rollout: Rollout, key: str, slots: Tensor, copies: Tensor) -> Any:
    """Return a tree's rows of some slots and copies, `[rows]` each, as `[rows, ...]`."""
    return tree_map(lambda part: part[slots, copies], rollout.tree(key))
