"""Train CartPole with PPO until its return stops moving, tracked in MLflow: `rl8x ui` shows the run.

The three lines of every script: a config builds an algorithm, a trainer drives it, a condition stops it.
"""

from __future__ import annotations

from rl8x import HitsUpperBound, Plateau, PPOConfig, Trainer
from rl8x.envs import CartPole
from rl8x.tracking import Tracker
from rl8x.trainers import TrainStats


def main(max_steps: int | None = None, tracker: Tracker | None = None) -> TrainStats:
    config = PPOConfig(seed=0, num_threads=1, device="cpu")
    trainer = Trainer(config.build(CartPole), tracker=tracker)
    # `eval/...` is measured by whole episodes, deterministic, in an environment that training never touches.
    solved_and_flat = HitsUpperBound("eval/returns/mean", 450) & Plateau("eval/returns/mean", patience=2, rtol=0.05)
    stats = trainer.run(
        steps_per_eval=5,
        stop_conditions=[solved_and_flat, HitsUpperBound("env/steps", 200_000)],
        max_steps=max_steps,
    )
    print(f"stopped by {stats.stop_reason}")
    print(f"the pole stays up for {trainer.eval()['eval/episodes/lengths/mean']:.0f} steps; expected about 500")
    return stats


if __name__ == "__main__":
    main()
