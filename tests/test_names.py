from __future__ import annotations

import pytest

from rl8x.names import check_arguments, unknown_name


class Thing:
    def __init__(self, given, *, width=1, depth=2):
        pass


class Open:
    def __init__(self, given, **anything):
        pass


class Plain:
    def __init__(self, given):
        pass


def test_the_message_has_the_nearest_and_all():
    assert (
        unknown_name("colour", "gren", ["blue", "green"])
        == "no colour 'gren'. Did you mean 'green'? There are blue, green."
    )
    assert unknown_name("colour", "xyz", ["blue", "green"]) == "no colour 'xyz'. There are blue, green."


def test_only_arguments_of_the_class_pass():
    check_arguments(Thing, {"width": 3, "depth": 4}, "config", num_positional=1)
    check_arguments(Open, {"whatever": 3}, "config", num_positional=1)
    with pytest.raises(ValueError, match="no argument 'widht' of Thing in `config`"):
        check_arguments(Thing, {"widht": 3}, "config", num_positional=1)
    with pytest.raises(ValueError, match="'given'"):
        check_arguments(Thing, {"given": 3}, "config", num_positional=1)
    with pytest.raises(ValueError, match="Plain takes nothing in `config`"):
        check_arguments(Plain, {"width": 3}, "config", num_positional=1)
