"""The place of an environment that cannot be made again, for an algorithm that only acts."""

from __future__ import annotations

from typing import Any, NoReturn

import gymnasium
import torch

from rl8x.envs.base import Env


class StandIn(Env):
    """Copies that have spaces alone: no episode can begin.

    Args:
        num_envs: Number of copies.
        observation_space: Space of one copy's observation.
        action_space: Space of one copy's action.
        episodic: Whether episodes of the environment can end.
        problem: Why the environment itself is not here, for the error message.
        device: Where it is said to be.
    """

    capturable = False

    def __init__(
        self,
        num_envs: int,
        observation_space: gymnasium.Space[Any],
        action_space: gymnasium.Space[Any],
        *,
        episodic: bool,
        problem: str,
        device: torch.device | str = "cpu",
    ) -> None:
        self.single_observation_space, self.single_action_space = observation_space, action_space
        self.terminates, self.problem = episodic, problem  # type: ignore[misc] # other classes always do, or never
        super().__init__(num_envs, device=device)

    def initial_state(self, *_: Any) -> NoReturn:
        """Refuse to begin episodes.

        Raises:
            RuntimeError: Always.
        """
        raise RuntimeError(
            f"this algorithm was loaded to act, without its environment: {self.problem}. Give load_algorithm `env`."
        )
