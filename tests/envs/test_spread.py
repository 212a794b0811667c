"""`Spread` against mpe2's simple_spread, and what it is for: several agents in programs of tensors."""

from __future__ import annotations

import functools
import math
import warnings

import gymnasium.spaces as spaces
import numpy as np
import pytest
import torch

from rl8x import MemoryTracker, PPOConfig, Trainer
from rl8x.envs import Spread, make, validate
from rl8x.envs.team import Team
from rl8x.randomization import Adaptive
from rl8x.spaces import leaves
from rl8x.trees import flatten_tree
from rl8x.video import film

COPIES = 3


@pytest.mark.parametrize("agents", [1, 2, 3, 5])
def test_steps_equal_those_of_simple_spread(agents):
    mpe2 = pytest.importorskip("mpe2", reason="mpe2 is not installed: pip install mpe2")
    from mpe2 import simple_spread_v3

    assert mpe2
    env = make("Spread", COPIES, num_agents=agents, seed=1)
    validate(env)
    config = {"size": [0.15, 0.3, 0.05], "accel": 5.0, "damping": [0.25, 0.5, 0.25]}
    env.reset(config=config)
    with warnings.catch_warnings(action="ignore"):
        copies = [simple_spread_v3.parallel_env(N=agents) for _ in range(COPIES)]
    state = {name: value.view(agents, COPIES, 2).double().numpy() for name, value in env.carry["state"].items()}
    for i, copy in enumerate(copies):
        copy.reset(seed=0)
        world = copy.unwrapped.world
        world.damping = config["damping"][i]
        for j in range(agents):
            world.agents[j].size = config["size"][i]
            world.agents[j].state.p_pos = state["position"][j, i].copy()
            world.landmarks[j].state.p_pos = state["landmark"][j, i].copy()
    rng, bumps = np.random.default_rng(0), 0
    for t in range(25):
        actions = rng.integers(0, 5, (agents, COPIES))
        _, rewards, terminated, truncated, info = env.step(torch.as_tensor(actions.flatten()))
        assert not terminated.any()
        assert bool(truncated.all()) == (t == 24)
        for i, copy in enumerate(copies):
            seen, expected, _, ended, _ = copy.step({f"agent_{j}": actions[j, i] for j in range(agents)})
            for j in range(agents):
                row, name = j * COPIES + i, f"agent_{j}"
                own = seen[name][: 4 * agents + 2]
                np.testing.assert_allclose(info["final_obs"][row], own, rtol=1e-3, atol=1e-4)
                assert float(rewards[row]) == pytest.approx(expected[name], rel=1e-3, abs=1e-4)
                assert bool(truncated[row]) == ended[name]
            _, _, _, covered = copy.unwrapped.scenario.benchmark_data(
                copy.unwrapped.world.agents[0], copy.unwrapped.world
            )
            assert int(info["covered"][i]) == covered
        bumps += int((rewards.view(agents, -1) - rewards.view(agents, -1).amax(0)).abs().sum() > 0)
    assert bumps or agents < 3


def test_agents_of_a_copy_are_in_one_place_with_one_physics():
    env = Spread(4, seed=0, agent_id=True, state="shared")
    config = {"size": {"uniform": [0.05, 0.3]}, "accel": [1.0, 2.0, 3.0, 4.0]}
    for _ in range(2):
        obs, _ = env.reset(config=config)
        for name in ("size", "accel"):
            rows = env.carry["parameters"][name].view(3, 4)
            assert torch.equal(rows, rows[:1].expand(3, 4))
            assert rows[0].unique().numel() == 4
        own = obs["obs"].view(3, 4, -1)
        where = own[..., 2:4].unsqueeze(2) + own[..., 4:10].unflatten(-1, (3, 2))
        torch.testing.assert_close(where, where[:1].expand_as(where))  # landmarks, as each agent sees them
        assert obs["agent_id"].view(3, 4).tolist() == [[0] * 4, [1] * 4, [2] * 4]
        for agent in range(3):
            assert torch.equal(obs["state"][f"agent_{agent}"].view(3, 4, -1)[2], own[agent])
    assert env.another(4).num_envs == 12


