from __future__ import annotations

import json
import math
import random
import statistics

import numpy as np
import pytest
import torch

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
    """A row that says which of its evaluation metrics are fresh, when it comes, and what evaluations would measure."""

    def __init__(self, values, fresh=(), time=0.0, scores=()):
        super().__init__(values)
        self.fresh, self.time, self.scores = fresh, time, scores


class Trainer:
    """Plays whole episodes: what a horizon's returns are, its evaluations do not measure."""

    def __init__(self, *scores):
        self.scores = list(scores)

    def evaluation_name(self, name):
        return {"returns/mean": None, RETURNS: EVAL}.get(name, name)

    def evaluate_now(self):
        score = self.scores.pop(0) if self.scores else None
        return None if score is None else {EVAL: score}


class Typed(Condition):
    """Gives its verdict as a comparison of NumPy's or torch's."""

    def __init__(self, made, name, bound):
        self.made, self.name, self.bound = made, name, bound

    def judge(self, stats):
        made = {"bool": bool, "numpy": np.bool_, "torch": torch.tensor}[self.made]
        return None if self.name not in stats else made(stats[self.name] >= self.bound)


# -- a naive model: verdicts from the whole history, None where a metric is missing

POOL = [0.0, 0.1, 0.2, 0.3, 1.0, 1.0005, 1.01, 1.1, 1.21, -1.0, math.nan, math.inf, -math.inf]


def history_of(draw):
    """Rows as a trainer makes them, of a few values: `eval/*` missing at first, then repeated between evaluations."""
    pool, history, latest, time = draw.choices(POOL, k=4), [], None, 0.0
    for step in range(draw.randrange(1, 20)):
        row = {keys.STEPS: step + 1.0} | {name: draw.choice(pool) for name in (X, RETURNS) if draw.random() < 0.8}
        fresh = draw.random() < 0.5
        latest = draw.choice(pool) if fresh else latest
        time += draw.choice([0.0, 1.0, 2.5])
        scores = draw.choices([None, -1.0, 0.5, 1.0, math.nan], [1, 3, 3, 3, 1], k=draw.randrange(4))
        history.append(Row(row | ({} if latest is None else {EVAL: latest}), {EVAL} if fresh else (), time, scores))
    return history


STATELESS = ["hits_lower_bound", "hits_upper_bound", "non_finite"]
COUNTING = ["plateau", "plateau", "stops_decreasing", "stops_increasing"]
OTHERS = ["wall_time", "typed"]


def tree_of(draw, kinds, depth=3):
    """Draw a condition as its kind and arguments, of which some are conditions."""
    if draw.random() < depth / 6:
        kind = draw.choice(["all", "any", "not"])
        parts = [tree_of(draw, kinds, depth - 1) for _ in range(1 if kind == "not" else draw.randrange(1, 4))]
        return (kind, parts[0] if kind == "not" else parts)
    kind, name, bound = draw.choice(kinds), draw.choice([X, EVAL, RETURNS]), draw.choice([-1.0, 0.1, 0.5, 1.0])
    if kind == "confirmed":
        inner, by = tree_of(draw, STATELESS, 2), None
        if not names_of(inner) & {RETURNS, EVAL} or draw.random() < 0.5:
            inner, by = tree_of(draw, STATELESS + COUNTING, 1), (draw.choice(STATELESS[:2]), EVAL, bound)
        return (kind, inner, draw.randrange(1, 4), by)
    if kind in COUNTING:
        rtol, atol = (draw.choice([0.0, 1e-3, 0.1, 0.25]) for _ in range(2))
        return (kind, name, draw.randrange(1, 4), rtol, atol, draw.choice([0, 0, 1, 4]))
    if kind == "wall_time":
        return (kind, draw.choice([1.0, 5.0, "2.5s", "0.1m"]))
    if kind == "typed":
        return (kind, draw.choice(["bool", "numpy", "torch"]), name, bound)
    return (kind, draw.choice([name, None])) if kind == "non_finite" else (kind, name, bound)


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
    if kind == "confirmed":
        return Confirmed(build(rest[0]), rest[1], None if rest[2] is None else build(rest[2]))
    return Typed(*rest) if kind == "typed" else from_spec({kind: list(rest)})


def names_of(tree):
    """The metrics that a condition reads."""
    kind, *rest = tree
    if kind in ("all", "any"):
        return set().union(*map(names_of, rest[0]))
    if kind in ("not", "confirmed"):
        return names_of(rest[0]) | (names_of(rest[2]) if kind == "confirmed" and rest[2] else set())
    return set() if kind in ("wall_time", "typed") else {rest[0]} - {None}


def evaluates(tree):
    return tree[0] == "confirmed" or (tree[0] in ("all", "any", "not") and "confirmed" in str(tree))


def model(tree, history, scores):
    """The verdict on the last row of a history, from the definitions; what was evaluated is taken from the scores."""
    kind, *rest = tree
    if kind in ("all", "any"):  # those that may evaluate judge first
        parts = [model(part, history, scores) for part in sorted(rest[0], key=lambda each: not evaluates(each))]
        decisive = kind == "any"
        return decisive if decisive in parts else None if None in parts else not decisive
    if kind == "not":
        inner = model(rest[0], history, scores)
        return None if inner is None else not inner
    row = history[-1]
    if kind == "confirmed":
        return is_confirmed(*rest, history, scores)
    if kind == "wall_time":
        return row.time >= {"2.5s": 2.5, "0.1m": 6.0}.get(rest[0], rest[0])
    if kind == "typed":
        return None if rest[1] not in row else row[rest[1]] >= rest[2]
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


