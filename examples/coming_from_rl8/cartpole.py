"""rl8's cartpole: cart and pole are brought to rest and kept there, and nothing ever ends (`CartPoleInfinite`)."""

from __future__ import annotations

from typing import Any

from rl8x import HitsUpperBound, NullTracker, Plateau, PPOConfig, Trainer
from rl8x.envs import CartPoleInfinite


def main(max_steps: int = 60) -> Any:
    config = PPOConfig.rl8(
        num_envs=256,
        horizons_per_env_reset=2,  # 64 steps, then every copy starts again: a truncation, which is bootstrapped
        lr=3e-3,
        sgd_minibatch_size=2048,
        model_config={"hidden_sizes": [64, 64]},
        seed=0,
        num_threads=1,
        device="cpu",
    )
    trainer = Trainer(config.build(CartPoleInfinite), tracker=NullTracker())
    # rl8's conditions saw training's metrics alone; these see what evaluations measure, and count each one once.
    stops = [HitsUpperBound("eval/returns/mean", -12.0), Plateau("eval/returns/mean", patience=5, rtol=0.01)]
    stats = trainer.run(steps_per_eval=4, stop_conditions=stops, max_steps=max_steps)
    result = stats["eval/returns/mean"]
    print(f"return of 32 steps {result:.2f}, stopped by {stats.stop_reason}; expected above -12, untrained about -100")
    return stats


if __name__ == "__main__":
    main()
