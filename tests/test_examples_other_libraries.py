"""Built-in environments in other libraries, where those are installed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.loading import load_script

from rl8x.envs import CartPole, NumpyEnv

EXAMPLES = Path(__file__).parents[1] / "examples" / "other_libraries"
PATHS = sorted(EXAMPLES.glob("*.py"))


@pytest.fixture
def script() -> Any:
    pytest.importorskip("stable_baselines3", reason="stable_baselines3 is not installed: pip install stable_baselines3")
    return load_script(EXAMPLES / "stable_baselines3.py")


def test_examples_are_short() -> None:
    assert PATHS
    for path in PATHS:
        assert len(path.read_text().splitlines()) < 60
        assert "expected" in path.read_text()


def test_stable_baselines3_learns_in_a_built_in_environment(script: Any) -> None:
    # A policy that chooses at random has a mean return of 22.
    assert script.main(timesteps=16_384) > 40


def test_stable_baselines3_gets_what_gymnasiums_interface_gives(script: Any) -> None:
    theirs, ours = script.AsVecEnv(CartPole(4, time_limit=12)), NumpyEnv(CartPole(4, time_limit=12))
    theirs.seed(5)
    np.testing.assert_array_equal(theirs.reset(), ours.reset(seed=5)[0])
    random = np.random.default_rng(0)
    ends = set()
    for _ in range(60):
        actions = random.integers(0, 2, 4)
        obs, rewards, done, infos = theirs.step(actions)
        ours_obs, ours_rewards, terminated, truncated, info = ours.step(actions)
        np.testing.assert_array_equal(obs, ours_obs)
        np.testing.assert_array_equal(rewards, ours_rewards)
        np.testing.assert_array_equal(done, terminated | truncated)
        for i in done.nonzero()[0]:
            np.testing.assert_array_equal(infos[i]["terminal_observation"], info["final_obs"][i])
            assert infos[i]["TimeLimit.truncated"] == (truncated[i] and not terminated[i])
            assert infos[i]["episode"]["l"] <= 12
            ends.add(infos[i]["TimeLimit.truncated"])
    assert ends == {True, False}
    theirs.close()
