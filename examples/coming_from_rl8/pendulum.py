"""rl8's pendulum: swing a pendulum up with a bounded torque, by a squashed normal distribution with an entropy."""

from __future__ import annotations

from typing import Any

from rl8x import Confirmed, HitsUpperBound, NullTracker, PPOConfig, Trainer
from rl8x.envs import Pendulum


def main(max_steps: int = 96) -> Any:
    config = PPOConfig.rl8(
        num_envs=64,
        gamma=0.98,
        gae_lambda=0.9,
        lr=4e-3,
        sgd_minibatch_size=512,
        entropy_coeff=1e-3,  # rl8's SquashedNormal had no entropy to reward
        distribution="squashed_normal",
        model_config={"hidden_sizes": [64, 64]},
        seed=0,
        num_threads=1,
        device="cpu",
    )
    trainer = Trainer(config.build(Pendulum), tracker=NullTracker())
    # Training episodes that look good ask for an evaluation of whole episodes, which has the last word.
    solved = Confirmed(HitsUpperBound("episodes/returns/mean", -250))
    stats = trainer.run(stop_conditions=[solved], max_steps=max_steps)
    stats = trainer.eval()
    print(f"return of an episode {stats['eval/returns/mean']:.0f}; expected above -250, untrained about -1200")
    return stats


if __name__ == "__main__":
    main()
