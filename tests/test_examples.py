"""The examples run, at a small size, and give what they are about; the notebook runs cell by cell under IPython."""

from __future__ import annotations

import importlib.util
import io
import json
import os
import re
import signal
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from rl8x import MemoryTracker, NullTracker
from rl8x.envs import CartPole, NumpyEnv

EXAMPLES = Path(__file__).parents[1] / "examples"


def load(name):
    """Run a script's top level and return it as a module; what stands under `__main__` does not run."""
    spec = importlib.util.spec_from_file_location(name.replace("/", "_"), EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look there for what their annotations name
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("path", sorted(EXAMPLES.rglob("*.py")), ids=lambda path: path.stem)
def test_is_short_and_explains_itself(path):
    lines = path.read_text().splitlines()
    assert len(lines) < 60
    assert lines[0].startswith('"""rl8\'s' if path.parent.name == "coming_from_rl8" else '"""')
    assert "expected" in path.read_text()


@pytest.mark.parametrize(
    ("name", "max_steps", "low", "high"),
    [
        ("own_model", 2, 5, 500),
        ("recurrent", 2, 5, 500),
        ("sets", 2, 0, 4),  # the length of a way
        ("coming_from_rl8/cartpole", 4, -2000, 0),
        ("coming_from_rl8/pendulum", 2, -2000, 0),
        ("coming_from_rl8/mountain_car", 10, -2000, 0),
    ],
)
def test_a_policy_is_trained_and_evaluated(name, max_steps, low, high):
    found = load(name).main(max_steps=max_steps)
    assert low <= (found["eval/returns/mean"] if "/" in name else found) <= high


def test_quickstart_says_why_it_stopped_and_how_long_the_pole_stays_up(capsys):
    """At full length it is the first script of the README, which is run by test_readme.py."""
    stats = load("quickstart").main(max_steps=2, tracker=NullTracker())
    assert f"stopped by {stats.stop_reason}\nthe pole stays up for" in capsys.readouterr().out


def test_randomization_evaluates_each_policy_under_each_physics():
    module = load("randomization")
    results = module.main(max_steps=2)
    assert list(results) == ["fixed physics", "random physics"]
    for returns in results.values():
        assert list(returns) == list(module.TESTS)
        assert all(1 <= value <= 500 for value in returns.values())
    # The same seed and the same weights at first: only the physics make the two policies different.
    assert results["fixed physics"] != results["random physics"]


def test_own_parts_are_trained_with_and_have_their_say():
    returns = load("own_environment").main(max_steps=2)
    assert returns["before"] != returns["after"] != returns["heavy"]  # its parameters move
    stats = load("own_condition").main()
    assert stats.stop_reason.startswith("And(Grows('episodes/lengths/mean', 2), HitsUpperBound('env/steps', 10000)): ")
    assert 10_000 <= stats["env/steps"] <= 20 * 64 * 32
    stats = load("own_algorithm").main(max_steps=2)
    assert stats["monitors/penalty"] > 0
    assert stats["losses/policy"] != stats["monitors/penalty"]
    assert "monitors/clip_frac" not in stats


def test_study_tests_each_policy_inside_and_outside_of_its_training(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    small = {"algorithm_config": {"num_envs": 8, "horizon": 8, "device": "cpu"}}
    study = load("study").main(jobs=1, max_steps=1, episodes=1, seeds=1, tracking=False, progress="none", **small)
    results = study.results()
    assert len(results) == 2 * 100
    # fixed: (0.5, 9.8); wide: lengths of 0.3, 0.4, ... 1.0 under gravities of 5, 9.8 and 15
    assert results.groupby("training").inside.sum().to_dict() == {"fixed": 1, "wide": 8 * 3}
    said = [line.split(":")[0] for line in capsys.readouterr().out.splitlines()]
    assert said == ["fixed, outside", "fixed, inside", "wide, outside", "wide, inside"]


def test_own_tracker_writes_what_tensorboard_reads(tmp_path):
    reading = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator", reason="tensorboard is not installed"
    )
    module, tracker = load("own_tracker"), MemoryTracker()

    class Both(module.TensorBoardTracker):
        def log_metrics(self, metrics, step):
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


def test_rl8s_algotrading_has_a_return_of_each_model():
    returns = load("coming_from_rl8/algotrading").main(("mlp", "lstm"), max_steps=5, num_envs=16)
    assert returns.keys() == {"mlp", "lstm"}
    assert all(map(np.isfinite, returns.values()))


def test_stable_baselines3_trains_and_gets_what_gymnasiums_interface_gives():
    pytest.importorskip("stable_baselines3", reason="stable_baselines3 is not installed: pip install stable_baselines3")
    sb3 = load("other_libraries/stable_baselines3")
    assert sb3.main(timesteps=4_096) > 5
    theirs, ours = sb3.AsVecEnv(CartPole(4, time_limit=12)), NumpyEnv(CartPole(4, time_limit=12))
    theirs.seed(5)
    np.testing.assert_array_equal(theirs.reset(), ours.reset(seed=5)[0])
    random, ends = np.random.default_rng(0), set()
    for _ in range(60):
        actions = random.integers(0, 2, 4)
        obs, rewards, done, infos = theirs.step(actions)
        ours_obs, ours_rewards, terminated, truncated, info = ours.step(actions)
        for one, other in ((obs, ours_obs), (rewards, ours_rewards), (done, terminated | truncated)):
            np.testing.assert_array_equal(one, other)
        for i in done.nonzero()[0]:
            np.testing.assert_array_equal(infos[i]["terminal_observation"], info["final_obs"][i])
            assert infos[i]["TimeLimit.truncated"] == (truncated[i] and not terminated[i])
            ends.add(infos[i]["TimeLimit.truncated"])
    assert ends == {True, False}
    theirs.close()


NOTEBOOK = EXAMPLES / "notebook.ipynb"

# Sizes in the notebook, and what the test makes of them.
SMALLER = {
    "num_envs=64": "num_envs=16",
    "num_eval_envs=32": "num_eval_envs=2",
    "120_000": "1_000",
    "max_steps=100": "max_steps=3",
}


@pytest.fixture
def shell(mlruns, monkeypatch):
    """An interactive shell, as a notebook's kernel has it, in an empty folder."""
    reason = "IPython is not installed, which runs cells: pip install 'rl8x[dev]'"
    InteractiveShell = pytest.importorskip("IPython.core.interactiveshell", reason=reason).InteractiveShell
    monkeypatch.setattr("sys.ps1", "In : ", raising=False)  # before IPython does, for good
    InteractiveShell.clear_instance()
    shell = InteractiveShell.instance()
    shell.history_manager.enabled = False
    yield shell
    InteractiveShell.clear_instance()


def cells(kind="code"):
    book = json.loads(NOTEBOOK.read_text())
    for cell in book["cells"]:
        if cell["cell_type"] == kind:
            yield "".join(cell["source"])


def run(shell, code):
    """Run a cell; returns what it evaluates to, and that in the forms in which a notebook shows it."""
    done = shell.run_cell(code)
    done.raise_error()
    shown, _ = shell.display_formatter.format(done.result)
    return done.result, shown


def test_the_notebook_runs_and_shows_its_pictures(shell, mlflow_client, capsys):
    shown = {}
    assert all(text in "".join(cells()) for text in SMALLER)
    for code in cells():
        for text, smaller in SMALLER.items():
            code = code.replace(text, smaller)
        _, shown[code.split("(")[0] + code[-12:]] = run(shell, code)
    first, second, film = list(shown.values())[-3:]
    assert [Image.open(io.BytesIO(each["image/png"])).format for each in (first, second)] == ["PNG", "PNG"]
    assert film["text/html"].startswith('<img src="data:image/gif;base64,')
    assert "HitsUpperBound('env/steps', 1000)" in capsys.readouterr().out
    (found,) = mlflow_client.search_runs(["0", "1"])
    assert found.info.status == "FINISHED"


def test_the_notebook_is_committed_without_outputs():
    book = json.loads(NOTEBOOK.read_text())
    assert all(not cell["outputs"] and cell["execution_count"] is None for cell in book["cells"] if "outputs" in cell)
    assert NOTEBOOK.stat().st_size < 10_000


def test_an_interrupted_cell_ends_the_run_says_what_to_do_and_goes_on(shell, mlflow_client, capfd, default_signals):
    run(shell, "from rl8x import PPOConfig, Trainer")
    small = "num_envs=4, horizon=4, device='cpu', seed=0, model_config={'hidden_sizes': [4]}"
    run(shell, f"trainer = Trainer(PPOConfig({small}).build('CartPole'), callbacks=[lambda t, row: interrupt(row)])")
    steps = []

    def interrupt(row):
        steps.append(row["algorithm/steps"])
        if len(steps) == 3:
            os.kill(os.getpid(), signal.SIGINT)

    shell.user_ns["interrupt"] = interrupt
    done = shell.run_cell("trainer.run(max_steps=6)")
    assert isinstance(done.error_in_exec or done.error_before_exec, KeyboardInterrupt)
    told = re.sub(r"\s+", " ", capfd.readouterr().err)
    assert "stopped after 3 steps: interrupted by SIGINT" in told
    assert "to continue in this session: call run() of this trainer again" in told
    assert re.search(r"to continue from step 3: Trainer.resume\('\S+', callbacks=\[...\]\).run\(\)", told)
    (found,) = mlflow_client.search_runs(["0", "1"])
    assert found.info.status == "KILLED"
    assert found.data.tags["rl8x.stop_reason"] == "interrupted by SIGINT"
    run(shell, "stats = trainer.run(max_steps=2)")
    assert steps == [1, 2, 3, 4, 5]
    (again,) = mlflow_client.search_runs(["0", "1"])
    assert (again.info.run_id, again.info.status) == (found.info.run_id, "FINISHED")


def test_an_interrupted_loop_over_steps_ends_the_run_too(shell, mlflow_client, monkeypatch):
    run(shell, "from rl8x import PPOConfig, Trainer\nfrom rl8x.algorithms import PPO")
    small = "num_envs=4, horizon=4, device='cpu', seed=0, model_config={'hidden_sizes': [4]}"
    run(shell, f"trainer = Trainer(PPOConfig({small}).build('CartPole'))")
    algorithm, calls = shell.user_ns["trainer"].algorithm, []
    step = algorithm.step

    def interrupted():
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return step()

    monkeypatch.setattr(algorithm, "step", interrupted)
    done = shell.run_cell("for stats in trainer:\n    pass")
    assert isinstance(done.error_in_exec, KeyboardInterrupt)
    (found,) = mlflow_client.search_runs(["0", "1"])
    assert (found.info.status, found.data.metrics["algorithm/steps"]) == ("KILLED", 2)
