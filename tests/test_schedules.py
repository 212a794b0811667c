from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rl8x.schedules import Schedule

POINTS = [[0, 1.0], [100, 0.5], [200, 0.0]]


def test_a_number_holds_for_good():
    schedule = Schedule.make(3e-4)
    assert [schedule(0), schedule(10**12)] == [3e-4, 3e-4]


points = st.lists(st.tuples(st.integers(1, 10**9), st.floats(-1e3, 1e3)), max_size=8, unique_by=lambda point: point[0])


@settings(max_examples=100, deadline=None)
@given(first=st.floats(-1e3, 1e3), rest=points, env_steps=st.integers(0, 2 * 10**9))
def test_equals_numpy(first, rest, env_steps):
    spec = [(0, first), *sorted(rest)]
    where = [transitions for transitions, _ in spec]
    values = [value for _, value in spec]
    expected = np.interp(env_steps, where, values)
    assert Schedule.make(spec, kind="interp")(env_steps) == pytest.approx(expected, abs=1e-9)
    assert Schedule.make(spec)(env_steps) == values[np.searchsorted(where, env_steps, side="right") - 1]


@pytest.mark.parametrize("kind", ["step", "interp"])
def test_survives_json(kind):
    schedule = Schedule.make(POINTS, kind=kind)
    again = Schedule.make(json.loads(json.dumps(schedule.to_dict())))
    assert again == schedule
    assert Schedule.make(schedule) is schedule
