"""rl8's mountain car: the flag is found by chance in cars of many strengths, then reached by the standard one."""

from __future__ import annotations

from typing import Any

from rl8x import HitsUpperBound, NullTracker, PPOConfig, Trainer
from rl8x.envs import MountainCar
from rl8x.randomization import Uniform


def main(max_steps: int = 80) -> Any:
    config = PPOConfig.rl8(
        num_envs=256,
        horizon=64,
        gamma=0.99,
        gae_lambda=0.97,
        lr=1e-3,
        entropy_coeff=0.03,  # until the flag is found, every step is as good as any other
        sgd_minibatch_size=4096,
        normalize_observations=True,  # a velocity is a fiftieth of a position
        model_config={"hidden_sizes": [64, 64]},
        seed=0,
        num_threads=1,
        device="cpu",
    )
    trainer = Trainer(config.build(MountainCar), tracker=NullTracker())
    # The same names as in rl8, but checked: an unknown one or one out of bounds is refused, with the legal ones.
    training, standard = {"force": Uniform(0.001, 0.006)}, {"force": 0.001}
    solved = HitsUpperBound("eval/returns/mean", -130)
    stats = trainer.run(
        env_config=training, eval_env_config=standard, steps_per_eval=10, stop_conditions=[solved], max_steps=max_steps
    )
    print(f"the standard car takes {-stats['eval/returns/mean']:.0f} steps; expected below 130, at random 200")
    return stats


if __name__ == "__main__":
    main()
