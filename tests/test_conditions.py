from __future__ import annotations

import json
import math
import statistics
from typing import ClassVar

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rl8x import (
    And,
    Condition,
    Confirmed,
    HitsLowerBound,
    HitsUpperBound,
    NonFinite,
    Not,
    Or,
    Plateau,
    WallTime,
    conditions,
    keys,
)
from rl8x.conditions import as_condition, from_spec, kinds, to_spec
from rl8x.conditions.base import KINDS, as_conditions

X, EVAL, RETURNS = "losses/total", "eval/returns/mean", "episodes/returns/mean"


class Row(dict):
    """A row that says which of its evaluation metrics are fresh."""

    def __init__(self, values, fresh=None):
        super().__init__(values)
        if fresh is not None:
            self.fresh = fresh


def verdicts(condition, values, name=X):
    return [condition({name: value}) for value in values]


# -- a naive model: verdicts from the whole history, None where a metric is missing

values_ = st.one_of(st.sampled_from([0.0, 1.0, 1.0005, 1.01, -1.0, math.nan, math.inf, -math.inf]), st.floats(-2, 2))


@st.composite
def rows(draw):
    """Rows as a trainer makes them: `eval/*` missing at first, then repeated between evaluations."""
    history, latest = [], None
    for _ in range(draw(st.integers(1, 25))):
        row = {keys.STEPS: float(len(history) + 1)}
        if draw(st.integers(0, 4)):
            row[X] = draw(values_)
        fresh = draw(st.booleans())
        if fresh:
            latest = draw(values_)
        if latest is not None:
            row[EVAL] = latest
        history.append(Row(row, fresh={EVAL} if fresh else set()))
    return history


tolerances = st.sampled_from([0.0, 1e-3, 0.25])
leaves = st.one_of(
    st.tuples(st.sampled_from(["hits_lower_bound", "hits_upper_bound"]), st.sampled_from([X, EVAL]), st.floats(-1, 1)),
    st.tuples(
        st.sampled_from(["plateau", "stops_decreasing", "stops_increasing"]),
        st.sampled_from([X, EVAL]),
        st.integers(1, 3),
        tolerances,
        tolerances,
        st.sampled_from([0, 0, 1, 4]),
    ),
    st.tuples(st.just("non_finite"), st.sampled_from([None, X, EVAL])),
)
trees = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.tuples(st.sampled_from(["all", "any"]), st.lists(inner, min_size=1, max_size=3)),
        st.tuples(st.just("not"), inner),
    ),
    max_leaves=6,
)


def build(tree) -> Condition:
    kind, *rest = tree
    if kind == "all":
        return And(*map(build, rest[0]))
    if kind == "any":
        return Or(*map(build, rest[0]))
    if kind == "not":
        return Not(build(rest[0]))
    if kind == "non_finite":
        return NonFinite(None if rest[0] is None else [rest[0]])
    return from_spec({kind: list(rest)})


def model(tree, history):
    """The verdict on the last row of a history, from the definitions."""
    kind, *rest = tree
    if kind in ("all", "any"):
        parts = [model(part, history) for part in rest[0]]
        decisive = kind == "any"
        return decisive if decisive in parts else None if None in parts else not decisive
    if kind == "not":
        inner = model(rest[0], history)
        return None if inner is None else not inner
    row = history[-1]
    if kind == "non_finite":
        seen = [value for name, value in row.items() if rest[0] in (None, name)]
        return any(math.isnan(value) or math.isinf(value) for value in seen) if seen else None
    name, number, *more = rest
    if name not in row:
        return None
    if kind.startswith("hits") and math.isnan(row[name]):
        return None
    if kind == "hits_lower_bound":
        return row[name] <= number
    if kind == "hits_upper_bound":
        return row[name] >= number
    rtol, atol, after = more
    series = [past[name] for past in history if name in past and (name != EVAL or name in past.fresh)]
    if len(series) <= after:
        return None
    is_met = flat if kind == "plateau" else unimproved
    met = is_met(series[after:], number, rtol, atol, sign=-1 if kind == "stops_decreasing" else 1)
    return met or (False if math.isfinite(row[name]) else None)


