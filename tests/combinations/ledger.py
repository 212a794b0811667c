"""A second bookkeeping of what an environment gave, and by plain loops the rows that must be made of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from rl8x import keys
from rl8x.replay.dataset import Dataset
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


def rows_of(horizons: Sequence[Horizon], n: int, gamma: float, *, whole: bool = False) -> Rows:
    """Make the rows of some horizons, by name, each `[rows, ...]`; the last n - 1 slots wait, but where it is `whole`.

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
    for t in range(len(rewards) - (0 if whole else n - 1)):
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
        if group in (keys.OBS, keys.ACTIONS, keys.NEXT_OBS, keys.NEXT_ACTIONS):
            places = ends if group in (keys.NEXT_OBS, keys.NEXT_ACTIONS) else begins
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
    compare(
        {name: stored[name][order] for name in expected}, {name: row[-replay.size :] for name, row in expected.items()}
    )


def check_rows_of_dataset(dataset: Dataset, n: int, gamma: float) -> None:
    """Compare what a data set gives with what must be made of its transitions, one copy's."""
    found = dataset.gather(torch.arange(dataset.size, device=dataset.device))
    has_next = any(name.split("/")[0] == keys.NEXT_ACTIONS for name in found)
    transitions = with_next_actions(dataset.transitions) if has_next else dataset.transitions
    slots = {name: part.unsqueeze(1) for name, part in transitions.items()}
    compare(found, rows_of([Horizon(0, slots, follows=False, warms_up=False)], n, gamma, whole=True))


def with_next_actions(transitions: Rows) -> Rows:
    """Leave out steps after which no action is recorded; those before them are then the last that are known."""
    terminated, truncated = transitions[keys.TERMINATED].tolist(), transitions[keys.TRUNCATED].tolist()
    kept, following, cut = [], [], []
    for t in range(len(terminated)):
        goes_on = t + 1 < len(terminated) and not truncated[t]
        if terminated[t] or goes_on:
            kept.append(t)
            following.append(t if terminated[t] else t + 1)
            cut.append(truncated[t])
        elif kept and kept[-1] == t - 1 and not terminated[t - 1]:
            cut[-1] = True
    rows = {name: part[kept] for name, part in transitions.items()} | {keys.TRUNCATED: torch.tensor(cut)}
    actions = {name: part for name, part in transitions.items() if name.split("/")[0] == keys.ACTIONS}
    return rows | {name.replace(keys.ACTIONS, keys.NEXT_ACTIONS, 1): part[following] for name, part in actions.items()}


def compare(found: Rows, expected: Rows) -> None:
    """Rows are equal; sums of rewards nearly."""
    assert found.keys() == expected.keys()
    for name, rows in expected.items():
        rows, found_rows = rows.cpu(), found[name].cpu()
        if name in (keys.RETURNS, keys.DISCOUNTS):
            torch.testing.assert_close(found_rows, rows, rtol=1e-5, atol=1e-4)
        else:
            assert torch.equal(found_rows, rows), (name, found_rows, rows)
