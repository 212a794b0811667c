"""Write a model that chooses from a set: a walker visits up to six places in any order, each once, by a short way."""

import gymnasium.spaces as spaces
import torch
from torch import Tensor, nn

from rl8x import Env, Model, NullTracker, PPOConfig, Trainer
from rl8x.nn import Perceiver, PointerNetwork, masked_mean


class Visit(Env):
    """Places as the walker sees them; an action is the next one of those left, and the reward minus the way to it."""

    places, flags = spaces.Box(-2, 2, (6, 2)), spaces.MultiBinary(6)
    single_observation_space = spaces.Dict({"places": places, "left": flags, "action_mask": flags})
    single_action_space = spaces.Discrete(6)
    terminates, reset_noise = True, 18

    def initial_state(self, parameters, noise) -> dict[str, Tensor]:
        left = (noise[:, :6] < 0.8) | (torch.arange(6) == 0)  # at least one
        return {"places": noise[:, 6:].unflatten(1, (6, 2)) - 0.5, "left": left.to(torch.int8)}

    def transition(self, state, actions, parameters, noise) -> tuple[dict[str, Tensor], Tensor, Tensor]:
        way = state["places"][torch.arange(len(actions)), actions]  # [num_envs, 2]
        left = state["left"] * (torch.arange(6) != actions.unsqueeze(1))
        return {"places": state["places"] - way.unsqueeze(1), "left": left}, -way.norm(dim=-1), ~left.any(1)

    def observe(self, state, parameters) -> dict[str, Tensor]:
        return {**state, "action_mask": state["left"]}


class SetModel(Model):
    """A Perceiver reads the places that are left, and a pointer network scores each as the next."""

    def __init__(self, observation_space, num_features: int, width: int = 32) -> None:
        super().__init__(observation_space, num_features)
        self.perceiver = Perceiver(2, num_latents=1, width=width)
        self.pointer = PointerNetwork(2, query_width=width, hidden_size=width)
        self.value = nn.Linear(width + 2, 1)

    def forward(self, obs, state, starts) -> tuple[Tensor, Tensor, dict]:
        places, left = obs["places"], obs["left"].bool()  # [T, B, 6, 2], [T, B, 6]
        summary = self.perceiver(places.flatten(0, 1), left.flatten(0, 1)).view(*left.shape[:2], -1)  # [T, B, width]
        distance = masked_mean(places.abs(), left.unsqueeze(-1), dim=-2)  # [T, B, 2]
        return self.pointer(summary, places, left), self.value(torch.cat([summary, distance], -1)).squeeze(-1), state


def main(max_steps: int = 30) -> float:
    small = {"num_envs": 256, "horizon": 8, "sgd_minibatch_size": 512, "num_threads": 1, "device": "cpu"}
    config = PPOConfig(model=SetModel, gamma=1.0, lr=3e-3, seed=0, **small)
    trainer = Trainer(config.build(Visit), tracker=NullTracker())
    trainer.run(max_steps=max_steps)
    way = -trainer.eval()["eval/returns/mean"]
    print(f"a way of {way:.2f}; expected below 2.0, at random 2.5")
    return way


if __name__ == "__main__":
    main()