def flat(series, patience, rtol, atol, sign):
    """Whether the last values are equal, or means of windows that end in each of the last values agree."""
    odd = [i for i, value in enumerate(series) if not math.isfinite(value)]
    series = series[odd[-1] + 1 :] if odd else series
    if len(series) > patience and series[-patience - 1 :] == [series[-1]] * (patience + 1):
        return True
    if len(series) < 3 * patience - 1:
        return False
    for end in range(len(series) - patience + 1, len(series) + 1):
        now, before = series[end - patience : end], series[end - 2 * patience : end - patience]
        earlier = statistics.fmean(before)
        if abs(statistics.fmean(now) - earlier) > max(atol, rtol * abs(earlier)):
            return False
    return True


def unimproved(series, patience, rtol, atol, sign):
    """Whether none of the last values was better than the best before it, the best by steps of the margin."""
    best, count = None, 0
    for value in (sign * value for value in series):
        if math.isfinite(value) and (best is None or value - best > max(atol, rtol * abs(best))):
            best, count = value, 0
        else:
            count += 1
    return count >= patience


@settings(max_examples=300, deadline=None)
@given(tree=trees, history=rows(), cut=st.integers(0, 25))
def test_every_condition_equals_the_model_also_when_resumed_and_restarted(tree, history, cut):
    expected = [model(tree, history[: i + 1]) is True for i in range(len(history))]
    condition = build(tree)
    assert repr(eval(repr(condition), vars(conditions))) == repr(condition)
    condition.start()
    assert [condition(row) for row in history] == expected
    condition.start()  # a second run remembers nothing of the first
    first = [condition(row) for row in history[:cut]]
    resumed = from_spec(json.loads(json.dumps(to_spec(condition))))
    assert repr(resumed) == repr(condition)
    resumed.load_state_dict(json.loads(json.dumps(condition.state_dict(), allow_nan=False)))
    assert first + [resumed(row) for row in history[cut:]] == expected


# -- one by one


@pytest.mark.parametrize(
    ("arguments", "values", "met_at"),
    [
        # means, before and now: 1.5 1.7 (13% apart), 1.7 1.9 (12%) twice, 1.9 2.05 (8%), 1.9 2 (5%), 2.05 1.95 (5%)
        ({"patience": 2, "rtol": 0.1}, [1, 2, 1.4, 2, 1.8, 2, 2.1, 1.9, 2], {7, 8}),
        # windows of three have the same mean, in whatever order of their values
        ({"patience": 3, "rtol": 0.0}, [0.1, 0.2, 0.3, 0.1, 0.2, 0.3, 0.1, 0.2, 0.3, 0], {7, 8}),
        # at last 0.1 and 0.2, of which no more than their difference is rounded
        ({"patience": 3, "rtol": 0.0, "atol": 0.1}, [0.1, 0.1, 0.1, 0.1, 0.1, 0.1, 0.2, 0.3], {3, 4, 5, 7}),
        # by the earlier of the two means: 11 of 100, and 11 of 111
        ({"patience": 1, "rtol": 0.1}, [100, 111, 100], {2}),
        # exactly equal: patience + 1 of them, at once, and no longer than they are
        ({"patience": 3, "rtol": 0.0}, [5, 1, 1, 1, 1, 1, 2, 2, 2, 2], {4, 5, 9}),
        ({"patience": 1}, [0.0, 0.0], {1}),  # rl8 compares the first value with 0
        # around 0 no relative tolerance helps
        ({"patience": 1, "rtol": 0.5}, [0.01, -0.01, 0.01], set()),
        ({"patience": 1, "atol": 0.03}, [0.01, -0.01, 0.01, 0.05], {1, 2}),
        ({"patience": 1, "rtol": 0.1, "atol": 5}, [100, 110, 104, 88], {1, 2}),  # the larger of the two: 10, 11, 10.4
        # values that are not finite begin anew, and are no plateau themselves
        ({"patience": 1, "rtol": 0.5}, [math.inf, 1.0, math.inf, math.inf, math.nan, math.nan, 2, 2], {7}),
        ({"patience": 2, "rtol": 0.5}, [1, 1.1, 1, 1.1, math.nan, 1.1, 1, 1.1, 1, 1.1], {9}),
        # the first values are left out, those that are not finite among them
        ({"patience": 2, "after": 3}, [7, 7, 7, 7, 7, 7, 7], {5, 6}),
    ],
)
def test_plateaus_by_hand(arguments, values, met_at):
    met = verdicts(Plateau(X, **arguments), values)
    assert {i for i, verdict in enumerate(met) if verdict} == met_at


