"""rl8x environments for other libraries: Gymnasium's vector API in arrays instead of tensors."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from torch import Tensor

from rl8x.envs.base import Env
from rl8x.envs.registry import make
from rl8x.spaces import element_of
from rl8x.trees import tree_map


class NumpyEnv(gymnasium.vector.VectorWrapper):
    """An rl8x environment whose observations, rewards and flags are arrays, with Gymnasium's own form of `info`.

    Gymnasium's vector wrappers, and libraries that train on its vector environments, accept it directly. When an
    episode ends, `info["final_obs"]` holds an array of objects, the observation before the reset or None, and
    `info["final_info"]["episode"]` the episode's return `r` and length `l`.

    Args:
        env: The environment; seeds, time limit and `env_config` are its own.

    Raises:
        TypeError: If it is not an rl8x environment.
    """

    def __init__(self, env: Env) -> None:
        if not isinstance(env, Env):
            raise TypeError(f"NumpyEnv: `env` must be an rl8x Env, such as make('CartPole', 8); got {env!r}.")
        super().__init__(env)

    def reset(
        self, *, seed: int | list[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Start an episode in every copy; return the first observations, `[num_envs, ...]`, and an empty info.

        Args:
            seed: One seed for all of them; None continues its stream.
            options: Part of Gymnasium's signature; ignored.

        Raises:
            ValueError: If it is a list of seeds.
        """
        if isinstance(seed, list):
            raise ValueError("NumpyEnv: rl8x environments take one seed for all copies; got a list.")
        obs, _ = self.env.reset(seed=seed, options=options)
        return self._arrays(obs), {}

    def step(self, actions: Any) -> tuple[Any, np.ndarray, np.ndarray, np.ndarray, dict[str, Any]]:
        """Take one step in every copy.

        Args:
            actions: Actions of the space, `[num_envs, ...]`.

        Returns:
            Observations, rewards float32, terminated and truncated bool, as arrays `[num_envs, ...]`, and the info.
        """
        obs, rewards, terminated, truncated, info = self.env.step(actions)
        done = _array(info["_final_obs"])
        infos: dict[str, Any] = {}
        if done.any():
            space, final = self.single_observation_space, tree_map(_array, info["final_obs"])
            objects = np.full(self.num_envs, None, dtype=object)
            for row in done.nonzero()[0].tolist():
                objects[row] = element_of(space, final, lambda _, part, row=row: part[row])  # type: ignore[misc]
            episode = {key: np.where(done, _array(info["episode"][key]), 0) for key in ("r", "l")}
            reported = {"episode": episode | {"_r": done, "_l": done}, "_episode": done}
            infos = {"final_obs": objects, "_final_obs": done, "final_info": reported, "_final_info": done}
        numbers = (_array(part) for part in (rewards, terminated, truncated))
        return self._arrays(obs), *numbers, infos

    def _arrays(self, obs: Any) -> Any:
        """Return observations as arrays, in the structure of the batched space."""
        return element_of(self.single_observation_space, obs, lambda _, part: _array(part))


def _array(part: Tensor) -> np.ndarray:
    """Return a copy, as an array that shares memory with a CPU tensor might change in the next step."""
    array: np.ndarray = part.detach().to("cpu", copy=True).numpy()
    return array


def make_vector_env(name: str, num_envs: int = 1, **kwargs: Any) -> NumpyEnv:
    """Make a built-in environment in arrays: an entry point for `gymnasium.register(..., vector_entry_point=...)`."""
    return NumpyEnv(make(name, num_envs, **kwargs))
