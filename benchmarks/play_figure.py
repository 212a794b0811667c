"""The film in README.md and docs/playing.md: one policy, trained on poles of random lengths, on three of them.

    python -m benchmarks.play_figure

Writes docs/images/playing.gif, and fails where it is larger than a page should have to load.
"""

from __future__ import annotations

from pathlib import Path

from rl8x import HitsUpperBound, NullTracker, PPOConfig, Trainer
from rl8x.envs import CartPole
from rl8x.randomization import Uniform

TARGET = Path(__file__).parents[1] / "docs" / "images" / "playing.gif"
MAX_BYTES = 300_000
LENGTHS = [0.2, 0.5, 1.1]


def main(max_env_steps: int = 163_840, film_steps: int = 230) -> None:
    """Train, film, and write the film."""
    schedule = {"kind": "interp", "points": [[0, 1e-2], [max_env_steps, 0.0]]}
    config = PPOConfig(
        num_envs=64,
        horizon=32,
        gamma=0.99,
        lr_schedule=schedule,
        sgd_minibatch_size=512,
        max_grad_norm=0.5,
        model_config={"hidden_sizes": [64, 64]},
        device="cpu",
        seed=0,
    )
    trainer = Trainer(config.build(CartPole), tracker=NullTracker(), checkpoints=False, num_eval_envs=64)
    trainer.run(
        env_config={"length": Uniform(0.1, 1.3)},
        eval_env_config={"length": (LENGTHS * 22)[:64]},
        steps_per_eval=8,
        stop_conditions=[HitsUpperBound("env/steps", max_env_steps)],
    )
    film = trainer.play(env_config={"length": LENGTHS}, max_steps=film_steps, seed=4)
    if len(film.data) > MAX_BYTES:
        raise SystemExit(f"the film has {len(film.data):,} bytes, more than {MAX_BYTES:,}: give it fewer steps")
    film.save(TARGET)
    print(f"{TARGET}: {film.num_frames} frames, {len(film.data):,} bytes, returns {film.returns.tolist()}")


if __name__ == "__main__":
    main()
