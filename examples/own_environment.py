"""Write an environment: three pure functions over tensors of `[num_envs, ...]`. Here a jet keeps a ball at a height."""

from __future__ import annotations

from collections.abc import Mapping

import gymnasium.spaces as spaces
import numpy as np
import torch
from torch import Tensor

from rl8x import Env, NullTracker, Parameter, PPOConfig, Trainer


class Hover(Env):
    """Keep a ball at height 0 with a jet below it; rewards are minus the distance, and beyond 3 m the episode ends."""

    single_observation_space = spaces.Box(-np.inf, np.inf, (2,), np.float32)
    single_action_space = spaces.Box(-1.0, 1.0, (1,), np.float32)
    parameters = {
        "gravity": Parameter(default=9.8, low=1.0, high=20.0, unit="m/s^2", description="gravitational acceleration"),
        "thrust": Parameter(default=20.0, low=1.0, high=50.0, unit="m/s^2", description="acceleration by the full jet"),
    }
    default_time_limit = 100
    terminates = True
    reset_noise = 2  # uniform numbers that a copy needs to start an episode

    def initial_state(self, parameters: Mapping[str, Tensor], noise: Tensor) -> dict[str, Tensor]:
        return {"height": noise[:, 0] * 2 - 1, "speed": noise[:, 1] * 2 - 1}

    def transition(self, state, actions, parameters, noise) -> tuple[dict[str, Tensor], Tensor, Tensor]:
        jet = (actions[:, 0].clamp(-1, 1) + 1) / 2 * parameters["thrust"]
        speed = state["speed"] + 0.05 * (jet - parameters["gravity"])
        height = state["height"] + 0.05 * speed
        out = height.abs() > 3.0
        rewards = -height.abs() - 10.0 * out
        return {"height": height, "speed": speed}, rewards, out

    def observe(self, state: Mapping[str, Tensor], parameters: Mapping[str, Tensor]) -> Tensor:
        return torch.stack((state["height"], state["speed"]), dim=-1)


def main(max_steps: int = 30) -> dict[str, float]:
    small = {"hidden_sizes": [64, 64]}
    config = PPOConfig(num_envs=128, horizon=16, lr=3e-3, num_sgd_iters=16, model_config=small, seed=0, device="cpu")
    # build() checks the three functions and the spaces against each other, and says which one is wrong.
    trainer = Trainer(config.build(Hover), tracker=NullTracker())
    before = trainer.eval()["eval/returns/mean"]
    trainer.run(max_steps=max_steps)
    after = trainer.eval()["eval/returns/mean"]
    heavy = trainer.eval(env_config={"gravity": 12.0})["eval/returns/mean"]
    print(f"return {before:.0f} before, {after:.0f} after, {heavy:.0f} under gravity 12; expected above -20 after")
    return {"before": before, "after": after, "heavy": heavy}


if __name__ == "__main__":
    main()
