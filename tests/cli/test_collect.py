"""`rl8x collect`: what a hand loop would have recorded, and one line for what cannot be."""

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Dict, Discrete, Tuple

from rl8x.algorithms import DQNConfig
from rl8x.cli.collect import record
from rl8x.cli.main import main
from rl8x.envs import CartPole, Env, Pendulum, Spread
from rl8x.policy import Policy
from rl8x.replay.dataset import Dataset
from rl8x.replay.minari_format import write_minari

SMALL = ["--num-envs", "4", "--horizon", "4", "--no-tracking", "--device", "cpu", "--progress", "none"]


class Counting(Env):
    """Observes its own steps, rewards the action, terminates after 3 steps where it was even; else at 5 truncates."""

    single_observation_space = Box(0.0, np.inf, (2,), dtype=np.float32)
    single_action_space = Discrete(2)
    default_time_limit = 5
    reset_noise = 1
    terminates = True

    def initial_state(self, parameters, noise):
        return {"x": torch.stack([torch.zeros(self.num_envs), (noise[:, 0] < 0.5).float()], 1)}

    def transition(self, state, actions, parameters, noise):
        x = state["x"] + torch.tensor([1.0, 0.0])
        return {"x": x}, actions.float(), (x[:, 0] == 3) & (x[:, 1] == 0)

    def observe(self, state, parameters):
        return state["x"]


def policy_for(env):
    torch.manual_seed(0)
    return Policy(env.single_observation_space, env.single_action_space, model_config={"hidden_sizes": [8]})


