"""The benchmark of the defaults: what is changed near them, its tables, and rows that other defaults made."""

import json

import pytest
from benchmarks.defaults import ALL, NEAR, TASKS, all_rows, file_of, keep, near, report, report_near


def row(task, seed, mean, passed=True):
    return {"task": task, "seed": seed, "return_mean": mean, "passed": passed, "cpu_s": 2.0, "env_steps": 200_704}


def test_nothing_is_given_but_what_is_halved_or_doubled():
    assert all(task.run.algorithm.algorithm_config == {} for task in TASKS.values())
    given = [
        list(task.run.algorithm.algorithm_config.values())
        for task in near("x", TASKS["ppo-cartpole"], (64, 64)).values()
    ]
    numbers = [[5e-4], [2e-3], [16], [64], [32], [128]]
    assert given == [*numbers, [{"hidden_sizes": [32, 32]}], [{"hidden_sizes": [128, 128]}]]
    assert all(len(tasks) == 8 for tasks in NEAR.values())


def test_tables_tell_how_many_seeds_reached_what_was_asked():
    rows = [row("ppo-cartpole", seed, 500.0 - seed, passed=seed != 3) for seed in range(5)]
    line = "| CartPole | PPO | 200,704 | ≥ 475 | 500.0, 499.0, 498.0, 497.0, 496.0 | 4 of 5 | 2.0 |"
    assert report(rows).splitlines()[2:] == [line]
    (found,) = report_near([row("ppo-cartpole-lr-half", 100, 480.0)]).splitlines()[2:]
    assert found.startswith("| PPO, CartPole | 480.0 | not measured |")
    assert found.endswith("| 1 of 8 |")


def test_rows_that_other_defaults_made_are_left_out(tmp_path, capsys):
    for seed in (100, 101):
        keep(file_of("PPO", tmp_path), row("ppo-cartpole", seed, 500.0))
    assert [each["seed"] for each in all_rows(tmp_path)] == [100, 101]
    document = json.loads(file_of("PPO", tmp_path).read_text())
    assert document["tasks"]["ppo-cartpole"]["config"]["gamma"] == ALL["ppo-cartpole"].run.algorithm.make_config().gamma
    document["tasks"]["ppo-cartpole"]["config"]["gamma"] = 0.5
    file_of("PPO", tmp_path).write_text(json.dumps(document))
    assert all_rows(tmp_path) == []
    assert "ppo-cartpole: measured with other defaults" in capsys.readouterr().out
    keep(file_of("PPO", tmp_path), row("ppo-cartpole", 102, 500.0))
    assert [each["seed"] for each in all_rows(tmp_path)] == [102]


@pytest.mark.parametrize("name", [*TASKS])
def test_every_task_can_be_described(name):
    assert json.loads(json.dumps(ALL[name].described))["config"]["num_envs"] > 0
