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


REFUSED = [
    (RuntimeError, EMPTY, lambda: Replay(4, "cpu").sample(1, 1, torch.Generator())),
    (RuntimeError, EMPTY, lambda: Replay(4, "cpu").gather(torch.zeros(1, dtype=torch.int64))),
    (RuntimeError, EMPTY, lambda: PrioritizedReplay(4, "cpu").sample(1, 1, torch.Generator())),
    (RuntimeError, "gather from what `prepared", lambda: Dataset.from_tensors(ROW).gather(torch.zeros(1).long())),
    (ValueError, "`n` must be at least 1 step; got 0", lambda: NStep(0, 0.9)),
    (ValueError, r"`gamma` must be in \[0, 1\]; got 1.5", lambda: NStep(1, 1.5)),
]


@pytest.mark.parametrize(("error", "message", "make"), REFUSED)
def test_what_is_not_legal_is_refused_with_what_is(error, message, make):
    with pytest.raises(error, match=message):
        make()
