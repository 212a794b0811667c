import pytest
import torch
from tests.randomization.groups import group_of

from rl8x.randomization import Choice, Learnable, LogUniform, Uniform
from rl8x.randomization.curriculum import Episodes

SMALL = {"threshold": 1.0, "levels": 3, "candidates": 5, "episodes": 2}


def test_draws_are_kept_levels_by_their_learnability_and_candidates_alike():
    group = group_of(a=Learnable(Uniform(0, 1), **SMALL), b=Learnable(Choice([5, 6]), **SMALL))
    weights = torch.tensor([0.25, 0.0, 0.75])
    group.state["edges"].copy_(weights.cumsum(0))
    noise = torch.rand(40_000, 3, generator=torch.Generator().manual_seed(2))
    values, sources = group.draw(noise)
    counts = torch.bincount(sources, minlength=8)
    expected = torch.cat([weights * 0.5, torch.full((5,), 0.1)]) * len(noise)
    assert counts[1] == 0
    assert ((counts - expected).square() / expected.clamp(min=1)).sum() < 24.3  # 7 degrees, p = 0.001
    for i, name in enumerate("ab"):  # one level has all its values
        assert values[name].equal(group.state["values"][sources, i])
        assert values[name].stride() == (1,)
    group.set_evaluating(True)
    values, sources = group.draw(noise)
    assert (sources == -1).all()
    assert values["a"].equal(noise[:, 0])  # fresh draws from the base
    assert 0.48 < (values["b"] == 5).float().mean() < 0.52


def plain_round(values, old, episodes, kept):
    """Return what is kept after a round, best first, and the scores, from lists of successes by row."""
    scores = []
    for row, found in enumerate(episodes):
        n = len(found)
        if n < 2:
            scores.append(old[row])
            continue
        mean = sum(found) / n
        variance = sum((each - mean) ** 2 for each in found) / (n - 1)
        scores.append(mean * (1 - mean) + variance / n)
    order = sorted(range(len(values)), key=lambda row: -scores[row])[:kept]
    return [values[row] for row in order], [scores[row] for row in order]


@pytest.mark.parametrize("bounded", [False, True])
def test_rounds_are_those_of_a_plain_formulation(bounded):
    options = {**SMALL, **({"threshold": None, "bounds": (0.0, 4.0)} if bounded else {"threshold": 2.0})}
    group = group_of(a=Learnable(Uniform(0, 1), **options), b=Learnable(LogUniform(0.1, 10), **options))
    generator, noise = torch.Generator().manual_seed(5), torch.Generator().manual_seed(6)
    episodes, rounds = [[] for _ in range(8)], 0
    for _ in range(60):
        before = {name: tensor.clone() for name, tensor in group.state.items()}
        scores = torch.rand(2, 6, generator=generator) * 4
        ended = torch.rand(2, 6, generator=generator) < 0.5
        drawn = torch.randint(0, 8, (2, 6), generator=generator)
        sources = torch.where(torch.rand(2, 6, generator=generator) < 0.8, drawn, -1)
        waits = torch.rand(6, generator=generator) < 0.1
        pending = torch.where(waits, drawn[1], -1)
        following = torch.Generator().manual_seed(0)
        following.set_state(noise.get_state())
        group.update_from_episodes(Episodes(scores, ended, sources, pending), noise)
        for t, i in (ended & (sources >= 0)).nonzero().tolist():
            score = float(scores[t, i])
            episodes[sources[t, i]].append(score / 4 if bounded else float(score >= 2))
        begun = sum(map(len, episodes[3:])) + int((pending >= 3).sum())
        if begun >= 10 and not waits.any():
            rounds += 1
            best, found = plain_round(before["values"].tolist(), before["scores"].tolist(), episodes, 3)
            assert group.state["values"][:3].tolist() == best
            torch.testing.assert_close(
                group.state["scores"][:3], torch.tensor(found, dtype=torch.float64), atol=1e-5, rtol=0
            )
            fresh = torch.rand(5, 2, generator=following)
            assert group.state["values"][3:, 0].equal(fresh[:, 0])
            torch.testing.assert_close(group.state["values"][3:, 1], LogUniform(0.1, 10).draw(fresh[:, 1]))
            shares = torch.tensor(found) if sum(found) else torch.ones(3)
            torch.testing.assert_close(group.state["edges"], (shares.cumsum(0) / shares.sum()), atol=1e-5, rtol=0)
            episodes = [[] for _ in range(8)]
        else:
            assert group.state["values"].equal(before["values"])
        assert bool(group.state["open"]) == (begun < 10 or not waits.any())
        assert group.state["count"].tolist() == [len(found) for found in episodes]
    assert rounds >= 4


def test_successes_are_those_above_a_threshold_or_shares_between_bounds():
    scores = torch.tensor([-5.0, 0.0, 2.5, 9.99, 10.0, 20.0])
    assert Learnable(Uniform(0, 1), threshold=10).success(scores).tolist() == [0, 0, 0, 0, 1, 1]
    share = Learnable(Uniform(0, 1), bounds=(0, 10)).success(scores)
    torch.testing.assert_close(share, torch.tensor([0, 0, 0.25, 0.999, 1, 1], dtype=torch.float64))


def test_where_nothing_is_learnable_all_kept_levels_are_as_likely():
    group, sources = group_of(x=Learnable(Uniform(0, 1), **SMALL)), torch.arange(8).repeat(4, 1)
    solved = Episodes(torch.ones(4, 8), torch.ones(4, 8, dtype=torch.bool), sources, torch.full((8,), -1))
    group.update_from_episodes(solved, torch.Generator())
    torch.testing.assert_close(group.state["edges"], torch.tensor([1 / 3, 2 / 3, 1.0]))
    kept = group.state["values"][:3, 0]
    assert group.ranges()["x"] == (kept.min(), kept.max())
    assert group.present() == {"x": Uniform(0, 1)}
