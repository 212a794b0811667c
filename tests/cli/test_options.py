from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from rl8x.algorithms.hyperparameters import option
from rl8x.cli.options import AlgorithmCommand, FieldOption


@dataclasses.dataclass(frozen=True)
class Config:
    count: int = option(5, "How many.", low=1)
    share: float | None = option(0.5, "Which part.", low=0.0, high=1.0)
    kind: str = option("a", "Of what kind.", choices=("a", "b"))
    label: str | None = option(None, "A text.")
    on: bool = option(True, "Whether.")
    inner: dict[str, Any] = option({}, "More.")


def parsed(*words):
    options = [FieldOption(field) for field in dataclasses.fields(Config)]
    command = AlgorithmCommand(
        name="x", find=lambda typed, asks_help: None, params=options, callback=lambda **given: given
    )
    return {
        name: value for name, value in command.main(list(words), "x", standalone_mode=False).items() if name != "trust"
    }


def test_only_what_was_given_is_passed_on():
    assert parsed() == {}
    assert parsed("--count", "3") == {"count": 3}
    assert parsed("--no-on") == {"on": False}
    assert parsed("--on") == {"on": True}


@pytest.mark.parametrize(
    ("words", "value"),
    [
        (["--share", "1e-3"], {"share": 1e-3}),
        (["--share", "none"], {"share": None}),
        (["--label", "007"], {"label": "007"}),  # text stays text
        (["--label", "None"], {"label": None}),
        (["--inner", "{a: [1, x]}"], {"inner": {"a": [1, "x"]}}),
        (["--count", "many"], {"count": "many"}),  # the config refuses it, with its own words
    ],
)
def test_values(words, value):
    assert parsed(*words) == value
