import pytest
import torch
from tests.randomization.groups import group_of

from rl8x.randomization import Adaptive, Uniform
from rl8x.randomization.curriculum import Episodes, make_curricula

GENERATOR = torch.Generator()


def two(**options):
    options = {"thresholds": (1.0, 3.0), "limits": (0.0, 2.0), "episodes": 4, **options}
    return group_of(a=Adaptive((0.9, 1.1), step=0.3, **options), b=Adaptive(1.0, step=0.5, **options))


def test_draws_are_at_an_end_in_the_share_of_copies_and_in_the_range_elsewhere():
    group = two(boundary_share=0.4)
    group.state["low"].copy_(torch.tensor([0.5, 0.25]))
    group.state["high"].copy_(torch.tensor([1.5, 1.25]))
    noise = torch.rand(40_000, 3, generator=torch.Generator().manual_seed(3))
    values, sources = group.draw(noise)
    counts = torch.bincount(sources + 1, minlength=5)
    expected = torch.tensor([0.6, 0.1, 0.1, 0.1, 0.1]) * len(noise)
    assert ((counts - expected).square() / expected).sum() < 18.5  # chi-square of 4 degrees: p = 0.001
    for i, name in enumerate("ab"):
        low, high = (float(group.state[end][i]) for end in ("low", "high"))
        assert (values[name][sources == 2 * i] == low).all()
        assert (values[name][sources == 2 * i + 1] == high).all()
        inside = values[name][(sources != 2 * i) & (sources != 2 * i + 1)]
        bins = torch.histc((inside - low) / (high - low), 10, 0, 1)
        assert ((bins - len(inside) / 10).square() / (len(inside) / 10)).sum() < 27.9  # 9 degrees
    group.state["open"][2] = False
    closed, marked = group.draw(noise)
    assert marked.equal(torch.where(sources == 2, -1, sources))
    assert all(closed[name].equal(values[name]) for name in "ab")  # it is played at the end all the same
    group.set_evaluating(True)
    evaluated, marked = group.draw(noise)
    assert (marked == -1).all()
    assert [name for name in "ab" if (evaluated[name] == group.state["low"]["ab".index(name)]).sum() > 5] == []
    group.set_evaluating(False)
    assert group.draw(noise)[1].equal(torch.where(sources == 2, -1, sources))


class Plain:
    """The same algorithm in plain Python: lists of scores, and sets of the episodes that are waited for."""

    def __init__(self, members, episodes, thresholds):
        self.ranges = [list(start) for start, _ in members]
        self.starts, self.steps = [list(start) for start, _ in members], [step for _, step in members]
        self.buffers = [[] for _ in range(2 * len(members))]
        self.open = [True] * len(self.buffers)
        self.episodes, self.thresholds = episodes, thresholds

    def update(self, scores, ended, sources, pending):
        for t in range(len(scores)):
            for i, score in enumerate(scores[t]):
                if ended[t][i] and sources[t][i] >= 0 and score == score:
                    self.buffers[sources[t][i]].append(score)
        for end, buffer in enumerate(self.buffers):
            waits = sum(source == end for source in pending)
            if len(buffer) >= self.episodes and not waits:
                mean = sum(buffer) / len(buffer)
                outward = 1 if mean >= self.thresholds[1] else -1 if mean <= self.thresholds[0] else 0
                parameter, side = divmod(end, 2)
                sign = 1 if side else -1
                moved = self.ranges[parameter][side] + sign * outward * self.steps[parameter]
                limits = (self.starts[parameter][1], 2.0) if side else (0.0, self.starts[parameter][0])
                self.ranges[parameter][side] = min(max(moved, limits[0]), limits[1])
                buffer.clear()
                self.open[end] = True
            else:
                self.open[end] = len(buffer) + waits < self.episodes


@pytest.mark.parametrize("seed", range(8))
def test_ranges_move_as_those_of_a_plain_formulation(seed):
    generator = torch.Generator().manual_seed(seed)
    group = two(thresholds=(1.8, 2.1))
    plain = Plain([((0.9, 1.1), 0.3), ((1.0, 1.0), 0.5)], 4, (1.8, 2.1))
    moved = set()
    for _ in range(60):
        shape = (3, 5)
        scores = torch.rand(shape, generator=generator) * 5 - 0.5
        scores[torch.rand(shape, generator=generator) < 0.1] = torch.nan
        ended = torch.rand(shape, generator=generator) < 0.4
        sources = torch.randint(-1, 4, shape, generator=generator)
        pending = torch.where(torch.rand(5, generator=generator) < 0.7, -1, sources[-1])
        group.update_from_episodes(Episodes(scores, ended, sources, pending), GENERATOR)
        plain.update(scores.tolist(), ended.tolist(), sources.tolist(), pending.tolist())
        found = torch.stack([group.state["low"], group.state["high"]], 1)
        torch.testing.assert_close(found, torch.tensor(plain.ranges, dtype=torch.float64))
        assert group.state["open"].tolist() == plain.open
        assert group.state["count"].tolist() == [len(buffer) for buffer in plain.buffers]
        moved |= {round(float(value), 6) for value in found.flatten()}
    assert len(moved) > 6
    assert {0.0, 2.0} & moved, "no limit was met"
    present = {name: group.present()[name].support for name in "ab"}
    assert present == {name: pytest.approx(ends) for name, ends in zip("ab", plain.ranges, strict=True)}
    assert all(isinstance(drawn, Uniform) for drawn in group.present().values())


def test_a_reset_that_takes_away_what_was_waited_for_opens_the_buffer_again():
    group = two()
    ones, none = torch.ones(1, 4), torch.full((4,), -1)
    waiting = Episodes(ones, torch.tensor([[True, True, False, False]]), torch.zeros(1, 4, dtype=torch.int64), none)
    group.update_from_episodes(waiting._replace(pending=torch.tensor([-1, -1, 0, 0])), GENERATOR)
    assert not group.state["open"][0]
    group.update_from_episodes(waiting._replace(ended=torch.zeros(1, 4, dtype=torch.bool), pending=none), GENERATOR)
    assert group.state["open"][0]
    assert group.state["count"][0] == 2
    apart = {"a": Adaptive(1, (0, 1), 0.1), "b": Adaptive(1, (0, 2), 0.1, group="other")}
    assert [group.names for group in make_curricula(apart)] == [("a",), ("b",)]
