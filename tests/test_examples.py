"""The examples run, at a small size, and give what they are about."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.loading import load_script

from rl8x import MemoryTracker, NullTracker
from rl8x.config import RunSpec
from rl8x.studies import StudyConfig

EXAMPLES = Path(__file__).parents[1] / "examples"


def load(name: str) -> Any:
    return load_script(EXAMPLES / f"{name}.py")


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.stem)
def test_is_short_and_explains_itself(path: Path) -> None:
    lines = path.read_text().splitlines()
    assert len(lines) < 60
    assert lines[0].startswith('"""')
    assert "expected" in path.read_text()


def test_quickstart_tracks_a_run_and_evaluates(capsys: pytest.CaptureFixture[str]) -> None:
    tracker = MemoryTracker()
    stats = load("quickstart").main(max_steps=5, tracker=tracker)
    assert stats.stop_reason == "max_steps=5"
    assert stats["algorithm/steps"] == 5
    assert stats["eval/returns/mean"] > 0
    assert "stays up for" in capsys.readouterr().out


def test_quickstart_learns_and_its_conditions_stop_it() -> None:
    stats = load("quickstart").main(tracker=NullTracker())
    assert "Plateau" in stats.stop_reason
    assert stats["eval/returns/mean"] >= 450


def test_recurrent_trains_a_policy_with_a_memory(capsys: pytest.CaptureFixture[str]) -> None:
    assert 5 < load("recurrent").main(max_steps=3) <= 500
    assert "without a memory" in capsys.readouterr().out


def test_randomization_evaluates_each_policy_under_each_physics() -> None:
    module = load("randomization")
    results = module.main(max_steps=3)
    assert list(results) == ["fixed physics", "random physics"]
    for returns in results.values():
        assert list(returns) == list(module.TESTS)
        assert all(1 <= value <= 500 for value in returns.values())
    # The same seed and the same weights at first: only the physics make the two policies different.
    assert results["fixed physics"] != results["random physics"]


def test_own_environment_is_learned() -> None:
    returns = load("own_environment").main(max_steps=12)
    assert returns["after"] > returns["before"] + 20
    assert returns["heavy"] != returns["after"]


def test_own_condition_stops_the_run_with_its_reason() -> None:
    stats = load("own_condition").main()
    assert stats.stop_reason.startswith("And(Grows('episodes/lengths/mean', 2), HitsUpperBound('env/steps', 10000)): ")
    assert 10_000 <= stats["env/steps"] <= 20 * 64 * 32


def test_own_condition_remembers_over_a_resume(tmp_path: Path) -> None:
    module = load("own_condition")
    config = module.PPOConfig(num_envs=8, horizon=32, model_config={"hidden_sizes": [8]}, seed=0, device="cpu")
    trainer = module.Trainer(config.build(module.CartPole), tracker=NullTracker(), checkpoints=tmp_path)
    grown = module.Grows("losses/vf", times=100)
    trainer.run(stop_conditions=[grown], max_steps=2, progress="none")
    resumed = module.Trainer.resume(tmp_path, tracker=NullTracker())
    again = module.Grows("losses/vf", times=100)
    resumed.run(stop_conditions=[again], max_steps=3, progress="none")
    assert again.first == grown.first is not None


def test_own_model_is_trained() -> None:
    assert load("own_model").main(max_steps=20) > 40


def test_own_algorithm_learns_and_has_a_metric_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    stats = load("own_algorithm").main(max_steps=12)
    assert stats["eval/returns/mean"] > 100  # at random 22
    assert stats["monitors/penalty"] > 0
    assert stats["losses/policy"] != stats["monitors/penalty"]
    assert "monitors/clip_frac" not in stats
    assert "expected above 400" in capsys.readouterr().out


def test_sets_learns_a_shorter_way() -> None:
    assert load("sets").main(max_steps=6) < 2.2  # at random 2.47


def test_the_demo_is_a_legal_run_that_ends_by_itself() -> None:
    run = RunSpec.from_file(EXAMPLES / "demo.yaml")
    assert run.env.env == "CartPole"
    assert "env/steps" in {name for condition in run.run.conditions() for name in condition.metric_names}
    budget = max(getattr(condition, "bound", 0) for condition in run.run.conditions())
    config = run.algorithm.make_config()
    step = config.num_envs * config.horizon
    # Where the budget ends the run, the last row's evaluation is of the final policy.
    assert budget % (step * run.run.steps_per_eval) == 0


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
    assert [line.split(":")[0] for line in capsys.readouterr().out.splitlines()] == [
        "fixed, outside",
        "fixed, inside",
        "wide, outside",
        "wide, inside",
    ]


def test_the_studys_file_is_legal() -> None:
    config = StudyConfig.from_file(EXAMPLES / "study.yaml")
    config.check()
    assert len(config.trainings()) == 9
    assert len((EXAMPLES / "study.yaml").read_text().splitlines()) <= 12


def test_own_tracker_writes_what_tensorboard_reads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
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
    assert "tensorboard --logdir" in capsys.readouterr().out
    # A resumed run goes on in the same folder, and rows that come again replace those before.
    again = own(tmp_path)
    again.start(params={}, tags={}, resume=folder.name)
    again.log_metrics({"losses/total": -1.0}, 4 * 64 * 32)
    again.finish("FINISHED")
    events = reading.EventAccumulator(str(folder)).Reload()
    for name in ("losses/total", "eval/returns/mean"):
        kept = [(event.step, pytest.approx(event.value, rel=1e-6)) for event in events.Scalars(name)]
        logged = tracker.history(name)
        assert len(logged) == (5 if name == "losses/total" else 1)
        assert kept == ([*logged[:3], (4 * 64 * 32, -1.0)] if name == "losses/total" else [])
