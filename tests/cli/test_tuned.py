"""`rl8x tuned` and `--tuned`: a table, a run file, and a run with what is typed after it."""

import json
import re
import statistics
import warnings

import pytest

import rl8x
from rl8x.cli.main import main
from rl8x.config import RunSpec
from rl8x.config.tuned import SETTINGS, tuned_file, tuned_files

NAMES = [(task, algorithm) for task, algorithms in tuned_files().items() for algorithm in algorithms]


def dry(words, capsys, tmp_path, code=0):
    """Return the run that a command line describes, or the line that it ends with."""
    assert main(["train", *words, "--dry-run"]) == code
    captured = capsys.readouterr()
    if code:
        assert captured.out == ""
        return captured.err
    (tmp_path / "run.yaml").write_text(captured.out)
    return RunSpec.from_file(tmp_path / "run.yaml")


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


def test_a_number_is_what_a_rate_that_adapts_begins_with(mlruns, capsys, tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text("env: CartPole\nalgorithm_config: {lr: 1e-3, lr_schedule: {kind: adaptive, kl: 0.02}}\n")
    run = dry(["-f", str(file), "--lr", "5e-4"], capsys, tmp_path)
    assert run.algorithm.algorithm_config == {"lr": 5e-4, "lr_schedule": {"kind": "adaptive", "kl": 0.02}}


def test_the_table_has_what_was_measured_and_says_what_was_not(capsys):
    measured = json.loads((SETTINGS / "measured.json").read_text())
    assert main(["tuned"]) == 0
    header, *lines = capsys.readouterr().out.partition("\n\n")[0].splitlines()
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
