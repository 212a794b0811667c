"""`rl8x play` and `collect`: what the policy of a checkpoint does, filmed, in numbers, or as a data set."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Dict, Discrete, Tuple
from PIL import Image

from rl8x.algorithms import DQNConfig
from rl8x.checkpoint import load_algorithm, load_policy
from rl8x.cli.main import main
from rl8x.envs import CartPole
from rl8x.replay.dataset import Dataset
from rl8x.replay.recording import record, write_minari
from rl8x.rollouts.episodes import play_episodes

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
    assert lines[0] == "env_config  the defaults; of each copy length, force_mag"
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
    call("collect", here / "runs", "--transitions", "20", "--output", "data")
    learned = (
        "--algorithm bc --dataset data --batch-size 4 --updates-per-step 1 --max-steps 1 --no-tracking --device cpu"
    )
    evaluated = "--eval-env CartPole --steps-per-eval 1 --num-eval-envs 1 checkpoints.directory=run"
    call("train", *learned.split(), *evaluated.split(), "eval_env_config={length: 0.3}", "--progress", "none")
    assert "env_config  length = 0.3, as in the run's evaluations" in call(name, "run", *words)


@pytest.fixture
def run(here):
    return here / "runs"


# -- data sets


def test_a_data_set_of_a_run_is_learned_from(run, call):
    out = call("collect", run, "--transitions", "1e2", "--output", "deep/data", "--num-envs", "4")
    assert "deep/data: 100 transitions" in out
    data = Dataset.load("deep/data")
    assert data.size == 100
    assert data.observation_space == CartPole(1).single_observation_space
    algorithm = DQNConfig(dataset="deep/data", device="cpu", seed=1, batch_size=4, updates_per_step=2).build()
    assert "losses/q" in algorithm.step()
    # The weights of the checkpoint act: the same transitions again by hand.
    again = record(load_policy(run), CartPole(4, seed=0), 100, seed=0).dataset
    assert again.digest == data.digest


def test_a_data_set_is_named_after_the_whole_name_or_the_folder(mlruns, call, monkeypatch):
    for name in ("a/poles", "b/poles"):
        words = ["--tracking", "--run-name", name, "--max-steps", "1", "model_config.hidden_sizes=[8]"]
        call("train", "CartPole", *SMALL, *words, f"checkpoints.directory={name[0]}")
        call("collect", name, "--transitions", "20")
        assert Dataset.load(f"datasets/{name[0]}-poles-20").size == 20
    monkeypatch.chdir("a")
    call("collect", ".", "--transitions", "20")
    assert Dataset.load("datasets/a-20").size == 20


def test_random_actions_of_an_environment_need_no_run(tmp_path, monkeypatch, call):
    monkeypatch.chdir(tmp_path)
    words = ["--random", "--transitions", "60", "--num-envs", "4", "--seed", "3"]
    out = call("collect", "CartPole", *words, "env_config.length=0.4")
    assert "length = 0.4\nwrote       datasets/CartPole-60: 60 transitions" in out
    assert ": 1 transition, 0 whole episodes\n" in call("collect", "CartPole", "--random", "--transitions", "1")
    env = CartPole(4, seed=3)
    env.action_space.seed(3)
    env.reset(seed=3, config={"length": 0.4})
    actions, terminated = [], []
    for _ in range(15):
        actions.append(torch.as_tensor(env.action_space.sample()))
        terminated.append(env.step(actions[-1])[2])
    found = Dataset.load("datasets/CartPole-60").transitions
    assert found["actions"].equal(torch.stack(actions, 1).flatten())
    assert found["terminated"].equal(torch.stack(terminated, 1).flatten())
    Path("own_env.py").write_text("from rl8x.envs import Pendulum\n\n\nclass Mine(Pendulum):\n    pass\n")
    monkeypatch.setattr(sys, "path", [*sys.path])  # as where the command is a script of its own
    for name in ("CartPole-v1", "own_env.Mine"):
        call("collect", name, *words, "--seed", 2**63 - 1)
        assert Dataset.load(f"datasets/{name}-60").size == 60
    assert "there is no run 'CartPol'" in call("collect", "CartPol", *words, code=2)


@pytest.fixture
def minari(tmp_path, monkeypatch):
    """The package Minari, with a folder of data sets of its own."""
    pytest.importorskip("h5py", reason="h5py is not installed, which Minari writes with")
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path / "minari"))
    return pytest.importorskip("minari", reason="Minari is not installed, whose format is written")


def test_minaris_format_is_read_by_minari(run, minari, call):
    words = ["collect", run, "--transitions", "100", "--num-envs", "4"]
    call(*words, "--output", "plain")
    assert "cartpole/new-v0: 100 transitions" in call(*words, "--format", "minari", "--output", "cartpole/new-v0")
    ours, theirs = Dataset.load("plain"), minari.load_dataset("cartpole/new-v0")
    assert [*minari.list_local_datasets()] == ["cartpole/new-v0"]
    assert (theirs.total_steps, theirs.action_space) == (100, ours.action_space)
    ends = ours.transitions["terminated"] | ours.transitions["truncated"]
    assert theirs.total_episodes == int(ends.sum())
    first = next(iter(theirs.iterate_episodes()))
    assert len(first.observations) == len(first.rewards) + 1 == int(ends.nonzero()[0]) + 2
    read = Dataset.load("cartpole/new-v0")
    assert read.digest == ours.digest
    assert (read.observation_space, read.action_space) == (ours.observation_space, ours.action_space)
    call(*words, "--format", "minari")
    assert "rl8x/runs-100-v0" in minari.list_local_datasets()
    told = call(*words, "--format", "minari", "--output", "cartpole/new-v0", code=2)
    assert "Minari has 'cartpole/new-v0' already" in told


def test_trees_and_images_in_minaris_format_are_as_they_were(minari):
    image = Box(0, 255, (8, 8, 3), np.uint8)
    space = Dict({"camera": image, "pair": Tuple((Discrete(3), Box(-1.0, 1.0, (2,))))})
    obs = {"camera": torch.randint(256, (6, 8, 8, 3), dtype=torch.uint8), "pair": {"0": torch.arange(6) % 3}}
    obs["pair"]["1"] = torch.rand(6, 2)
    # Two episodes of two steps; the second is cut where the data end.
    rows = {"actions": torch.arange(4) % 2, "rewards": torch.arange(4.0), "truncated": torch.zeros(4)}
    rows["terminated"] = torch.tensor([False, True, False, False])
    rows |= {"obs": tree_rows(obs, [0, 1, 3, 4]), "next_obs": tree_rows(obs, [1, 2, 4, 5])}
    dataset = Dataset.from_tensors(rows, observation_space=space, action_space=Discrete(2))
    write_minari("a/b/trees-v1", dataset, algorithm_name="none")
    read = Dataset.load("a/b/trees-v1")
    dataset.transitions["truncated"][-1] = True
    assert read.digest == dataset.digest
    assert read.observation_space == space
    assert minari.load_dataset("a/b/trees-v1")[1].observations["pair"][1].tolist() == obs["pair"]["1"][3:].tolist()


def tree_rows(tree, index):
    return {name: tree_rows(part, index) if isinstance(part, dict) else part[index] for name, part in tree.items()}


def test_nothing_is_left_where_minari_fails(minari, tmp_path, monkeypatch):
    from minari.dataset.minari_storage import MinariStorage

    def fails(*arguments, **named):
        raise NotImplementedError("no such space")

    dataset = record(None, CartPole(2, seed=1), 10).dataset
    monkeypatch.setattr(MinariStorage, "new", fails)
    with pytest.raises(ValueError, match="Minari cannot store these spaces: no such space"):
        write_minari("ours/data-v0", dataset, algorithm_name="none")
    assert not [*tmp_path.rglob("*.*")]
