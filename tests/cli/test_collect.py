"""`rl8x collect`: what a hand loop would have recorded, and one line for what cannot be."""

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Dict, Discrete

from rl8x.algorithms import DQNConfig
from rl8x.cli.collect import record
from rl8x.cli.main import main
from rl8x.envs import CartPole, Env, Pendulum
from rl8x.policy import Policy
from rl8x.replay.dataset import Dataset

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
    copies, returns, sums = [[], [], []], [], [0.0] * 3
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
                returns.append(sums[c])
                sums[c] = 0.0
        obs = after
    for rows in filter(None, copies):
        rows[-1][4] = rows[-1][4] or not rows[-1][3]  # cut there
    rows = [row for copy in copies for row in copy]
    names = ("obs", "actions", "rewards", "terminated", "truncated", "next_obs")
    for i, name in enumerate(names):
        assert found.dataset.transitions[name].tolist() == [row[i] for row in rows]
    assert found.returns.tolist() == returns
    assert found.dataset.size == transitions
    if transitions > 30:
        kinds = set(zip(*(found.dataset.transitions[name].tolist() for name in names[3:5]), strict=True))
        assert kinds == {(False, False), (True, False), (False, True)}


def test_deterministic_actions_are_the_most_likely_and_a_share_is_random():
    env = CartPole(8, seed=1)
    policy = policy_for(env)
    with torch.no_grad():
        policy.model.policy_head.weight.zero_()
        policy.model.policy_head.bias.copy_(torch.tensor([0.0, 0.5]))
    shares = {
        name: record(policy, env, 4000, seed=3, **options).dataset.transitions["actions"].float().mean().item()
        for name, options in {
            "sampled": {},
            "deterministic": {"deterministic": True},
            "mixed": {"deterministic": True, "epsilon": 0.4},
            "random": {"epsilon": 1.0},
        }.items()
    }
    assert shares["deterministic"] == 1.0
    expected = {"sampled": 1 / (1 + np.exp(-0.5)), "mixed": 0.8, "random": 0.5}
    for name, share in expected.items():
        assert abs(shares[name] - share) < 4 * np.sqrt(share * (1 - share) / 4000), name


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


def test_what_cannot_be_recorded_is_one_line(run, capsys):
    for words, message in (
        ([run, "--transitions", "0"], "--transitions must be a whole number of at least 1; got '0'"),
        ([run, "--transitions", "many"], "got 'many'"),
        ([run, "--transitions", "nan"], "got 'nan'"),
        ([run], "Missing option '--transitions'"),
        (["nothing", "--transitions", "5"], "there is no run 'nothing'"),
        ([run, "--transitions", "5", "--output", run], "runs is there already: give another --output"),
        ([run, "--transitions", "5", "--output", "/proc/x"], "nothing can be written to /proc: "),
        ([run, "--transitions", "5", "--epsilon", "2"], "2.0 is not in the range"),
        ([run, "--transitions", "5", "--random", "--deterministic"], "--random leaves nothing for"),
        ([run, "--transitions", "5", "--env", "Pendulum"], "the policy was trained for other spaces"),
        ([run, "--transitions", "5", "--env", "CartPol"], "no built-in environment 'CartPol'. Did you mean"),
    ):
        capsys.readouterr()
        assert main(["collect", *words]) == 2, words
        error = capsys.readouterr().err
        assert message in error
        assert error.count("\n") == 1
