"""`model_config={"separate": true}`: each agent has weights of its own, found by the place of its row."""

from __future__ import annotations

import gymnasium.spaces as spaces
import numpy as np
import pytest
import torch

from rl8x import MemoryTracker, PPOConfig, Trainer, load_algorithm, load_policy
from rl8x.envs import Env, Spread
from rl8x.envs.team import Team
from rl8x.models import MLPModel

OPTIONS = {"num_envs": 8, "horizon": 8, "seed": 0, "device": "cpu", "sgd_minibatch_size": 32, "execution": "eager"}


class Roles(Env):
    """Three agents that see nothing: the first gets 1 for action 0, the second for action 1, the third for action 2."""

    single_observation_space = spaces.Box(-1, 1, (1,), np.float32)
    single_action_space = spaces.Discrete(3)
    default_time_limit = 2

    def __init__(self, num_envs, *, agent_id=False, **options):
        self.team = Team(["a", "b", "c"], "Roles", agent_id=agent_id)
        self.single_observation_space = self.team.space(self.single_observation_space)
        super().__init__(num_envs, **options)

    def initial_state(self, parameters, noise):
        return {"seen": torch.zeros(self.num_envs, 1)}

    def transition(self, state, actions, parameters, noise):
        own = torch.arange(3).repeat_interleave(self.num_copies)
        return state, (actions == own).float(), torch.zeros(self.num_envs, dtype=torch.bool)

    def observe(self, state, parameters):
        return self.team.see(state["seen"])


@pytest.mark.parametrize("options", [{}, {"shared": True}, {"layer_norm": True, "activation": "tanh"}])
def test_a_stack_is_as_many_models_side_by_side(options):
    space, rows = spaces.Box(-1, 1, (4,), np.float32), 5
    stack = MLPModel(space, 2, hidden_sizes=[8, 8], separate=3, **options)
    obs, starts = torch.randn(2, 3 * rows, 4), torch.zeros(2, 3 * rows, dtype=torch.bool)
    features, values, _ = stack(obs, {}, starts)
    for agent in range(3):
        single = MLPModel(space, 2, hidden_sizes=[8, 8], **options)
        weights = dict(stack.named_parameters())
        for name, weight in single.named_parameters():
            of_all = weights[name.replace("_head.", "_head.0.")][agent]
            weight.data.copy_(of_all.T if weight.ndim == 2 else of_all[0])
        own = slice(agent * rows, (agent + 1) * rows)
        expected = single(obs[:, own], {}, starts[:, own])
        torch.testing.assert_close(features[:, own], expected[0])
        torch.testing.assert_close(values[:, own], expected[1])
    with pytest.raises(ValueError, match=r"each of 3 agents has weights of its own .* got 4"):
        stack(obs[:, :4], {}, starts[:, :4])


@pytest.mark.parametrize(
    ("options", "agent_id", "learns"),
    [
        ({"model_config": {"hidden_sizes": [8]}}, False, False),
        ({"model_config": {"hidden_sizes": [8]}}, True, True),
        ({"model_config": {"separate": True, "hidden_sizes": [8]}}, False, True),
        ({"model_config": {"separate": True, "hidden_sizes": [8]}, "recompute_advantages": True}, False, True),
        ({"model_config": {"separate": True, "hidden_sizes": [8]}, "sgd_minibatch_size": None}, False, True),
    ],
)
def test_agents_that_see_the_same_learn_different_things_by_weights_of_their_own(options, agent_id, learns):
    config = PPOConfig(**OPTIONS | {"lr": 0.05, "lr_schedule": None} | options)
    algorithm = config.build(Roles, agent_id=agent_id)
    trainer = Trainer(algorithm, tracker=MemoryTracker(), checkpoints=False, num_eval_envs=4)
    trainer.run(max_steps=6, progress="none")
    row = trainer.eval()
    assert (row["eval/returns/mean"] > 1.9) == learns
    assert trainer.params["env.policies"] == ("one each" if "separate" in algorithm.config.model_config else "shared")


def test_what_was_learned_acts_for_all_agents(tmp_path):
    config = PPOConfig(**OPTIONS, model_config={"separate": True, "hidden_sizes": [4]})
    obs = np.random.default_rng(0).normal(size=(6, 14)).astype(np.float32)
    for env in (Spread, lambda num_envs, **options: Spread(num_envs, **options)):
        folder = tmp_path / env.__name__
        trainer = Trainer(config.build(env), tracker=MemoryTracker(), checkpoints=folder)
        trainer.run(max_steps=2, progress="none")
        expected = trainer.algorithm.policy.decide(obs).actions
        assert (load_policy(folder, trust=True).decide(obs).actions == expected).all()
        assert (load_algorithm(folder, trust=True).policy.decide(obs).actions == expected).all()
