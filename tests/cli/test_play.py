"""`rl8x play`: what the policy of a checkpoint does, filmed or in numbers, and one line for what cannot be."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from PIL import Image

from rl8x.checkpoint import load_algorithm
from rl8x.cli.main import main
from rl8x.envs import CartPole
from rl8x.rollouts.episodes import play_episodes

DATA = ["--no-tracking", "--device", "cpu", "--progress", "none", "--max-steps", "1"]
TRAINED = {"gravity": 12.0, "length": {"uniform": [0.2, 0.3]}}
SMALL = ["--num-envs", "4", "--horizon", "4", "--no-tracking", "--device", "cpu", "--progress", "none"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Runs of CartPole, of CartPole with a memory and random physics, and of a market with masks."""
    folder = tmp_path_factory.mktemp("play")
    plain = ["model_config.hidden_sizes=[8]"]
    memory = ["model=gru", "model_config.hidden_size=8", "seq_len=2", f"env_config={json.dumps(TRAINED)}"]
    runs = {"runs": ["CartPole", *plain], "memory": ["CartPole", *memory], "trading": ["AlgoTrading", *plain]}
    for name, words in runs.items():
        fixed = ["--max-steps", "1", "--eval-env", "false", f"checkpoints.directory={folder / name}", "seed=1"]
        assert main(["train", *words, *SMALL, *fixed]) == 0
    return folder


@pytest.fixture
def here(folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return folder


def played(run, env, **options):
    *_, last = play_episodes(load_algorithm(run).policy, env, **options)
    return last


def test_masks_and_tasks_that_never_end_are_filmed(here, call):
    out = call("play", here / "trading", "--max-steps", "4", "--copies", "2", "--output", "a.gif")
    assert Image.open("a.gif").n_frames >= 4
    assert "2 episodes of 2 had not ended" in out


@pytest.mark.parametrize("words", [[], ["--sample"]])
def test_without_a_file_the_returns_are_printed(words, here, call):
    out = call("play", here / "runs", "--episodes", "3", *words)
    returns = played(here / "runs", CartPole(3, seed=0), env_config={}, deterministic=not words).returns
    shown = ", ".join(f"{value:.4g}" for value in returns)
    assert out.splitlines() == [
        "env_config  the defaults, as in the training",
        f"returns     {shown}, mean {returns.mean():.4g}; {returns.mean():.4g} steps on average",
    ]
    assert list(Path().iterdir()) == []


def test_it_plays_under_the_env_config_of_the_training_or_another(here, call):
    for words, shown, config in (
        ([], "gravity = 12.0, length = Uniform(0.2, 0.3), as in the training", TRAINED),
        (["env_config.length=0.7"], "gravity = 12.0, length = 0.7\n", {"gravity": 12.0, "length": 0.7}),
        (["--env-config", "{length: 0.7}"], "length = 0.7\n", {"length": 0.7}),
        (["--env-config", "{}"], "the defaults\n", {}),
        (["--env", "CartPole"], "the defaults\n", {}),
    ):
        out = call("play", here / "memory", "--episodes", "2", *words)
        assert f"env_config  {shown}" in out
        returns = played(here / "memory", CartPole(2, seed=0), env_config=config).returns
        assert f"returns     {returns[0]:.4g}, {returns[1]:.4g}, mean" in out


def test_a_grid_is_one_picture_and_a_row_of_the_table_for_each_copy(here, call):
    words = ["--grid", "length=0.25,0.5,1", "--grid", "force_mag=5,20", "--output", "deep/grid.gif", "--max-steps", "6"]
    lines = call("play", here / "runs", *words).splitlines()
    assert [line.split()[1:3] for line in lines[2:8]] == [
        ["0.25", "5"], ["0.5", "5"], ["1", "5"], ["0.25", "20"], ["0.5", "20"], ["1", "20"],
    ]  # fmt: skip
    assert lines[8] == "6 episodes of 6 had not ended: see --max-steps"
    assert lines[9].startswith("wrote       deep/grid.gif: ")
    image = Image.open("deep/grid.gif")
    assert image.size == (958, 2 * (209 + 40) + 8)
    config = {"length": [0.25, 0.5, 1.0] * 2, "force_mag": [5.0] * 3 + [20.0] * 3}
    last = played(here / "runs", CartPole(6, seed=0), env_config=config, max_steps=6)
    assert [float(line.split()[3]) for line in lines[2:8]] == last.returns.tolist()


class Noting(CartPole):
    """Notes whether the copies that were made are closed."""

    open = 0

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        Noting.open += 1

    def close_extras(self, **kwargs):
        Noting.open -= 1


@pytest.mark.parametrize("words", [["play"], ["play", "--output", "a.gif"], ["collect", "--transitions", "20"]])
@pytest.mark.parametrize("fault", [None, KeyboardInterrupt, ValueError, "lenght"])
def test_environments_are_closed_whatever_happens(here, monkeypatch, capsys, words, fault):
    monkeypatch.setattr("rl8x.cli.act.env_maker", lambda *_, **__: Noting)
    monkeypatch.setattr(Noting, "open", 0)

    def broken(*_, **__):
        raise fault("mine")

    if isinstance(fault, type):
        monkeypatch.setattr(Noting, "advance", broken)
    words = [words[0], str(here / "runs"), "--env", "Noting", *words[1:]]
    if fault is ValueError:  # of the environment's own code: a bug, not a mistake on the command line
        with pytest.raises(ValueError, match="mine"):
            main(words)
    else:
        words += ["env_config.lenght=1"] if fault == "lenght" else []
        assert main(words) == {None: 0, KeyboardInterrupt: 130, "lenght": 2}[fault]
        assert capsys.readouterr().err.endswith("rl8x: interrupted\n") == (fault is KeyboardInterrupt)
    assert Noting.open == 0


@pytest.mark.parametrize("command", [["play", "--episodes", "1"], ["collect", "--transitions", "20"]])
def test_a_run_that_learned_from_data_acts_where_it_evaluated(here, call, command):
    name, *words = command
    options = ["--algorithm", "bc", "--dataset", "data", "--batch-size", "4", "--updates-per-step", "1", *DATA]
    call("collect", here / "runs", "--transitions", "20", "--output", "data")
    config = ["eval_env_config={length: 0.3}", "--steps-per-eval", "1", "--num-eval-envs", "1"]
    call("train", *options, "--eval-env", "CartPole", *config, "checkpoints.directory=run")
    assert "env_config  length = 0.3, as in the run's evaluations" in call(name, "run", *words)
