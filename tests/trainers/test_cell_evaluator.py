"""All cells at once give what each gives by itself, whichever way the copies are put together."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from rl8x import NullTracker, PPOConfig, Trainer
from rl8x.envs import CartPole
from rl8x.envs.cells import make_cells
from rl8x.trainers.cell_evaluator import CellEvaluator, seed_of

SMALL = {"num_envs": 16, "horizon": 16, "seed": 0, "device": "cpu", "model_config": {"hidden_sizes": [16]}}
CELLS = make_cells({"length": [0.1, 0.5, 2.0], "gravity": [2, 20]}, None, 0)


@pytest.fixture(scope="module")
def trained():
    algorithm = PPOConfig.rl8(**SMALL).build(CartPole)
    Trainer(algorithm, tracker=NullTracker(), checkpoints=False).run(max_steps=5, progress="none")
    return algorithm


def by_hand(algorithm, cell, noise, limit=600):
    """Play one copy's first episode by the environment's own `step`: a second formulation."""
    env = CartPole(1, seed=0)
    state_noise = iter(noise)
    env.noise = lambda steps: next(state_noise).view(1, 1, -1)
    obs, _ = env.reset(config=cell)
    total = length = 0
    policy = algorithm.policy
    with torch.no_grad():
        for _ in range(limit):
            act = policy.act(obs, policy.initial_state(1), torch.zeros(1, dtype=torch.bool), None)
            obs, rewards, terminated, truncated, _ = env.step(act.actions)
            total, length = total + float(rewards), length + 1
            if bool(terminated | truncated):
                break
    return total, length


def test_returns_are_those_of_the_episodes_played_one_by_one(trained):
    measured = CellEvaluator(trained, CELLS, episodes=2, seed=7).evaluate()
    for index in range(len(measured.returns)):
        cell = {name: float(values[index]) for name, values in CELLS.items()}
        generator = torch.Generator().manual_seed(seed_of(7, index))
        first = torch.rand((1, 2, 4), generator=generator)
        chunks = torch.cat([torch.rand((16, 2, 4), generator=generator) for _ in range(38)])
        played = [by_hand(trained, cell, [first[0, copy], *chunks[:, copy]]) for copy in range(2)]
        returns, lengths = np.array(played).T
        assert measured.returns[index] == returns.mean()
        assert measured.lengths[index] == lengths.mean()
        assert measured.returns_min[index] == returns.min()
        assert measured.returns_std[index] == pytest.approx(returns.std())


def test_a_cell_is_the_same_in_any_batch(trained):
    whole = CellEvaluator(trained, CELLS, episodes=5, seed=1).evaluate()
    pieces = CellEvaluator(trained, CELLS, episodes=5, seed=1, copies=12).evaluate()  # two cells at once
    single = CellEvaluator(trained, CELLS, episodes=5, seed=1, copies=1).evaluate()  # one
    for name in ("returns", "returns_std", "returns_min", "lengths"):
        assert (getattr(whole, name) == getattr(pieces, name)).all()
        assert (getattr(whole, name) == getattr(single, name)).all()
    fewer = {name: values[:2] for name, values in CELLS.items()}
    assert (CellEvaluator(trained, fewer, episodes=5, seed=1).evaluate().returns == whole.returns[:2]).all()
    assert (CellEvaluator(trained, CELLS, episodes=5, seed=2).evaluate().returns != whole.returns).any()


def test_the_training_notices_nothing(trained):
    def run(evaluates):
        algorithm = PPOConfig(**SMALL).build(CartPole)
        trainer = Trainer(algorithm, tracker=NullTracker(), checkpoints=False)
        for _ in range(2):
            trainer.step()
            if evaluates:
                CellEvaluator(algorithm, CELLS, episodes=2).evaluate()
        return torch.cat([value.reshape(-1) for value in algorithm.policy.state_dict().values()])

    assert torch.equal(run(False), run(True))


def test_a_policy_with_a_memory_is_tested_as_it_acts():
    from rl8x.models import GRUModel

    config = PPOConfig(**{**SMALL, "model": GRUModel, "model_config": {"hidden_size": 8}, "seq_len": 8})
    algorithm = config.build(CartPole)
    whole = CellEvaluator(algorithm, CELLS, episodes=2).evaluate()
    assert (CellEvaluator(algorithm, CELLS, episodes=2, copies=2).evaluate().returns == whole.returns).all()


def test_episodes_that_are_cut_off_are_told_once(trained, monkeypatch):
    monkeypatch.setattr("rl8x.trainers.cell_evaluator._MAX_STEPS", 5)
    evaluator = CellEvaluator(trained, CELLS, episodes=2, copies=4)
    with pytest.warns(UserWarning, match="4 of 4 test episodes had not ended after 5 steps; they are counted") as told:
        assert evaluator.evaluate().lengths.tolist() == [5.0] * 6
    assert len(told) == 1


class Few(CartPole):
    max_num_envs = 6


def test_no_more_copies_are_made_than_an_environment_takes(trained):
    made = []

    def factory(num_envs, **kwargs):
        made.append(num_envs)
        return Few(num_envs, **kwargs)

    few = CellEvaluator(trained, CELLS, episodes=4, seed=1, env_factory=factory).evaluate()
    assert set(made) == {1, 4}  # one cell at a time
    assert (few.returns == CellEvaluator(trained, CELLS, episodes=4, seed=1).evaluate().returns).all()


def test_what_cannot_be_tested_is_refused(trained):
    with pytest.raises(ValueError, match="never end"):
        CellEvaluator(trained, CELLS, episodes=1, env_factory=Never)
    instance = PPOConfig(**SMALL).build(CartPole(16))
    with pytest.raises(ValueError, match="from a class or a name"):
        CellEvaluator(instance, CELLS, episodes=1)


class Never(CartPole):
    terminates = False
    default_time_limit = None
