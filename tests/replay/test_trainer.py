"""A replay in a run: killed and resumed, damaged, and gone on with."""

import dataclasses
import os
import warnings

import pytest
import torch
from tests.trainers.test_offline import Regression, RegressionConfig, weights
from tests.trainers.test_resume import Killed, killed_at, rows, run

from rl8x import keys
from rl8x.algorithms import DQNConfig
from rl8x.algorithms.hyperparameters import option
from rl8x.checkpoint import Checkpoints, listed
from rl8x.cli.main import main
from rl8x.envs import CartPole
from rl8x.replay import ring as segmentation
from rl8x.replay.prioritized import PrioritizedReplay
from rl8x.rollouts.statistics import Stats
from rl8x.tracking import MemoryTracker, NullTracker
from rl8x.trainers import Trainer


@dataclasses.dataclass(frozen=True, kw_only=True)
class RememberingConfig(RegressionConfig):
    capacity: int = option(100, "Rows that are remembered.", low=1)


class Remembering(Regression, config=RememberingConfig):
    """Fits values to what is drawn from a replay, to which each step adds rows."""

    def __init__(self, config, env, seed, env_factory=None):
        super().__init__(config, env, seed, env_factory)
        self.replay = PrioritizedReplay(config.capacity, "cpu")

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