@pytest.mark.parametrize("transitions", [1, 2, 3, 40, 41])
def test_it_records_what_a_hand_loop_does(transitions):
    env, other = Counting(3, seed=1), Counting(3, seed=2)
    policy = policy_for(env)
    found = record(policy, env, transitions, seed=7)
    generator = torch.Generator().manual_seed(7)
    obs, _ = other.reset(seed=7)
    copies, returns, sums = [[], [], []], [[], [], []], [0.0] * 3
    for i in range(-(-transitions // 3)):
        noise = policy.noise(1, 3, generator)[0]
        act = policy.act(obs, {}, torch.zeros(3, dtype=torch.bool), noise)
        after, rewards, terminated, truncated, info = other.step(act.actions)
        for c in range(3):
            if 3 * i + c < transitions:
                row = (obs[c], act.actions[c], rewards[c], terminated[c], truncated[c], info["final_obs"][c])
                copies[c].append([each.tolist() for each in row])
            sums[c] += rewards[c].item()
            if terminated[c] or truncated[c]:
                if 3 * i + c < transitions:
                    returns[c].append(sums[c])
                sums[c] = 0.0
        obs = after
    for rows in filter(None, copies):
        rows[-1][4] = rows[-1][4] or not rows[-1][3]  # cut there
    rows = [row for copy in copies for row in copy]
    names = ("obs", "actions", "rewards", "terminated", "truncated", "next_obs")
    for i, name in enumerate(names):
        assert found.dataset.transitions[name].tolist() == [row[i] for row in rows]
    assert found.returns.tolist() == [each for copy in returns for each in copy]
    assert found.dataset.size == transitions
    if transitions > 30:
        kinds = set(zip(*(found.dataset.transitions[name].tolist() for name in names[3:5]), strict=True))
        assert kinds == {(False, False), (True, False), (False, True)}


@pytest.mark.parametrize(
    ("options", "share"),
    [
        ({}, 1 / (1 + np.exp(-0.5))),
        ({"deterministic": True}, 1.0),
        ({"deterministic": True, "epsilon": 0.4}, 0.8),
        ({"epsilon": 1.0}, 0.5),
    ],
)
def test_deterministic_actions_are_the_most_likely_and_a_share_is_random(options, share):
    env = CartPole(8, seed=1)
    policy = policy_for(env)
    with torch.no_grad():
        policy.model.policy_head.weight.zero_()
        policy.model.policy_head.bias.copy_(torch.tensor([0.0, 0.5]))
    found = record(policy, env, 4000, seed=3, **options).dataset.transitions["actions"].float().mean().item()
    assert abs(found - share) <= 4 * np.sqrt(share * (1 - share) / 4000)


def test_returns_of_several_agents_are_those_of_the_team():
    recorded = record(None, Spread(4, num_agents=3, seed=0, time_limit=10, team_return="sum"), 4 * 3 * 20)
    rewards = recorded.dataset.transitions["rewards"].view(3, 4, 2, 10)  # agents, copies, episodes, steps
    torch.testing.assert_close(recorded.returns.view(2, 4).mT, rewards.sum((0, 3)))


def test_actions_are_those_that_the_environment_gets():
    env = Pendulum(4, seed=1)
    policy = policy_for(env)
    with torch.no_grad():
        policy.distribution.log_std.fill_(2.0)
    actions = record(policy, env, 200).dataset.transitions["actions"]
    assert actions.abs().max().item() == 2.0
    assert (actions.abs() == 2.0).float().mean() > 0.3


class Masked(Counting):
    single_observation_space = Dict({"x": Box(0.0, np.inf, (2,)), "action_mask": Box(0, 1, (2,), dtype=np.int8)})

    def observe(self, state, parameters):
        legal = torch.tensor([1, 0], dtype=torch.int8).expand(self.num_envs, 2)
        return {"x": state["x"], "action_mask": legal}


def test_random_actions_are_legal():
    env = Masked(3, seed=1)
    rows = record(policy_for(env), env, 60, epsilon=1.0).dataset.transitions
    assert rows["actions"].unique().tolist() == [0]
    assert {"obs/x", "obs/action_mask", "next_obs/x"} <= rows.keys()


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = ["train", "CartPole", *SMALL, "--max-steps", "2", "checkpoints.directory=runs"]
    assert main([*words, "model_config.hidden_sizes=[8]", "--eval-env", "false"]) == 0
    return "runs"


def test_a_data_set_of_a_run_is_learned_from(run, capsys):
    assert main(["collect", run, "--transitions", "1e2", "--output", "deep/data", "--num-envs", "4"]) == 0
    assert "deep/data: 100 transitions" in capsys.readouterr().out
    data = Dataset.load("deep/data")
    assert data.size == 100
    assert data.observation_space == CartPole(1).single_observation_space
    algorithm = DQNConfig(dataset="deep/data", device="cpu", seed=1, batch_size=4, updates_per_step=2).build()
    assert "losses/q" in algorithm.step()
    # The weights of the checkpoint act: the same transitions again by hand.
    from rl8x.trainers import Trainer

    policy = Trainer.resume(run).algorithm.policy
    again = record(policy, CartPole(4, seed=0), 100, seed=0).dataset
    assert again.digest == data.digest
    assert main(["collect", run, "--transitions", "100"]) == 0
    assert Dataset.load("datasets/runs-100").size == 100


def test_random_actions_of_an_environment_need_no_run(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    words = ["--random", "--transitions", "60", "--num-envs", "4", "--seed", "3"]
    assert main(["collect", "CartPole", *words, "env_config.length=0.4"]) == 0
    assert "length = 0.4\nwrote       datasets/CartPole-60: 60 transitions" in capsys.readouterr().out
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
        assert main(["collect", name, *words, "--seed", str(2**63 - 1)]) == 0
        assert Dataset.load(f"datasets/{name}-60").size == 60
    capsys.readouterr()
    assert main(["collect", "CartPol", *words]) == 2
    assert "there is no run 'CartPol'" in capsys.readouterr().err


def test_it_acts_under_the_env_config_of_the_training(run, capsys):
    trained = {"length": {"uniform": [0.2, 0.3]}, "gravity": 12.0}
    words = ["train", "CartPole", *SMALL, "--max-steps", "1", "checkpoints.directory=other", "--eval-env", "false"]
    assert main([*words, "model_config.hidden_sizes=[8]", f"env_config={trained}"]) == 0
    from rl8x.trainers import Trainer

    policy = Trainer.resume("other").algorithm.policy
    for i, (extra, config, says) in enumerate(
        (
            ([], trained, "gravity = 12.0, length = Uniform(0.2, 0.3), as in the training"),
            (["env_config.gravity=5"], {**trained, "gravity": 5.0}, "gravity = 5.0, length = Uniform(0.2, 0.3)\n"),
            (["env_config={}"], {}, "the defaults\n"),
            (["--env", "CartPole"], {}, "the defaults\n"),
        )
    ):
        capsys.readouterr()
        assert main(["collect", "other", *extra, "--transitions", "60", "--output", f"data{i}", "--num-envs", "3"]) == 0
        assert f"env_config  {says}" in capsys.readouterr().out
        expected = record(policy, CartPole(3, seed=0), 60, seed=0, env_config=config).dataset
        assert Dataset.load(f"data{i}").digest == expected.digest
    assert main(["collect", run, "--transitions", "5", "--output", "defaults"]) == 0
    assert "env_config  the defaults, as in the training" in capsys.readouterr().out


@pytest.fixture
def minari(tmp_path, monkeypatch):
    """The package Minari, with a folder of data sets of its own."""
    pytest.importorskip("h5py", reason="h5py is not installed, which Minari writes with")
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path / "minari"))
    return pytest.importorskip("minari", reason="Minari is not installed, whose format is written")


def test_minaris_format_is_read_by_minari(run, minari, capsys):
    words = ["collect", run, "--transitions", "100", "--num-envs", "4"]
    assert main([*words, "--output", "plain"]) == 0
    assert main([*words, "--format", "minari", "--output", "cartpole/new-v0"]) == 0
    assert "cartpole/new-v0: 100 transitions" in capsys.readouterr().out
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
    assert main([*words, "--format", "minari"]) == 0
    assert "rl8x/runs-100-v0" in minari.list_local_datasets()
    capsys.readouterr()
    assert main([*words, "--format", "minari", "--output", "cartpole/new-v0"]) == 2
    assert "Minari has 'cartpole/new-v0' already" in capsys.readouterr().err


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

    env = Counting(2, seed=1)
    dataset = record(policy_for(env), env, 10).dataset
    monkeypatch.setattr(MinariStorage, "new", fails)
    with pytest.raises(ValueError, match="Minari cannot store these spaces: no such space"):
        write_minari("ours/data-v0", dataset, algorithm_name="none")
    assert not [*tmp_path.rglob("*.*")]
