"""A second bookkeeping of what an environment gave, and by plain loops the rows that must be made of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from rl8x import keys
from rl8x.replay.ring import Replay

Rows = dict[str, Tensor]


@dataclasses.dataclass
class Horizon:
    """What one collect gave: by name, each `[horizon, num_envs, ...]`.

    `step` says how many steps the trainer had made, `follows` whether it goes on where the horizon before it ended,
    `warms_up` whether no updates are due for it.
    """

    step: int
    slots: Rows
    follows: bool
    warms_up: bool

    @property
    def finite(self) -> bool:
        """Whether all of it can be learned from."""
        return all(bool(torch.isfinite(part).all()) for part in self.slots.values() if part.is_floating_point())

    @property
    def samples(self) -> int:
        """Transitions that updates are due for."""
        return 0 if self.warms_up or not self.finite else int(self.valid.sum())

    @property
    def valid(self) -> Tensor:
        """Which slots are experience, `[horizon, num_envs]`, bool."""
        return self.slots.get(keys.VALID, torch.ones_like(self.slots[keys.TERMINATED]))


def rows_of(horizons: Sequence[Horizon], n: int, gamma: float) -> Rows:
    """Make the rows of some horizons, by name, each `[rows, ...]`; the last n - 1 slots wait.

    A return stops where an episode ends, where a horizon does not follow on the last or one was left out because it has
    a number that is not finite, and before a step that is no experience.
    """
    kept: list[Horizon] = []
    starts, gap, begin = set(), True, 0
    for horizon in horizons:
        gap = gap or not horizon.follows
        if horizon.finite:
            kept.append(horizon)
            starts |= {begin} if gap else set()
            gap, begin = False, begin + len(horizon.valid)
        else:
            gap = True
    if not kept:
        return {}
    slots = {name: torch.cat([each.slots[name] for each in kept]) for name in kept[0].slots}
    rewards, terminated, truncated = (slots[name].tolist() for name in (keys.REWARDS, keys.TERMINATED, keys.TRUNCATED))
    valid = torch.cat([each.valid for each in kept]).tolist()
    begins, ends, sums, discounts = [], [], [], []
    for t in range(len(rewards) - (n - 1)):
        for copy in range(len(rewards[t])):
            if not valid[t][copy]:
                continue
            total, last = rewards[t][copy], t
            while not (terminated[last][copy] or truncated[last][copy]) and last + 1 < min(t + n, len(rewards)):
                if last + 1 in starts or not valid[last + 1][copy]:
                    break
                last += 1
                total += gamma ** (last - t) * rewards[last][copy]
            begins.append((t, copy))
            ends.append((last, copy))
            sums.append(total)
            discounts.append(0.0 if terminated[last][copy] else gamma ** (last - t + 1))
    rows: Rows = {keys.RETURNS: torch.tensor(sums), keys.DISCOUNTS: torch.tensor(discounts)}
    for name, part in slots.items():
        group = name.split("/")[0]
        if group in (keys.OBS, keys.ACTIONS, keys.NEXT_OBS):
            places = ends if group == keys.NEXT_OBS else begins
            rows[name] = torch.stack([part[place] for place in places]) if places else part[:0].flatten(0, 1)
    return rows


def check_rows_of_replay(replay: Replay, horizons: Sequence[Horizon], n: int, gamma: float) -> None:
    """Compare a replay, its oldest row first, with the newest of the rows that it must have been given."""
    expected, stored = rows_of(horizons, n, gamma), replay.as_tensordict()
    total = len(expected[keys.RETURNS]) if expected else 0
    assert (replay.total, replay.size) == (total, min(total, replay.capacity))
    if not total:
        return
    stored = {name: column.cpu() for name, column in stored.items()}
    order = torch.cat([torch.arange(slots.start, slots.stop) for _, slots in replay.slots(replay.oldest, total)])
    for name, rows in expected.items():
        rows, found = rows[-replay.size :].cpu(), stored[name][order]
        if name in (keys.RETURNS, keys.DISCOUNTS):
            torch.testing.assert_close(found, rows, rtol=1e-5, atol=1e-4)
        else:
            assert torch.equal(found, rows), (name, found, rows)