def test_plain_callables_compose():
    def solved(stats):
        return stats[EVAL] > 3 and stats[X] < 1

    condition = solved & HitsUpperBound(X, -5)
    assert repr(condition) == "And(test_plain_callables_compose.<locals>.solved, HitsUpperBound('losses/total', -5))"
    assert [condition(row) for row in ({X: 0}, {X: 0, EVAL: 2}, {X: 0, EVAL: 4})] == [False, False, True]
    assert (HitsUpperBound(X, 5) | solved)({X: 0, EVAL: 4})
    with pytest.raises(ValueError, match=r"Unknown metric 'losses/totl' in .*Nearest: losses/total"):
        as_condition(lambda stats: stats["losses/totl"] > 1)({X: 1.0})


class Says(Condition):
    """Has the verdict that it was given, of the type that it was."""

    def __init__(self, verdict):
        self.verdict = verdict

    def judge(self, stats):
        return self.verdict


@pytest.mark.parametrize("made", [bool, np.bool_, torch.tensor])
def test_a_comparison_of_numpys_or_torchs_is_a_verdict(made):
    yes, no = Says(made(True)), Says(made(False))
    asked = Confirmed(yes, by=yes), Confirmed(yes, by=no), ~Confirmed(yes, by=no), Confirmed(no, by=yes)
    for condition in asked:
        condition.bind(Trainer(1.0))
    verdicts_ = [condition({}) for condition in (yes, no, ~yes, ~no, yes & yes, yes & no, yes | no, no | no, *asked)]
    assert verdicts_ == [True, False, False, True, True, False, True, False, True, False, True, False]
    assert {type(verdict) for verdict in verdicts_} == {bool}


def test_non_finite_names_the_culprit():
    row = {X: 1.0, "monitors/kl_div": math.inf, "returns/mean": math.nan}
    assert NonFinite().reason(row) == "NonFinite(): monitors/kl_div = inf, returns/mean = nan"
    assert repr(NonFinite(X)) == "NonFinite(names=['losses/total'])"


# -- wall time


def test_durations():
    durations = {90: 90, 0.5: 0.5, "90s": 90, "1h30m": 5400, "1.5 H": 5400, "2d 1s": 172801}
    assert {duration: WallTime(duration).seconds for duration in durations} == durations


def test_wall_time_goes_on_after_a_resume(monkeypatch):
    clock = [1000.0]
    monkeypatch.setattr(kinds.time, "monotonic", lambda: clock[0])
    condition = WallTime("1m")
    condition.start()
    clock[0] += 50
    assert not condition({})
    saved = json.loads(json.dumps(condition.state_dict()))
    clock[0] += 10_000  # the run lay killed meanwhile
    resumed = WallTime("1m")
    resumed.load_state_dict(saved)
    clock[0] += 9
    assert not resumed({})
    clock[0] += 1
    assert resumed({})
    assert resumed.reason({}) == "WallTime('1m'): 60 s"
    resumed.start()
    assert not resumed({})


# -- confirmed


class Trainer:
    """Plays whole episodes: what a horizon's returns are, its evaluations do not measure."""

    alive: ClassVar[list] = []  # conditions do not keep their trainers

    def __init__(self, *scores):
        self.scores = list(scores)
        self.alive.append(self)

    def evaluation_name(self, name):
        return {"returns/mean": None, RETURNS: EVAL}.get(name, name)

    def evaluate_now(self):
        score = self.scores.pop(0)
        return None if score is None else {EVAL: score}


