"""Settings by name: each file is legal and ends as it should; `rl8x tuned` prints and `--tuned` trains with them."""

import json
import re
import statistics
import warnings

import pytest

import rl8x
from rl8x.config import RunSpec
from rl8x.config.tuned import SETTINGS, tuned_file, tuned_files
from rl8x.envs import BUILTIN

NAMES = [(task, algorithm) for task, algorithms in tuned_files().items() for algorithm in algorithms]
# What a default may come to be must not change what was measured.
WRITTEN = {"num_envs", "horizon", "gamma", "max_grad_norm", "normalize_observations", "model", "model_config"}


@pytest.mark.parametrize(("task", "algorithm"), NAMES)
def test_a_setting_is_a_run_file_of_its_task_and_algorithm(task, algorithm):
    run = rl8x.tuned(task, algorithm)
    assert run == RunSpec.from_file(tuned_file(task, algorithm.upper()))
    assert (run.env.env, run.algorithm.algorithm.lower()) == (task, algorithm)
    assert run.algorithm.seed is None
    assert "seed" not in run.algorithm.algorithm_config
    config = run.algorithm.make_config()
    assert config.without_effect() | run.without_effect() == {}
    assert run.algorithm.algorithm_config.keys() >= WRITTEN
    # The last policy is evaluated, and a schedule ends with the run at the latest.
    (stop,) = run.run.stop_conditions
    transitions = stop["hits_upper_bound"][1]
    steps = -(-transitions // (config.num_envs * config.horizon))
    assert steps % run.run.steps_per_eval == 0
    for name, value in run.algorithm.algorithm_config.items():
        if name.endswith("_schedule"):
            assert value["points"][-1][0] <= transitions


def test_what_there_is():
    tasks = tuned_files()
    assert {*BUILTIN} - {*tasks} == {"DiscreteDummy", "ContinuousDummy", "Spread"}
    assert all("ppo" in algorithms for algorithms in tasks.values())
    for task in ("CartPole", "CartPole-v1", "Acrobot", "Acrobot-v1", "MountainCar", "MountainCar-v0", "LunarLander-v3"):
        assert [*tasks[task]] == ["ppo", "dqn", "pqn"]
    for task in ("Pendulum", "Pendulum-v1", "HalfCheetah-v5", "Hopper-v5"):
        assert [*tasks[task]] == ["ppo", "sac", "td3"]
    assert {"Walker2d-v5", "Ant-v5", "Swimmer-v5", "InvertedDoublePendulum-v5", "CarRacing-v3"} <= {*tasks}


@pytest.mark.parametrize("task", ["CartPole-v1", "Pendulum-v1", "Acrobot-v1", "MountainCar-v0"])
def test_a_task_of_gymnasiums_has_the_setting_of_the_built_in_one(task):
    for algorithm in tuned_files()[task]:
        theirs, ours = rl8x.tuned(task, algorithm), rl8x.tuned(task.partition("-")[0], algorithm)
        assert theirs.replace(env=ours.env.env, num_eval_envs=ours.trainer.num_eval_envs) == ours


def test_ppo_is_taken_names_are_those_of_the_command_line_and_a_setting_is_trained():
    assert rl8x.tuned("CartPole") == rl8x.tuned("CartPole", "PPOConfig")
    assert rl8x.tuned("CartPole", "Dqn").algorithm.algorithm == "DQN"
    run = rl8x.tuned("CartPole").replace(seed=3, max_steps=2, steps_per_eval=1, progress="none")
    assert rl8x.Trainer.from_spec(run, tracker=rl8x.NullTracker()).run()["env/steps"] == 2 * 64 * 32


@pytest.fixture
def options_of(call, tmp_path, mlruns):
    """The options of the algorithm that a command line trains."""

    def options(*words):
        (tmp_path / "dry.yaml").write_text(call("train", *words, "--dry-run"))
        return RunSpec.from_file(tmp_path / "dry.yaml").algorithm.algorithm_config

    return options


@pytest.mark.parametrize(("task", "algorithm"), [("HalfCheetah-v5", "sac"), ("CartPole", "DQN"), ("Pendulum", None)])
def test_a_printed_run_file_is_the_setting(task, algorithm, call):
    printed = call("tuned", task, *([] if algorithm is None else [algorithm]))
    assert printed == tuned_file(task, algorithm or "PPO").read_text()


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["CartPole", "--tuned", "gamma=0.9", "--seed", "3"], {"gamma": 0.9, "seed": 3}),
        (["--tuned", "CartPole", "--gamma", "0.9"], {"gamma": 0.9}),
        (["env=CartPole", "--tuned", "num_envs=32"], {"num_envs": 32}),
        # A number takes the place of the setting's schedule of it, however it is given.
        (["CartPole", "--tuned", "lr=1e-3"], {"lr": 1e-3, "lr_schedule": None}),
        (["CartPole", "--tuned", "--lr", "1e-3"], {"lr": 1e-3, "lr_schedule": None}),
    ],
)
def test_what_is_typed_comes_later(words, expected, options_of):
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # nothing that was typed is without effect
        found = options_of(*words)
    assert found == rl8x.tuned("CartPole").algorithm.algorithm_config | expected


def test_a_number_is_what_a_rate_that_adapts_begins_with(options_of, tmp_path):
    adapts = {"kind": "adaptive", "kl": 0.02}
    (tmp_path / "mine.json").write_text(json.dumps({"env": "CartPole", "algorithm_config": {"lr_schedule": adapts}}))
    assert options_of("-f", tmp_path / "mine.json", "--lr", "5e-4") == {"lr": 5e-4, "lr_schedule": adapts}


def test_the_table_has_what_was_measured_and_says_what_was_not(call):
    measured = json.loads((SETTINGS / "measured.json").read_text())
    header, *lines = call("tuned").partition("\n\n")[0].splitlines()
    assert header.split() == ["task", "algorithm", "transitions", "return", "seconds"]
    cells = {tuple(line.split()[:2]): re.split(r"  +", line)[2:] for line in lines}
    assert [*cells] == [(task, algorithm.upper()) for task, algorithm in NAMES]
    # By hand from benchmarks/results/learning.json: the median of 279.63, 280.52 and 281.83.
    assert cells["LunarLander-v3", "PPO"] == ["1,003,520", "280.5 (279.6 to 281.8, 3 seeds)", "147"]
    # Its seeds were stopped early, so that `--tuned` trains more of them.
    assert cells["Hopper-v5", "TD3"] == ["1,000,000", "2780.8 (1 seed, after 360,000 or fewer)", "1668"]
    for (task, algorithm), (transitions, returned, seconds) in cells.items():
        result = measured.get(f"{task}-{algorithm.lower()}")
        if result is None:
            assert (returned, seconds) == ("not measured", "not measured")
        else:
            assert f"{result['transitions']:,}" in (transitions, *re.findall("after (.*) or fewer", returned))
            assert float(returned.split()[0]) == pytest.approx(statistics.median(result["returns"]), abs=0.05)
