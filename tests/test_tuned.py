"""Settings by name: every file is legal and ends as it should, and twins are alike."""

import pytest

import rl8x
from rl8x.config import RunSpec
from rl8x.config.tuned import tuned_file, tuned_files
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
