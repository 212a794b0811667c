"""Conditions as comparisons in a line, against the classes that they stand for and against Python's own comparisons."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rl8x.conditions import HitsLowerBound, HitsUpperBound, from_spec, to_spec
from rl8x.conditions.spec import is_expression

A, B = "eval/returns/mean", "env/steps"
UP, LOW = HitsUpperBound, HitsLowerBound


@pytest.mark.parametrize(
    ("text", "condition"),
    [
        ("eval/returns/mean >= 475 and env/steps >= 50000", UP(A, 475) & UP(B, 50000)),
        ("env/steps <= -.5", LOW(B, -0.5)),
        ("env/steps > +5", ~LOW(B, 5)),
        ("env/steps == 5", LOW(B, 5) & UP(B, 5)),
        ("env/steps != 5", ~(LOW(B, 5) & UP(B, 5))),
        # turned round, and in chains
        ("5 > env/steps", ~UP(B, 5)),
        ("0 < env/steps <= 5", ~LOW(B, 0) & LOW(B, 5)),
        ("env/steps >= 5 <= eval/returns/mean", UP(B, 5) & UP(A, 5)),
        # `not` before `and` before `or`, as in Python
        ("not a > 1 and b > 2 or c > 3", (LOW("a", 1) & ~LOW("b", 2)) | ~LOW("c", 3)),
        ("not(a >= 1)and(not not((b >= 2)))", ~UP("a", 1) & UP("b", 2)),
        ("a >= 1 AND NOT b >= 2\n", UP("a", 1) & ~UP("b", 2)),
        # names
        ("a-b.c:d_e/é >= 1", UP("a-b.c:d_e/é", 1)),
        ("eval/and/x >= 1 and orange/not >= 1", UP("eval/and/x", 1) & UP("orange/not", 1)),
        ("'eval/this and that' >= 1 and 2 < \"3\"", UP("eval/this and that", 1) & ~LOW("3", 2)),
    ],
)
def test_a_text_is_the_condition_that_classes_write(text, condition):
    made = from_spec(text)
    assert repr(made) == repr(condition)
    assert to_spec(made) == to_spec(condition)  # what a checkpoint has: no text that would be read again
    assert repr(from_spec(json.loads(json.dumps(to_spec(made))))) == repr(condition)
    assert is_expression(text)
    assert not is_expression(f"{text} and wall_time")


NUMBERS = [-2, 0, 1, 2.5]
names, numbers = st.sampled_from(["m/a", "m/b"]), st.sampled_from(NUMBERS).map(str)
marks = st.sampled_from(["<", "<=", ">", ">=", "==", "!="])
turned = st.tuples(numbers, marks, names)
comparisons = st.tuples(names, marks, numbers) | turned | st.tuples(turned.map(" ".join), marks, numbers)
texts = st.recursive(
    comparisons.map(" ".join),
    lambda inner: st.one_of(
        st.builds("{} and {}".format, inner, inner),
        st.builds("{} or {}".format, inner, inner),
        st.builds("not {}".format, inner),
        st.builds("({})".format, inner),
    ),
    max_leaves=8,
)


@settings(max_examples=300, deadline=None)
@given(texts, st.sampled_from(NUMBERS), st.sampled_from(NUMBERS))
def test_a_text_is_judged_as_python_would(text, a, b):
    expected = eval(text.replace("m/a", "a").replace("m/b", "b"), {"a": a, "b": b})
    assert from_spec(text)({"m/a": a, "m/b": b}) == expected


@settings(max_examples=300, deadline=None)
@given(st.text("ab/ 1.e-+_<>=!()'\"andort\n#,*", max_size=30))
def test_any_text_is_a_condition_or_refused_in_one_line(text):
    try:
        condition = from_spec(text)
    except ValueError as error:
        message = str(error)
        assert "\n" not in message
    else:
        assert repr(from_spec(to_spec(condition))) == repr(condition)
