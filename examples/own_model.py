"""Write a model and an action distribution.

A model maps observations to features and values; a distribution makes actions of features.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from rl8x import Model, NullTracker, PPOConfig, Trainer
from rl8x.distributions import Categorical
from rl8x.envs import CartPole


class Fourier(Model):
    """Sines of random projections of the observation under two linear heads."""

    def __init__(self, observation_space: Any, num_features: int, *, width: int = 256) -> None:
        super().__init__(observation_space, num_features)
        self.register_buffer("projection", torch.randn(*observation_space.shape, width))
        self.policy, self.value = nn.Linear(width, num_features), nn.Linear(width, 1)

    def forward(self, obs: Tensor, state: dict, starts: Tensor) -> tuple[Tensor, Tensor, dict]:
        waves = (obs @ self.projection).sin()  # [T, B, width]
        return self.policy(waves), self.value(waves).squeeze(-1), state  # a feedforward model has no state


class Careful(Categorical):
    """A distribution in which no action of two has less than 1 percent: its logits are within +-2.3."""

    def from_features(self, features: Tensor, mask: Tensor | None = None) -> Any:
        return super().from_features(2.3 * torch.tanh(features), mask)


def main(max_steps: int = 60) -> float:
    config = PPOConfig(
        model=Fourier,
        model_config={"width": 128},
        distribution=Careful,
        num_envs=64,
        gamma=0.99,
        lr=1e-2,
        sgd_minibatch_size=512,
        seed=0,
        num_threads=1,
        device="cpu",
    )
    trainer = Trainer(config.build(CartPole), tracker=NullTracker())
    trainer.run(max_steps=max_steps)
    length = trainer.eval()["eval/episodes/lengths/mean"]
    print(f"the pole stays up for {length:.0f} steps; expected over 100")
    return length


if __name__ == "__main__":
    main()
