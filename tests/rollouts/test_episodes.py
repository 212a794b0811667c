"""Episodes that are played to be looked at are those of a loop by hand."""

from __future__ import annotations

import pytest
import torch

from rl8x.envs import AlgoTrading, CartPole, MountainCar, Pendulum
from rl8x.policy import Policy
from rl8x.rollouts.episodes import play_episodes
from rl8x.trees import tree_map


def policy_for(env, **options):
    torch.manual_seed(0)
    options = {"model_config": {"hidden_sizes": [8]}} | options
    policy = Policy(env.single_observation_space, env.single_action_space, normalize_observations=True, **options)
    obs, _ = env.reset(seed=9)
    policy.observe(tree_map(lambda part: part.unsqueeze(0), obs))  # so that normalising changes something
    return policy


def by_hand(policy, env, config, steps, seed, deterministic=True):
    """Returns, lengths and the physics before each reset of each copy's first episode, by `Env.step`."""
    generator = torch.Generator().manual_seed(seed)
    obs, _ = env.reset(seed=seed, config=config)
    state, starts = policy.initial_state(env.num_envs), torch.ones(env.num_envs, dtype=torch.bool)
    sums, counts = [0.0] * env.num_envs, [0] * env.num_envs
    running = set(range(env.num_envs))
    with torch.no_grad():
        for _ in range(steps):
            noise = None if deterministic else policy.noise(1, env.num_envs, generator)[0]
            act = policy.act(obs, state, starts, noise)
            obs, rewards, terminated, truncated, _ = env.step(policy.env_actions(act.actions))
            state, starts = act.state, terminated | truncated
            for copy in running:
                sums[copy] += rewards[copy].item()
                counts[copy] += 1
            running -= set(starts.nonzero()[:, 0].tolist())
            if not running:
                break
    return sums, counts, running


CASES = {
    "memory": (CartPole, {"model": "gru", "model_config": {"hidden_size": 8}}, {"length": [0.2, 0.5, 1.0]}),
    "masks": (AlgoTrading, {}, {"fee": 0.01}),
    "clipped actions": (Pendulum, {}, None),
    "attention": (CartPole, {"model": "attention", "model_config": {}}, None),
}


@pytest.mark.parametrize(("case", "deterministic"), [(name, flag) for name in CASES for flag in (True, False)][:-1])
def test_returns_and_lengths_are_those_of_a_loop_by_hand(case, deterministic):
    env_class, options, config = CASES[case]
    env = env_class(3)
    policy = policy_for(env, **options)
    moments = list(play_episodes(policy, env, env_config=config, seed=5, deterministic=deterministic, max_steps=40))
    sums, counts, running = by_hand(policy, env_class(3), config, 40, 5, deterministic)
    last = moments[-1]
    assert last.returns.tolist() == pytest.approx(sums, rel=1e-5)
    assert last.lengths.tolist() == counts
    assert set(last.running.nonzero()[0].tolist()) == running
    assert moments[0].lengths.tolist() == [0, 0, 0]
    assert len(moments) == max(counts) + 1


def test_the_state_at_an_episodes_end_is_that_before_the_reset():
    env = CartPole(4)
    moments = list(play_episodes(policy_for(env), env, seed=1))
    for copy in range(4):
        end = next(t for t, moment in enumerate(moments) if not moment.running[copy])
        physics = moments[end].state["physics"][copy]
        assert abs(physics[0]) > 2.4 or abs(physics[2]) > 0.2094
        before = moments[end - 1].state["physics"][copy]
        assert abs(before[0]) <= 2.4
        assert abs(before[2]) <= 0.2095
        assert moments[end].lengths[copy] == end
    env = MountainCar(1, time_limit=7)
    moments = list(play_episodes(policy_for(env), env, seed=3))
    assert [moment.running[0] for moment in moments] == [True] * 7 + [False]
    assert moments[-1].state["position"][0] != env.carry["state"]["position"][0]  # the next episode has begun there


def test_what_never_ends_is_stopped_and_what_is_not_counted_not_waited_for():
    env = AlgoTrading(2)
    assert len(list(play_episodes(policy_for(env), env))) == 201
    env = CartPole(8)
    all_of, first = (list(play_episodes(policy_for(env), env, seed=1, awaited=awaited)) for awaited in (None, 1))
    assert len(first) == all_of[-1].lengths[0] + 1
    assert len(all_of) == all_of[-1].lengths.max() + 1 > len(first)