@pytest.mark.parametrize("own", [spaces.Tuple, lambda parts: spaces.Dict(dict(zip("01", parts, strict=True)))])
def test_what_agents_see_besides_joins_a_dict_and_stands_beside_a_tuple(own):
    """The tensors of either are a dict."""
    team = Team(["a", "b"], "Both", agent_id=True, state="shared")
    space = team.space(own((spaces.Box(-1.0, 1.0, (2,)), spaces.Discrete(3))))
    seen = flatten_tree("", team.see({"0": torch.zeros(4, 2), "1": torch.zeros(4)}))
    assert {"/".join(("", *path)): leaf.shape for path, leaf in leaves(space)} == {
        name: part.shape[1:] for name, part in seen.items()
    }


def test_a_run_counts_copies_measures_the_team_and_films_copies():
    algorithm = PPOConfig(num_envs=2, horizon=25, seed=0, device="cpu").build(Spread, team_return="sum")
    trainer = Trainer(algorithm, tracker=MemoryTracker(), checkpoints=False, num_eval_envs=5)
    trainer.run(max_steps=2, steps_per_eval=1, eval_env_config={"size": [0.1, 0.2, 0.1, 0.2, 0.1]}, progress="none")
    row = trainer.known
    assert (trainer.state["env/steps"], trainer.state["env/copy_steps"]) == (300, 100)
    assert row["eval/episodes/ended"] == 5
    own = [row[f"eval/episodes/agents/agent_{i}/returns/mean"] for i in range(3)]
    assert sum(own) == pytest.approx(row["eval/returns/mean"], rel=1e-5)
    params = trainer.params
    assert (params["num_envs"], params["num_eval_envs"], params["env.copies"]) == (2, 5, 2)
    assert params["env.agents"] == ["agent_0", "agent_1", "agent_2"]
    grid = trainer.evaluate_grid({"accel": [1.0, 5.0]}, episodes=3)
    assert grid["lengths"].tolist() == [25.0, 25.0]
    assert grid["returns"].nunique() == 2
    shown = film(algorithm.policy, Spread(3, seed=0, time_limit=6), ".gif", episodes=2)
    assert (shown.returns.shape, shown.lengths.tolist()) == ((2, 3), [[6] * 3] * 2)


class Told(Spread):
    """Two agents in two copies, of which the first has no value in the first."""

    metric_names = ("told",)

    def measure(self, state, parameters):
        return {"told": torch.tensor([math.nan, 1.0, 4.0, 9.0])}


def test_a_metric_of_the_environments_is_the_mean_of_a_copys_agents_in_training_and_evaluations():
    algorithm = PPOConfig(num_envs=2, horizon=6, seed=0, device="cpu").build(Told, num_agents=2, time_limit=6)
    trainer = Trainer(algorithm, tracker=MemoryTracker(), checkpoints=False, num_eval_envs=2)
    row, expected = trainer.step(), (4.0 + (1.0 + 9.0) / 2) / 2
    assert (row["episodes/ended"], row["episodes/info/told/mean"]) == (2, expected)
    assert trainer.eval()["eval/episodes/info/told/mean"] == expected


def test_a_curriculum_goes_by_the_returns_of_the_team():
    adaptive = Adaptive((0.1, 0.1), thresholds=(-2.0, -1.0), step=0.05, limits=(0.1, 0.4), episodes=4)
    build = functools.partial(Spread, team_return=lambda returns: returns.sum(1) * 0.0)
    algorithm = PPOConfig(num_envs=16, horizon=25, seed=0, device="cpu").build(build)
    for _ in range(3):
        algorithm.collect(env_config={"size": adaptive})
    assert algorithm.env.parameter_state.ranges()["size"][1] > 0.1
