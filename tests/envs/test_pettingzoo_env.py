"""PettingZoo's parallel environments, against a plain Python loop over them."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import torch

from rl8x import PPOConfig, keys
from rl8x.envs import PettingZooEnv, validate

pytest.importorskip("pettingzoo", reason="pettingzoo is not installed: pip install 'rl8x[pettingzoo]'")

from pettingzoo.test import parallel_api_test
from tests.envs import team_stubs
from tests.envs.team_stubs import LAST, Shift

SMALL = {"horizon": 16, "seed": 0, "device": "cpu", "model_config": {"hidden_sizes": [8]}}


def of_mpe2(name, **kwargs):
    package = pytest.importorskip(f"mpe2.{name}", reason="mpe2 is not installed: pip install mpe2")
    return package.parallel_env(**kwargs)


spread, reference = (functools.partial(of_mpe2, name) for name in ("simple_spread_v3", "simple_reference_v3"))


class Turned(Shift):
    """Names its agents in another order, as those who make a list of a set do in each process."""

    possible_agents = ["last", "first", "full"]  # noqa: RUF012


CASES = {
    "agents in another order": (Turned, {}, 40),
    "agents that end early and come late": (Shift, {}, 40),
    "nobody comes for a step": (Shift, {"early": 1, "late": 1}, 20),
    "a mask": (functools.partial(Shift, masked=True), {}, 20),
    "simple_spread": (spread, {"N": 3, "max_cycles": 7}, 20),
    "simple_reference": (reference, {"max_cycles": 7, "continuous_actions": True}, 20),
}


def leaf(obs):
    return obs["observation"] if isinstance(obs, dict) else obs


@pytest.mark.parametrize("name", CASES)
def test_rows_are_those_of_a_loop_over_the_environment(name):
    make, kwargs, steps = CASES[name]
    single = make(**kwargs)
    parallel_api_test(single, num_cycles=40)
    env, copies = PettingZooEnv(make, 2, seed=5, **kwargs), [make(**kwargs) for _ in range(2)]
    validate(env)
    agents = sorted(copies[0].possible_agents)
    assert (env.num_envs, env.num_copies, env.team.names) == (2 * len(agents), 2, tuple(agents))
    obs, _ = env.reset()
    seen = [copy.reset(seed=5 + i)[0] for i, copy in enumerate(copies)]
    seen = [{a: seen[i][a] for a in copy.agents} for i, copy in enumerate(copies)]
    env.action_space.seed(0)
    returns, lengths = np.zeros(env.num_envs), [0, 0]
    carry, ends = env.carry, [0, 0, 0]
    for _ in range(steps):
        actions = env.action_space.sample()
        if isinstance(obs, dict):
            actions = obs["action_mask"].numpy().argmax(1)
        carry, step = env.advance(carry, torch.as_tensor(actions), env.noise(1)[0])
        for i, copy in enumerate(copies):
            acting, lengths[i] = list(copy.agents), lengths[i] + 1
            chosen = {a: actions[agents.index(a) * 2 + i] for a in acting}
            for a in acting:
                np.testing.assert_allclose(leaf(obs)[agents.index(a) * 2 + i], leaf(seen[i][a]), rtol=1e-6)
            last, rewards, terminated, truncated, _ = copy.step(chosen)
            over = not copy.agents
            for a in agents:
                row = agents.index(a) * 2 + i
                assert bool(step.valid[row]) == (a in acting)
                assert bool(step.ended[row]) == over
                assert int(step.episode_lengths[row]) == lengths[i]
                if a in acting:
                    returns[row] += rewards[a]
                    assert float(step.rewards[row]) == pytest.approx(rewards[a], rel=1e-5)
                    assert bool(step.terminated[row]) == bool(terminated[a])
                    assert bool(step.truncated[row]) == bool(truncated[a])
                    np.testing.assert_allclose(leaf(step.final_obs)[row], leaf(last[a]), rtol=1e-6)
                    ends[0] += bool(terminated[a]) and not over
                    ends[1] += bool(truncated[a])
                else:
                    assert step.rewards[row] == 0.0
                    assert step.truncated[row]
                    ends[2] += a in copy.agents
                assert float(step.episode_returns[row]) == pytest.approx(returns[row], rel=1e-5)
                if over:
                    returns[row] = 0.0
            if over:
                last, _ = copy.reset()
                lengths[i] = 0
            seen[i] = {a: last[a] for a in copy.agents}
        obs = step.obs
    if name.startswith("agents"):
        assert ends[0] > 8
        assert ends[1] > 8
        assert ends[2] > 8
    env.close()


@pytest.mark.parametrize("separate", [False, True])
def test_each_agent_that_is_truncated_bootstraps_from_its_own_last_observation(separate):
    make, model = functools.partial(PettingZooEnv, Shift), {"hidden_sizes": [8], "separate": separate}
    algorithm = PPOConfig(num_envs=2, **SMALL | {"horizon": LAST, "model_config": model}).build(make)
    algorithm.collect()
    rollout, policy = algorithm.rollout, algorithm.policy
    last = rollout.horizon - 1
    drawn = rollout["obs"][0, 2:4, 2]
    truth = torch.tensor([[LAST, place, draw] for place in (0, 1, 2) for draw in drawn])
    expected = policy.values(truth, {}, torch.zeros(6, dtype=torch.bool))
    torch.testing.assert_close(rollout[keys.FINAL_VALUES][last, 2:], expected[2:])
    died = rollout[keys.TERMINATED][1, :2]
    assert died.all()
    assert not rollout[keys.FINAL_VALUES][1, :2].any()
    assert rollout[keys.VALID][:LAST, ::2].T.tolist() == [
        [True] * 2 + [False] * 4,
        [True] * LAST,
        [False] * 3 + [True] * 3,
    ]
    assert rollout[keys.STARTS][:LAST, 4].tolist() == [True, True, True, True, False, False]
    assert algorithm.counters["env/steps"] == 2 * (2 + 6 + 3)
    assert algorithm.counters["env/copy_steps"] == 2 * 6


@pytest.mark.parametrize(
    ("team_return", "expected"),
    [
        ("mean", lambda *own: sum(own) / 3),
        ("sum", lambda *own: sum(own)),
        ("min", min),
        ("max", max),
        (lambda returns: returns[:, 1] - returns[:, 0], lambda first, whole, last: whole - first),
        (functools.partial(torch.quantile, q=0.5, dim=1), lambda *own: sorted(own)[1]),
    ],
)
def test_returns_are_those_of_the_team(team_return, expected):
    make = functools.partial(PettingZooEnv, Shift, team_return=team_return, metrics={"score": "max"})
    algorithm = PPOConfig(num_envs=2, **SMALL | {"horizon": LAST}).build(make)
    stats, rollout = algorithm.collect(), algorithm.rollout
    own = (rollout[keys.REWARDS][:LAST] * rollout[keys.VALID][:LAST]).sum(0).view(3, 2)
    returns = [expected(*own[:, i].tolist()) for i in range(2)]
    figures = {"episodes/returns/mean": np.mean(returns), "episodes/returns/max": max(returns)}
    figures |= {"returns/min": min(returns), "episodes/ended": 2, "episodes/lengths/mean": LAST}
    figures["episodes/info/score/mean"] = (2 + LAST + LAST) / 3
    for name, mean in zip(Shift.possible_agents, own.mean(1), strict=True):
        figures[f"episodes/agents/{name}/returns/mean"] = float(mean)
    assert {name: stats[name] for name in figures} == pytest.approx(figures)


def test_first_episodes_that_were_shortened_do_not_count():
    make, given = functools.partial(PettingZooEnv, Shift, time_limit=4), SMALL | {"horizon": 4}
    algorithm = PPOConfig(num_envs=12, random_start=True, **given).build(make)
    row = algorithm.collect()
    whole = int((algorithm.rollout[keys.EPISODE_LENGTHS][0, :12] == 1).sum())
    assert 0 < whole < 12
    assert row["episodes/ended"] == whole
    assert row["episodes/lengths/min"] == 4


def test_what_an_agent_sees():
    obs, _ = PettingZooEnv(Shift, 2, seed=1, agent_id=True).reset()
    assert obs["agent_id"].tolist() == [0, 0, 1, 1, 2, 2]
    env = PettingZooEnv(Shift, 2, seed=1, state="shared")
    obs, _ = env.reset()
    drawn = obs["obs"][:2, 2]
    assert env.single_observation_space.critic_only == ("state",)
    torch.testing.assert_close(obs["state"], torch.stack([torch.zeros(2), drawn], 1).repeat(3, 1))
    step = env.advance(env.carry, torch.zeros(6, dtype=torch.int64), env.noise(1)[0])[1]
    assert step.obs["state"][:, 0].tolist() == [1.0] * 6
    # Without a state of its own, the critic sees what all see.
    env = PettingZooEnv(Shift, 2, seed=1, state="shared", masked=True, with_state=False)
    obs, _ = env.reset()
    assert {name: list(part) for name, part in obs["state"].items()} == {n: ["observation"] for n in env.team.names}
    torch.testing.assert_close(obs["state"]["full"]["observation"], obs["observation"][2:4].repeat(3, 1))
    assert obs["action_mask"][4:].all()  # of who is not there any action is legal


def test_parameters_are_those_of_copies():
    env = PettingZooEnv(Shift, 2, seed=0, parameters={"bonus": "bonus"})
    env.reset(config={"bonus": [1.0, 5.0]})
    step = env.advance(env.carry, torch.zeros(6, dtype=torch.int64), env.noise(1)[0])[1]
    assert step.rewards.tolist() == [0.0, 0.0, 1.0, 5.0, 0.0, 0.0]
    assert env.carry["parameters"]["bonus"].tolist() == [1.0, 5.0] * 3
    env.reset(config={})
    step = env.advance(env.carry, torch.zeros(6, dtype=torch.int64), env.noise(1)[0])[1]
    assert step.rewards.tolist() == [0.0, 0.0, 10.0, 10.0, 0.0, 0.0]


def test_agents_that_act_in_turn_are_converted_where_that_is_possible():
    spread()
    made = [
        PettingZooEnv(f"mpe2.simple_spread_v3:{name}", 2, seed=3, N=2, max_cycles=5) for name in ("env", "parallel_env")
    ]
    torch.testing.assert_close(*[env.reset()[0] for env in made])
    for t in range(12):  # over two ends of episodes
        in_turn, at_once = (env.step(torch.full((4,), t % 5))[:4] for env in made)
        for one, other in zip(in_turn, at_once, strict=True):
            torch.testing.assert_close(one, other)


def test_what_an_environment_says_in_dicts_and_arrays_that_it_keeps_is_read_before_others_write_into_them():
    made = Shift, team_stubs.OneForAll
    fresh, kept = (PettingZooEnv(make, 2, seed=0, metrics=["score"], state="shared") for make in made)
    torch.testing.assert_close(fresh.reset()[0], kept.reset()[0], rtol=0, atol=0)
    carries = [env.carry for env in (fresh, kept)]
    for _ in range(2 * LAST):
        steps = []
        for i, env in enumerate((fresh, kept)):
            carries[i], step = env.advance(carries[i], torch.zeros(6, dtype=torch.int64), env.noise(1)[0])
            steps.append(step)
        for one, other in zip(*steps, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)
    assert steps[0].metrics["score"].tolist() == [2.0, 2.0, LAST, LAST, LAST, LAST]


@pytest.mark.parametrize(
    ("make", "options", "error", "message"),
    [
        (team_stubs.Unlike, {}, ValueError, r"observations of first are Box\(\[3\], float32\), of full Box\(\[2\]"),
        (team_stubs.Turns, {}, ValueError, r"agents act in turn, and its metadata do not say `is_parallelizable`"),
        (team_stubs.same, {}, ValueError, "make a new environment each time"),
        (dict, {}, TypeError, "must make a pettingzoo.ParallelEnv; it made dict"),
        (5, {}, TypeError, "must be a function that makes a parallel environment; got 5"),
        ("tests.envs.team_stubs", {}, ValueError, "looks like module:name"),
        ("no_such_module:Shift", {}, ValueError, "cannot import 'no_such_module.Shift'"),
        (Shift, {"team_return": "meam"}, ValueError, "one of 'mean', 'sum', .* got 'meam'. Did you mean 'mean'"),
        (Shift, {"team_return": lambda returns: returns.mean(0)}, ValueError, r"of \[2, 3\] it made \[3\]"),
        (Shift, {"state": "all"}, ValueError, "state must be 'shared' or None; got 'all'"),
        (Shift, {"agent_id": 1}, TypeError, "agent_id must be true or false; got 1"),
        (Shift, {"num_envs": 0}, ValueError, "num_envs must be at least 1; got 0"),
    ],
)
def test_what_is_refused(make, options, error, message):
    with pytest.raises(error, match=message) as raised:
        PettingZooEnv(make, **{"num_envs": 2, **options})
    assert "\n" not in str(raised.value)


def test_a_step_of_another_form_is_told():
    env = PettingZooEnv(team_stubs.Old, 1, seed=0)
    env.reset()
    with pytest.raises(ValueError, match=r"step\(\) of shift_v0 must return \(observations, rewards, terminations"):
        env.step(torch.zeros(3, dtype=torch.int64))
