"""What is recorded of a policy: what a hand loop would have, of actions that the environment gets."""

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Dict
from tests.probes import Probe

from rl8x.envs import CartPole, Pendulum, Spread
from rl8x.policy import Policy
from rl8x.replay.recording import record
from rl8x.video import film


class Counting(Probe):
    """Observes its own steps, rewards the action, terminates after 3 steps where it was even; else at 5 truncates."""

    single_observation_space = Box(0.0, np.inf, (2,), dtype=np.float32)
    default_time_limit = 5
    terminates = True

    def initial_state(self, parameters, noise):
        return {"x": torch.stack([torch.zeros(self.num_envs), (noise[:, 0] < 0.5).float()], 1)}

    def transition(self, state, actions, parameters, noise):
        x = state["x"] + torch.tensor([1.0, 0.0])
        return {"x": x}, actions.float(), (x[:, 0] == 3) & (x[:, 1] == 0)


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
    fewer = record(None, Spread(4, num_agents=3, seed=0, time_limit=10, team_return="sum"), 4 * 3 * 10 - 1)
    assert torch.equal(fewer.returns, recorded.returns[:3])  # of the fourth copy an agent's last step is left out


def test_actions_are_those_that_the_environment_gets():
    env = Pendulum(4, seed=1)
    policy = policy_for(env)
    with torch.no_grad():
        policy.distribution.log_std.fill_(2.0)
    actions = record(policy, env, 200).dataset.transitions["actions"]
    assert actions.abs().max().item() == 2.0
    assert (actions.abs() == 2.0).float().mean() > 0.3


class Masked(Counting):
    """Never allows action 1."""

    single_observation_space = Dict({"x": Box(0.0, np.inf, (2,)), "action_mask": Box(0, 1, (2,), dtype=np.int8)})

    def observe(self, state, parameters):
        return {"x": state["x"], "action_mask": torch.tensor([1, 0], dtype=torch.int8).expand(self.num_envs, 2)}


def test_random_actions_are_legal():
    env = Masked(3, seed=1)
    rows = record(policy_for(env), env, 60, epsilon=1.0).dataset.transitions
    assert rows["actions"].unique().tolist() == [0]
    assert {"obs/x", "obs/action_mask", "next_obs/x"} <= rows.keys()


def test_a_policy_forgets_as_often_as_in_its_training(monkeypatch):
    env = Pendulum(2, seed=1)
    policy = Policy(env.single_observation_space, env.single_action_space, model="lstm")
    policy.state_reset_every = 3
    act, blank = policy.act, []

    def watched(obs, state, *rest):
        blank.append(not any(part.any() for part in state.values()))
        return act(obs, state, *rest)

    monkeypatch.setattr(policy, "act", watched)
    for act_in in (lambda: record(policy, env, 14), lambda: film(policy, env, max_steps=7)):
        blank.clear()
        act_in()
        assert blank == [True, False, False, True, False, False, True]
