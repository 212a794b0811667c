"""A replay in a run: killed and resumed, damaged, and gone on with."""

import dataclasses
import os
import warnings

import pytest
import torch
from tests.trainers.test_resume import Killed, killed_at, rows, run

from rl8x import keys
from rl8x.algorithms import AlgorithmConfig, DQNConfig, GenericAlgorithmBase
from rl8x.algorithms.hyperparameters import option
from rl8x.algorithms.seeds import part_seed
from rl8x.checkpoint import Checkpoints, listed
from rl8x.cli.main import main
from rl8x.envs import CartPole
from rl8x.policy import Policy
from rl8x.replay import ring as segmentation
from rl8x.replay.prioritized import PrioritizedReplay
from rl8x.rollouts.statistics import Stats
from rl8x.tracking import MemoryTracker, NullTracker
from rl8x.trainers import Trainer


@dataclasses.dataclass(frozen=True, kw_only=True)
class RememberingConfig(AlgorithmConfig):
    lr: float = option(1e-2, "Learning rate.", above=0.0)
    capacity: int = option(100, "Rows that are remembered.", low=1)


class Remembering(GenericAlgorithmBase[RememberingConfig], config=RememberingConfig):
    """Fits values to what is drawn from a replay, to which each step adds rows."""

    metrics = ("losses/total",)

    def __init__(self, config, env, seed, env_factory=None):
        super().__init__(config, env, seed, env_factory)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(part_seed(seed, "weights"))
            spaces = CartPole(1).single_observation_space, CartPole(1).single_action_space
            self.policy = Policy(*spaces, model_config={"hidden_sizes": [8]})
        self.generator = torch.Generator().manual_seed(part_seed(seed, "batch"))
        self.optimizer = torch.optim.SGD(self.policy.parameters(), lr=config.lr)
        self.replay = PrioritizedReplay(config.capacity, "cpu")

    def learned_state(self):
        return {"policy": self.policy.state_dict(), "generator": self.generator.get_state()}

    def load_learned_state(self, state):
        self.policy.load_state_dict(state["policy"])
        self.generator.set_state(state["generator"])

    def step(self):
        obs = torch.randn(17, 4, generator=self.generator)
        self.replay.append({"obs": obs, "returns": obs.sum(1)})
        index = self.replay.sample(1, 16, self.generator)
        batch = self.replay.gather(index[0])
        values = self.policy.values(batch["obs"], {}, torch.zeros(16, dtype=torch.bool))
        errors = values - batch["returns"]
        loss = (self.replay.weights(index, 0.5)[0] * errors.square()).mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.replay.update(index, errors.unsqueeze(0))
        self.counters[keys.UPDATES] += 1
        self.counters[keys.STEPS] += 1
        return Stats({"losses/total": loss})

    def state_dict(self):
        return {**super().state_dict(), "replay": self.replay.state_dict()}

    def load_state_dict(self, state):
        super().load_state_dict(state)
        self.replay.load_state_dict(state["replay"])


def weights(trainer):
    return torch.cat([weight.detach().flatten() for weight in trainer.algorithm.policy.parameters()])


@pytest.fixture(autouse=True)
def _small_segments(monkeypatch):
    monkeypatch.setattr(segmentation, "_ROWS", 8)


def make(**options):
    algorithm = RememberingConfig(seed=3, device="cpu").build()
    return Trainer(algorithm, **({"tracker": MemoryTracker()} | options))


def test_a_killed_and_resumed_run_gives_the_same_bits(tmp_path):
    killed = 9  # when the ring is full
    straight = make()
    run(straight, max_steps=14)
    first = make(checkpoints=Checkpoints(tmp_path, every_steps=2), callbacks=[killed_at(killed)])
    with pytest.raises(Killed):
        run(first, max_steps=14)
    second = Trainer.resume(tmp_path, tracker=first.tracker)
    assert second.state[keys.STEPS] == killed - 1
    run(second)
    assert torch.equal(weights(second), weights(straight))
    one, other = (trainer.algorithm.replay.as_tensordict() for trainer in (second, straight))
    assert len(one) == 100
    assert (one == other).all()
    assert rows(first.tracker) == rows(straight.tracker)
    last, before = listed(tmp_path)[-1], listed(tmp_path)[-2]
    shared = {file.name for file in last.glob("*.segment.pt")} & set(os.listdir(before))
    assert shared
    assert all((last / name).samefile(before / name) for name in shared)


def test_a_damaged_segment_is_one_line_on_the_command_line(tmp_path, capsys):
    run(make(checkpoints=Checkpoints(tmp_path, every_steps=2), tracker=NullTracker()), max_steps=4)
    newest = listed(tmp_path)[-1]
    segment = max(newest.glob("*.segment.pt"))
    for damage, message in (
        (lambda: segment.write_bytes(b"damaged"), "does not have the digest that was written"),
        (segment.unlink, "is missing"),
    ):
        damage()
        assert main(["resume", str(tmp_path)]) == 2
        error = capsys.readouterr().err
        assert error.count("\n") == 1
        assert f"{newest} cannot be used: {segment.name} {message}" in error


def test_rows_keep_their_returns_where_a_resume_changes_what_returns_are(tmp_path):
    options = {"num_envs": 4, "horizon": 4, "warmup_steps": 8, "batch_size": 8, "seed": 3, "device": "cpu"}
    options |= {"model_config": {"hidden_sizes": [8]}, "buffer_size": 100, "n_step": 1, "gamma": 0.5}
    first = Trainer(DQNConfig(**options).build(CartPole), tracker=NullTracker(), checkpoints=tmp_path, eval_env=False)
    run(first, max_steps=2)
    stored = first.algorithm.replay.as_tensordict()
    says = "the 32 rows of the replay keep the returns of n_step=1 and gamma=0.5; rows from here on have n_step=3 and "
    with pytest.warns(RuntimeWarning, match=f"{says}gamma=0.9, and replace the others within 100 transitions"):
        second = Trainer.resume(tmp_path, overrides={"gamma": 0.9, "n_step": 3})
    run(second, max_steps=4)
    rows_now = second.algorithm.replay.as_tensordict()
    assert torch.equal(rows_now["discounts"][:32], stored["discounts"])
    assert {0.5} == {*stored["discounts"][stored["discounts"] > 0].tolist()}
    assert rows_now["discounts"][32:].max() == pytest.approx(0.9**3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Trainer.resume(tmp_path)  # nothing changes now
        Trainer.resume(tmp_path, overrides={"lr": 1e-4})
