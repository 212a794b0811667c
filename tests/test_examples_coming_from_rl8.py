"""The examples of rl8 on rl8x run, at a small size; what they reach at full size they say themselves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.loading import load_script

EXAMPLES = Path(__file__).parents[1] / "examples" / "coming_from_rl8"


def load(name: str) -> Any:
    return load_script(EXAMPLES / f"{name}.py")


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.stem)
def test_is_short_and_explains_itself(path: Path) -> None:
    lines = path.read_text().splitlines()
    assert len(lines) < 60
    assert lines[0].startswith('"""rl8\'s')
    assert "expected" in path.read_text()
    assert "stop_conditions=" in path.read_text()


def test_cartpole_evaluates_on_the_training_environment() -> None:
    stats = load("cartpole").main(max_steps=4)
    # Four training steps and one evaluation of two horizons, as rl8 counts them.
    assert (stats["algorithm/steps"], stats["algorithm/collects"]) == (4, 6)
    assert -300 < stats["eval/returns/mean"] < 0


def test_pendulum_trains_a_squashed_policy() -> None:
    stats = load("pendulum").main(max_steps=3)
    assert -2000 < stats["eval/returns/mean"] < -100


def test_mountain_car_evaluates_the_standard_car() -> None:
    stats = load("mountain_car").main(max_steps=10)
    assert -200 <= stats["eval/returns/mean"] <= -80


@pytest.mark.parametrize("model", ["mlp", "lstm", "attention"])
def test_algotrading_trains_each_model(model: str) -> None:
    returns = load("algotrading").main((model,), max_steps=5, num_envs=8)
    assert -20 < returns[model] < 60


def test_algotrading_with_a_memory_beats_the_one_without() -> None:
    returns = load("algotrading").main(("mlp", "lstm"), max_steps=15, num_envs=64)
    assert returns["lstm"] > 1.1 * returns["mlp"] > 0
