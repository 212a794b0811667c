"""`rl8x tuned` and `--tuned`: a table, a run file, and a run with what is typed after it."""

import json
import re
import statistics
import warnings

import pytest

import rl8x
from rl8x.config import RunSpec
from rl8x.config.tuned import SETTINGS, tuned_file, tuned_files

NAMES = [(task, algorithm) for task, algorithms in tuned_files().items() for algorithm in algorithms]


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
    for (task, algorithm), (transitions, returned, seconds) in cells.items():
        result = measured.get(f"{task}-{algorithm.lower()}")
        if result is None:
            assert (returned, seconds) == ("not measured", "not measured")
        else:
            assert transitions == f"{result['transitions']:,}"
            assert float(returned.split()[0]) == pytest.approx(statistics.median(result["returns"]), abs=0.05)