@pytest.mark.parametrize(
    ("condition", "scores", "met"),
    [
        # a row's own metrics decide when to ask, the evaluation alone whether to believe
        (Confirmed(HitsUpperBound(RETURNS, 195)), [10.0, None, 200.0], [0, 0, 0, 1]),
        # what no evaluation has measured is neither confirmed nor refuted
        (~Confirmed(HitsUpperBound(RETURNS, 195)), [10.0, None, 200.0], [1, 1, 0, 0]),
        # each of several has to confirm
        (Confirmed(HitsUpperBound(RETURNS, 195), evaluations=2), [200.0, 10.0, 200.0, 200.0, 10.0], [0, 0, 1, 0]),
    ],
)
def test_confirmed_believes_evaluations_and_not_the_training(condition, scores, met):
    condition.bind(trainer := Trainer(*scores))
    rows_ = [{RETURNS: value, EVAL: 1000.0} for value in (300.0, 20.0, 195.0, 195.0)]
    assert [condition(row) for row in rows_] == [bool(each) for each in met]
    assert trainer.scores == []  # evaluated only where the condition was met
    measured = "episodes/returns/mean = 195, eval/returns/mean = "
    assert condition.reason(rows_[-1]).startswith(f"{condition!r}: {measured}" if met[-1] else repr(condition))


def test_confirmed_by_another_condition_within_a_composition():
    plateau = Plateau(RETURNS, patience=1)
    condition = ~HitsLowerBound(keys.STEPS, 0) & Confirmed(plateau, by=HitsUpperBound(EVAL, 7))
    condition.bind(Trainer(6.0, 8.0))
    rows_ = [{RETURNS: 1.0, keys.STEPS: step} for step in (1, 2, 3)]
    assert [condition(row) for row in rows_] == [False, False, True]
    assert condition.metric_names == {RETURNS, keys.STEPS, EVAL}
    again = from_spec(to_spec(condition))
    assert repr(again) == repr(condition)
    again.load_state_dict(condition.state_dict())
    assert again.children[1].condition.values == [1.0, 1.0]


def test_confirmed_refuses_what_evaluations_of_the_trainer_do_not_measure():
    message = r"no evaluation .* measures what returns/mean is .*Watch episodes/returns/mean, or give `by`"
    for inner in (HitsUpperBound("returns/mean", 9), HitsUpperBound("returns/mean", 9) | WallTime("1h")):
        with pytest.raises(ValueError, match=message):
            (Confirmed(inner) & HitsUpperBound(X, 1)).bind(Trainer())
        Confirmed(inner, by=HitsUpperBound(EVAL, 9)).bind(Trainer())


class Solved(HitsUpperBound):
    def __init__(self):
        super().__init__(RETURNS, 195)


class SolvedWell(And):
    def __init__(self):
        super().__init__(Solved(), HitsLowerBound(RETURNS, 500))


class NotSolved(Not):
    def __init__(self):
        super().__init__(Solved())


@pytest.mark.parametrize("inner", [Solved(), SolvedWell(), ~NotSolved(), ~(NotSolved() | HitsLowerBound(X, 0))])
def test_what_users_derive_from_conditions_is_confirmed_with_arguments_of_its_own(inner):
    condition = Confirmed(inner)
    condition.bind(Trainer(10.0, 200.0))
    row = {RETURNS: 300.0, X: 1.0}
    assert [condition(row), condition(row)] == [False, True]
    assert condition.metric_names - {X} == {RETURNS}


# -- what users give


def test_what_users_give_becomes_a_list():
    plateau = Plateau(X)
    assert as_conditions(None) == []
    assert as_conditions(plateau) == [plateau]
    expected = ["Plateau", "FromCallable"]
    assert [type(part).__name__ for part in as_conditions((plateau, lambda stats: False))] == expected

    with pytest.raises(ValueError, match=r"Plateau\(.* occurs twice and would count every row twice"):
        as_conditions([plateau, HitsUpperBound(X, 1) & plateau])
    bound = HitsUpperBound(X, 1)
    as_conditions([bound, bound & plateau])  # remembers nothing: harmless


