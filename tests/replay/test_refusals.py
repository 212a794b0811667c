"""What replays refuse: calls, the error of each, and what it says."""

import pytest
import torch

from rl8x.replay.dataset import Dataset
from rl8x.replay.nstep import NStep
from rl8x.replay.prioritized import PrioritizedReplay
from rl8x.replay.ring import Replay

EMPTY = "append some before"
ROW = {name: torch.zeros(1) for name in ("obs", "next_obs", "actions", "rewards", "truncated")}
ROW["terminated"] = torch.ones(1)


def add_others(rows):
    replay = Replay(8, "cpu")
    replay.append({"obs": torch.zeros(1), "returns": torch.zeros(1)})
    replay.append({"obs": torch.zeros(2), "returns": torch.zeros(2)} | rows)


def load_others():
    replay, other = Replay(8, "cpu"), Replay(8, "cpu")
    replay.append({"obs": torch.zeros(2, 2, 2, dtype=torch.uint8)})
    other.append({"obs": torch.zeros(2, 3)})
    other.load_state_dict(replay.state_dict())


REFUSED = [
    (ValueError, "at least 1 row; got 0", lambda: Replay(0, "cpu")),
    (RuntimeError, EMPTY, lambda: Replay(4, "cpu").sample(1, 1, torch.Generator())),
    (RuntimeError, EMPTY, lambda: Replay(4, "cpu").gather(torch.zeros(1, dtype=torch.int64))),
    (RuntimeError, EMPTY, lambda: PrioritizedReplay(4, "cpu").sample(1, 1, torch.Generator())),
    (RuntimeError, "gather from what `prepared", lambda: Dataset.from_tensors(ROW).gather(torch.zeros(1).long())),
    (ValueError, "`alpha` must be .*; got -0.1", lambda: PrioritizedReplay(4, "cpu", alpha=-0.1)),
    (ValueError, "`n` must be at least 1 step; got 0", lambda: NStep(0, 0.9)),
    (ValueError, r"`gamma` must be in \[0, 1\]; got 1.5", lambda: NStep(1, 1.5)),
    (ValueError, "holds .*returns float32 .*; got .*float64", lambda: add_others({"returns": torch.zeros(2).double()})),
    (ValueError, r"returns float32 \[1\]", lambda: add_others({"returns": torch.zeros(2, 1)})),
    (ValueError, "more", lambda: add_others({"more": torch.zeros(2)})),
    (ValueError, r"holds obs float32 \[3\]; the state's obs uint8 \[2, 2\]", load_others),
    (ValueError, "equally many", lambda: add_others({"returns": torch.zeros(3)})),
]


@pytest.mark.parametrize(("error", "message", "make"), REFUSED)
def test_what_is_not_legal_is_refused_with_what_is(error, message, make):
    with pytest.raises(error, match=message):
        make()
