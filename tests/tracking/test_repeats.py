"""Rows that come again after a resume: the same by the journal and, where they tell a course, by the server."""

import math

import pytest

from rl8x.tracking.repeats import (
    LEFT_TAG,
    JournalRepeats,
    LeftBehind,
    Point,
    ServerRepeats,
    left_behind,
    left_tag,
    read_rows,
)

LOSS, EVAL = "losses/total", "eval/returns/mean"
RESUMED = 1500


def by_journal(rows):
    return JournalRepeats(RESUMED, lambda: rows)


def by_server(rows):
    points = [Point(name, value, time, step) for step, time, row in rows for name, value in row.items()]
    last = {}
    for point in points:
        last[point.name] = max(last.get(point.name, point.step), point.step)
    return ServerRepeats(RESUMED, last, lambda name: [point for point in points if point.name == name], {})


def rows_of(time, values):
    """Rows of a metric by step, a list of values where it has several."""
    return [
        (step, time + step, {LOSS: one})
        for step, many in values.items()
        for one in (many if isinstance(many, list) else [many])
    ]


@pytest.mark.parametrize("kind", [by_journal, by_server])
@pytest.mark.parametrize(
    ("had", "comes", "new", "left"),
    [
        ({1: 1.0, 2: 2.0, 3: 3.0}, {2: 2.0, 3: 3.0, 4: 4.0}, {4: 4.0}, None),
        ({1: 1.0}, {2: 2.0}, {2: 2.0}, None),
        ({1: 1.0, 2: math.nan, 3: math.inf}, {2: math.nan, 3: math.inf, 4: 1.0}, {4: 1.0}, None),
        ({7: [1.0, 2.0]}, {7: [1.0, 2.0, 3.0]}, {7: 3.0}, None),  # a further evaluation at the same step
        ({7: [1.0, 2.0]}, {7: [2.0, 1.0]}, {}, None),
        ({1: 1.0, 2: 2.0, 3: 3.0}, {2: 2.5, 3: 3.0}, {2: 2.5, 3: 3.0}, 2),  # another course, from there on
        ({1: 1.0, 2: 2.0, 3: 3.0}, {2: 2.0, 3: math.nan}, {3: math.nan}, 3),
    ],
)
def test_each_point_is_dropped_once_until_another_value_comes(kind, had, comes, new, left):
    repeats = kind(rows_of(1000, had))
    found = [row for each in rows_of(2000, comes) for row in repeats.new_rows(each)]
    assert str(found) == str(rows_of(2000, new))
    assert (None if repeats.left is None else repeats.left) == (None if left is None else (left, RESUMED))


def test_the_journal_is_read_from_the_first_step_that_comes_and_again_for_lower_ones():
    reads = []
    had = rows_of(1000, {step: float(step) for step in range(10)})
    repeats = JournalRepeats(RESUMED, lambda: reads.append(1) or had)
    for step in (5, 6, 2, 3, 9):
        assert repeats.new_rows((step, 2000 + step, {LOSS: float(step)})) == []
    assert len(reads) == 2
    assert repeats.new_rows((5, 2100, {LOSS: 5.0})) == [(5, 2100, {LOSS: 5.0})]  # each once


@pytest.mark.parametrize("kind", [by_journal, by_server])
def test_rows_from_before_the_resume_that_thinning_held_back_leave_nothing_behind(kind):
    """The second evaluation at a step is sent at the end of the run, where the first was sent at once."""
    repeats = kind(rows_of(1000, {7: 1.0, 8: 3.0}))
    assert repeats.new_rows((7, 1008, {LOSS: 2.0})) == [(7, 1008, {LOSS: 2.0})]
    assert repeats.new_rows((8, 1009, {LOSS: 3.0})) == []
    assert repeats.left is None


@pytest.mark.parametrize("text", ["x", "3", "null", "{}", "[[1]]", "[[null, 1]]", "[[Infinity, 1]]"])
def test_a_tag_that_a_user_has_changed_leaves_nothing_behind(text):
    assert left_behind({LEFT_TAG: text}) == []


def test_rows_of_the_journal_are_those_that_count():
    ops = [
        {"op": "m", "t": 1, "s": 1, "m": {"a": 1.0}},
        {"op": "m", "t": 2, "s": 2, "m": {"a": 2.0, "left/a": 0.0}},
        {"op": "m", "t": "x", "s": 2, "m": {"a": 2.0}},
        {"op": "m"},
        {"op": "left", "s": 2, "t": 10},
        {"op": "m", "t": 12, "s": 2, "m": {"a": 2.5}},
        {"op": "tags", "tags": {}},
    ]
    assert read_rows(ops) == [(1, 1, {"a": 1.0}), (2, 2, {"left/a": 0.0}), (2, 12, {"a": 2.5})]


OLDER = [Point(LOSS, 9.0, 5000, 2)]  # rows come that are older than what the server has
LEFT = [Point(LOSS, 9.0, 1300, 2), Point(LOSS, 9.0, 1301, 3), Point(LOSS, 2.0, 1450, 2)]


@pytest.mark.parametrize(
    ("since", "had", "tags"), [(None, OLDER, {}), (RESUMED, LEFT, left_tag([LeftBehind(2, 1400)]))], ids=["old", "left"]
)
def test_older_rows_and_what_was_left_behind_before_leave_nothing_behind_again(since, had, tags):
    repeats = ServerRepeats(since, {LOSS: max(point.step for point in had)}, lambda name: had, tags)
    assert repeats.new_rows((2, 2000, {LOSS: 2.0})) == []
    assert repeats.new_rows((3, 2001, {LOSS: 3.0})) == [(3, 2001, {LOSS: 3.0})]
    assert repeats.left is None
