"""Runs are found by whatever they are called, by every command: names as MLflow has them, read by its own client."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

import rl8x
from rl8x.checkpoint import CheckpointError, find
from rl8x.cli.main import main
from rl8x.studies.compare import compare
from rl8x.studies.report import find_study
from rl8x.tracking import find_run

SMALL = ["--num-envs", "4", "--horizon", "8", "--device", "cpu", "--seed", "1", "--max-steps", "1"]
SMALL += ["algorithm_config.model_config.hidden_sizes=[8]", "--execution", "eager"]
NAMES = [
    "ppo/seed0",
    "/ppo/seed0",
    "ppo//seed0/",
    "../seed0",
    "..",
    ".hidden",
    "a folder",
    "a folder/of mine",
    "mlruns",
    "it's",
    'say "hi"',
    """both ' and \"""",
    "end\\",
    "100%_x%20y",
    "Łódź/√2",
    "lr=0.1",
    "0123456789abcdef0123456789abcdef",
    "run.safetensors",
    "x" * 300,
]


@pytest.fixture
def trained(mlruns, mlflow_client):
    """A run, by its ID, and what gives it another name."""
    assert main(["train", "CartPole", *SMALL, "--progress", "none"]) == 0
    (run,) = mlflow_client.search_runs([each.experiment_id for each in mlflow_client.search_experiments()])
    return run.info.run_id, lambda name: mlflow_client.update_run(run.info.run_id, name=name)


def test_a_run_of_any_name_is_found_by_it(trained, tmp_path, mlflow_client):
    run_id, rename = trained
    (tmp_path / "a folder/of mine").mkdir(parents=True)
    (folder,) = (tmp_path / "mlruns/checkpoints").iterdir()
    for name in NAMES:
        rename(name)
        assert mlflow_client.get_run(run_id).info.run_name == name
        assert find(name).path.parent == folder, name
        assert find_run(name).info.run_id == run_id
        assert [run.id for run in compare(name).runs] == [run_id], name
        with pytest.raises(ValueError, match=r"has no artifact evaluations\.json"):  # it is found, and no study
            find_study(name)


@pytest.mark.parametrize("name", ["ppo/seed0", "a folder"])
def test_every_command_finds_it(name, trained, tmp_path, capsys):
    _, rename = trained
    (tmp_path / "a folder").mkdir()
    rename(name)
    assert type(rl8x.load_algorithm(name)).__name__ == "PPO"
    for words in (
        ["resume", name, "--max-steps", "2", "--progress", "none"],
        ["train", "CartPole", *SMALL, "--max-steps", "3", "--resume", name, "--progress", "none"],
        ["export", name],
        ["play", name, "--max-steps", "3"],
        ["collect", name, "--transitions", "8", "--output", "data"],
        ["compare", name],
        ["train", "CartPole", *SMALL, "--algorithm", "distillation", "--teacher", name, "--progress", "none"],
    ):
        assert main(words) == 0, (words, capsys.readouterr().err)
    capsys.readouterr()
    assert main(["report", name]) == 2
    assert "it is no study's parent run" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["ppo/seed0", "it's", "a b/c", "-x"])
def test_the_last_lines_name_it_as_it_is_typed(name, mlruns, capsys):
    assert main(["train", "CartPole", *SMALL, f"run_name={name}", "--progress", "none"]) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "to continue" in line]
    words = shlex.split(line.split(": rl8x ")[1].split(",")[0])
    assert (words[1] == name) == (name != "-x")  # which would be an option: its ID
    assert main([*("2" if word == "N" else word for word in words), "--progress", "none"]) == 0


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("nothing", "there is no run 'nothing' in "),
        ("no/such", "there is no checkpoint no/such, and there is no run 'no/such' in "),
        ("here", "there is no checkpoint in here, and there is no run 'here' in "),
        (Path("here"), "there is no checkpoint in here, and "),
    ],
)
def test_what_is_neither_a_path_nor_a_name_is_said(source, says, mlruns):
    Path("here").mkdir()
    with pytest.raises(CheckpointError, match=says):
        find(source)
