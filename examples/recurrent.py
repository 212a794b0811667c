"""Train a policy with a memory: CartPole without velocities, which no policy can balance from one observation.

The difference to a feedforward policy is `model="gru"` and the length of the sequences that it trains on.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from gymnasium.spaces import Box
from torch import Tensor

from rl8x import Confirmed, HitsUpperBound, NullTracker, PPOConfig, Trainer
from rl8x.envs import CartPole


class MaskedCartPole(CartPole):
    """CartPole that shows where cart and pole are, not where they are going."""

    single_observation_space = Box(-np.inf, np.inf, (2,), np.float32)

    def observe(self, state: Mapping[str, Tensor], parameters: Mapping[str, Tensor]) -> Tensor:
        return state["physics"][:, ::2]


def main(max_steps: int = 128) -> float:
    config = PPOConfig(
        model="gru",
        model_config={"hidden_size": 64},
        normalize_observations=True,  # the angle is a tenth of the position
        seq_len=16,  # gradients go back 16 steps; the state itself goes on until the episode ends
        num_envs=64,
        horizon=32,
        gamma=0.99,
        lr=5e-3,
        sgd_minibatch_size=512,
        max_grad_norm=0.5,
        seed=0,
        num_threads=1,
        device="cpu",
    )
    trainer = Trainer(config.build(MaskedCartPole), tracker=NullTracker())
    # An evaluation is asked for only where the training's own episodes look good, and has the last word.
    remembers = Confirmed(HitsUpperBound("episodes/lengths/mean", 300))
    trainer.run(stop_conditions=[remembers], max_steps=max_steps)
    length = trainer.eval()["eval/episodes/lengths/mean"]
    print(f"the pole stays up for {length:.0f} steps; expected over 300, without a memory about 50")
    return length


if __name__ == "__main__":
    main()