def is_confirmed(tree, evaluations, by, history, scores):
    """Rows decide when to ask, the evaluation alone whether to believe; what none has measured stays open."""
    verdict = model(tree, history, scores)
    for _ in range(evaluations if verdict else 0):
        score = scores.pop(0) if scores else None
        if score is None:
            return None
        measured = {**history[-1], EVAL: score}
        if by is None and RETURNS in names_of(tree):
            measured[RETURNS] = score
        verdict = model(by or tree, [Row(measured)], scores)
        if not verdict:
            return verdict
    return verdict


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


@pytest.mark.parametrize("seed", range(5))
def test_every_condition_equals_the_model_also_when_resumed_and_restarted(seed):
    draw = random.Random(seed)
    for _ in range(300):
        check(
            tree_of(draw, STATELESS + 2 * COUNTING + OTHERS + 2 * ["confirmed"]), history_of(draw), draw.randrange(25)
        )


def check(tree, history, cut):
    expected = [model(tree, history[: i + 1], [*row.scores]) is True for i, row in enumerate(history)]
    condition, now, trainer = build(tree), [0.0, 1000.0], Trainer()

    def judged(condition, rows):
        condition.bind(trainer)
        for row in rows:
            now[0], trainer.scores = row.time, [*row.scores]
            yield condition(row)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kinds.time, "monotonic", lambda: sum(now))
        assert repr(eval(repr(condition), vars(conditions) | {"Typed": Typed})) == repr(condition)
        assert condition.metric_names == names_of(tree)
        for _ in range(2):  # a second run remembers nothing of the first
            now[:] = 0.0, now[1] + 50.0
            condition.start()
            found = [*judged(condition, history)]
            assert found == expected, (tree, history)
            assert {type(each) for each in found} == {bool}
        now[0] = 0.0
        condition.start()
        first = [*judged(condition, history[:cut])]
        resumed = from_spec(json.loads(json.dumps(to_spec(condition))), find={f"{__name__}.Typed": Typed}.__getitem__)
        assert repr(resumed) == repr(condition)
        state = json.loads(json.dumps(condition.state_dict(), allow_nan=False))
        now[1] += 10_000.0  # the run lay killed meanwhile
        resumed.load_state_dict(state)
        assert [*first, *judged(resumed, history[cut:])] == expected, (tree, history, cut)


# -- one by one


def test_means_are_compared_with_all_of_their_digits():
    condition = Plateau(X, patience=3, rtol=0.0, atol=0.1)  # at last 0.1 and 0.2, whose difference alone is rounded
    met = [condition({X: value}) for value in [0.1] * 6 + [0.2, 0.3]]
    assert met == [False] * 3 + [True] * 3 + [False, True]
    earlier = Plateau(X, patience=1, rtol=0.1)  # of the earlier of two means: 11 of 100, and 11 of 111
    assert [earlier({X: value}) for value in (100, 111, 100)] == [False, False, True]


def test_plain_callables_compose():
    def solved(stats):
        return stats[EVAL] > 3 and stats[X] < 1

    condition = solved & HitsUpperBound(X, -5)
    assert repr(condition) == "And(test_plain_callables_compose.<locals>.solved, HitsUpperBound('losses/total', -5))"
    assert [condition(row) for row in ({X: 0}, {X: 0, EVAL: 2}, {X: 0, EVAL: 4})] == [False, False, True]
    assert (HitsUpperBound(X, 5) | solved)({X: 0, EVAL: 4})
    with pytest.raises(ValueError, match=r"Unknown metric 'losses/totl' in .*Nearest: losses/total"):
        as_condition(lambda stats: stats["losses/totl"] > 1)({X: 1.0})


def test_non_finite_names_the_culprit():
    row = {X: 1.0, "monitors/kl_div": math.inf, "returns/mean": math.nan}
    assert NonFinite().reason(row) == "NonFinite(): monitors/kl_div = inf, returns/mean = nan"
    assert repr(NonFinite(X)) == "NonFinite(names=['losses/total'])"
    confirmed = Confirmed(HitsUpperBound(RETURNS, 195))
    confirmed.bind(trainer := Trainer(200.0))
    assert confirmed({RETURNS: 195.0})
    measured = "episodes/returns/mean = 195, eval/returns/mean = 200"
    assert (confirmed.reason({RETURNS: 195.0, X: 1.0}), trainer.scores) == (f"{confirmed!r}: {measured}", [])
    assert WallTime("1m").reason({}) == "WallTime('1m'): 0 s"


def test_durations():
    durations = {90: 90, 0.5: 0.5, "90s": 90, "1h30m": 5400, "1.5 H": 5400, "2d 1s": 172801}
    assert {duration: WallTime(duration).seconds for duration in durations} == durations


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
    condition, trainer = Confirmed(inner), Trainer(10.0, 200.0)
    condition.bind(trainer)
    row = {RETURNS: 300.0, X: 1.0}
    assert [condition(row), condition(row)] == [False, True]


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
