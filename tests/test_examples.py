"""The examples run, at a small size, and give what they are about."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rl8x import MemoryTracker, NullTracker
from rl8x.envs import CartPole, NumpyEnv

EXAMPLES = Path(__file__).parents[1] / "examples"


def load(name: str) -> Any:
    """Run a script's top level and return it as a module; what stands under `__main__` does not run."""
    spec = importlib.util.spec_from_file_location(name.replace("/", "_"), EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look there for what their annotations name
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("path", sorted(EXAMPLES.rglob("*.py")), ids=lambda path: path.stem)
def test_is_short_and_explains_itself(path: Path) -> None:
    lines = path.read_text().splitlines()
    assert len(lines) < 60
    assert lines[0].startswith('"""rl8\'s' if path.parent.name == "coming_from_rl8" else '"""')
    assert "expected" in path.read_text()


def test_quickstart_says_why_it_stopped_and_how_long_the_pole_stays_up(capsys: pytest.CaptureFixture[str]) -> None:
    """At full length it is the first script of the README, which is run by test_readme.py."""
    stats = load("quickstart").main(max_steps=2, tracker=NullTracker())
    assert f"stopped by {stats.stop_reason}\nthe pole stays up for" in capsys.readouterr().out


def test_randomization_evaluates_each_policy_under_each_physics() -> None:
    module = load("randomization")
    results = module.main(max_steps=2)
    assert list(results) == ["fixed physics", "random physics"]
    for returns in results.values():
        assert list(returns) == list(module.TESTS)
        assert all(1 <= value <= 500 for value in returns.values())
    # The same seed and the same weights at first: only the physics make the two policies different.
    assert results["fixed physics"] != results["random physics"]


def test_own_environment_is_trained_in_and_its_parameters_move() -> None:
    returns = load("own_environment").main(max_steps=2)
    assert returns["after"] != returns["before"]
    assert returns["heavy"] != returns["after"]


def test_own_condition_stops_the_run_with_its_reason() -> None:
    stats = load("own_condition").main()
    assert stats.stop_reason.startswith("And(Grows('episodes/lengths/mean', 2), HitsUpperBound('env/steps', 10000)): ")
    assert 10_000 <= stats["env/steps"] <= 20 * 64 * 32


def test_own_algorithm_has_a_metric_of_its_own() -> None:
    stats = load("own_algorithm").main(max_steps=2)
    assert stats["monitors/penalty"] > 0
    assert stats["losses/policy"] != stats["monitors/penalty"]
    assert "monitors/clip_frac" not in stats


@pytest.mark.parametrize(
    ("name", "low", "high"),
    [("own_model", 5, 500), ("recurrent", 5, 500), ("sets", 0, 4)],  # the length of a way
)
def test_a_policy_of_another_model_is_trained(name: str, low: float, high: float) -> None:
    assert low < load(name).main(max_steps=2) <= high


def test_study_tests_each_policy_inside_and_outside_of_its_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    small = {"algorithm_config": {"num_envs": 8, "horizon": 8, "device": "cpu"}}
    study = load("study").main(jobs=1, max_steps=1, episodes=1, seeds=1, tracking=False, progress="none", **small)
    results = study.results()
    assert len(results) == 2 * 100
    # fixed: (0.5, 9.8); wide: lengths of 0.3, 0.4, ... 1.0 under gravities of 5, 9.8 and 15
    assert results.groupby("training").inside.sum().to_dict() == {"fixed": 1, "wide": 8 * 3}
    said = [line.split(":")[0] for line in capsys.readouterr().out.splitlines()]
    assert said == ["fixed, outside", "fixed, inside", "wide, outside", "wide, inside"]


def test_own_tracker_writes_what_tensorboard_reads(tmp_path: Path) -> None:
    reading = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator", reason="tensorboard is not installed"
    )
    module = load("own_tracker")
    tracker = MemoryTracker()

    class Both(module.TensorBoardTracker):
        def log_metrics(self, metrics: Any, step: int) -> None:
            super().log_metrics(metrics, step)
            tracker.log_metrics(metrics, step)

    module.TensorBoardTracker, own = Both, module.TensorBoardTracker
    tracker.start(params={}, tags={})
    folder = module.main(str(tmp_path), max_steps=5)
    # A resumed run goes on in the same folder, and rows that come again replace those before.
    again = own(tmp_path)
    again.start(params={}, tags={}, resume=folder.name)
    again.log_metrics({"losses/total": -1.0}, 4 * 64 * 32)
    again.finish("FINISHED")
    events = reading.EventAccumulator(str(folder)).Reload()
    kept = [(event.step, pytest.approx(event.value, rel=1e-6)) for event in events.Scalars("losses/total")]
    assert kept == [*tracker.history("losses/total")[:3], (4 * 64 * 32, -1.0)]
    assert not events.Scalars("eval/returns/mean")


@pytest.mark.parametrize(("name", "max_steps"), [("cartpole", 4), ("pendulum", 3), ("mountain_car", 10)])
def test_an_example_of_rl8_is_trained_and_evaluated(name: str, max_steps: int) -> None:
    assert -2000 <= load(f"coming_from_rl8/{name}").main(max_steps=max_steps)["eval/returns/mean"] <= 0


def test_rl8s_algotrading_has_a_return_of_each_model() -> None:
    returns = load("coming_from_rl8/algotrading").main(("mlp", "lstm"), max_steps=5, num_envs=16)
    assert returns.keys() == {"mlp", "lstm"}
    assert all(map(np.isfinite, returns.values()))


@pytest.fixture
def sb3() -> Any:
    pytest.importorskip("stable_baselines3", reason="stable_baselines3 is not installed: pip install stable_baselines3")
    return load("other_libraries/stable_baselines3")


def test_stable_baselines3_trains_in_a_built_in_environment(sb3: Any) -> None:
    assert sb3.main(timesteps=4_096) > 5


def test_stable_baselines3_gets_what_gymnasiums_interface_gives(sb3: Any) -> None:
    theirs, ours = sb3.AsVecEnv(CartPole(4, time_limit=12)), NumpyEnv(CartPole(4, time_limit=12))
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
            ends.add(infos[i]["TimeLimit.truncated"])
    assert ends == {True, False}
    theirs.close()
