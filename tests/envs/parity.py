"""Compare an environment with Gymnasium's own class, one copy at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np
import torch
from torch import Tensor

from rl8x.envs.base import Env

NUM_STATES = 1000


def check_parity(
    env: Env,
    reference: gymnasium.Env[Any, Any],
    states: np.ndarray,
    actions: np.ndarray,
    to_state: Callable[[Tensor], dict[str, Tensor]],
    set_copy: Callable[[Any, int], None] | None = None,
    *,
    atol: float = 1e-5,
) -> tuple[Tensor, Tensor]:
    """Step every state once in both and compare observation, reward and termination.

    Args:
        env: The environment, of `len(states)` copies, already reset with its parameters.
        reference: Gymnasium's environment, unwrapped.
        states: Physical states as the reference has them, `[num_states, size]`, float32 values.
        actions: One action a state.
        to_state: From the states to the environment's state.
        set_copy: Sets the reference's attributes to the parameters of a copy.
        atol: Absolute tolerance, and relative tolerance where values exceed 1.

    Returns:
        Rewards and terminations, for further checks.
    """
    expected_obs, expected_rewards, expected_terminated = [], [], []
    reference.reset(seed=0)
    for i, (state, action) in enumerate(zip(states.astype(np.float64), actions, strict=True)):
        if set_copy is not None:
            set_copy(reference, i)
        reference.state = state.copy()  # type: ignore[attr-defined]
        obs, reward, terminated, truncated, _ = reference.step(action)
        assert not truncated
        expected_obs.append(np.asarray(obs, dtype=np.float64))
        expected_rewards.append(float(reward))
        expected_terminated.append(terminated)
    state = to_state(torch.from_numpy(states.astype(np.float32)))
    parameters = env.carry["parameters"]
    after, rewards, terminated = env.transition(
        state, torch.from_numpy(actions), parameters, torch.empty(len(states), 0)
    )
    obs = env.observe(after, parameters)
    assert terminated.tolist() == expected_terminated
    np.testing.assert_allclose(rewards.numpy(), expected_rewards, rtol=1e-5, atol=atol)
    np.testing.assert_allclose(obs.numpy(), np.array(expected_obs), rtol=1e-5, atol=atol)
    return rewards, terminated


def check_time_limit(env_class: type[Env], gymnasium_id: str) -> None:
    """Compare the step at which an episode that does not end is truncated with Gymnasium's."""
    limit = gymnasium.spec(gymnasium_id).max_episode_steps
    assert env_class.default_time_limit == limit
    env = env_class(3, seed=0)
    env.reset()
    carry = env.carry | {"elapsed": torch.tensor([0, limit - 2, limit - 1])}
    noise = env.noise(1)[0]
    actions = torch.as_tensor(np.stack([env.single_action_space.sample() for _ in range(3)]))
    carry, step = env.advance(carry, actions, noise)
    assert step.truncated.tolist() == [False, False, True]
    assert step.episode_lengths.tolist() == [1, limit - 1, limit]
    assert carry["elapsed"].tolist() == [1, limit - 1, 0]
