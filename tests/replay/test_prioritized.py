import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

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


def test_updates_that_are_taken_back_leave_no_priority_and_no_largest_one():
    replay, _ = filled(count=200)
    replay.append(rows_of(60))
    replay.begin_updates()
    before = clone(replay.state_dict())
    for index in (torch.tensor([[3, 3], [250, 7]]), torch.tensor([[7, 9]])):
        replay.update(index, torch.full(index.shape, 1e30))
    replay.undo_updates()
    replay.undo_updates()  # there is nothing left to take back
    after = replay.state_dict()
    assert all(torch.equal(after[name], before[name]) for name in ("powers", "sums", "max"))


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


def test_weights_make_up_for_the_draws():
    replay, powers = filled(alpha=0.6)
    index = replay.sample(4, 32, torch.Generator().manual_seed(2))
    for beta in (0.0, 0.4, 1.0):
        expected = (300 * (powers / powers.sum())[index]) ** -beta
        expected /= expected.amax(1, keepdim=True)
        assert torch.allclose(replay.weights(index, beta).double(), expected, rtol=1e-5)


@pytest.mark.parametrize("error", [math.nan, math.inf, -math.inf])
def test_an_error_that_is_not_finite_spoils_nothing(error):
    replay, _ = filled(alpha=0.5)
    errors = torch.tensor([error, -3.0])
    replay.update(torch.tensor([3, 4]), errors)
    assert errors[1].item() == -3.0
    powers = powers_of(replay)
    assert powers.isfinite().all()
    assert powers[3] == powers.max() == powers[6]
    check_sums(replay)


def powers_of(replay):
    return replay.state_dict()["powers"].flatten()


def check_sums(replay):
    state = replay.state_dict()
    expected = state["powers"].double().sum(1)
    assert torch.allclose(state["sums"], expected, rtol=1e-14, atol=0)
    assert torch.equal(state["sums"] == 0, expected == 0)


OPERATIONS = st.lists(st.tuples(st.sampled_from(["append", "update"]), st.integers(1, 200)), min_size=1, max_size=15)


@given(st.integers(1, 300), OPERATIONS, st.integers(0, 2**31))
@settings(max_examples=60, deadline=None)
def test_sums_are_those_of_all_priorities(capacity, operations, seed):
    generator = torch.Generator().manual_seed(seed)
    replay, expected, largest = PrioritizedReplay(capacity, "cpu", alpha=1.0), torch.zeros(capacity), 1.0
    for what, count in operations:
        if what == "append" or not replay.size:
            for number in range(replay.total, replay.total + count):
                expected[number % capacity] = largest
            replay.append(rows_of(count))
        else:
            index = replay.sample(1, count, generator)
            errors = torch.rand(index.shape, generator=generator) * 100
            replay.update(index, errors)
            expected[index[0]] = 0.0
            for slot, error in zip(index[0].tolist(), (errors[0] + 1e-6).tolist(), strict=True):
                expected[slot] = max(expected[slot].item(), error)
            largest = max(largest, (errors + 1e-6).max().item())
        assert torch.equal(powers_of(replay)[:capacity], expected)
        assert not powers_of(replay)[capacity:].any()
        check_sums(replay)


def test_a_resumed_replay_draws_the_same():
    replay, _ = filled(count=500, capacity=300)
    resumed = PrioritizedReplay(300, "cpu")
    resumed.load_state_dict(clone(replay.state_dict()))
    replay.load_state_dict(replay.state_dict())  # also one's own state
    generators = [torch.Generator().manual_seed(4) for _ in range(2)]
    for _ in range(5):
        indices = [each.sample(3, 40, generator) for each, generator in zip((replay, resumed), generators, strict=True)]
        assert torch.equal(*indices)
        for each, index in zip((replay, resumed), indices, strict=True):
            each.update(index, torch.sin(index.float()) * 9)
            each.append(rows_of(7))
        one, other = replay.state_dict(), resumed.state_dict()
        assert all(torch.equal(one[name], other[name]) for name in ("powers", "sums", "max"))


@pytest.mark.parametrize("capacity", [200, 400])
def test_priorities_go_with_their_rows(capacity):
    replay = PrioritizedReplay(300, "cpu")
    replay.append({"number": torch.arange(450)})
    numbers = replay.as_tensordict()["number"]
    replay.update(torch.arange(300), numbers.double())
    other = PrioritizedReplay(capacity, "cpu")
    other.load_state_dict(replay.state_dict())
    again = PrioritizedReplay(300, "cpu")
    again.load_state_dict(other.state_dict())
    for each in (other, again):
        numbers = each.as_tensordict()["number"]
        assert numbers.sort().values.tolist() == list(range(450 - each.size, 450))
        assert torch.allclose(powers_of(each)[: each.size], (numbers.float() + 1e-6) ** 0.6)
        check_sums(each)


@pytest.mark.parametrize(("before", "now"), [(0.6, 1.0), (1.0, 0.4), (0.6, 0.0), (0.0, 0.6)])
def test_priorities_count_by_the_power_that_is_in_force_after_a_resume(before, now):
    replay, other = PrioritizedReplay(100, "cpu", alpha=before), PrioritizedReplay(100, "cpu", alpha=now)
    replay.append({"number": torch.arange(70)})
    replay.update(torch.arange(50), torch.arange(50) + 3.0)
    other.load_state_dict(clone(replay.state_dict()))
    other.append({"number": torch.arange(1)})
    # Drawn uniformly, rows have no priorities.
    known = torch.cat([torch.arange(50) + 3.0, torch.ones(20), torch.tensor([52.0])]) if before else torch.ones(71)
    torch.testing.assert_close(powers_of(other), torch.cat([known**now, torch.zeros(57)]), rtol=1e-5, atol=0)
    check_sums(other)
    uniform = Replay(100, "cpu")
    uniform.append({"number": torch.arange(30)})
    other.load_state_dict(uniform.state_dict())
    assert powers_of(other).tolist() == [1.0] * 30 + [0.0] * 98
    check_sums(other)
