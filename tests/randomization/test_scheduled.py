import json

import pytest
import torch
from tests.randomization.groups import group_of

from rl8x.randomization import Adaptive, Choice, Learnable, LogUniform, Normal, Scheduled, Uniform, from_dict
from rl8x.randomization.distributions import Constant

WIDENS = Scheduled([(100, Uniform(0.4, 0.6)), (300, Uniform(0.2, 1.0)), (400, Uniform(0.0, 4.0))])


@pytest.mark.parametrize(
    ("metric", "interp", "step"),
    [
        (None, (0.4, 0.6), (0.4, 0.6)),
        (0, (0.4, 0.6), (0.4, 0.6)),
        (100, (0.4, 0.6), (0.4, 0.6)),
        (150, (0.35, 0.7), (0.4, 0.6)),  # a quarter of the way: 0.4 - 0.2 / 4 and 0.6 + 0.4 / 4
        (300, (0.2, 1.0), (0.2, 1.0)),
        (350, (0.1, 2.5), (0.2, 1.0)),
        (1e9, (0.0, 4.0), (0.0, 4.0)),
    ],
)
def test_numbers_go_from_point_to_point(metric, interp, step):
    assert WIDENS.at(metric).numbers == pytest.approx(interp)
    assert Scheduled(WIDENS.points, interpolation="step").at(metric).numbers == step


def test_its_support_is_the_widest_and_all_kinds_can_move():
    assert WIDENS.support == (0.0, 4.0)
    numbers = Scheduled([(0, 0.5), (10, 1.5)])
    assert numbers.at(5) == Constant((1.0,))
    weighted = Scheduled([(0, Choice([1, 2], weights=[1, 0])), (10, Choice([3, 4], weights=[0, 2]))])
    assert weighted.at(5) == Choice([2, 3])  # halfway in values, and in shares of 1
    normal = Scheduled([(0, Normal(0.0, 1.0)), (10, Normal(4.0, 3.0))]).clipped(-5.0, 5.0)
    assert normal.at(5) == Normal(2.0, 2.0, -5.0, 5.0)


NOISE = torch.rand(500, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    "drawn",
    [
        Uniform(0.2, 0.7),
        Uniform(0.5, 0.5),
        LogUniform(0.01, 10.0),
        Normal(1.0, 0.5, 0.0, 3.0),
        Choice([1.0, 2.0, 5.0]),
        Choice([1.0, 2.0, 3.0, 4.0], weights=[0, 1, 3, 0]),
        Constant((0.3,)),
    ],
    ids=repr,
)
def test_draws_by_numbers_of_a_tensor_are_those_of_the_distribution(drawn):
    numbers = torch.tensor(drawn.drawn_by, dtype=torch.float32)
    found = type(drawn).draw_by(NOISE, numbers)
    torch.testing.assert_close(found, drawn.draw(NOISE), rtol=1e-5, atol=1e-6)
    assert (drawn.support[0] - 1e-6 <= found).all()
    assert (found <= drawn.support[1] + 1e-6).all()
    assert type(drawn).of_numbers(drawn.numbers).draw(NOISE).equal(drawn.draw(NOISE))
    numbers.zero_()
    assert not (found == 0).all(), "what was drawn must not be the memory of what moves"


MOVING = [
    WIDENS,
    Scheduled([(0.5, 1), (7, 2.0)], by="eval/returns/mean", interpolation="step", goes_back=False),
    Scheduled([(0, Choice([1.0, 2.0], weights=[1, 3]))]),
    Adaptive((0.4, 0.6), thresholds=(1, 2), step=0.1),
    Adaptive(0.5, (-3.0, 2.0), 0.1, limits=(0, 1), metric="success", episodes=3, boundary_share=0.25, group="a"),
    Learnable(Uniform(0.0, 1.0), threshold=3),
    Learnable(Normal(0.0, 1.0), "success", bounds=(0, 1), levels=3, candidates=5, episodes=2, level_share=0.1),
]


@pytest.mark.parametrize("drawn", MOVING, ids=repr)
def test_plain_forms_are_read_back(drawn):
    form = json.loads(json.dumps(drawn.to_dict()))
    assert from_dict(form) == drawn
    assert from_dict(form).to_dict() == drawn.to_dict()
    assert hash(from_dict(form)) == hash(drawn)
    assert eval(repr(drawn)) == drawn
    low, high = drawn.clipped(-100.0, 100.0).support
    assert ((low <= drawn.draw(NOISE)) & (drawn.draw(NOISE) <= high)).all()
    assert from_dict({"adaptive": [[0.4, 0.6], [1, 2], 0.1]}) == MOVING[3]  # by place


def test_a_schedule_follows_its_metric_and_what_it_does_not_know_changes_nothing():
    both, forward = (
        group_of(x=Scheduled([(0, 0.0), (10, 1.0)], by="m", goes_back=goes_back)) for goes_back in (True, False)
    )
    address = both.state["numbers"].data_ptr()
    seen = []
    for row in ({}, {"m": 4}, {"other": 9.0}, {"m": float("nan")}, {"m": 8.0}, {"m": 2.0}):
        for group in (both, forward):
            group.update_from_metrics(row)
        drawn = [group.draw(torch.zeros(3, 1))[0]["x"].tolist() for group in (both, forward)]
        seen.append([values[0] for values in drawn])
    expected = [[0, 0], [0.4, 0.4], [0.4, 0.4], [0.4, 0.4], [0.8, 0.8], [0.2, 0.8]]
    assert torch.tensor(seen).allclose(torch.tensor(expected))
    assert both.state["numbers"].data_ptr() == address
    again = group_of(x=Scheduled([(0, 0.0), (10, 1.0)], by="m", goes_back=False))
    again.load_state_dict(forward.state_dict())
    again.update_from_metrics({"m": 7.0})
    assert again.ranges() == {"x": (0.8, 0.8)}