class Remembers(Condition):
    """Keeps its child, its arguments and some data as attributes."""

    def __init__(self, inner, scale=2.0, rows=None):
        self.inner, self.scale, self.rows = as_condition(inner), scale, rows or []
        self.function = abs

    @property
    def children(self):
        return (self.inner,)

    def judge(self, stats):
        self.inner.judge(stats)
        self.rows.append({"value": stats[X], "pair": (1, None)})
        return False

    def arguments(self):
        return {"inner": self.inner, "scale": self.scale, "function": self.function}


def test_by_default_a_condition_saves_its_attributes():
    condition = Remembers(Plateau(X))
    assert condition.own_state() == {"scale": 2.0, "rows": []}
    condition({X: math.inf})
    condition({X: 1.0})
    state = condition.state_dict()
    rows_ = [{"value": math.inf, "pair": (1, None)}, {"value": 1.0, "pair": (1, None)}]
    plateau = {"name": X, "patience": 5, "rtol": 1e-3, "atol": 0.0, "after": 0, "seen": 2, "count": 0, "values": [1.0]}
    assert state == {"scale": 2.0, "rows": rows_, "children": [plateau]}
    condition({X: 1.0})
    assert state["rows"] == rows_  # a copy
    again = Remembers(Plateau(X))
    again.load_state_dict(state)
    assert (again.rows, again.inner.values, again.scale, again.function) == (rows_, [1.0], 2.0, abs)
    with pytest.raises(ValueError, match="occurs twice"):
        as_conditions([condition, condition])


# -- run files


@pytest.mark.parametrize(
    ("spec", "shown"),
    [
        ({"plateau": {"name": X, "patience": 10}}, "Plateau('losses/total', patience=10, rtol=0.001)"),
        ({"plateau": [X, 3, 0, 0.5, 20]}, "Plateau('losses/total', patience=3, rtol=0, atol=0.5, after=20)"),
        ({"HitsUpperBound": [X, 5]}, "HitsUpperBound('losses/total', 5)"),
        ({"wall_time": "2h"}, "WallTime('2h')"),
        ({"non_finite": None}, "NonFinite()"),
        ({"non_finite": [X, EVAL]}, f"NonFinite(names={[X, EVAL]!r})"),
        ({"any": [{"wall_time": 3}, {"not": {"wall_time": 4}}]}, "Or(WallTime(3), Not(WallTime(4)))"),
        ({"confirmed": {"hits_upper_bound": [EVAL, 5]}}, f"Confirmed(HitsUpperBound('{EVAL}', 5), evaluations=1)"),
        (
            {"confirmed": [{"plateau": X}, 2, {"hits_upper_bound": [EVAL, 5]}]},
            f"Confirmed(Plateau('{X}', patience=5, rtol=0.001), evaluations=2, by=HitsUpperBound('{EVAL}', 5))",
        ),
        (
            {"confirmed": {"condition": {"plateau": X}, "by": {"hits_upper_bound": [EVAL, 5]}}},
            f"Confirmed(Plateau('{X}', patience=5, rtol=0.001), evaluations=1, by=HitsUpperBound('{EVAL}', 5))",
        ),
    ],
)
def test_specs(spec, shown):
    assert repr(from_spec(spec)) == shown


class Countdown(Condition):
    def __init__(self, rows):
        self.rows = rows

    def judge(self, stats):
        self.rows -= 1
        return self.rows <= 0


def test_conditions_of_ones_own():
    find = {f"{__name__}.Countdown": Countdown}.__getitem__
    condition = from_spec({"any": [{f"{__name__}.Countdown": {"rows": 2}}, {"wall_time": 9}]}, find=find)
    assert repr(condition) == "Or(Countdown(2), WallTime(9))"
    assert [condition({}), condition({})] == [False, True]
    assert to_spec(Countdown(3)) == {f"{__name__}.Countdown": {"rows": 3}}


def test_a_class_of_ones_own_takes_no_built_in_name():
    class Plateau(HitsLowerBound):
        pass

    Plateau.__qualname__ = "Plateau"
    assert KINDS["plateau"] is conditions.Plateau
    assert to_spec(Plateau(X, 1)) == {f"{__name__}.Plateau": {"name": X, "bound": 1}}
    assert type(from_spec({"plateau": X})) is type(from_spec({"Plateau": X})) is conditions.Plateau
