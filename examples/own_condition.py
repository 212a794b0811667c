"""Write a stop condition: a class where something has to be remembered, any callable where not."""

from __future__ import annotations

from typing import Any

from rl8x import Condition, HitsUpperBound, NullTracker, PPOConfig, Trainer
from rl8x.envs import CartPole
from rl8x.trainers import TrainStats


class Grows(Condition):
    """Met when a metric is so many times what it was at first."""

    def __init__(self, name: str, times: float) -> None:
        self.name, self.times = name, times
        self.first: float | None = None  # goes into checkpoints: a resumed run goes on from it

    def judge(self, stats: Any) -> bool | None:
        if self.name not in stats:
            return None  # not measured in this row: neither met nor unmet, also under ~
        self.first = stats[self.name] if self.first is None else self.first
        return stats[self.name] >= self.times * self.first

    def start(self) -> None:
        self.first = None  # a new run begins

    @property
    def metric_names(self) -> set[str]:
        return {self.name}  # checked before training: a misspelt name is refused, with the nearest ones

    def arguments(self) -> dict[str, Any]:
        return {"name": self.name, "times": self.times}  # for the repr, which is the reason for stopping


def diverges(stats: Any) -> bool:
    return stats["monitors/kl_div"] > 1.0


def main(max_steps: int = 60) -> TrainStats:
    small = {"hidden_sizes": [64, 64]}
    config = PPOConfig(num_envs=64, lr=5e-3, model_config=small, seed=0, num_threads=1, device="cpu")
    trainer = Trainer(config.build(CartPole), tracker=NullTracker())
    grown = Grows("episodes/lengths/mean", times=2) & HitsUpperBound("env/steps", 10_000)
    stats = trainer.run(stop_conditions=[grown, diverges], max_steps=max_steps)
    print(f"stopped by {stats.stop_reason}; expected And(Grows(...), HitsUpperBound(...)) within 20 steps")
    return stats


if __name__ == "__main__":
    main()
