"""`rl8x tuned` and `--tuned`: a table, a run file, and a run with what is typed after it."""

import importlib.util
import re
import statistics
import warnings

import gymnasium
import pytest

import rl8x
from rl8x.cli.envs import tuned_rows as rows
from rl8x.cli.main import main
from rl8x.config import RunSpec
from rl8x.config.tuned import measured, tuned_file, tuned_files

NAMES = [(task, algorithm) for task, algorithms in tuned_files().items() for algorithm in algorithms]
SIMULATORS = {"mujoco": "mujoco", "box2d": "Box2D"}  # a part of the entry point: the module


def dry(words, capsys, tmp_path, code=0):
    """Return the run that a command line describes, or the line that it ends with."""
    assert main(["train", *words, "--dry-run"]) == code
    captured = capsys.readouterr()
    if code:
        assert captured.out == ""
        return captured.err
    (tmp_path / "run.yaml").write_text(captured.out)
    return RunSpec.from_file(tmp_path / "run.yaml")


@pytest.mark.parametrize(("task", "algorithm"), NAMES)
def test_every_setting_is_a_run_that_could_begin(task, algorithm, mlruns, capsys, tmp_path):
    entry_point = str(gymnasium.spec(task).entry_point) if task in gymnasium.registry else ""
    needed = [part for part in SIMULATORS if part in entry_point]
    words = [task, "--algorithm", algorithm, "--tuned"]
    if any(importlib.util.find_spec(SIMULATORS[part]) is None for part in needed):
        assert f"gymnasium[{needed[0]}]" in dry(words, capsys, tmp_path, code=2)
        return
    run = dry(words, capsys, tmp_path)
    assert run.algorithm.make_config() == rl8x.tuned(task, algorithm).algorithm.make_config()
    assert run.to_plain() | {"algorithm": ""} == rl8x.tuned(task, algorithm).to_plain() | {"algorithm": ""}


@pytest.mark.parametrize(("task", "algorithm"), [("HalfCheetah-v5", "sac"), ("CartPole", "DQN"), ("Pendulum", None)])
def test_a_printed_run_file_is_the_setting(task, algorithm, capsys, tmp_path):
    assert main(["tuned", task, *([] if algorithm is None else [algorithm])]) == 0
    (tmp_path / "run.yaml").write_text(capsys.readouterr().out)
    chosen = algorithm or "PPO"
    assert (tmp_path / "run.yaml").read_text() == tuned_file(task, chosen).read_text()
    assert RunSpec.from_file(tmp_path / "run.yaml") == rl8x.tuned(task, chosen)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["CartPole", "--tuned", "gamma=0.9", "--seed", "3"], {"gamma": 0.9, "seed": 3}),
        (["--tuned", "CartPole", "--gamma", "0.9"], {"gamma": 0.9}),
        (["env=CartPole", "--tuned", "num_envs=32"], {"num_envs": 32}),
        # A number takes the place of the setting's schedule of it, however it is given.
        (["CartPole", "--tuned", "lr=1e-3"], {"lr": 1e-3, "lr_schedule": None}),
        (["CartPole", "--tuned", "--lr", "1e-3"], {"lr": 1e-3, "lr_schedule": None}),
        (["CartPole", "--tuned", "algorithm_config.lr=1e-3"], {"lr": 1e-3, "lr_schedule": None}),
        (["CartPole", "--tuned", "lr_schedule=[[0, 1e-3]]"], {"lr_schedule": [[0, 1e-3]]}),
    ],
)
def test_what_is_typed_comes_later(words, expected, mlruns, capsys, tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # nothing that was typed is without effect
        run = dry(words, capsys, tmp_path)
    assert run.algorithm.algorithm_config == rl8x.tuned("CartPole").algorithm.algorithm_config | expected


def test_keys_of_the_run_are_overridden_too(mlruns, capsys, tmp_path):
    words = ["CartPole", "algorithm=dqn", "--tuned", "--stop", "wall_time: 1m", "steps_per_eval=5", "--run-name", "r"]
    run = dry(words, capsys, tmp_path)
    assert (run.algorithm.algorithm, run.run.stop_conditions, run.run.steps_per_eval) == (
        "dqn",
        ({"wall_time": "1m"},),
        5,
    )
    assert (run.trainer.run_name, run.algorithm.algorithm_config) == (
        "r",
        rl8x.tuned("CartPole", "dqn").algorithm.algorithm_config,
    )


def test_a_number_takes_the_place_of_a_run_files_schedule_too(mlruns, capsys, tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text(
        "env: CartPole\nalgorithm: dqn\nalgorithm_config: {lr_schedule: [[0, 1e-2]], epsilon_schedule: [[0, 0.5]]}\n"
    )
    run = dry(["-f", str(file), "epsilon=0.1"], capsys, tmp_path)
    assert run.algorithm.algorithm_config == {"lr_schedule": [[0, 1e-2]], "epsilon": 0.1, "epsilon_schedule": None}


def test_a_number_is_what_a_rate_that_adapts_begins_with(mlruns, capsys, tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text("env: CartPole\nalgorithm_config: {lr: 1e-3, lr_schedule: {kind: adaptive, kl: 0.02}}\n")
    run = dry(["-f", str(file), "--lr", "5e-4"], capsys, tmp_path)
    assert run.algorithm.algorithm_config == {"lr": 5e-4, "lr_schedule": {"kind": "adaptive", "kl": 0.02}}


def test_the_table_has_what_was_measured_and_says_what_was_not(capsys):
    assert main(["tuned"]) == 0
    header, *lines = capsys.readouterr().out.partition("\n\n")[0].splitlines()
    assert header.split() == ["task", "algorithm", "transitions", "return", "seconds"]
    cells = {tuple(line.split()[:2]): re.split(r"  +", line)[2:] for line in lines}
    assert [*cells] == [(task, algorithm.upper()) for task, algorithm in NAMES]
    # By hand from benchmarks/results/learning.json: the median of 279.63, 280.52 and 281.83.
    assert cells["LunarLander-v3", "PPO"] == ["1,003,520", "280.5 (279.6 to 281.8, 3 seeds)", "147"]
    for (task, algorithm), (transitions, returned, seconds) in cells.items():
        result = measured().get(f"{task}-{algorithm.lower()}")
        if result is None:
            assert (returned, seconds) == ("not measured", "not measured")
        else:
            assert transitions == f"{result['transitions']:,}"
            assert float(returned.split()[0]) == pytest.approx(statistics.median(result["returns"]), abs=0.05)


def test_one_seed_is_called_one_and_small_returns_have_two_digits(monkeypatch):
    results = {
        "Hopper-v5-sac": {"transitions": 1_000_000, "returns": [3456.78], "seconds": 7654.3},
        "AlgoTrading-ppo": {"transitions": 245_760, "returns": [1.234, -2.5], "seconds": 14.4},
    }
    monkeypatch.setattr("rl8x.config.tuned.measured", lambda: results)
    cells = {line[:2]: line[2:] for line in rows()}
    assert cells["Hopper-v5", "SAC"] == ("1,000,000", "3456.8 (1 seed)", "7654")
    assert cells["AlgoTrading", "PPO"] == ("245,760", "-0.63 (-2.50 to 1.23, 2 seeds)", "14")
