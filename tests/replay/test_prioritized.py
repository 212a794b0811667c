import math
import random

import pytest
import torch

from rl8x.checkpoint.tree import clone
from rl8x.replay.prioritized import EPSILON, PrioritizedReplay
from rl8x.replay.ring import Replay


def rows_of(count):
    return {"obs": torch.zeros(count, 2)}


def filled(count=300, capacity=300, **options):
    """Make a replay whose row in slot i has the priority i % 7 + 0.5, those with a remainder of 0 almost none."""
    replay = PrioritizedReplay(capacity, "cpu", **options)
    replay.append(rows_of(count))
    index = torch.arange(replay.size)
    errors = (index % 7).double()
    replay.update(index, errors)
    return replay, (errors + EPSILON) ** replay.alpha


def chi_square(counts, probabilities):
    """Compare counts with what is expected, leaving out what is expected less than 5 times."""
    expected = probabilities * counts.sum()
    usual = expected >= 5
    assert counts[~usual].sum() <= 10 + 3 * expected[~usual].sum()
    return ((counts - expected).square() / expected)[usual].sum(), int(usual.sum())


@pytest.mark.parametrize("alpha", [0.0, 0.6, 1.0])
@pytest.mark.parametrize("batch", [1, 64])
def test_rows_are_drawn_by_their_priorities(alpha, batch):
    replay, powers = filled(alpha=alpha)
    index = replay.sample(60_000 // batch, batch, torch.Generator().manual_seed(5))
    assert index.shape == (60_000 // batch, batch)
    if alpha == 0.0:  # each draw of a batch has its part of the sum
        assert ((index * batch / 300 - torch.arange(batch)) > -batch / 300).all()
        assert ((index * batch / 300 - torch.arange(batch)) < 1).all()
    value, rows = chi_square(index.flatten().bincount(minlength=300).double(), powers / powers.sum())
    # The mean of chi-square is `rows` less one, its standard deviation sqrt(2 rows): 4 of them.
    assert value < rows + 4 * math.sqrt(2 * rows)
    if batch == 1:  # else the draws are spread evenly
        assert value > rows - 5 * math.sqrt(2 * rows)


@pytest.mark.parametrize("draw", [0.0, 1.0 - 2.0**-53])
def test_the_first_and_the_last_draw_find_rows_and_only_those_that_are_there(draw, monkeypatch):
    few = PrioritizedReplay(1000, "cpu")
    few.append(rows_of(3))
    assert few.sample(100, 10, torch.Generator().manual_seed(1)).unique().tolist() == [0, 1, 2]
    few.update(torch.tensor([0, 2]), torch.tensor([1e30, 1e-30]))
    assert few.sample(100, 10, torch.Generator().manual_seed(1)).max() <= 2
    replay, _ = filled(count=130, capacity=1000)
    replay.update(torch.arange(128, 130), torch.full((2,), 1e-20))
    monkeypatch.setattr(torch, "rand", lambda *size, **options: torch.full(size, draw, dtype=torch.float64))
    for batch in (1, 3, 256):
        index = replay.sample(2, batch, torch.Generator())
        assert index.min() >= 0
        assert index.max() < 130


def errors_like(index, generator):
    """Errors of either sign, a few of which are 0 or not finite."""
    errors = torch.randn(index.shape, generator=generator) * torch.rand((), generator=generator) * 100
    odd = torch.tensor([0.0, math.nan, math.inf, -math.inf])[torch.randint(4, index.shape, generator=generator)]
    return torch.where(torch.rand(index.shape, generator=generator) < 0.1, odd, errors)


class Plain:
    """The powers of priorities by the numbers of rows, of which as many are left as there is room for."""

    def __init__(self, capacity, alpha):
        self.capacity, self.alpha, self.largest, self.total, self.powers = capacity, alpha, 1.0, 0, {}

    def append(self, count):
        self.powers |= dict.fromkeys(range(self.total, self.total + count), self.largest)
        self.total += count
        self.resume(self.capacity, self.alpha)

    def update(self, numbers, errors):
        """The largest error of a row counts, and one that is not finite as the largest ever."""
        sizes = [abs(e) + EPSILON if math.isfinite(e) else None for e in errors.tolist()]
        new = {}
        for number, size in zip(numbers.tolist(), sizes, strict=True):
            new[number] = max(new.get(number, 0.0), self.largest if size is None else size**self.alpha)
        self.powers |= new
        self.largest = max(self.largest, *new.values())

    def resume(self, capacity, alpha):
        """Rows that were drawn uniformly have no priorities."""
        exponent = alpha / self.alpha if self.alpha else 1.0
        self.largest, self.capacity, self.alpha = self.largest**exponent, capacity, alpha
        self.powers = {number: power**exponent for number, power in [*self.powers.items()][-capacity:]}


def resumed(replay, plain, what):
    """The replay that goes on, with its rows, and what the plain one makes of it."""
    if what == "itself":
        replay.load_state_dict(replay.state_dict())
        return replay
    capacity, alpha = (plain.capacity, plain.alpha) if isinstance(what, str) else what
    other, state = PrioritizedReplay(capacity, "cpu", alpha=alpha), clone(replay.state_dict())
    if what == "of a uniform replay":
        uniform = Replay(capacity, "cpu")
        uniform.append({"number": torch.arange(plain.total)})
        plain.largest, plain.powers, state = 1.0, dict.fromkeys(range(plain.total), 1.0), uniform.state_dict()
    other.load_state_dict(state)
    plain.resume(capacity, alpha)
    if what == "as it was":
        assert torch.equal(*(each.sample(3, 40, torch.Generator().manual_seed(4)) for each in (replay, other)))
    return other


def sizes(draw):
    return draw.randrange(1, 300), draw.choice([0.0, 0.4, 1.0])


@pytest.mark.parametrize("seed", range(60))
def test_priorities_are_those_of_a_dictionary(seed):
    draw, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    capacity, alpha = sizes(draw)
    replay, plain = PrioritizedReplay(capacity, "cpu", alpha=alpha), Plain(capacity, alpha)
    for _ in range(15):
        what, count = draw.choice(["append", "update", "update", "undo", "resume"]), draw.randrange(1, 200)
        if what == "append" or not replay.size:
            replay.append({"number": torch.arange(plain.total, plain.total + count)})
            plain.append(count)
        elif what == "resume":
            how = draw.choice(["as it was", "itself", "of a uniform replay", sizes(draw), (plain.capacity, 0.7)])
            replay = resumed(replay, plain, how)
        else:
            index = replay.sample(1, count, generator)
            errors = errors_like(index, generator)
            kept = errors.clone()
            replay.begin_updates()
            replay.update(index, errors)
            torch.testing.assert_close(errors, kept, rtol=0, atol=0, equal_nan=True)
            if what == "undo":
                for number in (1e30, 1e35):
                    replay.update(replay.sample(1, 5, generator), torch.full((1, 5), number))
                replay.undo_updates()
                replay.undo_updates()  # there is nothing left to take back
            else:
                plain.update(replay.gather(index[0])["number"], errors[0])
        compare(replay, plain, generator)


def compare(replay, plain, generator):
    state, numbers = replay.state_dict(), replay.as_tensordict()["number"].tolist()
    assert sorted(numbers) == sorted(plain.powers)
    expected = torch.tensor([plain.powers[number] for number in numbers], dtype=torch.float64)
    found = state["powers"].flatten().double()
    torch.testing.assert_close(found[: len(numbers)], expected, rtol=1e-4, atol=0)
    assert not found[len(numbers) :].any()
    assert state["max"].item() == pytest.approx(plain.largest, rel=1e-4)
    torch.testing.assert_close(state["sums"], state["powers"].double().sum(1), rtol=1e-14, atol=0)
    index = replay.sample(2, 5, generator)
    for beta in (0.0, 0.4, 1.0):  # they make up for the draws
        weights = (replay.size * (expected / expected.sum())[index]) ** -beta
        weights /= weights.amax(1, keepdim=True)
        torch.testing.assert_close(replay.weights(index, beta).double(), weights, rtol=1e-3, atol=0)
